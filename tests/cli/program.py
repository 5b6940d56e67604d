"""Running the real program: a process of its own, its stdout, stderr and exit code."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import warm

TIMEOUT_S = 110
EXIT_CODES: list[int] = []  # of the programs of this test, for docs/faults.md


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        EXIT_CODES.append(self.code)


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


def paceline(*arguments: str, cwd: Path, cold: bool = False, **env: str) -> Ran:
    """Run the program to its end. `cold`: as a user's shell starts it, torch's import included."""
    process = start(*arguments, cwd=cwd, cold=cold, new_session=False, **env)
    with process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Ran(process.returncode, out, err)


def start(
    *arguments: str, cwd: Path, cold: bool = False, new_session: bool = True, **env: str
) -> subprocess.Popen[str]:
    """The program in the background, in a session of its own as from a terminal."""
    starter = subprocess.Popen if cold else warm.start
    return starter(
        [sys.executable, "-m", "paceline", *arguments], cwd=cwd, env=environment(**env),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=new_session,
    )  # fmt: skip
