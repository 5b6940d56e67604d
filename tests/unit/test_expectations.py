"""A bench with runs whose figures are known: its verdicts, its failures, and the gate of CI."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.expectations import Expectations, hardware_of, key_of
from paceline.bench.records import BenchReport
from paceline.bench.runner import BenchSettings, PairRunner, Ran, run_bench
from paceline.bench.target import parse_words
from paceline.bench.words import headline, rows_of
from paceline.errors import ConfigError, DataError, LaunchError, Outcome
from paceline.machine.facts import probe
from paceline.records.swept import SweepRecord
from tests.machines import machine
from tests.measured import NUM_STEPS, make_row, make_run

NOISE = (1.0, 1.004, 0.997, 1.002)
Truth = dict[str, dict[str, Any]]
SETTINGS = BenchSettings(repeats=4, steps=NUM_STEPS)


def runner(truth: Truth) -> PairRunner:
    """Instead of training: runs with the figures of `truth`, by arm."""

    def run_pair(record: SweepRecord, root: Path) -> Ran:
        rows = []
        for cell in record.cells:
            facts = {"step_s": 0.1, "ok": Outcome.OK} | truth.get(cell.name, {})
            outcome, step_s = facts.pop("ok"), facts.pop("step_s")
            for repeat in range(1, record.phases[0].repeats + 1):
                place = f"runs/{cell.name}_{repeat}-{len(list(root.rglob('run.yaml')))}"
                words = [*record.overrides, *cell.overrides]
                make_run(root / place, words, step_s * NOISE[repeat - 1], outcome=outcome, **facts)
                rows.append(make_row(cell.name, repeat, place, outcome))
        return Ran(rows)

    return run_pair


def run_fake(out: Path, truth: Truth, *words: str, **more: Any) -> BenchReport:
    asked = parse_words([*(words or ("fused_adamw",)), "launch.device=cpu"])
    settings = replace(SETTINGS, out=out, **more)
    return run_bench(asked, settings, runner(truth), lambda text: None)


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., BenchReport]:
    counter = iter(range(100))
    return lambda *words, **more: run_fake(tmp_path / f"b{next(counter)}", *words, **more)


def test_two_runs_show_a_number_and_no_interval(bench: Callable[..., BenchReport]) -> None:
    """The interval of two runs is honest and so wide that it reads as nonsense."""
    report = bench({"fused": {"step_s": 0.08}}, repeats=2)
    said = headline(report.pairs[0])
    assert "1.250 (no interval from 2 runs)" in said and " to " not in said
    row = next(row for row in rows_of(report.pairs[0]) if row[0] == "fused")
    assert "(" not in row[1]


def test_a_faster_arm_and_its_files(bench: Callable[..., BenchReport]) -> None:
    report = bench({"fused": {"step_s": 0.08}})
    (pair,) = report.pairs
    arm = pair.arm("fused")
    assert (report.exit_code, pair.status, arm.verdict) == (0, "ok", "faster")
    assert arm.speedup is not None and arm.speedup.low < 1.25 < arm.speedup.high
    assert arm.loss_difference == 0 and pair.arm("many").verdict == ""
    assert arm.step_s_p50 == pytest.approx(0.08, 0.01) and arm.step_s_p90 is not None
    assert pair.equal["samples per step"] == "1" and pair.differs.keys() == {"optim.fused"}
    assert BenchReport.load(Path(report.out) / "bench.json") == report
    assert "1.25" in headline(pair) and "faster" in (Path(report.out) / "summary.md").read_text()


def test_a_slower_arm_is_a_result_and_is_not_clamped(bench: Callable[..., BenchReport]) -> None:
    report = bench({"fused": {"step_s": 0.2}})
    arm = report.pairs[0].arm("fused")
    assert report.exit_code == 0 and arm.verdict == "slower"
    assert arm.speedup is not None and arm.speedup.high < 0.52


def test_a_crash_is_a_failure(bench: Callable[..., BenchReport]) -> None:
    report = bench({"fused": {"step_s": 0.001, "ok": Outcome.CRASHED}})
    (pair,) = report.pairs
    assert report.exit_code == 1 and pair.status == "failed"
    assert "fused: repeat 1: crashed (exit 5)" in pair.because
    assert pair.arm("fused").speedup is None and pair.arm("many").rate is not None


def test_losses_must_agree(bench: Callable[..., BenchReport]) -> None:
    report = bench({"fused": {"step_s": 0.05, "loss": 3.1}})
    assert report.exit_code == 1
    assert "losses differ by 0.033 of the baseline's; 0.001 is allowed" in report.pairs[0].because


def test_a_memory_goal_is_judged_by_memory(bench: Callable[..., BenchReport]) -> None:
    truth = {"zero3": {"step_s": 0.15, "peak_reserved_bytes": 2**28}}
    (pair,) = bench(truth, "zero3").pairs
    arm = pair.arm("zero3")
    assert (pair.goal, arm.memory_verdict, arm.verdict) == ("memory", "less memory", "slower")
    assert arm.memory_ratio is not None and arm.memory_ratio.low < 2.0 < arm.memory_ratio.high
    assert "zero3 less memory: the baseline holds 2.000" in headline(pair)


def test_isolation_is_by_device(bench: Callable[..., BenchReport]) -> None:
    (pair,) = bench({"group": {"step_s": 0.125, "loss": 9.0}}, "single_gpu_isolation").pairs
    arm = pair.arm("group")
    assert pair.status == "ok" and pair.loss_tolerance is None, "losses are not compared"
    # Two ranks take twice the samples in 1.25 of the time: 0.8 a device.
    assert arm.speedup is not None and arm.speedup.value == pytest.approx(0.8, 0.01)
    assert "scaling efficiency 0.80" in headline(pair)


def test_skipped_targets_have_a_reason_and_do_not_fail(bench: Callable[..., BenchReport]) -> None:
    report = bench({}, "ddp_flash", "fused_adamw")
    assert [pair.status for pair in report.pairs] == ["skipped", "ok"] and report.exit_code == 0
    assert "ranks are on CPU" in report.pairs[0].because


def test_a_pair_that_cannot_start_does_not_stop_the_others(tmp_path: Path) -> None:
    calls: list[str] = []

    def run_pair(record: SweepRecord, root: Path) -> Ran:
        calls.append(root.name)
        if root.name == "ddp":
            raise LaunchError("no ranks")
        return runner({})(record, root)

    asked = parse_words(["ddp", "fused_adamw", "launch.device=cpu"])
    report = run_bench(asked, replace(SETTINGS, out=tmp_path / "b"), run_pair, calls.append)
    assert [pair.status for pair in report.pairs] == ["failed", "ok"] and report.exit_code == 1


def test_a_stop_leaves_what_there_is(tmp_path: Path) -> None:
    def run_pair(record: SweepRecord, root: Path) -> Ran:
        rows = runner({})(record, root).rows
        return Ran([row for row in rows if row["repeat"] == "1"], "interrupted")

    asked = parse_words(["fused_adamw", "ddp", "launch.device=cpu"])
    report = run_bench(asked, replace(SETTINGS, out=tmp_path / "b"), run_pair, print)
    assert report.exit_code == 130 and len(report.pairs) == 1
    assert report.pairs[0].status == "stopped"
    assert report.pairs[0].because == "interrupted before all runs had ended"


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not the directory of a bench"):
        run_bench(parse_words(["ddp"]), replace(SETTINGS, out=tmp_path), runner({}), print)


# The gate.


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    report = run_fake(folder / "b", {"fused": {"step_s": 0.08}}, save=folder / "kept")
    assert report.saved == str(folder / "kept" / f"expectations_{key_of(probe())}.json")
    return folder / "kept"


@pytest.fixture
def stored(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "kept")


def test_what_is_stored(stored: Path) -> None:
    found = Expectations.find(stored, probe())
    arm = found.pairs["fused_adamw"].arms["fused"]
    assert len(arm.rates) == len(arm.peak_bytes) == 4
    assert arm.fingerprints.code == "k" and arm.config["optim.fused"] == "on"
    assert found.hardware == hardware_of(probe())


@pytest.mark.parametrize(
    ("truth", "worse"),
    [
        ({"fused": {"step_s": 0.08}}, set()),
        ({"fused": {"step_s": 0.06}}, set()),  # better is no failure
        ({"fused": {"step_s": 0.081}}, set()),  # worse, but inside the margin
        ({"fused": {"step_s": 0.09}}, {("fused", "rate"), ("fused", "speedup")}),
        ({"many": {"step_s": 0.09}, "fused": {"step_s": 0.08}}, {("fused", "speedup")}),
        (
            {"fused": {"step_s": 0.08, "peak_reserved_bytes": 5 * 2**27}},
            {("fused", "memory")},
        ),
    ],
)
def test_the_gate_fails_only_on_what_is_shown_worse(
    bench: Callable[..., BenchReport], stored: Path, truth: Truth, worse: set[tuple[str, str]]
) -> None:
    before = [path.read_text() for path in stored.iterdir()]
    report = bench(truth, check=stored)
    assert {(row.arm, row.what) for row in report.gate if row.is_worse} == worse
    assert report.exit_code == (1 if worse else 0) and len(report.gate) == 5
    assert [path.read_text() for path in stored.iterdir()] == before, "nothing is overwritten"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fused_adamw", "train.seed=1"], "another config: train.seed: 0 -> 1"),
        (["fused_adamw", "fused_adamw:train.steps=30"], "train.steps: 40 -> 30"),
        (["ddp"], "ddp is not stored"),
    ],
)
def test_other_work_is_refused_before_it_runs(
    bench: Callable[..., BenchReport], stored: Path, words: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        bench({}, *words, check=stored)


def test_other_hardware_other_data_and_single_runs_are_refused(
    bench: Callable[..., BenchReport], stored: Path
) -> None:
    (file,) = stored.iterdir()
    with pytest.raises(ConfigError, match="nothing is stored for this hardware; there are expect"):
        Expectations.find(stored, machine(8))
    body = json.loads(file.read_text())
    body["hardware"]["cores"] = "999"
    other = stored / "other.json"
    other.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="of other hardware.*\n.*cores: 999 -> "):
        bench({}, check=other)
    prints = {"config": "c", "code": "k", "data": "another", "hardware": "h"}
    with pytest.raises(ConfigError, match="trained on other data"):
        bench({"many": {"fingerprints": prints}}, check=stored)
    with pytest.raises(ConfigError, match="1 run per side cannot tell a difference"):
        bench({}, check=stored, repeats=1)


def test_saving_keeps_the_other_pairs_and_saves_no_failure(
    bench: Callable[..., BenchReport], stored: Path
) -> None:
    bench({}, "ddp", save=stored)
    both = Expectations.find(stored, probe())
    assert both.pairs.keys() == {"fused_adamw", "ddp"}
    report = bench({"tuned": {"loss": 4.0}}, "ddp", save=stored)
    assert report.exit_code == 1 and report.saved == ""
    assert Expectations.find(stored, probe()) == both


def test_keys_name_the_hardware() -> None:
    assert key_of(machine(8)) == "8x_nvidia_h200" and key_of(machine(1)) == "nvidia_h200"
    assert key_of(machine()) == "cpu_16_a_cpu"


@pytest.mark.parametrize(
    "change",
    [
        {"rates": []}, {"rates": [0.0, 1.0]}, {"rates": [-1.0]}, {"rates": None},
        {"peak_bytes": [0]},
    ],
)  # fmt: skip
def test_expectations_that_no_run_gave_are_damaged(
    bench: Callable[..., BenchReport], tmp_path: Path, change: dict[str, Any]
) -> None:
    bench({}, save=tmp_path)
    file = next(tmp_path.glob("expectations_*.json"))
    body = json.loads(file.read_text())
    body["pairs"]["fused_adamw"]["arms"]["many"] |= change
    file.write_text(json.dumps(body))
    with pytest.raises(DataError, match="expectations_.*is damaged"):
        bench({}, check=tmp_path)


def test_expectations_name_a_baseline_that_they_have(
    bench: Callable[..., BenchReport], tmp_path: Path
) -> None:
    bench({}, save=tmp_path)
    file = next(tmp_path.glob("expectations_*.json"))
    file.write_text(file.read_text().replace('"baseline": "many"', '"baseline": "other"'))
    with pytest.raises(DataError, match="its baseline other is none of its arms"):
        bench({}, check=tmp_path)


@pytest.mark.parametrize("rates", [[1e-9, 1e9], [1e-30, 1e30]])
def test_the_wildest_noise_has_an_interval(
    bench: Callable[..., BenchReport], tmp_path: Path, rates: list[float]
) -> None:
    bench({}, save=tmp_path)
    file = next(tmp_path.glob("expectations_*.json"))
    body = json.loads(file.read_text())
    body["pairs"]["fused_adamw"]["arms"]["many"]["rates"] = rates
    file.write_text(json.dumps(body))
    report = bench({}, check=tmp_path)
    assert report.exit_code == 0 and len(report.gate) > 0, "nothing is shown to be worse"
