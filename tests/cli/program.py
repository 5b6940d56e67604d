"""Running the real program: a process of its own, its stdout, stderr and exit code."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 110


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """This environment without what a launcher or a terminal would have left in it."""
    dropped = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS"}
    launchers = ("SLURM", "OMPI_COMM", "PMI", "TORCHELASTIC")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(launchers)
    }
    return kept | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"} | more


def paceline(*arguments: str, cwd: Path, **env: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The program in the background, in a session of its own as from a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
