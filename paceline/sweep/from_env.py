"""A sweep configured by environment variables, as in the speech runbook.

    REPEATS=2 MAX_STEPS=1000 SWEEP_ZERO_STAGES=0,1 SWEEP_MICRO_BATCHES=128,160 \\
        paceline sweep --from-env

Every variable is in `VARIABLES`, with what it becomes; docs/sweeping.md shows the table. All that
is wrong is told at once, before anything starts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.records.words import did_you_mean

RECIPE = "limit_longest_1-3_stage1_bf16"
STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
TRUTH = {"true": True, "1": True, "false": False, "0": False}
ATTENTION = {"auto": "auto", "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
SLICE_S = 2.0
# No other program has such variables: a misspelt one is named.
OTHERS = re.compile(r"(SWEEP|AB_OLD|AB_TUNED)_\w+")
OLD, TUNED = "old_like", "tuned"  # the two cells of MODE=ab
BUCKETS = 8
Read = Callable[[str], Any]


@dataclass
class FromEnv:
    """What the variables ask: the recipe, the sweep's folder, overrides, axes, words of a sweep,
    and what is said of variables that nothing reads."""

    recipe: str = RECIPE
    out: Path | None = None
    words: list[str] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Variable(NamedTuple):
    """`becomes` is an override with {} for the value, `--axis KEY`, `--WORD` of the sweep, or in
    words what happens; those without `read` are taken and change nothing."""

    becomes: str
    read: Read | None = None


def _positive(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < least:
        raise ValueError(f"a whole number from {least} on")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise ValueError("seconds, above 0")
    return float(text)


def _truth(text: str) -> bool:
    return bool(_one_of(TRUTH)(text.lower()))


def _text(text: str) -> str:
    if not text:
        raise ValueError("a value")
    return text


def _one_of(table: Mapping[str, Any]) -> Read:
    def read(text: str) -> Any:
        if text not in table:
            raise ValueError(f"one of {', '.join(table)}")
        return table[text]

    return read


def _list_of(read: Read) -> Read:
    return lambda text: ",".join(str(read(item.strip())) for item in text.split(","))


def _words(*names: str) -> Read:
    return _one_of({name: name for name in names})


def _devices(text: str) -> list[int]:
    found = re.fullmatch(r"localhost:(\d+(?:,\d+)*)", text)
    if found is None:
        raise ValueError(
            "localhost:0,1 with the numbers of GPUs; several machines are launch.hostfile=FILE"
        )
    return [int(number) for number in found[1].split(",")]


class Side(NamedTuple):
    """A setting that the two cells of MODE=ab may differ in, and what each has unless told."""

    becomes: str
    read: Read
    old: Any
    tuned: Any


SIDES: dict[str, Side] = {
    "MICRO_BATCH": Side("train.micro_batch_size={}", _positive, 128, 128),
    "ZERO_STAGE": Side("strategy.name={}", _one_of(STAGES), "zero1", "zero1"),
    "NUM_WORKERS": Side("data.num_workers={}", _count, 2, 2),
    "PREFETCH": Side("data.prefetch={}", _positive, 2, 2),
    "LOG_EVERY": Side("train.log_every={}", _positive, 1, 20),
    "VALIDATION_EVERY": Side("train.eval_every={}", _positive, 500, 5000),
    "CHECKPOINT_EVERY": Side("checkpoint.every={}", _positive, 500, 5000),
    "DETERMINISTIC": Side("train.deterministic={}", _truth, True, False),
}
SIDE_CELLS = {"OLD": OLD, "TUNED": TUNED}

VARIABLES: dict[str, Variable] = {
    "MODE": Variable("the matrix (sweep), two cells (ab), or both", _words("sweep", "ab", "both")),
    "EXPERIMENT": Variable("RECIPE", _text),
    "OUTPUT_ROOT": Variable("--out", _text),
    "INCLUDE": Variable("launch.devices={}", _devices),
    "WORLD_SIZE": Variable("launch.nproc={}; 0: the devices decide", _count),
    "REPEATS": Variable("--repeats", _positive),
    "MAX_STEPS": Variable("--steps", _positive),
    "STOP_ON_ERROR": Variable("--stop-on-error", _truth),
    "BASELINE_GROUP": Variable("--baseline; old_like, where there is one", _text),
    "RUN_TIMEOUT_SEC": Variable("launch.total_s={}; 0: off", _count),
    "MAX_WAIT_TRAIN_LOG_SEC": Variable("launch.start_s={}", _positive),
    "HEARTBEAT_EVERY_SEC": Variable("sweep.heartbeat_s; 0: off", _count),
    "TAIL_TIMING_POINTS": Variable("sweep.tail_points", _positive),
    "FAIL_TAIL_LINES": Variable("--tail-lines", _count),
    "FAILURE_DUMP_TAIL": Variable("false: --tail-lines 0", _truth),
    "SWEEP_ZERO_STAGES": Variable("--axis strategy.name", _list_of(_one_of(STAGES))),
    "SWEEP_MICRO_BATCHES": Variable("--axis train.micro_batch_size", _list_of(_positive)),
    "SWEEP_NUM_WORKERS_LIST": Variable("--axis data.num_workers", _list_of(_count)),
    "SWEEP_NUM_WORKERS": Variable("data.num_workers={}, where there is no list", _count),
    "SWEEP_PREFETCH_LIST": Variable("--axis data.prefetch", _list_of(_positive)),
    "SWEEP_PREFETCH": Variable("data.prefetch={}, where there is no list", _positive),
    "SWEEP_LOG_EVERY": Variable("train.log_every={}", _positive),
    "SWEEP_VALIDATION_EVERY": Variable("train.eval_every={}; off beyond MAX_STEPS", _positive),
    "SWEEP_CHECKPOINT_EVERY": Variable("checkpoint.every={}; off beyond MAX_STEPS", _positive),
    "DATASET_ROOT": Variable("data.root_dir={}", _text),
    "DATASET_MANIFEST_PATH": Variable("data.manifest_path={}", _text),
    "SPEECH_MODEL_PATH": Variable("model.speech={}", _text),
    "TEXT_MODEL_PATH": Variable("model.text={}", _text),
    "PRETRAINED_CKPT": Variable("model.warm_start={}", _text),
    "TIMING_RANK_SCOPE": Variable("observe.timing_ranks={}", _words("rank0", "all")),
    "PRECISION_MODE": Variable("precision.mode={}", _words("auto", "bf16", "fp16")),
    "ATTN_IMPL": Variable("attention.impl={}", _one_of(ATTENTION)),
    "ENABLE_TF32": Variable("false: precision.matmul=highest", _truth),
    "MATMUL_PRECISION": Variable("precision.matmul={}", _words("highest", "high", "medium")),
    "ENABLE_TORCH_COMPILE": Variable("train.compile; with --phases an extra of C", _truth),
    "TORCH_COMPILE_MODE": Variable(
        "its mode", _words("default", "reduce-overhead", "max-autotune")
    ),
    "TORCH_COMPILE_DYNAMIC": Variable("train.compile_dynamic", _truth),
    "ENABLE_LENGTH_FIXED_SLICE": Variable("data.fixed_slice_s; with --phases an extra", _truth),
    "FIXED_SLICE_SECONDS": Variable("its seconds", _seconds),
    "ENABLE_LENGTH_BUCKET": Variable(f"true: data.buckets={BUCKETS}", _truth),
    "DATASET_USE_TRIM": Variable("must be false: `prepare` cuts silence off", _words("false")),
    "DATASET_OFFLINE_TRIMMED": Variable("must be true", _words("true")),
    "RESUME_RUNS": Variable("must be true: OUTPUT_ROOT names a new sweep", _words("true", "1")),
    "ENABLE_CUDA_SYNC_TIMING": Variable("phases are always timed on the device, by events"),
    "LENGTH_BUCKET_BOUNDARIES_SEC": Variable("buckets have equally many utterances each"),
    "MODEL_LOAD_DTYPE": Variable("weights are kept in fp32"),
    "SPEECH_ATTN_IMPL": Variable("ATTN_IMPL is that of both encoders"),
    "TEXT_ATTN_IMPL": Variable("ATTN_IMPL is that of both encoders"),
    "STALL_ALERT_RATIO": Variable("launch.progress_s ends a run that has stopped moving"),
    "ENABLE_ETA_LOGGING": Variable("the time left is always shown"),
    "ETA_DISTRIBUTED_MODE": Variable("the time left is that of rank 0"),
    "ETA_MIN_SAMPLES": Variable("the time left is always shown"),
    "ENABLE_GPU_TELEMETRY": Variable("always on: telemetry.csv"),
    "ENABLE_HOST_TELEMETRY": Variable("always on: telemetry.csv"),
    "DRIVER_LOG_PATH": Variable("driver.log is in OUTPUT_ROOT"),
    "MANIFEST_WRITE_RETRIES": Variable("the manifest is replaced as a whole, or not at all"),
    "CONDA_ENV": Variable("ranks run with this very python"),
    "MASTER_PORT_BASE": Variable("free ports are found"),
}
VARIABLES |= {
    f"AB_{side}_{name}": Variable(f"{known.becomes}, in cell {cell}", known.read)
    for side, cell in SIDE_CELLS.items()
    for name, known in SIDES.items()
}
VARIABLES |= {
    f"AB_{side}_{name}": Variable("off in both cells, and phases are always timed")
    for side in SIDE_CELLS
    for name in ("CUDNN_BENCHMARK", "WALL_CLOCK_BREAKDOWN")
}


def read_env(environ: Mapping[str, str]) -> FromEnv:
    """Return what the variables ask; ConfigError names all that are wrong."""
    problems, found = [], dict[str, Any]()
    for name, variable in VARIABLES.items():
        if name not in environ or variable.read is None:
            continue
        try:
            found[name] = variable.read(environ[name].strip())
        except ValueError as error:
            problems.append(f"{name}={environ[name]} wants {error}")
    for name in environ:
        if OTHERS.fullmatch(name) and name not in VARIABLES:
            hint = did_you_mean(name, list(VARIABLES))
            problems.append(f"there is no variable {name}\nhint: {hint}docs/sweeping.md lists them")
    if found.get("ENABLE_LENGTH_FIXED_SLICE") and "FIXED_SLICE_SECONDS" not in found:
        problems.append("ENABLE_LENGTH_FIXED_SLICE=true needs FIXED_SLICE_SECONDS")
    if problems:
        raise ConfigError(problems)
    mode = found.pop("MODE", "sweep")
    unread = [name for name in found if _is_of_other_mode(name, mode)]
    asked = _as_words({name: value for name, value in found.items() if name not in unread}, mode)
    idle = [name for name, known in VARIABLES.items() if known.read is None and name in environ]
    asked.notes = [f"{name} changes nothing: {VARIABLES[name].becomes}" for name in idle]
    asked.notes += [f"{name} changes nothing: MODE is {mode}" for name in unread]
    return asked


def _is_of_other_mode(name: str, mode: str) -> bool:
    return (mode == "sweep" and name.startswith("AB_")) or (
        mode == "ab" and name.startswith("SWEEP_")
    )


def _as_words(found: dict[str, Any], mode: str) -> FromEnv:
    asked = FromEnv(recipe=found.get("EXPERIMENT", RECIPE))
    asked.out = Path(found["OUTPUT_ROOT"]) if "OUTPUT_ROOT" in found else None
    steps = found.get("MAX_STEPS", 0)
    found = _settled(found, steps)
    if "INCLUDE" in found and "WORLD_SIZE" not in found:
        asked.words.append(f"launch.nproc={len(found['INCLUDE'])}")
    if found.get("ENABLE_LENGTH_BUCKET"):
        asked.words.append(f"data.buckets={BUCKETS}")
    for name, value in found.items():
        if name.startswith("AB_"):
            continue
        becomes = VARIABLES[name].becomes.partition(";")[0].partition(", where")[0]
        if becomes.startswith("--axis "):
            asked.axes.append(f"{becomes.removeprefix('--axis ')}={value}")
        elif "={}" in becomes:
            asked.words.append(becomes.format(value))
    words = {"REPEATS": "repeats", "MAX_STEPS": "steps", "STOP_ON_ERROR": "stop_on_error",
             "FAIL_TAIL_LINES": "tail_lines", "HEARTBEAT_EVERY_SEC": "heartbeat_s",
             "TAIL_TIMING_POINTS": "tail_points", "BASELINE_GROUP": "baseline"}  # fmt: skip
    asked.given = {words[name]: found[name] for name in words if name in found}
    if mode != "sweep":
        asked.given["cells"] = _choose_cells(found, steps)
        asked.given.setdefault("baseline", OLD)
    asked.given["extras"] = _choose_extras(asked, found)
    return asked


def _settled(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the values with those that speak of each other made one."""
    unset = [name for name in ("WORLD_SIZE", "RUN_TIMEOUT_SEC") if found.get(name) == 0]
    unset += [n for n in ("SWEEP_NUM_WORKERS", "SWEEP_PREFETCH") if f"{n}_LIST" in found]
    settled = {name: value for name, value in found.items() if name not in unset}
    for name in {"SWEEP_VALIDATION_EVERY", "SWEEP_CHECKPOINT_EVERY"} & settled.keys():
        settled[name] = _every(settled[name], steps)
    if found.get("FAILURE_DUMP_TAIL") is False:
        settled["FAIL_TAIL_LINES"] = 0
    if found.get("ENABLE_TF32") is False:
        settled["MATMUL_PRECISION"] = "highest"
    return settled


def _every(number: int, steps: int) -> int | str:
    """Return how often; never, where a run has fewer steps than that."""
    return "off" if number > steps else number


def _choose_cells(found: dict[str, Any], steps: int) -> dict[str, list[str]]:
    """Return the two cells of MODE=ab: a run as it used to be, and one without what costs time."""
    cells: dict[str, list[str]] = {}
    for side, cell in SIDE_CELLS.items():
        words = []
        for name, known in SIDES.items():
            value = found.get(f"AB_{side}_{name}", known.old if cell == OLD else known.tuned)
            if name in ("VALIDATION_EVERY", "CHECKPOINT_EVERY"):
                value = _every(value, steps)
            words.append(known.becomes.format(str(value).lower()))
        cells[cell] = words
    return cells


def _choose_extras(asked: FromEnv, found: dict[str, Any]) -> dict[str, list[str]]:
    """Set compile and fixed slices for all cells where that is asked; what is not is left for
    phase C."""
    dynamic = "on" if found.get("TORCH_COMPILE_DYNAMIC", True) else "off"
    compiled = [f"train.compile={found.get('TORCH_COMPILE_MODE', 'default')}"]
    compiled.append(f"train.compile_dynamic={dynamic}")
    sliced = [f"data.fixed_slice_s={found.get('FIXED_SLICE_SECONDS', SLICE_S):g}"]
    extras = {"compile": compiled, "fixed_slice": sliced}
    for name, switch in (
        ("compile", "ENABLE_TORCH_COMPILE"),
        ("fixed_slice", "ENABLE_LENGTH_FIXED_SLICE"),
    ):
        if found.get(switch):
            asked.words += extras.pop(name)
    return extras
