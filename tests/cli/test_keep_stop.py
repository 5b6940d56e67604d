"""Faults F27 to F32: asked to stop, whenever and however, a run keeps its state and can go on."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.bench import Bench, finish, wait_until
from tests.cli.keeping import (
    begin,
    folder,
    require_usable,
    resume,
    rows,
    samples,
    train,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EVAL = "train.eval_every=6"
AT_7 = "stand('there') if step == 7 else None"
# Not where the first batch of it is tried, before step 1.
AT_EVALUATION = (
    "self.n = getattr(self, 'n', 0) + is_eval; stand('there', 0.5) if is_eval and self.n > 1 else 0"
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The same run, undisturbed."""
    bench = Bench(tmp_path_factory.mktemp("clean"))
    assert train(bench, EVAL).code == 0
    yield bench


def require_goes_on(bench: Bench, clean: Bench, stopped: Any, code: int = 75) -> None:
    """It ended in order, its state is there, and the rest equals the run that never stopped."""
    assert stopped.code == code, stopped.err
    require_usable(bench)
    (bench.folder / "there").unlink(missing_ok=True)
    ran = resume(bench)
    assert ran.code == 0, ran.err
    assert rows(bench) == rows(clean)
    assert samples(bench) == samples(clean)
    require_usable(bench)


def steps_of(bench: Bench) -> set[int]:
    paths = sorted((bench.folder / "run/ranks").glob("rank*/verdict.json"))
    return {json.loads(path.read_text())["step"] for path in paths}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)]
)
def test_f27_a_signal_during_a_step(number: int, code: int, clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, loss=AT_7)
    wait_for(bench, "there")
    process.send_signal(number)
    ran = finish(process)
    assert folder(bench).steps()[0] in (7, 8), "the step that was under way, or the one after"
    assert "--resume run" in ran.err
    require_goes_on(bench, clean, ran, code)


POINTS = {
    "f28_evaluation": {"loss": AT_EVALUATION},
    "f28_trial_of_evaluation": {"loss": "stand('there', 0.5) if is_eval else None"},
    "f28_warm_up": {"build": "stand('there', 1.0) if RANK else None"},
    "f28_first_step": {"loss": "stand('there', 0.5) if step == 1 else None"},
    "f28_save": {
        "build": "import paceline.checkpoint.saver as saver; real = saver.write_pieces;"
        " saver.write_pieces = lambda *a: (stand('there', 0.5), real(*a))[1]"
    },
}


@pytest.mark.parametrize("point", POINTS)
def test_f28_wherever_it_is(point: str, clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, **POINTS[point])
    wait_for(bench, "there")
    process.send_signal(signal.SIGTERM)
    require_goes_on(bench, clean, finish(process))


def test_f28_an_evaluation_that_was_cut_is_done_when_the_run_goes_on(
    clean: Bench, bench: Bench
) -> None:
    process = begin(bench, EVAL, loss=AT_EVALUATION)
    wait_for(bench, "there")
    process.send_signal(signal.SIGTERM)
    ran = finish(process)
    assert ran.code == 75
    assert folder(bench).state(6).evaluation_is_due and rows(bench)[5][3] == ""
    assert resume(bench).code == 0
    assert rows(bench) == rows(clean) and rows(bench)[5][3] != ""


def test_f28_while_data_is_prepared(bench: Bench) -> None:
    process = begin(bench, prepare="stand('there', 60)")
    wait_for(bench, "there")
    process.send_signal(signal.SIGTERM)
    ran = finish(process)
    assert ran.code == 75, ran.err
    assert "before any rank had started" in ran.err and "Traceback" not in ran.err
    assert not (bench.folder / "run/ranks").exists()


def test_f29_loaders_ignore_the_signals_that_stop_a_run(clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, "data.num_workers=2", loss=AT_7)
    wait_for(bench, "there")
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        for pid in bench.ranks():
            for child in psutil.Process(pid).children(recursive=True):
                child.send_signal(number)
    for pid in bench.ranks():  # and the whole group of each rank, as some launchers do
        os.killpg(pid, signal.SIGTERM)
    require_goes_on(bench, clean, finish(process))


PAIRS = [
    (signal.SIGINT, signal.SIGTERM, 130),
    pytest.param(signal.SIGTERM, signal.SIGTERM, 75, marks=pytest.mark.nightly),
    pytest.param(signal.SIGINT, signal.SIGINT, 130, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("first", "second", "code"), PAIRS)
def test_f30_a_second_signal_corrupts_nothing(
    first: int, second: int, code: int, clean: Bench, bench: Bench
) -> None:
    """The second comes in the middle of the save that the first has asked for."""
    slow = (
        "import paceline.checkpoint.saver as saver; real = saver.write_pieces; saver.write_pieces ="
        " lambda *a: (stand('saving', 2.0) if (HERE / 'there').exists() and once('slow') else"
        " None, real(*a))[1]"
    )
    process = begin(bench, EVAL, loss=AT_7, build=slow)
    wait_for(bench, "there")
    process.send_signal(first)
    wait_for(bench, "saving")
    time.sleep(0.6)  # two Ctrl-C within half a second are one
    process.send_signal(second)
    require_goes_on(bench, clean, finish(process), code)


KILLED_AT = {
    "while tensors are written": ("saver", "write_pieces"),
    "before the manifest": ("saver", "merge"),
    "before the rename": ("folder", "seal"),
    "before latest moves": ("folder", "sync_directory"),
    "before old ones are pruned": ("saver", "Retention.prune"),
}


@pytest.mark.parametrize("point", KILLED_AT)
def test_f31_sigkill_in_the_middle_of_a_save(point: str, clean: Bench, bench: Bench) -> None:
    """The second save, of step 10, dies at a named point; all goes on from what is sound."""
    module, name = KILLED_AT[point]
    owner = f"m.{name.partition('.')[0]}" if "." in name else "m"
    attribute = name.rpartition(".")[2]
    kill = (
        f"import paceline.checkpoint.{module} as m; real = {owner}.{attribute}; {owner}.{attribute}"
        " = lambda *a: (os.kill(os.getpid(), 9) if RANK == '0' and (HERE / 'ten').exists()"
        " and once('fired') else None, real(*a))[1]"
    )
    ran = train(
        bench, EVAL, "launch.max_restarts=1", build=kill,
        loss="(HERE / 'ten').touch() if step == 10 else None",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert (bench.folder / "fired").exists() and len(bench.result()["attempts"]) == 2
    assert rows(bench) == rows(clean)
    require_usable(bench)


def test_f32_one_rank_alone_is_asked(clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, loss=AT_7)
    wait_for(bench, "there")
    os.kill(bench.ranks()[1], signal.SIGUSR2)
    ran = finish(process)
    assert len(steps_of(bench)) == 1, "all ranks stop at the same step"
    require_goes_on(bench, clean, ran)


def test_a_halt_file_is_the_same_agreed_stop(clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, loss="stand('there', 1.0) if step == 7 else None")
    wait_for(bench, "there")
    (bench.folder / "run/.HALT").write_text("halt: by hand\n")
    ran = finish(process)
    assert ran.code == 75 and len(steps_of(bench)) == 1
    again = resume(bench)
    assert again.code == 0 and ".HALT is from before this run and is ignored" in again.err
    assert rows(bench) == rows(clean)


def test_a_checkpoint_on_request_and_at_the_end(bench: Bench) -> None:
    process = begin(
        bench, "checkpoint.every=off", "checkpoint.mode=async",
        loss="stand('there', 1.0) if step == 7 else None",
    )  # fmt: skip
    wait_for(bench, "there")
    (bench.folder / "run/control").mkdir(exist_ok=True)
    (bench.folder / "run/control/checkpoint").touch()
    assert finish(process).code == 0
    lines = (bench.folder / "run/checkpoints.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["request", "end"]
    assert all(float(line.split(",")[5]) < float(line.split(",")[6]) for line in lines[1:])


def test_a_grace_that_is_too_short_is_still_resumable(clean: Bench, bench: Bench) -> None:
    hang = "stand('there', 60) if step == 7 and once('hung') else None"
    process = begin(bench, EVAL, "launch.grace_s=1", loss=hang)
    wait_for(bench, "there")
    process.send_signal(signal.SIGTERM)
    ran = finish(process)
    assert "killed before a checkpoint was written" in ran.err
    require_goes_on(bench, clean, ran)


def test_a_killed_supervisor_leaves_a_run_that_goes_on(clean: Bench, bench: Bench) -> None:
    process = begin(bench, EVAL, loss="stand('there', 1.0) if step == 7 else None")
    wait_for(bench, "there")
    process.kill()
    process.communicate()
    wait_until(lambda: not bench.processes(), 10, "ranks are gone")
    (bench.folder / "there").unlink()
    assert resume(bench).code == 0
    assert rows(bench) == rows(clean) and samples(bench) == samples(clean)
    assert Path(bench.folder / "run/attempts/1/attempt.json").is_file()
    require_usable(bench)


def test_a_checkpoint_by_time(bench: Bench) -> None:
    ran = train(bench, "checkpoint.every=off", "checkpoint.every_s=0.5", loss="time.sleep(0.1)")
    assert ran.code == 0
    lines = (bench.folder / "run/checkpoints.csv").read_text().splitlines()[1:]
    rows_of = [line.split(",") for line in lines]
    assert rows_of[0][1] == "every_s" and len(rows_of) > 1 and rows_of[-1][0] == "12"


def test_the_same_samples_over_the_end_of_an_epoch(bench: Bench) -> None:
    """Stopped at the very end of epoch 1, 12 steps, and inside epoch 2; then on one rank."""
    steps = "train.steps=30"
    assert train(bench, steps, "checkpoint.every=12").code == 0
    whole = samples(bench)
    for left, others in ((24, ["launch.nproc=1"]), (12, [])):
        for step in folder(bench).steps():
            if step > left:
                shutil.rmtree(folder(bench).path(step))
        (bench.folder / "run/result.json").unlink()
        ran = resume(bench, *others)
        assert ran.code == 0, ran.err
        assert samples(bench) == whole
    epochs = [sum((whole[step] for step in range(first, first + 12)), []) for first in (1, 13)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(96)) and epochs[0] != epochs[1]
    state = folder(bench).state(12)
    assert (state.data.epoch, state.data.end_index, state.data.position) == (1, 0, 96)
