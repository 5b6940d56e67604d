"""What is told to the clock from inside libraries: waiting, and nothing else. One process, a clock
that stands still unless something takes time."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.strategies import clock as timing
from paceline.strategies.waits import Waits


class Time:
    """A clock's source of time, and a library that takes some."""

    def __init__(self) -> None:
        self.now = 0.0

    def take(self, seconds: float) -> None:
        self.now += seconds

    def reduce(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        self.take(1)
        return SimpleNamespace(wait=lambda: self.take(10), is_done=True) if async_op else None


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    made = Time()
    monkeypatch.setattr(timing, "perf_counter", lambda: made.now)
    yield made


def begin(waits: Waits, clock: timing.HostClock) -> None:
    waits.clock, clock.knows_blocked = clock, True
    clock.begin(1)
    clock.enter("backward")


def blocked_s(clock: timing.HostClock) -> float:
    clock.pause("end")
    (row,) = clock.finished()
    assert row.blocked_s is not None
    return row.blocked_s.get("backward", 0.0)


@pytest.mark.parametrize("how", [[None, True], {"async_op": True}])
def test_a_collective_that_is_started_counts_when_it_is_waited_for(how: Any, time: Time) -> None:
    clock, waits = timing.HostClock(), Waits()
    waits.around_collective(time, "reduce")
    begin(waits, clock)
    sent = torch.ones(2)  # no truth of its own: only True itself is `async_op`
    time.reduce(sent)
    started = time.reduce(sent, **how) if isinstance(how, dict) else time.reduce(sent, *how)
    time.take(100)
    started.wait()
    assert started.is_done, "else it is torch's own handle"
    assert blocked_s(clock) == 1 + 10


class SideClock(timing.HostClock):
    """As if the library had turned to a stream of its own."""

    is_here = False


def test_what_waits_beside_the_step_holds_nobody_up(time: Time) -> None:
    clock, waits = SideClock(), Waits()
    waits.around_collective(time, "reduce")
    waits.around(time, "take")
    begin(waits, clock)
    time.reduce(torch.ones(1), async_op=True).wait()
    assert blocked_s(clock) == 0


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_end_of_a_backward_pass_of_others_is_waiting(num_outputs: int, time: Time) -> None:
    """The library asks for its callback when the weight has its gradient, as DDP does."""
    clock, waits = timing.HostClock(), Waits()
    weight = torch.ones(1, requires_grad=True)

    def exchange(gradient: Tensor) -> None:
        time.take(1)  # own work
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.take(10))

    weight.register_hook(exchange)
    begin(waits, clock)
    outputs = [weight * 2 for _ in range(num_outputs)]
    for output in outputs:
        waits.until_done(output)
    torch.cat(outputs).sum().backward()
    time.take(100)  # the script's own, before its optimizer
    assert blocked_s(clock) == 10
