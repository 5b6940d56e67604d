"""One command on every machine of a launch plan: here as a child, elsewhere over ssh.

    python -m paceline.launch.each_host RUN_DIR -- COMMAND    as torchrun and deepspeed by hostfile
    python -m paceline.launch.each_host --guard               what ssh runs on another machine

`{node}` in the command is the number of the machine. sshd does not end a command whose connection
is gone, so a guard stands above it: what it is to run comes on its stdin, environment and secret
included, where `ps` does not show them; and when its stdin ends, so do the command and its ranks.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from paceline.config.schema import SECRET_NAME
from paceline.launch.base import LaunchOrder
from paceline.launch.command import EXTRA_S, end_session
from paceline.launch.ssh import ALIVE, is_here, remote_words
from paceline.launch.supervisor import POLL_S
from paceline.machine.facts import allowed_variables
from paceline.machine.process import die_with_parent, signal_handlers
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir

NODE = "{node}"
MODULE = "paceline.launch.each_host"
# Beside those that a record may hold: where code, caches and libraries are, and how they behave.
CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHON", "HF_", "XDG_", "DS_", "UCX_", "FI_", "TRITON_")


def each_host_argv(order: LaunchOrder, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", MODULE, order.run_dir, "--", *command]


def run_everywhere(run: RunDir, command: Sequence[str]) -> int:
    """Run the command on every machine of the plan to its end. Where one fails the others have a
    while to notice, and to say why, before they are ended; the exit code is that of the first."""
    launch = LaunchPlan.load(run.launch)
    hosts = list(dict.fromkeys(place.host for place in launch.ranks))
    patience_s = launch.limits.grace_s + EXTRA_S
    asked: list[int] = []
    with signal_handlers(lambda number, _: asked.append(number), (signal.SIGINT, signal.SIGTERM)):
        nodes = [
            _start(host, [word.replace(NODE, str(n)) for word in command], launch, patience_s)
            for n, host in enumerate(hosts)
        ]
        failed = _wait_for(nodes, lambda: bool(asked) or any(n.returncode for n in nodes))
        deadline = time.monotonic() + (0.0 if asked else patience_s)
        _wait_for(nodes, lambda: bool(asked) or time.monotonic() >= deadline)
        for node in nodes:
            _ask_to_end(node)
        codes = [node.wait() for node in nodes]
    code = failed or next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code


def _wait_for(nodes: Sequence[subprocess.Popen[bytes]], is_enough: Callable[[], bool]) -> int:
    """Wait until all have ended, or it is enough; return the exit code of one that has failed."""
    while any([node.poll() is None for node in nodes]) and not is_enough():
        time.sleep(POLL_S)
    return next((node.returncode for node in nodes if node.returncode), 0)


def _start(
    host: str, command: Sequence[str], launch: LaunchPlan, patience_s: float
) -> subprocess.Popen[bytes]:
    """Start the command on a machine. The pipe to a guard stays open: its end ends the guard."""
    here = is_here(host)
    words = command if here else remote_words(host, ["-m", MODULE, "--guard"], ALIVE)
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if here else subprocess.PIPE,
        process_group=0,  # signals to ours are for us to pass on
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    if process.stdin is not None:
        env = carried_variables(os.environ, launch.env)
        orders = {"argv": list(command), "env": env, "patience_s": patience_s}
        try:
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # ssh has failed already, and has said why
            pass
    return process


def carried_variables(environment: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return what goes to other machines: what the plan chose, what says how ranks behave, and who
    started them. Whatever may be a secret of the user's stays here."""
    ours = {name: text for name, text in environment.items() if name.startswith("PACELINE_")}
    known = {
        name: text
        for name, text in environment.items()
        if name.startswith(CARRIED) and not SECRET_NAME.search(name)
    }
    return allowed_variables(dict(environment)) | known | ours | dict(chosen)


def _ask_to_end(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is not None:
        return
    if node.stdin is None:
        node.terminate()
    elif not node.stdin.closed:
        node.stdin.close()


def guard() -> int:
    """Run what stdin orders, in a session of its own; end all of it when stdin ends."""
    orders = json.loads(sys.stdin.buffer.readline())
    process = subprocess.Popen(
        orders["argv"],
        env=dict(os.environ) | orders["env"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    over = os.pidfd_open(process.pid)
    ready, _, _ = select.select([sys.stdin.buffer.fileno(), over], [], [])
    # Where it has ended by itself, what it left has nobody to wait for.
    end_session(process.pid, 0.0 if over in ready else float(orders["patience_s"]))
    code = process.wait()
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--guard"]:
        return guard()
    run_dir, _, *command = arguments
    return run_everywhere(RunDir(Path(run_dir)), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
