"""What one rank does for a proof: a few short runs in one process group, through the real loop.

Each trial is a run directory of its own inside the strategy's, with a config and a plan; its name
says what is different about it.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import Piece
from paceline.checkpoint.restore import choose_checkpoint
from paceline.data.rng import capture_rng, seed_rng
from paceline.errors import Outcome
from paceline.job import reload_job
from paceline.launch.base import RankContext, Task
from paceline.machine.group import StoreAddress
from paceline.records import LaunchPlan, Plan
from paceline.records.rundir import RunDir
from paceline.strategies.base import Engine, Totals
from paceline.strategies.clock import Clock
from paceline.train.loop import LoopEnd, LoopParts
from paceline.train.worker import RankRun
from paceline.verify.records import TrialHeld
from paceline.workloads.base import Workload

# The trials, in order. `equal` is compared with one process; `before` and `poisoned` with each
# other, and `after` continues from there; `bytes` with the plan; `broken` must not pass. `whole` is
# a job on one process that takes each batch in one piece.
EQUAL, BEFORE, POISONED, AFTER = "equal", "before", "poisoned", "after"
BYTES, BROKEN, WHOLE = "bytes", "broken", "whole"
WRONG_SCALE = 1.01
RANDOM = "the model or its loss draws random numbers; the proof seeds them for each microbatch"
OWN_UPDATES = ("build_optimizer", "learning_rate", "on_step", "on_eval", "on_checkpoint")


def trial_dir(run: RunDir, name: str) -> RunDir:
    return RunDir(run.root / "trials" / name)


def state_file(trial: RunDir, rank: int) -> Path:
    return trial.rank(rank) / "weights.pt"


def initial_file(trial: RunDir, rank: int) -> Path:
    return trial.rank(rank) / "initial.pt"


def held_file(trial: RunDir, rank: int) -> Path:
    return trial.rank(rank) / "held.json"


def without_own_updates(kind: type[Workload]) -> type[Workload]:
    """Return the workload without its own optimizer, learning rate and hooks."""
    usual = {name: getattr(Workload, name) for name in OWN_UPDATES}
    return type(kind.__name__, (kind,), {**usual, "__module__": kind.__module__})


def try_rank(context: RankContext, packed: bytes = b"") -> None:
    """Run all trials of one strategy: the task of `paceline verify`. The first joins the group, the
    others find it. `packed` is the workload's class, where it is in no file."""
    run, place, launch = context.run, context.place, LaunchPlan.load(context.run.launch)
    torch.set_num_threads(launch.threads)
    first: StoreAddress | None = context.store
    for name in (EQUAL, BEFORE, POISONED, AFTER, BYTES, BROKEN, WHOLE):
        trial = trial_dir(run, name)
        if trial.plan.is_file():
            job = reload_job(trial, context.workload, packed)
            proven = without_own_updates(type(job.workload))()
            proven.prepared = job.workload.prepared
            job = replace(job, workload=proven)
            try:
                verdict = TrialRun(job, Plan.load(trial.plan), trial, place, first).execute()
            except Exception:
                if name != WHOLE:  # which may be too large; its own verdict says so
                    raise
            first = None
    # The supervisor looks for a word in the strategy's own directory.
    verdict.save(run.verdict(place.rank))


VERIFY = Task("verify", try_rank, "paceline.verify")


class TrialRun(RankRun):
    """A run that keeps its weights, and does one thing differently where its name says so."""

    def take_steps(self, parts: LoopParts) -> LoopEnd:
        name, rank = self.run.root.name, self.place.rank
        torch.save(_weights(parts.engine), initial_file(self.run, rank))
        if name == BYTES:
            return self._weigh(parts)
        engine = Seeded(parts.engine, self.device, WRONG_SCALE if name == BROKEN else 1.0)
        end = super().take_steps(replace(parts, engine=engine))
        self.notes += [RANDOM] if engine.has_drawn else []
        torch.save(_weights(parts.engine), state_file(self.run, rank))
        return end

    def _weigh(self, parts: LoopParts) -> LoopEnd:
        """Take one step by hand: gradients are there only between backward and the update."""
        engine, clock, batch = parts.engine, parts.clock, parts.feed.next(parts.clock)
        clock.begin(1)
        engine.forward_backward(batch.batches, batch.scale, clock)
        gradients = engine.held().gradients
        engine.step(1e-3, clock)
        held = engine.held()
        TrialHeld(
            parameters=held.parameters,
            gradients=gradients,
            optimizer=held.optimizer,
            restored=self._is_restored(parts),
        ).save(held_file(self.run, self.place.rank))
        parts.ledger.abandon()
        return LoopEnd(Outcome.OK, 1)

    def _is_restored(self, parts: LoopParts) -> bool:
        """Let a second engine, which starts from the first weights, take the state of this one: out
        of a checkpoint, as when a run resumes."""
        folder = CheckpointFolder.of_run(self.run, self.job.config.checkpoint)
        parts.keeper.save(1, "verify", 0)
        parts.keeper.close()
        second = self.build_engine()
        choose_checkpoint(folder, self.device, second.load)
        is_same = _is_same_state(second.pieces(), parts.engine.pieces())
        dist.barrier()  # no rank reads any more
        if self.place.rank == 0:
            shutil.rmtree(folder.root)
        return is_same


def _is_same_state(a: list[Piece], b: list[Piece]) -> bool:
    """Say whether these are the same pieces, bit for bit, whatever their order."""
    others = {(piece.section, piece.name): piece for piece in b}
    return len(a) == len(b) and all(
        (other := others.get((piece.section, piece.name))) is not None
        and (piece.shape, piece.row, piece.holders) == (other.shape, other.row, other.holders)
        and _is_same_bits(piece.value, other.value)
        for piece in a
    )


def _is_same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in engine.weights().items()}


class Seeded:
    """An engine that seeds all generators by the contents of each microbatch before its forward
    pass, so that dropout is the same on any rank and in any order. `scale` makes its gradients too
    large, which the proof must catch."""

    def __init__(self, engine: Engine, device: torch.device, scale: float) -> None:
        self.engine, self.device, self.scale = engine, device, scale
        self.has_drawn = False

    def forward_backward(
        self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
    ) -> Totals:
        return self.engine.forward_backward(Seeding(batches, self), scale * self.scale, clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Seeding(list[Any]):
    """Microbatches that seed the generators whenever one of them is taken."""

    def __init__(self, batches: Sequence[Any], owner: Seeded) -> None:
        super().__init__(batches)
        self.owner = owner

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            seed_rng(content_sum(batch))
            before = capture_rng(self.owner.device)
            yield batch
            after = capture_rng(self.owner.device)
            self.owner.has_drawn |= any(
                not torch.equal(before[name], after[name]) for name in before
            )


def content_sum(batch: Any) -> int:
    """Return a checksum of all tensors in a batch, which does not depend on their device."""
    total = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if torch.is_tensor(leaf):
            values = leaf.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
            total.update(values.numpy().tobytes())
    return int.from_bytes(total.digest())
