"""Loader processes: what a data set draws at random depends on a microbatch's place alone."""

import pytest
import torch

from paceline.data.cursor import Order, StepSlice
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource

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


def draw(num_workers: int, first_step: int = 0) -> list[list[float]]:
    """What each step gets, from `first_step` on."""
    places = StepSlice(MICRO, 1, 1, 0, start=first_step * MICRO)
    source = MicrobatchSource(Drawing(), Order(100, 3), places, OneUnit(), 1)
    plan = LoaderPlan(num_workers, prefetch=2, timeout_s=60, pin_memory=False)
    microbatches = Microbatches(source, STEPS - first_step, plan)
    found = [next(microbatches).batch.flatten().tolist() for _ in range(STEPS - first_step)]
    microbatches.close()
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_that_goes_on_draws_what_one_that_never_stopped_does(num_workers: int) -> None:
    whole = draw(num_workers=2)
    assert len({value for step in whole for value in step}) == STEPS * MICRO
    assert draw(num_workers) == whole
    assert draw(num_workers, first_step=2) == whole[2:]
