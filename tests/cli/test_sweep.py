"""`paceline sweep` on the real program: resumes, survives kills and Ctrl-C, tells failures, finds a
planted difference and none where there is none."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench import MARK, Bench, finish, wait_until
from tests.cli.program import Ran, environment

COMMON = ["train.micro_batch_size=4", "launch.device=cpu"]
SLEEP = "time.sleep(float(os.environ.get('NAP', 0)))"
NAPS = ["--axis", "launch.env.NAP=0.01,0.05"]


def sweep(bench: Bench, job: str, *words: str, timeout_s: float = 90) -> Ran:
    started = bench.start("sweep", job, *COMMON, *words, "--out", "sweep")
    return finish(started, timeout_s)


def table(bench: Bench, name: str) -> list[dict[str, str]]:
    path = bench.folder / "sweep" / name
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t" if name.endswith("tsv") else ","))


def runs(bench: Bench) -> list[str]:
    return sorted(path.name for path in (bench.folder / "sweep/runs").iterdir())


def test_a_sweep_from_cells_to_report(bench: Bench) -> None:
    words = [*NAPS, "--axis", "strategy.name=ddp,zero3_hybrid", "--repeats", "2", "--steps", "12"]
    ran = sweep(bench, bench.job(SLEEP), *words, "--json")
    assert ran.code == 0, ran.err
    assert ran.err.count("refused: ") == 2 and "is not a grid of copies and shards" in ran.err
    assert "2 cells x 2 repeats x 12 steps = 4 runs, 48 steps" in ran.err
    answer = json.loads(ran.out)
    assert answer["winner"] == "NAP=0.01,name=ddp" and answer["exit_code"] == 0
    rows = table(bench, "run_manifest.tsv")
    assert [row["repeat"] for row in rows] == ["1", "1", "2", "2"]
    assert {row["status"] for row in rows} == {"success"}
    assert {(row["attn_impl_req"], row["attn_impl_effective"]) for row in rows} == {
        ("auto", "sdpa")
    }
    ranked = table(bench, "ranked_groups.csv")
    assert [row["group"] for row in ranked][:2] == ["NAP=0.01,name=ddp", "NAP=0.05,name=ddp"]
    assert ranked[1]["verdict"] == "slower"
    refused = [row for row in table(bench, "skipped_runs.tsv") if row["reason"] == "refused"]
    assert len(refused) == 2
    names = "per_run_metrics.csv timing_points.csv group_summary.csv best_config.json summary.md"
    assert all((bench.folder / "sweep" / name).is_file() for name in names.split())
    overrides = (bench.folder / "sweep/best_overrides.txt").read_text()
    assert "launch.env.NAP=0.01" in overrides and "train.steps" not in overrides
    page = (bench.folder / "sweep/report.html").read_text()
    assert all(f"runs/{name}/report.html" in page for name in runs(bench))


@pytest.mark.slow
def test_a_finished_run_is_skipped_only_while_all_is_the_same(bench: Bench) -> None:
    job = bench.job(SLEEP)
    assert sweep(bench, job, *NAPS, "--repeats", "1", "--steps", "6").code == 0
    before = runs(bench)
    again = sweep(bench, job, *NAPS, "--repeats", "2", "--steps", "6")
    assert again.code == 0 and len(runs(bench)) == 4 and set(before) < set(runs(bench))
    bench.job(SLEEP + " # edited")
    edited = sweep(bench, job, *NAPS, "--repeats", "2", "--steps", "6")
    assert edited.err.count("runs again, for its code changed") == 4 and len(runs(bench)) == 8
    longer = sweep(bench, job, *NAPS, "--repeats", "1", "--steps", "7")
    assert longer.err.count("runs again, for its config changed") == 2
    assert "the data has no `fingerprint`" in longer.err


@pytest.mark.slow
def test_what_the_job_imports_is_code_too(bench: Bench) -> None:
    job = bench.job(SLEEP)
    helper, file = bench.folder / "helper.py", bench.folder / "job.py"
    helper.write_text("SIZE = 4\n")
    file.write_text(f"from helper import SIZE\n{file.read_text()}")
    words = [*NAPS, "--repeats", "1", "--steps", "6"]
    assert sweep(bench, job, *words).code == 0
    assert "run again" not in sweep(bench, job, *words).err
    helper.write_text("SIZE = 4  # edited\n")
    assert sweep(bench, job, *words).err.count("runs again, for its code changed") == 2


@pytest.mark.slow
def test_another_sweeps_directory_is_refused(bench: Bench) -> None:
    job = bench.job(SLEEP)
    assert sweep(bench, job, *NAPS, "--repeats", "1", "--steps", "4").code == 0
    other = sweep(bench, job, "--axis", "launch.env.NAP=0,0.5", "--repeats", "1")
    assert other.code == 2 and "holds another sweep" in other.err and "axes" in other.err
    (bench.folder / "sweep/sweep.json").unlink()
    foreign = sweep(bench, job, *NAPS)
    assert foreign.code == 2 and "already holds files" in foreign.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--axis", "train.micro_batchsize=1,2"], "did you mean train.micro_batch_size?"),
        (["--axis", "optim.lr=fast,slow"], "optim.lr=fast"),
        (["--axis", "optim.lr=1,2", "--baseline", "lr=3"], "is not a cell"),
        (["--axis", "optim.lr=1,2", "--target", "speedup>=1.1"], "needs a baseline"),
        (["--axis", "optim.lr=1,2", "--metric", "tokens_per_s"], "counts no tokens"),
        (["--axis", "optim.lr=1,2", "--target", "tokens_per_s>=9"], "counts no tokens"),
        (["--axis", "strategy.name=zero3_hybrid"], "none of the cells can run"),
        (["--axis", "optim.lr=1,2", "--phases", 'sweep.extras={x: ["optim.rl=2"]}'], "optim.rl"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    bench: Bench, words: list[str], said: str
) -> None:
    ran = sweep(bench, bench.job("pass"), *words)
    assert ran.code == 2 and said in ran.err and "Traceback" not in ran.err
    assert not (bench.folder / "sweep").exists()


def test_a_dry_run_shows_the_cost_and_stops(bench: Bench) -> None:
    ran = sweep(bench, bench.job("pass"), *NAPS, "--phases", "--dry-run")
    assert ran.code == 0 and "A, pilot: 2 cells x 2 repeats x 20 steps" in ran.err
    assert not (bench.folder / "sweep").exists()


@pytest.mark.slow
def test_a_failed_run_is_told_and_the_others_are_compared(bench: Bench) -> None:
    trouble = "if os.environ['NAP'] == '0.05' and self.calls > 4: raise RuntimeError('too sleepy')"
    ran = sweep(bench, bench.job(trouble), *NAPS, "--repeats", "2", "--steps", "8")
    assert ran.code == 1
    assert "run ended as crashed (exit 5)" in ran.err and "too sleepy" in ran.err
    assert ran.err.count("too sleepy") >= 4, "each failure is told in full"
    failed = [row for row in table(bench, "skipped_runs.tsv") if row["reason"] == "run_failed"]
    assert len(failed) == 2 and failed[0]["exit_code"] == "5"
    assert table(bench, "ranked_groups.csv")[0]["group"] == "NAP=0.01"
    stop = bench.start(
        "sweep", "job.py:Job", *COMMON, *NAPS, "--repeats", "2", "--stop-on-error", "--out", "s2"
    )
    assert finish(stop, 90).code == 5


def started_runs(bench: Bench) -> int:
    folder = bench.folder / "sweep/runs"
    return len(list(folder.glob("*/ranks/rank0/steps.csv"))) if folder.is_dir() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_leaves_a_partial_summary_and_nothing_running(
    bench: Bench, number: int, code: int
) -> None:
    words = [*NAPS, "--repeats", "2", "--steps", "300", "--out", "sweep"]
    job = bench.job("time.sleep(0.01)")
    process = bench.start("sweep", job, *COMMON, *words)
    wait_until(lambda: started_runs(bench) == 2, 60, "the second run trains")
    os.kill(process.pid, number)
    ran = finish(process)
    assert ran.code == code, ran.err
    wait_until(lambda: not bench.processes(), 5, "nothing is running")
    assert "this is what there is so far" in ran.err
    rows = table(bench, "run_manifest.tsv")
    assert [row["status"] for row in rows] == ["success", "failed"]
    assert (bench.folder / "sweep/summary.md").is_file()
    assert not list((bench.folder / "sweep/runs").glob("*/checkpoints/step_*"))


LATE = """
import os, signal, sys
from paceline.run import flow
plain, calls = flow.write_report, []
def write_report(run):
    calls.append(run)
    if len(calls) == 1:
        os.kill(os.getpid(), signal.SIGINT)
    plain(run)
flow.write_report = write_report
if __name__ == "__main__":
    from paceline.cli import main
    main()
"""


@pytest.mark.slow
def test_a_stop_while_a_run_is_concluded_is_heard(bench: Bench) -> None:
    """After the last step, before the next run: nobody but the sweep can answer it."""
    (bench.folder / "late.py").write_text(LATE)
    words = ["sweep", bench.job("pass"), *COMMON, *NAPS, "--repeats", "2", "--steps", "6"]
    process = subprocess.Popen(
        [sys.executable, "late.py", *words, "--out", "sweep"], cwd=bench.folder,
        env=environment() | {MARK: bench.mark, "TMPDIR": str(bench.temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ran = finish(process)
    assert ran.code == 130, ran.err
    assert len(table(bench, "run_manifest.tsv")) == 1
    assert (bench.folder / "sweep/summary.md").is_file()


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(bench: Bench) -> None:
    words = [*NAPS, "--repeats", "2", "--steps", "100"]
    job = bench.job("time.sleep(0.01)")
    process = bench.start("sweep", job, *COMMON, *words, "--out", "sweep")
    wait_until(lambda: started_runs(bench) == 2, 60, "the second run trains")
    process.kill()
    process.communicate()
    wait_until(lambda: not bench.processes(), 5, "its ranks are gone")
    (first,) = table(bench, "run_manifest.tsv")
    ran = sweep(bench, job, *words)
    assert ran.code == 0, ran.err
    rows = table(bench, "run_manifest.tsv")
    assert rows[0] == first and len(rows) == 4 and len(runs(bench)) == 5
    keys = {(row["group"], row["repeat"]) for row in rows}
    assert len(keys) == 4


@pytest.mark.slow
def test_two_sweeps_do_not_share_a_directory(bench: Bench) -> None:
    words = ["sweep", bench.job("time.sleep(0.05)"), *COMMON, *NAPS, "--repeats", "1", "--out", "s"]
    both = [bench.start(*words), bench.start(*words)]
    codes = sorted(finish(process, 90).code for process in both)
    assert codes == [0, 2]


@pytest.mark.slow
def test_under_a_launcher_it_is_refused(bench: Bench) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "29511"}  # fmt: skip
    ran = finish(bench.start("sweep", bench.job("pass"), *NAPS, **env))
    assert ran.code == 2 and "starts the ranks of its runs itself" in ran.err


def speedup_of(bench: Bench, group: str) -> dict[str, Any]:
    return next(row for row in table(bench, "ranked_groups.csv") if row["group"] == group)


@pytest.mark.nightly
@pytest.mark.serial
def test_a_cell_against_itself_is_no_difference(bench: Bench) -> None:
    """Two names for one thing. The steps sleep, so that the machine's noise is small beside them;
    a false alarm is still possible in 5 of 100."""
    words = ["--axis", "name=one,two", "--repeats", "8", "--steps", "40", "--margin", "0.05"]
    ran = sweep(bench, bench.job("time.sleep(0.06)"), *words, timeout_s=170)
    assert ran.code == 0, ran.err
    verdicts = {row["verdict"] for row in table(bench, "ranked_groups.csv")}
    assert verdicts == {"no difference seen"}


@pytest.mark.nightly
@pytest.mark.serial
def test_a_planted_sleep_of_5_percent_is_found(bench: Bench) -> None:
    words = ["--axis", "launch.env.NAP=0.060,0.063", "--baseline", "NAP=0.060", "--repeats", "8"]
    ran = sweep(bench, bench.job(SLEEP), *words, "--steps", "40", timeout_s=170)
    assert ran.code == 0, ran.err
    row = speedup_of(bench, "NAP=0.063")
    assert row["verdict"] == "slower"
    # Beside the sleep a step takes a moment of work, on both sides: a little nearer than 20/21.
    assert float(row["speedup_low"]) < 20 / 21 + 0.005
    assert float(row["speedup_high"]) > 20 / 21


@pytest.mark.nightly
@pytest.mark.serial
def test_phases_narrow_down_to_the_winner(bench: Bench) -> None:
    words = ["--axis", "launch.env.NAP=0.002,0.0021,0.02,0.03", "--phases", "--repeats", "3"]
    more = ["--steps", "40", 'sweep.extras={longer: ["launch.env.NAP=0.004"]}']
    ran = sweep(bench, bench.job(SLEEP), *words, *more, timeout_s=170)
    assert ran.code == 0, ran.err
    rows = table(bench, "run_manifest.tsv")
    by_phase = {p: {r["group"] for r in rows if r["phase"] == p} for p in ("A", "B", "C")}
    assert len(by_phase["A"]) == 4
    assert {"B:NAP=0.002", "B:NAP=0.0021"} == by_phase["B"]
    assert len(by_phase["C"]) == 2 and any("+longer" in name for name in by_phase["C"])
    assert table(bench, "ranked_groups.csv")[0]["group"].startswith("C:")


@pytest.mark.slow
@pytest.mark.serial
def test_a_target_decides_the_exit_code(bench: Bench) -> None:
    job = bench.job(SLEEP)
    words = ["--axis", "launch.env.NAP=0.02,0.01", "--baseline", "NAP=0.02", "--repeats", "3"]
    met = sweep(bench, job, *words, "--steps", "30", "--target", "speedup>=1.3")
    assert met.code == 0 and "Target speedup>=1.3: met" in met.err
    missed = sweep(bench, job, *words, "--steps", "30", "--target", "speedup>=3")
    assert missed.code == 1 and "Target speedup>=3: missed" in missed.err
    assert Path(bench.folder / "sweep/summary.md").read_text().count("missed")
