"""The README does what it says: its job, its commands, the demo."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import paceline
from tests.docs import check_command

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("paceline ")]


def test_the_readme_names_every_verb() -> None:
    from paceline.cli import app

    verbs = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    verbs |= {str(group.name) for group in app.registered_groups}
    assert verbs == {
        "bench", "check", "checkpoints", "compare", "data", "demo", "diagnose", "drill", "export",
        "generate", "import", "plan", "prepare", "recipes", "report", "sweep", "train",
        "transcribe", "verify", "watch",
    }  # fmt: skip
    # docs/export.md runs the last one: it needs a model that hears, and a recording.
    text = " ".join(commands()) + " make demo transcribe"
    assert all(verb in text for verb in verbs)


@pytest.mark.slow
def test_the_job_in_the_readme_is_short_and_trains(tmp_path: Path) -> None:
    (job,) = blocks("python")
    assert len(job.splitlines()) <= 45
    (tmp_path / "my_job.py").write_text(job)
    short, longer = [c for c in commands() if "my_job.py" in c]
    assert short == "paceline train my_job.py:MyWorkload train.steps=50 launch.nproc=2"
    ran = paceline(*shlex.split(short)[1:], "--json", cwd=tmp_path, cold=True)
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["world_size"] == 2 and result["steps"] == 50
    assert result["tflops_per_rank"] is not None, "counted on the first batch"
    ran = paceline(*shlex.split(longer)[1:], "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["final_loss"] < 0.4, "a coin toss has 0.69"
    wrong = paceline("train", "my_job.py:MyWorkload", "model.hiden=8", cwd=tmp_path)
    assert wrong.code == 2 and "did you mean model.hidden?" in wrong.err


@pytest.mark.slow
def test_every_command_is_parsed_and_planned(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(*blocks("python"))
    assert all(check_command(command, tmp_path) for command in commands())


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_other_commands_run_as_written(tmp_path: Path) -> None:
    for command in commands():
        if "my_job.py" not in command:
            ran = paceline(*shlex.split(command)[1:], cwd=tmp_path)
            assert ran.code == 0, f"{command}\n{ran.err}"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_demo_learns(tmp_path: Path) -> None:
    ran = paceline("demo", "--json", cwd=tmp_path, cold=True)
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    entropy = result["data_facts"]["unigram_entropy"]
    assert result["val_loss"] < entropy
    assert f"below the corpus's byte-unigram entropy {entropy:.4g}" in ran.err
    assert "report: runs/demo-" in ran.err
    assert "step " in ran.err, "progress is shown"
