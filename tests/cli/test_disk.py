"""A disk that fills up, becomes read-only or loses the run directory while the program runs: on
real small file systems, each filled at a step where the job stands and waits for it."""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cli.bench import SMALL, TORCHRUN, Bench, finish, wait_until
from tests.cli.program import Ran, environment, paceline
from tests.disks import break_disk, breakable_disk, fill, needs_mounts, small_disk
from tests.saved import require_sound

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), needs_mounts]
STEPS, FIRST, SECOND = 400, 60, 300
KEEP = ["checkpoint.every=20", "train.log_every=5"]
# At some calls of its loss rank 0 stands until the test says go.
GATES = f"""for call in ({FIRST}, {SECOND}):
            if self.calls == call and os.environ['RANK'] == '0':
                open(f'at{{call}}', 'w').close()
                while not os.path.exists(f'go{{call}}'): time.sleep(0.005)
        if self.calls % 10 == 0: print('call', self.calls)"""


@pytest.fixture
def disk(bench: Bench) -> Iterator[Path]:
    """The run directory as a disk of its own."""
    with small_disk(bench.folder / "run", "3m") as made:
        yield made


def begin(bench: Bench, *settings: str, **more: Any) -> Any:
    words = [*SMALL, f"train.steps={STEPS}", *KEEP, *settings, "--out", "run"]
    return bench.start("train", bench.job(GATES), *words, **more)


def await_gate(bench: Bench, call: int) -> None:
    wait_until((bench.folder / f"at{call}").exists, 60, f"call {call}")


def go(bench: Bench, *calls: int) -> None:
    for call in calls:
        (bench.folder / f"go{call}").touch()


def steps_of(bench: Bench, name: str = "training.csv") -> list[int]:
    """The steps of a table, every line of which must be whole."""
    with (bench.folder / "run" / name).open(newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}, "a line is cut"
    return [int(row[0]) for row in rows[1:]]


def unwritten(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["file"]: each for each in result["unwritten"]}


def require_plain(ran: Ran) -> None:
    assert "Traceback" not in ran.err and "bug in Paceline" not in ran.err, ran.err


def test_space_that_comes_back_is_used_and_nothing_is_missing(bench: Bench, disk: Path) -> None:
    process = begin(bench, "checkpoint.on_error=continue")
    await_gate(bench, FIRST)
    filling = fill(disk)
    go(bench, FIRST)
    await_gate(bench, SECOND)
    filling.unlink()
    go(bench, SECOND)
    ran = finish(process)
    assert ran.code == 0, ran.err
    require_plain(ran)
    assert steps_of(bench) == steps_of(bench, "ranks/rank0/steps.csv") == [*range(1, STEPS + 1)]
    result = bench.result()
    lost = unwritten(result)
    assert lost["training.csv"]["num_bytes"] == 0 < lost["training.csv"]["num_writes"]
    assert "training.csv: " in ran.err and "and all was written later" in ran.err
    kept = result["checkpoints"]
    assert kept["num_failed"] > 5 and kept["last_step"] == STEPS
    assert "more such notes on checkpoints" in ran.err, "a note per save is too many"
    said = [
        line.split()[-1] for line in (disk / "train.log").read_text().splitlines() if "call" in line
    ]
    assert said == [str(call) for call in range(10, STEPS + 1, 10)]
    assert "## What could not be written" in (disk / "summary.md").read_text()


def test_a_disk_that_stays_full_costs_files_and_not_the_run(bench: Bench, disk: Path) -> None:
    process = begin(bench, "checkpoint.on_error=continue")
    await_gate(bench, FIRST)
    filling = fill(disk)
    go(bench, FIRST, SECOND)
    ran = finish(process)
    assert ran.code == 0, ran.err
    require_plain(ran)
    result = bench.result()
    assert (result["outcome"], result["steps"]) == ("ok", STEPS)
    lost = unwritten(result)["training.csv"]
    there = steps_of(bench)
    assert lost["missing"] == [[there[-1] + 1, STEPS]] and there == [*range(1, len(there) + 1)]
    assert result["final_loss"] is None, "that of an earlier step is not the last one"
    assert f"steps without a row: {there[-1] + 1} to {STEPS}" in ran.err
    assert result["attempts"][-1]["outcome"] == "ok"

    fill(disk)  # what was reserved has served, and some of it is free now
    refused = paceline("report", "run", cwd=bench.folder)
    assert refused.code == 10 and "summary.md cannot be written: No space" in refused.err
    require_plain(refused)
    filling.unlink()
    assert paceline("report", "run", cwd=bench.folder).code == 0
    assert f"{there[-1] + 1} to {STEPS}" in (disk / "summary.md").read_text()


def test_a_checkpoint_that_must_be_written_ends_the_run_as_such(bench: Bench, disk: Path) -> None:
    process = begin(bench)
    await_gate(bench, FIRST)
    filling = fill(disk)
    go(bench, FIRST, SECOND)
    ran = finish(process)
    assert ran.code == 8, ran.err
    require_plain(ran)
    result = bench.result()
    assert result["outcome"] == "checkpoint_not_written" and result["failure"]["rank"] == 0
    assert "No space left" in result["failure"]["message"]
    filling.unlink()
    again = finish(bench.start("train", "--resume", "run"))
    assert again.code == 0, again.err
    assert steps_of(bench) == [*range(1, STEPS + 1)]
    assert [each["outcome"] for each in bench.result()["attempts"]] == [
        "checkpoint_not_written", "ok",
    ]  # fmt: skip


def test_a_disk_that_becomes_read_only_costs_files_and_not_the_run(bench: Bench) -> None:
    with breakable_disk(bench.folder / "run") as disk:
        shutil.rmtree(disk / "lost+found")
        process = begin(bench, "checkpoint.on_error=continue", "launch.nproc=2", "--json")
        await_gate(bench, FIRST)
        break_disk(disk)
        go(bench, FIRST, SECOND)
        ran = finish(process)
        assert ran.code == 0, ran.err
        require_plain(ran)
        result = json.loads(ran.out)
        assert (result["outcome"], result["steps"]) == ("ok", STEPS)
        lost = unwritten(result)
        assert {"training.csv", "ranks/rank1/steps.csv", "heartbeat_rank1.jsonl"} <= set(lost)
        assert lost["training.csv"]["error"] == "Read-only file system"
        assert "result.json cannot be written: Read-only" in ran.err
        assert "the report was not written" in ran.err
        assert not (disk / "result.json").exists()
        kept = bench.folder / "run/checkpoints"
        from paceline.checkpoint.folder import CheckpointFolder

        for step in CheckpointFolder(kept).steps():
            require_sound(CheckpointFolder(kept), step)


@pytest.mark.parametrize("how", ["deleted", pytest.param("moved", marks=pytest.mark.nightly)])
def test_a_run_directory_that_is_gone_ends_the_run_and_stays_gone(how: str, bench: Bench) -> None:
    process = begin(bench, "launch.nproc=2")
    await_gate(bench, FIRST)
    run = bench.folder / "run"
    run.rename(bench.folder / "moved")
    if how == "deleted":
        shutil.rmtree(bench.folder / "moved")
    ran = finish(process, 20)  # rank 0 stands at its gate: it is ended
    assert ran.code == 10, ran.err
    require_plain(ran)
    assert "run was deleted, renamed or replaced while its run went on" in ran.err
    assert not run.exists()


def test_no_room_to_begin_with(bench: Bench, corpus: Path) -> None:
    with small_disk(bench.folder / "full", "64k") as full:
        fill(full)
        _try_without_room(bench, full, corpus)


def _try_without_room(bench: Bench, full: Path, corpus: Path) -> None:
    ran = finish(bench.start("train", bench.job("pass"), *SMALL, "--out", str(full / "run")))
    assert ran.code == 10 and "result.json cannot be written: No space left" in ran.err, ran.err
    require_plain(ran)
    words = [f"data.source={corpus}", f"data.cache_dir={full}", "launch.device=cpu"]
    ran = finish(bench.start("train", "lm_tiny", *words, "--out", "other", "--json"))
    assert ran.code == 10 and json.loads(ran.out)["outcome"] == "out_of_resources"
    require_plain(ran)
    assert "choose another folder: data.cache_dir" in ran.err


def test_no_room_for_temporary_files_and_for_what_is_said(bench: Bench, tmp_path: Path) -> None:
    with small_disk(bench.folder / "full", "64k") as full:
        fill(full)
        bench.temporary = full
        words = ["train", bench.job("print('x' * 1000)"), *SMALL, "--out", "run", "--json"]
        with (full / "out").open("w") as out, (full / "err").open("w") as err:
            process = warm.start(
                [sys.executable, "-m", "paceline", *words], cwd=bench.folder,
                env=environment(TMPDIR=str(full)), stdout=out, stderr=err,
            )  # fmt: skip
            assert process.wait(60) == 0
        assert bench.result()["outcome"] == "ok"
        bench.temporary = bench.folder / "temporary"


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["ours", "theirs"])
def test_a_full_disk_under_a_launcher(by: str, bench: Bench, disk: Path) -> None:
    """Each rank has a supervisor of its own: what they leave for rank 0 has its place."""
    if by == "ours":
        process = begin(bench, "launch.launcher=torchrun", "launch.nproc=2")
    else:
        process = begin(bench, before=TORCHRUN)
    await_gate(bench, FIRST)
    filling = fill(disk)
    go(bench, FIRST, SECOND)
    ran = finish(process)
    assert ran.code == (8 if by == "ours" else 1), ran.err  # torchrun has exit codes of its own
    assert bench.result()["outcome"] == "checkpoint_not_written"
    require_plain(ran) if by == "ours" else None
    filling.unlink()
