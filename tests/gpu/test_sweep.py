"""Sweeps and benches on one GPU: kernels that only a GPU has, memory as its allocator counts it."""

import csv
import json
from pathlib import Path

import pytest

from tests.cli.program import paceline
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    needs_gpu,
]


@pytest.mark.serial
def test_a_sweep_finds_the_larger_batch(tmp_path: Path) -> None:
    words = ["--axis", "train.micro_batch_size=1,8", "--repeats", "2", "--steps", "40"]
    more = ["data.source=synthetic", "train.compile=off", "model.num_layers=4", "--out", "sweep"]
    ran = paceline("sweep", "lm_125m", *words, *more, "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["winner"] == "micro_batch_size=8"
    with (tmp_path / "sweep/ranked_groups.csv").open() as file:
        rows = {row["group"]: row for row in csv.DictReader(file)}
    small, large = rows["micro_batch_size=1"], rows["micro_batch_size=8"]
    assert small["verdict"] == "slower" and small["gpu_name"] != "n/a"
    assert float(large["peak_bytes"]) > float(small["peak_bytes"]) > 2**20


@pytest.mark.parametrize("target", ["sdpa_backends", "fused_adamw"])
def test_a_target_runs(target: str, tmp_path: Path) -> None:
    words = ["--repeats", "2", "--steps", "12", "data.source=synthetic", "--out", "bench", "--json"]
    ran = paceline("bench", "run", target, *words, cwd=tmp_path)
    assert ran.code == 0, ran.err
    (pair,) = json.loads(ran.out)["pairs"]
    assert pair["status"] == "ok" and len(pair["arms"]) >= 2


def test_flash_against_eager_on_two_ranks_of_one_gpu(tmp_path: Path) -> None:
    shared = ["launch.nproc=2", "launch.devices=[0,0]", "launch.backend=gloo"]
    words = ["--repeats", "2", "--steps", "12", "data.source=synthetic", "--out", "bench", "--json"]
    ran = paceline("bench", "run", "ddp_flash", *shared, *words, cwd=tmp_path)
    assert ran.code == 0, ran.err
    (pair,) = json.loads(ran.out)["pairs"]
    assert pair["status"] == "ok", pair
