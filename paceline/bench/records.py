"""bench.json: what every pair of a bench measured, and what that means."""

from typing import Literal

from pydantic import Field

from paceline.records import Fingerprints, Part, Record
from paceline.records.profiled import KernelTime
from paceline.stats.intervals import Interval

Status = Literal["ok", "failed", "skipped", "stopped"]


class Range(Part):
    """A figure with the interval that holds the true one."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval | None) -> "Range | None":
        return None if interval is None else cls(**interval._asdict())


class ArmResult(Part):
    """One side of a pair. Lists have one number per run, in the order of the repeats."""

    name: str
    overrides: list[str] = []
    status: Status
    because: str = ""
    run_dirs: list[str] = Field([], description="Inside the bench's directory.")
    rates: list[float] = []
    peak_bytes: list[int] = []
    losses: list[float] = Field([], description="Of the first run, step by step.")
    rate: Range | None = None
    step_s_p50: float | None = Field(None, description="Median over the runs.")
    step_s_p90: float | None = None
    startup_s: float | None = Field(None, description="Until step 1, apart from every rate.")
    compile_s: float | None = Field(None, description="Of steps that compiled, also apart.")
    exposed_s: float | None = Field(
        None, description="Communication of a step that nothing hid; the last rank's, median."
    )
    speedup: Range | None = Field(None, description="Rate over the baseline's.")
    verdict: str = ""
    memory_ratio: Range | None = Field(None, description="Baseline's peak bytes over this one's.")
    memory_verdict: str = ""
    loss_difference: float | None = Field(None, description="Worst over steps and runs, relative.")
    fingerprints: Fingerprints | None = None
    busy_percent: list[float] = Field(
        [], description="Of each GPU of the last run: how much of the time it was busy."
    )


class ArmProfile(Part):
    """What the profiled run of an arm tells of its rank 0; `because` where there is none."""

    arm: str
    because: str = ""
    trace: str = Field("", description="Inside the bench's directory, for ui.perfetto.dev.")
    categories: dict[str, float] = Field({}, description="Seconds by category of kernels.")
    top: list[KernelTime] = []
    exposed_share: float | None = Field(None, description="Communication that nothing hides.")
    idle_share: float | None = None
    launch_gap_share: float | None = None
    sentences: list[str] = []


class PairResult(Part):
    """One pair. `failed`: a run crashed, or the losses do not agree. Being slower is a result,
    not a failure."""

    target: str
    title: str
    goal: Literal["speed", "memory"]
    status: Status
    because: str = ""
    device: str
    recipe: str = ""
    metric: str = ""
    per_device: bool = False
    baseline: str = ""
    steps: int = 0
    repeats: int = 0
    differs: dict[str, str] = {}
    equal: dict[str, str] = {}
    loss_tolerance: float | None = None
    loss_because: str = ""
    arms: list[ArmResult] = []
    profiles: list[ArmProfile] = Field([], description="Where --profile asked for them.")

    def arm(self, name: str) -> ArmResult:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def measured(self) -> list[ArmResult]:
        return [arm for arm in self.arms if arm.rates]


class GateRow(Part):
    """A stored figure against the new one. `ratio` above 1: the new one is better."""

    target: str
    arm: str
    what: Literal["rate", "speedup", "memory"]
    stored: float
    found: float
    ratio: Range
    is_worse: bool
    floor: float = Field(description="Below it a ratio would matter.")

    def __str__(self) -> str:
        word = "WORSE" if self.is_worse else "not worse"
        if not self.is_worse and self.ratio.low < self.floor:
            word = f"cannot tell: a loss down to {self.ratio.low:.2f} would not be seen"
        span = f"{self.ratio.value:.3f} ({self.ratio.low:.3f} to {self.ratio.high:.3f})"
        return f"{self.target}, {self.arm}: {self.what} is {span} of what is stored: {word}"


class BenchReport(Record):
    out: str
    exit_code: int
    hardware: dict[str, str]
    margin: float
    started_at: float
    elapsed_s: float
    pairs: list[PairResult]
    gate: list[GateRow] = []
    saved: str = Field("", description="The expectations file that was written.")
