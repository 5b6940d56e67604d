"""Paceline as a library: names, words, classes that travel, frames; no rank is started."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import paceline
from paceline.api.verbs import _ended, _path, as_words
from paceline.cli.arguments import _at_home
from paceline.cli.talk import ConsoleTalk
from paceline.errors import ConfigError, DataError, Outcome, PacelineError
from paceline.job import load_job
from paceline.launch.process import _without_main
from paceline.sweep.flow import plan_sweep
from paceline.sweep.spec import read_spec
from paceline.workloads.given import _GIVEN, find_given, give, pack, resuming, unpack
from tests.reported import finish, write_run


class Job(paceline.Workload):
    def build_model(self, config: object) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def build_data(self, config: object, split: str) -> list[torch.Tensor] | None:  # type: ignore[override]
        return [torch.zeros(4)] * 8 if split == "train" else None

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).sum(), len(batch)


LOOK = """
import sys, paceline
assert not {"torch", "numpy", "pydantic", "typer"} & set(sys.modules), "import paceline is slow"
from paceline import train
assert callable(train) and callable(paceline.compare) and "torch" not in sys.modules
"""


def test_import_is_quick_and_the_verbs_are_there() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_verb_is_a_module_too() -> None:
    import paceline.train.loop

    assert paceline.train.loop.LATENESS == 1
    for name in ("train", "plan", "verify", "sweep", "compare"):
        assert callable(getattr(paceline, name)), name
    from inspect import signature

    assert "check" in signature(paceline.train).parameters


def test_settings_are_words_of_the_command_line() -> None:
    settings = {"train.steps": 6, "optim.lr": 1e-3, "train.compile": "off", "data.x": [1, 2]}
    assert as_words(["a.b=1"], settings | {"launch.overcommit": True, "z": None}) == [
        "a.b=1", "train.steps=6", "optim.lr=0.001", "train.compile=off", "data.x=[1, 2]",
        "launch.overcommit=true", "z=null",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'zero2' is not KEY=VALUE"):
        as_words(["zero2"], {})
    with pytest.raises(ConfigError, match="cannot stand in a config"):
        as_words([], {"train.steps": object()})


def test_plan_returns_problems_and_raises_what_is_not_a_key() -> None:
    plan = paceline.plan("lm_tiny", **{"launch.nproc": 4, "launch.device": "cpu"})
    assert plan.world_size == 4 and not plan.problems()
    with pytest.raises(PacelineError, match="train.stepz"):
        paceline.plan("lm_tiny", "train.stepz=3")
    with pytest.raises(ConfigError, match="hand over the class itself"):
        paceline.plan(Job())  # type: ignore[arg-type]


def test_a_class_is_a_job_and_goes_to_ranks() -> None:
    job = load_job(give(Job), ["train.steps=3"])
    assert job.config.workload == "python:Job" and job.config.name == "Job"
    del _GIVEN["python:Job"]  # as in a rank
    unpack(job.packed)
    assert find_given("python:Job").__name__ == "Job"


def test_a_class_can_be_swept() -> None:
    spec = read_spec(give(Job), ["launch.device=cpu"], ["train.micro_batch_size=1,2"], {})
    assert [cell.refusal for cell in plan_sweep(spec).cells] == ["", ""]


def test_a_run_of_a_class_is_resumed_from_python() -> None:
    assert resuming(Path("runs/a b"), "python:Job") == "paceline.resume('runs/a b', Job)"
    assert resuming("runs/a b", "lm") == "paceline train --resume 'runs/a b'"


def test_a_class_that_holds_a_lock_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()

    class Locked(Job):
        def on_step(self, step: int, record: object) -> None:
            lock.acquire()

    with pytest.raises(ConfigError, match="Locked cannot be sent to ranks") as raised:
        pack(give(Locked))
    assert "FILE.py:Class" in str(raised.value)


def test_nobody_else_finds_the_class() -> None:
    with pytest.raises(ConfigError, match=r"paceline.resume\(RUN_DIR, Gone\)"):
        load_job("python:Gone", [])


def test_a_class_needs_ranks_of_this_process() -> None:
    plan = paceline.plan(Job, "launch.launcher=torchrun", "launch.device=cpu")
    assert any("cannot pass it to the ranks" in str(problem) for problem in plan.problems())


def test_a_rank_does_not_run_the_program_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import spawn

    main = sys.modules["__main__"]  # of a worker of pytest it is no file
    monkeypatch.setattr(main, "__file__", "/somewhere/script.py", raising=False)
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    with _without_main("rank0"):
        own, other = spawn.get_preparation_data("rank0"), spawn.get_preparation_data("else")
    named = {"init_main_from_name", "init_main_from_path"}
    assert not named & set(own) and named & set(other)
    assert named & set(spawn.get_preparation_data("rank0")), "as before"


def test_frames_of_a_run(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run")
    run = paceline.load_run(tmp_path / "run")
    assert not run.is_finished and len(run.training) == 20
    with pytest.raises(DataError, match="no result yet"):
        _ = run.result
    finish(files)
    assert run.result.steps == 20 and run.plan.world_size == 2 and run.config["name"] == "fixture"
    table = run.training.set_index("step")
    assert table.loss[5] == 1.0 and table.warmup[5] and table.val_loss.isna().sum() == 19
    assert table.val_loss[20] == 2.0
    steps = run.steps
    assert list(steps["rank"].unique()) == [0, 1] and (steps.backward_s == 0.3).all()
    assert len(run.telemetry) == 0 and "rss_bytes" in run.telemetry


def test_the_home_is_not_a_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands `--out=~/run`, nor a text in a program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    finish(write_run(tmp_path / "run"))
    assert paceline.load_run("~/run").path == tmp_path / "run"
    assert _path("~/made") == tmp_path / "made"
    words = ["recipes", "--name", "--out=~/made", "data.source=~/x", "--tail=a~b"]
    assert [_at_home(word) for word in words] == [
        *words[:2], f"--out={tmp_path}/made", "data.source=~/x", "--tail=a~b",
    ]  # fmt: skip


def test_frames_need_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[frames\]'"):
        _ = paceline.load_run(tmp_path / "run").training


def test_a_run_that_failed_raises_with_its_record(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run")
    good = finish(files)
    talk = ConsoleTalk(quiet=True)
    assert _ended(good, talk, check=True) is good
    bad = good.model_copy(update={"outcome": Outcome.STALL, "exit_code": 6})
    with pytest.raises(paceline.RunFailed, match="ended as stall") as raised:
        _ended(bad, talk, check=True)
    assert raised.value.result is bad and raised.value.exit_code == 6
    assert _ended(bad, talk, check=False) is bad
    with pytest.raises(KeyboardInterrupt):
        _ended(good.model_copy(update={"outcome": Outcome.INTERRUPTED}), talk, check=True)
