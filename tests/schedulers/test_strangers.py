"""Another machine on the network of a run: it gives orders, exit codes, garbage and a flood.

The ranks are in one network namespace, the stranger in another, with a cable between them and a
directory that both can read. It knows the address, and torch's protocol; it has no secret.
"""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.bench import SMALL
from tests.cli.program import environment
from tests.jobs import write_line_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OURS, THEIRS, PORT = "10.98.7.1", "10.98.7.2", "23458"
STRANGER = """
import json, os, socket, sys, time
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore

address, port, how, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
orders = json.dumps({"run_dir": str(stop.parent / "evil"), "workload": "evil", "exit_code": 0})
signed = json.dumps({"says": orders, "mac": "0" * 64})
flood = []
while not stop.exists():
    try:
        for _ in range(4):  # connections that say nothing, or nonsense; 400 at most
            if len(flood) < 400:
                flood.append(socket.create_connection((address, port), timeout=1))
                flood[-1].sendall(os.urandom(32))
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))
        (stop.parent / "reached").touch()
        for _ in range(20):
            names = ["paceline/0/orders", "paceline/0/0/failed", "paceline/0/0/next"]
            if how == "listing":
                keys = [key.removeprefix("/") for key in store.list_keys()]
                ours = [key.removesuffix("hello") for key in keys if key.endswith("hello")]
                names += [o + n for o in ours for n in ("orders/1", "0/failed", "0/next")]
            for name in names:
                store.set(name, signed)
            time.sleep(0.02)
    except (OSError, RuntimeError):
        time.sleep(0.05)
"""


def why_not() -> str | None:
    if shutil.which("ip") is None:
        return "not installed: ip"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    name = f"pl-{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=f"namespaces: {why_not()}")


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """The names of two networks, of the ranks and of the stranger, on one cable."""
    tag = uuid.uuid4().hex[:6]
    names = f"pl-{tag}-r", f"pl-{tag}-s"
    cable = [f"pl{tag}r", f"pl{tag}s"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cable[0], "netns", names[0], "type", "veth",
            "peer", "name", cable[1], "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, cable, (OURS, THEIRS), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def start(network: str, argv: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", network, sys.executable, *argv], cwd=cwd, env=environment(**env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def make_trap(folder: Path) -> Path:
    """A run directory that a stranger would like a rank to take part in; its code leaves a file."""
    (folder / "evil").mkdir()
    code = folder / "evil.py"
    code.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    body = {"workload": f"{code}:X"}
    (folder / "evil/launch.json").write_text(str(body).replace("'", '"'))
    (folder / "evil/run.yaml").write_text(f"workload: {code}:X\n")
    return folder / "ran"


@needs_namespaces
@pytest.mark.parametrize("how", [pytest.param("blind", marks=pytest.mark.nightly), "listing"])
def test_b2_a_stranger_on_the_network_is_not_obeyed(
    how: str, networks: tuple[str, str], tmp_path: Path
) -> None:
    """One that finds the names of our keys can keep ranks from hearing each other, until their
    deadline. It cannot make them run its code, or leave as if all were well."""
    ran, stop = make_trap(tmp_path), tmp_path / "stop"
    (tmp_path / "stranger.py").write_text(STRANGER)
    words = ["stranger.py", OURS, PORT, how, str(stop)]
    stranger = start(networks[1], words, tmp_path)
    job = write_line_job(tmp_path, "time.sleep(0.2)")
    train = ["-m", "paceline", "train", job, *SMALL, "train.steps=10"]
    if how == "listing":
        train += ["launch.start_s=15", "launch.grace_s=1"]
    ranks = [
        start(
            networks[0], [*train, "--out", "run"], tmp_path, RANK=str(rank), WORLD_SIZE="2",
            LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR=OURS, MASTER_PORT=PORT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        stop.touch()
        for process in (*ranks, stranger):
            process.kill()
            process.wait()
    assert (tmp_path / "reached").exists(), "the stranger was there"
    assert not ran.exists(), "its code ran"
    codes = [rank.returncode for rank in ranks]
    assert "Traceback" not in "".join(said), said
    if how == "blind":
        assert codes == [0, 0], said
    if 0 in codes:
        assert '"outcome": "ok"' in (tmp_path / "run/result.json").read_text(), said
    if how == "listing":
        assert "is not signed by this run" in "".join(said), said
