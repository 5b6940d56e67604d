"""The live view of runs: files that grow, runs that die, many of them, what a page lets in."""

import asyncio
import json
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from paceline.errors import ConfigError
from paceline.records import Attempt
from paceline.records.events import Event, EventLog
from paceline.records.findings import Findings, RunFinding
from paceline.records.growing import GrowingTable, num_rows
from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import TRAINING
from paceline.watch import page
from paceline.watch.fleet import Fleet
from paceline.watch.fragments import draw_list, draw_run
from paceline.watch.page import Address, Channel, Drawn, build_app, stream
from paceline.watch.reader import RunReader
from paceline.watch.series import MAX_BINS, Series
from paceline.watch.view import Balance
from paceline.watch.watchdog import Watchdog
from tests.reported import HEADER, STEPS_HEADER, finish, write_run

OLD = Path(__file__).parents[1] / "data" / "runs"
ROW = "{step},{loss},0.1,1.5,0.5,32,4096,0,0,{val}\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "runs" / "one")


def beat(run: RunDir, rank: int, at: float, step: int = 20, marks: int = 7) -> None:
    with run.heartbeat(rank).open("a") as file:
        file.write(Beat(at, rank, step, "backward", marks).to_line())


def test_a_series_is_bounded_and_keeps_a_spike() -> None:
    one, many = Series(), Series()
    values = np.zeros(100_000)
    values[77_777] = 9.0
    steps = np.arange(1, 100_001)
    many.extend(steps, values)
    for step, value in zip(steps[:3000], values[:3000], strict=True):
        one.add(step, value)
    assert len(many.x) <= MAX_BINS and len(one.x) <= MAX_BINS
    assert sum(many.count) == 100_000 and many.x[-1] == 100_000
    assert max(high for _, _, high in many.band) == 9.0
    assert sum(one.count) == 3000 and one.last == 0.0


def test_many_values_at_once_are_the_same_as_one_by_one() -> None:
    values = np.random.default_rng(0).normal(size=2500)
    steps = np.arange(2500)
    one, parts = Series(), Series()
    for step, value in zip(steps, values, strict=True):
        one.add(step, float(value))
    for start in range(0, 2500, 37):
        parts.extend(steps[start : start + 37], values[start : start + 37])
    assert parts.count == one.count and parts.x == one.x
    np.testing.assert_allclose(parts.mean, one.mean)
    assert parts.low == one.low and parts.high == one.high


def test_a_table_that_grows_is_cut_off_and_gains_a_column(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    table = GrowingTable(path, TRAINING)
    assert table.read() == ({}, False)
    path.write_text(HEADER + ROW.format(step=1, loss=5, val="") + "2,4")
    chunk, is_reset = table.read()
    assert (num_rows(chunk), is_reset) == (1, False), "half a row is none"
    path.write_text(HEADER + "".join(ROW.format(step=s, loss=5, val="") for s in (1, 2, 3)))
    assert num_rows(table.read()[0]) == 2
    path.write_text(HEADER + ROW.format(step=1, loss=5, val=""))
    chunk, is_reset = table.read()
    assert is_reset and chunk["step"][0].tolist() == [1], "a new attempt has cut it off"
    path.write_text(
        HEADER.strip() + ",val/acc\n" + ROW.format(step=1, loss=5, val=2).strip() + ",1\n"
    )
    chunk, is_reset = table.read()
    assert is_reset and chunk["val/acc"][0].tolist() == [1.0]


def test_an_evaluation_that_is_put_into_a_row_that_was_read_is_seen(run: RunDir) -> None:
    file = TableFile(run.training, TRAINING)
    reader = RunReader(run)
    assert reader.read().step == 20
    cells = {
        "step": 21,
        "loss": 0.2,
        "lr": 0.1,
        "grad_norm": 1.0,
        "step_s": 0.5,
        "samples_per_s": 1,
    }
    file.add({**cells, "skipped": False, "warmup": False})
    file.flush()
    view = reader.read()
    assert view.step == 21 and view.last["val_loss"] == 2.0
    file.amend_last("val_loss", 1.25)
    view = reader.read()
    assert view.last["val_loss"] == 1.25
    assert view.series["loss"].count == [1] * 21, "the row itself counts once"
    file.close()


def test_a_run_lives_is_silent_and_dies(run: RunDir) -> None:
    clock = Clock()
    reader = RunReader(run, clock)
    (run.root / ".lock").write_text("1 elsewhere\n")  # of a machine whose processes are not seen
    for rank in (0, 1):
        beat(run, rank, time.time())
    assert reader.read().state.kind == "running"
    clock.now += 20
    beat(run, 0, time.time() + 1)
    view = reader.read()
    assert view.state.kind == "silent" and "rank 1 has been silent for 20 s" in view.state.said
    clock.now += 100
    assert reader.read().state.kind == "died"
    finish(run)
    view = reader.read()
    assert view.state.kind == "ok" and view.state.is_over


def test_a_run_whose_supervisor_was_killed_is_dead_within_seconds(run: RunDir) -> None:
    clock = Clock()
    reader = RunReader(run, clock)
    (run.root / ".lock").write_text(f"{2**22 + 5} {socket.gethostname()}\n")  # no such process
    for rank in (0, 1):
        beat(run, rank, time.time())
    assert reader.read().state.kind == "running", "in a container its number may be another"
    clock.now += 4
    assert reader.read().state.kind == "died", "four heartbeats were missed"


def test_a_lock_that_names_nobody_is_given_more_time(run: RunDir) -> None:
    """On a full disk a live run can neither write its name there nor its heartbeats."""
    clock = Clock()
    reader = RunReader(run, clock)
    (run.root / ".lock").write_text("")
    beat(run, 0, time.time())
    reader.read()
    clock.now += 4
    assert reader.read().state.kind == "running"
    clock.now += 12
    assert reader.read().state.kind == "died"


@pytest.mark.parametrize("process", ["9" * 30, str(2**31), "²", "٣", "-1", "x"])
def test_a_lock_that_names_no_process_ends_no_view(run: RunDir, process: str) -> None:
    """It is not known to have left either: only its silence counts."""
    (run.root / ".lock").write_text(f"{process} {socket.gethostname()}\n")
    clock = Clock()
    reader = RunReader(run, clock)
    beat(run, 0, time.time())
    reader.read()
    clock.now += 20
    assert reader.read().state.kind == "silent"


def test_a_rank_whose_heart_beats_but_which_does_not_move(run: RunDir) -> None:
    clock = Clock()
    reader = RunReader(run, clock)
    (run.root / ".lock").write_text("1 elsewhere\n")
    at = time.time()
    for second in range(0, 80, 10):
        clock.now += 10
        beat(run, 0, at + second, marks=7 + second)
        beat(run, 1, at + second)
        view = reader.read()
    assert view.state.kind == "silent"
    assert view.state.said == "rank 1 has been in backward of step 20 for 70 s"


def test_files_that_are_not_plain_or_are_damaged_end_no_view(run: RunDir) -> None:
    for path in (run.telemetry, run.train_log, run.events):
        os.mkfifo(path)
    run.steps(1).write_bytes(b"step,wall_s\n1,\xff\n2,x\n")
    run.heartbeat(0).write_text("{nonsense\n")
    run.result.write_text("[]")
    view = RunReader(run).read()
    assert view.step == 20 and draw_run(view)["loss"].count("<svg") > 1


def test_damaged_findings_take_nothing_from_a_result(run: RunDir) -> None:
    """The run was said to have died."""
    shutil.copy(OLD / "0.6.0" / "ddp1" / "result.json", run.result)
    run.findings.write_bytes(b"\xff\xfe{}")
    assert RunReader(run).read().state.kind == "ok"


@pytest.mark.parametrize("path", sorted(OLD.glob("*/*/run.yaml")), ids=lambda p: str(p.parent))
def test_runs_of_every_version_are_shown(path: Path) -> None:
    view = RunReader(RunDir(path.parent)).read()
    assert view.state.is_over and view.step > 0 and draw_run(view)["phases"]


def test_phases_and_memory_of_each_rank(run: RunDir) -> None:
    view = RunReader(run).read()
    assert [r.wall_s for r in view.ranks] == [0.5, 0.5]
    assert view.ranks[1].phases_s["backward"] == 0.3 and view.ranks[0].host == "box"


def test_waiting_is_told_from_own_work(run: RunDir) -> None:
    for rank, blocked in ((0, 0.25), (1, 0.05)):
        row = f"21,0,0.5,0.01,0.1,0.3,0.05,0,0.01,0.03,{blocked}\n"
        run.steps(rank).write_text(f"{STEPS_HEADER.strip()},backward_blocked_s\n{row}")
    first, second = RunReader(run).read().ranks
    assert first.phases_s["backward"] == pytest.approx(0.05) and first.wall_s == second.wall_s
    assert first.phases_s["waiting"] == 0.25 and second.own_s == pytest.approx(first.own_s + 0.2)
    assert second.worry > first.worry, "the slow one is looked at first"


def test_how_evenly_gpus_work() -> None:
    balance = Balance()
    balance.note({0: 95.0, 1: 5.0})
    balance.note({0: 95.0, 1: 91.0})
    balance.note({0: 2291.0})  # as NVML answers now and then
    assert (balance.num_rounds, balance.num_extreme, balance.num_rejected) == (2, 1, 1)
    assert "least 91% (rank 1)" in str(balance) and "in 50% of samples" in str(balance)


def test_many_runs_and_those_of_a_sweep_are_one_list(tmp_path: Path, run: RunDir) -> None:
    other = write_run(tmp_path / "runs" / "sweep" / "runs" / "cell_r1")
    (tmp_path / "runs" / "latest").symlink_to("one")
    finish(other)
    fleet = Fleet(tmp_path / "runs")
    views = fleet.read()
    assert fleet.sweeps() == [], "the folder has no sweep.json"
    assert [fleet.names()[view.path] for view in views] == ["one", "sweep/runs/cell_r1"]
    assert views[1].state.kind == "ok" and views[1].last["loss"] == 0.25
    assert fleet.follow("../one") is None and fleet.follow("one") is not None


def test_a_run_that_was_silent_for_a_while_is_live_again(tmp_path: Path, run: RunDir) -> None:
    """It was dead for ever in the list, while its own page showed it running."""
    (run.root / ".lock").write_text("1 elsewhere\n")
    clock = Clock()
    fleet = Fleet(tmp_path / "runs", clock)
    for after, kind in ((0, "running"), (100, "died"), (106, "running")):
        clock.now = 1000.0 + after
        if kind == "running":
            for rank in (0, 1):
                beat(run, rank, time.time() + after, marks=7 + after)
        assert [view.state.kind for view in fleet.read()] == [kind]
    finish(run)
    assert [view.state.kind for view in fleet.read()] == ["ok"]


def test_those_who_look_at_one_run_at_once_take_turns(
    monkeypatch: pytest.MonkeyPatch, run: RunDir
) -> None:
    """The list and the page of a run are drawn by two threads: rows were lost, or drawn half."""
    reader, inside, most = RunReader(run), [0], [0]
    read_lines = reader._read_lines

    def slow() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        read_lines()
        inside[0] -= 1

    monkeypatch.setattr(reader, "_read_lines", slow)
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(lambda _: reader.read(), range(4)))
    assert most == [1] and [view.step for view in views] == [20] * 4


def test_a_view_is_not_changed_by_who_looks_next(run: RunDir) -> None:
    run.train_log.write_text("one\n")
    beat(run, 0, time.time())
    reader = RunReader(run)
    first = reader.read()
    drawn = draw_run(first)
    with run.training.open("a") as file:
        file.writelines(ROW.format(step=step, loss=9, val=3) for step in range(21, 900))
    with run.train_log.open("a") as file:
        file.write("two\n")
    beat(run, 0, time.time() + 1, step=899)
    EventLog(run.events).append(Event(kind="told", words="since"))
    later = reader.read()
    assert draw_run(first) == drawn and list(first.lines) == ["one"] and first.step == 20
    assert later.step == 899 and later.num_events == 1 and sum(later.series["loss"].count) == 899


def test_runs_may_be_looked_for_while_others_are_read(tmp_path: Path, run: RunDir) -> None:
    clock = Clock()
    fleet = Fleet(tmp_path / "runs", clock)
    fleet.scan()
    seen = iter(fleet.readers)
    write_run(tmp_path / "runs" / "two")
    clock.now += 10
    fleet.scan()
    assert list(seen) == ["one"] and list(fleet.readers) == ["one", "two"]
    shutil.rmtree(tmp_path / "runs" / "one")
    clock.now += 10
    assert [view.path.name for view in fleet.read()] == ["two"]


def lived(run: RunDir, started_at: float) -> None:
    Attempt(number=1, resume=False, started_at=started_at).save(run.attempt)
    (run.root / ".lock").write_text("1 elsewhere\n")


def test_the_watchdog_halts_a_run_whose_rank_is_silent(run: RunDir) -> None:
    said: list[str] = []
    lived(run, time.time() - 500)
    beat(run, 0, time.time())
    beat(run, 1, time.time() - 300)
    dog = Watchdog(run, said.append)
    dog.tick()
    assert dog.anomaly == "heartbeat_stall"
    assert run.anomaly.read_text() == "heartbeat_stall\n"
    assert run.halt.read_text() == "halt: heartbeat_stall\n"
    assert run.dump_request.exists(), "the stacks say why"
    assert json.loads(run.events.read_text().splitlines()[0])["rank"] == 1


def test_the_watchdog_leaves_alone_what_is_well_and_what_is_old(run: RunDir) -> None:
    lived(run, time.time() - 10)  # resumed: the heartbeat of rank 1 is of the attempt before
    beat(run, 0, time.time())
    beat(run, 1, time.time() - 300)
    dog = Watchdog(run, lambda text: None)
    dog.tick()
    assert dog.anomaly == "" and not run.halt.exists()


def test_zero_gradients_halt_too(run: RunDir) -> None:
    lived(run, time.time() - 10)
    for rank in (0, 1):
        beat(run, rank, time.time())
    text = run.training.read_text()
    run.training.write_text(text.replace(",1.5,", ",0,"))
    dog = Watchdog(run, lambda text: None)
    dog.tick()
    assert run.anomaly.read_text() == "zero_grad\n"


def test_collapsed_gates_halt_too(run: RunDir) -> None:
    lived(run, time.time() - 10)
    for rank in (0, 1):
        beat(run, rank, time.time())
    head, *rows = run.training.read_text().splitlines()
    more = [f"{head},train/gate_entropy,train/gate_collapse", *(f"{row},0.1,0.9" for row in rows)]
    run.training.write_text("\n".join(more) + "\n")
    (run.root / "run.yaml").write_text("observe: {rules: {gate_collapse_steps: 2}}\n")
    Watchdog(run, lambda text: None).tick()
    assert run.anomaly.read_text() == "gate_collapse\n"


def follow(dog: Watchdog, run: RunDir, clock: Clock) -> None:
    """Let a watchdog tell silence by a clock that is set."""
    dog._reader = RunReader(run, clock)


def test_a_run_that_is_all_silent_has_stalled(run: RunDir) -> None:
    """It counted as dead after 90 s, before the rule could speak at 180 s."""
    lived(run, time.time() - 500)
    for rank in (0, 1):
        beat(run, rank, time.time())
    clock, dog = Clock(), Watchdog(run, lambda text: None)
    follow(dog, run, clock)
    for _ in range(6):
        assert dog.tick().state.kind in ("running", "silent", "died")
        assert not dog.is_over and dog.anomaly == "", "180 s are not over"
        clock.now += 30
    clock.now += 1
    assert dog.tick().state.kind == "died" and dog.is_over
    assert dog.anomaly == "heartbeat_stall" and run.halt.is_file()
    assert run.anomaly.read_text() == "heartbeat_stall\n"


@pytest.mark.parametrize("why", ["gone", "off"])
def test_a_run_that_died_for_sure_has_not_stalled(run: RunDir, why: str) -> None:
    lived(run, time.time() - 500)
    if why == "gone":
        (run.root / ".lock").write_text("")
    else:
        run.config.write_text("observe: {rules: {heartbeat_stall: 'off'}}\n")
    for rank in (0, 1):
        beat(run, rank, time.time())
    clock, dog = Clock(), Watchdog(run, lambda text: None)
    follow(dog, run, clock)
    dog.tick()
    clock.now += 500
    assert dog.tick().state.kind == "died" and dog.is_over
    assert dog.anomaly == "" and not run.halt.exists()


def resumed(run: RunDir, first_step: int) -> None:
    """Make the run one of a second attempt, which began with a step behind a checkpoint."""
    attempt = Attempt(number=2, resume=True, started_at=time.time() - 5, first_step=first_step)
    attempt.save(run.attempt)
    (run.root / ".lock").write_text("1 elsewhere\n")


@pytest.mark.parametrize("step", [0, 21])
def test_an_earlier_attempt_halts_no_later_one(run: RunDir, step: int) -> None:
    """Neither while ranks start again, nor once they train."""
    run.training.write_text(run.training.read_text().replace(",1.5,", ",0,"))
    for rank in (0, 1):
        rows = "".join(f"{n},0,0.5,0,0,0,0,0,0,0,{rank * n}\n" for n in range(1, 21))
        run.steps(rank).write_text(f"{STEPS_HEADER.strip()},collectives\n{rows}")
        beat(run, rank, time.time(), step)
        call = {"process_group": ["0"], "collective_seq_id": 1, "profiling_name": f"op{rank}"}
        run.collectives(rank).write_text(json.dumps({"entries": [call]}))
        os.utime(run.collectives(rank), (time.time() - 60,) * 2)
    resumed(run, first_step=21 if step else 0)
    said: list[str] = []
    dog = Watchdog(run, said.append)
    dog.tick()
    assert dog.anomaly == "" and not run.halt.exists(), said
    with run.training.open("a") as file:
        file.write(ROW.format(step=21, loss=1, val="").replace(",1.5,", ",0,"))
    resumed(run, first_step=21)
    for rank in (0, 1):
        beat(run, rank, time.time() + 1, 22)
    dog.tick()
    assert dog.anomaly == "zero_grad", "its own steps are judged"
    assert any("is 0 in 1 step, first in step 21" in text for text in said)


def test_an_attempt_that_found_no_checkpoint_is_judged_from_step_1(run: RunDir) -> None:
    resumed(run, first_step=0)
    run.training.write_text(run.training.read_text().replace(",1.5,", ",0,"))
    for rank in (0, 1):
        beat(run, rank, time.time())
    dog = Watchdog(run, lambda text: None)
    dog.tick()
    assert dog.anomaly == "zero_grad"


def skips(*steps: int) -> str:
    return "".join(f"{step},nan,0.1,1.5,0.5,32,4096,1,0,\n" for step in steps)


def test_what_becomes_worse_is_told_again_and_halts(run: RunDir) -> None:
    """One bad step is a warning; after it no number of them ever halted the run."""
    lived(run, time.time() - 10)
    for rank in (0, 1):
        beat(run, rank, time.time())
    said: list[str] = []
    dog = Watchdog(run, said.append)

    def gain(rows: str) -> list[str]:
        with run.training.open("a") as file:
            file.write(rows)
        dog.tick()
        dog.tick()  # the same finding once more, which is not told twice
        told = [text for text in said if "not finite" in text]
        said.clear()
        return told

    (first,) = gain(skips(21) + ROW.format(step=22, loss=0.3, val=""))
    assert first.startswith("warning: ") and "in 1 step," in first
    (second,) = gain(skips(23) + ROW.format(step=24, loss=0.3, val=""))
    assert "in 2 steps" in second and not run.halt.exists()
    (third,) = gain(skips(*range(25, 60)))
    assert third.startswith("error: ") and run.anomaly.read_text() == "nan_loss\n"
    assert gain(skips(60, 61)) == [], "it is the same error still"


def client(run: RunDir, token: str = "", host: str = "localhost") -> TestClient:
    return TestClient(build_app(Fleet(run.root.parent), token), base_url=f"http://{host}")


def test_the_page_is_read_only_and_has_no_other_host(run: RunDir) -> None:
    local = client(run)
    assert local.get("/").status_code == 200 and local.get("/run/one").status_code == 200
    for path in ("/run/../../etc/passwd", "/run/two", "/events/two", "/run//etc"):
        assert local.get(path).status_code == 404, path
    assert local.post("/").status_code == 405 and local.delete("/run/one").status_code == 405
    assert client(run, host="evil.example").get("/").status_code == 400
    assert "script-src 'self'" in local.get("/").headers["content-security-policy"]


def test_elsewhere_a_token_is_asked_for(run: RunDir) -> None:
    far = client(run, "s3cret", host="node7")
    assert far.get("/").status_code == 401 and far.get("/?token=wrong").status_code == 401
    assert far.get("/events").status_code == 401 and far.get("/live.js").status_code == 401
    first = far.get("/?token=s3cret", follow_redirects=False)
    assert first.status_code == 307 and "token" not in first.headers["location"]
    elsewhere = far.get("http://testserver//other.example/?token=s3cret", follow_redirects=False)
    assert elsewhere.headers["location"] == "/other.example/", "a path of ours, not a host"
    assert "httponly" in first.headers["set-cookie"].lower()
    assert far.get("/").status_code == 200, "by the cookie"


def test_names_from_outside_are_escaped(run: RunDir) -> None:
    log = EventLog(run.events)
    log.append(Event(kind="<b>", words="<script>alert(1)</script>\x1b[2J"))
    log.close()
    drawn = "".join(draw_run(RunReader(run).read()).values())
    assert "<script>" not in drawn and "&lt;script&gt;" in drawn and "\x1b" not in drawn


@pytest.mark.parametrize("name", [b"lr=1e-3 #2?", b"bad\xff", "größe".encode(), b"a%2Fb"])
def test_a_run_of_any_name_is_reached_by_its_link(tmp_path: Path, name: bytes) -> None:
    """A folder may be called as its user likes; a hash ends a link, a question mark its path, and
    what is not UTF-8 ended the list."""
    write_run(tmp_path / "runs" / "bad\ufffd")  # what a careless reader takes the second one for
    named = write_run(tmp_path / "runs" / os.fsdecode(name))
    fleet = Fleet(tmp_path / "runs")
    drawn = draw_list(fleet.read(), fleet.names(), fleet.sweeps())
    links = re.findall(r'href="(run/[^"]*)"', drawn["runs"])
    (link,) = set(links) - {"run/bad%EF%BF%BD"}
    assert "#" not in link and "?" not in link and drawn["count"] == "2 runs, 2 live"
    shown = client(named).get(f"/{link}")
    assert shown.status_code == 200
    (events,) = re.findall(r'data-events="([^"]*)"', shown.text)
    assert events == link.replace("run/", "/events/", 1)
    assert json.loads(json.dumps(draw_run(RunReader(named).read())))["head"].encode()


def test_a_hint_is_a_line_of_its_own(run: RunDir) -> None:
    told = RunFinding(kind="spikes", words="it stalls", to_try="look at it")
    Findings.of([told]).save(run.findings)
    finish(run)
    assert "it stalls<br>hint: look at it" in draw_run(RunReader(run).read())["findings"]


def test_only_what_has_changed_is_sent(monkeypatch: pytest.MonkeyPatch, run: RunDir) -> None:
    monkeypatch.setattr(page, "TICK_S", 0.001)
    drawn = iter([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}])
    last = {"a": "1", "b": "3"}

    async def read() -> list[dict[str, str]]:
        gone = iter([False] * 4 + [True])

        async def is_gone() -> bool:
            await asyncio.sleep(0.005)
            return next(gone)

        told = stream(Channel(lambda: Drawn(next(drawn, last), None)), is_gone)
        return [json.loads(event.removeprefix("data: "))["html"] async for event in told]

    assert asyncio.run(read()) == [{"a": "1", "b": "1"}, {"b": "2"}, {"b": "3"}]


def test_an_address_that_is_taken_is_a_plain_error(run: RunDir) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        address = Address("localhost", taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot serve on localhost:"):
            page.serve(Fleet(run.root), address, lambda text: None)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("localhost:9000", "http://localhost:9000/"), (":80", "http://localhost:80/"),
        ("node1", "http://node1:8765/?token=t"), ("[::1]:90", "http://[::1]:90/"),
        ("[::1]", "http://[::1]:8765/"), ("[fe80::1%eth0]:90", "http://[fe80::1%eth0]:90/?token=t"),
    ],
)  # fmt: skip
def test_addresses(text: str, link: str) -> None:
    address = Address.parse(text)
    assert address.link("" if address.is_local else "t") == link


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost:²", "'²' is not a port"), ("localhost:٨٠", "is not a port"),
        ("localhost:", "'' is not a port"), ("localhost:0", "'0' is not a port"),
        ("localhost:" + "9" * 5000, "is not a port"), ("[::1]:x", "'x' is not a port"),
        ("::1", r"stands in brackets, as \[::1\]"), ("::1:80", "stands in brackets"),
        ("[::1", "is not an address"), ("[::1]90", "is not an address"),
        ("[node1]:90", "is not an address"),
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Address.parse(text)


def test_a_host_that_no_name_can_be_is_a_plain_error(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="cannot serve on"):
        page.serve(Fleet(run.root), Address("x" * 70 + ".é", 8765), lambda text: None)
