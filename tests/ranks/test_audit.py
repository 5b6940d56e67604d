"""audit.json: what really ran is seen, and what differs is a warning or, if strict, exit 1."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from paceline.errors import AuditError, Outcome
from paceline.machine.topology import RankId
from paceline.records import Audit, Proof
from paceline.records.rundir import RunDir
from paceline.strategies import compose, engine
from paceline.strategies.clock import HostClock
from paceline.strategies.offload import Offloader
from tests.harness import build_engine, prepare_run, run_here, run_ranks, start_ranks
from tests.parity import tiny_model

ALL = partial(Offloader, min_bytes=0)
SHORT = [*tiny_model(), "train.steps=4", "train.micro_batch_size=4"]


def audit_of(folder: Path, overrides: list[str]) -> dict[str, Proof]:
    ends = run_here(folder, "lm_tiny", [*SHORT, *overrides])
    return {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}


@pytest.mark.parametrize(("impl", "seen"), [("sdpa", "flash x 2"), ("math", "math x 2")])
def test_the_kernel_that_attention_took_is_named(impl: str, seen: str, tmp_path: Path) -> None:
    proof = audit_of(tmp_path / "run", [f"attention.impl={impl}"])["attention"]
    assert proof.ok and proof.effective == seen
    assert "q k v 4x4x16x8 4x2x16x8 4x2x16x8, fp32, no mask" in proof.proof


def test_eager_attention_leaves_no_fused_kernel(tmp_path: Path) -> None:
    assert audit_of(tmp_path / "run", ["attention.impl=eager"])["attention"].ok


def test_what_was_decided_is_what_is_held_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that is not applied: each part of it shows."""
    from paceline.train import worker

    torch.backends.cuda.enable_flash_sdp(True)  # whatever the run before has left
    monkeypatch.setattr(worker, "apply_policy", lambda plan: None)
    asked = ["attention.impl=math", "precision.matmul=medium"]
    found = audit_of(tmp_path / "run", asked)
    assert not found["attention"].ok and "flash" in found["attention"].effective
    assert not found["fp32 products"].ok
    with pytest.raises(AuditError, match="math was decided, and flash x 2 ran"):
        audit_of(tmp_path / "strict", [*asked, "audit.strict=true"])


def test_precision_optimizer_and_recomputation_are_seen(tmp_path: Path) -> None:
    asked = ["precision.mode=bf16", "optim.fused=off", "train.activation_checkpointing=full"]
    found = audit_of(tmp_path / "run", asked)
    assert found["precision"].effective.startswith("bf16") and found["precision"].ok
    assert found["optimizer"].effective == "not fused" and found["optimizer"].ok
    recomputed = found["activation checkpointing"]
    assert recomputed.ok and recomputed.effective == "4 attention calls forward, 2 backward"


@pytest.mark.parametrize(("kind", "forward"), [("none", 2), ("selective", 4)])
def test_recomputation_is_counted(kind: str, forward: int, tmp_path: Path) -> None:
    """A dispatch mode passes each call on to itself; that is one call."""
    found = audit_of(tmp_path / "run", [f"train.activation_checkpointing={kind}"])
    recomputed = found["activation checkpointing"]
    assert recomputed.ok
    assert recomputed.effective == f"{forward} attention calls forward, 2 backward"


def test_an_evaluation_before_it_changes_nothing(tmp_path: Path) -> None:
    two = ["launch.nproc=2", "strategy.name=zero2", "train.eval_every=2", "train.eval_samples=8"]
    text = ["data.source=stdlib", "data.max_files=40", f"data.cache_dir={tmp_path / 'cache'}"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*SHORT, *two, *text])
    assert all(proof.ok for proof in Audit.load(ends.run.audit).proofs if "FSDP" in proof.what)


def test_every_group_has_the_timeout(tmp_path: Path) -> None:
    """The harness joins with 90 s; the groups of a mesh are made later."""
    four = ["launch.nproc=4", "strategy.name=zero3_hybrid", "strategy.shard_size=2"]
    limit = ["launch.collective_timeout_s=90"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*SHORT, *four, *limit])
    proof = next(p for p in Audit.load(ends.run.audit).proofs if "timeout" in p.what)
    assert proof.ok and proof.effective == "90 s", proof


def test_types_on_the_wire_of_a_sharded_run(tmp_path: Path) -> None:
    two = ["launch.nproc=2", "strategy.name=zero3", "precision.mode=bf16"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*SHORT, *two])
    found = {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}
    assert found["FSDP gather"].ok and found["FSDP gather"].effective.startswith("bf16")
    assert found["FSDP reduce"].ok and found["FSDP reduce"].effective.startswith("fp32")
    assert found["FSDP units"].effective == "3 units"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_types_on_the_wire_of_sharded_stages(schedule: str, tmp_path: Path) -> None:
    four = ["launch.nproc=4", "strategy.name=pipeline", f"strategy.schedule={schedule}"]
    stages = 2 if schedule == "1f1b" else 4
    sharded = [f"strategy.stages={stages}", "strategy.inner=zero3", "precision.mode=bf16"]
    words = [*SHORT, *four, *sharded, "model.num_layers=4", "model.tied=false"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", words)
    found = {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}
    assert found["FSDP gather"].ok and found["FSDP gather"].effective.startswith("bf16")
    assert found["FSDP reduce"].ok and found["FSDP reduce"].effective.startswith("fp32")


def test_buckets_are_what_ddp_made(tmp_path: Path) -> None:
    two = ["launch.nproc=2", "strategy.bucket_mb=0.02"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*SHORT, *two])
    found = {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}
    assert found["DDP buckets"].ok and int(found["DDP buckets"].effective.split()[0]) > 1
    assert ends.verdicts[0].outcome is Outcome.OK


# Two blocks and the rest are three units. zero2 gathers each once, zero3 its blocks again for their
# backward. DDP's one bucket is exchanged once, however many microbatches a step has.
EXCHANGED = {
    "zero2": ("c10d::_allgather_base_", 3),
    "zero3": ("c10d::_allgather_base_", 5),
    "ddp": ("c10d::allreduce_", 1),
}


def test_a_step_exchanges_as_often_as_it_must(tmp_path: Path) -> None:
    settings = {
        name: [*SHORT, "launch.nproc=2", f"strategy.name={name}", "train.grad_accum=1"]
        for name in EXCHANGED
    }
    settings["ddp"] += ["train.micro_batch_size=2", "train.grad_accum=3"]
    for name, overrides in settings.items():
        prepare_run(tmp_path / name, "lm_tiny", overrides)
    start_ranks(RunDir(tmp_path), 2, partial(count_exchanges, settings))


def count_exchanges(settings: dict[str, list[str]], group: RunDir, place: RankId) -> None:
    for name, overrides in settings.items():
        engine, batches = build_engine(RunDir(group.root / name), "lm_tiny", overrides)
        engine.forward_backward(batches, 1.0, HostClock())  # DDP sorts its buckets after this one
        engine.step(0.1, HostClock())
        with torch.profiler.profile() as profile:
            engine.forward_backward(batches, 1.0, HostClock())
        op, expected = EXCHANGED[name]
        found = {event.key: event.count for event in profile.key_averages()}
        assert found.get(op, 0) == expected, f"{name}: {found.get(op, 0)} of {op}"


def test_offloaded_activations_come_back_and_are_proven(tmp_path: Path) -> None:
    """On CPUs, where a run sends nothing: ranks are told that they shall."""
    settings = {
        name: [*SHORT, "launch.nproc=2", f"strategy.name={name}", "precision.mode=bf16"]
        for name in ("ddp", "zero3")
    }
    for name, overrides in settings.items():
        prepare_run(tmp_path / name, "lm_tiny", overrides)
    start_ranks(RunDir(tmp_path), 2, partial(offload_and_compare, settings))


def offload_and_compare(settings: dict[str, list[str]], group: RunDir, place: RankId) -> None:
    for name, overrides in settings.items():
        norms, run = [], RunDir(group.root / name)
        for offloads in (False, True):
            told = Mock(return_value=offloads)
            with (
                patch.object(engine, "is_offloading", told),
                patch.multiple(compose, is_offloading=told, Offloader=ALL),
            ):
                built, batches = build_engine(run, "lm_tiny", overrides)
                built.forward_backward(batches, 1.0, HostClock())
                norms.append(built.step(0.1, HostClock()).grad_norm.item())
                proofs = built.proofs()
            sent = [proof for proof in proofs if proof.what == "activation offload"]
            assert [proof.ok for proof in sent] == [True] * offloads, sent
        assert norms[0] == norms[1], f"{name}: {norms}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("scope", "graphs"),
    [
        pytest.param("auto", 1, marks=pytest.mark.nightly),
        pytest.param("blocks", 2, marks=pytest.mark.nightly),
    ],
)
def test_graphs_and_breaks_are_counted(scope: str, graphs: int, tmp_path: Path) -> None:
    """One rank has one graph with the loss in it. Equal blocks share one; the tail is another."""
    asked = ["train.compile=default", f"train.compile_scope={scope}"]
    found = audit_of(tmp_path / "run", asked)["torch.compile"]
    assert found.ok and found.effective == f"{graphs} graphs, 0 breaks, 0 recompilations"
