"""The process that ranks are forked from: it has torch and the training code loaded already.

Whoever will start ranks calls `start_early` before its own imports. A program that has neither
loaded torch nor started a thread, as our command line, loads it once and forks: its child becomes
the server, and loads what ranks alone need while its parent plans. Any other, such as a notebook,
starts the server as a program of its own, and both load torch side by side: what threads of a
process hold locked is locked in its child for ever. Nothing here imports torch before that.
"""

import fcntl
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import DiskError
from paceline.machine.launchers import LAUNCHERS

# What the server imports, in this order: what a training rank needs. The process that plans needs
# SHARED alone, and goes on while its child imports the rest. DDP, FSDP and torch's optimizers load
# the compiler with their first step: 2 s in each rank of each attempt.
SHARED = "paceline.launch.rank"
FIRST, LAST = "paceline.launch.fork_server_init", "paceline.launch.fork_server_loaded"
PRELOADED = [SHARED, "paceline.train.worker", "torch._dynamo"]
OWNER = "paceline-owner"  # in the temporary folder of a supervisor
MAX_TEMPORARY = 60  # letters of TMPDIR; with the rest a socket's path may have 107


def start_early(launcher: str = "auto", preloads: Sequence[str] = ()) -> None:
    """Start the server, unless it would be of no use: another program will start the ranks.
    `preloads` are modules that it imports beside its own."""
    if launcher not in LAUNCHERS or LAUNCHERS[launcher].is_local:
        temporary_folder()
        set_preloads(preloads)
        if "torch" in sys.modules or threading.active_count() > 1:
            forkserver.ensure_running()
            return
        with settled_imports():
            importlib.import_module(SHARED)
        with _forked():
            forkserver.ensure_running()


def set_preloads(more: Sequence[str] = ()) -> None:
    """Say what the server imports, should it be started now, and what it does before and after."""
    multiprocessing.set_forkserver_preload([FIRST, *PRELOADED, *more, LAST])


@contextmanager
def settled_imports() -> Iterator[None]:
    """Import without the garbage collector, which walks all that is there again and again and finds
    nothing: a sixth of the time. What was imported is taken out of its later rounds; what was
    garbage before goes first."""
    if not gc.isenabled():  # whoever has called us collects by himself
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _forked() -> Iterator[None]:
    """Have Python's `forkserver` fork its server where it would start a program."""
    cold = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return cold(path, args, passfds)
        return os.fork() or _serve(args[-1], passfds)

    util.spawnv_passfds = spawn
    try:
        yield
    finally:
        util.spawnv_passfds = cold


def _serve(code: str, fds: Sequence[int]) -> NoReturn:
    """Be the server, as Python's own program for it would be: with these files and no others."""
    try:
        kept = {0, 1, 2, *fds}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with suppress(OSError):
                    os.close(int(name))
        sys.argv = ["-c"]
        exec(code, {"__name__": "__main__"})
    except SystemExit:  # how it ends with its parent
        os._exit(0)
    except BaseException:  # nothing of its parent's stack may see it
        traceback.print_exc()
    os._exit(1)


def temporary_folder() -> str:
    """Return where the fork server has its socket. A long TMPDIR is not used: a path in it would be
    too long for one."""
    before = tempfile.tempdir
    try:
        if len(tempfile.gettempdir()) > MAX_TEMPORARY:
            tempfile.tempdir = "/tmp"
        folder = Path(get_temp_dir())
    except FileNotFoundError as error:  # Python has tried TMPDIR, /tmp and others
        raise DiskError(
            f"no temporary file can be made: {error.strerror or error}\n"
            "hint: free space there, or set TMPDIR to a directory that can be written"
        ) from error
    finally:
        tempfile.tempdir = before
    if not (folder / OWNER).exists():
        sweep_folders(folder.parent)
        with suppress(OSError):  # a full disk: it will not be swept
            _own(folder)
    return str(folder)


def _own(folder: Path) -> None:
    """Put a file into a folder of ours that is locked while this process lives. It gets its name
    when the lock is held: who finds it unlocked knows that its owner is dead."""
    aside = folder / f"{OWNER}.{os.getpid()}"
    handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open to our end
    fcntl.flock(handle, fcntl.LOCK_EX)
    aside.rename(folder / OWNER)


def sweep_folders(parent: Path) -> None:
    """Remove what killed supervisors have left there, and nothing else: folders of this user with
    our mark whose owner is dead. Others' programs make folders of the same kind of name."""
    for folder in parent.glob("pymp-*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
