"""DeepSpeed computes what one process computes, on every stage; a bad gradient on one rank leaves
all untouched; what it holds is what was estimated."""

import math
import time
from collections.abc import Callable
from functools import partial
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
    run_each,
    start_ranks,
)
from tests.jobs import BAD_SETTINGS as COMMON
from tests.jobs import BAD_STEPS as STEPS
from tests.jobs import poisoned_sample, write_bad_job
from tests.parity import BATCH, SGD, assert_same, tiny_model
from tests.skips import needs_deepspeed

pytestmark = needs_deepspeed
slow, nightly = pytest.mark.slow, pytest.mark.nightly


@pytest.fixture
def job(tmp_path: Path) -> str:
    return write_bad_job(tmp_path)


def deepspeed(stage: int, *more: str) -> list[str]:
    return ["strategy.name=deepspeed", f"strategy.stage={stage}", "launch.nproc=2", *more]


def lm(*more: str) -> list[str]:
    return [*tiny_model(), *SGD, *BATCH, *more]


# Samples per microbatch: 8 is the whole share of a rank, 2 accumulates four times.
WHOLE, FOURTH = "train.micro_batch_size=8", "train.micro_batch_size=2"
# strategy.offload is idle on CPU ranks; through DeepSpeed's own key its path is taken.
OFFLOAD = "+strategy.deepspeed_config.zero_optimization.offload_optimizer.device=cpu"
QUICK = {"0, accumulation": deepspeed(0, FOURTH), "3, accumulation": deepspeed(3, FOURTH)}
OTHERS = {
    **{f"{stage}, accumulation": deepspeed(stage, FOURTH) for stage in (1, 2)},
    "2, offloaded": deepspeed(2, FOURTH, OFFLOAD),
    "3, recomputed": deepspeed(3, FOURTH, "train.activation_checkpointing=full"),
}
REST = {
    **{f"{stage}": deepspeed(stage, WHOLE) for stage in range(4)},
    **{f"{stage}, offloaded": deepspeed(stage, FOURTH, OFFLOAD) for stage in (1, 3)},
}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="quick", marks=slow),
        pytest.param(OTHERS, id="others", marks=nightly),
        pytest.param(REST, id="rest", marks=nightly),
    ],
)
def test_two_ranks_equal_one(
    cases: dict[str, list[str]], reference: RankEnds, tmp_path: Path
) -> None:
    ended = run_each(tmp_path, "lm_tiny", {name: lm(*case) for name, case in cases.items()})
    for name, ends in ended.items():
        assert_same(reference, ends, name)


@nightly
def test_a_nan_on_one_rank_leaves_every_rank_untouched(job: str, tmp_path: Path) -> None:
    """Two microbatches a step, one of them bad on rank 1; with a skip allowed the run goes on."""
    from paceline.data.cursor import Order, StepSlice

    sample = int(Order(64, 0).at(StepSlice(2, 2, 2, 1).positions(4))[0])
    more = ["train.micro_batch_size=2", "train.grad_accum=2", f"model.poison={sample}"]
    cases = {
        f"stage {stage}": [*COMMON, *more, "train.max_skips=1", *deepspeed(stage)]
        for stage in range(4)
    }
    for name, ends in run_each(tmp_path / "runs", job, cases).items():
        assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}, name
        assert [row.step for row in ends.rows if row.skipped] == [3], name
        good = [row for row in ends.rows if not row.skipped]
        assert all(math.isfinite(row.loss) and math.isfinite(row.grad_norm) for row in good), name
        for state in ends.states:
            assert {float(count) for count in state.slot("step").values()} == {STEPS - 1}, name
            assert all(torch.isfinite(moment).all() for moment in state.optimizer.values()), name
        first, second = (state.weights for state in ends.states)
        assert all(torch.equal(first[key], second[key]) for key in first), name


# Every kind once; all pairs at night.
PAIRS = [("inf", 1), ("grad", 2), ("nan", 3)]
ALL_PAIRS = [(kind, stage) for kind in ("nan", "inf", "grad") for stage in range(4)]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS[:1], id="one", marks=slow),
        pytest.param(PAIRS[1:], id="some", marks=nightly),
        pytest.param([p for p in ALL_PAIRS if p not in PAIRS], id="rest", marks=nightly),
    ],
)
def test_the_run_ends_as_nan(pairs: list[tuple[str, int]], job: str, tmp_path: Path) -> None:
    """Weights are those of the steps before the bad one, bit for bit."""
    sample = poisoned_sample(rank=1)
    # A schedule that does not know how long the run is; and no step after the bad one.
    steady = [*COMMON, "optim.schedule.name=constant"]
    bad = [f"model.poison={sample}", "train.steps=5"]
    cases = {
        f"{kind} {stage}": [*steady, *deepspeed(stage), *bad, f"model.kind={kind}"]
        for kind, stage in pairs
    }
    stages = sorted({stage for _, stage in pairs})
    cases |= {f"before {n}": [*steady, *deepspeed(n), "train.steps=4"] for n in stages}
    ended = run_each(tmp_path / "runs", job, cases)
    for kind, stage in pairs:
        name = f"{kind} {stage}"
        ends, before = ended[name], ended[f"before {stage}"]
        assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.NAN}, name
        assert {verdict.bad_step for verdict in ends.verdicts} == {5}, name
        assert sample in ends.verdicts[1].bad_sample_ids, name
        for end, expected in zip(ends.states, before.states, strict=True):
            assert all(torch.equal(end.weights[n], w) for n, w in expected.weights.items()), name
            assert end.optimizer.keys() == expected.optimizer.keys(), name
            same = [torch.equal(end.optimizer[n], m) for n, m in expected.optimizer.items()]
            assert all(same), name


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(["bf16", "fp16", "bf16", "fp16"], id="some", marks=nightly),
        pytest.param(["fp16", "bf16", "fp16", "bf16"], id="rest", marks=nightly),
    ],
)
def test_16_bits_compute_nearly_the_same(
    modes: list[str], reference: RankEnds, tmp_path: Path
) -> None:
    cases = {
        f"{stage}, {mode}": lm(*deepspeed(stage, FOURTH), f"precision.mode={mode}")
        for stage, mode in enumerate(modes)
    }
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        for expected, found in zip(reference.rows, ends.rows, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-2), name
        good = [row for row in ends.rows if not row.skipped]
        assert good[0].grad_norm == pytest.approx(reference.rows[0].grad_norm, rel=5e-2), name
        assert ends.rows[0].loss != reference.rows[0].loss, f"{name} was computed in fp32"
        assert {w.dtype for w in ends.states[0].weights.values()} == {torch.float32}, name


Look = Callable[[Any, Any], Any]


def build_ranks(folder: Path, cases: dict[str, list[str]], look: Look) -> dict[str, list[Any]]:
    """Engines on two ranks, built one after the other and not trained; what `look(engine, batches)`
    returned on each rank comes back."""
    runs = {}
    for name, overrides in cases.items():
        settings = [*tiny_model(), *overrides]
        runs[name] = prepare_run(folder / name, "lm_tiny", settings)[2], settings
    start_ranks(RunDir(folder), 2, partial(_look, list(runs.values()), look))
    return {
        name: [torch.load(run.rank(rank) / "seen.pt", weights_only=False) for rank in range(2)]
        for name, (run, _) in runs.items()
    }


def _look(runs: list[tuple[RunDir, list[str]]], look: Look, group: RunDir, place: RankId) -> None:
    for run, settings in runs:
        seen = look(*build_engine(run, "lm_tiny", settings))
        run.rank(place.rank).mkdir(parents=True, exist_ok=True)
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


STAGES = {f"{stage}": [*STATE, *ODD, *deepspeed(stage)] for stage in range(4)}
STAGES |= {"3, small parts": [*STAGES["3"], *SMALL_STAGE3]}


@nightly
def test_what_is_held_is_what_was_estimated(tmp_path: Path) -> None:
    for name, held in build_ranks(tmp_path, STAGES, _hold).items():
        for rank, found in enumerate(held):
            asked = find_strategy("deepspeed").estimate(*_described(STAGES[name], rank))
            assert (found.parameters, found.gradients, found.optimizer) == (
                asked.parameters, asked.gradients, asked.optimizer,
            ), name  # fmt: skip


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
def test_what_is_sent_is_what_was_planned(tmp_path: Path) -> None:
    cases = {name: case for name, case in STAGES.items() if name in "0123"}
    for name, sent in build_ranks(tmp_path, cases, _count).items():
        planned = find_strategy("deepspeed").exchange(*_described(cases[name], 0))
        assert sent == [planned.sent] * 2, name


SLOW_S = 0.2


def _arrive(engine: Any, batches: Any) -> Any:
    """Return this rank's own work in three steps, of a phase and of all; in each of them rank 1 is
    slow in another phase."""
    clock, slow_in = HostClock(), ("forward", "backward", "optimizer")
    enter = clock.enter

    def enter_late(phase: str) -> None:
        enter(phase)
        if dist.get_rank() == 1 and clock.step > 1 and phase == slow_in[clock.step - 2]:
            time.sleep(SLOW_S)

    clock.enter = enter_late  # type: ignore[method-assign]
    for step in range(1, 5):
        clock.begin(step)
        engine.forward_backward(batches[:1], 0.01, clock)
        engine.step(0.01, clock)
    clock.begin(5)
    own = [
        {p: s - row.blocked_s.get(p, 0) for p, s in row.phases_s.items()}
        for row in clock.finished()
    ]
    return [(row[phase], sum(row.values())) for row, phase in zip(own[1:], slow_in, strict=True)]


@slow
def test_who_waits_for_a_slow_rank_does_not_work(tmp_path: Path) -> None:
    """In forward, backward and update; stage 1 exchanges as 2 does, and 3 by what it has cut up."""
    cases = {name: STAGES[name] for name in ("0", "2", "3, small parts")}
    for name, (early, late) in build_ranks(tmp_path, cases, _arrive).items():
        for (part, whole), (slow_part, slow_whole) in zip(early, late, strict=True):
            assert slow_part - part > 0.7 * SLOW_S, name
            assert slow_whole - whole > 0.7 * SLOW_S, name


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
@pytest.mark.parametrize("mode", [pytest.param("fp32", marks=nightly), "fp16"])
def test_state_survives_a_round_trip(mode: str, tmp_path: Path) -> None:
    cases = {name: [*case, f"precision.mode={mode}"] for name, case in STAGES.items()}
    for name, ranks in build_ranks(tmp_path, cases, _go_back).items():
        for states in ranks:
            kept, back, once, again = (state.weights | state.optimizer for state in states)
            assert kept.keys() == back.keys() == once.keys() == again.keys(), name
            assert all(torch.equal(kept[key], back[key]) for key in kept), name
            assert all(torch.equal(once[key], again[key]) for key in once), name
            assert any(not torch.equal(kept[key], once[key]) for key in kept), "nothing was trained"


def _look_inside(engine: Any, batches: Any) -> Any:
    zero = engine.engine._config.zero_config
    return zero.reduce_bucket_size, zero.overlap_comm, engine.proofs()


@slow
def test_overrides_reach_the_live_engine(tmp_path: Path) -> None:
    section = "+strategy.deepspeed_config.zero_optimization"
    more = [f"{section}.reduce_bucket_size=12345", f"{section}.overlap_comm=true"]
    cases = {"own": [*STATE, *deepspeed(2, *more), "precision.mode=bf16"]}
    for bucket, overlap, proofs in build_ranks(tmp_path, cases, _look_inside)["own"]:
        assert (bucket, overlap) == (12345, True)
        assert [proof.what for proof in proofs if not proof.ok] == []
        assert any("bfloat16" in proof.effective for proof in proofs)


@nightly
def test_evaluation_between_steps(corpus: Path, tmp_path: Path) -> None:
    """Losses on validation data, and training goes on as if nobody had looked."""
    text = [f"data.source={corpus}", f"data.cache_dir={tmp_path / 'cache'}"]
    text += ["data.val_fraction=0.3", "train.eval_every=2", "train.eval_samples=8"]
    common = lm("train.steps=6", WHOLE, *text)
    cases = {"ddp": [*common, "launch.nproc=2"]}
    cases |= {f"{stage}": [*common, *deepspeed(stage)] for stage in (0, 3)}
    ended = run_each(tmp_path / "runs", "lm_tiny", cases)
    expected = ended.pop("ddp").rows
    for name, ends in ended.items():
        assert [row.val_loss for row in ends.rows] == [
            row.val_loss and pytest.approx(row.val_loss, rel=1e-5) for row in expected
        ], name
        losses = [pytest.approx(row.loss, rel=1e-5) for row in expected]
        assert [row.loss for row in ends.rows] == losses, name
        assert ends.rows[-1].val_loss is not None


@slow
def test_a_key_that_deepspeed_does_not_know_is_a_config_error(tmp_path: Path) -> None:
    unknown = "+strategy.deepspeed_config.zero_optimization.reduce_buckets=1"
    with pytest.raises(AssertionError, match="ConfigError: DeepSpeed refuses its config"):
        build_ranks(tmp_path, {"case": [*STATE, *deepspeed(2, unknown)]}, _look_inside)
