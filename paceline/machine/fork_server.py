"""The process that ranks are forked from: it has torch and the training code loaded already.

It takes three seconds to load them, and so does the process that plans. Whoever will start ranks
calls `start_early` before its own imports, and both load side by side. Nothing here imports torch.
"""

import multiprocessing
import tempfile
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir

from paceline.errors import DiskError
from paceline.machine.launchers import LAUNCHERS

# What the server imports, in this order: what a training rank needs.
PRELOADED = ["paceline.launch.fork_server_init", "paceline.launch.rank", "paceline.train.worker"]
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
        return get_temp_dir()
    except FileNotFoundError as error:  # Python has tried TMPDIR, /tmp and others
        raise DiskError(
            f"no temporary file can be made: {error.strerror or error}\n"
            "hint: free space there, or set TMPDIR to a directory that can be written"
        ) from error
    finally:
        tempfile.tempdir = before
