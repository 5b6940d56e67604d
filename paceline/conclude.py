"""From the files the ranks left to result.json: how the run ended, why, and what it measured."""

import json
import math
import signal
from dataclasses import dataclass

from paceline.cluster.facts import hardware_fingerprint
from paceline.cluster.kept_rates import load_matmul_tflops
from paceline.errors import EXIT_CODES, Outcome
from paceline.files import fingerprint
from paceline.launch.base import LaunchEnd
from paceline.launch.blame import explain_stall, missed_deadline
from paceline.launch.pulse import last_beat
from paceline.records import (
    Audit,
    Env,
    Failure,
    Fingerprints,
    Plan,
    RankEnd,
    RankMemory,
    RankVerdict,
    Result,
)
from paceline.rundir import RunDir
from paceline.stats.windows import Throughput, measure_throughput
from paceline.tables import TrainingRow, read_training

NEWLINE = "\n"
MEMORY_HINT = (
    "; telemetry.csv shows how it grew\n"
    "hint: set a smaller train.micro_batch_size and a larger train.grad_accum, or fewer"
    " data.num_workers"
)
SIGNAL_HINTS = {
    "SIGKILL": "\nhint: the kernel does that when memory runs out; see telemetry.csv",
    "SIGILL": "\nhint: if this was bf16 on a CPU, its AMX may not be usable: set"
    " ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or precision.mode=fp32",
}
ECHO_KINDS = ("DistNetworkError", "DistBackendError")
ECHOES = ("connection reset", "connection closed", "broken pipe", "remote worker crash")
REFUSALS = (Outcome.REFUSED_CONFIG, Outcome.REFUSED_CLUSTER, Outcome.REFUSED_DATA)
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
    outcome = _outcome(verdicts, plan.world_size, known.end)
    rows = read_training(run.training)
    rates = measure_throughput(rows, run.training.name)
    tflops, mfu, note = _utilisation(plan, verdicts, rates)
    bad_step, bad_ids = _bad_samples(verdicts)
    peaks = [verdicts[rank] for rank in sorted(verdicts)]
    val_loss = next((r.val_loss for r in reversed(rows) if r.val_loss is not None), None)
    notes = {note for verdict in peaks for note in verdict.notes}
    if run.audit.is_file():
        notes |= {str(proof) for proof in Audit.load(run.audit).mismatches}
    if val_loss is not None and not math.isfinite(val_loss):
        notes.add("the last validation loss is not finite")
    return Result(
        run_dir=str(run.root),
        name=plan.name,
        outcome=outcome,
        exit_code=EXIT_CODES[outcome],
        steps=_completed(run, plan, rows, verdicts),
        final_loss=_final_loss(rows),
        val_loss=val_loss if val_loss is not None and math.isfinite(val_loss) else None,
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
        rank_memory=[
            RankMemory(
                rank=v.rank,
                peak_active_bytes=v.peak_active_bytes,
                peak_reserved_bytes=v.peak_reserved_bytes,
            )
            for v in peaks
        ],
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
        failure=None
        if outcome in (Outcome.OK, Outcome.INTERRUPTED)
        else _failure(run, verdicts, plan.world_size, known.end),
        notes=sorted(notes),
        started_at=known.started_at,
        elapsed_s=known.ended_at - known.started_at,
    )


def load_verdicts(run: RunDir, num_ranks: int) -> dict[int, RankVerdict]:
    """The verdicts there are; a rank that was killed has none."""
    paths = {rank: run.verdict(rank) for rank in range(num_ranks)}
    return {rank: RankVerdict.load(path) for rank, path in paths.items() if path.is_file()}


def _completed(
    run: RunDir, plan: Plan, rows: list[TrainingRow], verdicts: dict[int, RankVerdict]
) -> int:
    """Optimizer steps that every rank finished: the table may lag behind a run that was cut off."""
    recorded = rows[-1].step if rows else 0
    if all(v.outcome in (Outcome.OK, Outcome.NAN) for v in verdicts.values()) and verdicts:
        return recorded
    begun = [last_beat(run.heartbeat(rank)).step for rank in range(plan.world_size)]
    return max(recorded, min(begun) - 1)


def _outcome(verdicts: dict[int, RankVerdict], num_ranks: int, end: LaunchEnd) -> Outcome:
    if end.signal is not None:
        return Outcome.INTERRUPTED
    if end.stall or missed_deadline(end.ends):
        return Outcome.STALL
    if end.refusal:
        return Outcome.REFUSED_CLUSTER
    cause = _root_cause(verdicts, num_ranks, end)
    if cause is None:
        return next(iter(verdicts.values())).outcome
    if cause in verdicts:
        return verdicts[cause].outcome
    is_memory = cause in end.ends and end.ends[cause].ran_out_of_memory
    return Outcome.OUT_OF_RESOURCES if is_memory else Outcome.CRASHED


def _root_cause(verdicts: dict[int, RankVerdict], num_ranks: int, end: LaunchEnd) -> int | None:
    """The rank that failed first; None when every rank came to the same end together.

    A rank without a verdict was killed and said nothing: the others' errors came after it. Of
    several, it is one that its supervisor had not asked to end.
    """
    unheard = [rank for rank in range(num_ranks) if rank not in verdicts]
    silent = [rank for rank in unheard if not (rank in end.ends and end.ends[rank].asked_to_end)]
    errors = [verdict for verdict in verdicts.values() if verdict.error is not None]
    told = [v for v in errors if not _is_echo(v)]
    if told:
        return min(told, key=lambda verdict: verdict.ended_at).rank
    if silent:
        return silent[0]
    if errors:
        return min(errors, key=lambda verdict: verdict.ended_at).rank
    return unheard[0] if unheard else None


def _is_echo(verdict: RankVerdict) -> bool:
    """True for an error that only says that another rank went away."""
    assert verdict.error is not None
    if verdict.error.kind in ECHO_KINDS:
        return True
    text = verdict.error.message.lower()
    return verdict.error.kind == "RuntimeError" and any(echo in text for echo in ECHOES)


def _failure(
    run: RunDir, verdicts: dict[int, RankVerdict], num_ranks: int, end: LaunchEnd
) -> Failure | None:
    if end.refusal:
        log = run.launcher_log.name
        return Failure(
            rank=0, host=_host(run, 0), step=0, phase="start", message=end.refusal, log=log
        )
    deadline = missed_deadline(end.ends)
    if deadline:
        cause, message = explain_stall(run, end.ends, deadline)
        return _failure_of(run, verdicts, cause, message)
    found = _root_cause(verdicts, num_ranks, end)
    if found is None:
        return None
    return _failure_of(run, verdicts, found, _message(verdicts.get(found), end.ends.get(found)))


def _failure_of(run: RunDir, verdicts: dict[int, RankVerdict], cause: int, message: str) -> Failure:
    verdict, beat = verdicts.get(cause), last_beat(run.heartbeat(cause))
    others = [
        f"rank {v.rank}: {v.error.kind}: {v.error.message.partition(NEWLINE)[0]}"
        for v in verdicts.values()
        if v.error is not None and v.rank != cause
    ]
    return Failure(
        rank=cause,
        host=verdict.host if verdict else _host(run, cause),
        step=verdict.step if verdict else beat.step,
        phase=beat.phase,
        message=message,
        log=str(run.rank_log(cause).relative_to(run.root)),
        others=others,
    )


def _message(verdict: RankVerdict | None, end: RankEnd | None) -> str:
    if verdict is not None and verdict.error is not None:
        error = verdict.error
        # A refusal of ours is a sentence for people; its class says nothing more.
        said = error.message if verdict.outcome in REFUSALS else f"{error.kind}: {error.message}"
        return f"{said} ({error.place})" if error.place else said
    if end is None:
        return "vanished without a word: its supervisor was killed, or its machine is gone"
    if end.ran_out_of_memory:
        return f"killed by the kernel: the machine ran out of memory{MEMORY_HINT}"
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"killed by {name}{SIGNAL_HINTS.get(name, '')}"
    return f"left early with exit code {end.exit_code}"


def _host(run: RunDir, rank: int) -> str:
    launch = json.loads(run.launch.read_text())
    return str(launch["ranks"][rank]["host"])


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
