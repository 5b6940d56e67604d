"""From flags or a YAML file to cells; every mistake is one clear message."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, DataError
from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.sweep.flow import open_folder
from paceline.sweep.folder import COLUMNS, SweepDir, load_manifest, save_manifest
from paceline.sweep.matrix import Ground, load_cell, needs_evaluation
from paceline.sweep.phases import choose_extras, describe_schedule, first_phase, plain_name
from paceline.sweep.runner import turns_of
from paceline.sweep.spec import (
    SweepSpec,
    draw_cells,
    find_cell,
    read_spec,
    short_keys,
    split_values,
)
from paceline.sweep.target import Target
from tests.machines import machine

TWO = ["strategy.name=ddp,zero1", "train.micro_batch_size=4,8"]


def spec_of(axes: list[str] = TWO, words: list[str] | None = None, **given: Any) -> SweepSpec:
    return read_spec("lm_tiny", words or [], axes, given)


def problems_of(source: str, words: list[str], axes: list[str], given: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_spec(source, words, axes, given)
    return caught.value.problems


def test_flags_and_a_file_ask_the_same(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "recipe: lm_tiny\noverrides: [train.grad_accum=1]\nmargin: 0.05\nrepeats: 5\n"
        "axes: {strategy.name: [ddp, zero1], train.micro_batch_size: [4, 8]}\n"
    )
    typed = spec_of(words=["train.grad_accum=1", "sweep.margin=0.05"], repeats=5)
    read = read_spec(str(file), [], [], {})
    assert draw_cells(read) == draw_cells(typed)
    assert read.model_dump(exclude={"axes"}) == typed.model_dump(exclude={"axes"})


def test_a_metric_of_the_job_has_a_direction() -> None:
    assert spec_of(metric="val/wer").metric == "val/wer:min"
    assert spec_of(metric="val/accuracy:max").metric == "val/accuracy:max"
    for bad, says in (("wer", "is not a metric"), ("val/accuracy", "more or less")):
        [problem] = problems_of("lm_tiny", [], TWO, {"metric": bad})
        assert says in problem and "samples_per_s" in problem
    assert Target.parse("val/wer<=0.2") == ("val/wer:min", "<=", 0.2)
    assert Target.parse("val/accuracy>=0.9") == ("val/accuracy:max", ">=", 0.9)


def test_its_runs_are_evaluated_at_the_end() -> None:
    cell = SweptCell(name="a", settings={}, overrides=[])
    asked = [
        load_cell(Ground("lm_tiny", words, machine(), evaluates), cell, 30).config.train.eval_every
        for words, evaluates in (((), False), ((), True), (("train.eval_every=5",), True))
    ]
    assert asked == ["off", 30, 5]
    assert needs_evaluation("val/wer:min", None) and needs_evaluation("auto", " val/wer<=0.2")
    assert not needs_evaluation("tokens_per_s", "speedup>=1.08")


def test_the_file_of_the_page_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sweeping.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sweep.yaml").write_text(text)
    assert len(draw_cells(read_spec(str(tmp_path / "sweep.yaml"), [], [], {}))) == 4
    words = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", page, re.MULTILINE)
    named = {word.strip("`") for row in words for word in row.split(", ")}
    assert named == set(SweepSpec.model_fields) - {"recipe", "overrides"}


def test_a_flag_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("recipe: lm_tiny\naxes: {strategy.name: [ddp]}\nrepeats: 5\n")
    assert read_spec(str(file), ["sweep.seed=9"], [], {"repeats": 2}).repeats == 2
    assert read_spec(str(file), ["sweep.seed=9"], [], {"repeats": 2}).seed == 9


def test_a_file_may_not_choose_code(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("recipe: job.py:Job\naxes: {strategy.name: [ddp]}\n")
    (problem,) = problems_of(str(file), [], [], {})
    assert "may not choose code" in problem


@pytest.mark.parametrize(
    ("words", "axes", "said"),
    [
        ([], ["train.micro_batch_size="], "is empty"),
        ([], ["train.micro_batch_size"], "is not KEY=A,B"),
        ([], ["optim.lr=1", "optim.lr=2"], "two axes on optim.lr"),
        ([], ["optim.lr=1,1"], "has 1 twice"),
        ([], ["optim.lr=1,,2"], "has an empty value"),
        ([], ["++optim.lr=1", "optim.lr=2"], "two axes on optim.lr"),
        ([], ["++train.steps=3,4"], "cannot be an axis"),
        ([], [], "needs an axis"),
        (["optim.lr=1"], ["optim.lr=1,2"], "is an axis and is set for every cell too"),
        (["train.steps=3"], ["optim.lr=1,2"], "what --steps sets"),
        ([], ["train.steps=3,4"], "cannot be an axis"),
        (["sweep.margn=1"], ["optim.lr=1,2"], "did you mean margin?"),
    ],
)
def test_a_mistake_is_one_clear_message(words: list[str], axes: list[str], said: str) -> None:
    (problem,) = problems_of("lm_tiny", words, axes, {})
    assert said in problem


def test_all_mistakes_are_told_at_once() -> None:
    assert len(problems_of("lm_tiny", ["sweep.margn=1"], ["a=", "b=1", "b=2"], {"steps": 0})) == 4


def test_lists_are_values_too() -> None:
    assert split_values("[0,1],[2,3],auto") == ["[0,1]", "[2,3]", "auto"]
    assert split_values("[[0,1],[2,3]],x") == ["[[0,1],[2,3]]", "x"]


def test_one_value_in_two_spellings_is_told() -> None:
    problems = problems_of("lm_tiny", [], ["optim.lr=0.1,1e-1"], {})
    assert problems == ["axis optim.lr has 0.1 twice", "axis optim.lr has 1e-1 twice"]


@pytest.mark.parametrize(
    "text", ["axes:", "axes: [a]", "axes: {}", "axes: {optim.lr: }", "axes: {optim.lr: []}",
             "axes: {optim.lr: 1}", "axis: {optim.lr: [1]}"],
)  # fmt: skip
def test_a_file_without_axes_is_told_so(text: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"recipe: lm_tiny\n{text}\n")
    (problem,) = problems_of(str(file), [], [], {})
    assert "axes" in problem or "needs an axis" in problem


def test_a_file_that_is_not_there_is_told_so() -> None:
    (problem,) = problems_of("nothere.yaml", [], [], {})
    assert "cannot read nothere.yaml" in problem


def test_on_in_a_file_is_the_word_that_it_is_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("recipe: lm_tiny\naxes: {optim.fused: [on, off]}\n")
    names = [cell.name for cell in draw_cells(read_spec(str(file), [], [], {}))]
    assert names == ["fused=on", "fused=off"]


def test_cells_are_named_by_what_tells_them_apart() -> None:
    cells = draw_cells(spec_of())
    assert [cell.name for cell in cells] == [
        "name=ddp,micro_batch_size=4",
        "name=ddp,micro_batch_size=8",
        "name=zero1,micro_batch_size=4",
        "name=zero1,micro_batch_size=8",
    ]
    assert cells[3].overrides == ["strategy.name=zero1", "train.micro_batch_size=8"]


def test_keys_with_the_same_end_keep_more_of_it() -> None:
    assert short_keys(["optim.name", "strategy.name", "optim.lr"]) == {
        "optim.name": "optim.name",
        "strategy.name": "strategy.name",
        "optim.lr": "lr",
    }


def test_a_baseline_may_be_named_in_part() -> None:
    cells = draw_cells(spec_of())
    assert find_cell(cells, "strategy.name=ddp,micro_batch_size=8") is cells[1]
    assert find_cell(cells, "name=zero1,micro_batch_size=4") is cells[2]


@pytest.mark.parametrize(
    ("asked", "said"), [("name=zero9", "is not a cell"), ("name=ddp", "fits 2")]
)
def test_a_baseline_that_is_no_cell_is_refused(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_cell(draw_cells(spec_of()), asked)


def test_a_refused_baseline_is_refused() -> None:
    cell = SweptCell(name="a=1", settings={"a": "1"}, overrides=["a=1"], refusal="no room")
    with pytest.raises(ConfigError, match="cannot run: no room"):
        find_cell([cell], "a=1")


@pytest.mark.parametrize("text", ["speedup>1", "speed>=2", "tokens_per_s>=", "speedup>=x"])
def test_a_target_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one of"):
        Target.parse(text)


def test_a_target_to_be_worse_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks to be worse"):
        Target.parse("tail_mean_iter_p50_ms>=3")


def record_of(spec: SweepSpec) -> SweepRecord:
    cells = draw_cells(spec)
    return SweepRecord(
        mode="sweep", recipe="lm_tiny", overrides=[], axes={}, cells=cells,
        phases=[first_phase(spec, cells)], metric="samples_per_s", margin=0.02, seed=spec.seed,
        loss_tolerance=0.02,
    )  # fmt: skip


def test_repeats_are_interleaved_and_shuffled_by_the_seed() -> None:
    record = record_of(spec_of(repeats=4))
    turns = list(turns_of(record, record.phases[0]))
    rounds = [[t.cell.name for t in turns if t.repeat == number] for number in range(1, 5)]
    assert [turn.repeat for turn in turns] == sorted(turn.repeat for turn in turns)
    assert all(sorted(names) == sorted(record.phases[0].cells) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1, "every round in the same order"
    assert turns == list(turns_of(record, record.phases[0]))
    other = record.model_copy(update={"seed": 1})
    assert turns != list(turns_of(other, record.phases[0]))


def test_the_schedule_says_what_it_costs() -> None:
    (line,) = describe_schedule(spec_of(repeats=3, steps=60), draw_cells(spec_of()))
    assert line == "4 cells x 3 repeats x 60 steps = 12 runs, 720 steps"
    a, b, c = describe_schedule(spec_of(phases=True, steps=60), draw_cells(spec_of()))
    assert "A, pilot: 4 cells x 2 repeats x 20 steps = 8 runs" in a
    assert "2 cells x 3 repeats x 60 steps = 6 runs" in b and "at most" in b
    assert "compile" in c and "2 cells x 3" in c


def test_extras_stand_on_the_winner() -> None:
    spec = spec_of(phases=True)
    cell = SweptCell(name="B:a=1", settings={"a": "1"}, overrides=["a=1"])
    record = record_of(spec).model_copy(update={"cells": [cell]})
    base, extra = choose_extras(record, spec, "B:a=1")
    assert (base.name, extra.name) == ("a=1", "a=1,+compile")
    assert extra.overrides == ["a=1", "train.compile=default"]
    assert plain_name("B:a=1") == "a=1" and plain_name("a=1") == "a=1"


def a_row(**known: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "n/a") | known


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [a_row(group="a=1", repeat="1"), a_row(group="b\tc\nd", repeat="2")]
    save_manifest(tmp_path / "m.tsv", rows)
    assert load_manifest(tmp_path / "m.tsv") == [rows[0], rows[1] | {"group": "b c d"}]
    assert load_manifest(tmp_path / "absent.tsv") == []


def test_a_manifest_survives_a_kill_at_any_byte(tmp_path: Path) -> None:
    """The kernel ends the writer (SIGXFSZ) at the very byte: the old rows stay."""
    path = tmp_path / "m.tsv"
    old = [a_row(group=f"cell {n}", repeat="1") for n in range(3)]
    save_manifest(path, old)
    size = path.stat().st_size
    for limit in (0, 1, size // 3, size - 1, size, size + 1):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save_manifest(path, [*old, a_row(group="cell 3", repeat="1")])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGXFSZ
        assert load_manifest(path) == old


def test_a_foreign_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_text("mode\tgroup\nsweep\ta\n")
    with pytest.raises(DataError, match="columns or rows are not those of a sweep"):
        load_manifest(tmp_path / "m.tsv")


def test_a_phase_keeps_only_what_can_run() -> None:
    cells = draw_cells(spec_of())
    cells[0] = cells[0].model_copy(update={"refusal": "no"})
    assert first_phase(spec_of(), cells) == SweptPhase(
        name="", cells=[cell.name for cell in cells[1:]], repeats=3, steps=60
    )


def test_a_sweep_of_which_nothing_has_run_may_be_asked_anew(tmp_path: Path) -> None:
    first = record_of(spec_of())
    other = first.model_copy(update={"axes": {"optim.lr": ["1", "2"]}})
    folder = open_folder(first, "lm_tiny", tmp_path / "out")
    first.save(folder.record)
    assert open_folder(other, "lm_tiny", tmp_path / "out").root == folder.root
    folder.unused_run("a", 1).mkdir()
    with pytest.raises(ConfigError, match="holds another sweep"):
        open_folder(other, "lm_tiny", tmp_path / "out")
    SweepDir.require_place(tmp_path / "out")
    folder.record.unlink()
    with pytest.raises(ConfigError, match="already holds files"):
        SweepDir.require_place(tmp_path / "out")
