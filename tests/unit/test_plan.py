"""The plan: choices with reasons, problems before launch, any world size on a laptop."""

from pathlib import Path

import pytest

from paceline.config.load import recipe_names
from paceline.errors import ClusterError, ConfigError
from paceline.job import load_job
from paceline.machine.topology import Topology
from paceline.plan.crew import check_crew, choose_crew
from paceline.records import Env, Finding
from paceline.run.flow import require_feasible
from tests.machines import GIB, plan
from tests.machines import machine as env

CNN = """
import torch
from paceline import Workload

class Cnn(Workload):
    def build_model(self, config):
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten())

    def build_data(self, config, split):
        return None

    def loss(self, model, batch):
        return model(batch).sum(), len(batch)
"""


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
            ["train.global_batch_size=16", "train.micro_batch_size=16", "launch.nproc=2"],
            "16 is not a multiple of micro_batch_size 16 x 2",
            "set train.micro_batch_size to 8, which keeps it, or set it to 32",
        ),
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


@pytest.mark.parametrize(
    ("machine", "what"),
    [
        (env(), "cuda was asked for, and no GPU is visible"),
        (env(num_gpus=1).model_copy(update={"cuda": None}), "built without CUDA and ROCm"),
    ],
)
def test_cuda_without_a_gpu_is_filed_under_what_was_asked(machine: Env, what: str) -> None:
    [problem] = plan("launch.device=cuda", machine=machine).problems()
    assert (problem.where, problem.cause) == ("launch.device", "cluster")
    assert what in problem.what and "launch.device=cpu" in problem.hint


def test_gpus_are_used_where_there_are_any() -> None:
    made = plan(machine=env(num_gpus=8))
    assert (made.world_size, made.device.value, made.backend.value) == (8, "cuda", "nccl")
    assert made.precision.value == "bf16" and "9.0" in made.precision.because
    assert made.peak_flops.value == pytest.approx(989.4e12)


@pytest.mark.parametrize(
    ("overrides", "tflops", "why"),
    [
        (["precision.mode=fp16"], 989.4, "fp16"),
        (["precision.mode=fp32"], 494.7, "tf32"),  # precision.matmul=high is the default
        (["precision.mode=fp32", "precision.matmul=highest"], 66.9, "fp32"),
        (["observe.peak_flops=1.5e14"], 150.0, "observe.peak_flops"),
    ],
)
def test_the_peak_is_that_of_the_arithmetic(overrides: list[str], tflops: float, why: str) -> None:
    peak = plan(*overrides, machine=env(num_gpus=1)).peak_flops
    assert peak.value == pytest.approx(tflops * 1e12) and why in peak.because


def test_an_old_gpu_gets_no_bf16() -> None:
    made = plan(machine=env(num_gpus=1, capability="7.0", name="Tesla V100-SXM2-16GB"))
    assert made.precision.value == "fp16" and "7.0" in made.precision.because
    assert made.attention.value == "eager" and "7.0" in made.attention.because


def test_state_that_does_not_fit_is_refused() -> None:
    small = env(num_gpus=1)
    gpu = small.gpus[0].model_copy(update={"memory_bytes": 8 * GIB})
    made = plan(source="lm_1b", machine=small.model_copy(update={"gpus": [gpu]}))
    assert "holds 20 GiB" in made.problems()[0].what


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
    with pytest.raises(ClusterError, match="4 ranks on this machine would hold 80") as refused:
        require_feasible(plan("launch.nproc=4", source="lm_1b"))
    assert "strategy.name=zero3 would hold" in str(refused.value)
    require_feasible(plan("launch.nproc=4", "strategy.name=zero3", source="lm_1b"))
    require_feasible(plan("launch.nproc=4", "strategy.name=pipeline", source="lm_1b"))


@pytest.mark.parametrize("num_gpus", [0, 4])
def test_more_processes_than_memory_holds_are_refused(num_gpus: int) -> None:
    """36 MiB each: 5000 hold 176 GiB, whatever they train and wherever; 64 GiB hold 1820."""
    shared = [f"launch.devices=[{','.join(['0'] * 5000)}]"] if num_gpus else []
    asked = ["launch.nproc=5000", *shared]
    with pytest.raises(ClusterError) as refused:
        require_feasible(plan(*asked, machine=env(num_gpus=num_gpus)))
    assert "5,000 ranks on one machine would hold 176 GiB" in str(refused.value)
    assert "launch.nproc to 1820 or fewer" in str(refused.value)
    assert not plan(*asked, "launch.overcommit=true", machine=env(num_gpus=num_gpus)).problems()


def test_processes_of_machines_that_are_not_here_are_no_reason_to_refuse() -> None:
    unknown = env().model_copy(update={"memory_bytes": 0})
    crowd = [finding for finding in check_crew_of(unknown) if "would hold" in finding.what]
    assert not crowd
    made = plan("launch.nproc=5000", "launch.launcher=slurm")
    assert "176 GiB" in next(f.what for f in made.findings if f.severity == "warning")
    small = env().model_copy(update={"memory_bytes": GIB})
    assert not plan("launch.nproc=16", machine=small).problems(), "16 x 36 MiB fit into 1 GiB"


def test_state_must_fit_beside_the_processes() -> None:
    """lm_1b shared by 8 ranks: 20 GiB fit into 20.3 GiB, but not beside 8 x 36 MiB."""
    made = plan("launch.nproc=8", "strategy.name=zero3", source="lm_1b")
    held = 8 * made.state_bytes.peak
    tight = env().model_copy(update={"memory_bytes": held + 7 * 36 * 2**20})
    with pytest.raises(ClusterError, match="288 MiB of processes"):
        require_feasible(
            plan("launch.nproc=8", "strategy.name=zero3", source="lm_1b", machine=tight)
        )


def check_crew_of(machine: Env) -> list[Finding]:
    launch, alone = load_job("lm_tiny", ["launch.nproc=5000"]).config.launch, Topology()
    return list(check_crew(launch, machine, choose_crew(launch, machine, alone), alone))


def test_nccl_needs_gpus() -> None:
    with pytest.raises(ClusterError, match="nccl"):
        require_feasible(plan("launch.backend=nccl"))


@pytest.mark.parametrize(
    ("source", "says"), [("lm_tiny", "causal attention counted half"), ("mae_tiny", "in full")]
)
def test_flops_say_how_attention_is_counted(source: str, says: str) -> None:
    assert says in plan(source=source).flops_per_sample.because


def test_only_choices_that_can_matter_are_shown(tmp_path: Path) -> None:
    job = tmp_path / "cnn.py"
    job.write_text(CNN)
    idle = {"attention", "matmul", "recompute", "compile_scope"}
    assert not idle & set(plan(source=f"{job}:Cnn").choices())
    asked = [
        "train.activation_checkpointing=full",
        "precision.matmul=highest",
        "train.compile=default",
    ]
    shown = plan(*asked, source=f"{job}:Cnn").choices()
    assert {"matmul", "recompute", "compile_scope"} <= set(shown) and "attention" not in shown
    assert {"attention", "matmul"} <= set(plan(machine=env(num_gpus=1)).choices())
    assert "attention" in plan().choices()


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
