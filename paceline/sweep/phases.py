"""Which cells run, how often and for how long: one round, or a pilot, a final and extras.

A   every cell, short runs; where each runs once there is no verdict, only an order
B   those that A could not tell from the best (at least two), or the best N, full runs
C   the winner of B, and the winner with each of the extras
"""

from collections.abc import Sequence
from typing import Literal

from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.records.words import text_cell
from paceline.stats.figures import lower_is_better
from paceline.stats.standings import Standings
from paceline.sweep.spec import SweepSpec

PILOT, FINAL, EXTRAS = "A", "B", "C"
MIN_FINALISTS = 2
MIN_PILOT_STEPS = 20


def first_phase(spec: SweepSpec, cells: Sequence[SweptCell]) -> SweptPhase:
    """Return the phase that runs first: the only one, or the pilot."""
    runnable = [cell.name for cell in cells if not cell.refusal]
    if not spec.phases:
        return SweptPhase(name="", cells=runnable, repeats=spec.repeats, steps=spec.steps)
    return SweptPhase(
        name=PILOT, cells=runnable, repeats=spec.pilot_repeats, steps=pilot_steps(spec)
    )


def pilot_steps(spec: SweepSpec) -> int:
    """Return the steps of a run in the pilot: as asked, or a third of the full length."""
    if spec.pilot_steps != "auto":
        return spec.pilot_steps
    return min(spec.steps, max(MIN_PILOT_STEPS, spec.steps // 3))


def in_phase(name: str, cells: Sequence[SweptCell]) -> list[SweptCell]:
    """Name the cells after their phase: runs of another length are another group."""
    return [cell.model_copy(update={"name": f"{name}:{cell.name}"}) for cell in cells]


def plain_name(name: str) -> str:
    """Return a cell's name without its phase."""
    return name.partition(":")[2] if name[1:2] == ":" else name


def choose_finalists(record: SweepRecord, spec: SweepSpec, pilot: Standings) -> list[SweptCell]:
    """Return the best cells, as many as asked for, or else all that may be the best, at least two;
    and the baseline."""
    order = [row.group.name for row in pilot.rows]
    wanted = _num_finalists(spec)
    if wanted == "auto":
        chosen = {row.group.name for row in pilot.winners} | set(order[:MIN_FINALISTS])
    else:
        falls = lower_is_better(record.metric)
        by_mean = sorted(pilot.rows, key=lambda row: row.value if falls else -row.value)
        chosen = {row.group.name for row in by_mean[:wanted]}
    if record.baseline is not None:
        chosen.add(f"{PILOT}:{record.baseline}")
    return [_plain(record.cell(name)) for name in record.phases[0].cells if name in chosen]


def _num_finalists(spec: SweepSpec) -> int | Literal["auto"]:
    """Without repeats nothing can be told from the best: the pilot then is a shortlist."""
    is_blind = spec.finalists == "auto" and spec.pilot_repeats == 1
    return MIN_FINALISTS if is_blind else spec.finalists


def choose_extras(record: SweepRecord, spec: SweepSpec, winner: str) -> list[SweptCell]:
    """Return the winner, the baseline, and the winner with each extra."""
    base = _plain(record.cell(winner))
    kept = [base]
    if record.baseline not in (None, base.name):
        kept.append(_plain(record.cell(f"{FINAL}:{record.baseline}")))
    return [*kept, *with_extras(spec, base)]


def with_extras(spec: SweepSpec, base: SweptCell) -> list[SweptCell]:
    """Return a cell for each extra: `base` with the overrides of that extra."""
    return [
        SweptCell(
            name=text_cell(f"{base.name},+{name}"),
            settings={**base.settings, "extra": name},
            overrides=[*base.overrides, *overrides],
        )
        for name, overrides in spec.extras.items()
    ]


def _plain(cell: SweptCell) -> SweptCell:
    return cell.model_copy(update={"name": plain_name(cell.name)})


def describe_schedule(spec: SweepSpec, cells: Sequence[SweptCell]) -> list[str]:
    """Say what will run and what it costs, before it starts."""
    num = sum(not cell.refusal for cell in cells)
    if not spec.phases:
        return [_cost("", num, spec.repeats, spec.steps)]
    lines = [_cost("A, pilot: ", num, spec.pilot_repeats, pilot_steps(spec))]
    wanted = _num_finalists(spec)
    if wanted == "auto":
        low, high = (_cost("", n, spec.repeats, spec.steps) for n in (min(MIN_FINALISTS, num), num))
        lines.append(f"B, final, those not told from the best: {low} at least; {high} at most")
    else:
        best = min(wanted, num)
        lines.append(_cost(f"B, final, the best {best}: ", best, spec.repeats, spec.steps))
    names = ", ".join(spec.extras)
    if spec.extras:
        count = 1 + bool(spec.baseline) + len(spec.extras)
        lines.append(
            _cost(f"C, the winner with and without {names}: ", count, spec.repeats, spec.steps)
        )
    return lines


def _cost(text: str, num_cells: int, repeats: int, steps: int) -> str:
    runs = num_cells * repeats
    cells = "1 cell" if num_cells == 1 else f"{num_cells} cells"
    return (
        f"{text}{cells} x {repeats} repeats x {steps} steps = {runs} runs, {runs * steps:,} steps"
    )
