"""What is told to the clock from inside libraries: waiting, and nothing else. One process, a clock
that stands still unless something takes time."""

import copy
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.strategies import clock as timing
from paceline.strategies.batchnorm import count_exchange, sync_batchnorm
from paceline.strategies.waits import Waits
from paceline.workloads.speech_clip.negatives import loss_of


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


@pytest.fixture
def ranks(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is another rank, which has the same and is always 10 s late."""

    def all_reduce(tensor: Tensor, op: Any = None) -> None:
        time.take(10)
        tensor.mul_(2 if op is None else 1)

    def all_gather(parts: list[Tensor], own: Tensor) -> None:
        time.take(10)
        for part in parts:
            part.copy_(own)

    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)


def blocked_in_both(waits: Waits, compute: Callable[[], Tensor]) -> dict[str, float] | None:
    """Return how long a forward and a backward pass have waited."""
    clock = timing.HostClock()
    waits.clock, clock.knows_blocked = clock, True
    clock.begin(1)
    clock.enter("forward")
    loss = compute()
    clock.enter("backward")
    loss.backward()
    clock.pause("end")
    (row,) = clock.finished()
    return row.blocked_s


def test_statistics_that_are_exchanged_are_waited_for(ranks: None) -> None:
    """A layer sums over ranks twice, and so does its gradient."""
    model, waits = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Waits()
    sync_batchnorm(model, torch.device("cpu"))
    count_exchange(model, waits)
    blocked = blocked_in_both(waits, lambda: model(torch.randn(5, 3)).square().sum())
    assert blocked == {"forward": 20, "backward": 20}
    copied = copy.deepcopy(model)  # as a workload may do to keep one
    assert blocked_in_both(waits, lambda: copied(torch.randn(5, 3)).square().sum()) == {}


@pytest.mark.parametrize(("capacity", "in_forward"), [(None, 20), (4, 10)])
def test_negatives_of_all_ranks_are_waited_for(
    capacity: int | None, in_forward: float, ranks: None
) -> None:
    waits, scale = Waits(), torch.tensor([3.0], requires_grad=True)
    model = SimpleNamespace(negatives="global", capacity=capacity, scale=scale)
    speech, text = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    blocked = blocked_in_both(waits, lambda: loss_of(model, speech, text, waits.counted)[0])
    assert blocked == {"forward": in_forward, "backward": 10}


def test_the_forward_pass_of_torchs_own_layer_counts(time: Time) -> None:
    """On a GPU it is torch's layer that exchanges; its backward pass counts as work."""
    model, waits, clock = nn.Sequential(nn.BatchNorm1d(4)), Waits(), timing.HostClock()
    sync_batchnorm(model, torch.device("cuda"))
    count_exchange(model, waits)
    model[0].forward = lambda x: (time.take(10), x)[1]
    begin(waits, clock)
    time.take(100)
    model(torch.ones(2, 4))
    assert blocked_s(clock) == 10


def test_a_copy_tells_no_clock() -> None:
    waits = Waits()
    waits.clock = timing.HostClock()
    assert pickle.loads(pickle.dumps(waits.counted)).__self__.clock is None
