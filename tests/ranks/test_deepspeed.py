"""DeepSpeed computes what one process computes, on every stage; a bad gradient on one rank leaves
all untouched; what it holds is what was estimated."""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config.schema import RunConfig
from paceline.errors import Outcome
from paceline.job import load_job
from paceline.machine.topology import RankId
from paceline.plan.planner import measure_model
from paceline.records.rundir import RunDir
from paceline.strategies import find_strategy
from paceline.strategies.base import Share
from paceline.strategies.clock import HostClock
from paceline.strategies.shape import ModelShape
from tests.harness import (
    HeldSource,
    RankEnds,
    RankState,
    build_engine,
    prepare_run,
    run_ranks,
    start_ranks,
)
from tests.ranks.test_nan import COMMON, STEPS, job, poisoned_sample  # noqa: F401
from tests.ranks.test_parity import (  # noqa: F401
    BATCH,
    SGD,
    assert_same_curve,
    assert_same_weights,
    reference,
    tiny_model,
)

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed not installed")
slow = pytest.mark.slow


def deepspeed(stage: int, *more: str) -> list[str]:
    return ["strategy.name=deepspeed", f"strategy.stage={stage}", "launch.nproc=2", *more]


# Stage and samples a microbatch: 8 is the whole share of a rank, 2 accumulates four times.
CASES = [
    (0, 2), pytest.param(0, 8, marks=slow), pytest.param(1, 8, marks=slow),
    pytest.param(1, 2, marks=slow), pytest.param(2, 8, marks=slow), pytest.param(2, 2, marks=slow),
    pytest.param(3, 8, marks=slow), (3, 2),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "micro"), CASES)
def test_two_ranks_equal_one(
    stage: int, micro: int, reference: RankEnds, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    overrides = [*tiny_model(), *SGD, *BATCH, *deepspeed(stage), f"train.micro_batch_size={micro}"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", overrides)
    assert_same_curve(reference, ends)
    assert_same_weights(reference, ends)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=slow) for stage in (1, 2, 3))])
def test_a_nan_on_one_rank_leaves_every_rank_untouched(
    job: str, stage: int, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Two microbatches a step, one of them bad on rank 1; with a skip allowed the run goes on."""
    from paceline.data.cursor import Order, StepSlice

    sample = int(Order(64, 0).at(StepSlice(2, 2, 2, 1).positions(4))[0])
    more = ["train.micro_batch_size=2", "train.grad_accum=2", f"model.poison={sample}"]
    more += ["train.max_skips=1", *deepspeed(stage)]
    ends = run_ranks(tmp_path / "run", job, [*COMMON, *more])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}
    assert [row.step for row in ends.rows if row.skipped] == [3]
    good = [row for row in ends.rows if not row.skipped]
    assert all(math.isfinite(row.loss) and math.isfinite(row.grad_norm) for row in good)
    for state in ends.states:
        assert {float(count) for count in state.slot("step").values()} == {STEPS - 1}
        assert all(torch.isfinite(moment).all() for moment in state.optimizer.values())
    first, second = (state.weights for state in ends.states)
    assert all(torch.equal(first[name], second[name]) for name in first)


@slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["nan", "inf", "grad"])
def test_the_run_ends_as_nan(job: str, kind: str, stage: int, tmp_path: Path) -> None:  # noqa: F811
    """Weights are those of the steps before the bad one, bit for bit."""
    sample = poisoned_sample(job, tmp_path, rank=1)
    # A schedule that does not know how long the run is; and no step after the bad one.
    steady = [*COMMON, *deepspeed(stage), "optim.schedule.name=constant"]
    bad = [f"model.poison={sample}", f"model.kind={kind}", "train.steps=5"]
    ends = run_ranks(tmp_path / "run", job, [*steady, *bad])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.NAN}
    assert {verdict.bad_step for verdict in ends.verdicts} == {5}
    assert sample in ends.verdicts[1].bad_sample_ids
    before = run_ranks(tmp_path / "before", job, [*steady, "train.steps=4"])
    for end, expected in zip(ends.states, before.states, strict=True):
        assert all(torch.equal(end.weights[n], w) for n, w in expected.weights.items())
        assert end.optimizer.keys() == expected.optimizer.keys()
        assert all(torch.equal(end.optimizer[n], m) for n, m in expected.optimizer.items())


@slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_16_bits_compute_nearly_the_same(
    stage: int, mode: str, reference: RankEnds, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    overrides = [*tiny_model(), *SGD, *BATCH, *deepspeed(stage), f"precision.mode={mode}"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*overrides, "train.micro_batch_size=2"])
    for expected, found in zip(reference.rows, ends.rows, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    good = [row for row in ends.rows if not row.skipped]
    assert good[0].grad_norm == pytest.approx(reference.rows[0].grad_norm, rel=5e-2)
    assert ends.rows[0].loss != reference.rows[0].loss, "it was computed in fp32"
    assert {w.dtype for w in ends.states[0].weights.values()} == {torch.float32}


def build_ranks(folder: Path, overrides: list[str], look: Callable[[Any, Any], Any]) -> list[Any]:
    """An engine on each rank, built and not trained; `look(engine, batches)` on each comes back."""
    settings = [*tiny_model(), *overrides]
    _, plan, run = prepare_run(folder, "lm_tiny", settings)
    start_ranks(run, plan.world_size, partial(_look, settings, look))
    return [torch.load(run.rank(rank) / "seen.pt", weights_only=False) for rank in range(2)]


def _look(settings: list[str], look: Callable[[Any, Any], Any], run: RunDir, place: RankId) -> None:
    seen = look(*build_engine(run, "lm_tiny", settings))
    torch.save(seen, run.rank(place.rank) / "seen.pt")


STATE = [*BATCH, "optim.name=adamw", "train.micro_batch_size=2", "train.steps=9"]


def _hold(engine: Any, batches: Any) -> Any:
    """What is held after backward, once the optimizer has its state."""
    for _ in range(2):
        engine.forward_backward(batches, 0.01, HostClock())
        found = engine.held()
        engine.step(0.01, HostClock())
    return found


# Odd sizes, so that padding counts; and a bucket and threshold that cut this model up.
ODD = ["model.dim=36", "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=301"]
SMALL_STAGE3 = [
    "+strategy.deepspeed_config.zero_optimization.stage3_param_persistence_threshold=500",
    "+strategy.deepspeed_config.zero_optimization.reduce_bucket_size=20000",
]


@slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "3, small parts"])
def test_what_is_held_is_what_was_estimated(stage: int | str, tmp_path: Path) -> None:
    overrides = [*STATE, *ODD, *deepspeed(int(str(stage)[0]))]
    overrides += SMALL_STAGE3 if stage == "3, small parts" else []
    held = build_ranks(tmp_path / "run", overrides, _hold)
    for rank, found in enumerate(held):
        asked = find_strategy("deepspeed").estimate(*_described(overrides, rank))
        assert (found.parameters, found.gradients, found.optimizer) == (
            asked.parameters, asked.gradients, asked.optimizer,
        )  # fmt: skip


def _described(overrides: list[str], rank: int) -> tuple[ModelShape, RunConfig, Share]:
    planned = load_job("lm_tiny", [*tiny_model(), *overrides])
    share = Share(size=2, index=rank, num_microbatches=4)
    return measure_model(planned.workload, planned.config), planned.config, share


def _count(engine: Any, batches: Any) -> Any:
    """Bytes that backward hands to collectives that sum, padding included."""
    sent, backend = [0], engine.deepspeed.comm.comm.cdb
    for owner, name in (
        (dist, "all_reduce"),
        (dist, "reduce"),
        (backend, "reduce_scatter_function"),
    ):
        setattr(owner, name, _counting(getattr(owner, name), sent, "scatter" in name))
    engine.forward_backward(batches, 0.01, HostClock())
    return sent[0]


def _counting(plain: Any, sent: list[int], is_second: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in [*args, *kwargs.values()] if torch.is_tensor(value)]
        sent[0] += tensors[1 if is_second else 0].nbytes
        return plain(*args, **kwargs)

    return call


@slow
@pytest.mark.parametrize("stage", range(4))
def test_what_is_sent_is_what_was_planned(stage: int, tmp_path: Path) -> None:
    overrides = [*STATE, *ODD, *deepspeed(stage)]
    planned = find_strategy("deepspeed").exchange(*_described(overrides, 0))
    assert build_ranks(tmp_path / "run", overrides, _count) == [planned.sent] * 2


def _go_back(engine: Any, batches: Any) -> Any:
    """Train, remember, train on, go back, train on again: the same both times."""
    ends = []
    engine.forward_backward(batches, 0.01, HostClock())
    engine.step(0.01, HostClock())
    kept = RankState.of(engine)
    source = HeldSource.of_all_ranks(kept.pieces)
    for _ in range(2):
        for _ in range(2):
            engine.forward_backward(batches, 0.01, HostClock())
            engine.step(0.01, HostClock())
        ends.append(RankState.of(engine))
        engine.load(source)
    return [kept, RankState.of(engine), *ends]


@slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "3, small parts"])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_state_survives_a_round_trip(stage: int | str, mode: str, tmp_path: Path) -> None:
    overrides = [*STATE, *ODD, *deepspeed(int(str(stage)[0])), f"precision.mode={mode}"]
    overrides += SMALL_STAGE3 if stage == "3, small parts" else []
    for states in build_ranks(tmp_path / "run", overrides, _go_back):
        kept, back, once, again = (state.weights | state.optimizer for state in states)
        assert kept.keys() == back.keys() == once.keys() == again.keys()
        assert all(torch.equal(kept[key], back[key]) for key in kept)
        assert all(torch.equal(once[key], again[key]) for key in once)
        assert any(not torch.equal(kept[key], once[key]) for key in kept), "nothing was trained"


def _look_inside(engine: Any, batches: Any) -> Any:
    zero = engine.engine._config.zero_config
    return zero.reduce_bucket_size, zero.overlap_comm, engine.proofs()


@slow
def test_overrides_reach_the_live_engine(tmp_path: Path) -> None:
    section = "+strategy.deepspeed_config.zero_optimization"
    more = [f"{section}.reduce_bucket_size=12345", f"{section}.overlap_comm=true"]
    for bucket, overlap, proofs in build_ranks(
        tmp_path / "run", [*STATE, *deepspeed(2, *more), "precision.mode=bf16"], _look_inside
    ):
        assert (bucket, overlap) == (12345, True)
        assert [proof.what for proof in proofs if not proof.ok] == []
        assert any("bfloat16" in proof.effective for proof in proofs)


@slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_computes_the_same(
    stage: int, reference: RankEnds, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """strategy.offload is idle on CPU ranks; through DeepSpeed's own key its path is taken."""
    offload = "+strategy.deepspeed_config.zero_optimization.offload_optimizer.device=cpu"
    overrides = [*tiny_model(), *SGD, *BATCH, *deepspeed(stage, offload)]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*overrides, "train.micro_batch_size=2"])
    assert_same_curve(reference, ends)
    assert_same_weights(reference, ends)


@slow
def test_recomputation_under_stage_3(reference: RankEnds, tmp_path: Path) -> None:  # noqa: F811
    overrides = [*tiny_model(), *SGD, *BATCH, *deepspeed(3), "train.micro_batch_size=2"]
    recompute = ["train.activation_checkpointing=full"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*overrides, *recompute])
    assert_same_curve(reference, ends)


@slow
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_between_steps(stage: int, corpus: Path, tmp_path: Path) -> None:
    """Losses on validation data, and training goes on as if nobody had looked."""
    text = [f"data.source={corpus}", f"data.cache_dir={tmp_path / 'cache'}"]
    text += ["data.val_fraction=0.3", "train.eval_every=2", "train.eval_samples=8"]
    common = [*tiny_model(), *SGD, *BATCH, "train.steps=6", "train.micro_batch_size=8", *text]
    expected = run_ranks(tmp_path / "ddp", "lm_tiny", [*common, "launch.nproc=2"]).rows
    found = run_ranks(tmp_path / "run", "lm_tiny", [*common, *deepspeed(stage)]).rows
    assert [row.val_loss for row in found] == [
        row.val_loss and pytest.approx(row.val_loss, rel=1e-5) for row in expected
    ]
    assert [row.loss for row in found] == [pytest.approx(row.loss, rel=1e-5) for row in expected]
    assert found[-1].val_loss is not None


@slow
def test_a_key_that_deepspeed_does_not_know_is_a_config_error(tmp_path: Path) -> None:
    unknown = "+strategy.deepspeed_config.zero_optimization.reduce_buckets=1"
    with pytest.raises(AssertionError, match="ConfigError: DeepSpeed refuses its config"):
        build_ranks(tmp_path / "run", [*STATE, *deepspeed(2, unknown)], _look_inside)
