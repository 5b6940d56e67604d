"""Methods that nothing calls are named before anything starts."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Finding
from paceline.run.flow import require_feasible
from paceline.workloads.base import REGISTRY, find_workload
from paceline.workloads.methods import FOREIGN, SEAM, check_methods

JOB = """
from torch import nn
from paceline import Workload

def helper(workload): return workload.described()

class Job(Workload):
    class Nested: pass
    answer = 42
    def build_model(self, config): return nn.Linear(2, 2)
    def build_data(self, config, split): return None
    def loss(self, model, batch): return self.mixed(batch).sum(), len(batch)
    def mixed(self, batch): return batch
    def described(self): return "called from outside the class"
    def _private(self): pass
    @property
    def width(self): return 2
    {more}
"""


def found(folder: Path, more: str) -> dict[str, Finding]:
    (folder / "job.py").write_text(JOB.format(more=more))
    kind = find_workload(f"{folder / 'job.py'}:Job", typed=True)
    return {finding.where: finding for finding in check_methods(kind)}


def test_what_is_called_or_private_is_free(tmp_path: Path) -> None:
    assert found(tmp_path, "") == {}


def test_our_own_have_none() -> None:
    assert not [f for name in REGISTRY for f in check_methods(find_workload(name, typed=False))]
    assert not FOREIGN.keys() & SEAM


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("collate_fn", "collate(self, samples)"),
        ("configure_optimizers", "optim.name"),
        ("build_optimizers", "build_optimizer(self, model, config)"),
        ("lr_scheduler_step", "learning_rate(self, step, config)"),
        ("build_scheduler", "optim.schedule.name"),
        ("training_step", "loss(self, model, batch)"),
        ("validation_step", "train.eval_every"),
        ("forward", "build_model"),
        ("on_train_epoch_end", "no hook inside"),
        ("on_train_batch_end", "on_step(self, step, record)"),
        ("on_validation_end", "on_eval(self, step, metrics)"),
        ("on_save_checkpoint", "on_checkpoint(self, step, path)"),
        ("compute_metrics", "metrics(self, found)"),
    ],
)
def test_a_hook_of_another_framework_is_an_error(name: str, says: str, tmp_path: Path) -> None:
    told = found(tmp_path, f"def {name}(self, *args): raise RuntimeError")[f"Job.{name}"]
    assert told.severity == "error" and says in told.hint


def test_static_and_class_methods_count(tmp_path: Path) -> None:
    assert "Job.collate_fn" in found(tmp_path, "@staticmethod\n    def collate_fn(items): ...")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("unit_per_sample", "did you mean units_per_sample?"), ("shuffle", "name it _shuffle")],
)
def test_any_other_is_a_warning(name: str, hint: str, tmp_path: Path) -> None:
    told = found(tmp_path, f"def {name}(self): ...")[f"Job.{name}"]
    assert told.severity == "warning" and hint in told.hint


def test_it_stands_in_the_plan(tmp_path: Path) -> None:
    found(tmp_path, "def collate_fn(self, items): ...")
    plan = make_plan(load_job(f"{tmp_path / 'job.py'}:Job", ["launch.device=cpu"]), probe())
    with pytest.raises(ConfigError, match=r"Job\.collate_fn: is a method of other frameworks"):
        require_feasible(plan)
