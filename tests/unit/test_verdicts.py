"""Judgements of runs in which nothing is wrong, or something else than it seems: attempts that
follow each other, steps that stand twice in a table, fp16's search, evaluations, pipelines."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.drill.flow import names_fault
from paceline.errors import Outcome
from paceline.health import Evidence, judge, read_evidence
from paceline.health.desync import find_desync
from paceline.health.evidence import Heart
from paceline.records import Overlap
from paceline.records.columns import Table
from paceline.records.disk import Appender
from paceline.records.drills import Drill, Fault
from paceline.records.findings import RunFinding
from paceline.records.heartbeats import Beat, last_beat
from paceline.records.phases import Phase
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import STEPS
from paceline.run.watching import Window
from paceline.train import heartbeat
from tests.judged import make_evidence, make_table, make_telemetry, make_training
from tests.machines import box, plan
from tests.measured import make_result

NOW = 1e9
PIPELINE = (4, 19, 4)  # collectives of a step, by rank: stages of a pipeline differ


def one(evidence: Evidence, kind: str) -> RunFinding:
    return next(f for f in judge(evidence) if f.kind == kind)


def counted(per_step: int, num_steps: int = 30, first: int = 1, left_out_at: int = 0) -> Table[Any]:
    """Collectives of a rank in one attempt, which counts from its own start on."""
    steps = np.arange(first, first + num_steps)
    made = 10 + np.cumsum(per_step - (steps == left_out_at))
    return make_table(STEPS, num_steps, step=steps, collectives=made)


def joined(*tables: Table[Any]) -> Table[Any]:
    """Return the rows of all, one after the other."""
    return Table(
        STEPS,
        {name: np.concatenate([t.values[name] for t in tables]) for name in tables[0].values},
        {name: np.concatenate([t.is_empty[name] for t in tables]) for name in tables[0].is_empty},
    )


def test_counts_are_compared_within_an_attempt() -> None:
    """Each attempt counts from 0, which takes more off a rank that runs more of them."""
    resumed = {r: joined(counted(n), counted(n, first=31)) for r, n in enumerate(PIPELINE)}
    assert list(find_desync(Evidence(3, steps=resumed))) == []
    short = {r: joined(counted(n), counted(n, 2, first=31)) for r, n in enumerate(PIPELINE)}
    assert list(find_desync(Evidence(3, steps=short))) == []
    resumed[1] = joined(counted(19), counted(19, first=31, left_out_at=41))
    (found,) = find_desync(Evidence(3, steps=resumed))
    assert (found.rank, found.step) == (1, 41), "a fault of the attempt that lives"


def write(path: Path, table: Table[Any], kept: int | None = None) -> None:
    file = TableFile(path, STEPS, kept)
    for step, made in zip(table.values["step"], table.values["collectives"], strict=True):
        file.add({"step": int(step), "collectives": int(made)})
    file.close()


def test_a_window_over_two_attempts_brings_no_desync(tmp_path: Path) -> None:
    """Nor one that has the new attempt of one rank, and of another still the one before: a new
    attempt runs some collectives of its own in its first steps."""
    paths = [tmp_path / f"{rank}.csv" for rank in range(3)]
    windows = {rank: Window(path, STEPS) for rank, path in enumerate(paths)}

    def found() -> list[RunFinding]:
        return list(find_desync(Evidence(3, steps={r: w.table() for r, w in windows.items()})))

    for rank, per_step in enumerate(PIPELINE):
        write(paths[rank], counted(per_step, 40))
        windows[rank].read()
    assert found() == []
    for rank, per_step in enumerate(PIPELINE):
        again = counted(per_step, 20, first=31)
        again.values["collectives"][4:] += 3  # names are agreed on, once
        write(paths[rank], again, kept=30)
        windows[rank].read()
        assert found() == []


def test_a_step_that_stands_twice_is_taken_once() -> None:
    def twice(table: Table[Any]) -> Table[Any]:
        return joined(table, table[-1:])

    for odd in ((0, 1), (1,)):
        evidence = make_evidence()
        steps = {
            rank: replace(
                table,
                values=table.values | {"collectives": 4 * table.values["step"]},
                is_empty=table.is_empty | {"collectives": np.full(len(table), False)},
            )
            for rank, table in evidence.steps.items()
        }
        steps |= {rank: twice(steps[rank]) for rank in odd}
        assert [f.kind for f in judge(replace(evidence, steps=steps))] == ["compute_bound"]


def test_the_search_of_fp16_for_its_scale_is_no_bad_loss() -> None:
    """Neither in the first steps, nor in the last row, after which a watchdog would halt the run;
    a loss that is not finite is one, whatever the scale."""
    steps = np.arange(1, 41)
    search = (steps <= 8) | (steps == 40)
    norms = np.where(search, np.nan, 1.0)
    rows = make_training(40, skipped=search, overflowed=search, grad_norm=norms)
    assert judge(Evidence(1, training=rows)) == []
    rows.values["skipped"][19] = True
    found = one(Evidence(1, training=rows), "nan_loss")
    assert (found.step, found.evidence["steps"], found.severity) == (20, [20], "warning")
    rows.values["loss"][3] = np.nan
    assert one(Evidence(1, training=rows), "nan_loss").evidence["steps"] == [4, 20]


def alive(phase: str, *still_s: float | None, step: int = 100) -> Evidence:
    """Return a live run in which no step has begun for 200 s; its ranks stand for `still_s`."""
    beats = [Beat(NOW, r, step, phase, 9000, still_s=each) for r, each in enumerate(still_s)]
    hearts = {beat.rank: Heart(beat, NOW) for beat in beats}
    return Evidence(2, training=make_training(step), hearts=hearts, now=NOW, idle_s=200.0)


@pytest.mark.parametrize(
    ("evidence", "is_flat"),
    [
        (alive("eval", 1.0, 0.5), False),
        (alive("eval", 200.0, 190.0), True),
        (alive("forward", 199.0, 200.0), True),
        (alive("forward", None, None), True),  # of an older version
        (alive("eval", None, None), False),
        (alive("forward", None, None, step=1), False),
        (alive("forward", 199.0, 1.0), False),
    ],
)
def test_a_run_stands_where_no_rank_enters_a_phase(evidence: Evidence, is_flat: bool) -> None:
    found = [f for f in judge(evidence) if f.kind == "throughput_flatline"]
    assert [f.severity for f in found] == ["error"] * is_flat
    if is_flat and evidence.hearts[0].beat.still_s == 200.0:
        assert found[0].evidence["idle_s"] == 190.0, "since the last of them moved"


def test_a_heartbeat_says_how_long_its_rank_has_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    at = SimpleNamespace(step=0, phase="start", marks=0)
    path = tmp_path / "heartbeat_rank0.jsonl"
    beats = heartbeat.Heartbeat(Appender(path, hold=0), 0, at, 1.0)

    def still_s(after_s: float, **moved: Any) -> float | None:
        vars(at).update(moved)
        now[0] += after_s
        beats.tick()
        return last_beat(path).still_s

    assert still_s(300) == 0.0, "before its first step"
    assert still_s(1, step=31, phase="forward", marks=2) == still_s(300) == 0.0, "may compile"
    assert still_s(1, step=32, marks=7) == 0.0 and still_s(150) == 150.0
    assert still_s(1, phase="eval", marks=8) == 0.0, "evaluation goes from batch to batch"
    assert still_s(9) == 9.0 and still_s(1, marks=9) == 0.0
    long = {"step": 10**9, "phase": "checkpoint", "marks": 10**10}
    still_s(1, **long)
    assert still_s(99_999) == 99_999.0 and path.stat().st_size % 128 == 0


def with_more(evidence: Evidence, phase: Phase, seconds: float) -> Evidence:
    """Return it with steps that take longer by a phase."""
    steps = {}
    for rank, table in evidence.steps.items():
        more = {name: table.values[name] + seconds for name in (phase.column, "wall_s")}
        is_empty = table.is_empty | {phase.column: np.full(len(table), False)}
        steps[rank] = replace(table, values=table.values | more, is_empty=is_empty)
    return replace(evidence, steps=steps)


def test_a_pipeline_that_waits_is_not_called_compute_bound() -> None:
    """30 of each 136 ms are forward and backward; 100 are waiting for other stages."""
    staged = plan("launch.nproc=3", "strategy.name=pipeline", "launch.device=cpu")
    assert staged.pipeline is not None
    alike = {"cost": 1.0, "num_parameters": 100}
    stages = [stage.model_copy(update=alike) for stage in staged.pipeline.stages]
    pipeline = staged.pipeline.model_copy(update={"stages": stages})
    evidence = make_evidence(num_ranks=3, plan=staged.model_copy(update={"pipeline": pipeline}))
    found = judge(with_more(evidence, Phase.COMM, 0.1))
    assert [f.kind for f in found] == ["bound_by_waiting"]
    assert "75% of each" in found[0].words and "for other stages" in found[0].words
    assert "--axis strategy.microbatches=" in found[0].to_try
    assert [f.kind for f in judge(evidence)] == ["compute_bound"]


def test_the_largest_part_of_a_step_is_named_where_it_is_not_the_passes() -> None:
    """Of 36 ms 30 are forward and backward; 2 are waiting, 2 the update, 0.5 the rest."""
    evidence = make_evidence(plan=plan("launch.nproc=2", "launch.device=cpu"))
    found = one(with_more(evidence, Phase.OPTIMIZER, 0.05), "bound_by_optimizer")
    assert "optimizer" in found.words and "train.grad_accum=" in found.to_try
    assert one(with_more(evidence, Phase.OTHER, 0.05), "bound_by_other").to_try
    several = with_more(with_more(evidence, Phase.OTHER, 0.02), Phase.OPTIMIZER, 0.02)
    found = one(several, "bound_by_several")
    assert "forward and backward 40%" in found.words and "optimizer 29%" in found.words


def test_a_rate_of_the_exchange_is_one_that_was_measured(tmp_path: Path) -> None:
    """16 ms are exposed of the 66 in which gradients were on their way; 3,314,176 bytes in 66 ms
    are 0.05 GB/s, of which a ring of two ranks sends each byte once."""
    decided = plan("launch.nproc=2", "strategy.name=ddp", "launch.device=cpu")
    evidence = make_evidence(plan=decided, link_gb_per_s=0.1)
    for table in evidence.steps.values():
        for column in ("backward_s", "backward_blocked_s", "wall_s"):
            table.values[column][:] += 0.014
    found = one(evidence, "bound_by_exchange")
    assert found.evidence["gb_per_s"] is None and " at 0.2" not in found.words
    assert "3.16 MiB of gradients, which take 33.1 ms at the 0.1 GB/s" in found.words
    spent = {0: 0.080, 1: 0.066}  # rank 0 came first, and waited
    overlaps = [
        Overlap(rank=rank, step=3, communication_s=s, exposed_s=0.016, compute_s=0.05)
        for rank, s in spent.items()
    ]
    found = one(replace(evidence, overlaps=overlaps), "bound_by_exchange")
    assert found.evidence["gb_per_s"] == pytest.approx(0.0502, rel=0.01)
    assert "66 ms on their way in step 3 (0.0502 GB/s), where paceline check" in found.words
    run = RunDir(tmp_path)
    decided.save(run.plan)
    for overlap in overlaps[:1]:
        run.make_rank(overlap.rank)
        overlap.save(run.overlap(overlap.rank))
    run.make_rank(1)
    run.overlap(1).write_text("{")
    read = read_evidence(run)
    assert list(read.overlaps) == overlaps[:1] and len(read.damaged) == 1


def test_a_gpu_that_is_throttled_is_what_the_run_is_bound_by() -> None:
    decided = plan("launch.nproc=1", machine=box(1))
    seconds = np.arange(100)
    telemetry = make_telemetry(
        100, "gpu0", clock_mhz=np.where(seconds < 30, 1980.0, 1200.0), utilisation_percent=99.0,
        throttle_reasons=0x20,
    )  # fmt: skip
    evidence = make_evidence(num_ranks=1, plan=decided, telemetry={0: telemetry})
    found = one(evidence, "bound_by_gpu")
    assert "1200 MHz, 1980 at its best" in found.words and "cooling" in found.to_try
    assert "compute_bound" not in [f.kind for f in judge(evidence)]


def test_a_loss_that_is_not_finite_is_told_once_with_the_rank_that_had_it() -> None:
    """In a pipeline the last stage sees all losses, whoever spoilt them."""
    rows = make_training(30, skipped=np.arange(30) == 29, grad_norm=1.0)
    decided = plan("launch.nproc=2", "launch.device=cpu")
    drill = Drill(fault=Fault.NAN, rank=1)

    def told(ranks: list[int], **more: Any) -> RunFinding:
        bad = {"outcome": Outcome.NAN, "bad_step": 30, "bad_ranks": ranks, "bad_sample_ids": [7]}
        ended = make_result(RunDir(Path("run")), "c", **bad)
        evidence = Evidence(2, training=rows, result=ended, plan=decided)
        (found,) = judge(replace(evidence, **more))
        assert (found.kind, found.step) == ("nan_loss", 30)
        assert "samples of it were 7" in found.words
        return found

    assert told([1]).rank == 1 and "rank 1's" in told([1]).words
    assert told([]).rank is None and told([0, 1]).rank is None, "a gradient alone, or all of them"
    staged = plan("launch.nproc=2", "strategy.name=pipeline", "launch.device=cpu")
    in_pipeline = told([1], plan=staged)
    assert in_pipeline.rank is None
    assert names_fault(drill, told([1])) and not names_fault(drill, told([0]))
    assert not names_fault(drill, told([])) and names_fault(drill, in_pipeline, knows_losses=False)


def test_a_live_run_is_slower_for_a_while_before_it_is_said_to_be() -> None:
    """The last tenth of 400 steps is 2.4 s, in which a machine may do something else; of ten times
    as long ones 24 s."""
    for factor, found in ((1.0, []), (10.0, ["throughput_drift"])):
        step_s = factor * np.linspace(0.03, 0.06, 400)
        live = Evidence(1, training=make_training(400, step_s=step_s), now=NOW)
        assert [f.kind for f in judge(live) if f.severity != "note"] == found
