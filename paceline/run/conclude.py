"""Writes result.json from how the run ended and the files that ranks left."""

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.config.plain import read_plain
from paceline.launch.archive import finish_attempt, list_attempts, measure_ettr, summarise
from paceline.launch.ending import Ending, Verdicts, completed_steps, stop_notes
from paceline.machine.datasheets import choose_arithmetic
from paceline.machine.facts import hardware_fingerprint
from paceline.machine.measures import load_matmul_tflops
from paceline.metrics import PADDING, TRAIN, Goal
from paceline.records import (
    Attempt,
    Audit,
    BestMetric,
    CheckpointFacts,
    Env,
    Fingerprints,
    PipelineFacts,
    Plan,
    RankMemory,
    RankVerdict,
    Result,
    Stability,
    StepSeconds,
    Unwritten,
    list_unwritten,
)
from paceline.records.columns import Table
from paceline.records.files import fingerprint
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    CheckpointRow,
    TrainingRow,
    read_checkpoints,
    read_training,
)
from paceline.schedules.account import account
from paceline.schedules.measured import load_measured
from paceline.stats.figures import RunFigures, best_of, last_loss, last_metrics, measure_run
from paceline.stats.stability import MAX_GROWTH

MAX_NOTES = 10
History = tuple[Table[TrainingRow], list[Attempt]]
MFU_FORMULA = "MFU = FLOPs per sample x samples/s / (world size x peak FLOP/s)"


@dataclass(frozen=True)
class Circumstances:
    """What the supervisor knows that is in no file."""

    ending: Ending
    config_fingerprint: str
    code_fingerprint: str
    data_facts: dict[str, float]
    started_at: float
    ended_at: float
    notes: list[str] = field(default_factory=list)


def conclude(run: RunDir, plan: Plan, env: Env, known: Circumstances) -> Result:
    """Write down how the run ended, which is judged already, and what it measured. Each step below
    returns some fields of the record, by their names there."""
    ending, rows = known.ending, read_training(run.training)
    attempts = _attempts(run, ending)
    unwritten = _unwritten(run, ending.verdicts)
    result = Result(
        run_dir=str(run.root),
        name=plan.name,
        world_size=plan.world_size,
        strategy=plan.strategy.value,
        precision=plan.precision.value,
        **_how_it_ended(run, ending, rows),
        **_what_was_learned(run, rows, ending.verdicts),
        **_how_fast(run, plan, env, ending.verdicts, (rows, attempts)),
        **_memory(ending.verdicts),
        **_what_is_kept(run, plan, known, (rows, attempts), unwritten),
        data_facts=known.data_facts,
        fingerprints=Fingerprints(
            config=known.config_fingerprint,
            code=known.code_fingerprint,
            data=_data_fingerprint(ending.verdicts),
            hardware=hardware_fingerprint(env),
        ),
        started_at=known.started_at,
        elapsed_s=known.ended_at - known.started_at,
    )
    return _without_lost_rows(result, rows)


def _unwritten(run: RunDir, verdicts: Verdicts) -> list[Unwritten]:
    """Return what ranks and this process could not write, file by file."""
    found = [each for verdict in verdicts.values() for each in verdict.unwritten]
    return sorted([*found, *list_unwritten(run)], key=lambda each: each.file)


def _without_lost_rows(result: Result, rows: Table[TrainingRow]) -> Result:
    """Leave out figures that would need rows of training.csv that were lost."""
    lost = next((each.missing for each in result.unwritten if each.file == "training.csv"), [])
    if not lost:
        return result
    if rows and rows[-1].step > lost[-1][-1]:
        return result.model_copy(update={"ettr": None})
    unknown = dict.fromkeys(("ettr", "final_loss", "final_loss_step", "val_loss"))
    return result.model_copy(update=unknown)


def _how_it_ended(run: RunDir, ending: Ending, rows: Table[TrainingRow]) -> dict[str, Any]:
    recorded = rows[-1].step if rows else 0
    return {
        "outcome": ending.outcome,
        "exit_code": ending.outcome.exit_code,
        "failure": ending.failure,
        "steps": completed_steps(run, ending.num_ranks, ending.verdicts, recorded),
    }


def _what_was_learned(run: RunDir, rows: Table[TrainingRow], verdicts: Verdicts) -> dict[str, Any]:
    metrics = _last_metrics(rows)[0]
    step, loss = last_loss(rows) or (None, None)
    has_padding = metrics.pop(f"{TRAIN}{PADDING}", None) is not None
    return {
        "final_loss": loss,
        "final_loss_step": step,
        "val_loss": metrics.pop("val/loss", None),
        "metrics": metrics,
        "padding": float(rows.metric(f"{TRAIN}{PADDING}")[1].mean()) if has_padding else None,
        "best": _best(run, rows),
        "why_early": next((v.why_early for v in verdicts.values() if v.why_early), ""),
        "skipped_steps": int(rows.column("skipped").sum()),
        **_bad_samples(verdicts),
    }


def _how_fast(
    run: RunDir, plan: Plan, env: Env, verdicts: Verdicts, history: History
) -> dict[str, Any]:
    figures = measure_run(run)
    tflops, mfu, note = _utilisation(plan, verdicts, figures)
    return {
        "step_s": StepSeconds(p50=figures.step_s_p50, p90=figures.step_s_p90) if figures else None,
        "samples_per_s": figures.samples_per_s if figures else None,
        "tokens_per_s": figures.tokens_per_s if figures else None,
        "steps_per_s": figures.steps_per_s if figures else None,
        "window": figures.window if figures else None,
        "stability": _stability(figures) if figures else None,
        "tflops_per_rank": tflops,
        "mfu": mfu,
        "mfu_note": note,
        "matmul_share": _matmul_share(plan, env, tflops),
        "ettr": measure_ettr(*history),
    }


def _stability(figures: RunFigures) -> Stability:
    most = {
        kind: max((g.mib_per_min for g in figures.growth if g.kind == kind), default=None)
        for kind in MAX_GROWTH
    }
    return Stability(
        p90_over_p50=figures.spread,
        drift=figures.drift,
        gpu_mib_per_min=most["gpu"],
        host_mib_per_min=most["host"],
        problems=figures.unrest,
    )


def _memory(verdicts: Verdicts) -> dict[str, Any]:
    by_rank = [verdicts[rank] for rank in sorted(verdicts)]
    return {
        "peak_active_bytes": _largest([v.peak_active_bytes for v in by_rank]),
        "peak_reserved_bytes": _largest([v.peak_reserved_bytes for v in by_rank]),
        "rank_memory": [_memory_of(verdict) for verdict in by_rank],
    }


def _what_is_kept(
    run: RunDir, plan: Plan, known: Circumstances, history: History, unwritten: list[Unwritten]
) -> dict[str, Any]:
    rows, attempts = history
    ending = known.ending
    pipeline, pipeline_notes = _pipeline(run, plan, ending.verdicts)
    notes = {note for verdict in ending.verdicts.values() for note in verdict.notes}
    notes |= _notes_of(run, attempts) | set(known.notes)
    notes |= {*stop_notes(ending), *_last_metrics(rows)[1], *pipeline_notes}
    return dict(
        notes=[*sorted(notes), *_notes_on(unwritten)],
        unwritten=unwritten,
        attempts=[summarise(attempt) for attempt in attempts],
        checkpoints=_checkpoint_facts(read_checkpoints(run.checkpoint_log)),
        pipeline=pipeline,
    )


def _notes_on(unwritten: list[Unwritten]) -> list[str]:
    """Return notes on files that could not be written: the worst first, and only some if there are
    many."""
    worst = sorted(unwritten, key=lambda each: -each.num_bytes)
    notes = [f"not written: {each}" for each in worst[:MAX_NOTES]]
    more = len(worst) - len(notes)
    return [*notes, f"not written: parts of {more} more files, see result.json"] if more else notes


def _last_metrics(rows: Table[TrainingRow]) -> tuple[dict[str, float], list[str]]:
    """Return the last value of each metric but the training loss, and a note of each that is not a
    number."""
    last = last_metrics(rows)
    notes = [f"the last {name} is not finite" for name, v in last.items() if not math.isfinite(v)]
    return {name: value for name, value in last.items() if math.isfinite(value)}, notes


def _best(run: RunDir, rows: Table[TrainingRow]) -> BestMetric | None:
    """Return the best evaluation by what `train.best` asked for; None where there is none."""
    asked = read_plain(run.config).get("train", {}).get("best", "auto")
    return best_of(rows, Goal.of_best(asked))


def _memory_of(verdict: RankVerdict) -> RankMemory:
    return RankMemory(
        rank=verdict.rank,
        peak_active_bytes=verdict.peak_active_bytes,
        peak_reserved_bytes=verdict.peak_reserved_bytes,
    )


def _notes_of(run: RunDir, attempts: list[Attempt]) -> set[str]:
    """Return what attempts noted, and what ran differently from the plan."""
    notes = {f"attempt {past.number}: {note}" for past in attempts[:-1] for note in past.notes}
    notes |= {attempts[-1].stopped} - {""} if attempts else set()
    if run.audit.is_file():
        notes |= {str(proof) for proof in Audit.load(run.audit).mismatches}
    return notes


def _attempts(run: RunDir, ending: Ending) -> list[Attempt]:
    """Return all of them. Where other processes ran the last one, the launcher's command may have
    seen more than they, and on a full disk its record may be old: what is judged here counts."""
    attempts = list_attempts(run)
    if run.attempt.is_file() and attempts[-1].outcome is not ending.outcome:
        cause = ending.failure.message if ending.failure else ""
        attempts[-1] = finish_attempt(run, ending, cause, attempts[-1].stopped)
    return attempts


def _checkpoint_facts(rows: Table[CheckpointRow]) -> CheckpointFacts | None:
    written = [row for row in rows if row.is_written]
    if not rows:
        return None
    return CheckpointFacts(
        num_written=len(written),
        num_failed=len(rows) - len(written),
        last_step=written[-1].step if written else None,
        num_bytes=written[-1].num_bytes if written else 0,
        stall_s=sum(row.stall_s for row in rows),
        duration_s=max(row.duration_s for row in rows),
    )


def _pipeline(
    run: RunDir, plan: Plan, verdicts: dict[int, RankVerdict]
) -> tuple[PipelineFacts | None, list[str]]:
    """Return what the passes of a pipeline measured, or a note that none was measured."""
    if plan.pipeline is None:
        return None, []
    measured = load_measured(run, plan)
    if measured is None:
        return None, ["no pass of the pipeline was measured on all its ranks"]
    peaks = {rank: v.peak_active_bytes or v.peak_reserved_bytes for rank, v in verdicts.items()}
    return account(measured, plan.pipeline, peaks), []


def _utilisation(
    plan: Plan, verdicts: dict[int, RankVerdict], figures: RunFigures | None
) -> tuple[float | None, float | None, str]:
    """Return TFLOP/s per rank, MFU, and how they were computed or why they were not."""
    first = verdicts.get(0)
    flops = first.flops_per_sample if first else None
    if figures is None or flops is None:
        why = "no steps after warm-up" if figures is None else (first.flops_source if first else "")
        return None, None, f"not computed: {why or 'rank 0 left no verdict'}"
    achieved = flops * figures.samples_per_s
    tflops = achieved / plan.world_size / 1e12
    source = f"FLOPs {first.flops_source if first else ''}; samples/s from {figures.window}"
    peak = plan.peak_flops.value
    if peak is None:
        return tflops, None, f"no MFU: {plan.peak_flops.because}. {source}"
    mfu = achieved / (plan.world_size * peak)
    return tflops, mfu, f"{MFU_FORMULA}; {plan.peak_flops.because}; {source}"


def _matmul_share(plan: Plan, env: Env, tflops: float | None) -> float | None:
    """Return the share of what `paceline check` measured on this very hardware, where it did."""
    device = plan.device.value
    arithmetic = choose_arithmetic(env, device, plan.precision.value, plan.matmul.value)
    measured = load_matmul_tflops(env, device, arithmetic, plan.threads.value)
    return tflops / measured if tflops is not None and measured else None


def _bad_samples(verdicts: dict[int, RankVerdict]) -> dict[str, Any]:
    """Return the vetoed step, the ranks whose own loss was bad, and their samples, or all."""
    bad = [v for v in verdicts.values() if v.bad_step is not None]
    guilty = [v for v in bad if not v.loss_was_finite]
    return {
        "bad_step": bad[0].bad_step if bad else None,
        "bad_ranks": sorted(v.rank for v in guilty),
        "bad_sample_ids": [index for v in guilty or bad for index in v.bad_sample_ids],
    }


def _data_fingerprint(verdicts: dict[int, RankVerdict]) -> str:
    names = sorted({verdict.data_fingerprint for verdict in verdicts.values()})
    return names[0] if len(names) == 1 else fingerprint(*names)


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
