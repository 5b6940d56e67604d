"""Attempts of real processes with tasks that do nothing but fail: what starts again, what does not,
what is kept. No training here: a rank that sleeps stands for one that is busy."""

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import DataError, LoaderError, Outcome
from paceline.launch.archive import archive_left_over, begin_attempt, list_attempts
from paceline.launch.base import RankContext, Task
from paceline.launch.ending import Ending
from paceline.launch.local import LocalLauncher
from paceline.launch.signals import Received, kill_time
from paceline.records import Attempt, RankVerdict
from paceline.records.rundir import RunDir
from paceline.train.control import Ask
from paceline.train.heartbeat import StepMark
from tests.machines import draw

RECOVERY_S = 5.0
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def own_fork_server() -> Iterator[None]:
    """Another file's may be running in this process, and it does not ignore signals."""
    server: Any = forkserver._forkserver
    server._stop()
    yield
    server._stop()


def leave(context: RankContext, outcome: Outcome, step: int) -> None:
    RankVerdict(
        rank=context.place.rank, host="here", outcome=outcome, step=step, ended_at=time.time()
    ).save(context.run.verdict(context.place.rank))


def beat(context: RankContext, step: int) -> None:
    rank = context.place.rank
    line = {"time": time.time(), "rank": rank, "step": step, "phase": "forward", "marks": step}
    with context.run.heartbeat(rank).open("a") as file:
        file.write(json.dumps(line) + "\n")
    StepMark(context.run.step_mark(rank)).set(step)


def segfault() -> None:
    ctypes.string_at(0)


def complain() -> None:
    raise ValueError("my own bug")


def lose_loader() -> None:
    raise LoaderError("a loader process died")


def refuse() -> None:
    raise DataError("the data is damaged")


TROUBLES: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "exception": complain,
    "exit": lambda: os._exit(0),
    "loader": lose_loader,
    "refusal": refuse,
    "freeze": lambda: time.sleep(1000),
}


def fail_at_first(context: RankContext) -> None:
    """Rank 1 fails in the first FAILS attempts, while the others are busy outside any collective;
    then all is well. With DRIFT the failure comes a step later in each attempt."""
    attempt = Attempt.load(context.run.attempt)
    if attempt.number > int(os.environ["FAILS"]):
        beat(context, 1)
        (context.run.root / f"well{context.place.rank}").write_text(str(time.time()))
        return leave(context, Outcome.OK, 1)
    step = 3 + attempt.number * int(os.environ.get("DRIFT", "0"))
    beat(context, step)
    if context.place.rank != 1:
        time.sleep(1000)
    time.sleep(0.3)  # the others are asleep
    (context.run.root / "failed").write_text(str(time.time()))
    TROUBLES[os.environ["TROUBLE"]]()


def stop_when_asked(context: RankContext) -> None:
    """The answer of a loop: all that were asked leave."""
    (context.run.root / f"ready{context.place.rank}").touch()
    while context.requests.asked is Ask.NOTHING:
        time.sleep(0.01)
    asked = context.requests.asked
    leave(context, Outcome.PREEMPTED if asked is Ask.PREEMPT else Outcome.INTERRUPTED, 7)


def never_stop(context: RankContext) -> None:
    (context.run.root / f"ready{context.place.rank}").touch()
    time.sleep(1000)


def polls_nothing(context: RankContext) -> None:
    never_stop(context)


class Bench:
    """A run directory of two ranks, and the plan that starts them."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir.create("r", folder / "run")
        self.run.config.write_text("name: r\n")
        begin_attempt(self.run, resume=False)

    def go(self, work: Callable[[RankContext], None], *overrides: str, **env: str) -> Ending:
        asked = [f"launch.env.{name}={value}" for name, value in env.items()]
        launch = draw("launch.nproc=2", "launch.device=cpu", *overrides, *asked)
        launch.save(self.run.launch)
        polls = work in (stop_when_asked, never_stop)
        task = Task("train", work, "paceline.run", polls_requests=polls)
        return LocalLauncher().run(launch, self.run, task)

    def read(self, name: str) -> float:
        return float((self.run.root / name).read_text())

    def past(self, number: int, name: str) -> Path:
        return self.run.past_attempt(number) / name


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = set(psutil.Process().children(recursive=True))
    yield Bench(tmp_path)
    left = [p for p in set(psutil.Process().children(recursive=True)) - before if is_rank(p)]
    assert left == [], "orphans"


def is_rank(process: psutil.Process) -> bool:
    """Of a fork server's children: the server itself stays, with its tracker of semaphores."""
    try:
        parent = process.parent()
        return parent is not None and parent.pid != os.getpid()
    except psutil.Error:
        return False


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Beside the supervisor, which needs the main thread for its signals."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(10)


def when_ready(bench: Bench, *numbers: int, pause_s: float = 0.7) -> Callable[[], None]:
    """Send these signals to the supervisor, once both ranks can hear."""

    def send() -> None:
        while not all((bench.run.root / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)

    return send


@pytest.mark.serial  # five seconds from failure to the next step
@pytest.mark.parametrize("trouble", ["kill", "segfault", "exception", "exit", "loader"])
def test_all_start_again_though_the_peer_is_busy(trouble: str, bench: Bench) -> None:
    end = bench.go(fail_at_first, "launch.max_restarts=1", FAILS="1", TROUBLE=trouble)
    assert end.outcome is Outcome.OK and end.seen.exit_codes == {0: 0, 1: 0}
    for rank in (0, 1):
        assert bench.read(f"well{rank}") - bench.read("failed") < RECOVERY_S
    first, second = list_attempts(bench.run)
    assert (first.number, first.resume, second.number, second.resume) == (1, False, 2, True)
    assert first.cause.startswith("rank 1 at step ") and first.outcome is not None
    assert second.outcome is Outcome.OK and second.ended_at is not None
    assert "rank 0 is killed: rank 1 has failed" in bench.run.launcher_log.read_text()


@pytest.mark.slow
def test_a_frozen_rank_is_a_failure_like_others(bench: Bench) -> None:
    limits = ["launch.progress_s=1", "launch.max_restarts=1"]
    end = bench.go(fail_at_first, *limits, FAILS="1", TROUBLE="freeze")
    assert end.outcome is Outcome.OK
    assert list_attempts(bench.run)[0].outcome is Outcome.STALL
    assert "in fail_at_first" in bench.past(1, "ranks/rank1/stacks.txt").read_text()


@pytest.mark.slow
def test_what_an_attempt_leaves_is_kept(bench: Bench) -> None:
    for name in ("result.json", "audit.json", "summary.md", "plan.json", "env.json", "data.json"):
        (bench.run.root / name).write_text("{}")
    bench.run.training.write_text("step\n")
    bench.go(fail_at_first, "launch.max_restarts=1", FAILS="1", TROUBLE="exception")
    moved = ["result.json", "audit.json", "summary.md"]
    moved += ["ranks/rank1/verdict.json", "ranks/rank1/end.json", "ranks/rank0/end.json"]
    moved += ["ranks/rank0/stacks.txt", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"]
    copied = ["plan.json", "launch.json", "run.yaml", "env.json", "data.json"]
    for name in (*moved, *copied, "attempt.json"):
        assert bench.past(1, name).is_file(), name
    assert all((bench.run.root / name).is_file() for name in copied)
    assert not any((bench.run.root / name).exists() for name in moved[:3])
    assert "my own bug" in bench.past(1, "ranks/rank1/verdict.json").read_text()
    assert "my own bug" in bench.run.rank_log(1).read_text(), "logs stay and grow"
    assert not bench.past(1, "training.csv").exists()


@pytest.mark.parametrize("trouble", ["exception", "segfault"])
def test_f16_two_failures_alike_end_the_run(trouble: str, bench: Bench) -> None:
    end = bench.go(fail_at_first, "launch.max_restarts=9", FAILS="99", TROUBLE=trouble)
    assert end.outcome is Outcome.CRASHED
    first, second = list_attempts(bench.run)
    assert first.cause == second.cause
    assert "the last two attempts failed alike, rank 1 at step" in second.stopped
    assert "attempts/1" in second.stopped and bench.past(1, "ranks/rank1/end.json").is_file()
    assert bench.run.rank_end(1).is_file()


def test_restarts_are_counted(bench: Bench) -> None:
    more = ["launch.max_restarts=2"]
    end = bench.go(fail_at_first, *more, FAILS="99", DRIFT="5", TROUBLE="kill")
    assert end.outcome is Outcome.CRASHED
    attempts = list_attempts(bench.run)
    assert len(attempts) == 3 and "launch.max_restarts is 2" in attempts[-1].stopped


@pytest.mark.parametrize(
    ("trouble", "outcome"), [("kill", Outcome.CRASHED), ("refusal", Outcome.REFUSED_DATA)]
)
def test_no_other_attempt(trouble: str, outcome: Outcome, bench: Bench) -> None:
    """None is allowed; or it would end as the first one did."""
    allowed = "launch.max_restarts=3" if trouble == "refusal" else "launch.max_restarts=0"
    end = bench.go(fail_at_first, allowed, FAILS="1", TROUBLE=trouble)
    assert end.outcome is outcome
    (only,) = list_attempts(bench.run)
    assert only.stopped == "" and not bench.run.attempts.exists()


def test_the_total_deadline_is_for_all_attempts(bench: Bench) -> None:
    limits = ["launch.total_s=3", "launch.progress_s=1", "launch.max_restarts=9"]
    started_at = time.monotonic()
    end = bench.go(fail_at_first, *limits, FAILS="99", DRIFT="5", TROUBLE="freeze")
    assert end.outcome is Outcome.STALL and end.seen.ends[0].stall == "total"
    assert time.monotonic() - started_at < 15


@pytest.mark.slow
def test_f17_a_rank_that_never_comes_back_is_bounded(bench: Bench) -> None:
    limits = ["launch.start_s=6", "launch.max_restarts=1"]  # time to fail in the first
    end = bench.go(hang_in_the_second, *limits)
    assert end.outcome is Outcome.STALL
    assert [a.outcome for a in list_attempts(bench.run)] == [Outcome.CRASHED, Outcome.STALL]


def hang_in_the_second(context: RankContext) -> None:
    if Attempt.load(context.run.attempt).number == 1:
        complain()
    time.sleep(1000)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGTERM, Outcome.PREEMPTED),
        (signal.SIGUSR2, Outcome.PREEMPTED),
        (signal.SIGHUP, Outcome.PREEMPTED),
        (signal.SIGINT, Outcome.INTERRUPTED),
    ],
)
def test_ranks_are_asked_and_answer(number: int, outcome: Outcome, bench: Bench) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{signal.Signals(number).name} is ignored here, as under nohup, and stays so")
    with meanwhile(when_ready(bench, number)):
        end = bench.go(stop_when_asked, "launch.max_restarts=3")
    assert end.outcome is outcome and end.seen.exit_codes == {0: 0, 1: 0}
    assert len(list_attempts(bench.run)) == 1, "a stop is no failure"


def test_a_signal_to_the_ranks_alone_is_preemption_too(bench: Bench) -> None:
    def send() -> None:
        when_ready(bench)()
        lines = bench.run.launcher_log.read_text().splitlines()
        for pid in [int(line.split()[-1]) for line in lines if " is process " in line]:
            os.kill(pid, signal.SIGUSR2)

    with meanwhile(send):
        end = bench.go(stop_when_asked)
    assert end.seen.signal is None and end.outcome is Outcome.PREEMPTED


def test_a_signal_before_ranks_can_hear_is_not_lost(bench: Bench) -> None:
    def send() -> None:
        while not (log := bench.run.launcher_log).exists() or "rank 1 is" not in log.read_text():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(send):
        end = bench.go(stop_when_asked)
    assert end.outcome is Outcome.PREEMPTED and end.seen.exit_codes == {0: 0, 1: 0}


def test_who_does_not_answer_is_killed_after_the_grace(bench: Bench) -> None:
    with meanwhile(when_ready(bench, signal.SIGTERM)):
        end = bench.go(never_stop, "launch.grace_s=1", "launch.max_restarts=3")
    assert end.outcome is Outcome.PREEMPTED and end.seen.exit_codes == {0: -9, 1: -9}
    assert len(list_attempts(bench.run)) == 1


def test_the_second_interrupt_kills_at_once(bench: Bench) -> None:
    started_at = time.monotonic()
    with meanwhile(when_ready(bench, signal.SIGINT, signal.SIGINT)):
        end = bench.go(never_stop, "launch.grace_s=60")
    assert end.outcome is Outcome.INTERRUPTED and time.monotonic() - started_at < 15


def test_a_task_that_polls_nothing_is_ended_by_the_signal(bench: Bench) -> None:
    started_at = time.monotonic()
    with meanwhile(when_ready(bench, signal.SIGTERM)):
        end = bench.go(polls_nothing, "launch.grace_s=60")
    assert end.seen.signal == signal.SIGTERM and time.monotonic() - started_at < 15


def test_patience() -> None:
    """Grace of 60 s; the first signal came at 100."""
    term, interrupt = signal.SIGTERM, signal.SIGINT
    assert kill_time([Received(term, 100)], 60) == 160
    assert kill_time([Received(interrupt, 100), Received(interrupt, 100.1)], 60) == 160, "an echo"
    assert kill_time([Received(interrupt, 100), Received(interrupt, 102)], 60) == 102
    assert kill_time([Received(term, 100), Received(term, 102)], 60) == 112
    assert kill_time([Received(term, 100), Received(interrupt, 102)], 60) == 112
    assert kill_time([Received(term, 100), Received(term, 155)], 60) == 160, "never longer"


def test_an_attempt_that_nobody_saw_the_end_of(bench: Bench) -> None:
    draw("launch.nproc=2", "launch.device=cpu").save(bench.run.launch)
    line = {"time": 1.0, "rank": 0, "step": 4, "phase": "forward", "marks": 9}
    for rank in (0, 1):
        bench.run.heartbeat(rank).write_text(json.dumps(line) + "\n")
        bench.run.rank(rank).mkdir(parents=True, exist_ok=True)
        StepMark(bench.run.step_mark(rank)).set(4)
    archive_left_over(bench.run)
    begun = begin_attempt(bench.run, resume=True, halt_seen=5)
    first, _ = list_attempts(bench.run)
    assert (begun.number, begun.halt_seen) == (2, 5)
    assert first.ended_at is not None and "cut off" in first.cause
    assert (first.first_step, first.last_step) == (1, 3), "step 4 had begun"
