"""How long a microbatch may be, found by trial."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import MemoryFull
from paceline.job import load_job
from paceline.plan.planner import make_plan
from paceline.run import fit
from paceline.strategies.clock import HostClock
from paceline.train import fit_trial
from paceline.train.fit_trial import FitTrial
from tests.harness import machine


@pytest.mark.parametrize("room", [0, 1, 2, 3, 7, 100, 700, 5000])
def test_the_search_ends_near_the_most_that_fits(room: int) -> None:
    tried: list[int] = []
    found = fit.search(lambda number: tried.append(number) or number <= room)  # type: ignore[func-returns-value]
    assert found <= min(room, fit.MOST) and found >= min(room, fit.MOST) * 15 / 16 - 1
    assert len(tried) <= 20


class Full:
    """An engine whose device holds batches of five."""

    module = torch.nn.Linear(1, 1)

    def forward_backward(self, batches: list[Any], scale: float, clock: Any) -> None:
        if len(batches[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def step(self, lr: float, clock: Any) -> None: ...


def test_a_step_that_does_not_fit_is_no_error() -> None:
    trial = FitTrial.__new__(FitTrial)
    trial.data, trial.order = [torch.zeros(2)] * 3, np.array([2, 0, 1])
    trial.job = SimpleNamespace(workload=load_job("lm_tiny", []).workload)  # type: ignore[assignment]
    trial.engine, trial.clock, trial.device = Full(), HostClock(), torch.device("cpu")  # type: ignore[assignment]
    assert fit.search(trial.fits) == 5
    assert trial.name(0) == "sample 2"


def test_what_is_tried_computes_as_the_run_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of the plan, which keep other activations than torch's."""
    built: list[Any] = []
    strategy = SimpleNamespace(build=lambda parts: built.append(parts))
    monkeypatch.setattr(fit_trial, "find_strategy", lambda name: strategy)
    monkeypatch.setattr(fit_trial, "apply_policy", lambda plan: None)
    job = load_job("lm_tiny", ["launch.nproc=1", "train.kernels=triton"])
    made = make_plan(job, machine())
    threads = made.threads.model_copy(update={"value": torch.get_num_threads()})
    planned = made.model_copy(update={"threads": threads})
    FitTrial(job, planned, torch.device("cpu"), [], np.arange(1))
    assert built[0].config.train.kernels == planned.kernels.value == "triton"


def test_the_number_that_was_found_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"num_samples": 4, "length": 12.0, "longest": 3.0, "because": "more did not fit"}
    monkeypatch.setattr(fit, "_in_own_process", lambda run, job: found)
    job = load_job("lm_tiny", ["data.batch_by=length", "data.batch_length=auto"])
    assert fit.is_open(job)
    said: list[str] = []
    settled = fit.fit_batches(job, machine(), {}, said.append)
    assert settled.config.data.batch_length == 12.0 and not fit.is_open(settled)
    assert "12, which are 4 of the longest samples, 3 each; more did not fit" in said[0]


def test_nothing_that_fits_is_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        exitcode = 0

        def __init__(self, target: Any, args: Any) -> None:
            (Path(args[0]) / "fit.json").write_text('{"num_samples": 0, "because": "sample 7"}')

        def start(self) -> None: ...

        def join(self) -> None: ...

    context = SimpleNamespace(Process=Process)
    monkeypatch.setattr(fit.multiprocessing, "get_context", lambda kind: context)
    job = load_job("lm_tiny", ["data.batch_by=length", "data.batch_length=auto"])
    with pytest.raises(MemoryFull, match="not even one sample fits into memory: sample 7"):
        fit.fit_batches(job, machine(), {}, lambda text: None)
