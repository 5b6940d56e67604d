"""Loader processes: what a data set draws at random depends on a microbatch's place alone."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch.utils.data._utils import signal_handling

from paceline.data.cursor import Order, StepSlice
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource
from paceline.errors import LoaderError

MICRO, STEPS = 4, 6


class Drawing:
    """Every sample is a random number, as of one that crops or flips."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class OneUnit:
    def units(self, batch: torch.Tensor) -> int:
        return len(batch)


def start(num_workers: int, first_step: int = 0) -> Microbatches:
    places = StepSlice(MICRO, 1, 1, 0, start=first_step * MICRO)
    source = MicrobatchSource(Drawing(), Order(100, 3), places, OneUnit(), 1)
    plan = LoaderPlan(num_workers, prefetch=2, timeout_s=60, pin_memory=False)
    return Microbatches(source, STEPS - first_step, plan)


def draw(num_workers: int, first_step: int = 0) -> list[list[float]]:
    """What each step gets, from `first_step` on."""
    microbatches = start(num_workers, first_step)
    found = [next(microbatches).batch.flatten().tolist() for _ in range(STEPS - first_step)]
    microbatches.close()
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_that_goes_on_draws_what_one_that_never_stopped_does(num_workers: int) -> None:
    whole = draw(num_workers=2)
    assert len({value for step in whole for value in step}) == STEPS * MICRO
    assert draw(num_workers) == whole
    assert draw(num_workers, first_step=2) == whole[2:]


def test_a_loader_that_dies_before_torch_looks_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch hears of deaths by SIGCHLD, once its handler is set. One before that showed only after
    data.timeout_s: two minutes, or the deadline of the run."""
    set_handler: Callable[[], None] = signal_handling._set_SIGCHLD_handler
    note: Callable[[int, tuple[int, ...]], None] = signal_handling._set_worker_pids
    started: list[int] = []

    def note_workers(key: int, pids: tuple[int, ...]) -> None:
        started.extend(pids)
        note(key, pids)

    def kill_first() -> None:
        os.kill(started[1], signal.SIGKILL)
        os.waitid(os.P_PID, started[1], os.WEXITED | os.WNOWAIT)
        set_handler()

    monkeypatch.setattr(signal_handling, "_set_worker_pids", note_workers)
    monkeypatch.setattr(signal_handling, "_set_SIGCHLD_handler", kill_first)
    with pytest.raises(
        LoaderError, match=r"loader process 1 of 2 .* died \(SIGKILL\) over samples"
    ):
        start(num_workers=2)
