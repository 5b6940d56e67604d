"""Plants a fault in a rank that trains, for `paceline drill`. Nothing here runs in any other run.

A fault acts where the clock of the step says that a phase begins, so it is inside that phase for
every engine, and nobody who judges the run knows of it.
"""

import logging
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.records.drills import Drill, Fault
from paceline.records.phases import Phase
from paceline.records.rundir import RunDir
from paceline.strategies.base import Totals
from paceline.train.loop import LoopParts

LOG = logging.getLogger("paceline")
SPIKE_EVERY, SPIKE_STEPS = 8, 6.0  # one step in eight takes six more
DISK_STEPS = 1.0  # a slow disk makes each step wait for as long as it takes
HANG_S = 3600.0
ROOM_BYTES = 64 << 20

Act = Callable[[int], None]  # called in a step


def plant_asked(run: RunDir, parts: LoopParts, rank: int) -> None:
    """Plant the fault that a drill has left in the run directory; nothing in any other run."""
    if run.drill.is_file():
        plant(Drill.load(run.drill), parts, rank)


def plant(drill: Drill, parts: LoopParts, rank: int) -> None:
    """Plant the fault on the rank it is for; other ranks only take part in the collectives that it
    needs."""
    if drill.fault is Fault.DESYNC:
        _on_phase(parts, Phase.FORWARD, _desync(drill, rank))
        return
    if rank != drill.rank and not drill.fault.is_everywhere:
        return
    LOG.info("drill: %s from step %d on: %s", drill.fault, drill.step, drill.fault.words)
    if drill.fault is Fault.NAN:
        _spoil_loss(drill, parts)
        return
    phase, act = _choose(drill, parts)
    _on_phase(parts, phase, act)


def _choose(drill: Drill, parts: LoopParts) -> tuple[Phase, Act]:
    """Return when in a step a fault acts, and what it does."""
    pace = Pace(parts)
    if drill.fault is Fault.SPIKES:
        return Phase.FORWARD, _from(drill.step, lambda step: pace.stall(step, SPIKE_STEPS))
    if drill.fault is Fault.SLOW_DISK:
        return Phase.DATA, _from(drill.step, lambda step: pace.rest(DISK_STEPS))
    if drill.fault.phase is not None:
        return drill.fault.phase, _from(drill.step, lambda step: pace.rest(drill.share))
    acts: dict[Fault, Callable[[], None]] = {
        Fault.KILL: lambda: os.kill(os.getpid(), signal.SIGKILL),
        Fault.HANG: lambda: time.sleep(HANG_S),
        Fault.OUT_OF_MEMORY: lambda: _exhaust_memory(parts),
        Fault.FULL_DISK: _fill_disk,
    }
    act = acts[drill.fault]
    return Phase.FORWARD, lambda step: act() if step == drill.step else None


def _from(first: int, act: Act) -> Act:
    return lambda step: act(step) if step >= first else None


def _on_phase(parts: LoopParts, phase: Phase, act: Act) -> None:
    """Call `act` once a step, as soon as it enters a phase."""
    clock, last = parts.clock, [0]
    begin, enter = clock.begin, clock.enter

    def act_once() -> None:
        if last[0] != clock.step:
            last[0] = clock.step
            act(clock.step)

    def begin_and_act(step: int) -> None:
        begin(step)
        if phase is Phase.DATA:
            act_once()

    def enter_and_act(entered: str) -> None:
        enter(entered)
        if entered == phase:
            act_once()

    setattr(clock, "begin", begin_and_act)  # noqa: B010  (a method of this one clock)
    setattr(clock, "enter", enter_and_act)  # noqa: B010


class Pace:
    """Knows how long a step takes without the fault, and rests for a share of that."""

    def __init__(self, parts: LoopParts) -> None:
        self._begun: list[float] = []
        self._usual_s = 0.0
        previous = parts.clock.on_step

        def note(step: int) -> None:
            previous(step)
            self._begun.append(time.perf_counter())

        parts.clock.on_step = note

    @property
    def step_s(self) -> float:
        if not self._usual_s:
            times = [b - a for a, b in zip(self._begun[1:], self._begun[2:], strict=False)]
            self._usual_s = median(times) if times else 0.05
        return self._usual_s

    def rest(self, steps: float) -> None:
        time.sleep(steps * self.step_s)

    def stall(self, step: int, steps: float) -> None:
        if step % SPIKE_EVERY == 0:
            self.rest(steps)


def _spoil_loss(drill: Drill, parts: LoopParts) -> None:
    """Make the loss of one step NaN, and its gradient: through the scale, by which every engine
    multiplies its loss. A stage of a pipeline has gradients and maybe no loss, and they are nobody
    else's."""
    engine = parts.engine
    compute = engine.forward_backward

    def spoilt(batches: list[object], scale: float | Tensor, clock: object) -> Totals:
        if parts.clock.step != drill.step:
            return compute(batches, scale, parts.clock)
        made = compute(batches, math.nan, parts.clock)
        if parts.plan.pipeline is None:
            return made._replace(loss_sum=made.loss_sum * math.nan)
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan)
        return made

    engine.forward_backward = spoilt  # type: ignore[method-assign,assignment]


def _desync(drill: Drill, rank: int) -> Act:
    """Run a collective in every step, on a group of its own, and leave it out once."""
    group = dist.new_group(backend="gloo")
    kept: list[tuple[object, Tensor]] = []

    def call(step: int) -> None:
        if rank == drill.rank and step == drill.step:
            LOG.info("drill: a collective is left out in step %d", step)
            return
        sent = torch.zeros(1)
        kept[:] = [*kept[-64:], (dist.all_reduce(sent, group=group, async_op=True), sent)]

    return call


def _exhaust_memory(parts: LoopParts) -> None:
    """Ask for more than this process may have: its limit is lowered first, so that no other process
    of the machine notices."""
    device = next(parts.engine.module.parameters()).device
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved() + ROOM_BYTES) / torch.cuda.mem_get_info()[1])
        )
    else:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    torch.ones(ROOM_BYTES, device=device).sum()


def _fill_disk() -> None:
    """Let no file of this process grow any more, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
