"""Faults F9 to F11, F16, F17, F41, F42: a rank dies, and the run goes on as if it had not."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.bench import Bench, finish
from tests.cli.keeping import begin, require_usable, rows, samples, train, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
AGAIN = "launch.max_restarts=3"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The same run, undisturbed."""
    bench = Bench(tmp_path_factory.mktemp("clean"))
    assert train(bench).code == 0
    yield bench


def on_rank_1(trouble: str) -> str:
    return f"if step == 7 and RANK == '1' and once('fired'): {trouble}"


KILL_ON_RANK_1 = on_rank_1("os.kill(os.getpid(), 9)")
DEATHS = {
    "f9_sigkill_of_rank_1": (KILL_ON_RANK_1, "SIGKILL"),
    "f10_sigkill_of_rank_0": (KILL_ON_RANK_1.replace("'1'", "'0'"), "SIGKILL"),
    "f11_sigsegv": (on_rank_1("ctypes.string_at(0)"), "SIGSEGV"),
    "f12_exception": (on_rank_1("1 / 0"), "ZeroDivisionError"),
    "f13_early_exit_0": (on_rank_1("os._exit(0)"), "left early"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_costs_no_step(name: str, clean: Bench, bench: Bench) -> None:
    trouble, cause = DEATHS[name]
    ran = train(bench, AGAIN, loss=trouble)
    assert ran.code == 0, ran.err
    assert rows(bench) == rows(clean)
    assert samples(bench) == samples(clean)
    first, second = bench.result()["attempts"]
    assert cause in first["cause"] and first["outcome"] != "ok" and second["outcome"] == "ok"
    assert second["first_step"] == 6, "from the checkpoint of step 5"
    require_usable(bench)


def test_f11_the_stack_of_a_segfault_is_in_the_log(bench: Bench) -> None:
    train(bench, AGAIN, loss=DEATHS["f11_sigsegv"][0])
    log = (bench.folder / "run/ranks/rank1/log.txt").read_text()
    assert "Fatal Python error: Segmentation fault" in log and "job.py" in log


# Attempts 1, 2, 3, ... end at steps 3, 3, 4, 4, ..., 12: now rank 0 dies, now rank 1, while the
# other sleeps.
DEATHS_IN_A_ROW = """step_again()
            number = json.loads((HERE / 'run/attempt.json').read_text())['number']
            if number <= {times} and step == 3 + (number - 1) // 2:
                die() if RANK == str(number % 2) else time.sleep(60)
"""


@pytest.mark.serial
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_f9_every_one_of_many_within_five_seconds(times: int, clean: Bench, bench: Bench) -> None:
    """The peer of every rank that dies is busy outside of any collective."""
    deaths = DEATHS_IN_A_ROW.replace("{times}", str(times))
    ran = finish(begin(bench, f"launch.max_restarts={times}", loss=deaths), 300)
    assert ran.code == 0, ran.err
    assert rows(bench) == rows(clean)
    seconds = [float(line) for line in (bench.folder / "recoveries").read_text().split()]
    assert len(seconds) == times and max(seconds) < 5, seconds
    require_usable(bench)


def test_f16_two_identical_failures_end_the_run(bench: Bench) -> None:
    ran = train(bench, "launch.max_restarts=9", loss="if step == 7 and RANK == '1': 1 / 0")
    assert ran.code == 5, ran.err
    assert "failed alike" in ran.err and "ZeroDivisionError" in ran.err
    assert len(bench.result()["attempts"]) == 2
    kept = bench.folder / "run/attempts/1"
    assert "ZeroDivisionError" in (kept / "ranks/rank1/verdict.json").read_text()
    require_usable(bench)


def test_f17_a_crash_while_ranks_start_again_is_bounded(bench: Bench) -> None:
    started_at = time.monotonic()
    ran = train(
        bench, "launch.max_restarts=2", loss=KILL_ON_RANK_1,
        build="if (HERE / 'fired').exists(): os.kill(os.getpid(), 9)",
    )  # fmt: skip
    assert ran.code == 5 and time.monotonic() - started_at < 60
    require_usable(bench)


def test_f17_a_hang_while_ranks_start_again_is_bounded(bench: Bench) -> None:
    ran = train(
        bench, "launch.max_restarts=1", "launch.start_s=4", loss=KILL_ON_RANK_1,
        build="time.sleep(600) if (HERE / 'fired').exists() and RANK == '0' else None",
    )  # fmt: skip
    assert ran.code == 6 and "launch.start_s" in ran.err
    require_usable(bench)


def test_f18_a_stopped_rank_is_killed_and_all_start_again(clean: Bench, bench: Bench) -> None:
    stop = "if step == 7 and RANK == '1' and once('fired'): os.kill(os.getpid(), signal.SIGSTOP)"
    ran = train(bench, AGAIN, "launch.progress_s=2", loss=stop)
    assert ran.code == 0, ran.err
    assert rows(bench) == rows(clean)


LOADERS = "data.num_workers=2"
DIE = "if step == 7 and not is_eval and once('fired'): os.kill(os.getpid(), 9)"


def test_f41_a_dead_loader_is_named_with_its_samples(bench: Bench) -> None:
    ran = train(bench, LOADERS, item=DIE)
    assert ran.code == 4, ran.err
    assert "died (SIGKILL) over samples" in ran.err and "indices" in ran.err
    require_usable(bench)


def test_f41_a_dead_loader_is_reason_enough_to_start_again(clean: Bench, bench: Bench) -> None:
    ran = train(bench, LOADERS, AGAIN, item=DIE)
    assert ran.code == 0, ran.err
    assert rows(bench) == rows(clean)


def test_f42_a_hanging_loader_is_named_with_its_samples(bench: Bench) -> None:
    hang = "time.sleep(600) if step == 7 and not is_eval and once('fired') else None"
    ran = train(bench, LOADERS, "data.timeout_s=2", item=hang)
    assert ran.code == 4, ran.err
    assert "gave nothing for 2 s over samples" in ran.err


def test_loaders_have_a_time_limit_by_default() -> None:
    from paceline.config.schema import DataConfig

    assert 0 < DataConfig().timeout_s < 600


def test_a_restart_without_any_checkpoint_begins_anew(clean: Bench, bench: Bench) -> None:
    early = KILL_ON_RANK_1.replace("step == 7", "step == 3")
    ran = train(bench, AGAIN, loss=early)
    assert ran.code == 0 and rows(bench) == rows(clean)
    assert "began with step 1" in ran.err


def test_sigusr1_dumps_stacks_and_the_run_goes_on(clean: Bench, bench: Bench) -> None:
    process = begin(bench, loss="stand('there', 1.0) if step == 7 else None")
    wait_for(bench, "there")
    process.send_signal(signal.SIGUSR1)
    ran = finish(process)
    assert ran.code == 0 and rows(bench) == rows(clean)
    for rank in (0, 1):
        text = (Path(bench.folder) / f"run/ranks/rank{rank}/stacks.txt").read_text()
        assert "Thread" in text and "job.py" in text
