"""Decided, before a strategy is chosen: pipeline schedules held against each other."""

from typing import Literal

from pydantic import Field

from paceline.records.base import Part, Record
from paceline.records.decided import Finding


class Sourced(Part):
    """Where a number of a comparison comes from."""

    what: str
    kind: Literal["given", "measured", "counted", "assumed"]
    because: str


class NeededMicrobatches(Part):
    """For a bubble of at most the target; None: no number that was tried will do."""

    num_microbatches: int | None
    bubble: float = Field(description="What they idle; without a number, the least that is left.")
    because: str


class ScheduleRow(Part):
    """One schedule for this model and link. What is None or 0 is unknown where it is refused."""

    name: str
    stages_per_rank: int
    status: Literal["fits", "too large", "refused"]
    because: str
    step_s: float | None = Field(None, description="One pass of all microbatches, simulated.")
    against_best: float | None = Field(None, description="Step time over the best one's, less 1.")
    bubble: float | None = Field(None, description="Share of all ranks' time that is idle.")
    formula: str = ""
    formula_bubble: float | None = None
    formula_source: str = ""
    is_exact: bool = Field(False, description="The formula is the simulator's own result here.")
    peak_bytes: float | None = Field(None, description="State and activations, fullest rank.")
    fullest_rank: int | None = None
    in_flight: float | None = Field(
        None,
        description="Microbatches whose activations the fullest rank holds; 1 is one microbatch in"
        " a P-th of the model.",
    )
    parameter_copies: int = 1
    needed: NeededMicrobatches | None = None


class ScheduleComparison(Record):
    """`paceline plan --schedule`: fastest first, then what is too large, then what is refused."""

    name: str
    workload: str
    num_ranks: int = Field(description="Of one pipeline.")
    num_pipelines: int
    num_microbatches: int
    samples_per_microbatch: float
    num_blocks: int
    target_bubble: float
    block_forward_s: list[float] = Field(description="Of one microbatch, as are all seconds here.")
    block_input_s: list[float]
    block_weight_s: list[float]
    transfer_s: float = Field(description="A microbatch's activations from rank to rank.")
    overhead_s: float = Field(description="Of the host, for every action.")
    memory_bytes: float | None = Field(description="What a rank has; None: held against nothing.")
    sources: list[Sourced]
    schedules: list[ScheduleRow]
    drawing: str = Field("", description="The order of the best one, where it is small.")
    findings: list[Finding] = []

    @property
    def best(self) -> ScheduleRow | None:
        return next((row for row in self.schedules if row.status == "fits"), None)
