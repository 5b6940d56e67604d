"""Every key of a run, with its type, default and meaning. Unknown keys are refused.

A workload brings the schema of its own `model`, `data` and `loss` sections, the strategies those of
the keys of `strategy` (`run_schema`); all others are here. `paceline recipes --keys` prints all.
"""

import re
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from paceline.config.health import RulesConfig
from paceline.config.section import Count, Positive, Seconds, Section
from paceline.config.training import OptimConfig, TrainConfig
from paceline.records.profiled import parse_profile

DEFAULT_BUCKETS = 16
SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|credential|private|(?:^|_)(?:api|access)?(?:key|psk|auth)(?:_|$)|apikey",
    re.IGNORECASE,
)


class PrecisionConfig(Section):
    mode: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="Compute type; weights and optimizer stay fp32. auto: bf16 from compute"
        " capability 8.0, fp16 below, fp32 on CPU. fp8: products of large layers, the rest bf16.",
    )
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_gw_hp"] = Field(
        "tensorwise",
        description="fp8: a scale for each matrix, or for each of its rows; gw_hp: rows, and"
        " gradients of weights in bf16.",
    )
    fp8_layers: Literal["auto", "all"] = Field(
        "auto", description="fp8: layers that are estimated to gain, or all that can take it."
    )
    fp8_all_gather: Literal["auto", "on", "off"] = Field(
        "auto",
        description="fp8, tensorwise: sharded weights travel in it, half the bytes. auto: they"
        " travel in bf16, until the other was measured to be faster and equal.",
    )
    loss_scale: Literal["auto", "off"] | Annotated[float, Field(ge=1)] = Field(
        "auto", description="fp16: where the gradient scaler starts. auto: 65536."
    )
    matmul: Literal["highest", "high", "medium"] = Field(
        "high",
        description="Products of fp32 matrices: highest is fp32; high and medium allow TF32.",
    )


class NSAConfig(Section):
    """Native sparse attention; the letters are those of arXiv 2502.11089."""

    l: Positive = Field(32, description="Tokens that a compressed key stands for.")  # noqa: E741
    d: Positive = Field(16, description="Tokens from one compressed key to the next; divides l.")
    l_sel: Positive = Field(64, description="Tokens of a block that is selected; d divides it.")
    n_sel: Annotated[int, Field(ge=3)] = Field(
        16, description="Blocks per query: the first, its own and the one before are among them."
    )
    w: Positive = Field(512, description="Tokens of the sliding window.")
    phi: Literal["avg", "mlp"] = Field(
        "avg", description="What compresses: the mean, or the mean and a small network."
    )
    route: Literal["auto", "sparse"] = Field(
        "auto",
        description="auto: dense attention at lengths where it was measured to be faster on this"
        " GPU. sparse: always nsa.",
    )
    kernels: Literal["auto", "triton", "torch"] = Field(
        "auto", description="auto: Triton on GPUs, torch's own operations on CPU."
    )
    ranges: Literal["v1", "v2"] = Field(
        "v2", description="kernels=torch: blocks to token ranges, by loops (v1) or tensors (v2)."
    )
    stats: bool = Field(True, description="Gates and choices as columns of training.csv.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.l % self.d or self.l_sel % self.d or self.l > self.l_sel:
            raise ValueError(
                f"l {self.l}, d {self.d}, l_sel {self.l_sel}: d must divide l and l_sel, and l may"
                " not be above l_sel\nhint: the paper has l=32 d=16 l_sel=64"
            )
        return self


class AttentionConfig(Section):
    impl: Literal[
        "auto", "eager", "sdpa", "flash", "flash3", "cudnn", "efficient", "math", "flex", "nsa"
    ] = Field(
        "auto",
        description="auto: sdpa, which lets torch choose; eager below compute capability 8.0."
        " flash3: FlashAttention 3, where it is installed; auto takes it for what it was measured"
        " at. nsa: native sparse attention, for long contexts.",
    )  # fmt: skip
    nsa: NSAConfig = Field(NSAConfig(), description="Native sparse attention.")


class StrategyConfig(Section):
    """What all strategies have in common. Each extends it by its own keys, in its own file under
    `strategies/`; `strategies.strategy_section` puts them side by side."""

    name: str = Field("ddp", description="How ranks share the work.")
    sync_batchnorm: bool = Field(
        False, description="BatchNorm normalises by the samples of all ranks, not of each alone."
    )

    @classmethod
    def of(cls, config: "RunConfig") -> Self:
        """Return the strategy section of `config`, seen as this one, which is a part of it."""
        section = config.strategy
        assert isinstance(section, cls), f"the schema of this config lacks {cls.__name__}"
        return section


class LaunchConfig(Section):
    """What all launchers have in common; `machine/launchers.py` lists them and adds their own."""

    launcher: str = Field(
        "auto", description="What starts the ranks. auto: whoever started this process, else local."
    )
    nproc: Literal["auto"] | Positive = Field(
        "auto", description="Ranks per machine. auto: one per GPU; 1 on CPU."
    )
    nnodes: Literal["auto"] | Positive = Field(
        "auto", description="Machines. auto: those of the hostfile or the allocation, else 1."
    )
    devices: Literal["auto"] | Annotated[list[Count], Field(min_length=1)] = Field(
        "auto", description="GPUs by index, one per rank of a machine; one named twice is shared."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is a GPU."
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="Collectives library. auto: nccl on GPUs of their own, else gloo."
    )
    env: dict[str, str] = Field({}, description="Variables for every rank: launch.env.NAME=value.")
    overcommit: bool = Field(
        False,
        description="Start even where weights, gradients and optimizer do not fit into memory; also"
        " to plan here for a larger machine.",
    )
    fabric: Literal["auto", "off", "nvlink", "pcie", "frontier"] = Field(
        "auto", description="Preset of NCCL's variables. auto: the one that the probed links match."
    )
    start_s: Seconds = Field(300.0, description="Longest wait until every rank has begun step 1.")
    progress_s: Seconds = Field(600.0, description="Longest silence of a rank after that.")
    total_s: Literal["off"] | Seconds = Field("off", description="Longest run.")
    grace_s: Annotated[float, Field(ge=0)] = Field(
        60.0,
        description="Time for ranks to write a checkpoint and leave when they are asked to stop.",
    )
    max_restarts: Count = Field(
        0, description="How often all ranks start again, from the last checkpoint, after one died."
    )
    collective_timeout_s: Seconds = Field(
        600.0, description="Timeout of the process group: how long a collective may wait."
    )

    @field_validator("env")
    @classmethod
    def _names_are_plain(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if SECRET_NAME.search(name):
                raise ValueError(
                    f"{name} looks like a secret; configs are written to the run directory\n"
                    "hint: export it in the shell: ranks get the environment that Paceline has"
                )
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a null byte")
        return env


class DataConfig(Section):
    """What the loader itself reads; a workload adds the keys of its data set."""

    num_workers: Literal["auto"] | Count = Field(
        "auto",
        description="Loader processes per rank. auto: its spare cores, at most 4; few on CPU.",
    )
    prefetch: Positive = Field(2, description="Microbatches each loader process keeps ready.")
    timeout_s: Seconds = Field(
        120.0,
        description="Longest wait for a microbatch from a loader process; in a stream, for a"
        " sample.",
    )
    batch_by: Literal["samples", "length"] = Field(
        "samples",
        description="What fills a microbatch: train.micro_batch_size samples, or as many as"
        " data.batch_length holds.",
    )
    batch_length: Literal["off", "auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = (
        Field(
            "off",
            description="batch_by=length: the longest sample of a microbatch times their number is"
            " at most this, in the unit of the data set's lengths: tokens, seconds. auto: the most"
            " that fits into memory, found by trial before training.",
        )
    )
    buckets: Literal["auto", "off"] | Positive = Field(
        "auto",
        description="Groups of samples of like length; a microbatch is of one group. auto: 16 with"
        " batch_by=length, else off.",
    )
    stream_readers: Literal["auto"] | Positive = Field(
        "auto",
        description="Streams: how many parts are read side by side. Their order depends on it, not"
        " on ranks. auto: one for each loader process of each rank.",
    )
    stream_buffer: Count = Field(
        0, description="Streams: how many samples a reader reads ahead and shuffles."
    )
    stream_repeat: bool = Field(
        True,
        description="Streams: begin again at the end; false: the run ends there, on all ranks"
        " after the same step.",
    )

    @model_validator(mode="after")
    def _length_is_known(self) -> Self:
        if self.batch_by == "length" and self.batch_length == "off":
            raise ValueError(
                "batch_by is length, and batch_length does not say how long a microbatch may be\n"
                "hint: set data.batch_length, in the unit of the data set's lengths"
            )
        return self

    @property
    def num_buckets(self) -> int | None:
        """Groups of like length; None where microbatches are made without regard to length."""
        if self.buckets == "auto":
            return DEFAULT_BUCKETS if self.batch_by == "length" else None
        if self.buckets == "off":
            return 1 if self.batch_by == "length" else None
        return self.buckets


class CheckpointConfig(Section):
    every: Literal["off"] | Positive = Field("off", description="Steps between checkpoints.")
    every_s: Literal["off"] | Seconds = Field("off", description="Seconds between checkpoints.")
    at_end: bool = Field(True, description="Write one after the last step.")
    at_stop: bool = Field(True, description="Write one when the run is asked to stop.")
    mode: Literal["async", "sync"] = Field(
        "async",
        description="async: the state is copied at its step and written while training continues.",
    )
    state: Literal["sharded", "full"] = Field(
        "sharded", description="sharded: each rank writes its part. full: one file of each kind."
    )
    weights: Literal["all", "trained"] = Field(
        "all",
        description="trained: only the weights that are trained, such as adapters; the others are"
        " loaded from their source again, and must be unchanged.",
    )
    keep: Annotated[int, Field(ge=2)] = Field(
        2, description="Newest checkpoints that stay, once verified; the best one stays too."
    )
    dir: str = Field(
        "run", description="run: checkpoints/ in the run directory; else a folder, for large ones."
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="When one cannot be written: end with exit 8, or continue and say so."
    )

    @field_validator("dir")
    @classmethod
    def _dir_is_a_path(cls, place: str) -> str:
        if not place or "\0" in place:
            raise ValueError(f"{place!r} is not a path")
        return place


class ObserveConfig(Section):
    heartbeat_s: Seconds = Field(1.0, description="Seconds between heartbeats of a rank.")
    telemetry_s: Seconds = Field(
        1.0, description="Seconds between samples of GPU and host in telemetry.csv."
    )
    warmup_steps: Count = Field(
        5, description="First steps, marked as warm-up in the tables; rates find their own."
    )
    peak_flops: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        "auto",
        description="FLOP/s of one device that MFU divides by. auto: the GPU's data sheet, for the"
        " arithmetic that is used.",
    )
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio", "aim"]] = Field(
        [],
        description="Trackers to which the numbers of training.csv are also sent, each by its own"
        " process; paceline[trackers] installs them.",
    )
    timing_ranks: Literal["rank0", "all"] = Field(
        "rank0",
        description="all: every rank writes the phases of each logged step into train.log, as a"
        " TimingRank line; followed by their spread.",
    )
    sample_ids: bool = Field(
        False, description="Record which samples each step took, in ranks/rank<r>/samples.csv."
    )
    profile: str = Field(
        "off",
        description="steps:20-24: torch's profiler traces these steps on every rank, into"
        " profiles/. For a live run, write its file control/profile.",
    )
    profile_detail: Literal["minimal", "full"] = Field(
        "minimal", description="What a trace holds; full: shapes, stacks and memory too. Slower."
    )
    nvtx: bool = Field(
        False, description="NVTX ranges for phases and the model's blocks, which nsys shows."
    )
    memory: Literal["off", "dumps", "snapshot"] = Field(
        "off",
        description="dumps: mem_boot, mem_step1 and later ones; snapshot: the allocator's history"
        " of the first steps too (CUDA). Where memory runs out, mem_oom is always written.",
    )
    memory_every: Literal["off"] | Positive = Field(
        "off", description="Steps between memory dumps, where observe.memory asks for them."
    )
    rules: RulesConfig = Field(
        RulesConfig(), description="By which rules the run is judged, and what follows."
    )

    @field_validator("profile")
    @classmethod
    def _profile_names_steps(cls, asked: str) -> str:
        parse_profile(asked)
        return asked


class AuditConfig(Section):
    strict: bool = Field(
        False, description="End the run with exit 1 if what ran differs from the plan."
    )


class RunConfig(Section):
    """One run, as asked. `model` and `data` get their types from the workload, `strategy` from the
    strategies."""

    name: str = Field("run", min_length=1, max_length=200, description="Names the run directory.")
    workload: str = Field(
        description="Model, data and loss: a registered name; FILE.py:Class only when typed."
    )
    model: Section = Field(Section(), description="The workload's model.")
    loss: Section = Field(Section(), description="The workload's loss.")
    data: DataConfig = Field(DataConfig(), description="The workload's data and its loader.")
    train: TrainConfig = Field(TrainConfig(), description="The loop.")
    optim: OptimConfig = Field(OptimConfig(), description="The optimizer.")
    precision: PrecisionConfig = Field(PrecisionConfig(), description="Number formats.")
    attention: AttentionConfig = Field(AttentionConfig(), description="Kernels of attention.")
    strategy: StrategyConfig = Field(StrategyConfig(), description="Parallelism.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Where ranks run.")
    observe: ObserveConfig = Field(ObserveConfig(), description="What is measured while it runs.")
    audit: AuditConfig = Field(AuditConfig(), description="Whether what was decided really ran.")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="What is kept of a run, so that it can be resumed."
    )


class CheckConfig(Section):
    """What `paceline check` takes: the machines, and nothing of a run."""

    launch: LaunchConfig = Field(LaunchConfig(), description="Where ranks run.")


@cache
def run_schema(
    model: type[Section],
    data: type[DataConfig],
    strategy: type[StrategyConfig] = StrategyConfig,
    launch: type[LaunchConfig] = LaunchConfig,
    loss: type[Section] = Section,
) -> type[RunConfig]:
    """Return `RunConfig` with a workload's own `model`, `data` and `loss`, and with the keys of
    strategies and launchers: `job.py` passes them in. Without those only the common ones can be
    set."""
    sections: dict[str, Any] = {
        "model": (model, Field(default_factory=model, description="The workload's model.")),
        "data": (data, Field(default_factory=data, description="The workload's data.")),
        "loss": (loss, Field(default_factory=loss, description="The workload's loss.")),
        "strategy": (strategy, Field(default_factory=strategy, description="Parallelism.")),
        "launch": (launch, Field(default_factory=launch, description="Where ranks run.")),
    }
    return create_model("RunConfig", __base__=RunConfig, **sections)
