"""`paceline check` as users run it: a table, JSON, findings, exit codes 0 and 3."""

import json
import time
from pathlib import Path

import pytest

from tests.cli.program import Ran, free_port, paceline


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    folder = tmp_path_factory.mktemp("check")
    ran = paceline(
        "check", "launch.nproc=2", "launch.device=cpu", "--json", "--out", "check", cwd=folder,
        XDG_CACHE_HOME=str(folder / "cache"), NCCL_TIMEOUT="1800",
    )  # fmt: skip
    return ran, folder


@pytest.mark.slow
def test_a_fit_machine_is_exit_0_with_every_part_in_it(checked: tuple[Ran, Path]) -> None:
    ran, folder = checked
    report = json.loads(ran.out)
    assert ran.code == 0 and report["fit"], ran.out
    assert report == json.loads((folder / "check/check.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    group = report["group"]
    assert group["correctness"]["wrong"] == [] and group["correctness"]["num_cases"] > 100
    ops = {speed["op"] for speed in group["speeds"]}
    assert ops == {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv",
    }  # fmt: skip
    assert {s["num_bytes"] for s in group["speeds"]} >= {8, 2**20, 2**24}
    assert len(group["pairs"]) == 1 and group["pairs"][0]["gb_per_s"] > 0
    assert {rate["what"] for rate in report["ranks"][0]["rates"]} == {"matmul", "copy"}


@pytest.mark.slow
def test_lint_is_part_of_it(checked: tuple[Ran, Path]) -> None:
    findings = json.loads(checked[0].out)["findings"]
    (found,) = [finding for finding in findings if finding["where"] == "NCCL_TIMEOUT"]
    assert found["severity"] == "warning" and "launch.collective_timeout_s" in found["hint"]


@pytest.mark.slow
def test_a_later_run_tells_its_share_of_what_was_measured(checked: tuple[Ran, Path]) -> None:
    folder = checked[1]
    ran = paceline(
        "train", "lm_tiny", "data.source=synthetic", "train.steps=12", "launch.nproc=2",
        "launch.device=cpu", "--json", "--out", "run", cwd=folder,
        XDG_CACHE_HOME=str(folder / "cache"),
    )  # fmt: skip
    assert 0 < json.loads(ran.out)["matmul_share"] < 1
    assert "of the matmul rate" in (folder / "run/report.html").read_text()


@pytest.mark.slow
def test_one_rank_says_that_it_proves_little(tmp_path: Path) -> None:
    ran = paceline(
        "check", "launch.nproc=1", "launch.device=cpu", "--snapshot", "snap", cwd=tmp_path
    )
    assert ran.code == 0 and "proves little" in ran.out
    assert {"git_sha.txt", "collect_env.txt"} <= {p.name for p in (tmp_path / "snap").iterdir()}
    assert "PyTorch version" in (tmp_path / "snap/collect_env.txt").read_text()


@pytest.mark.slow
def test_an_unfit_machine_is_exit_3_and_says_what_to_do(tmp_path: Path) -> None:
    ran = paceline(
        "check", "launch.nproc=2", "launch.device=cpu", cwd=tmp_path,
        NCCL_ALGO="TREE or RING", NCCL_SOCKET_IFNAM="eth0",
    )  # fmt: skip
    assert ran.code == 3 and "not fit" in ran.out
    assert "error: NCCL_ALGO" in ran.out
    assert "NCCL_SOCKET_IFNAME" in ran.out, "the misspelt one is named by its right name"


def test_what_cannot_start_is_exit_3_with_the_lint(tmp_path: Path) -> None:
    ran = paceline(
        "check", "launch.backend=nccl", "launch.device=cpu", cwd=tmp_path, NCCL_TIMEOUT="9"
    )
    assert ran.code == 3 and "nccl moves data between GPUs" in ran.out
    assert "NCCL_TIMEOUT" in ran.out


def test_only_launch_keys_are_taken(tmp_path: Path) -> None:
    ran = paceline("check", "train.steps=5", cwd=tmp_path)
    assert ran.code == 2 and "unknown key train.steps" in ran.err


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    started_at = time.monotonic()
    ran = paceline(
        "check", "launch.start_s=2", "launch.device=cpu", cwd=tmp_path, RANK="0", WORLD_SIZE="2",
        LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert ran.code == 5 and "ranks never came: 1" in ran.err
    assert time.monotonic() - started_at < 30
