"""Clocks and what is read back from a device: known inputs, worked-out outputs."""

import pytest
import torch

from paceline.strategies import clock as timing
from paceline.strategies.waits import Waits
from paceline.train.readback import Readback


def test_a_host_clock_accounts_for_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    clock = timing.HostClock()
    for phase, seconds in [("data", 1), ("forward", 2), ("backward", 3), ("forward", 2)]:
        if phase == "data":
            clock.begin(1)
        else:
            clock.enter(phase)
        now[0] += seconds
    clock.begin(2)
    (times,) = clock.finished()
    assert times.phases_s == {"data": 1, "forward": 4, "backward": 3}
    assert times.wall_s == 8 and times.unaccounted_s == 0
    assert clock.finished() == []


def test_readback_hands_out_in_order_and_not_early() -> None:
    readback = Readback(torch.device("cpu"))
    for tag in (1, 2, 3):
        readback.push(tag, (torch.tensor(float(tag)), torch.tensor([0.0, 1.0])))
    assert readback.pop(2, wait=True) == [(1, [1.0, [0.0, 1.0]]), (2, [2.0, [0.0, 1.0]])]
    assert readback.pop(2, wait=True) == []
    assert readback.pop(9, wait=False) == [(3, [3.0, [0.0, 1.0]])]


@pytest.mark.parametrize("is_alone", [False, True])
def test_who_is_alone_waits_for_nobody(is_alone: bool) -> None:
    """One rank: neither counted nor paid for."""
    clock, waits = timing.HostClock(is_alone), Waits()
    clock.knows_blocked, waits.clock = True, clock
    objective = torch.ones(1, requires_grad=True).sum()
    clock.begin(1)
    waits.until_returned(objective)
    objective.backward()
    clock.unblock()
    with clock.blocked():
        pass
    clock.pause("end")
    (row,) = clock.finished()
    assert (row.blocked_s == {}) == is_alone
    assert (objective._backward_hooks is None) == is_alone


def test_waiting_inside_of_waiting_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers inside of what waits already; and an error ends it."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    clock = timing.HostClock()
    clock.knows_blocked = True
    clock.begin(1)
    with pytest.raises(OSError), clock.blocked():
        now[0] += 1
        with clock.blocked():
            now[0] += 2
        now[0] += 4
        raise OSError
    now[0] += 8  # its own work
    clock.pause("end")
    (row,) = clock.finished()
    assert row.blocked_s == {"data": 7} and row.wall_s == 15
