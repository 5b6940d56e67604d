"""`paceline.attach` on one rank, in this process: a loop of somebody else's leaves a whole run."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.attached import Attached
from paceline.errors import ConfigError, Outcome


def make(folder: Path, **more: object) -> tuple[Attached, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, object] = {"log_every": 2, "epochs": 2}
    return (
        paceline.attach(model, optimizer, loader, out=folder, **(settings | more)),
        model,
        optimizer,
    )


def iter_losses(
    run: Attached, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[float, int]]:
    for x, y in run.batches():
        loss = ((model(x).squeeze(1) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.record(loss, len(x), {"big": ((y > 0).sum(), len(x))})
        yield loss.item(), len(x)


def test_a_loop_leaves_a_run_that_all_verbs_read(tmp_path: Path) -> None:
    before = sys.excepthook, signal.getsignal(signal.SIGTERM)
    run, model, optimizer = make(tmp_path / "a")
    losses = []
    for _ in range(2):
        model.train()
        losses += [loss for loss, _ in iter_losses(run, model, optimizer)]
        model.eval()
        model(torch.ones(1, 4))
        run.evaluated({"error": len(losses)})
    result = run.close()
    assert run.close() is None, "once"
    assert result is not None and result.outcome is Outcome.OK and result.steps == 6
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM)) == before
    made = paceline.load_run(tmp_path / "a")
    table = made.training
    assert table.loss.tolist() == pytest.approx(losses), "means, as the script computed them"
    assert table["val/error"].dropna().to_dict() == {2: 3.0, 5: 6.0}
    assert table.lr.tolist() == [0.1] * 6 and table["train/big"].notna().all()
    assert made.plan.steps == 6 and made.plan.batch.global_size == 8
    assert made.plan.optimizer.value == "SGD"
    steps = made.steps
    for phase in ("data_s", "forward_s", "backward_s", "optimizer_s"):
        assert (steps[phase] > 0).all(), phase
    assert (steps.eval_s == 0).all(), "between epochs no step goes on"
    assert (run.path / "report.html").is_file() and (run.path / "heartbeat_rank0.jsonl").is_file()
    again, model, optimizer = make(tmp_path / "b")
    list(iter_losses(again, model, optimizer))
    again.close()
    found = paceline.compare(tmp_path / "a", tmp_path / "b")
    assert [side.num_runs for side in found.sides] == [1, 1]


def test_steps_of_several_batches(tmp_path: Path) -> None:
    run, model, optimizer = make(tmp_path / "a", accumulate=3, epochs=2)
    taken = [*iter_losses(run, model, optimizer), *iter_losses(run, model, optimizer)]
    run.close()
    first = sum(loss * count for loss, count in taken[:3]) / 20  # of 8, 8 and 4 samples
    table = paceline.load_run(tmp_path / "a").training
    assert table.loss.tolist()[0] == pytest.approx(first) and len(table) == 2


def test_an_error_of_the_loop_is_the_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model, optimizer = make(tmp_path / "a")
    with pytest.raises(ValueError), run:
        for _ in iter_losses(run, model, optimizer):
            if run.step == 2:
                raise ValueError("planted")
    result = paceline.load_run(tmp_path / "a").result
    assert result.outcome is Outcome.CRASHED and result.failure is not None
    assert "planted" in result.failure.message and "test_attach.py" in result.failure.message
    assert len(paceline.load_run(tmp_path / "a").steps) == 1, "the step that was whole"
    assert result.failure.log == "", "what the script prints is kept by nobody"
    assert "log:" not in (tmp_path / "a" / "summary.md").read_text()
    assert f"ended as crashed: {tmp_path / 'a' / 'report.html'}" in capsys.readouterr().err


def test_a_script_that_says_little(tmp_path: Path) -> None:
    run, model, optimizer = make(tmp_path / "a", epochs=0)
    list(iter_losses(run, model, optimizer))
    run._left()  # as at the end of a program that did not close
    made = paceline.load_run(tmp_path / "a")
    assert made.plan.steps == made.result.steps == 3, "known in the end"
    assert any("without run.close()" in note for note in made.result.notes)


def test_what_cannot_be_attached_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="hint: batch_size=N"):
        paceline.attach(model, optimizer, [1, 2])
    with pytest.raises(ConfigError, match="bad_tracker"):
        paceline.attach(model, optimizer, [1], batch_size=1, out=tmp_path / "x",
                        trackers=["bad_tracker"])  # fmt: skip
    monkeypatch.setattr("paceline.track.sinks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mlflow is not installed"):
        paceline.attach(model, optimizer, [1], batch_size=1, out=tmp_path / "x",
                        trackers=["mlflow"])  # fmt: skip
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="already holds files"):
        paceline.attach(model, optimizer, [1], batch_size=1, out=tmp_path / "full")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x",
                        "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="call it after torch.distributed.init_process_group"):
        paceline.attach(model, optimizer, [1], batch_size=1)


def test_the_command_line_does_not_resume_a_loop_of_a_script(tmp_path: Path) -> None:
    run, model, optimizer = make(tmp_path / "a")
    list(iter_losses(run, model, optimizer))
    run.close()
    with pytest.raises(ConfigError, match="start the script again"):
        paceline.resume(tmp_path / "a", **{"train.steps": 9})
