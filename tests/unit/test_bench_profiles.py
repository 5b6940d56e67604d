"""`bench run --profile`: each arm once more, short and profiled, beside the runs that count."""

import gzip
import json
from pathlib import Path

from paceline.bench.profiles import STEPS, profiled_record, take_profiles
from paceline.bench.records import PairResult
from paceline.bench.words import profile_lines
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.sweep.folder import Row

RECORD = SweepRecord(
    mode="bench", recipe="lm_tiny", overrides=[], axes={},
    cells=[
        SweptCell(name="many", settings={"optim.fused": "off"}, overrides=["optim.fused=off"]),
        SweptCell(name="fused", settings={"optim.fused": "on"}, overrides=["optim.fused=on"]),
    ],
    phases=[SweptPhase(name="", cells=["many", "fused"], repeats=5, steps=60)],
    metric="tokens_per_s", margin=0.02, baseline="many", seed=0, loss_tolerance=1.0,
)  # fmt: skip


def test_each_arm_is_run_once_more_and_profiled() -> None:
    asked = profiled_record(RECORD, "full")
    assert (asked.phases[0].repeats, asked.phases[0].steps) == (1, STEPS)
    assert asked.cell("fused").overrides == [
        "optim.fused=on", "observe.profile=steps:6-8", "observe.profile_detail=full",
        "observe.memory=snapshot",
    ]  # fmt: skip
    assert profiled_record(RECORD, "minimal").cell("many").overrides[1:] == [
        "observe.profile=steps:6-8"
    ]


def test_what_a_trace_tells_stands_with_its_arm(tmp_path: Path) -> None:
    def run_rows(record: SweepRecord, root: Path) -> list[Row]:
        run = RunDir(root / "runs" / "fused_r1")
        run.profiles.mkdir(parents=True)
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100, "pid": 1}]
        packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (run.profiles / "rank0_steps6-8.json.gz").write_bytes(packed)
        row = {"group": "fused", "status": "success", "run_dir": "runs/fused_r1", "outcome": "ok"}
        return [row, {**row, "group": "many", "status": "failed", "outcome": "crashed"}]

    profiles = take_profiles(RECORD, tmp_path / "fused_adamw", "minimal", run_rows)
    fused, many = profiles
    assert fused.trace == "fused_adamw/profiled/runs/fused_r1/profiles/rank0_steps6-8.json.gz"
    assert list(fused.categories) == ["matrix products"] and fused.top[0].name == "aten::mm"
    assert many.because == "its run ended as crashed"
    pair = PairResult(
        target="t", title="", goal="speed", status="ok", device="cpu", profiles=profiles
    )
    first, second = profile_lines(pair)
    assert first.startswith("- fused, profiled: ") and "matrix products 100%" in first
    assert second == "- many, profiled: no profile: its run ended as crashed"
