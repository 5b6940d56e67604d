"""More faults on the real program: clocks that jump, many ranks on few cores, two runs on one port,
strange text, loaders that die at their start, a run that is live on another machine."""

import os
import subprocess
import sys
import time

import pytest

from tests import warm
from tests.cli.bench import MARK, SMALL, Bench, finish, ranked, wait_until
from tests.cli.program import environment, free_port
from tests.jobs import LINE
from tests.schedulers.test_strangers import needs_namespaces

pytestmark = pytest.mark.slow

# The clock is set a moment after each process has imported the job: ranks and supervisor alike.
JUMP = """
import time
set_at, tell = time.monotonic() + 0.5, time.time
time.time = lambda: tell() + ({by_s} if time.monotonic() > set_at else 0)
"""


@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_is_set_by_hours_ends_nothing(hours: int, bench: Bench) -> None:
    job = LINE.replace("{trouble}", "time.sleep(0.15)")
    (bench.folder / "job.py").write_text(JUMP.format(by_s=hours * 3600) + job)
    words = ["launch.progress_s=20", "launch.start_s=60", "launch.total_s=100", "train.steps=8"]
    words += ["launch.nproc=2", "observe.heartbeat_s=0.1", "--out", "run"]
    ran = finish(bench.start("train", "job.py:Job", *SMALL, *words))
    assert ran.code == 0, ran.err
    result = bench.result()
    assert 1 < result["elapsed_s"] < 60
    assert 0 < result["ettr"] <= 1
    assert 0 <= result["attempts"][0]["ended_at"] - result["attempts"][0]["started_at"] < 60


@pytest.mark.parametrize("num_ranks", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_of_many_ranks_the_one_that_was_stopped_is_named(num_ranks: int, bench: Bench) -> None:
    guilty = num_ranks - 3
    # Not while it looks at the first batch: after some steps.
    stop = f"if os.environ['RANK'] == '{guilty}' and model.training and self.calls > 15:"
    stop += " open('stopped', 'w'); os.kill(os.getpid(), 19)"
    words = [f"launch.nproc={num_ranks}", "launch.progress_s=5", "launch.grace_s=2"]
    words += ["train.steps=99", "--out", "run"]
    process = bench.start("train", bench.job(stop), *SMALL, *words)
    ran = finish(process, 200)
    assert ran.code == 6, ran.err
    failure = bench.result()["failure"]
    assert failure["rank"] == guilty and "stopped by a signal" in failure["message"]
    assert failure["step"] > 1
    took_s = time.time() - (bench.folder / "stopped").stat().st_mtime
    assert took_s < 5 + 15, "the deadline, the stacks of all, the end"


def test_two_runs_on_one_fixed_port(bench: Bench) -> None:
    """The first goes on undisturbed; both ranks of the second are refused, and none waits."""
    port, job = free_port(), bench.job("time.sleep(0.3)")
    words = ["train", job, *SMALL, "train.steps=12"]
    first = [bench.start(*words, "--out", "run", **ranked(rank, 2, port)) for rank in (0, 1)]
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    second = [bench.start(*words, "--out", "other", **ranked(rank, 2, port)) for rank in (0, 1)]
    refused = [finish(process) for process in second]
    assert first[0].poll() is None, "it did not have to wait for the first run's end"
    assert [ran.code for ran in refused] == [3, 3], [ran.err for ran in refused]
    assert f"port {port}" in refused[0].err and f"process {first[0].pid}" in refused[0].err
    assert "two runs use this port" in refused[1].err
    assert [finish(process).code for process in first] == [0, 0]
    assert bench.result()["steps"] == 12 and not (bench.folder / "other").exists()


def test_escapes_in_names_and_exceptions_reach_no_screen_and_no_page(bench: Bench) -> None:
    trouble = "raise ValueError('\\x1b[2J\\x1b]0;mine\\x07 = boom')"
    ran = bench.train(trouble, "launch.nproc=1", 'name="a\\x1b[31mb"')
    assert ran.code == 5, ran.err
    assert "ValueError: \\x1b[2J\\x1b]0;mine\\x07 = boom" in ran.err
    assert "training a\\x1b[31mb for" in ran.err
    texts = {"err": ran.err, "out": ran.out}
    for path in (bench.folder / "run").rglob("*"):
        if path.is_file() and path.name != "log.txt":  # what the rank wrote, as it wrote it
            texts[path.name] = path.read_text(errors="replace")
    assert {"train.log", "summary.md", "report.html", "launcher.log"} <= texts.keys()
    assert [name for name, text in texts.items() if "\x1b" in text or "\x07" in text] == []


# In each rank, as long as no other attempt has been there: whoever it starts is killed at once.
KILLER = """
import threading, psutil
def kill_loaders():
    while not os.path.exists("killed"):
        for child in psutil.Process().children():
            child.kill()
            open("killed", "w").close()
"""
START_KILLER = """def build_data(self, config, split):
        if os.environ.get("RANK") == "0": threading.Thread(target=kill_loaders, daemon=True).start()
        return"""


@pytest.mark.serial  # beside others it once found its loaders too late, and waited for them
@pytest.mark.parametrize(("max_restarts", "code"), [(0, 4), (1, 0)])
def test_a_loader_that_is_killed_at_its_start(max_restarts: int, code: int, bench: Bench) -> None:
    job = KILLER + LINE.replace("{trouble}", "pass")
    job = job.replace("def build_data(self, config, split): return", START_KILLER)
    (bench.folder / "job.py").write_text("import os\n" + job)
    words = ["data.num_workers=2", f"launch.max_restarts={max_restarts}", "--out", "run"]
    ran = finish(bench.start("train", "job.py:Job", *SMALL, "launch.nproc=2", *words))
    assert ran.code == code, ran.err
    first = bench.result()["attempts"][0]
    assert first["outcome"] == "refused_data" and first["last_step"] == 0
    assert "rank 0" in first["cause"] and "loader process" in first["cause"]
    assert "SIGKILL" in first["cause"] or "killed by signal" in first["cause"], first


@needs_namespaces
def test_a_run_that_is_live_on_another_machine_is_not_resumed(bench: Bench) -> None:
    """A machine of another name and network that shares the folder: who holds it is named."""
    words = ["train", bench.job("time.sleep(0.1)"), *SMALL, "train.steps=9999", "--out", "run"]
    live = bench.start(*words)
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 2, 60, "training")
    elsewhere = warm.start(
        [sys.executable, "-m", "tests.elsewhere", "elsewhere", "train", "--resume", "run"],
        cwd=bench.folder, env=environment() | {MARK: bench.mark}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    bench.sessions.add(elsewhere.pid)
    ran = finish(elsewhere)
    owner = f"belongs to a live run (process {live.pid} on {os.uname().nodename})"
    assert ran.code == 2 and owner in ran.err, ran.err
    assert live.poll() is None, "it goes on"
    live.terminate()
    assert finish(live).code == 75
