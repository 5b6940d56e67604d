"""What a pipeline cannot do is refused in the plan, with the nearest that it can; all at once."""

import pytest

from paceline.records import Finding, Plan
from tests.machines import plan

MODEL = ["strategy.name=pipeline", "model.num_layers=5", "model.tied=false"]


def pipelined(*overrides: str) -> Plan:
    """Of 5 blocks, in batches of 12 samples."""
    return plan(*MODEL, "train.micro_batch_size=12", "launch.device=cpu", *overrides)


def errors(made: Plan) -> list[Finding]:
    return [finding for finding in made.findings if finding.severity == "error"]


REFUSED = {
    "too few microbatches for 1f1b": (
        ["launch.nproc=4", "strategy.microbatches=2"],
        "strategy.microbatches", "needs as many microbatches as ranks", "to 4",
    ),
    "too few microbatches for dualpipe": (
        ["launch.nproc=2", "strategy.schedule=dualpipe", "strategy.microbatches=2"],
        "strategy.microbatches", "at least twice the ranks", "to 4",
    ),
    "an odd number of microbatches for dualpipe": (
        ["launch.nproc=2", "strategy.schedule=dualpipe", "strategy.microbatches=5"],
        "strategy.microbatches", "an even number of microbatches", "to 6",
    ),
    "the nearest cuts the batch, too": (  # 8 would do for the schedule, and 12 is no multiple
        ["launch.nproc=4", "strategy.schedule=dualpipe", "strategy.microbatches=6"],
        "strategy.microbatches", "at least twice the ranks", "to 12",
    ),
    "no number of microbatches will do": (
        ["launch.nproc=2", "strategy.schedule=dualpipe", "strategy.microbatches=2",
         "train.micro_batch_size=3"],
        "strategy.microbatches", "at least twice", "to 4, and train.micro_batch_size to a multiple",
    ),
    "an odd number of ranks for dualpipe": (
        ["launch.nproc=3", "strategy.schedule=dualpipe", "strategy.microbatches=12"],
        "launch.nproc", "an even number of ranks, and there are 3", "to 4",
    ),
    "a batch that does not divide": (
        ["launch.nproc=2", "strategy.microbatches=5"],
        "train.micro_batch_size", "cannot be cut into 5", "to 10, or strategy.microbatches to 6",
    ),
    "more stages than blocks": (
        ["launch.nproc=6"], "strategy.stages", "6 stages of a model of 5 blocks", "to 3",
    ),
    "more stages than blocks, two a rank": (
        ["launch.nproc=4", "strategy.schedule=zbv"],
        "strategy.stages", "8 stages of a model of 5 blocks", "to 4",
    ),
    "ranks that do not divide": (
        ["launch.nproc=4", "strategy.stages=3"],
        "strategy.stages", "cannot be laid over 4 ranks", "to 4",
    ),
    "stages that dualpipe cannot have": (
        ["launch.nproc=6", "strategy.schedule=dualpipe", "strategy.stages=3"],
        "strategy.stages", "cannot be laid over 6 ranks", "to 2",
    ),
    "one stage": (
        ["launch.nproc=4", "strategy.stages=1"],
        "strategy.name", "a pipeline of one rank", "strategy.stages to 2",
    ),
    "one rank": (
        ["launch.nproc=1"], "strategy.name", "a pipeline of one rank", "launch.nproc to 2 or more",
    ),
    "a split of too few blocks": (
        ["launch.nproc=2", "strategy.split=[3,1]"],
        "strategy.split", "4 blocks in 2 stages; there are 5 blocks", "strategy.split=[2,3]",
    ),
    "a split of too many stages": (
        ["launch.nproc=2", "strategy.split=[2,2,1]"],
        "strategy.split", "5 blocks in 3 stages", "strategy.split=[2,3]",
    ),
    "more stages a rank than 1f1b has": (
        ["launch.nproc=2", "strategy.stages_per_rank=2"],
        "strategy.stages_per_rank", "it has one stage per rank", "to 1",
    ),
    "a compiled split backward": (
        ["launch.nproc=2", "strategy.schedule=zbv", "train.compile=default"],
        "train.compile", "halves of a backward apart", "train.compile=off",
    ),
    "a whole model compiled": (
        ["launch.nproc=2", "train.compile=default", "train.compile_scope=model"],
        "train.compile_scope", "leaves the model's forward", "blocks, or auto",
    ),
    "a selective split backward": (
        ["launch.nproc=2", "strategy.schedule=dualpipev",
         "train.activation_checkpointing=selective"],
        "train.activation_checkpointing", "only once", "activation_checkpointing=full",
    ),
    "tied weights, sharded": (
        ["launch.nproc=4", "strategy.stages=2", "strategy.inner=zero2", "model.tied=true"],
        "strategy.inner", "read the same weights", "strategy.inner=ddp",
    ),
    "freed weights under a split backward": (
        ["launch.nproc=4", "strategy.schedule=zbv", "strategy.stages=4", "strategy.inner=zero3",
         "strategy.reshard_after_forward=true"],
        "strategy.reshard_after_forward", "the weights that the forward has gathered", "auto",
    ),
    "offloaded stages": (
        ["launch.nproc=4", "strategy.stages=2", "strategy.inner=zero3", "strategy.offload=true"],
        "strategy.offload", "not offloaded", "strategy.offload=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_nearest_that_will_do(case: str) -> None:
    overrides, where, what, hint = REFUSED[case]
    [found] = errors(pipelined(*overrides))
    assert found.where == where
    assert what in found.what and hint in (found.hint or ""), found


def test_all_problems_come_at_once() -> None:
    made = pipelined(
        "launch.nproc=4", "strategy.schedule=dualpipe", "strategy.stages=3",
        "strategy.microbatches=5", "strategy.split=[1,1]", "train.compile=default",
        "strategy.inner=zero3", "model.tied=true",
    )  # fmt: skip
    assert {finding.where for finding in errors(made)} == {
        "strategy.stages", "strategy.microbatches", "strategy.split", "train.compile",
        "strategy.inner",
    }  # fmt: skip


@pytest.mark.parametrize("case", [c for c in REFUSED if "strategy.stages" == REFUSED[c][1]])
def test_the_nearest_number_of_stages_is_accepted(case: str) -> None:
    overrides, _, _, hint = REFUSED[case]
    nearest = f"strategy.stages={hint.removeprefix('to ')}"
    assert not errors(pipelined(*overrides, nearest))


def test_sharded_stages_are_whole_within_a_pass() -> None:
    """zero3's pieces lie between steps; until a pass has ended a rank has whole weights of its
    stages and sums whole gradients. Both are in the estimate, as for zero2 that defers."""
    two = ["launch.nproc=4", "strategy.stages=2"]
    zero2, zero3 = (pipelined(*two, f"strategy.inner=zero{n}").state_bytes for n in (2, 3))
    plain = pipelined(*two).state_bytes
    assert zero2 == zero3
    assert zero3.parameters < plain.parameters <= zero3.gathered
    assert plain.gradients <= zero3.deferred


def test_what_has_no_effect_on_sharded_stages_is_said() -> None:
    two = ["launch.nproc=4", "strategy.stages=2", "strategy.inner=zero3"]
    made = pipelined(*two, "strategy.accumulate=defer", "strategy.reshard_after_forward=false")
    idle = {finding.where for finding in made.findings if finding.severity == "warning"}
    assert "strategy.accumulate" in idle and "strategy.reshard_after_forward" not in idle
