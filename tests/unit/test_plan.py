"""The plan: choices with reasons, problems before launch, any world size on a laptop."""

import pytest

from paceline.config.load import recipe_names
from paceline.errors import ClusterError, ConfigError
from paceline.job import load_job
from paceline.plan.peaks import peak_flops
from paceline.plan.planner import make_plan
from paceline.records import Env, Gpu, Plan
from paceline.run.flow import require_feasible

GIB = 2**30


def env(num_gpus: int = 0, capability: str = "9.0", name: str = "NVIDIA H200") -> Env:
    gpus = [
        Gpu(
            index=i, name=name, uuid=f"GPU-{i}", compute_capability=capability,
            memory_bytes=141 * GIB,
        )
        for i in range(num_gpus)
    ]  # fmt: skip
    return Env(
        host="box", os="Linux", cpu="a CPU", cores=16, memory_bytes=64 * GIB, gpus=gpus, links=[],
        driver="580", python="3.11", torch="2.13", cuda="13.0" if num_gpus else None, nccl=None,
        packages={}, git=None, variables={},
    )  # fmt: skip


def plan(*overrides: str, source: str = "lm_tiny", machine: Env | None = None) -> Plan:
    return make_plan(load_job(source, list(overrides)), machine or env())


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_every_recipe_is_planned_for_any_world(name: str, ranks: int) -> None:
    made = plan(f"launch.nproc={ranks}", "launch.overcommit=true", source=name)
    assert made.world_size == ranks == made.mesh["dp"]
    assert not made.problems()


def test_batch_is_micro_times_accumulation_times_ranks() -> None:
    batch = plan("train.micro_batch_size=4", "train.grad_accum=3", "launch.nproc=2").batch
    assert (batch.micro, batch.grad_accum, batch.dp, batch.global_size) == (4, 3, 2, 24)


def test_a_global_batch_decides_the_accumulation() -> None:
    batch = plan("train.micro_batch_size=4", "train.global_batch_size=32", "launch.nproc=2").batch
    assert (batch.grad_accum, batch.global_size) == (4, 32)


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (["train.global_batch_size=2", "launch.nproc=4"], "2 samples cannot be shared", "of 4"),
        (["train.global_batch_size=20", "launch.nproc=2"], "not a multiple", "set it to 16"),
        (
            ["train.global_batch_size=32", "train.grad_accum=3", "launch.nproc=2"],
            "3 contradicts train.global_batch_size=32, which needs 2",
            "auto",
        ),
        (["model.vocab_size=100"], "100 rows cannot hold byte tokens", "257"),
        (["strategy.name=single", "launch.nproc=2"], "single trains on one rank", "ddp"),
    ],
)
def test_problems_are_refused_before_launch(overrides: list[str], what: str, hint: str) -> None:
    made = plan(*overrides)
    with pytest.raises(ConfigError) as caught:
        require_feasible(made)
    assert what in str(caught.value) and hint in str(caught.value)


def test_all_problems_come_at_once() -> None:
    made = plan("train.global_batch_size=2", "launch.nproc=4", "model.vocab_size=100")
    assert {problem.where for problem in made.problems()} == {
        "train.global_batch_size",
        "model.vocab_size",
    }


def test_more_ranks_than_gpus_says_how_many_there_are() -> None:
    made = plan("launch.nproc=4", machine=env(num_gpus=2))
    with pytest.raises(ClusterError, match="4 asked for, 2 usable here"):
        require_feasible(made)


def test_gpus_are_used_where_there_are_any() -> None:
    made = plan(machine=env(num_gpus=8))
    assert (made.world_size, made.device.value, made.backend.value) == (8, "cuda", "nccl")
    assert made.precision.value == "bf16" and "9.0" in made.precision.because
    assert made.peak_flops.value == pytest.approx(989.4e12)


def test_an_old_gpu_gets_no_bf16() -> None:
    made = plan(machine=env(num_gpus=1, capability="7.0", name="Tesla V100-SXM2-16GB"))
    assert made.precision.value == "fp16" and "7.0" in made.precision.because
    assert made.attention.value == "eager" and "7.0" in made.attention.because


def test_state_that_does_not_fit_is_refused() -> None:
    small = env(num_gpus=1)
    gpu = small.gpus[0].model_copy(update={"memory_bytes": 8 * GIB})
    made = plan(source="lm_1b", machine=small.model_copy(update={"gpus": [gpu]}))
    assert "holds 20.0 GiB" in made.problems()[0].what


LARGE = ["model.dim=4096", "model.num_layers=80", "model.num_heads=32"]  # about 200 GiB


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ([], "zero3 would still hold"),
        (["launch.nproc=2", "strategy.name=zero3"], "take 4 machines or more like this one"),
    ],
)
def test_weights_that_no_rank_could_hold_are_refused(overrides: list[str], hint: str) -> None:
    with pytest.raises(ClusterError) as refused:
        require_feasible(plan(*LARGE, *overrides))
    assert "GiB of weights, gradients and optimizer, and it has 64 GiB" in str(refused.value)
    assert hint in str(refused.value) and "micro_batch" not in str(refused.value)
    made = plan(*LARGE, *overrides, "launch.overcommit=true")
    assert not made.problems() and made.findings[0].severity == "warning"


def test_ranks_on_cpus_share_their_machine() -> None:
    """lm_1b: 20 GiB a replica. Four do not fit into 64 GiB, shared among four they do."""
    with pytest.raises(ClusterError, match="4 ranks on this machine would hold 80 GiB") as refused:
        require_feasible(plan("launch.nproc=4", source="lm_1b"))
    assert "strategy.name=zero3 would hold" in str(refused.value)
    require_feasible(plan("launch.nproc=4", "strategy.name=zero3", source="lm_1b"))
    require_feasible(plan("launch.nproc=4", "strategy.name=pipeline", source="lm_1b"))


def test_nccl_needs_gpus() -> None:
    with pytest.raises(ClusterError, match="nccl"):
        require_feasible(plan("launch.backend=nccl"))


def test_one_rank_is_not_wrapped_and_says_so() -> None:
    choice = plan().strategy
    assert (choice.requested, choice.value) == ("ddp", "single") and choice.because


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["strategy.bucket_mb=50"], "strategy.bucket_mb"),
        (["train.compile_dynamic=on"], "train.compile_dynamic"),
        (["optim.momentum=0.9"], "optim.momentum"),
        (["data.num_workers=0", "data.prefetch=9"], "data.prefetch"),
        (["optim.schedule.name=constant", "optim.schedule.floor=0.5"], "optim.schedule.floor"),
        (["train.steps=10", "optim.schedule.warmup_steps=20"], "optim.schedule.warmup_steps"),
    ],
)
def test_a_setting_without_effect_is_a_finding(overrides: list[str], where: str) -> None:
    assert where in {finding.where for finding in plan(*overrides).findings}


def test_nothing_is_found_wrong_with_the_recipes() -> None:
    for name in recipe_names():
        assert plan(source=name, machine=env(num_gpus=1)).findings == []


def test_an_unknown_gpu_has_no_peak() -> None:
    choice = peak_flops("NVIDIA Weird 9000", "bf16")
    assert choice.value is None and "NVIDIA Weird 9000" in choice.because


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 NVL", 835.5), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.4),
     ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A10G", 70.0), ("NVIDIA L4", 121.0),
     ("NVIDIA L40S", 362.0)],
)  # fmt: skip
def test_peaks_tell_similar_names_apart(name: str, tflops: float) -> None:
    assert peak_flops(name, "bf16").value == pytest.approx(tflops * 1e12)
