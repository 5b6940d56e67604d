"""`paceline plan --schedule`: a table for people, one record for programs, mistakes explained."""

import json
from pathlib import Path

import pytest

from tests.cli.program import Ran, paceline

TIMES = "forward_s: 0.001\ninput_s: 0.001\nweight_s: 0.001\ntransfer_s: 0\n"
FOUR = ("launch.nproc=4", "launch.device=cpu", "train.micro_batch_size=16")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    (tmp_path / "times.yaml").write_text(TIMES)
    return tmp_path


def plan(*arguments: str, cwd: Path) -> Ran:
    return paceline("plan", "lm_tiny", *FOUR, *arguments, cwd=cwd, XDG_CACHE_HOME=str(cwd))


def test_a_table_of_schedules(given: Path) -> None:
    """lm_tiny has four blocks: schedules with two stages a rank need eight."""
    ran = plan("--schedule", "all", "--times", "times.yaml", cwd=given)
    assert ran.code == 0, ran.err
    assert "lm_tiny: 4 blocks on 4 ranks, 16 microbatches of 1 sample" in ran.out
    assert "times             given     given in times.yaml" in ran.out
    lines = {line.split()[0]: line for line in reversed(ran.out.splitlines()) if line.strip()}
    assert "= 15.8% (P-1)/(M+P-1)" in lines["1f1b"] and "57 ms" in lines["1f1b"]
    assert "49 ms" in lines["dualpipe"] and "parameters held twice" in lines["dualpipe"]
    assert "zbv is refused: zbv: 8 stages of a model of 4 blocks" in ran.out
    assert "for a bubble of at most 10 %: dualpipe needs M=8, 1f1b needs M=27" in ran.out
    assert "rank 3  f8 " in ran.out
    assert not (given / "runs").exists()


def test_one_record(given: Path) -> None:
    words = ("--schedule", "1f1b,dualpipe", "--times", "times.yaml", "--bubble", "0.2", "--json")
    ran = plan(*words, cwd=given)
    body = json.loads(ran.out)
    rows = {row["name"]: row for row in body["schedules"]}
    assert rows["1f1b"]["bubble"] == pytest.approx(3 / 19)
    assert rows["dualpipe"]["step_s"] <= rows["1f1b"]["step_s"]
    assert rows["1f1b"]["needed"]["num_microbatches"] == 12  # 3 / (12 + 3)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--schedule", "1f1"], 2, "there is no schedule 1f1\nhint: did you mean 1f1b?"),
        (["--schedule", "all", "--times", "no.yaml"], 2, "cannot read no.yaml"),
        (["--schedule", "all", "--times", "short.yaml"], 2, "has 3 values, and the model has 4"),
        (["--schedule", "all", "--times", "."], 4, "is not a run directory"),
        (["--schedule", "all", "--bubble", "2"], 2, "--bubble 2 is not a share"),
        (["--schedule", "all", "--launch"], 2, "strategy.schedule=NAME"),
        (["--times", "times.yaml"], 2, "add --schedule all"),
        (["--schedule", "all", "launch.nproc=1"], 2, "set launch.nproc to 2 or more"),
    ],
)
def test_mistakes(arguments: list[str], code: int, says: str, given: Path) -> None:
    (given / "short.yaml").write_text(TIMES.replace("0.001", "[1, 2, 3]", 1))
    ran = plan(*arguments, cwd=given)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err and "Traceback" not in ran.err


def test_where_nothing_can_run_the_reasons_are_printed_first(given: Path) -> None:
    ran = plan("--schedule", "all", "launch.nproc=5", cwd=given)
    assert ran.code == 2 and "no schedule of those asked for" in ran.err
    assert "1f1b is refused: 1f1b: 5 stages of a model of 4 blocks" in ran.out
    assert "set launch.nproc to 4" in ran.out
