"""Targets of `paceline bench`: pairs that differ in what they say and in nothing else."""

import re
from pathlib import Path

import pytest

from paceline.bench.equal import check_equal
from paceline.bench.pairs import Pair, plan_pair
from paceline.bench.target import LAB, find_names, load_targets, parse_target, parse_words
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.plan.planner import make_plan
from tests.machines import machine as env

NAMES = [
    "1f1b_2stages", "compile", "ddp", "ddp_bucket", "ddp_compression", "ddp_flash",
    "dualpipe_2stages", "dualpipev_2stages", "fsdp", "fsdp_fp8", "fused_adamw",
    "pipeline_gpipe_2stages", "pipeline_schedules", "sdpa_backends", "single_gpu_isolation",
    "symmem_ddp", "symmem_training", "zero1", "zero2", "zero3",
]  # fmt: skip


def pair(name: str, *overrides: str, gpus: int = 0) -> Pair:
    return plan_pair(load_targets()[name], env(gpus), list(overrides))


def test_the_targets_are_those_of_the_issue() -> None:
    assert list(load_targets()) == NAMES


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_equal_work_or_is_skipped_with_a_reason(name: str, gpus: int) -> None:
    made = pair(name, gpus=gpus)  # raises where the sides are not equal
    if name == "ddp_flash" and gpus == 0:
        assert "FlashAttention is a kernel for GPUs; ranks are on CPU" in made.skipped
    elif name.startswith("symmem_") and gpus == 0:
        assert "symmetric memory is that of GPUs; ranks are on CPU" in made.skipped
    elif name.startswith("symmem_") and gpus == 8:
        assert "there is no NVLink between GPUs 0 and 1" in made.skipped
    elif gpus == 1 and load_targets()[name].needs.ranks == 2:
        assert "it needs 2 ranks, and here is 1 GPU" in made.skipped
    else:
        assert not made.skipped and len(made.arms) >= 2
        assert made.baseline.name == load_targets()[name].baseline
        assert made.facts["optimizer"] == "adamw" and made.facts["seed"] == "0"


def test_every_tolerance_has_its_reason() -> None:
    for target in load_targets().values():
        assert len(target.loss.because) > 20 and all(target.differs.values())
        for device in target.work:
            assert (target.tolerance(device) is None) == target.per_device


def test_kernels_that_this_device_lacks_are_left_out_with_the_reason() -> None:
    made = pair("sdpa_backends")
    assert [arm.name for arm in made.arms] == ["math", "flash", "torch's choice"]
    assert "kernel for GPUs" in made.left_out["cudnn"]
    assert pair("sdpa_backends", gpus=1).left_out == {}


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("all", NAMES),
        ("zero3", ["zero3"]),
        ("labs/train_distributed:zero3", ["zero3"]),
        ("lab_train_distributed:ddp", ["ddp"]),
        ("train_distributed:fsdp2", ["fsdp"]),
        ("train_distributed", list(LAB)),
        ("labs/train_distributed", list(LAB)),
    ],
)
def test_names(word: str, names: list[str]) -> None:
    assert find_names(word) == names


def test_words_are_targets_and_overrides_for_both_sides() -> None:
    words = ["zero1", "labs/train_distributed:ddp", "train.seed=3", "ddp:model.dim=64"]
    asked = parse_words([*words, "train_distributed:zero1:launch.env.X=a:b", "zero1"])
    assert asked.overrides == {
        "zero1": ["train.seed=3", "launch.env.X=a:b"],
        "ddp": ["train.seed=3", "model.dim=64"],
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs a target, or all"),
        (["zero4"], "there is no target 'zero4'\nhint: did you mean zero"),
        (["lab:ddp"], "there is no chapter 'lab'"),
        (["ddp", "zero1:train.seed=1"], "is for zero1, which is not among the targets"),
        (["ddp", "optim.fused=on"], "optim.fused is what ddp compares"),
        (["all", "zero1:strategy.name=ddp"], "strategy.name is what zero1 compares"),
        (["ddp", "=3"], "'=3' is not an override"),
    ],
)
def test_words_that_mean_nothing_or_unmake_a_pair(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_words(words)


def test_the_users_overrides_reach_both_sides() -> None:
    made = pair("zero3", "train.seed=7", "launch.nproc=4")
    assert {arm.job.config.train.seed for arm in made.arms} == {7}
    assert {arm.plan.world_size for arm in made.arms} == {4}


def test_a_pair_trains_ones_own_recipe(tmp_path: Path) -> None:
    """And not the target's data or size: only how ranks are started stays."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("{name: mine, workload: lm, model: {dim: 32}, data: {source: synthetic}}")
    made = pair("zero3", f"bench.recipe={mine}", "train.seed=7")
    assert made.recipe == str(mine) and f"bench.recipe={mine}" not in made.common
    for arm in made.arms:
        config = arm.job.config
        assert (config.name, config.train.seed, config.launch.launcher) == ("mine", 7, "torchrun")
        assert config.model.model_dump()["dim"] == 32 and arm.plan.world_size == 2
    says = "loader_workers: 4 against 2.*\nhint: set data.num_workers"
    with pytest.raises(ConfigError, match=says):
        pair("single_gpu_isolation", "bench.recipe=nsa_tiny")
    same = ("bench.recipe=nsa_tiny", "data.num_workers=2")
    alone, group = pair("single_gpu_isolation", *same).arms
    assert (alone.plan.world_size, group.plan.world_size) == (1, 2)
    assert group.job.config.data.model_dump()["seq_len"] == 128
    with pytest.raises(ConfigError, match="there is no recipe|no such"):
        pair("zero3", "bench.recipe=nowhere")


def test_an_override_that_breaks_the_pair_is_refused_and_not_a_skip() -> None:
    with pytest.raises(ConfigError, match="ddp, plain: .*cannot be shared by 2 ranks"):
        pair("ddp", "train.global_batch_size=1")
    with pytest.raises(ConfigError, match="unknown key"):
        pair("ddp", "train.stps=1")


def test_one_rank_has_nothing_to_exchange() -> None:
    assert "it needs 2 ranks, and here is 1 rank" in pair("ddp_bucket", "launch.nproc=1").skipped


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (["train.micro_batch_size=16"], "samples per step: 16 against 32 is not equal work"),
        (["train.seed=1"], "train.seed: 0 -> 1: the sides differ in what ddp does not compare"),
        (["train.steps=9"], "steps: 200 against 9 is not equal work"),
        (["optim.name=sgd"], "optim.name: adamw -> sgd"),
        (["precision.mode=bf16"], "precision: fp32 against bf16"),
        (["data.num_workers=1"], "loader_workers: 2 against 1"),
        ([], "the sides of ddp do not differ"),
        (["launch.nproc=1", "optim.fused=off"], "ranks: 2 against 1"),
    ],
)
def test_unequal_work_is_seen(other: list[str], says: str) -> None:
    sides = [load_job("lm_tiny", ["launch.nproc=2", *more]) for more in ([], other)]
    first, second = [(job.config, make_plan(job, env())) for job in sides]
    problems = check_equal(load_targets()["ddp"], first, second)
    assert any(says in problem for problem in problems), problems


def test_a_difference_without_effect_is_seen() -> None:
    sides = [
        load_job("lm_tiny", ["launch.nproc=1", f"strategy.bucket_mb={size}"]) for size in (30, 50)
    ]
    first, second = [(job.config, make_plan(job, env())) for job in sides]
    problems = check_equal(load_targets()["ddp_bucket"], first, second)
    assert any("strategy.bucket_mb is set but has no effect" in problem for problem in problems)


def test_a_target_that_hides_a_difference_is_no_target() -> None:
    text = """
title: unfair
goal: speed
work: {cpu: {recipe: lm_tiny}}
arms: [{name: a}, {name: b, overrides: [optim.fused=on, train.micro_batch_size=16]}]
differs: {optim.fused: one kernel}
loss: {cpu: 1.0e-3, because: none needed}
"""
    with pytest.raises(ConfigError, match="b sets train.micro_batch_size=16, which is not decl"):
        parse_target("unfair", text)


def test_a_target_without_work_for_this_device_is_skipped() -> None:
    target = load_targets()["fused_adamw"]
    only = target.model_copy(update={"work": {"cuda": target.work["cuda"]}})
    assert plan_pair(only, env(0)).skipped == "it has no work for ranks on cpu"
