"""Restarts and stops where somebody else's launcher has started the ranks: rank 0's process decides
for all, and a signal reaches them whatever the launcher does with it."""

import json
import os
import signal
import sys
import time
from typing import Any

import pytest

from tests.cli.bench import SMALL, TORCHRUN, Bench, finish, ranked, wait_until
from tests.cli.program import free_port
from tests.skips import needs_mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
nightly = pytest.mark.nightly

ONCE = (
    "if os.environ['RANK'] == '{rank}' and self.calls > 2 and not os.path.exists('once'):"
    " open('once', 'w'); {trouble}"
)
KILL = "os.kill(os.getpid(), 9)"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PYTHON = (sys.executable,)
MPIRUN = ("mpirun", "-n", "2", sys.executable)


def attempts(bench: Bench) -> list[dict[str, Any]]:
    return list(bench.result()["attempts"])


# Each starts five processes that load torch: one of each launcher in CI, the others at night.
DEATHS = [
    pytest.param(0, TORCHRUN, "launch.launcher=auto", id="0-under-torchrun"),
    pytest.param(1, PYTHON, "launch.launcher=mpi", marks=[needs_mpi, nightly], id="1-mpi"),
    pytest.param(0, PYTHON, "launch.launcher=torchrun", marks=nightly, id="0-torchrun"),
    pytest.param(1, PYTHON, "launch.launcher=torchrun", marks=nightly, id="1-torchrun"),
    pytest.param(1, TORCHRUN, "launch.launcher=auto", marks=nightly, id="1-under-torchrun"),
    pytest.param(0, PYTHON, "launch.launcher=mpi", marks=[needs_mpi, nightly], id="0-mpi"),
    pytest.param(
        0, MPIRUN, "launch.launcher=auto", marks=[needs_mpi, nightly], id="0-under-mpirun"
    ),
    pytest.param(
        1, MPIRUN, "launch.launcher=auto", marks=[needs_mpi, nightly], id="1-under-mpirun"
    ),
]


@pytest.mark.parametrize(("rank", "before", "launcher"), DEATHS)
def test_f9_f10_a_killed_rank_starts_again(
    rank: int, before: tuple[str, ...], launcher: str, bench: Bench
) -> None:
    job = bench.job(ONCE.format(rank=rank, trouble=KILL))
    words = ["train", job, *SMALL, launcher, "launch.max_restarts=2", "--out", "run"]
    more = [] if launcher == "launch.launcher=auto" else ["launch.nproc=2"]
    ran = finish(bench.start(*words, *more, before=before, **AS_ROOT), 120)
    assert ran.code == 0, ran.err
    assert [attempt["outcome"] for attempt in attempts(bench)] == ["crashed", "ok"]
    first = attempts(bench)[0]
    assert first["cause"].startswith(f"rank {rank} at step ") and "SIGKILL" in first["cause"]
    assert "starting all ranks again: attempt 2" in ran.err
    assert (bench.folder / "run/attempts/1/ranks/rank0/end.json").is_file()
    assert 0 < bench.result()["ettr"] <= 1


@nightly
def test_f16_a_crash_loop_of_members_ends_too(bench: Bench) -> None:
    trouble = "if os.environ['RANK'] == '1' and self.calls > 2: raise ValueError('always')"
    more = ["launch.launcher=torchrun", "launch.nproc=2", "launch.max_restarts=9"]
    ran = finish(bench.start("train", bench.job(trouble), *SMALL, *more, "--out", "run"), 120)
    assert ran.code == 5 and len(attempts(bench)) == 2, ran.err
    assert "the last two attempts failed alike, rank 1" in ran.err


def test_a_member_whose_supervisor_is_killed_is_not_waited_for(bench: Bench) -> None:
    """It is gone with its node: torchrun would end all, mpirun too; here nobody does."""
    job, port = bench.job("time.sleep(0.1)"), free_port()
    words = ["train", job, *SMALL, "train.steps=9999", "launch.max_restarts=3", "--out", "run"]
    words.append("launch.grace_s=1")
    both = [bench.start(*words, **ranked(rank, 2, port)) for rank in (0, 1)]
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    both[1].kill()
    finish(both[1])
    ran = finish(both[0], 60)
    assert ran.code == 5 and len(attempts(bench)) == 1, ran.err
    assert "rank 1 has no supervisor any more" in ran.err


@pytest.mark.parametrize(
    ("number", "code", "launcher"),
    [
        pytest.param(signal.SIGTERM, 75, "launch.launcher=torchrun", marks=nightly),
        pytest.param(signal.SIGINT, 130, "launch.launcher=torchrun", marks=nightly),
        pytest.param(signal.SIGTERM, 75, "launch.launcher=mpi", marks=[needs_mpi, nightly]),
        pytest.param(signal.SIGINT, 130, "launch.launcher=mpi", marks=[needs_mpi, nightly]),
    ],
)
def test_f27_a_signal_stops_all_ranks_in_order(
    number: int, code: int, launcher: str, bench: Bench
) -> None:
    words = ["train", bench.job("time.sleep(0.1)"), *SMALL, "train.steps=9999", "--out", "run"]
    more = [launcher, "launch.nproc=2", "launch.grace_s=20", "launch.max_restarts=3"]
    process = bench.start(*words, *more, **AS_ROOT)
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    sent_at = time.monotonic()
    os.kill(process.pid, number)
    ran = finish(process)
    assert ran.code == code, ran.err
    assert time.monotonic() - sent_at < 15, "ranks answered"
    for rank in (0, 1):
        end = json.loads((bench.folder / f"run/ranks/rank{rank}/end.json").read_text())
        assert end["exit_code"] == 0, "a peer's word may reach a rank before its own supervisor's"
    assert len(attempts(bench)) == 1
