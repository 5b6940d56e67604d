"""The `NSA_*` variables of the runbook that docs/nsa.md follows, as overrides of ours.

    NSA_DDP_BUCKET_MB=50 NSA_SEL_RANGES_V2=1 paceline train nsa_m7c --from-env

Each variable becomes a key, or asks for what happens anyway, or is refused with the reason; one
that is not in the table is an error. docs/nsa.md shows the table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.records.words import did_you_mean

ON = {"1": "true", "true": "true", "0": "false", "false": "false"}
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")


class Variable(NamedTuple):
    """`becomes` is an override with {} for the value; without {} it says what happens anyway.
    `values` are those that can be had, each with what it stands for; None: any number, or with an
    empty map any text. A value that stands for "" asks for nothing."""

    becomes: str
    values: Mapping[str, str] | None = None
    times: float = 1


def _anyway(because: str, *values: str) -> Variable:
    """Return a variable that changes nothing; with `values` it may have no other."""
    return Variable(because, dict.fromkeys(values, ""))


NO_OTHER = "there is no other way here"
TESTED = "the tests hold it"
VARIABLES: dict[str, Variable] = {
    # ranks
    "NSA_DDP_BUCKET_MB": Variable("strategy.bucket_mb={}; 0: torch's own"),
    "NSA_DDP_COMPRESS": Variable(
        "strategy.comm_hook={}", {"bf16": "bf16", "fp16": "fp16", "off": "none", "none": "none"}
    ),
    "NSA_DDP_STATIC_GRAPH": Variable("strategy.static_graph={}", ON),
    "NSA_DDP_FIND_UNUSED": Variable("strategy.find_unused_parameters={}", ON),
    "NSA_DDP_BROADCAST_BUFFERS": _anyway("buffers are equal by their seed", "0"),
    "NSA_DDP_GRAD_AS_BUCKET_VIEW": _anyway(NO_OTHER, "1"),
    "NSA_DDP_DISABLE_GC": Variable("train.activation_checkpointing={}", {"1": "none", "0": ""}),
    "NSA_DDP_SAFE_GC_LAYERS": _anyway("blocks are recomputed all or none", ""),
    "NSA_DDP_SAFE_MODE": _anyway("recomputation under ddp needs no safe mode", "0"),
    "NSA_PG_TIMEOUT_MIN": Variable("launch.collective_timeout_s={}, in seconds", None, 60),
    # sizes
    "NSA_BATCH_SIZE": Variable("train.global_batch_size={}; grad_accum by it, or by NSA_ACCUM"),
    "NSA_ACCUM": Variable("train.grad_accum={}"),
    "NSA_LR": Variable("optim.lr={}"),
    "NSA_SEQ_LEN": Variable("data.seq_len={}"),
    "NSA_NO_GC": Variable("train.activation_checkpointing={}", {"1": "none", "0": ""}),
    "NSA_GC_RANGE": _anyway("blocks are recomputed all or none", ""),
    "NSA_GC_REENTRANT": _anyway(NO_OTHER, "0"),
    "NSA_OPT_FUSED": Variable("optim.fused={}", {"1": "on", "0": "off"}),
    "NSA_SCALER_INIT_SCALE": Variable("precision.loss_scale={}"),
    "NSA_SCALER_GROWTH_INTERVAL": _anyway("torch's own", "2000"),
    "NSA_SCALER_GROWTH_FACTOR": _anyway("torch's own", "2.0", "2"),
    "NSA_SCALER_BACKOFF_FACTOR": _anyway("torch's own", "0.5"),
    # what is seen
    "NSA_TB_DISABLE": Variable("observe.trackers={}", {"1": "[]", "0": "[tensorboard]"}),
    "NSA_DISABLE_CSV_LOGS": _anyway("training.csv is always written", "0"),
    "NSA_DISABLE_AUX_STATS": Variable("attention.nsa.stats={}", {"1": "false", "0": "true"}),
    "NSA_HEARTBEAT_EVERY": _anyway("heartbeats come every observe.heartbeat_s"),
    "NSA_LOG_GRAD_NORM": _anyway("training.csv always has the gradient's norm"),
    "NSA_MEM_DUMP_EVERY": Variable("observe.memory=dumps observe.memory_every={}; 0: none"),
    "NSA_NVTX": Variable("observe.nvtx={}", ON),
    "NSA_DEBUG_LOG": _anyway("train.log and audit.json have it"),
    "NSA_LOG_LIMIT": _anyway("train.log has all"),
    "NSA_DEBUG_LOSS": _anyway("a loss that is not finite names its samples"),
    "NSA_DETECT_ANOMALY": _anyway("a loss that is not finite names its samples", "0"),
    "NSA_TRACE_GRADS": _anyway("gradients are checked every step", "0"),
    "NSA_TRACE_MODULE_BWD": _anyway("stacks are taken where a rank stalls", "0"),
    "NSA_TRACE_DDP_BUCKETS": _anyway("audit.json has the buckets", "0"),
    "NSA_SDPA_AUDIT": _anyway("audit.json always has what ran, branch by branch"),
    "NSA_SDPA_FLASH_ONLY": _anyway("branches have kernels of their own", "0"),
    "NSA_SDPA_NO_FLASH": _anyway("branches have kernels of their own", "0"),
    "NSA_USE_FA2": _anyway("branches have kernels of their own", "0"),
    "NSA_USE_FA2_WIN": _anyway("branches have kernels of their own", "0"),
    "NSA_USE_FA2_CMP": _anyway("branches have kernels of their own", "0"),
    "NSA_FA2_MIN_LEN_WIN": _anyway("branches have kernels of their own"),
    "NSA_FA2_MIN_LEN_CMP": _anyway("branches have kernels of their own"),
    # how it is computed
    "NSA_PREFILL_BATCHED": _anyway("all tokens go at once", "1"),
    "NSA_PREFILL_TILE": _anyway("all tokens go at once", "0"),
    "NSA_FORCE_PARITY": _anyway(TESTED, "0"),
    "NSA_SEL_RANGES_V2": Variable("attention.nsa.ranges={}", {"1": "v2", "0": "v1"}),
    "NSA_SEL_RANGES_V2_MIN_S": _anyway("v2 is right at every length"),
    "NSA_USE_TRITON_SEL": Variable("attention.nsa.kernels={}", {"1": "auto", "0": "torch"}),
    "NSA_USE_SEL_PACK": _anyway("attention.nsa.kernels says who computes"),
    "NSA_USE_SEL_MASK": _anyway("attention.nsa.kernels says who computes"),
    "NSA_FORCE_SEL_MASK": _anyway("attention.nsa.kernels says who computes"),
    "NSA_USE_SEL_VARLEN": _anyway("attention.nsa.kernels says who computes"),
    "NSA_SEL_CUDA": _anyway("attention.nsa.kernels says who computes", "0"),
    "NSA_USE_CMP_MASK": _anyway("no query sees a block that is not whole", "1"),
    "NSA_USE_WIN_MASK": _anyway("the window is always cut", "1"),
    "NSA_STRICT_ASSERTS": _anyway(TESTED),
    "NSA_VERIFY_EQ9_MAPPING": _anyway(TESTED),
    "NSA_VALIDATE_SELECTION_DETERMINISM": _anyway(TESTED),
    "NSA_TEST_SEL_PACK": _anyway(TESTED),
    "NSA_FORCE_BRANCH": _anyway("all three branches run", ""),
    "NSA_FORCE_UNIFORM_GATE": _anyway("gates are learned", "0"),
    "NSA_STOPGRAD_GATES": _anyway("gates are learned", "0"),
    "NSA_GATE_COMPILE": _anyway("train.compile compiles all of a block"),
    "NSA_P_CMP_MIXED": _anyway("weights are summed in fp32", "0"),
    "NSA_ROPE_SCALE": _anyway("positions are not scaled", "1", "1.0"),
    # text, and who watches
    "NSA_FWE_DOC_BATCH": _anyway("`paceline prepare` reads text once"),
    "NSA_FWE_PREFETCH": _anyway("data.prefetch microbatches are kept ready"),
    "NSA_FWE_Q": _anyway("data.prefetch microbatches are kept ready"),
    "NSA_FWE_WARMUP_BATCHES": _anyway("the first batch is waited for"),
    "NSA_FWE_WARMUP_TIMEOUT": _anyway("data.timeout_s is the longest wait"),
    "NSA_WATCH_HALT": _anyway("`paceline watch` has its own words"),
    "NSA_WATCH_INTERVAL_S": _anyway("`paceline watch` has its own words"),
    "NSA_WATCH_HEARTBEAT_STALL_S": Variable("observe.rules.heartbeat_stall_s={}"),
    "NSA_WATCH_FLATLINE_N": _anyway("observe.rules.throughput_flatline_s is in seconds, not looks"),
    "NSA_WATCH_GATE_ENTROPY_MIN": Variable("observe.rules.gate_entropy_min={}"),
    "NSA_WATCH_GATE_MAX_THRESHOLD": _anyway("one token may: gate_collapse_share counts them"),
    "NSA_WATCH_GATE_COLLAPSE_N": _anyway("observe.rules.gate_collapse_steps is in steps"),
}


@dataclass
class EnvOverrides:
    """Overrides, and what is said of variables that change nothing."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_variables(environ: Mapping[str, str]) -> EnvOverrides:
    """Return what the variables ask; ConfigError names all that are wrong."""
    asked, problems = EnvOverrides(), []
    for name, value in environ.items():
        if not name.startswith("NSA_"):
            continue
        if name not in VARIABLES:
            hint = did_you_mean(name, list(VARIABLES))
            if name.startswith("NSA_FSDP_"):
                hint = "strategy.name=zero3 shards; "
            problems.append(f"there is no variable {name}\nhint: {hint}docs/nsa.md lists them")
            continue
        try:
            _add(asked, name, value.strip())
        except ValueError as error:
            problems.append(f"{name}={value} {error}")
    if problems:
        raise ConfigError(problems)
    if "NSA_BATCH_SIZE" in environ and "NSA_ACCUM" not in environ:
        asked.words.append("train.grad_accum=auto")  # a recipe's own is for its own batch
    return asked


def _add(asked: EnvOverrides, name: str, value: str) -> None:
    becomes, values, times = VARIABLES[name]
    keys = re.split("[;,] ", becomes)[0].split(" ")
    if values is None:
        if not NUMBER.fullmatch(value):
            raise ValueError("wants a number")
        if float(value) or "0:" not in becomes:
            said = value if times == 1 else f"{float(value) * times:g}"
            asked.words += [key.format(said) for key in keys]
        return
    if values and value not in values:
        had = ", ".join(repr(known) if not known else known for known in values)
        raise ValueError(f"cannot be had: {becomes}\nhint: it may be {had}" if "{}" not in becomes
                         else f"wants one of {had}")  # fmt: skip
    if "{}" not in becomes:
        asked.notes.append(f"{name} changes nothing: {becomes}")
    elif values[value]:
        asked.words += [key.format(values[value]) for key in keys]
