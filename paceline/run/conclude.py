"""From the files the ranks left to result.json: how the run ended, why, and what it measured."""

import math
from dataclasses import dataclass

from paceline.errors import EXIT_CODES
from paceline.launch.archive import finish_attempt, list_attempts, measure_ettr, summarise
from paceline.launch.base import LaunchEnd
from paceline.launch.ending import Ending, completed_steps, judge_end, load_verdicts, stop_notes
from paceline.machine.facts import hardware_fingerprint
from paceline.machine.kept_rates import load_matmul_tflops
from paceline.records import (
    Attempt,
    Audit,
    CheckpointFacts,
    Env,
    Fingerprints,
    PipelineFacts,
    Plan,
    RankMemory,
    RankVerdict,
    Result,
)
from paceline.records.files import fingerprint
from paceline.records.rundir import RunDir
from paceline.records.tables import CheckpointRow, TrainingRow, read_checkpoints, read_training
from paceline.schedules.account import account
from paceline.schedules.measured import load_measured
from paceline.stats.windows import Throughput, measure_throughput

MFU_FORMULA = "MFU = FLOPs per sample x samples/s / (world size x peak FLOP/s)"


@dataclass(frozen=True)
class Circumstances:
    """What the supervisor knows and no file holds."""

    end: LaunchEnd
    config_fingerprint: str
    code_fingerprint: str
    data_facts: dict[str, float]
    started_at: float
    ended_at: float


def conclude(run: RunDir, plan: Plan, env: Env, known: Circumstances) -> Result:
    """Read every rank's verdict and the training table; decide the one outcome."""
    verdicts = load_verdicts(run, plan.world_size)
    ending = judge_end(run, plan.world_size, known.end)
    attempts = _attempts(run, plan.world_size, ending)
    rows = read_training(run.training)
    # Of the last attempt: those before it may have had other ranks.
    first_step = attempts[-1].first_step if attempts else 1
    rates = measure_throughput([r for r in rows if r.step >= first_step], run.training.name)
    tflops, mfu, note = _utilisation(plan, verdicts, rates)
    bad_step, bad_ids = _bad_samples(verdicts)
    peaks = [verdicts[rank] for rank in sorted(verdicts)]
    val_loss, loss_notes = _validation(rows)
    notes = {note for verdict in peaks for note in verdict.notes} | _notes_of(run, attempts)
    pipeline, pipeline_notes = _pipeline(run, plan, verdicts)
    notes |= {*stop_notes(run, plan.world_size, known.end), *loss_notes, *pipeline_notes}
    return Result(
        run_dir=str(run.root),
        name=plan.name,
        outcome=ending.outcome,
        exit_code=EXIT_CODES[ending.outcome],
        steps=completed_steps(run, plan.world_size, rows[-1].step if rows else 0),
        final_loss=_final_loss(rows),
        val_loss=val_loss,
        step_s=rates.step_s if rates else None,
        samples_per_s=rates.samples_per_s if rates else None,
        tokens_per_s=rates.tokens_per_s if rates else None,
        steps_per_s=rates.steps_per_s if rates else None,
        tflops_per_rank=tflops,
        mfu=mfu,
        mfu_note=note,
        matmul_share=_matmul_share(plan, env, tflops),
        window=rates.window if rates else None,
        peak_active_bytes=_largest([v.peak_active_bytes for v in peaks]),
        peak_reserved_bytes=_largest([v.peak_reserved_bytes for v in peaks]),
        rank_memory=[_memory_of(verdict) for verdict in peaks],
        world_size=plan.world_size,
        strategy=plan.strategy.value,
        precision=plan.precision.value,
        fingerprints=Fingerprints(
            config=known.config_fingerprint,
            code=known.code_fingerprint,
            data=_data_fingerprint(verdicts),
            hardware=hardware_fingerprint(env),
        ),
        data_facts=known.data_facts,
        skipped_steps=sum(row.skipped for row in rows),
        bad_step=bad_step,
        bad_sample_ids=bad_ids,
        failure=ending.failure,
        notes=sorted(notes),
        attempts=[summarise(attempt) for attempt in attempts],
        checkpoints=_checkpoint_facts(read_checkpoints(run.checkpoint_log)),
        pipeline=pipeline,
        ettr=measure_ettr(rows, attempts),
        started_at=known.started_at,
        elapsed_s=known.ended_at - known.started_at,
    )


def _validation(rows: list[TrainingRow]) -> tuple[float | None, list[str]]:
    """The last validation loss, or a note that it is no number."""
    found = next((row.val_loss for row in reversed(rows) if row.val_loss is not None), None)
    if found is None or math.isfinite(found):
        return found, []
    return None, ["the last validation loss is not finite"]


def _memory_of(verdict: RankVerdict) -> RankMemory:
    return RankMemory(
        rank=verdict.rank,
        peak_active_bytes=verdict.peak_active_bytes,
        peak_reserved_bytes=verdict.peak_reserved_bytes,
    )


def _notes_of(run: RunDir, attempts: list[Attempt]) -> set[str]:
    """What attempts left to be said, and what ran otherwise than was decided."""
    notes = {f"attempt {past.number}: {note}" for past in attempts[:-1] for note in past.notes}
    notes |= {attempts[-1].stopped} - {""} if attempts else set()
    if run.audit.is_file():
        notes |= {str(proof) for proof in Audit.load(run.audit).mismatches}
    return notes


def _attempts(run: RunDir, num_ranks: int, ending: Ending) -> list[Attempt]:
    """All of them. Where members ran the last one, this process may know better how it ended."""
    if run.attempt.is_file():
        last = Attempt.load(run.attempt)
        if last.outcome is not ending.outcome:
            cause = ending.failure.message if ending.failure else ""
            finish_attempt(run, num_ranks, ending.outcome, cause, last.stopped)
    return list_attempts(run)


def _checkpoint_facts(rows: list[CheckpointRow]) -> CheckpointFacts | None:
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
    """What its passes measured, or a note that they are not there."""
    if plan.pipeline is None:
        return None, []
    measured = load_measured(run, plan)
    if measured is None:
        return None, ["no pass of the pipeline was measured on all its ranks"]
    peaks = {rank: v.peak_active_bytes or v.peak_reserved_bytes for rank, v in verdicts.items()}
    return account(measured, plan.pipeline, peaks), []


def _utilisation(
    plan: Plan, verdicts: dict[int, RankVerdict], rates: Throughput | None
) -> tuple[float | None, float | None, str]:
    """TFLOP/s a rank, MFU, and how they were computed or why they were not."""
    first = verdicts.get(0)
    flops = first.flops_per_sample if first else None
    if rates is None or flops is None:
        why = "no steps after warm-up" if rates is None else (first.flops_source if first else "")
        return None, None, f"not computed: {why or 'rank 0 left no verdict'}"
    achieved = flops * rates.samples_per_s
    tflops = achieved / plan.world_size / 1e12
    window = rates.window
    source = f"FLOPs {first.flops_source if first else ''}; samples/s from {window.file},"
    source += f" steps {window.first_step} to {window.last_step}"
    peak = plan.peak_flops.value
    if peak is None:
        return tflops, None, f"no MFU: {plan.peak_flops.because}. {source}"
    mfu = achieved / (plan.world_size * peak)
    return tflops, mfu, f"{MFU_FORMULA}; {plan.peak_flops.because}; {source}"


def _matmul_share(plan: Plan, env: Env, tflops: float | None) -> float | None:
    """Of what `paceline check` measured this very hardware to do; None where it never did."""
    measured = load_matmul_tflops(env, plan.device.value, plan.precision.value, plan.threads.value)
    return tflops / measured if tflops is not None and measured else None


def _bad_samples(verdicts: dict[int, RankVerdict]) -> tuple[int | None, list[int]]:
    """The samples of the vetoed step: those of the ranks whose own loss was bad, or of all."""
    bad = [v for v in verdicts.values() if v.bad_step is not None]
    guilty = [v for v in bad if not v.loss_was_finite] or bad
    ids = [index for v in guilty for index in v.bad_sample_ids]
    return (bad[0].bad_step if bad else None), ids


def _data_fingerprint(verdicts: dict[int, RankVerdict]) -> str:
    names = sorted({verdict.data_fingerprint for verdict in verdicts.values()})
    return names[0] if len(names) == 1 else fingerprint(*names)


def _final_loss(rows: list[TrainingRow]) -> float | None:
    finite = [row.loss for row in rows if math.isfinite(row.loss)]
    return finite[-1] if finite else None


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
