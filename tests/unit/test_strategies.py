"""What each strategy says it will hold, worked out by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan, measure_model
from paceline.strategies import all_strategies, find_strategy
from paceline.strategies.base import Share
from paceline.strategies.blocks import find_blocks, measure_shape
from paceline.strategies.shape import ModelShape
from paceline.strategies.zero import deal

JOB = load_job("lm_1b", [])
MODEL = measure_model(JOB.workload, JOB.config)
P = MODEL.size().num_trainable
STEPS = 4 * len(MODEL.trainable)  # AdamW counts its steps, in fp32, once a parameter


def held(name: str, size: int, index: int = 0, **more: int) -> int:
    return find_strategy(name).estimate(MODEL, JOB.config, Share(size, index, **more)).total


def test_ddp_holds_16_bytes_a_parameter() -> None:
    assert held("ddp", 8) == 16 * P + STEPS
    assert (
        P == 1_345_423_360
    )  # 2 x 32000 x 2048 + 24 x (4 x 2048^2 + 3 x 2048 x 5504 + 2 x 2048) + 2048


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_zero1_deals_the_state_out(ranks: int) -> None:
    """8 P whole, 8 P over the ranks together, no rank off by more than its largest parameter."""
    states = [held("zero1", ranks, index) - 8 * P for index in range(ranks)]
    assert sum(states) == 8 * P + STEPS
    largest = 8 * max(p.numel for p in MODEL.trainable)
    assert max(states) <= (8 * P + STEPS) / ranks + largest


@pytest.mark.parametrize("name", ["zero2", "zero3"])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_zero3_holds_its_share(name: str, ranks: int) -> None:
    """Every first axis of lm_1b divides by 64: nothing is padded."""
    assert held(name, ranks) == 16 * P // ranks + STEPS


def test_padding_is_counted() -> None:
    """5 x 3 on 2 ranks: 3 rows each, and rank 1 has state for 2 of them only."""
    model = measure_shape(nn.Linear(3, 5, bias=False))
    first, second = (
        find_strategy("zero3").estimate(model, JOB.config, Share(2, index)) for index in (0, 1)
    )
    assert (first.parameters, first.gradients, first.optimizer) == (36, 36, 2 * 36 + 4)
    assert (second.parameters, second.gradients, second.optimizer) == (36, 36, 2 * 24 + 4)


def test_zero2_gathers_all_and_zero3_two_blocks() -> None:
    share = Share(4, 0, compute_bytes=2)
    two, three = (find_strategy(n).estimate(MODEL, JOB.config, share) for n in ("zero2", "zero3"))
    assert two.gathered == 2 * P
    # The sizes in `test_ddp_holds_16_bytes_a_parameter`: a block, and the rest of the model.
    block = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
    assert three.gathered == 2 * (P - 24 * block + 2 * block)


def test_deferring_costs_whole_gradients() -> None:
    job = load_job("lm_1b", ["strategy.name=zero3", "strategy.accumulate=defer"])
    share = Share(4, 0, compute_bytes=2, num_microbatches=3)
    strategy = find_strategy("zero3")
    assert strategy.estimate(MODEL, job.config, share).deferred == 4 * P
    assert strategy.exchange(MODEL, job.config, share).sent == 4 * P
    assert strategy.exchange(MODEL, JOB.config, share).sent == 3 * 4 * P
    assert strategy.estimate(MODEL, JOB.config, share).deferred == 0


def test_deal_is_torchs_own() -> None:
    """The same hands as ZeroRedundancyOptimizer deals, group by group."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from paceline.strategies.optim import parameter_groups

    with torch.device("meta"):
        model = JOB.workload.build_model(JOB.config)
    shapes = measure_shape(model)
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    try:
        groups = parameter_groups(model, JOB.config.optim)
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.SGD, lr=0.1)
        dealt = [
            sum(p.numel() for g in part for p in g["params"])
            for part in optimizer._partition_parameters()
        ]
    finally:
        dist.destroy_process_group()
    assert dealt == [
        sum(p.numel for p in hand) for hand in deal(shapes.trainable, 4, JOB.config.optim)
    ]


def test_blocks_are_the_items_of_lists() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    model = nn.ModuleDict({"a": inner, "b": nn.Linear(2, 2)})
    assert len(find_blocks(model)) == 3
    assert find_blocks(nn.Linear(2, 2)) == []
    assert isinstance(measure_shape(model), ModelShape) and measure_shape(model).num_units == 4


@pytest.mark.parametrize("name", all_strategies())
def test_every_strategy_can_be_asked(name: str) -> None:
    strategy = find_strategy(name)
    assert strategy.estimate(MODEL, JOB.config, Share(2, 1)).total > 0
    assert strategy.exchange(MODEL, JOB.config, Share(2, 1)).sent >= 0


def test_an_encoder_that_sees_few_patches_costs_less_than_its_weights() -> None:
    job = load_job("mae_tiny", [])
    model = measure_model(job.workload, job.config)
    seen, everything = model.positions[0], model.positions[-1]
    assert 1 < seen < everything and len(model.positions) == model.num_blocks
    by_weights = replace(model, positions=())
    first, of_weights = (
        shape.block_costs[0] / sum(shape.block_costs) for shape in (model, by_weights)
    )
    assert first < of_weights


@pytest.mark.parametrize(
    ("words", "stage", "shards"),
    [
        ("name=ddp", 0, False),
        ("name=zero1", 1, False),
        ("name=zero2", 2, True),
        ("name=zero3_hybrid", 3, True),
        ("name=deepspeed stage=2", 2, False),
        ("name=pipeline", None, False),
        ("name=pipeline inner=zero3", None, True),
    ],
)
def test_each_says_what_it_shards(words: str, stage: int | None, shards: bool) -> None:
    """The audit looks for the collectives of those that shard, and torch's fused SGD fails them."""
    four = ["launch.nproc=4", "launch.device=cpu", "strategy.stages=2", "strategy.shard_size=2"]
    sgd = ["optim.name=sgd", "optim.momentum=0.0"]
    job = load_job("lm_tiny", [*four, *sgd, *(f"strategy.{word}" for word in words.split())])
    plan = make_plan(job, probe())
    strategy = find_strategy(plan.strategy.value)
    assert strategy.zero_stage(job.config) == stage
    assert strategy.shards(job.config) is shards
    assert bool(strategy.collectives(job.config, plan)) is shards
    assert plan.fused_optimizer.value is not shards


@pytest.mark.parametrize(
    ("name", "left"),
    [("ddp", "peak"), ("zero3", "gathered"), ("deepspeed", "without the optimizer")],
)
def test_what_is_offloaded_is_not_on_the_device(name: str, left: str) -> None:
    config = load_job("lm_1b", [f"strategy.name={name}", "strategy.offload=true"]).config
    strategy = find_strategy(name)
    state = strategy.estimate(MODEL, config, Share(4, 0))
    expected = {
        "peak": state.peak,
        "gathered": state.gathered,
        "without the optimizer": state.peak - state.optimizer,
    }[left]
    assert strategy.device_bytes(config, state) == expected
