"""Swept: what a sweep was asked to do, sweep.json."""

from typing import Literal

from pydantic import Field

from paceline.records.base import Part, Record

Metric = str  # one of stats/figures.py:METRICS, or a job's own, as val/wer:min


class SweptCell(Part):
    """One configuration of the matrix. With a `refusal` it never runs."""

    name: str
    settings: dict[str, str] = Field(description="Axis key to the value as it was typed.")
    overrides: list[str] = Field(description="What the recipe gets for this cell.")
    refusal: str = Field("", description="Why the plan has no place for it.")


class SweptPhase(Part):
    """A part of the schedule. Those after the first are known when the one before has ended."""

    name: str = Field(description="A pilot, B final, C extras; or the whole sweep.")
    cells: list[str]
    repeats: int
    steps: int


class SweepRecord(Record):
    """The question: nothing in it depends on what was measured, but for later phases' cells."""

    mode: Literal["sweep", "ab", "both", "bench"]
    recipe: str
    overrides: list[str]
    axes: dict[str, list[str]]
    cells: list[SweptCell]
    phases: list[SweptPhase]
    metric: Metric
    margin: float
    baseline: str | None = None
    target: str | None = None
    seed: int
    loss_tolerance: float
    tail_points: int = Field(20, description="Timing points that tail_* columns are the mean of.")

    def cell(self, name: str) -> SweptCell:
        return next(cell for cell in self.cells if cell.name == name)
