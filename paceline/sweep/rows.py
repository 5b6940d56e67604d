"""A run that has ended as a row of the manifest."""

import json
from pathlib import Path

from paceline.config.schema import RunConfig
from paceline.errors import Outcome
from paceline.records import Result
from paceline.records.rundir import RunDir
from paceline.records.swept import SweptCell
from paceline.records.tables import read_steps
from paceline.run.flow import Decided
from paceline.stats.timing_points import list_points
from paceline.strategies import find_strategy
from paceline.sweep.folder import COLUMNS, FAILED, NOT_THERE, SUCCESS, Row


def describe_run(
    cell: SweptCell, place: tuple[str, str, int], decided: Decided, result: Result, root: Path
) -> Row:
    """`place` is mode, phase and repeat; paths are relative to `root`, the sweep's folder."""
    mode, phase, repeat = place
    run = RunDir(Path(result.run_dir))
    inside = run.root.relative_to(root.resolve())
    points = list_points(read_steps(run.steps(0)), decided.job.config.train.log_every)
    known = {
        "mode": mode,
        "group": cell.name,
        "repeat": repeat,
        "status": SUCCESS if result.outcome is Outcome.OK else FAILED,
        "exit_code": result.exit_code,
        "duration_sec": f"{result.elapsed_s:.3f}",
        "last_step": result.steps,
        "last_iter_ms_p50": f"{points[-1].iter_ms_p50:.3f}" if points else NOT_THERE,
        "run_dir": inside,
        "launcher_log": inside / run.launcher_log.name,
        "train_log": inside / run.train_log.name,
        "phase": phase or NOT_THERE,
        "outcome": result.outcome,
        "steps_asked": decided.plan.steps,
        "started_at": f"{result.started_at:.3f}",
        "peak_bytes": result.peak_bytes or NOT_THERE,
        "config_fingerprint": result.fingerprints.config,
        "code_fingerprint": result.fingerprints.code,
        "data_fingerprint": result.fingerprints.data,
        "hardware_fingerprint": result.fingerprints.hardware,
        "overrides": json.dumps(cell.overrides),
        **_settings(decided.job.config, decided),
    }
    return {name: str(known.get(name, NOT_THERE)) for name in COLUMNS}


def _settings(config: RunConfig, decided: Decided) -> dict[str, object]:
    """Return what was asked and what was used, by column of the manifest."""
    plan, gpus = decided.plan, decided.env.gpus
    on_gpu = plan.on_gpu and bool(gpus)
    stage = find_strategy(plan.strategy.value).zero_stage(config)
    return {
        "zero_stage": NOT_THERE if stage is None else stage,
        "micro_batch": plan.batch.micro,
        "world_size": plan.world_size,
        "global_batch": plan.batch.global_size,
        "log_every_steps": config.train.log_every,
        "validation_every_steps": config.train.eval_every,
        "checkpoint_every_steps": config.checkpoint.every,
        "num_workers": plan.loader_workers.value,
        "prefetch_factor": config.data.prefetch,
        "dataset_manifest_path": getattr(config.data, "source", NOT_THERE),
        "precision_mode_req": config.precision.mode,
        "precision_mode_effective": plan.precision.value,
        "attn_impl_req": config.attention.impl,
        "attn_impl_effective": plan.attention.value,
        "torch_compile_enabled": str(plan.compile.value != "off").lower(),
        "gpu_name": gpus[0].name if on_gpu else NOT_THERE,
        "gpu_cc": gpus[0].compute_capability if on_gpu else NOT_THERE,
    }
