"""A thread that writes for the others of its process: a slow disk does not hold up training."""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

Write = Callable[[], object]


class Scribe:
    """Does what it is asked for in order, in a thread that starts with the first. Whoever asks may
    be a signal handler, in the middle of another's asking; a forked child has a thread of its own,
    and leaves what its parent was asked for to its parent."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock, self._thread = threading.RLock(), None
        self._asked: SimpleQueue[Write] = SimpleQueue()

    _thread: threading.Thread | None

    def ask(self, write: Write) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="scribe", daemon=True)
                self._thread.start()
        self._asked.put(write)

    def _work(self) -> None:
        while True:
            self._asked.get()()


SCRIBE = Scribe()
