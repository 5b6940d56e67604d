"""The rules about a run's health, the verdicts about its speed, and what is done about them."""

import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.config.describe import iter_keys
from paceline.config.health import RulesConfig
from paceline.drill.flow import load_drilled, names_fault, noticed, place_of, require_all
from paceline.errors import ConfigError
from paceline.health import Evidence, act_on, judge, read_evidence
from paceline.health.actions import action_for
from paceline.health.desync import compare_calls
from paceline.health.evidence import Heart
from paceline.job import load_job
from paceline.records.columns import Table
from paceline.records.drills import Drill, Fault
from paceline.records.events import Event, EventLog, iter_events
from paceline.records.findings import Findings, RunFinding
from paceline.records.heartbeats import Beat
from paceline.records.phases import Phase
from paceline.records.rundir import RunDir
from paceline.records.tables import STEPS
from paceline.run.watching import Watcher
from tests.judged import make_all, make_evidence, make_table, make_telemetry, make_training
from tests.machines import box, plan

NOW = 1e9
MIB = 2**20
STEPS_100 = np.arange(100)
RISING = 500 * MIB + STEPS_100 * 10 * MIB


def kinds(evidence: Evidence) -> list[str]:
    return [f.kind for f in judge(evidence) if f.severity != "note"]


def one(evidence: Evidence, kind: str) -> RunFinding:
    return next(f for f in judge(evidence) if f.kind == kind)


def with_training(**columns: Any) -> Evidence:
    num_steps = max([100, *(len(v) for v in columns.values() if isinstance(v, np.ndarray))])
    return Evidence(1, training=make_training(num_steps, **columns))


def with_gates(entropy: Any = 1.0, collapse: Any = 0.0) -> Evidence:
    return with_training(**{"train/gate_entropy": entropy, "train/gate_collapse": collapse})


def at(step: int, value: float, usual: Any = 1.0) -> Any:
    return np.where(STEPS_100 == step - 1, value, usual)


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        ("nan_loss", with_training(skipped=at(7, 1, 0))),
        ("loss_spike", with_training(loss=at(60, 9.0, 3 + 0.01 * np.sin(STEPS_100)))),
        ("zero_grad", with_training(grad_norm=at(50, 0.0))),
        ("gradient_explosion", with_training(grad_norm=at(50, 500.0))),
        ("gate_collapse", with_gates(entropy=np.where(STEPS_100 < 70, 1.0, 0.1))),
        ("gate_collapse", with_gates(collapse=np.where(STEPS_100 < 70, 0.1, 0.6))),
        ("throughput_drift", with_training(step_s=np.linspace(0.03, 0.06, 400))),
        ("memory_growth", Evidence(1, telemetry={0: make_telemetry(100, rss_bytes=RISING)})),
        ("data_starvation", make_evidence({r: {Phase.DATA: 0.05} for r in (0, 1)})),
    ],
)
def test_what_breaks_a_rule_is_found_and_alone(kind: str, evidence: Evidence) -> None:
    assert kinds(evidence) == [kind]
    rules = RulesConfig.model_validate({kind: "off"})
    assert kinds(replace(evidence, rules=rules)) == []


def test_what_is_usual_is_no_finding() -> None:
    falling = 3 * np.exp(-STEPS_100 / 30) + 0.02 * np.sin(7 * STEPS_100)
    large_at_once = np.where(STEPS_100 < 50, 500 * MIB, 900 * MIB)
    evidence = Evidence(
        1,
        training=make_training(100, loss=falling, grad_norm=1 + 0.5 * np.sin(STEPS_100)),
        telemetry={0: make_telemetry(100, rss_bytes=large_at_once)},
    )
    assert judge(evidence) == []


def test_gates_that_recover_or_collapse_for_a_moment_are_no_finding() -> None:
    found = one(with_gates(entropy=np.where(STEPS_100 < 70, 1.0, 0.1)), "gate_collapse")
    assert (found.step, found.severity) == (71, "error") and "entropy is 0.1" in found.words
    for usual in (np.where(STEPS_100 < 90, 1.0, 0.1), at(100, 1.0, 0.1), np.nan):
        assert judge(with_gates(entropy=usual)) == []


def test_a_plateau_is_a_note() -> None:
    flat = 2 + 0.1 * np.sin(np.arange(400))
    rules = RulesConfig(loss_plateau_steps=100)
    found = judge(replace(with_training(loss=flat), rules=rules))
    assert [(f.kind, f.severity) for f in found] == [("loss_plateau", "note")]
    falling = replace(with_training(loss=flat - 0.01 * np.arange(400)), rules=rules)
    assert judge(falling) == []


def test_a_rank_that_is_silent_and_a_run_that_stands_are_named() -> None:
    hearts = {
        0: Heart(Beat(NOW - 1, 0, 40, "backward", 99), NOW - 1),
        1: Heart(Beat(NOW - 200, 1, 40, "forward", 98), NOW - 200),
    }
    evidence = Evidence(2, hearts=hearts, now=NOW, idle_s=200.0)
    stall, flat = one(evidence, "heartbeat_stall"), one(evidence, "throughput_flatline")
    assert (stall.rank, stall.step) == (1, 40) and "on rank 1" in flat.words
    assert judge(replace(evidence, now=None)) == [], "a run that is over is silent for good"


def test_a_clock_that_is_off_is_named_by_the_time_of_its_files() -> None:
    off = {0: 0.0, 1: 0.1, 2: -30.0}
    hearts = {r: Heart(Beat(NOW + s, r, 1, "data", 1), NOW) for r, s in off.items()}
    found = one(Evidence(3, hearts=hearts), "clock_skew")
    assert found.rank == 2 and "behind" in found.words


def test_two_clocks_are_apart_by_all_that_is_between_them() -> None:
    """Half of it on either side of their middle would be below the limit of 5 s."""
    hearts = {r: Heart(Beat(NOW + 8 * r, r, 1, "data", 1), NOW) for r in (0, 1)}
    found = [f for f in judge(Evidence(2, hearts=hearts)) if f.kind == "clock_skew"]
    assert [(f.rank, f.evidence["skew_s"]) for f in found] == [(1, 8.0)]


def test_unequal_shares_are_named_with_the_rank_that_always_has_the_largest() -> None:
    steps = {
        rank: make_table(STEPS, 20, step=np.arange(1, 21), units=100.0 * share)
        for rank, share in enumerate([1.0, 1.0, 1.5])
    }
    assert one(Evidence(3, steps=steps), "unequal_batches").rank == 2
    two = one(Evidence(2, steps={1: steps[1], 2: steps[2]}), "unequal_batches")
    assert two.rank == 2 and "50% more" in two.words, "against the other one, not their middle"
    turns = np.where(np.arange(20) % 2, 3.0, 1.0)
    for rank, units in ((1, 100 * turns), (2, 300 / turns)):
        steps[rank] = make_table(STEPS, 20, step=np.arange(1, 21), units=units)
    in_turns = one(Evidence(2, steps={1: steps[1], 2: steps[2]}), "unequal_batches")
    assert in_turns.rank is None and "200% more" in in_turns.words


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("units", [np.where(np.arange(20) < 10, 100.0, np.nan), np.zeros(20)])
def test_steps_without_a_count_are_not_compared(units: Any) -> None:
    table = make_table(STEPS, 20, step=np.arange(1, 21), units=units)
    assert "unequal_batches" not in kinds(Evidence(2, steps={0: table, 1: table}))


def counted(per_step: int, left_out_at: int = 0) -> Any:
    """Collectives of a rank, one more in every tenth step."""
    steps = np.arange(1, 41)
    made = np.cumsum(per_step + (steps % 10 == 0) - (steps == left_out_at))
    return make_table(STEPS, 40, step=steps, collectives=made)


def test_a_collective_that_is_left_out_names_rank_and_step() -> None:
    """F21; ranks of a pipeline usually run different numbers."""
    assert kinds(Evidence(2, steps={0: counted(4), 1: counted(4)})) == []
    found = one(Evidence(2, steps={0: counted(4), 1: counted(4, left_out_at=23)}), "desync")
    assert (found.rank, found.step) == (1, 23)
    third = {0: counted(4, left_out_at=9), 1: counted(3), 2: counted(4)}
    assert (one(Evidence(3, steps=third), "desync").rank) == 0


def test_shapes_that_differ_are_found_in_flight_recorders_and_in_logs() -> None:
    def dump(size: int) -> dict[str, Any]:
        call = {"profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"]}
        return {"entries": [{**call, "collective_seq_id": 3, "input_sizes": [[size]]}]}

    (found,) = compare_calls({0: dump(100), 1: dump(150)})
    assert found.kind == "shapes_differ" and "[[150]]" in found.words
    assert list(compare_calls({0: dump(100), 1: dump(100)})) == []
    log = (
        "what(): [enforce fail] op.preamble.length <= op.nbytes. 152 vs 100. Received\n"
        'Current thread 0x1:\n  File "/x/site-packages/torch/a.py", line 1 in all_reduce\n'
        '  File "/home/me/job.py", line 15 in loss\n'
    )
    told = one(Evidence(2, logs={0: log}), "shapes_differ")
    assert "job.py:15 in loss" in told.words


def test_a_gpu_that_throttles_or_errs_is_named() -> None:
    decided = plan("launch.nproc=2", machine=box(2))
    clocks = {"gpu0": 1980.0, "gpu1": np.where(STEPS_100 < 30, 1980.0, 1200.0)}
    tables = [
        make_telemetry(
            100, source, clock_mhz=clock, utilisation_percent=99.0,
            throttle_reasons=0x20 if source == "gpu1" else 0, xid=at(90, 79, 0),
        )
        for source, clock in clocks.items()
    ]  # fmt: skip
    both = make_telemetry(0)
    for name in both.values:
        both.values[name] = np.concatenate([t.values[name] for t in tables])
    for name in both.is_empty:
        both.is_empty[name] = np.concatenate([t.is_empty[name] for t in tables])
    found = judge(Evidence(2, plan=decided, telemetry={0: both}))
    assert [(f.kind, f.rank) for f in found if f.kind == "gpu_throttle"] == [("gpu_throttle", 1)]
    assert [f.rank for f in found if f.kind == "gpu_errors"] == [0, 1]
    both.values["clock_mhz"][100:] = 1200.0  # from its first step on: the other GPU tells
    found = judge(Evidence(2, plan=decided, telemetry={0: both}))
    assert [(f.kind, f.rank) for f in found if f.kind == "gpu_throttle"] == [("gpu_throttle", 1)]


def test_telemetry_is_judged_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row as an object takes 5 µs, and 64 ranks make half a million in an hour."""

    def refuse(self: Table[Any]) -> None:
        raise AssertionError("row by row")

    evidence = make_all(RulesConfig())
    monkeypatch.setattr(Table, "__iter__", refuse)
    assert evidence.telemetry and judge(evidence) == []


def test_verdicts_say_what_a_run_is_bound_by() -> None:
    fine = [f.kind for f in judge(make_evidence())]
    assert fine == ["compute_bound"]
    slow = make_evidence({r: {Phase.DATA: 0.05} for r in (0, 1)}, plan=plan())
    assert "bound_by_data" in [f.kind for f in judge(slow)]
    assert one(slow, "bound_by_data").to_try.startswith("paceline sweep RUN_DIR/run.yaml --axis")
    typed = replace(slow, plan=plan().model_copy(update={"workload": "my job.py:Mine"}))
    asked = "run.yaml 'workload=my job.py:Mine' --axis"
    assert asked in one(typed, "bound_by_data").to_try, "a file may not choose code to run"
    assert one(make_evidence(), "compute_bound").to_try == "", "another trainer's run"
    tried = one(make_evidence(plan=plan()), "compute_bound").to_try
    assert tried == "paceline sweep RUN_DIR/run.yaml --axis train.compile=off,default"
    compiled = plan("train.compile=default")
    tried = one(replace(make_evidence(), plan=compiled), "compute_bound").to_try
    assert tried.endswith("--axis train.micro_batch_size=8,16"), "it is compiled already"
    rules = RulesConfig(exchange_share=0.05)
    exchanged = replace(make_evidence(), rules=rules)
    assert [f.kind for f in judge(exchanged)] == ["bound_by_exchange"]
    tried = one(exchanged, "bound_by_exchange").to_try
    assert tried == (
        "train.grad_accum exchanges less often; strategy.name=ddp can send fewer bits: paceline"
        " bench run ddp_compression"
    ), "for whom the benchmark is, and no command for another trainer's run"


def test_a_command_names_the_file_of_a_workload_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has what was typed where the run was started; launch.json has all of the path."""
    job, here = tmp_path / "job", tmp_path / "elsewhere"
    slow = make_evidence(
        {r: {Phase.DATA: 0.05} for r in (0, 1)},
        plan=plan().model_copy(update={"workload": "mine.py:Mine"}),
        workload=f"{job}/mine.py:Mine",
    )
    here.mkdir()
    monkeypatch.chdir(here)
    assert f" workload={job}/mine.py:Mine --axis" in one(slow, "bound_by_data").to_try
    monkeypatch.chdir(tmp_path)
    assert " workload=job/mine.py:Mine --axis" in one(slow, "bound_by_data").to_try
    uneven = np.where(np.arange(60) % 2, 0.02, 0.0)
    turns = make_evidence({0: {Phase.FORWARD: uneven}, 1: {Phase.FORWARD: 0.02 - uneven}})
    assert [f.kind for f in judge(turns)] == ["bound_by_imbalance"]


@pytest.mark.parametrize(
    ("workers", "read_s", "joined_s", "says"),
    [
        (0, 0.04, 0.01, "own process, between two steps: most of it is reading them (40 ms"),
        (0, 0.0001, 0.0, "own process, between two steps, but not in reading them (100 µs"),
        (2, 0.12, 0.02, "2 loader processes cannot make samples in time: most of it is reading"),
        (2, 0.02, 0.15, "most of it is putting them together (150 ms of 170 ms a step)"),
        (4, 0.01, 0.01, "not making batches, which takes 20 ms of its 4 loader processes, but"),
        (1, None, None, "1 loader process cannot make samples in time"),
    ],
)
def test_the_slow_stage_of_loading_is_named(
    workers: int, read_s: float | None, joined_s: float | None, says: str
) -> None:
    slow = make_evidence({r: {Phase.DATA: 0.05} for r in (0, 1)})
    steps = {}
    for rank, table in slow.steps.items():
        both = {"read_s": read_s, "joined_s": joined_s}
        steps[rank] = replace(
            table,
            values=table.values | {n: np.full(len(table), v or 0.0) for n, v in both.items()},
            is_empty=table.is_empty | {n: np.full(len(table), v is None) for n, v in both.items()},
        )
    decided = plan("launch.nproc=2", f"data.num_workers={workers}")
    assert decided.loader_workers.value == workers
    found = one(replace(slow, steps=steps, plan=decided), "bound_by_data")
    assert says in found.words, found.words


@pytest.mark.parametrize(
    ("action", "made"),
    [("warn", []), ("dump", ["control/dump"]), ("checkpoint", ["control/checkpoint"]),
     ("halt", [".HALT", ".anomaly_type", "control/dump"])],
)  # fmt: skip
def test_a_rule_does_what_it_says(action: Any, made: list[str], tmp_path: Path) -> None:
    act_on(RunDir(tmp_path), RunFinding(kind="zero_grad", words="x"), action)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == made
    if action == "halt":
        assert (tmp_path / ".HALT").read_text() == "halt: zero_grad\n"
        assert (tmp_path / ".anomaly_type").read_text() == "zero_grad\n"


def test_hints_name_keys_that_exist() -> None:
    """All that findings tell people to set, as it stands in their sources."""
    root = Path(paceline.__file__).parent
    sources = [*(root / "health").glob("*.py"), *(root / "diagnose").glob("*.py")]
    named = re.compile(r"(?<![\w.])(?:optim|train|data|strategy|observe|launch)\.[a-z_.]*[a-z]")
    asked = {key for file in sources for key in named.findall(file.read_text())}
    keys = {key.path for key in iter_keys(type(load_job("lm_tiny", []).config))}
    sections = {path.rpartition(".")[0] for path in keys}
    assert len(asked) > 8 and asked - keys - sections == set()


def test_every_rule_with_an_action_has_a_default_and_verdicts_only_warn() -> None:
    assert action_for(RulesConfig(), "straggler") == "warn"
    assert action_for(RulesConfig(), "compute_bound") == "warn"
    assert action_for(RulesConfig(), "straggler_share") == "warn", "a limit is no action"


def test_events_are_read_back_and_damage_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(Event(kind="straggler", rank=1, step=20, words="rank 1 is slow", time=5.0))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": 3}\nnot json\n{"kind": "cut", "wor')
    (event,) = iter_events(path)
    assert (event.rank, event.step, event.time) == (1, 20, 5.0)
    assert list(iter_events(tmp_path / "absent")) == []


def test_findings_stand_in_a_file_with_the_gravest_first(tmp_path: Path) -> None:
    found = [RunFinding(kind="a", words="a", severity="note"), RunFinding(kind="b", words="b")]
    Findings.of(found).save(tmp_path / "findings.json")
    assert [f.kind for f in Findings.load(tmp_path / "findings.json").findings] == ["b", "a"]


def test_a_watcher_tells_a_slow_rank_once_and_halts_where_the_rule_says_so(tmp_path: Path) -> None:
    from paceline.records.table_file import TableFile

    run, said = RunDir(tmp_path), list[str]()
    evidence = make_evidence({1: {Phase.FORWARD: 0.02}}, num_steps=40)
    files = {}
    for rank in (0, 1):
        run.make_rank(rank)
        files[rank] = TableFile(run.steps(rank), STEPS)
    watcher = Watcher(
        run, plan("launch.nproc=2", "launch.device=cpu"), RulesConfig(straggler="halt"), said.append
    )
    for first in range(0, 40, 10):
        for rank, table in evidence.steps.items():
            part = table[first : first + 10]
            for place in range(10):
                files[rank].add({name: part.values[name][place].item() for name in part.values})
            files[rank].flush()
        watcher.tick()
    assert len(said) == 1 and "rank 1 is slow" in said[0]
    (event,) = iter_events(run.events)
    assert (event.kind, event.rank) == ("straggler", 1) and event.step is not None
    assert event.step <= 25, "its first fifteen steps after the warm-up are enough"
    assert run.anomaly.read_text() == "straggler\n" and run.halt.is_file()


def test_a_rule_about_a_note_does_what_it_is_told(tmp_path: Path) -> None:
    """A plateau is no fault, and yet who asks for a halt of it gets one."""
    run, rules = RunDir(tmp_path), RulesConfig(loss_plateau="halt", loss_plateau_steps=100)
    watcher = Watcher(run, plan("launch.nproc=2"), rules, lambda words: None)
    flat = with_training(loss=2 + 0.1 * np.sin(np.arange(400)))
    watcher._note(judge(replace(flat, rules=rules)), of_ranks=False)
    assert [e.kind for e in iter_events(run.events)] == ["loss_plateau"]
    assert run.anomaly.read_text() == "loss_plateau\n"


def test_a_watcher_takes_no_core_from_a_rank(tmp_path: Path) -> None:
    watcher = Watcher(RunDir(tmp_path), plan("launch.device=cpu"), RulesConfig(), print)
    of_others = os.getpriority(os.PRIO_PROCESS, 0)
    seen = list[int]()
    watcher.tick = lambda: seen.append(  # type: ignore[method-assign]
        os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    )
    watcher.start()
    watcher.stop()
    assert set(seen) == {19} and os.getpriority(os.PRIO_PROCESS, 0) == of_others


def test_an_empty_directory_is_judged_as_nothing(tmp_path: Path) -> None:
    assert judge(read_evidence(RunDir(tmp_path))) == []


def test_what_an_earlier_attempt_has_left_halts_no_later_one(tmp_path: Path) -> None:
    from paceline.records.table_file import TableFile
    from paceline.records.tables import TRAINING

    run, said = RunDir(tmp_path), list[str]()
    run.make_rank(0)
    before = TableFile(run.training, TRAINING)
    for step in range(1, 6):
        before.add({"step": step, "loss": 1.0, "grad_norm": 0.0, "step_s": 0.1})
    before.flush()
    rules = RulesConfig(zero_grad="halt")
    watcher = Watcher(run, plan("launch.device=cpu"), rules, said.append)
    watcher._rules_at = 0.0
    watcher.tick()
    assert said == [] and not run.halt.exists()
    before.add({"step": 6, "loss": 1.0, "grad_norm": 0.0, "step_s": 0.1})
    before.flush()
    watcher._rules_at = 0.0
    watcher.tick()
    assert len(said) == 1 and run.halt.is_file()


def test_gates_that_collapse_halt_a_run_that_lives(tmp_path: Path) -> None:
    """Metrics are columns of training.csv that not every run has."""
    from paceline.records.table_file import TableFile
    from paceline.records.tables import TRAINING

    run, said = RunDir(tmp_path), list[str]()
    run.make_rank(0)
    rules = RulesConfig(gate_collapse="halt", gate_collapse_steps=5)
    watcher = Watcher(run, plan("launch.device=cpu"), rules, said.append)
    table = TableFile(run.training, TRAINING)
    table.widen(["train/accuracy", "train/gate_collapse", "train/gate_entropy"])
    for step in range(1, 6):
        gates = {"train/gate_collapse": 0.9, "train/gate_entropy": 0.3}
        table.add({"step": step, "loss": 6 - step, "grad_norm": 1.0, "step_s": 0.1} | gates)
    table.flush()
    watcher._rules_at = 0.0
    watcher.tick()
    assert len(said) == 1 and "in 90% of tokens and heads one branch has all" in said[0]
    assert run.anomaly.read_text() == "gate_collapse\n"


def test_a_drill_counts_what_was_noticed_on_the_way(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = EventLog(run.events)
    log.append(Event(kind="straggler", rank=1, words="it was slow", evidence={"part": "forward"}))
    log.append(Event(kind="straggler", rank=0, words="so was this one"))
    log.close()
    stands = [RunFinding(kind="straggler", rank=0, words="and it is")]
    (told,) = noticed(run, stands)
    assert names_fault(Drill(fault=Fault.SLOW_FORWARD, rank=1), told)
    assert not names_fault(Drill(fault=Fault.SLOW_DATA, rank=1), told), "another part"
    assert not names_fault(Drill(fault=Fault.SLOW_FORWARD, rank=0), told), "another rank"


def test_drills_that_cannot_be_are_refused_before_the_first_run(tmp_path: Path) -> None:
    """A long list must not end half way, and each run has a folder of its own."""
    alone = load_drilled("lm_tiny", ["launch.nproc=1", "launch.device=cpu"])
    asked = [Drill(fault=fault, rank=0) for fault in (Fault.KILL, Fault.DESYNC, Fault.SLOW_DATA)]
    with pytest.raises(ConfigError) as refused:
        require_all(alone, asked)
    assert [text.split()[0] for text in refused.value.problems] == ["desync", "slow_data"]
    require_all(alone, asked[:1])
    assert place_of(tmp_path, asked[0], 2) == tmp_path / "kill"
    assert place_of(tmp_path, asked[0], 1) == tmp_path
    assert place_of(None, asked[0], 2) is None
