"""`paceline verify JOB`: a user's own job held against one process, its mistakes found, every check
able to fail."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ConfigError, LaunchError
from paceline.job import reload_job
from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.verify.judge import judge_job
from paceline.verify.records import VerifyReport
from paceline.verify.subject import OwnJob
from paceline.verify.trial import BYTES, EQUAL, state_file, trial_dir
from paceline.verify.trials import expected_bytes
from tests.proofs import verify
from tests.ranks.test_verify import change_loss, change_weights, hold_more, lose_state

pytestmark = pytest.mark.slow

JOBS = '''
import torch
import torch.distributed as dist
from torch import nn
from paceline import Workload
from paceline.metrics import accuracy


class Points:
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        point = torch.rand(2, generator=generator) * 2 - 1
        return {"x": point, "y": (point.norm() < 0.8).long()}


class Plain(Workload):
    def build_model(self, config):
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def build_data(self, config, split):
        return Points(256) if split == "train" else Points(101, 10_000)

    def loss(self, model, batch):
        logits = model(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
        return loss, len(logits), {"accuracy": accuracy(logits, batch["y"])}


class Dropped(Plain):
    """Draws random numbers, and has an optimizer and a hook that a proof must leave alone."""

    def build_model(self, config):
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))

    def build_optimizer(self, model, config):
        return torch.optim.RMSprop(model.parameters(), lr=1.0)

    def on_step(self, step, record):
        raise RuntimeError("told of a step of a proof")


class Noisy(Points):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] + 0.1 * torch.randn(2)}


class Augmented(Plain):
    """Samples are other ones each time, by the place of their microbatch."""

    def build_data(self, config, split):
        return Noisy(256) if split == "train" else Points(101, 10_000)


class ByRank(Plain):
    def loss(self, model, batch):
        loss, count, more = super().loss(model, batch)
        return loss * (1 + dist.get_rank()), count, more


class Normed(Plain):
    def build_model(self, config):
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


class Eights(Plain):
    """Takes batches of one size only."""

    def build_data(self, config, split):
        return Points(256) if split == "train" else None

    def loss(self, model, batch):
        return super().loss(model, {"x": batch["x"].view(8, 2), "y": batch["y"]})


class Diverges(Plain):
    def loss(self, model, batch):
        loss, count, more = super().loss(model, batch)
        return loss * float("nan"), count, more


class Raises(Plain):
    def loss(self, model, batch):
        raise ValueError("planted")


class MeanOfMeans(Plain):
    def evaluate(self, model, batch):
        right = (model(batch["x"]).argmax(-1) == batch["y"]).float()
        return {"accuracy": (right.mean(), 1)}


class Sharded:
    shards = ["0", "1", "2", "3"]

    def open(self, shard):
        for index in range(100):
            yield Points(1000)[100 * int(shard) + index]


class Streamed(Plain):
    def build_data(self, config, split):
        return Sharded() if split == "train" else None


class Sentences:
    lengths = [3 + index * 7 % 11 for index in range(256)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.linspace(-1, 1, self.lengths[index]) * (index % 5 - 2)


class ByLength(Plain):
    def build_data(self, config, split):
        return Sentences() if split == "train" else None

    def collate(self, samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model, batch):
        pairs = torch.stack([batch.sum(1), batch.amax(1)], dim=1)
        return (model(pairs) - 1).square().sum(), len(batch)
'''


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("jobs") / "jobs.py"
    file.write_text(JOBS)
    return file


def prove(jobs: Path, name: str, out: Path, *words: str) -> VerifyReport:
    names = [word for word in words if "=" not in word]
    keys = [word for word in words if "=" in word]
    return verify([f"{jobs}:{name}", *names], ["launch.nproc=2", *keys], out)


def failed(report: VerifyReport) -> set[str]:
    (proof,) = report.proofs
    assert not proof.failure
    return {check.name for check in proof.checks if not check.ok}


@pytest.fixture(scope="module")
def proven(jobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proof of zero3 on a job that draws random numbers."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    report = prove(jobs, "Dropped", folder, "zero3", "optim.lr=3")
    assert report.exit_code == 0, report
    assert report.job.endswith("jobs.py:Dropped")
    assert any("draws random numbers" in note for note in report.notes)
    assert any("set by the proof" in note and "optim.lr" in note for note in report.notes)
    names = [check.name for check in report.proofs[0].checks]
    assert names == [
        "loss", "norm", "eval", "metrics", "weights", "replicas", "bytes", "state", "broken",
    ]  # fmt: skip
    return folder


def change_metric(run: RunDir) -> None:
    path = trial_dir(run, EQUAL).training
    header, *rows = path.read_text().splitlines()
    at = header.split(",").index("train/accuracy")
    cells = rows[-1].split(",")
    cells[at] = str(float(cells[at]) + 0.03)
    path.write_text("\n".join([header, *rows[:-1], ",".join(cells)]) + "\n")


def lose_norm(run: RunDir) -> None:
    """Not a number, in a row that is not the first: `max` would pass over it."""
    path = trial_dir(run, EQUAL).training
    header, *rows = path.read_text().splitlines()
    cells = rows[-1].split(",")
    cells[header.split(",").index("grad_norm")] = "nan"
    path.write_text("\n".join([header, *rows[:-1], ",".join(cells)]) + "\n")


def change_all_weights(run: RunDir) -> None:
    for rank in (0, 1):
        change_one(run, rank)


def change_one(run: RunDir, rank: int) -> None:
    change_weights(state_file(trial_dir(run, EQUAL), rank), "3.weight")


DAMAGE: dict[str, Callable[[RunDir], None]] = {
    "loss": lambda run: change_loss(run, 1.001),
    "norm": lose_norm,
    "metrics": change_metric,
    "weights": change_all_weights,
    "replicas": lambda run: change_one(run, 1),
    "bytes": hold_more,
    "state": lose_state,
    "broken": lambda run: shutil.copy(
        trial_dir(run, EQUAL).training, trial_dir(run, "broken").training
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_check_can_fail(name: str, proven: Path, tmp_path: Path, jobs: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(proven, folder)
    run = RunDir(folder / "zero3")
    DAMAGE[name](run)
    weighed = trial_dir(run, BYTES)
    job = reload_job(weighed, f"{jobs}:Dropped")
    expected = expected_bytes(job, Plan.load(weighed.plan))
    checks = judge_job(run, RunDir(folder / "one_process"), 2, expected)
    assert [check.name for check in checks if not check.ok] == [name]


@pytest.mark.parametrize("name", ["Augmented", "Streamed"])
def test_what_a_data_set_draws_or_streams_is_the_same_on_ranks(
    name: str, jobs: Path, tmp_path: Path
) -> None:
    assert prove(jobs, name, tmp_path / "v", "zero2").exit_code == 0


def test_batches_by_length_are_the_same_on_ranks(jobs: Path, tmp_path: Path) -> None:
    keys = ("data.batch_by=length", "data.batch_length=40")
    report = prove(jobs, "ByLength", tmp_path / "v", *keys)
    assert [proof.strategy for proof in report.proofs] == ["ddp"], "the job's own"
    assert report.exit_code == 0, report


def test_a_loss_that_depends_on_the_rank_is_caught(jobs: Path, tmp_path: Path) -> None:
    found = failed(prove(jobs, "ByRank", tmp_path / "v"))
    assert found >= {"loss", "norm", "eval", "weights"}


def test_batchnorm_is_caught_and_proven_where_ranks_share_it(jobs: Path, tmp_path: Path) -> None:
    apart = prove(jobs, "Normed", tmp_path / "apart")
    assert failed(apart) == {"eval", "weights"}
    assert any("strategy.sync_batchnorm=true" in note for note in apart.notes)
    shared = prove(jobs, "Normed", tmp_path / "shared", "strategy.sync_batchnorm=true")
    assert shared.exit_code == 0, shared


def test_a_metric_that_is_a_mean_of_means_is_noticed(jobs: Path, tmp_path: Path) -> None:
    (note,) = prove(jobs, "MeanOfMeans", tmp_path / "v").notes
    assert note.startswith("val/accuracy of step 4 is ")


def test_a_job_for_one_size_of_batches_is_proven(jobs: Path, tmp_path: Path) -> None:
    report = prove(jobs, "Eights", tmp_path / "v", "train.micro_batch_size=8")
    assert report.exit_code == 0
    (note,) = report.notes
    assert note.startswith("one process cannot take 32 samples at once") and "jobs.py:" in note


def test_what_a_proof_of_a_job_takes(jobs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a proof is of one job"):
        verify(["lm_tiny", f"{jobs}:Plain"], [], tmp_path / "two")
    with pytest.raises(ConfigError, match=r"comm_hook=bf16: this changes the gradients"):
        prove(jobs, "Plain", tmp_path / "lossy", "strategy.comm_hook=bf16")
    with pytest.raises(ConfigError, match="does not look for what fits"):
        keys = ("data.batch_by=length", "data.batch_length=auto")
        prove(jobs, "ByLength", tmp_path / "open", *keys)


def test_what_a_job_raises_is_named_with_its_line(jobs: Path, tmp_path: Path) -> None:
    line = JOBS.splitlines().index('        raise ValueError("planted")') + 1
    with pytest.raises(LaunchError, match=rf"rank 0: ValueError: planted \(.*jobs.py:{line}"):
        prove(jobs, "Raises", tmp_path / "v")


def test_a_loss_that_is_not_finite_is_named(jobs: Path, tmp_path: Path) -> None:
    said = r"equal, rank 0: the loss of step 1 is not finite \(samples \d+"
    with pytest.raises(LaunchError, match=said):
        prove(jobs, "Diverges", tmp_path / "v")


def test_the_users_own_checkpoint_folder_is_left_alone(jobs: Path, tmp_path: Path) -> None:
    """A proof writes a checkpoint and removes its folder."""
    subject = OwnJob(f"{jobs}:Plain", (f"checkpoint.dir={tmp_path}",))
    for job in subject.trials(subject.overrides, 2).values():
        assert job.config.checkpoint.dir == "run"
