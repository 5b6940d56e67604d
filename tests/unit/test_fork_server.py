"""The process that ranks are forked from: one torch for both where nothing forbids it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import environment

pytestmark = pytest.mark.slow

PROGRAM = """
import gc, multiprocessing, os, threading, time
from multiprocessing import forkserver
from paceline.machine.fork_server import start_early

def files(process):
    folder = f"/proc/{process}/fd"
    return {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}

def command(process):
    with open(f"/proc/{process}/cmdline") as file:
        return file.read()

# torch is in no round of a rank's collector, which walks what the rank itself makes.
settled = "import gc; assert gc.isenabled() and gc.get_freeze_count() > 1e5 > len(gc.get_objects())"
held = open("held")
if THREADS:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
start_early()
server = forkserver._forkserver._forkserver_pid
rank = multiprocessing.get_context("forkserver").Process(target=exec, args=(settled,))
rank.start()
rank.join()
open_there = " ".join(files(server))
assert rank.exitcode == 0 and gc.isenabled()
assert "held" not in open_there and "paceline-owner" not in open_there, open_there
print("forked" if command(server) == command("self") else "started")
"""


@pytest.mark.parametrize(("threads", "how"), [(0, "forked"), (1, "started")])
def test_the_server_is_forked_where_no_thread_forbids_it(
    threads: int, how: str, tmp_path: Path
) -> None:
    """And holds no file of the program: a lock that it held would outlive its owner."""
    (tmp_path / "held").write_text("")
    code = PROGRAM.replace("THREADS", str(threads))
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"{how}\n"), ran.stderr
