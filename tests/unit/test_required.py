"""What is wrong with a job's class, or its file, is said before anything of it runs."""

from pathlib import Path

import pytest

from paceline.data.loader import Rules
from paceline.errors import ConfigError, DataError
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.train.feed import build_split, open_data, prepare_data
from paceline.workloads.base import REGISTRY, find_workload
from paceline.workloads.returns import read_shown
from tests.machines import MACHINE, plan

JOB = """
from torch import nn
from paceline import DataConfig, Section, Workload

class Job(Workload):
    {section}
    {model}
    {data}
    {loss}
    {more}
"""
RIGHT = {
    "section": "pass",
    "model": "def build_model(self, config): return nn.Linear(2, 2)",
    "data": "def build_data(self, config, split): return None",
    "loss": "def loss(self, model, batch): return batch.sum(), len(batch)",
    "more": "pass",
}


def find(folder: Path, **parts: str) -> Job:
    (folder / "job.py").write_text(JOB.format(**RIGHT | parts))
    return load_job(f"{folder / 'job.py'}:Job", ["launch.device=cpu"])


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("class Data(Section): size: int = 2000", "Job.Data is class Data(Section); its keys"),
        ("class Model: size = 3", "Job.Model is class Model; its keys are those of `model`"),
        ("Model = dict", "hint: class Model(paceline.Section)"),
        ("Loss = {'weight': 2}", "Job.Loss is {'weight': 2}; its keys"),
    ],
)
def test_a_section_of_another_kind_is_refused(section: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        find(tmp_path, section=section)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"data": "def build_data(self, config): return None"},
            "is written build_data(self, config), and Paceline calls build_data(config, split)",
        ),
        (
            {"loss": "def loss(self, batch): return batch.sum(), 1"},
            "written loss(self, batch), and Paceline calls loss(model, batch)\nhint: def loss",
        ),
        ({"loss": "loss = 3"}, "Job.loss is 3, and Paceline calls loss(model, batch)"),
        ({"more": "def on_step(self): pass"}, "hint: def on_step(self, step, record)"),
        ({"more": "def __init__(self, size): pass"}, "__init__ needs arguments"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused(
    part: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        find(tmp_path, **part)
    assert says in str(refused.value)


def test_all_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        find(tmp_path, section="Model = dict", data="pass", loss="def loss(self, batch): ...")
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    "part",
    [
        {"section": "class Data(DataConfig): size: int = 2000"},
        {"data": "def build_data(self, *given): return None"},
        {"data": "def build_data(this, settings, part, more=3): return None"},
        {"loss": "@staticmethod\n    def loss(model, batch): return batch.sum(), 1"},
        {"loss": "@classmethod\n    def loss(cls, model, batch): return batch.sum(), 1"},
        {"more": "def __init__(self, size=3): pass"},
    ],
)
def test_what_can_be_called_is_taken(part: dict[str, str], tmp_path: Path) -> None:
    find(tmp_path, **part)


@pytest.mark.parametrize("name", REGISTRY)
def test_our_own_are_right(name: str) -> None:
    find_workload(name, typed=False)


def test_a_file_that_ends_the_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\n\nsys.exit(3)\n")
    with pytest.raises(ConfigError) as refused:
        find_workload(f"{tmp_path / 'job.py'}:Job", typed=True)
    assert "job.py:3 ends the program while it is imported: SystemExit(3)" in str(refused.value)
    assert "__main__" in str(refused.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "Job.build_model must return a torch.nn.Module; it returned None"),
        ("return nn.Linear", "it returned the class Linear itself"),
        ("return lambda batch: batch", "it returned a function"),
        ("return nn.LazyLinear(2)", "build_model returned a model whose weight has no shape yet"),
        ("return nn.Linear(2, 'two')", "Job.build_model failed at job.py:7 in build_model: "),
    ],
)
def test_a_model_that_is_none_is_refused(body: str, says: str, tmp_path: Path) -> None:
    job = find(tmp_path, model=f"def build_model(self, config): {body}")
    with pytest.raises(ConfigError) as refused:
        make_plan(job, MACHINE)
    assert says in str(refused.value)


def test_data_that_fails_is_a_fault_of_data_with_the_users_line(tmp_path: Path) -> None:
    job = find(tmp_path, data="def build_data(self, config, split): return open('gone')")
    with pytest.raises(DataError) as refused:
        build_split(job, "val")
    assert "Job.build_data(config, 'val') failed at job.py:8 in build_data" in str(refused.value)
    assert "FileNotFoundError" in str(refused.value)
    job = find(tmp_path, data="def build_data(self, config, split): raise MemoryError")
    with pytest.raises(MemoryError):
        build_split(job, "train")


def test_a_loader_is_no_data_set(tmp_path: Path) -> None:
    body = "import torch; return torch.utils.data.DataLoader([1, 2], batch_size=2)"
    job = find(tmp_path, data=f"def build_data(self, config, split): {body}")
    for split in ("train", "val"):
        with pytest.raises(DataError, match=f"{split}.* returned a DataLoader\nhint: return its"):
            build_split(job, split)  # type: ignore[arg-type]


def test_no_data_to_train_on_is_not_too_little_of_it(tmp_path: Path) -> None:
    job = find(tmp_path, data="def build_data(self, config, split): pass")
    with pytest.raises(DataError, match="returned None: there is nothing to train on"):
        open_data(job, plan())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 3", "Job.prepare must return a dict, or None; it returned 3"),
        ("return {'model': nn.Linear(1, 1)}", "Job.prepare: 'model' is a Linear, which JSON"),
        ("return {3: 4}", "Job.prepare: 3 is 4"),
        ("raise ValueError('no network')", "Job.prepare failed at job.py:10 in prepare: ValueE"),
    ],
)
def test_what_was_prepared_is_refused_before_ranks_start(
    body: str, says: str, tmp_path: Path
) -> None:
    job = find(tmp_path, more=f"def prepare(self, config, say): {body}")
    with pytest.raises((ConfigError, DataError)) as refused:
        prepare_data(job, print)
    assert says in str(refused.value)


def test_prepare_need_not_return_anything(tmp_path: Path) -> None:
    job = find(tmp_path, more="def prepare(self, config, say): say('done')")
    assert prepare_data(job, print) == {}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("def units_per_sample(self, config): return 'many'", "units_per_sample must return"),
        ("def units_per_sample(self, config): return 0", "it returned 0"),
        ("def flops(self, config): return '2e9'", "flops must return a number above 0, or None"),
        ("def flops(self, config): return float('nan')", "it returned nan"),
        ("def head_dim(self, config): return 64.0", "head_dim must return an int of 1 or more"),
        ("def block_positions(self, config): return 3", "block_positions must return a list"),
        ("def positions_per_sample(self, config): return []", "it returned a list"),
        ("def problems(self, config): return None", "problems must return a list of findings"),
        ("def problems(self, config): return ['odd']", "it has the text 'odd' in it"),
        ("def problems(self, config): return 'odd'", "it returned the text 'odd'"),
    ],
)
def test_an_answer_that_is_of_no_use_is_refused(more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(find(tmp_path, more=more), MACHINE)
    assert says in str(refused.value)


def test_answers_that_are_meant_are_taken(tmp_path: Path) -> None:
    """Whole numbers of numpy and floats of 2e9 FLOPs are numbers too; None is an answer."""
    more = """def units_per_sample(self, config): return None
    def flops(self, config):
        import numpy as np
        return np.float32(2e9)
    def head_dim(self, config): return None
    def problems(self, config):
        from paceline.records import Finding
        yield Finding(severity="warning", where="model", what="is odd")
"""
    made = make_plan(find(tmp_path, more=more), MACHINE)
    assert made.flops_per_sample.value == 2e9 and made.units_per_sample is None
    assert "model: is odd" in [str(each) for each in made.findings]


def test_units_that_are_no_number_are_refused(tmp_path: Path) -> None:
    more = "def units(self, batch): return 'many'"
    with pytest.raises(ConfigError, match="Job.units must return a number; it returned 'many'"):
        Rules(find(tmp_path, more=more).workload, None).units([1, 2], 2)


def test_examples_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    workload = find(tmp_path).workload
    for odd in ("text", [("one",)], [("a", 1)], None):
        with pytest.raises(ConfigError, match="Job.shown must return a list of pairs of texts"):
            read_shown(workload, odd)
    assert read_shown(workload, zip("ab", "cd", strict=True)) == [("a", "c"), ("b", "d")]
    assert read_shown(workload, ()) == []
