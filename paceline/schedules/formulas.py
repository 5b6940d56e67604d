"""What each schedule's bubble should be, in closed form, and where that is exact.

F, I, W are the times of a stage for a microbatch, B = I + W; P ranks, M microbatches, v stages a
rank. tests/unit/test_pipeline_formulas.py holds each against the simulator. Idle time counts from
the first start to the last end of the whole pipeline. Zero-bubble papers count from a rank's own
first action to its own last, which leaves out (P - 1) F.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from paceline.schedules.actions import Kind
from paceline.schedules.orders import require_shape
from paceline.schedules.simulate import Pairing
from paceline.schedules.timeline import StageTimes, Times

GPIPE = "https://arxiv.org/abs/1811.06965, section 2.3"
MEGATRON = "https://arxiv.org/abs/2104.04473, section 2.2"
ZERO_BUBBLE = "https://arxiv.org/abs/2401.10241"
DUALPIPE = "https://github.com/deepseek-ai/DualPipe, table of bubbles"
EQUAL = Times(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Formula:
    """Seconds of a rank in a step. `is_exact`: the simulator gives the same; else approximate."""

    idle_s: float
    busy_s: float
    text: str
    source: str
    is_exact: bool

    @property
    def total_s(self) -> float:
        return self.idle_s + self.busy_s

    @property
    def bubble(self) -> float:
        return self.idle_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class _Shape:
    """P, M, v and the mean times of a stage."""

    ranks: int
    microbatches: int
    stages: int
    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float
    pairing: Pairing

    @property
    def are_equal(self) -> bool:
        """Say whether F = I = W: what the schedules with split backwards are drawn for."""
        return self.forward_s == self.input_s == self.weight_s

    @property
    def is_sum(self) -> bool:
        return math.isclose(self.backward_s, self.input_s + self.weight_s)


def bubble_formula(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    times: Times,
    stages_per_rank: int | Literal["auto"] = "auto",
    pairing: Pairing = Pairing.IN_TURN,
) -> Formula:
    """Return the formula of a schedule that can be drawn; for unequal stages it uses the mean."""
    stages = require_shape(name, num_ranks, num_microbatches, stages_per_rank)
    num_stages = num_ranks if name == "dualpipe" else num_ranks * stages
    spread = times.of_stages(num_stages)
    means = {kind: fmean(seconds) for kind, seconds in spread.seconds.items()}
    shape = _Shape(
        num_ranks,
        num_microbatches,
        num_stages // num_ranks,
        means[Kind.FORWARD],
        means[Kind.INPUT],
        means[Kind.WEIGHT],
        means[Kind.BACKWARD],
        pairing,
    )
    made = _FORMULAS[name](shape)
    is_exact = made.is_exact and _is_plain(spread)
    return Formula(made.idle_s, made.busy_s, made.text, made.source, is_exact)


def _is_plain(spread: StageTimes) -> bool:
    """Say whether stages are equal and transfers free: formulas know nothing else."""
    is_balanced = all(len(set(seconds)) == 1 for seconds in spread.seconds.values())
    is_free = not any(spread.transfer_s) and not spread.overhead_s
    return is_balanced and is_free


def _whole_backwards(shape: _Shape, source: str) -> Formula:
    """Compute gpipe, 1f1b, and both with several stages per rank. Rounds smaller than P leave gaps
    too."""
    each_s = shape.forward_s + shape.backward_s
    short = (shape.stages - 1) * max(0, shape.ranks - shape.microbatches)
    text = "(P-1)/(M+P-1)" if shape.stages == 1 else "(P-1)/(vM+P-1)"
    idle_s = (shape.ranks - 1 + short) * each_s
    return Formula(idle_s, shape.microbatches * shape.stages * each_s, text, source, True)


def _zero_bubble(shape: _Shape) -> Formula:
    """Compute ZB-H1: weight gradients fill the end; no more than there is to wait for."""
    idle_s = (shape.ranks - 1) * (shape.forward_s + max(0.0, shape.input_s - shape.weight_s))
    is_exact = shape.microbatches >= shape.ranks
    return Formula(idle_s, _split_busy_s(shape), "(P-1)(F+I-W)", ZERO_BUBBLE, is_exact)


def _zbv(shape: _Shape) -> Formula:
    is_exact = shape.are_equal and shape.microbatches >= 2 * shape.ranks - 1
    idle_s = (shape.ranks - 1) * shape.forward_s
    text = "(P-1)F; 0 inside each rank"
    return Formula(idle_s, _split_busy_s(shape), text, ZERO_BUBBLE, is_exact)


def _eight_steps(shape: _Shape, half_ranks: int) -> Formula:
    """Compute DeepSeek's (P/2 - 1)(F&B + B - 3W), with F&B = F + B where a pair gains nothing. A
    forward that leaves before its pair's backward is done saves its own time once for each rank."""
    forward_s, whole_s = shape.forward_s, shape.input_s + shape.weight_s
    each_s, text = forward_s + 2 * whole_s - 3 * shape.weight_s, "(P/2-1)(F&B+B-3W)"
    if shape.pairing == Pairing.IN_TURN:
        each_s, text = each_s - forward_s, "(P/2-1)(2B-3W)"
    if shape.stages > 1:
        text = text.replace("P/2", "P")
    idle_s = max(0.0, (half_ranks - 1) * each_s)
    is_exact = shape.are_equal and shape.is_sum
    return Formula(idle_s, _split_busy_s(shape), text, DUALPIPE, is_exact)


def _split_busy_s(shape: _Shape) -> float:
    each_s = shape.forward_s + shape.input_s + shape.weight_s
    return shape.microbatches * shape.stages * each_s


_FORMULAS: dict[str, Callable[[_Shape], Formula]] = {
    "gpipe": lambda shape: _whole_backwards(shape, GPIPE),
    "1f1b": lambda shape: _whole_backwards(shape, MEGATRON),
    "interleaved_1f1b": lambda shape: _whole_backwards(shape, MEGATRON),
    "looped_bfs": lambda shape: _whole_backwards(shape, "https://arxiv.org/abs/2211.05953"),
    "interleaved_zb": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": lambda shape: _eight_steps(shape, shape.ranks),
    "dualpipe": lambda shape: _eight_steps(shape, shape.ranks // 2),
}
