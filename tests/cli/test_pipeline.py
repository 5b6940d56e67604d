"""A pipeline on the real program: what it leaves in the run directory, and that it is true."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Ran, paceline

SMALL = [
    "lm_tiny", "strategy.name=pipeline", "launch.nproc=2", "data.source=synthetic",
    "train.eval_every=off", "train.steps=6", "train.micro_batch_size=8", "train.grad_accum=2",
    "strategy.microbatches=8", "checkpoint.at_end=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    folder = tmp_path_factory.mktemp("pipeline")
    return paceline("train", *SMALL, "--out", "run", cwd=folder), folder / "run"


def facts_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text())["pipeline"])


def test_every_rank_accounts_for_its_time(trained: tuple[Ran, Path]) -> None:
    ran, run = trained
    assert ran.code == 0, ran.err
    facts = facts_of(run)
    assert facts["schedule"] == "1f1b" and facts["num_microbatches"] == 8
    for rank in facts["ranks"]:
        parts = rank["busy_s"] + rank["bubble_s"] + rank["communication_s"]
        assert parts == pytest.approx(facts["pass_s"], rel=1e-6)
        assert rank["busy_s"] > 0 and 0 < rank["utilisation"] <= 1


def test_1f1b_never_holds_more_than_the_stages_behind_it(trained: tuple[Ran, Path]) -> None:
    for rank in facts_of(trained[1])["ranks"]:
        assert rank["max_in_flight"] == 2 - rank["rank"] == rank["in_flight_limit"]


def test_every_action_is_in_the_timeline_once(trained: tuple[Ran, Path]) -> None:
    events = json.loads((trained[1] / "timeline.json").read_text())["traceEvents"]
    drawn = [
        (e["pid"], e["cat"], e["args"]["stage"], e["args"]["microbatch"])
        for e in events
        if e["ph"] == "X"
    ]
    expected = [(rank, kind, rank, m) for rank in (0, 1) for kind in "FB" for m in range(8)]
    assert sorted(drawn) == sorted(expected)


def test_the_page_draws_it_measured_above_simulated(trained: tuple[Ran, Path]) -> None:
    page = (trained[1] / "report.html").read_text()
    section = page[page.index("Pipeline") :]
    assert section.index("measured, step") < section.index("simulated")
    assert ">F7<" in section and ">B7<" in section


def test_the_audit_shows_that_the_schedule_ran(trained: tuple[Ran, Path]) -> None:
    proofs = json.loads((trained[1] / "audit.json").read_text())["proofs"]
    (proof,) = [p for p in proofs if p["what"] == "pipeline schedule"]
    assert proof["ok"] and "16 actions in that order" in proof["effective"]


def test_losses_are_those_of_one_rank(trained: tuple[Ran, Path], tmp_path: Path) -> None:
    one = [word for word in SMALL if not word.startswith(("strategy.", "launch."))]
    ran = paceline("train", *one, "--out", "run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    alone, piped = (
        json.loads((d / "result.json").read_text()) for d in (tmp_path / "run", trained[1])
    )
    assert piped["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-4)


def test_the_plan_shows_stages_and_refuses_with_the_nearest(tmp_path: Path) -> None:
    ran = paceline("plan", *SMALL, cwd=tmp_path)
    assert ran.code == 0 and "stage 1" in ran.out and "blocks" in ran.out
    bad = ["strategy.schedule=dualpipe", "strategy.microbatches=3", "train.micro_batch_size=7"]
    ran = paceline("plan", *SMALL, *bad, cwd=tmp_path)
    assert ran.code == 2
    assert "strategy.microbatches to 4" in ran.err and "train.micro_batch_size" in ran.err
