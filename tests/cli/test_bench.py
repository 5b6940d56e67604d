"""`paceline bench` and `paceline compare` on the real program."""

import json
from pathlib import Path

import pytest

from paceline.bench.target import load_targets
from tests.cli.program import paceline

SMALL = ("model.dim=96", "model.num_layers=2", "launch.device=cpu")


@pytest.mark.slow
def test_list_says_what_differs_and_what_can_run_here(tmp_path: Path) -> None:
    ran = paceline("bench", "list", "--json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ran.code == 0, ran.err
    rows = {row["name"]: row for row in json.loads(ran.out)}
    assert list(rows) == list(load_targets())
    assert rows["zero3"]["goal"] == "memory" and rows["ddp_bucket"]["goal"] == "speed"
    assert list(rows["ddp_bucket"]["arms"]) == ["25 MB", "50 MB", "100 MB"]
    assert "labs/train_distributed:zero3" in rows["zero3"]["aliases"]
    assert rows["zero3"]["equal"]["optimizer"] == "adamw"
    some = paceline("bench", "list", "train_distributed", cwd=tmp_path, CUDA_VISIBLE_DEVICES="").out
    assert "symmem_training: " in some and "fused_adamw: " not in some
    shown = paceline("bench", "list", cwd=tmp_path, CUDA_VISIBLE_DEVICES="").out
    assert "differs  strategy.bucket_mb: more gradients in one all-reduce" in shown
    assert "here     runs" in shown and list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_pair_its_files_its_gate_and_compare(tmp_path: Path) -> None:
    words = ("bench", "run", "labs/train_distributed:zero3", *SMALL, "--steps", "10")
    ran = paceline(
        *words, "--repeats", "2", "--out", "b", "--save-expectations", "kept", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (pair,) = json.loads(ran.out)["pairs"]
    ddp, zero3 = pair["arms"]
    assert (ddp["name"], zero3["name"], pair["status"]) == ("ddp", "zero3", "ok")
    assert len(zero3["rates"]) == len(zero3["peak_bytes"]) == 2
    assert zero3["speedup"]["low"] < zero3["speedup"]["value"] < zero3["speedup"]["high"]
    assert 0 < zero3["loss_difference"] < 1e-3 and ddp["loss_difference"] == 0
    assert zero3["startup_s"] > 0, "told apart from the rate"
    assert (tmp_path / "b/summary.md").is_file() and (tmp_path / "b/zero3/report.html").is_file()
    (kept,) = (tmp_path / "kept").glob("expectations_*.json")
    text = kept.read_text()
    again = paceline(
        *words, "--repeats", "2", "--out", "b", "--check-expectations", "kept", cwd=tmp_path
    )
    assert again.code == 0, again.err
    assert again.out.count("of what is stored") == 5, "the very runs that were stored"
    assert "WORSE" not in again.out
    assert len(list((tmp_path / "b/zero3/runs").iterdir())) == 4, "nothing ran twice"
    other = paceline(*words, "train.seed=1", "--check-expectations", "kept", cwd=tmp_path)
    assert other.code == 2 and "another config: train.seed: 0 -> 1" in other.err
    assert kept.read_text() == text
    compared = paceline("compare", "b/zero3:ddp", "b/zero3:zero3", cwd=tmp_path)
    assert compared.code == 0, compared.err
    assert compared.out.startswith("config: strategy.name: ddp | zero3\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_fails_fails_the_pair(tmp_path: Path) -> None:
    words = ("fused_adamw", *SMALL, "--repeats", "1", "--steps", "8", "--out", "b")
    ran = paceline("bench", "run", *words, "optim.lr=1e30", cwd=tmp_path)
    assert ran.code == 1
    assert "fused_adamw: failed: many: repeat 1: nan (exit 7)" in ran.out
    assert "0 of 1 pairs ok, 1 failed" in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["bench", "run", "zero4"], 2, "there is no target 'zero4'\nhint: did you mean zero"),
        (["bench", "run", "ddp", "optim.fused=on"], 2, "optim.fused is what ddp compares"),
        (["bench", "run", "ddp", "zero1:train.seed=1"], 2, "not among the targets"),
        (["bench", "run", "ddp", "train.stps=3"], 2, "did you mean train.steps?"),
        (["bench", "run", "ddp", "--check-expectations", "x"], 2, "nothing is stored for this"),
        (["bench", "rum"], 2, "run"),
        (["compare", "nowhere", "here"], 4, "nowhere is not a run directory"),
        (["compare", "x", "y", "--metric", "speed"], 2, "'speed' is not a metric"),
    ],
)
def test_mistakes_are_one_clear_message(
    arguments: list[str], code: int, says: str, tmp_path: Path
) -> None:
    ran = paceline(*arguments, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err and "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []
