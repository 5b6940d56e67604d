"""`paceline verify` before a rank starts: what this machine cannot run is refused once."""

from pathlib import Path

import pytest

import paceline
from paceline.errors import ClusterError, ConfigError, DataError, Outcome
from paceline.verify import flow
from paceline.verify.subject import OwnJob
from tests.machines import MACHINE
from tests.machines import machine as env

JOB = """
from torch import nn
from paceline import Workload

class Job(Workload):
    def build_model(self, config): return nn.Linear(2, 2)
    def build_data(self, config, split): return [0] * 64
    def loss(self, model, batch): return batch.sum(), len(batch)
    def prepare(self, config, say): raise ValueError("planted")
"""


def test_too_few_gpus_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one FAILED per strategy, and no run directory: nothing was tried."""
    monkeypatch.setattr(flow, "probe", lambda: env(num_gpus=1))
    monkeypatch.setattr(flow.Trials, "run", lambda *_, **__: "not on this machine")
    with pytest.raises(ClusterError, match="4 asked for, 1 usable here") as caught:
        flow.run_verify(["ddp", "zero3"], ["launch.nproc=4"], tmp_path / "run", lambda text: None)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_is_refused_before_the_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="already holds files"):
        flow.run_verify(["gone.py:Job"], [], tmp_path, lambda text: None)


def test_what_is_refused_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "probe", lambda: MACHINE)
    (tmp_path / "job.py").write_text(JOB)
    with pytest.raises(DataError, match=r"Job.prepare failed at .*planted"):
        flow.run_verify([f"{tmp_path / 'job.py'}:Job"], [], tmp_path / "out", lambda text: None)
    assert not (tmp_path / "out").exists()


def test_what_was_not_tried_when_it_was_interrupted_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "probe", lambda: MACHINE)
    monkeypatch.setattr(flow.Trials, "run", stop)
    names = ["ddp", "zero3"]
    report = flow.run_verify(names, ["launch.nproc=2"], tmp_path / "out", lambda text: None)
    assert [(proof.strategy, proof.skipped) for proof in report.proofs] == [
        ("ddp", "interrupted"), ("zero3", "interrupted"),
    ]  # fmt: skip
    assert report.exit_code == Outcome.INTERRUPTED.exit_code


def test_an_experiment_is_a_job_from_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(flow, "run_verify", lambda *words: asked.extend(words[:2]))
    paceline.verify("+experiment=lm_tiny", "zero2", "optim.lr=1", quiet=True)
    assert asked == [["+experiment=lm_tiny", "zero2"], ["optim.lr=1"]]


def test_what_was_prepared_is_known_where_bytes_are_planned(tmp_path: Path) -> None:
    found = JOB.replace('raise ValueError("planted")', 'return {"labels": 7}')
    (tmp_path / "job.py").write_text(found)
    subject = OwnJob(f"{tmp_path / 'job.py'}:Job", ("launch.device=cpu",))
    subject.prepare(subject.build(subject.overrides), lambda text: None)
    jobs = subject.trials(subject.overrides, 2)
    assert [dict(job.workload.prepared) for job in jobs.values()] == [{"labels": 7}] * len(jobs)


def test_a_recipe_with_a_workload_of_ones_own_is_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "probe", lambda: MACHINE)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "job.yaml").write_text("name: mine\nworkload: lm\n")
    names, out = [str(tmp_path / "job.yaml"), "zero3"], tmp_path / "out"
    with pytest.raises(DataError, match="Job.prepare failed"):
        flow.run_verify(names, [f"workload={tmp_path / 'job.py'}:Job"], out, lambda text: None)
    with pytest.raises(ConfigError, match=r"hint: paceline verify .*job.yaml zero2"):
        flow.run_verify(names, ["strategy.name=zero2"], out, lambda text: None)
    with pytest.raises(ConfigError, match=r"hint: paceline verify zero2"):
        flow.run_verify([], ["strategy.name=zero2"], out, lambda text: None)
