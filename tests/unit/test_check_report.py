"""The report of a check: what the table shows is in the record, and printing reads no machine."""

import json

import pytest

from paceline.check.judge import expect
from paceline.check.records import CheckReport, GroupCheckup, RankCheckup
from paceline.cli import check as cli
from paceline.machine import facts
from paceline.machine.measures import CopyRate, Correctness, MatmulRate, PairSpeed
from paceline.records import Env, Link
from tests.machines import machine as env
from tests.machines import plan


def machine() -> Env:
    """Two H200 with 18 NVLinks between them."""
    return env(num_gpus=2).model_copy(
        update={"links": [Link(a=0, b=1, kind="nvswitch", nvlinks=18)]}
    )


def rank(number: int, device: str = "NVIDIA H200") -> RankCheckup:
    rates = [
        MatmulRate(precision="bf16", side=8192, tflop_per_s=685.0, best_tflop_per_s=690.0),
        MatmulRate(precision="tf32", side=8192, tflop_per_s=400.0, best_tflop_per_s=401.0),
        CopyRate(num_bytes=2**30, gb_per_s=4234.0, best_gb_per_s=4300.0),
    ]
    return RankCheckup(
        rank=number, local_rank=number, host="box", device=device, device_id=f"GPU-{number}",
        cores=16, python="3.11", torch="2.13", cuda="13.0", network_gb_per_s=None, rates=rates,
    )  # fmt: skip


def report(*ranks: RankCheckup) -> CheckReport:
    asked = plan(machine=machine())
    answers = Correctness(
        backend="nccl", world_size=2, num_cases=202, apis={}, wrong=[], lacking=[]
    )
    pair = PairSpeed(a=0, b=1, num_bytes=2**24, one_way_s=1e-4, gb_per_s=380.0)
    return CheckReport(
        run_dir="runs/check", fit=True, exit_code=0, crew=asked.crew, ranks=list(ranks),
        group=GroupCheckup(correctness=answers, speeds=[], pairs=[pair], clocks=[]),
        expected=expect(ranks, machine()), findings=[], elapsed_s=1.0,
    )  # fmt: skip


def test_expectations_are_in_the_record() -> None:
    body = json.loads(report(rank(0), rank(1)).to_json())
    first, second = body["expected"]["devices"]
    assert body["schema"] == 2 and (first["rank"], second["rank"]) == (0, 1)
    assert first["matmul_tflops"] == {"bf16": 989.4, "tf32": 494.7}
    assert first["copy_gb_per_s"] == 4800
    assert body["expected"]["link"]["gb_per_s"] == 450  # 18 x 25


def test_nothing_is_expected_of_what_no_sheet_knows() -> None:
    expected = expect([rank(0, "NVIDIA Weird 9000")], env(1, name="NVIDIA Weird 9000"))
    assert expected.devices == [] and expected.link is None


def test_printing_reads_the_record_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = CheckReport.model_validate_json(report(rank(0), rank(1)).model_dump_json())
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(facts, "probe", lambda: pytest.fail("the printer probes the machine"))
    cli._print(made)
    shown = " ".join(capsys.readouterr().out.split())
    assert "bf16 685 of 989 TFLOP/s" in shown and "tf32 400 of 495 TFLOP/s" in shown
    assert "4,234 of about 4800 GB/s" in shown and "380 of about 450" in shown
