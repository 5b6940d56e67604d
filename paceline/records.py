"""What passes between stages: frozen records, each a JSON file with a schema number.

A stage reads records and returns a record; `RunDir` (rundir.py) says where each one lies.
Nothing here imports torch, so reports and comparisons run anywhere.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import DataError, Outcome
from paceline.files import write_atomic


class Part(BaseModel):
    """A piece of a record: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Record(Part):
    """A part that is a file of its own. Bump SCHEMA when a field changes its meaning."""

    SCHEMA: ClassVar[int] = 1

    def to_json(self) -> str:
        body = {"schema": self.SCHEMA, **self.model_dump(mode="json")}
        return json.dumps(body, indent=2, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record; `DataError` when it is absent, damaged or of another schema."""
        try:
            body = json.loads(path.read_text())
            found = body.pop("schema")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error
        if found != cls.SCHEMA:
            raise DataError(
                f"{path} has schema {found}, this Paceline reads {cls.SCHEMA}\n"
                "hint: read it with the version that wrote it (env.json names it)"
            )
        try:
            return cls.model_validate(body)
        except ValueError as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error


class Choice(Part):
    """A decision kept with its reason: what was asked, what will run, why."""

    requested: Any
    value: Any
    because: str


class Finding(Part):
    """Something the user should know. An `error` stops the run before any rank starts."""

    severity: Literal["error", "warning", "note"]
    where: str = Field(description="The config key or the part of the machine it is about.")
    what: str
    hint: str = ""
    cause: Literal["config", "cluster", "data"] = Field(
        "config", description="What would have to change; picks the exit code of a refusal."
    )

    def __str__(self) -> str:
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{self.where}: {self.what}{hint}"


# Found: env.json


class Gpu(Part):
    index: int
    name: str
    uuid: str
    compute_capability: str
    memory_bytes: int


class Link(Part):
    """How two GPUs reach each other, as the driver reports it."""

    a: int
    b: int
    kind: str = Field(
        description="nvlink, nvswitch, or the common ancestor: pcie_switch, host_bridge, ..."
    )
    nvlinks: int


class Git(Part):
    commit: str
    branch: str
    dirty: bool


class Env(Record):
    """The machine as probed, before anything is decided."""

    host: str
    os: str
    cpu: str
    cores: int = Field(description="Cores this process may use, which can be fewer than exist.")
    memory_bytes: int
    gpus: list[Gpu]
    links: list[Link]
    driver: str | None
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]
    interfaces: list[str] = Field([], description="Network interfaces by name.")
    infiniband: list[str] = Field([], description="InfiniBand and RoCE devices by name.")
    hip: str | None = Field(None, description="torch's ROCm version.")
    git: Git | None
    variables: dict[str, str] = Field(description="Environment variables on the allow-list.")


# Decided: plan.json and launch.json


class BatchSplit(Part):
    """global_size = micro x grad_accum x dp, in samples per optimizer step."""

    micro: int
    grad_accum: int
    dp: int
    global_size: int


class ModelSize(Part):
    """A model's parameters; frozen ones have weights, but no gradients and no optimizer state."""

    num_trainable: int
    num_frozen: int
    trainable_bytes: int
    frozen_bytes: int


class StateBytes(Part):
    """Bytes one rank holds at rest: weights, gradients and optimizer state, no activations."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class Crew(Part):
    """How many ranks, on what, and who starts them."""

    launcher: Choice
    world_size: int
    num_nodes: int
    per_node: int = Field(description="Ranks on each machine; on the largest where they differ.")
    device: Choice
    backend: Choice
    device_indices: list[int] = Field(
        [], description="Which of the visible GPUs each local rank takes; empty: its own number."
    )


class Plan(Record):
    """Everything decided before a device is held. Ranks trust it."""

    name: str
    workload: str
    unit: str = Field(description="What the loss is averaged over and throughput counts.")
    world_size: int
    mesh: dict[str, int] = Field(description="Degree of each parallel axis; their product is W.")
    batch: BatchSplit
    units_per_sample: int | None
    steps: int
    crew: Crew
    device: Choice
    backend: Choice
    strategy: Choice
    precision: Choice
    compile: Choice
    fused_optimizer: Choice
    threads: Choice
    loader_workers: Choice
    model: ModelSize
    state_bytes: StateBytes
    flops_per_sample: Choice = Field(description="Forward and backward, recomputation not counted.")
    peak_flops: Choice = Field(description="Dense peak of one device in the chosen precision.")
    findings: list[Finding]

    def choices(self) -> dict[str, Choice]:
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in named.items() if isinstance(value, Choice)}

    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]


class RankPlace(Part):
    rank: int
    local_rank: int
    host: str
    device: str = Field(description="As torch names it in that rank.")
    gpu: int | None = Field(None, description="The number in launch.devices that it stands for.")


class Limits(Part):
    """How long things may take, in seconds; None: as long as they like."""

    start_s: float | None
    progress_s: float | None
    total_s: float | None
    grace_s: float
    collective_s: float


class LaunchPlan(Record):
    """How ranks are started: readable, and testable without the launcher it names."""

    SCHEMA: ClassVar[int] = 2

    launcher: str
    argv: list[str] = Field(description="The command, word by word; empty: no command is needed.")
    task: str = Field(description="What each rank does: train or check.")
    workload: str = Field(description="The workload as typed: a registered name or FILE.py:Class.")
    crew: Crew
    threads: int
    fabric: Choice
    env: dict[str, str]
    reasons: dict[str, str] = Field(description="Why a variable of env is set, where we chose it.")
    ranks: list[RankPlace]
    limits: Limits
    findings: list[Finding] = []


# Recorded: ranks/rank<r>/verdict.json and result.json


class RankError(Part):
    kind: str
    message: str
    place: str = Field("", description="The user's own line that led to it, where there is one.")
    traceback: str = ""


class RankEnd(Record):
    """How a rank's process ended, as its supervisor saw it: exit code, or -N for signal N."""

    rank: int
    host: str
    exit_code: int
    asked_to_end: bool = Field(False, description="True where the supervisor had sent TERM first.")
    stall: Literal["", "start", "progress", "total", "collective"] = Field(
        "", description="The deadline missed."
    )
    failed: bool = Field(False, description="It left no verdict, or one with an error.")
    was_stopped: bool = Field(False, description="True for a process that a signal had stopped.")
    ran_out_of_memory: bool = Field(False, description="The kernel killed it to free memory.")


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
    notes: list[str] = []
    flops_per_sample: float | None = None
    flops_source: str = ""
    data_fingerprint: str = ""
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None


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
    log: str
    others: list[str] = []


class Result(Record):
    """How a run ended and what it measured: the last line of every run, printed by `--json`."""

    run_dir: str
    name: str
    outcome: Outcome
    exit_code: int
    steps: int
    final_loss: float | None
    val_loss: float | None
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
    peak_active_bytes: int | None
    peak_reserved_bytes: int | None
    rank_memory: list[RankMemory]
    world_size: int
    strategy: str
    precision: str
    fingerprints: Fingerprints
    data_facts: dict[str, float]
    skipped_steps: int
    bad_step: int | None
    bad_sample_ids: list[int]
    failure: Failure | None
    notes: list[str]
    started_at: float
    elapsed_s: float
