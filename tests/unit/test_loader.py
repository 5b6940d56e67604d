"""Loader processes: what a data set draws at random depends on a microbatch's place alone."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data._utils import signal_handling

from paceline.data import loader
from paceline.data.cursor import EvenPicks, Order, StepSlice
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource, Rules
from paceline.errors import DataError, LoaderError

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


def start(num_workers: int, first_step: int = 0, data: Drawing | None = None) -> Microbatches:
    places = StepSlice(MICRO, 1, 1, 0, start=first_step * MICRO)
    picks = EvenPicks(Order(100, 3), places)
    source = MicrobatchSource(data or Drawing(), picks, Rules(OneUnit(), 1))
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


@pytest.mark.parametrize(
    ("is_heard", "says"),
    [
        (False, r"loader process 1 of 2 \(process \d+\) died \(SIGKILL\) over samples"),
        (True, r"a loader process died at its start: .* killed by signal"),
    ],
)
def test_a_loader_that_dies_at_its_start_is_noticed_at_once(
    is_heard: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hears of deaths by SIGCHLD, once its handler is set. One before that showed only after
    data.timeout_s: two minutes, or the deadline of the run."""
    note = signal_handling._set_worker_pids

    def note_workers(key: int, pids: tuple[int, ...]) -> None:
        note(key, pids)
        if is_heard:
            signal_handling._set_SIGCHLD_handler()
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    monkeypatch.setattr(signal_handling, "_set_worker_pids", note_workers)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with pytest.raises(LoaderError, match=says):
            start(num_workers=2)
    finally:
        signal.signal(signal.SIGCHLD, before)
        for child in multiprocessing.active_children():
            child.kill()


class Deaf(Drawing):
    """Dies over its second batch; the first is ready then."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.counted >= MICRO:
            os.kill(os.getpid(), signal.SIGKILL)
        self.counted += 1
        return super().__getitem__(index)

    counted = 0


def test_a_death_that_nobody_was_told_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises it in whatever runs when SIGCHLD comes, and that may swallow it."""
    monkeypatch.setattr(loader, "LOOK_S", 0.2)
    microbatches = start(num_workers=2, data=Deaf())
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with pytest.raises(LoaderError, match=r"process \d+\) died \(SIGKILL\) over samples"):
            for _ in range(STEPS):
                next(microbatches)
        microbatches.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_end_of_loaders_does_not_wait_for_a_lock_of_a_dead_one() -> None:
    """torch's event, by which it asks them to end, stays locked by one that was killed with it."""
    microbatches = start(num_workers=2)
    next(microbatches)
    items = microbatches._items
    items._workers_done_event._cond.acquire()  # as a loader that is killed just then leaves it
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.kill(items._workers[1].pid, signal.SIGKILL)
        items._workers[1].join()
        microbatches.close()
        del items  # nor as the interpreter collects it
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert multiprocessing.active_children() == []


class Broken(Drawing):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("a corrupt file")


def test_an_error_in_a_loader_process_comes_in_our_words() -> None:
    microbatches = start(num_workers=1, data=Broken())
    with pytest.raises(DataError, match=r"^the data set failed on sample \d+: ValueError: a corr"):
        next(microbatches)
    microbatches.close()
