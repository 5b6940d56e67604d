"""DeepSpeed's config: what is generated, what is merged over it, what is refused; no deepspeed."""

import importlib.util
import os
from typing import Any

import pytest
import torch

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Finding, Plan
from paceline.strategies.deepspeed.config import FIXED, OURS, merge
from paceline.strategies.deepspeed.engine import tell_device
from tests.machines import box


def planned(*overrides: str, on_gpu: bool = False) -> Plan:
    env = box(2) if on_gpu else probe()
    device = [] if on_gpu else ["launch.device=cpu"]
    job = load_job("lm_tiny", ["strategy.name=deepspeed", "launch.nproc=2", *device, *overrides])
    return make_plan(job, env)


def errors(plan: Plan) -> list[Finding]:
    return [finding for finding in plan.problems() if finding.where.startswith("strategy")]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the config; they pass without deepspeed too."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: True if name == "deepspeed" else find(name)
    )


def test_what_is_generated() -> None:
    plan = planned("strategy.stage=3", "optim.clip=0.5", "train.micro_batch_size=4")
    numel = plan.model.num_trainable
    assert plan.engine_config == {
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": numel,
            "stage3_param_persistence_threshold": 100_000,
        },
        "timers": {"throughput": {"enabled": False}},
    }
    assert errors(plan) == []


def test_accumulation_stays_ours() -> None:
    plan = planned("train.grad_accum=4", "train.micro_batch_size=2")
    assert plan.batch.grad_accum == 4
    assert plan.engine_config["gradient_accumulation_steps"] == 1
    assert plan.engine_config["train_batch_size"] == 4


@pytest.mark.parametrize(("mode", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_16_bits_are_autocast_over_fp32_weights(mode: str, dtype: str) -> None:
    settings = planned(f"precision.mode={mode}").engine_config
    assert settings["torch_autocast"]["dtype"] == dtype
    assert not {"bf16", "fp16"} & set(settings)


def test_no_clipping_is_zero() -> None:
    assert planned("optim.clip=off").engine_config["gradient_clipping"] == 0.0


def test_offload_is_for_gpus() -> None:
    on_gpu = planned("strategy.offload=true", "strategy.stage=2", on_gpu=True).engine_config
    assert on_gpu["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    on_cpu = planned("strategy.offload=true", "strategy.stage=2")
    assert "offload_optimizer" not in on_cpu.engine_config["zero_optimization"]
    assert any(f.where == "strategy.offload" and f.severity == "warning" for f in on_cpu.findings)


def test_offload_needs_a_stage_that_shards() -> None:
    (found,) = errors(planned("strategy.offload=true", "strategy.stage=0"))
    assert found.where == "strategy.offload" and "strategy.stage" in found.hint


def test_compiling_stage_3_is_warned_of() -> None:
    plan = planned("strategy.stage=3", "train.compile=default")
    assert any(f.where == "train.compile" and f.severity == "warning" for f in plan.findings)


def test_merge_goes_down_to_the_leaves() -> None:
    base = {"a": 1, "zero": {"stage": 2, "bucket": {"x": 1, "y": 2}}}
    over = {"zero": {"bucket": {"y": 3}, "new": True}}
    assert merge(base, over) == {
        "a": 1, "zero": {"stage": 2, "bucket": {"x": 1, "y": 3}, "new": True},
    }  # fmt: skip
    assert base["zero"] == {"stage": 2, "bucket": {"x": 1, "y": 2}}, "not changed in place"


def test_overrides_are_merged_last() -> None:
    section = "+strategy.deepspeed_config.zero_optimization"
    plan = planned(f"{section}.overlap_comm=true", "strategy.stage=2", "optim.name=sgd")
    assert plan.engine_config["zero_optimization"]["overlap_comm"] is True
    assert plan.engine_config["zero_optimization"]["stage"] == 2
    assert errors(plan) == []


VALUES: dict[str, Any] = {"optimizer": "{type: Adam}", "scheduler": "{type: WarmupLR}"}


@pytest.mark.parametrize("path", OURS)
def test_what_contradicts_our_keys_is_refused(path: str) -> None:
    value = VALUES.get(path, "1")
    (found,) = errors(planned(f"+strategy.deepspeed_config.{path}={value}"))
    assert found.where == f"strategy.deepspeed_config.{path}"
    assert OURS[path] in found.what and found.cause == "config"


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
def test_state_in_files_of_its_own_is_refused(part: str) -> None:
    """No checkpoint would have it."""
    path = f"zero_optimization.{part}.device"
    (found,) = errors(planned("strategy.stage=3", f"+strategy.deepspeed_config.{path}=nvme"))
    assert found.where.endswith(path) and "in no checkpoint" in found.what
    assert not errors(planned("strategy.stage=3", f"+strategy.deepspeed_config.{path}=cpu"))


@pytest.mark.parametrize("path", FIXED)
def test_what_breaks_the_engine_is_refused(path: str) -> None:
    (found,) = errors(planned(f"+strategy.deepspeed_config.{path}=false"))
    assert found.where.endswith(path)


def test_a_config_names_no_module_that_deepspeed_imports() -> None:
    asked = "strategy.deepspeed_config={torch_autocast: {lower_precision_safe_modules: [evil.X]}}"
    (found,) = errors(planned(asked))
    assert "lower_precision_safe_modules: cannot be changed: DeepSpeed imports" in str(found)


SECTIONS = {
    "csv_monitor": "observe.trackers", "tensorboard": "observe.trackers",
    "wandb": "observe.trackers", "comet": "observe.trackers", "flops_profiler": "observe.profile",
    "autotuning": "paceline sweep", "nebula": "checkpoint.",
}  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_a_config_names_no_place_that_deepspeed_writes_to(section: str) -> None:
    (found,) = errors(planned(f"+strategy.deepspeed_config.{section}.output_path=/elsewhere"))
    assert found.where == f"strategy.deepspeed_config.{section}" and SECTIONS[section] in found.hint
    assert "DeepSpeed writes" in found.what


def test_auto_and_nonsense_are_refused() -> None:
    auto = planned("+strategy.deepspeed_config.zero_optimization.reduce_bucket_size=auto")
    assert "Hugging Face" in errors(auto)[0].what
    (found,) = errors(planned("+strategy.deepspeed_config.zero_optimization=true"))
    assert "not a map" in found.what


def test_a_key_that_nobody_reads_is_a_warning() -> None:
    plan = planned("+strategy.deepspeed_config.zero_optimisation.overlap_comm=true")
    (found,) = [f for f in plan.findings if f.where.startswith("strategy.deepspeed_config")]
    assert found.severity == "warning" and "zero_optimization" in found.hint


def test_not_installed_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    (found,) = errors(planned())
    assert "not installed" in found.what
    assert "pip install 'paceline[deepspeed]'" in found.hint and found.cause == "config"


def test_stages_hold_less_and_less() -> None:
    """On 64 ranks of 1B parameters: 16 P, then 4 P and a little, then nearly nothing."""
    totals = []
    for stage in range(4):
        job = load_job("lm_1b", ["strategy.name=deepspeed", f"strategy.stage={stage}"])
        plan = make_plan(job, box(8))
        totals.append(plan.state_bytes.total / plan.model.trainable_bytes)
    assert totals[0] == pytest.approx(4, rel=1e-3)
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("device", "of_mpi", "told"),
    [
        ("cuda:0", None, "0"),  # the second of two ranks that see, or share, one GPU
        ("cuda:0", "1", "0"),
        ("cuda:3", None, "3"),
        ("cpu", None, "1"),
    ],
)
def test_which_device_it_is_told(
    device: str, of_mpi: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    if of_mpi:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", of_mpi)
    tell_device(torch.device(device))
    assert os.environ["LOCAL_RANK"] == told
    assert os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", told) == told
