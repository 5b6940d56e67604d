"""What this process asks of the kernel: to die with its parent, and other signal handlers."""

import atexit
import ctypes
import gc
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # each asks a run to end

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process when the one that forked it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def leave_at_once() -> None:
    """Let the interpreter leave without a last look for garbage: among torch's objects that takes
    one to two seconds, after all is said and done."""
    atexit.register(gc.freeze)


def ignore_stop_signals() -> None:
    """Ignore them from here to the end: what is left to do must not lose the run's exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signal_handlers(handler: Handler, numbers: Iterable[int]) -> Iterator[Mapping[int, Any]]:
    """Have `handler` take these signals meanwhile; yields the handlers that come back afterwards.
    Only the main thread may have handlers: in any other nothing changes, its owner decides."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
