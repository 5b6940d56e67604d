"""Steps as lines of train.log: what rank 0 says of one, the phases of every rank, and how far ranks
are apart.

    step 50/100 loss 3.2110 lr 0.0003 grad_norm 1.21 step_s 0.19 tokens/s 9210 ... peak_gib 11.20
    TimingRank step=50 rank=1 loss=3.2110 data_wait=0.41 preprocess=0.00 fwd=80.12 ... iter=190.02
        blocked=31.40                                                      (at the end of that line)
    TimingSpread step=50 ranks=2 data_wait=0.20 fwd=1.15 bwd=30.90 step=0.31 iter=31.02 slowest=1

All times are milliseconds; `blocked` is what it spent in collectives, where it may have waited. A
rank writes its own line, and whoever follows the logs writes the
spread below them, which is the largest minus the smallest: no rank waits for another to say it.
"""

import re
from collections.abc import Iterator, Mapping

from paceline.metrics import TRAIN, VAL
from paceline.records.decided import Plan
from paceline.records.phases import Phase
from paceline.records.tables import Cell

# `preprocess` is what loader processes do here, so a step has none of it.
NAMES: dict[str, tuple[Phase, ...]] = {
    "data_wait": (Phase.DATA,),
    "preprocess": (),
    "fwd": (Phase.FORWARD,),
    "bwd": (Phase.BACKWARD, Phase.COMM),
    "step": (Phase.OPTIMIZER,),
}
ALL_NAMES = (*NAMES, "iter")
LINE = re.compile(r"TimingRank step=(\d{1,18}) rank=(\d{1,9}) loss=\S+ (.*)")
MAX_WAITING = 64  # steps of which some rank's line has not come


def step_line(
    cells: Mapping[str, Cell], plan: Plan, active: int | None, reserved: int | None
) -> str:
    """Return what rank 0 says of a step: its row of training.csv, TFLOP/s of a rank where its FLOPs
    are counted by formula, and its own peak bytes so far, of a GPU or of its process."""
    step, unit = cells["step"], "tokens/s" if cells["tokens_per_s"] is not None else "samples/s"
    told = {name: cells[name] for name in cells if name.startswith((TRAIN, VAL, "val_loss"))}
    more = "".join(f" {name} {value:.4f}" for name, value in told.items() if value is not None)
    line = f"step {step}/{plan.steps} loss {cells['loss']:.4f}{more} lr {cells['lr']:.3g}"
    line += f" grad_norm {cells['grad_norm']:.3g} step_s {cells['step_s']:.4g}"
    line += f" {unit} {cells[unit.replace('/', '_per_')]:.1f}"
    if flops := plan.flops_per_sample.value:
        rate = flops * float(cells["samples_per_s"] or 0.0) / plan.world_size
        line += f" tflops_per_rank {rate / 1e12:.3g}"
    held = {"peak_gib": active, "reserved_gib": reserved} if active else {"rss_gib": reserved}
    return line + "".join(f" {name} {held / 2**30:.2f}" for name, held in held.items() if held)


def timing_line(
    step: int,
    rank: int,
    loss: float,
    phases_s: Mapping[str, float],
    wall_s: float,
    blocked_s: Mapping[str, float] | None = None,
) -> str:
    """Return what a rank says of one step; None: where it waited is not known."""
    sums = {name: sum(phases_s.get(p, 0.0) for p in phases) for name, phases in NAMES.items()}
    told = " ".join(f"{name}={1e3 * value:.2f}" for name, value in sums.items())
    line = f"TimingRank step={step} rank={rank} loss={loss:.4f} {told} iter={1e3 * wall_s:.2f}"
    if blocked_s is None:
        return line
    waited = sum(blocked_s.values()) + phases_s.get(Phase.COMM, 0.0)
    return f"{line} blocked={1e3 * waited:.2f}"


class Spreads:
    """Puts the lines of all ranks together, step by step."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._waiting: dict[int, dict[int, dict[str, float]]] = {}

    def note(self, line: str) -> Iterator[str]:
        """Take in a line of any rank's log; yield the spread of a step when all have spoken. What
        a job prints that only looks like one of ours is none."""
        found = LINE.search(line)
        times_ms = _read_times(found[3]) if found is not None else None
        if found is None or times_ms is None or int(found[2]) >= self.num_ranks:
            return
        step, rank = int(found[1]), int(found[2])
        ranks = self._waiting.setdefault(step, {})
        ranks[rank] = times_ms
        if len(ranks) == self.num_ranks:
            del self._waiting[step]
            yield spread_line(step, ranks)
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[min(self._waiting)]


def _read_times(cells: str) -> dict[str, float] | None:
    """Return the times of a line by name; None where one is missing, or is no number."""
    try:
        pairs = (word.partition("=") for word in cells.split())
        found = {name: float(value) for name, _, value in pairs}
    except ValueError:
        return None
    return found if found.keys() >= set(ALL_NAMES) else None


def spread_line(step: int, ranks: Mapping[int, Mapping[str, float]]) -> str:
    """Return how far the ranks of a step are apart, and which one the others waited for: who spent
    least in collectives came last to them. Where that is not known, data and forward decide: what
    follows has waiting for others in it."""
    names = [name for name in ALL_NAMES if name != "preprocess"]
    apart = {name: [each[name] for each in ranks.values()] for name in names}
    told = " ".join(f"{name}={max(of) - min(of):.2f}" for name, of in apart.items())
    if all("blocked" in each for each in ranks.values()):
        slowest = min(ranks, key=lambda rank: ranks[rank]["blocked"])
    else:
        slowest = max(ranks, key=lambda rank: ranks[rank]["data_wait"] + ranks[rank]["fwd"])
    return f"TimingSpread step={step} ranks={len(ranks)} {told} slowest={slowest}"
