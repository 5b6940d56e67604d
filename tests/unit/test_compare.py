"""`paceline compare` on runs whose figures are known."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.compare import Comparison, compare_sides, open_side
from paceline.errors import ConfigError, DataError, Outcome
from paceline.sweep.folder import save_manifest
from tests.machines import machine
from tests.measured import make_row, make_run
from tests.sweeps import draw_cell, draw_record


def compare(*sides: Path | str, margin: float = 0.02) -> Comparison:
    return compare_sides([open_side(str(side)) for side in sides], None, margin)


def group(folder: Path, *step_s: float, words: tuple[str, ...] = ()) -> Path:
    for number, each in enumerate(step_s):
        make_run(folder / f"r{number}", words, step_s=each)
    return folder


def test_groups_give_a_verdict_with_an_interval(tmp_path: Path) -> None:
    slow = group(tmp_path / "slow", 0.1, 0.101, 0.1005)
    fast = group(tmp_path / "fast", 0.08, 0.0805, 0.081, words=("optim.fused=off",))
    found = compare(slow, fast)
    first, second = found.sides
    assert (first.verdict, second.verdict) == ("baseline", "faster")
    assert found.metric == "tokens_per_s" and second.num_runs == 3
    assert second.speedup is not None and second.speedup[1] < 100.5 / 80.5 < second.speedup[2]
    assert [(apart.kind, apart.what, apart.values) for apart in found.differences] == [
        ("config", "optim.fused", ["auto", "off"])
    ]


def scored(folder: Path, *scores: float) -> Path:
    """Runs with other seeds; each ends with another accuracy than its best one."""
    for number, score in enumerate(scores):
        words = [f"train.seed={number}"]
        run = make_run(folder / f"r{number}", words, metrics={"val/accuracy": score - 0.1})
        head, *lines = run.training.read_text().splitlines()
        cells = {20: score, 40: score - 0.1}
        rows = [f"{line},{cells.get(n, '')}" for n, line in enumerate(lines, 1)]
        run.training.write_text("\n".join([f"{head},val/accuracy", *rows]) + "\n")
    return folder


def test_runs_are_compared_by_what_they_learned(tmp_path: Path) -> None:
    sides = [scored(tmp_path / "a", 0.5, 0.51, 0.505), scored(tmp_path / "b", 0.9, 0.91, 0.905)]
    opened = [open_side(str(side)) for side in sides]
    found = compare_sides(opened, "val/accuracy:max", 0.02)
    assert [side.verdict for side in found.sides] == ["baseline", "better"] and not found.notes
    assert found.sides[1].values == [0.9, 0.91, 0.905], "the best evaluation of each"
    assert found.sides[1].metrics == {"val/accuracy": pytest.approx(0.805)}, "the last of each"
    assert compare_sides(opened, "val/accuracy:min", 0.02).sides[1].verdict == "worse"
    with pytest.raises(DataError, match=r"no run with val/wer:min .*\n.*train/loss, val/accuracy"):
        compare_sides(opened, "val/wer:min", 0.02)


def test_the_same_runs_do_not_differ(tmp_path: Path) -> None:
    found = compare(group(tmp_path / "a", 0.1, 0.1002), group(tmp_path / "b", 0.1001, 0.1))
    assert found.differences == [] and found.sides[1].verdict == "no difference seen"


def test_one_run_a_side_is_not_enough_but_is_shown(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, step_s=s).root for name, s in (("a", 0.1), ("b", 0.05))]
    found = compare(*runs)
    other = found.sides[1]
    assert other.verdict.startswith("not enough data") and other.speedup is None
    assert other.ratio == pytest.approx(2.0) and other.value == pytest.approx(8 * 128 / 0.05, 0.01)
    assert any("one run per side" in note for note in found.notes)


def test_what_differs_comes_with_every_sides_value(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    other = machine(1, name="GPU of another kind").model_copy(
        update={"torch": "9.9", "packages": {"numpy": "3"}, "variables": {"NCCL_DEBUG": "INFO"}}
    )
    prints = {"config": "c", "code": "other", "data": "other", "hardware": "other"}
    make_run(tmp_path / "b", ["train.seed=1"], env=other, fingerprints=prints)
    apart = {
        (d.kind, d.what): d.values for d in compare(tmp_path / "a", tmp_path / "b").differences
    }
    assert apart["config", "train.seed"] == ["0", "1"]
    assert apart["code", "code"] == ["k", "other"]
    assert apart["env", "torch"] == ["2.13", "9.9"]
    assert apart["env", "gpus"] == ["none", "GPU of another kind"]
    assert apart["env", "packages.numpy"] == ["absent", "3"]
    assert apart["env", "variables.NCCL_DEBUG"] == ["absent", "INFO"]


def test_a_loss_that_departs_and_other_batches_are_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "wrong", ["optim.lr=0.1"], loss=3.5)
    make_run(tmp_path / "large", ["train.micro_batch_size=16"])
    make_run(tmp_path / "base", step_s=0.1)
    notes = "\n".join(compare(tmp_path / "base", tmp_path / "wrong", tmp_path / "large").notes)
    assert "wrong: its loss is 16.7% from the baseline's" in notes
    assert "large: other samples per step" in notes


def test_a_folder_of_no_repeats_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "mixed" / "r0")
    make_run(tmp_path / "mixed" / "r1", ["optim.lr=0.1"])
    with pytest.raises(ConfigError, match=r"not repeats of one run: optim\.lr differ"):
        open_side(str(tmp_path / "mixed"))


def test_failed_runs_are_told_and_not_measured(tmp_path: Path) -> None:
    group(tmp_path / "a", 0.1, 0.1)
    make_run(tmp_path / "a" / "bad", outcome=Outcome.CRASHED, step_s=0.001)
    make_run(tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.sides[0].num_runs == 2 and found.sides[0].failed == ["bad: crashed"]


def test_a_cell_of_a_sweep(tmp_path: Path) -> None:
    for cell, step_s in (("x=1", 0.1), ("x=2", 0.2)):
        for repeat in (1, 2):
            make_run(tmp_path / f"runs/{cell}_{repeat}", step_s=step_s * (1 + 0.001 * repeat))
    rows = [make_row(c, n, f"runs/{c}_{n}") for c in ("x=1", "x=2") for n in (1, 2)]
    rows.append(make_row("x=1", 3, "runs/none", Outcome.STALL))
    save_manifest(tmp_path / "run_manifest.tsv", rows)
    cells = [draw_cell({"data.x": value}) for value in ("1", "2")]
    draw_record(cells=cells).save(tmp_path / "sweep.json")
    found = compare(f"{tmp_path}:x=1", f"{tmp_path}:x=2")
    assert found.sides[1].verdict == "slower"
    assert found.sides[0].failed == ["repeat 3: stall"]
    assert open_side(f"{tmp_path}:data.x=2").runs == open_side(f"{tmp_path}:x=2").runs
    with pytest.raises(ConfigError, match=r"'x=3' is not a cell[\s\S]*x=1"):
        open_side(f"{tmp_path}:x=3")
    with pytest.raises(ConfigError, match=r"is a sweep; compare two of its cells[\s\S]*:x=1"):
        open_side(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("nowhere", DataError, "not a run directory, a folder of runs"),
        ("empty", DataError, "holds no run directories"),
        ("bad", DataError, "no run of it succeeded"),
    ],
)
def test_what_is_no_run(tmp_path: Path, name: str, error: type[Exception], says: str) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "bad", outcome=Outcome.NAN)
    with pytest.raises(error, match=says):
        open_side(str(tmp_path / name))


def test_one_side_is_nothing_to_compare(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="two or more"):
        compare(tmp_path / "a")
    with pytest.raises(ConfigError, match="each named once"):
        compare(tmp_path / "a", tmp_path / "a")


def test_the_verb_needs_no_torch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['paceline', 'compare', 'a', 'b'];"
        "from paceline.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "nothing differs" in done.stdout and "not enough data" in done.stdout
