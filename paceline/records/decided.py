"""Decided: choices with their reasons, plan.json and launch.json."""

from typing import Any, ClassVar, Generic, Literal

from pydantic import Field
from typing_extensions import TypeVar

from paceline.records.base import Body, Part, Record

NO_OTHER = "the version that wrote this had no other"
MAX_RANKS = 65536  # what is planned, or read again, rank by rank must end


def _only(value: str) -> Body:
    """Return a choice that could not be made otherwise."""
    return {"requested": value, "value": value, "because": NO_OTHER}


Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Matmul = Literal["highest", "high", "medium"]
Attention = Literal[
    "eager", "sdpa", "flash", "flash3", "cudnn", "efficient", "math", "flex", "nsa"
]  # fmt: skip
ExchangeBy = Literal["collectives", "symmetric", "pipelined", "fused"]
Kernels = Literal["torch", "triton"]
CompileScope = Literal["blocks", "model"]
Recompute = Literal["none", "full", "selective", "mixed"]
Cause = Literal["config", "cluster", "data"]
T = TypeVar("T", default=Any)


class Choice(Part, Generic[T]):
    """A decision kept with its reason: what was asked, what will run, why."""

    requested: Any
    value: T
    because: str
    matters: bool = Field(True, description="Whether it can change anything in this job.")

    @classmethod
    def as_asked(cls, value: T, matters: bool = True) -> "Choice[T]":
        return cls(requested=value, value=value, because="as asked", matters=matters)


class Finding(Part):
    """Something that the user should know. An `error` stops the run before any rank starts."""

    severity: Literal["error", "warning", "note"]
    where: str = Field(description="The config key or the part of the machine it is about.")
    what: str
    hint: str = ""
    cause: Cause = Field(
        "config", description="What would have to change; picks the exit code of a refusal."
    )

    @classmethod
    def error(cls, where: str, what: str, hint: str = "", cause: Cause = "config") -> "Finding":
        return cls(severity="error", where=where, what=what, hint=hint, cause=cause)

    @classmethod
    def warning(cls, where: str, what: str, hint: str = "", cause: Cause = "config") -> "Finding":
        return cls(severity="warning", where=where, what=what, hint=hint, cause=cause)

    @classmethod
    def note(cls, where: str, what: str, hint: str = "", cause: Cause = "config") -> "Finding":
        return cls(severity="note", where=where, what=what, hint=hint, cause=cause)

    def __str__(self) -> str:
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{self.where}: {self.what}{hint}"


class BatchSplit(Part):
    """global_size = micro x grad_accum x dp: samples per optimizer step, or batches of samples
    where those are filled by length (data.batch_by)."""

    micro: int
    grad_accum: int
    dp: int
    global_size: int
    length: float | None = Field(None, description="What each batch may be long in all, if so.")

    @property
    def counts(self) -> str:
        return "samples" if self.length is None else "batches"

    def __str__(self) -> str:
        shares = f"{self.grad_accum} accumulation x {self.dp} dp"
        if self.length is not None:
            each = f"each at most {self.length:g} long"
            return f"{self.global_size} batches per step = {shares}, {each}"
        return f"{self.global_size} samples per step = {self.micro} micro x {shares}"


class ModelSize(Part):
    """A model's parameters; frozen ones have weights, but no gradients and no optimizer state."""

    num_trainable: int
    num_frozen: int
    trainable_bytes: int
    frozen_bytes: int


class StateBytes(Part):
    """Bytes one rank holds, without activations. `total` is at rest: after backward, before the
    gradients are freed."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = Field(0, description="Weights of other ranks, at the most at any time.")
    deferred: int = Field(0, description="Whole gradients kept until the last microbatch.")

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.total + self.gathered + self.deferred


class Exchange(Part):
    """Bytes of gradients one rank hands to its collectives each step."""

    plain: int
    sent: int
    because: str


class Fp8Plan(Part):
    """Which layers multiply in fp8, and how."""

    recipe: str
    gathers_fp8: bool = Field(description="Sharded weights travel in fp8, not in bf16.")
    gathers_because: str = Field("", description="Why they do, or do not.")
    is_emulated: bool = Field(description="A CPU computes the rounding, and products in fp32.")
    layers: list[str]
    kept: dict[str, str] = Field(description="Matrices that stay in bf16, each with the reason.")
    gain: float = Field(description="Estimated time of a step in bf16 over that in fp8.")


class MemoryPlan(Part):
    """What a budget of memory leads to, as estimated."""

    budget: Choice[int] = Field(description="Bytes on one device.")
    state_bytes: int
    activation_bytes: int = Field(description="At the peak of a microbatch, beside the state.")
    without_bytes: int = Field(description="The same if nothing were recomputed.")
    blocks: list[Recompute] = Field(description="What each block recomputes.")


class StagePlan(Part):
    """A part of the model: its blocks, and what stands between them and the next stage's."""

    first_block: int
    end_block: int
    num_parameters: int
    cost: float = Field(description="Share of the model's counted FLOPs.")
    ranks: list[int] = Field(description="Of one pipeline: who holds it.")


class PipelinePlan(Part):
    schedule: str
    num_ranks: int = Field(description="Of one pipeline.")
    stages_per_rank: int
    num_microbatches: int
    stages: list[StagePlan]

    def blocks_of(self, rank: int) -> list[range]:
        """The blocks of each stage that a rank of the pipeline holds."""
        held = [stage for stage in self.stages if rank in stage.ranks]
        return [range(stage.first_block, stage.end_block) for stage in held]


class Crew(Part):
    """How many ranks, on what, and who starts them."""

    launcher: Choice[str]
    world_size: int = Field(ge=1, le=MAX_RANKS)
    num_nodes: int = Field(ge=1)
    per_node: int = Field(
        ge=1, description="Ranks on each machine; on the largest where they differ."
    )
    device: Choice[Device]
    backend: Choice[Backend]
    device_indices: list[int] = Field(
        [], description="Which of the visible GPUs each local rank takes; empty: its own number."
    )

    @property
    def on_gpu(self) -> bool:
        return self.device.value == "cuda"


class Plan(Record):
    """Everything decided before a device is held. Ranks trust it."""

    SCHEMA: ClassVar[int] = 3

    name: str
    workload: str
    unit: str = Field(description="What the loss is averaged over and throughput counts.")
    world_size: int = Field(ge=1, le=MAX_RANKS)
    mesh: dict[str, int] = Field(description="Degree of each parallel axis; their product is W.")
    batch: BatchSplit
    units_per_sample: int | None
    steps: int = Field(description="0: not known before the data is prepared (train.epochs).")
    epochs: float | None = Field(None, description="Of the training data, where asked for so.")
    crew: Crew
    device: Choice[Device]
    backend: Choice[Backend]
    strategy: Choice[str]
    precision: Choice[Precision]
    fp8: Fp8Plan | None = Field(None, description="Where precision is fp8.")
    matmul: Choice[Matmul] = Field(
        description="Products of fp32 matrices: highest is fp32, others TF32."
    )
    attention: Choice[Attention]
    kernels: Choice[Kernels] = Field(
        Choice(requested="torch", value="torch", because=NO_OTHER, matters=False),
        description="What layers and AdamW run on where we have kernels of our own.",
    )
    compile: Choice[str] = Field(description="torch.compile's mode, or off.")
    compile_scope: Choice[CompileScope] = Field(description="What one compiled graph holds.")
    recompute: Choice[Recompute] = Field(description="Activation checkpointing.")
    memory: MemoryPlan | None = Field(None, description="Where train.memory_budget is set.")
    optimizer: Choice[str] = Field(
        Choice(requested="n/a", value="n/a", because=NO_OTHER, matters=False),
        description="One of optim.name's, or the workload's own.",
    )
    fused_optimizer: Choice[bool]
    deterministic: bool = Field(False, description="Only kernels that give the same bits again.")
    threads: Choice[int]
    loader_workers: Choice[int]
    model: ModelSize
    state_bytes: StateBytes = Field(description="Of the rank that holds most.")
    exchange: Exchange
    exchange_by: Choice[ExchangeBy] = Field(
        Choice(requested="collectives", value="collectives", because=NO_OTHER, matters=False),
        description="Who moves gradients and weights between ranks.",
    )
    bucket_mb: Choice[float] = Field(
        Choice(requested="auto", value=25.0, because=NO_OTHER, matters=False),
        description="MiB of gradients in one all-reduce.",
    )
    prefetch: Choice[int] = Field(
        Choice(requested="auto", value=0, because=NO_OTHER, matters=False),
        description="Blocks whose weights are gathered ahead, where that is left to us.",
    )
    pipeline: PipelinePlan | None = Field(None, description="Where strategy is pipeline.")
    engine_config: dict[str, Any] = Field(
        {}, description="Config of the library that the strategy drives, where it has its own."
    )
    flops_per_sample: Choice[float | None] = Field(
        description="Forward and backward, recomputation not counted."
    )
    peak_flops: Choice[float | None] = Field(
        description="Dense peak of one device in the chosen precision."
    )
    findings: list[Finding]

    @property
    def on_gpu(self) -> bool:
        return self.device.value == "cuda"

    @property
    def length(self) -> str:
        """How long it trains, in words."""
        steps = f"{self.steps} steps" if self.steps else "their steps follow from the prepared data"
        noun = "epoch" if self.epochs == 1 else "epochs"
        return steps if self.epochs is None else f"{self.epochs:g} {noun} ({steps})"

    @staticmethod
    def update_to_2(body: Body) -> Body:
        """0.1 and 0.2 had one way for each of these; 0.1 had one launcher."""
        ranks, exchanged = body["world_size"], body["state_bytes"]["gradients"]
        crew = {
            "launcher": _only("local"), "world_size": ranks, "num_nodes": 1, "per_node": ranks,
            "device": body["device"], "backend": body["backend"],
        }  # fmt: skip
        exchanged = exchanged if ranks > 1 else 0
        return {"crew": crew} | body | {
            "matmul": _only("highest"),
            "attention": _only("sdpa"),
            "compile_scope": _only("model"),
            "recompute": _only("none"),
            "exchange": {"plain": exchanged, "sent": exchanged, "because": NO_OTHER},
        }  # fmt: skip

    @staticmethod
    def update_to_3(body: Body) -> Body:
        """No strategy before 0.6 had stages."""
        return body | dict(pipeline=None)

    def dp_rank(self, rank: int) -> int:
        """Which share of the batch is this rank's: those of one pipeline have the same."""
        return rank % self.batch.dp

    def recompute_of(self, block: int) -> Recompute:
        """Return what a block recomputes in backward."""
        mixed = self.recompute.value == "mixed" and self.memory is not None
        return self.memory.blocks[block] if mixed and self.memory else self.recompute.value

    def choices(self) -> dict[str, Choice]:
        """Return the choices that can matter in this job, by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        choices = {name: value for name, value in named.items() if isinstance(value, Choice)}
        return {name: choice for name, choice in choices.items() if choice.matters}

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

    SCHEMA: ClassVar[int] = 3

    launcher: str
    argv: list[str] = Field(description="The command, word by word; empty: no command is needed.")
    task: str = Field(description="The verb that planned it; whoever takes part compares its own.")
    workload: str = Field(description="The workload as typed: a registered name or FILE.py:Class.")
    crew: Crew
    threads: int
    fabric: Choice[str]
    env: dict[str, str]
    reasons: dict[str, str] = Field(description="Why a variable of env is set, where we chose it.")
    ranks: list[RankPlace]
    limits: Limits
    max_restarts: int = Field(0, description="How often all ranks start again after a failure.")
    findings: list[Finding] = []
