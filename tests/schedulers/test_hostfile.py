"""The seed's multi-node command on two machines that ssh reaches: the losses are those of one."""

import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.schedulers.sshd import SshCluster, why_not
from tests.skips import needs_deepspeed
from tests.speech_clip import RECIPE, corpus, tiny

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_not() is not None, reason=f"sshd: {why_not()}"),
]
nightly = pytest.mark.nightly
TRAIN = [sys.executable, "-m", "paceline", "train", f"+experiment={RECIPE}"]
STEPS = 4
JOB = [
    "train.micro_batch_size=4", f"train.steps={STEPS}", "train.eval_every=off", "train.log_every=1",
    "checkpoint.every=off", "data.cut_min_s=0.5", "data.cut_max_s=1.0", "loss.negatives=global",
    "optim.schedule.warmup_steps=1",
]  # fmt: skip


SMALL = [
    "data.source=synthetic", "data.synthetic_samples=64", "data.seq_len=16", "model.dim=16",
    f"train.steps={STEPS}", "train.eval_every=off", "launch.device=cpu", "train.log_every=1",
    "checkpoint.every=off", "optim.name=sgd",
]  # fmt: skip


def train(*more: str) -> list[str]:
    """The final training of the runbook, on a small model: ++dataset.root_dir and all."""
    paths = [f"++dataset.root_dir={corpus()}", f"++dataset.manifest_path={corpus()}/manifest.tsv"]
    return [*TRAIN, *tiny(*JOB), *paths, *more]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCluster]:
    with SshCluster(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two ranks on one machine."""
    job = tiny(*JOB, "launch.nproc=2")
    return [row.loss for row in run_ranks(tmp_path_factory.mktemp("one") / "run", RECIPE, job).rows]


def losses(run: Path) -> list[float]:
    result = json.loads((run / "result.json").read_text())
    assert result["outcome"] == "ok" and result["steps"] == STEPS
    with (run / "training.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def hostfile(folder: Path, *names: str) -> str:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    return "launch.hostfile=hosts"


def where(run: Path) -> list[str]:
    ends = [json.loads((run / f"ranks/rank{n}/end.json").read_text()) for n in (0, 1)]
    return [end["host"] for end in ends]


@nightly
@pytest.mark.parametrize("by", ["torchrun", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_two_hosts_have_the_losses_of_one(
    by: str, hosts: SshCluster, one_host: list[float], tmp_path: Path
) -> None:
    launch = [f"launch.launcher={by}", hostfile(tmp_path, "n1", "n2"), "--out", "run"]
    done = hosts.run(train(*launch), cwd=tmp_path, timeout=150)
    log = tmp_path / "run/launcher.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    assert losses(tmp_path / "run") == pytest.approx(one_host, abs=1e-6)
    assert len(set(one_host)) == STEPS, "it learns"
    assert where(tmp_path / "run") == ["n1", "n2"]
    assert hosts.processes() == []


@nightly
def test_a_small_job_on_two_hosts(hosts: SshCluster, tmp_path: Path) -> None:
    """The same, quickly, without what transformers takes to import in each of five processes."""
    expected = run_ranks(tmp_path / "one", "lm_tiny", [*SMALL, "launch.nproc=2"])
    launch = ["launch.launcher=torchrun", hostfile(tmp_path, "n1", "n2"), "launch.env.FLAG=a b"]
    words = [*TRAIN[:-1], "lm_tiny", *SMALL, *launch, "--out", "run"]
    done = hosts.run(words, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx([r.loss for r in expected.rows], abs=1e-6)
    assert where(tmp_path / "run") == ["n1", "n2"] and hosts.processes() == []


@nightly
def test_a_user_on_one_of_the_hosts_needs_no_ssh_to_it(
    hosts: SshCluster, one_host: list[float], tmp_path: Path
) -> None:
    launch = ["launch.launcher=torchrun", hostfile(tmp_path, "n1", "n2"), "--out", "run"]
    words = " ".join(repr(word) for word in train(*launch))
    path = hosts.environment().get("PYTHONPATH", "")
    done = hosts.run(["ssh", "n1", f"cd {tmp_path} && PYTHONPATH={path} {words}"], timeout=150)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(one_host, abs=1e-6)
    assert where(tmp_path / "run") == ["n1", "n2"] and hosts.processes() == []


@nightly
def test_ranks_on_other_hosts_end_with_the_process_that_started_them(
    hosts: SshCluster, tmp_path: Path
) -> None:
    launch = ["launch.launcher=torchrun", hostfile(tmp_path, "n1", "n2"), "train.steps=100000"]
    process = hosts.start(train(*launch, "launch.grace_s=2", "--out", "run"), cwd=tmp_path)
    wait_for(lambda: (tmp_path / "run/training.csv").is_file(), "the first step")
    hosts.signal(process, 9)
    process.communicate(timeout=30)
    wait_for(lambda: not hosts.processes(), "the end of all ranks")


def wait_for(is_so: object, what: str, seconds: float = 60) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.2)


def refused(hosts: SshCluster, folder: Path, by: str, *names: str) -> str:
    """What is said of these machines; nothing is started, and nothing written."""
    small = [*TRAIN[:-1], "lm_tiny", *SMALL]
    launch = [f"launch.launcher={by}", hostfile(folder, *names), "--out", "run"]
    done = hosts.run([*small, *launch], cwd=folder, timeout=60)
    assert done.returncode == 3, done.stderr
    assert not (folder / "run").exists() and hosts.processes() == []
    return done.stderr


def test_a_host_that_is_down_is_named_before_anything_starts(
    hosts: SshCluster, tmp_path: Path
) -> None:
    said = refused(hosts, tmp_path, "torchrun", "n1", "n3", "n4")
    assert "launch.hostfile: n3: it does not answer: it is down" in said
    assert "hint: bring it up, or leave it out of the hostfile" in said
    assert "launch.hostfile: n4: its name means nothing to this machine" in said
    assert "n1" not in said.partition("error")[2], "which is well"


@needs_deepspeed
def test_a_wrong_key_is_refused_before_anything_starts(hosts: SshCluster, tmp_path: Path) -> None:
    hosts.use_key("wrong_key")
    try:
        said = refused(hosts, tmp_path, "deepspeed", "n1", "n2")
    finally:
        hosts.use_key("key")
    for host in ("n1", "n2"):
        assert f"launch.hostfile: {host}: it takes none of your keys" in said
        assert f"hint: ssh-copy-id {host}" in said


@nightly
def test_a_host_without_this_folder_or_this_python_is_refused(
    hosts: SshCluster, tmp_path: Path
) -> None:
    """The folder is gone on the other machine only: it has file systems of its own."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    enter = "nsenter --target $(pgrep -xn sshd -P 1) --mount"
    hosts.run(["bash", "-c", f"{enter} mount -t tmpfs tmpfs {tmp_path}"])
    said = refused(hosts, hidden, "torchrun", "n1", "n2")
    assert "this folder or this python is not there" in said
