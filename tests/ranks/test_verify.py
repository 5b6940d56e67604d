"""`paceline verify`: every strategy proven on 2 and 4 ranks, and every check able to fail."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.cursor import Order as SampleOrder
from paceline.errors import ConfigError
from paceline.job import reload_job
from paceline.plan.policy import effective_config
from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.strategies.weights import fill_weights
from paceline.verify.judge import judge
from paceline.verify.records import TrialHeld, VerifyReport
from paceline.verify.trial import BYTES, EQUAL, POISONED, held_file, initial_file, state_file
from paceline.verify.trials import expected_bytes
from tests.proofs import assert_proven, verify
from tests.skips import needs_deepspeed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "run"
    assert_proven(verify(["zero3"], ["launch.nproc=2"], folder), "zero3")
    return folder


def test_the_record_is_kept(proven: Path) -> None:
    assert VerifyReport.load(proven / "verify.json").exit_code == 0


def test_the_reference_is_what_a_plain_loop_computes(proven: Path) -> None:
    """Nothing of ours but the model, the data and their order: loss, norm, clipping, decay and
    learning rate are written out again."""
    one = RunDir(proven / "one_process" / "trials" / EQUAL)
    job = reload_job(one, "uneven")
    config, optim = job.config, job.config.optim
    with torch.device("meta"):
        model = job.workload.build_model(effective_config(config, "sdpa"))
    fill_weights(model, model.init_module, config.train.seed, torch.device("cpu"))
    data = job.workload.build_data(config, "train")
    size = config.train.micro_batch_size
    rows = read_training(one.training)
    for step in range(1, config.train.steps + 1):
        ids = SampleOrder(len(data), config.train.seed).at(
            np.arange((step - 1) * size, step * size)
        )
        samples = [data[int(index)] for index in ids]
        batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
        targets = batch["tokens"][:, 1:]
        loss = model(batch["tokens"][:, :-1].clamp(min=0), targets) / (targets != -100).sum()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        done = (step - 2) / (config.train.steps - 2)
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        lr = optim.lr * (step / 2 if step <= 2 else cosine)
        with torch.no_grad():
            for p in model.parameters():
                gradient = p.grad * min(1.0, optim.clip / float(norm))
                p -= lr * (gradient + (optim.weight_decay * p if p.dim() >= 2 else 0))
                p.grad = None
        assert rows[step - 1].loss == pytest.approx(float(loss), rel=1e-5)
        assert rows[step - 1].grad_norm == pytest.approx(float(norm), rel=1e-5)
    clipped = [row.grad_norm > optim.clip for row in rows]
    assert any(clipped) and not all(clipped), "clipping is part of the proof"
    for name, weight in torch.load(state_file(one, 0)).items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def change_weights(path: Path, name: str = "blocks.0.ffn.down.weight") -> None:
    weights = torch.load(path)
    weights[name] += 1e-3
    torch.save(weights, path)


def change_loss(run: RunDir, factor: float = 1.0001) -> None:
    path = RunDir(run.root / "trials" / EQUAL).training
    lines = path.read_text().splitlines()
    cells = lines[-1].split(",")
    lines[-1] = ",".join([cells[0], str(float(cells[1]) * factor), *cells[2:]])
    path.write_text("\n".join(lines) + "\n")


def lose_state(run: RunDir) -> None:
    path = held_file(trial(run, BYTES), 1)
    TrialHeld.load(path).model_copy(update={"restored": False}).save(path)


def trial(run: RunDir, name: str) -> RunDir:
    return RunDir(run.root / "trials" / name)


def stand_still(run: RunDir) -> None:
    shutil.copy(state_file(trial(run, EQUAL), 1), initial_file(trial(run, EQUAL), 1))


def hold_more(run: RunDir) -> None:
    path = held_file(trial(run, BYTES), 1)
    held = TrialHeld.load(path)
    held.model_copy(update={"optimizer": held.optimizer + 4}).save(path)


DAMAGE: dict[str, Callable[[RunDir], None]] = {
    "loss": change_loss,
    "weights": lambda run: change_weights(state_file(trial(run, EQUAL), 0)),
    "replicas": lambda run: change_weights(state_file(trial(run, EQUAL), 1)),
    "moved": stand_still,
    "NaN": lambda run: change_weights(state_file(trial(run, POISONED), 1)),
    "bytes": hold_more,
    "state": lose_state,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_check_can_fail(name: str, proven: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(proven, folder)
    run = RunDir(folder / "zero3")
    DAMAGE[name](run)
    weighed = trial(run, BYTES)
    expected = expected_bytes(reload_job(weighed, "uneven"), Plan.load(weighed.plan))
    checks = judge(run, RunDir(folder / "one_process"), 2, expected)
    assert name in [check.name for check in checks if not check.ok]


PLAIN, HYBRIDS = ("ddp", "zero1", "zero2", "zero3"), ("zero2_hybrid", "zero3_hybrid")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(PLAIN, 2, marks=pytest.mark.slow),
        pytest.param(HYBRIDS, 4, marks=pytest.mark.nightly),
        pytest.param(PLAIN, 4, marks=pytest.mark.nightly),
    ],
)
def test_every_strategy_is_proven(names: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    assert_proven(verify([*names], [f"launch.nproc={ranks}"], tmp_path / "v"), *names)


@needs_deepspeed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)],
)
def test_every_stage_of_deepspeed_is_proven(ranks: int, tmp_path: Path) -> None:
    report = verify(["deepspeed"], [f"launch.nproc={ranks}"], tmp_path / "v")
    assert_proven(report, *(f"deepspeed_{stage}" for stage in range(4)))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_compiled_and_recomputed_strategies_are_proven(tmp_path: Path) -> None:
    settings = ["train.compile=default", "train.activation_checkpointing=selective"]
    report = verify(["ddp", "zero1", "zero2", "zero3"], settings, tmp_path / "v")
    assert_proven(report, "ddp", "zero1", "zero2", "zero3")


def test_what_cannot_be_proven_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no strategy 'zero9'"):
        verify(["zero9"], [], tmp_path / "a")
    with pytest.raises(ConfigError, match="a proof fixes this"):
        verify(["ddp"], ["train.steps=3"], tmp_path / "b")
    with pytest.raises(ConfigError, match="a job is named"):
        verify(["ddp"], ["workload=job.py:Job"], tmp_path / "job")
    with pytest.raises(ConfigError, match="needs 4 ranks"):
        verify(["zero3_hybrid"], ["launch.nproc=2"], tmp_path / "c")
