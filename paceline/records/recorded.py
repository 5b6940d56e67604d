"""Recorded: how each rank ended, what really ran, and the result of a run."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from paceline.errors import Outcome
from paceline.records.base import Body, Part, Record
from paceline.records.kept import BestMetric
from paceline.records.rundir import RunDir
from paceline.records.words import count, size


class Proof(Part):
    """One thing that was decided, what really ran, and how that was seen."""

    what: str
    requested: str
    effective: str
    proof: str
    ok: bool

    def __str__(self) -> str:
        seen = f"{self.effective} ran ({self.proof})"
        return f"audit: {self.what}: {self.requested} was decided, and {seen}"


class Audit(Record):
    """What really ran, seen by rank 0 while it took step `step`."""

    step: int
    proofs: list[Proof]

    @property
    def mismatches(self) -> list[Proof]:
        return [proof for proof in self.proofs if not proof.ok]


class Overlap(Record):
    """Where the communication of one step went, on one rank."""

    rank: int
    step: int
    communication_s: float = Field(description="While at least one collective was on its way.")
    exposed_s: float = Field(description="Of it, while nothing was computed.")
    compute_s: float


def last_to_arrive(overlaps: Sequence[Overlap]) -> Overlap:
    """Return the rank that was in its collectives for the shortest time: it came last, so what it
    saw is the exchange itself. The others' has waiting for it in it."""
    return min(overlaps, key=lambda each: each.communication_s)


class RankError(Part):
    kind: str
    message: str
    place: str = Field("", description="The user's own line that led to it, where there is one.")
    traceback: str = ""


class Attempt(Record):
    """One start of all ranks: attempt.json while it lives, attempts/<number>/attempt.json after."""

    number: int = Field(description="1, 2, ... over all restarts and resumes of the run.")
    resume: bool = Field(description="Go on from the newest checkpoint that can be trusted.")
    allow_change: bool = Field(False, description="The user accepts other settings or data.")
    started_at: float
    halt_seen: int | None = Field(
        None, description="Modification time, in ns, of a .HALT that was there before the run."
    )
    ended_at: float | None = None
    outcome: Outcome | None = None
    first_step: int = Field(0, description="The first step it took; 0: none.")
    last_step: int = 0
    cause: str = Field("", description="Why it ended, where it did not end well.")
    notes: list[str] = Field([], description="What rank 0 had to say when it began.")
    stopped: str = Field("", description="Why no other attempt followed, where one might have.")


class AttemptSummary(Part):
    """An attempt as the result tells it."""

    number: int
    first_step: int
    last_step: int
    outcome: Outcome | None
    cause: str
    started_at: float
    ended_at: float | None


class RankEnd(Record):
    """How a rank's process ended, as its supervisor saw it: exit code, or -N for signal N."""

    rank: int
    host: str
    exit_code: int
    asked_to_end: bool = Field(
        False, description="True where its supervisor had asked it to stop, or killed it."
    )
    signal: int | None = Field(None, description="What its supervisor was asked to end by.")
    stall: Literal["", "start", "progress", "total", "collective"] = Field(
        "", description="The deadline missed."
    )
    failed: bool = Field(False, description="It left no verdict, or one with an error.")
    was_stopped: bool = Field(False, description="True for a process that a signal had stopped.")
    silent_s: float = Field(
        0.0, description="For how long it had written no heartbeat when it was killed."
    )
    ran_out_of_memory: bool = Field(False, description="The kernel killed it to free memory.")


class Unwritten(Part):
    """What a disk did not take of one file: it was full, read-only, or gone."""

    file: str
    num_writes: int = Field(description="How many writes failed.")
    num_bytes: int = Field(description="Not in the file; 0 where all was written later.")
    error: str = Field(description="Of the first write that failed.")
    missing: list[tuple[int, int]] = Field([], description="Spans of steps that have no row.")

    def __str__(self) -> str:
        failed = f"{self.file}: {count(self.num_writes, 'write')} failed ({self.error})"
        if not self.num_bytes:
            return f"{failed}, and all was written later"
        spans = [f"{a} to {b}" if a < b else str(a) for a, b in self.missing]
        steps = f"; steps without a row: {', '.join(spans)}" if spans else ""
        return f"{failed}, {size(self.num_bytes)} lost{steps}"


def list_unwritten(run: RunDir) -> list[Unwritten]:
    """Return what this process could not write into a run directory."""
    return [
        Unwritten(
            file=str(path.relative_to(run.root) if path.is_relative_to(run.root) else path),
            num_writes=loss.num_writes,
            num_bytes=loss.num_bytes,
            error=loss.error,
            missing=list(loss.missing),
        )
        for path, loss in list(run.lost.by_file.items())
    ]


class RankVerdict(Record):
    """A rank's own last word, written before its process group is torn down."""

    rank: int
    host: str
    outcome: Outcome
    step: int
    ended_at: float
    error: RankError | None = None
    bad_step: int | None = None
    bad_sample_ids: list[int] = []
    loss_was_finite: bool = True
    why_early: str = Field("", description="Why a run that ended well ended before its last step.")
    notes: list[str] = []
    flops_per_sample: float | None = None
    flops_source: str = ""
    data_fingerprint: str = ""
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    unwritten: list[Unwritten] = []


class Fingerprints(Part):
    """What must agree before two runs count as the same experiment."""

    config: str
    code: str
    data: str
    hardware: str


class StepSeconds(Part):
    p50: float
    p90: float


class Window(Part):
    """Which steps of which file a figure was computed from."""

    file: str
    first_step: int
    last_step: int
    num_compile_steps: int = Field(0, description="Set apart because they held a compilation.")
    warmup: Literal["found", "fixed"] = Field(
        "found", description="fixed: as observe.warmup_steps said, which was the rule up to 0.6."
    )

    def __str__(self) -> str:
        apart = f", {self.num_compile_steps} compile steps apart" if self.num_compile_steps else ""
        rule = ", after a fixed warm-up" if self.warmup == "fixed" else ""
        return f"{self.file}, steps {self.first_step} to {self.last_step}{apart}{rule}"


class RankMemory(Part):
    rank: int
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None


class Failure(Part):
    """The root cause of a failed run, in the order a person looks for it."""

    rank: int
    host: str
    step: int
    phase: str
    message: str
    log: str  # "": of a script that attached, whose output is not ours to keep
    others: list[str] = []


class CheckpointFacts(Part):
    """The checkpoints of a run, over all its attempts (checkpoints.csv)."""

    num_written: int
    num_failed: int
    last_step: int | None = Field(description="Of the newest that was written.")
    num_bytes: int = Field(description="Of that one.")
    stall_s: float = Field(description="How long training waited for all of them.")
    duration_s: float = Field(description="From its step until it was safe, of the slowest one.")


class PipelineRank(Part):
    """A rank in the pass that is drawn: busy, bubble and communication add up to its length. The
    largest queues and activations in flight are those of all passes that were measured."""

    rank: int
    stages: list[int]
    busy_s: float
    bubble_s: float = Field(description="Waited for an action of another rank to end.")
    communication_s: float = Field(description="Waited after it had ended: transfer and overhead.")
    utilisation: float
    max_forward_queue: int
    max_backward_queue: int
    simulated_forward_queue: int = 0
    simulated_backward_queue: int = 0
    max_in_flight: int
    in_flight_limit: int = Field(description="What the schedule's own order holds at the most.")
    peak_bytes: int | None


class PipelineStage(Part):
    """Seconds of one microbatch; None where the schedule has no such action."""

    stage: int
    utilisation: float = Field(description="Of the ranks that hold it.")
    forward_s: float
    backward_s: float | None
    input_s: float | None
    weight_s: float | None


class IdleShares(Part):
    """Where the idle time went, as shares of all ranks' time; they add up to `PipelineFacts.idle`.
    Some can be negative: a schedule may gain by what its formula does not know."""

    formula: float
    unequal_actions: float = Field(description="F, I and W are not what the formula is for.")
    uneven_stages: float
    overhead: float = Field(description="Of the host, before every action.")
    transfers: float
    passed_on: float = Field(description="Waited for ranks that were late themselves.")


class PipelineFacts(Part):
    """What the last passes of a run measured, beside what its schedule promises."""

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    num_passes: int = Field(description="That were measured, the first ones left out.")
    step: int = Field(description="Of the pass that is drawn: the median one by length.")
    number: int = Field(description="Which pass of that step.")
    pass_s: float = Field(description="Of that pass.")
    simulated_s: float = Field(description="With the measured times of stages, transfers free.")
    idle: float = Field(description="Share of all ranks' time in that pass.")
    idle_low: float = Field(description="The least of all passes.")
    idle_high: float
    simulated_idle: float
    formula: str
    is_exact: bool = Field(description="The formula is the simulator's own result here.")
    shares: IdleShares
    overhead_s: float = Field(description="Median gap before an action whose input was there.")
    transfer_s: float = Field(description="Median way of a result that a rank sat waiting for.")
    ranks: list[PipelineRank]
    stages: list[PipelineStage]


class Stability(Part):
    """Whether one run was steady (stats/stability.py has the gates)."""

    p90_over_p50: float
    drift: float = Field(description="Of the step time over the window, relative.")
    gpu_mib_per_min: float | None = Field(description="Of the GPU whose memory grew most.")
    host_mib_per_min: float | None = Field(description="Of the rank whose memory grew most.")
    problems: list[str] = Field(description="Gates that it did not pass.")


class Result(Record):
    """How a run ended and what it measured: the last line of every run, printed by `--json`."""

    SCHEMA: ClassVar[int] = 3

    run_dir: str
    name: str
    outcome: Outcome
    exit_code: int
    steps: int
    final_loss: float | None
    final_loss_step: int | None = Field(
        None, description="Before `steps` where later rows are missing, or are not finite."
    )
    val_loss: float | None
    metrics: dict[str, float] = Field(
        {}, description="The last of each metric, by name, where it is a number; not the losses."
    )
    best: BestMetric | None = Field(None, description="By train.best, over the whole run.")
    why_early: str = Field("", description="Why a run that ended well ended before its last step.")
    step_s: StepSeconds | None
    samples_per_s: float | None
    tokens_per_s: float | None
    steps_per_s: float | None
    tflops_per_rank: float | None
    mfu: float | None
    mfu_note: str
    matmul_share: float | None = Field(
        None, description="TFLOP/s a rank over the matmul rate that `paceline check` kept."
    )
    window: Window | None
    stability: Stability | None = Field(
        None, description="Gates on the speed and memory of this run; None where none was measured."
    )
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None
    rank_memory: list[RankMemory]
    world_size: int
    strategy: str
    precision: str
    fingerprints: Fingerprints
    data_facts: dict[str, float]
    padding: float | None = Field(
        None,
        description="Share of what was computed that only filled samples up to the longest of their"
        " batch, mean of all steps; None where the data has no lengths.",
    )
    skipped_steps: int
    bad_step: int | None
    bad_ranks: list[int] = Field(
        [], description="Ranks whose own loss was not finite in it; none: only gradients were not."
    )
    bad_sample_ids: list[int]
    failure: Failure | None
    notes: list[str]
    unwritten: list[Unwritten] = Field([], description="What the disk did not take, by file.")
    attempts: list[AttemptSummary] = []
    checkpoints: CheckpointFacts | None = None
    pipeline: PipelineFacts | None = None
    ettr: float | None = Field(
        None, description="Seconds in steps that count, over the wall time of all attempts."
    )
    started_at: float
    elapsed_s: float

    @staticmethod
    def update_to_2(body: Body) -> Body:
        """Before 0.4 a run was one attempt and kept nothing."""
        return body | {"attempts": [], "checkpoints": None, "ettr": None}

    @staticmethod
    def update_to_3(body: Body) -> Body:
        """Up to 0.6 the rates left out a fixed number of steps."""
        window = body["window"]
        return body | {"window": window and window | {"warmup": "fixed"}}

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak of the rank that held most: active bytes on a GPU, RSS on a CPU."""
        return self.peak_active_bytes or self.peak_reserved_bytes
