"""The process that ranks are forked from: it has torch and the training code loaded already.

It takes three seconds to load them, and so does the process that plans. Whoever will start ranks
calls `start_early` before its own imports, and both load side by side. Nothing here imports torch.
"""

import fcntl
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path

from paceline.errors import DiskError
from paceline.machine.launchers import LAUNCHERS

# What the server imports, in this order: what a training rank needs. DDP, FSDP and torch's
# optimizers load the compiler with their first step: 2 s in each rank of each attempt.
PRELOADED = [
    "paceline.launch.fork_server_init",
    "paceline.launch.rank",
    "paceline.train.worker",
    "torch._dynamo",
]
OWNER = "paceline-owner"  # in the temporary folder of a supervisor
MAX_TEMPORARY = 60  # letters of TMPDIR; with the rest a socket's path may have 107


def start_early(launcher: str = "auto") -> None:
    """Start the server, unless it would be of no use: another program will start the ranks."""
    if launcher not in LAUNCHERS or LAUNCHERS[launcher].is_local:
        temporary_folder()
        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


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
