"""What one rank does from its first line to its verdict: build, loop, say how it ended.

Run by `paceline.launch.rank` in a process of its own; tests call `RankRun(...).execute()`.
"""

import gc
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.restore import Found, choose_checkpoint, require_never_saved
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.tensors import TensorFiles
from paceline.data.base import Dataset
from paceline.data.cursor import Order, StepSlice
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource, to_device
from paceline.data.rng import capture_rng, restore_rng, seed_rng
from paceline.errors import ConfigError, DataError, Outcome
from paceline.job import Job
from paceline.machine.group import StoreAddress, claim_device, join_group
from paceline.machine.topology import RankId
from paceline.plan.policy import effective_config
from paceline.records import Plan, RankVerdict
from paceline.records.rundir import RunDir
from paceline.schedules.passes import write_passes
from paceline.strategies import find_strategy
from paceline.strategies.base import Engine, EngineParts, Recorded
from paceline.strategies.clock import Clock, HostClock, build_clock
from paceline.train.audit import Auditor
from paceline.train.control import ControlFiles, Requests
from paceline.train.evaluation import Evaluation
from paceline.train.feed import Feed
from paceline.train.first_batch import FirstBatch, flops_per_sample, is_worth_asking
from paceline.train.heartbeat import ActionMark, Heartbeat, StepMark, Telemetry, Ticker
from paceline.train.history import History, load_attempt
from paceline.train.keeper import Keeper, KeeperParts
from paceline.train.loop import LoopEnd, LoopParts, train
from paceline.train.metrics import Ledger, LedgerFiles, cut_absent_ranks
from paceline.train.policy import apply_policy
from paceline.train.verdict import explain, outcome_of, peak_memory

LOG = logging.getLogger("paceline")


class RankRun:
    """One rank's run. Whatever is known when it ends, however it ends, goes into the verdict."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        run: RunDir,
        place: RankId,
        store: StoreAddress | None = None,
        requests: Requests | None = None,
    ) -> None:
        self.job, self.plan, self.run, self.place = job, plan, run, place
        self.store = store  # None: this process has joined its group already
        self.requests = requests or Requests()
        self.attempt = load_attempt(run)
        self.device = torch.device("cpu")
        self.clock: Clock = HostClock()
        self.engine: Engine | None = None
        self.flops: float | None = None
        self.flops_source = ""
        self.data_fingerprint = "n/a"
        self.notes: list[str] = []

    def execute(self) -> RankVerdict:
        """Train; save a verdict before anything is torn down; raise what went wrong."""
        self.run.rank(self.place.rank).mkdir(parents=True, exist_ok=True)
        try:
            crew = self.plan.crew
            self.device = claim_device(crew.device.value, self.place, crew.device_indices)
            self.clock = build_clock(self.device)
            with self._observed():
                if self.store is not None:
                    self._join(self.store)
                parts, found = self._build()
                with closing(parts.feed), _settled_heap():
                    self._settle_rng(found)
                    if parts.start.first_step <= self.plan.steps:
                        self._count_flops(parts.feed)
                    self._check_first_batch(parts)
                    end = self._take_steps(parts)
                self.notes += parts.keeper.parts.saver.notes
        except BaseException as error:
            with suppress(Exception):  # the error is what counts
                self._save_passes()
            told = explain(error, is_built=self.engine is not None)
            self._save(self._verdict(outcome_of(error), self.clock.step, error=told))
            raise
        self._save_passes()
        verdict = self._verdict(
            end.outcome,
            end.step,
            bad_step=end.bad_step,
            bad_sample_ids=list(end.sample_ids),
            loss_was_finite=end.loss_was_finite,
        )
        self._save(verdict)
        return verdict

    def take_steps(self, parts: LoopParts) -> LoopEnd:
        """The loop, and what a proof wants to see around it (verify/trial.py)."""
        return train(parts)

    def _take_steps(self, parts: LoopParts) -> LoopEnd:
        try:
            return self.take_steps(parts)
        except RuntimeError as error:
            named = parts.feed.fault(error)
            if named is error:
                raise
            raise named from error

    def _join(self, store: StoreAddress) -> None:
        timeout_s = self.job.config.launch.collective_timeout_s
        backend = self.plan.backend.value
        join_group(backend, self.place, self.device, store.connect(), timeout_s)

    def _build(self) -> tuple[LoopParts, Found | None]:
        """Data, engine, the state to go on from, feed and ledger, in the order they need each
        other."""
        job, plan, place, device = self.job, self.plan, self.place, self.device
        config, workload = job.config, job.workload
        data = require_data(workload.build_data(config, "train"), plan)
        self.data_fingerprint = str(getattr(data, "fingerprint", "n/a"))
        apply_policy(plan)
        effective = effective_config(config, plan.attention.value)
        parts = EngineParts(effective, plan, workload, device)
        self.engine = engine = find_strategy(plan.strategy.value).build(parts)
        history = History(job, plan, self.attempt, len(data), self.data_fingerprint)
        found = self._restore(engine, history, _source(job, plan, data, place, 0))
        val = workload.build_data(config, "val") if config.train.eval_every != "off" else None
        if val is None and config.train.eval_every != "off":
            self.notes.append("train.eval_every is set, but this workload has no validation data")
        source = _source(job, plan, data, place, history.start_position)
        feed = Feed(_microbatches(job, plan, source, history, device), plan, device)
        return LoopParts(
            config=config,
            plan=plan,
            engine=engine,
            feed=feed,
            clock=self.clock,
            ledger=Ledger(config, plan, self.clock, device, self._files(history)),
            auditor=Auditor(
                config,
                plan,
                device,
                engine.proofs,
                self.run.audit if place.rank == 0 else None,
            ),
            evaluation=Evaluation(config, plan, val, plan.dp_rank(place.rank), device),
            keeper=self._keeper(engine, history),
            start=history.start,
        ), found

    def _files(self, history: History) -> LedgerFiles:
        rank = self.place.rank
        return LedgerFiles(
            steps=self.run.steps(rank),
            training=self.run.training if rank == 0 else None,
            samples=self.run.samples(rank) if self._notes_samples() else None,
            first_step=history.start.first_step,
        )

    def _notes_samples(self) -> bool:
        """Once for each share of the batch: ranks of one pipeline see the same samples."""
        return self.job.config.observe.sample_ids and self.place.rank < self.plan.batch.dp

    def _restore(self, engine: Engine, history: History, source: MicrobatchSource) -> Found | None:
        """Load the newest checkpoint that is sound, if this attempt is to go on from one."""
        folder = CheckpointFolder.of_run(self.run, self.job.config.checkpoint)
        if self.place.rank == 0:
            folder.sweep()
        if not self.attempt.resume:
            return None
        has_rehearsed = False

        def load(state: TensorFiles) -> None:
            nonlocal has_rehearsed
            if not has_rehearsed:
                engine.rehearse(lambda: source[0].batch, self.clock)
                has_rehearsed = True
            engine.load(state)

        found = choose_checkpoint(folder, self.device, load)
        if found is None:
            require_never_saved(self.run.checkpoint_log, folder)
            self.notes.append("there was no checkpoint yet: this attempt began with step 1")
            if self.place.rank == 0:
                cut_absent_ranks(self.run, self.plan.world_size, 0)
            return None
        history.go_on_from(found.kept)
        self._settle(found, folder)
        return found

    def _settle(self, found: Found, folder: CheckpointFolder) -> None:
        """Say where this attempt goes on, and put away what lies beyond."""
        step = found.kept.step
        self.notes += [f"{damage}; step_{step} was used instead" for damage in found.damages]
        self.notes += find_strategy(self.plan.strategy.value).lost_on_resume(self.job.config)
        LOG.info("goes on from the checkpoint of step %d", step)
        if self.place.rank == 0:
            known = {"first_step": step + 1, "notes": self.notes}
            self.attempt.model_copy(update=known).save(self.run.attempt)
            cut_absent_ranks(self.run, self.plan.world_size, step)
            for newer in [s for s in folder.steps() if s > step]:
                folder.set_aside(newer)
            best = found.kept.best  # the kill may have come between a checkpoint and its mark
            if best is not None and best.step in folder.steps():
                folder.mark_best(best.step)

    def _settle_rng(self, found: Found | None) -> None:
        """Generators as they were; on another number of ranks they start anew."""
        seed, rank = self.job.config.train.seed, self.place.rank  # dropout differs between ranks
        if found is None:
            seed_rng(seed, rank)
        elif found.kept.world_size == self.plan.world_size:
            restore_rng(found.rng(self.place.rank), self.device)
        else:
            seed_rng(seed, rank, found.kept.step)

    def _keeper(self, engine: Engine, history: History) -> Keeper:
        config, place = self.job.config.checkpoint, self.place
        writer = Writer(
            folder=CheckpointFolder.of_run(self.run, config),
            config=config,
            store=dist.distributed_c10d._get_default_store(),
            rank=place.rank,
            world_size=place.world_size,
            attempt=self.attempt.number,
            log=self.run.checkpoint_log,
        )
        parts = KeeperParts(
            config=config,
            engine=engine,
            saver=Saver(writer),
            requests=self.requests,
            device=self.device,
            num_steps=self.plan.steps,
            describe=history.describe,
        )
        return Keeper(parts, history.best)

    def _count_flops(self, feed: Feed) -> None:
        """As the plan says, or on the first batch, which comes through the loader's time limit. To
        load it may draw random numbers, as it would in its step; to count must not."""
        drawn: dict[str, Tensor] = {}

        def first_batch() -> Any:
            batch = feed.peek().batch
            drawn.update(capture_rng(self.device))
            return batch

        self.flops, self.flops_source = flops_per_sample(
            self.job.workload, self.job.config, self.plan, first_batch
        )
        if drawn:
            restore_rng(drawn, self.device)

    def _check_first_batch(self, parts: LoopParts) -> None:
        """A run that goes on was asked when it began."""
        if parts.start.first_step > 1 or not is_worth_asking(self.job.workload, self.plan):
            return
        if self.plan.pipeline is not None:
            self.notes.append("whether the loss is a sum is not checked in a pipeline")
            return
        batch = to_device(parts.feed.peek().batch, self.device)
        workload = self.job.workload
        FirstBatch(parts.engine, workload, self.plan, self.device, batch).require_summed_loss()

    def _verdict(self, outcome: Outcome, step: int, **more: Any) -> RankVerdict:
        active, reserved = peak_memory(self.device)
        return RankVerdict(
            rank=self.place.rank,
            host=socket.gethostname(),
            outcome=outcome,
            step=step,
            ended_at=time.time(),
            flops_per_sample=self.flops,
            flops_source=self.flops_source,
            data_fingerprint=self.data_fingerprint,
            notes=self.notes,
            peak_active_bytes=active,
            peak_reserved_bytes=reserved,
            **more,
        )

    def _save_passes(self) -> None:
        if isinstance(self.engine, Recorded):
            write_passes(self.run.passes(self.place.rank), self.engine.passes())

    def _save(self, verdict: RankVerdict) -> None:
        verdict.save(self.run.verdict(self.place.rank))

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Heartbeat and telemetry on every rank, an eye on files on rank 0."""
        observe, run, rank = self.job.config.observe, self.run, self.place.rank
        tickers: list[Ticker] = [
            Heartbeat(run.heartbeat(rank), rank, self.clock, observe.heartbeat_s),
            Telemetry(run.telemetry_of(rank), observe.telemetry_s, self.place.local_rank == 0),
        ]
        if rank == 0:
            tickers.append(ControlFiles(run, self.requests, self.attempt.halt_seen))
        self.clock.on_step = StepMark(run.step_mark(rank)).set
        if self.plan.pipeline is not None:
            self.clock.on_action = ActionMark(run.action_mark(rank)).set
        for ticker in tickers:
            ticker.start()
        try:
            yield
        finally:
            for ticker in tickers:
                ticker.stop()


@contextmanager
def _settled_heap() -> Iterator[None]:
    """Take what exists now out of the garbage collector's rounds: torch's half a million objects
    would be walked again and again in the middle of steps, and none of them is garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _source(
    job: Job, plan: Plan, data: Dataset, place: RankId, start_position: int
) -> MicrobatchSource:
    batch = plan.batch
    return MicrobatchSource(
        data,
        Order(len(data), job.config.train.seed),
        StepSlice(
            batch.micro, batch.grad_accum, batch.dp, plan.dp_rank(place.rank), start_position
        ),
        job.workload,
        plan.units_per_sample,
    )


def _microbatches(
    job: Job, plan: Plan, source: MicrobatchSource, history: History, device: torch.device
) -> Microbatches:
    settings = job.config.data
    loader = LoaderPlan(
        plan.loader_workers.value, settings.prefetch, settings.timeout_s, device.type == "cuda"
    )
    num_steps = max(0, plan.steps - history.start.first_step + 1)
    return Microbatches(source, num_steps * plan.batch.grad_accum, loader)


def require_data(data: Dataset | None, plan: Plan) -> Dataset:
    if data is not None and not hasattr(data, "__len__"):
        raise DataError(
            f"build_data returned a {type(data).__name__}, which has no length\n"
            "hint: return samples by index: __len__ and __getitem__"
        )
    ignored = [name for name in ("collate_fn", "collate") if hasattr(data, name)]
    if ignored and not hasattr(data, "batch"):
        raise ConfigError(
            f"{type(data).__name__}.{ignored[0]} is a method that nothing calls\n"
            "hint: write batch(self, indices), which returns a whole batch: return"
            f" self.{ignored[0]}([self[int(i)] for i in indices])"
        )
    found = len(data) if data is not None else 0
    if data is None or found < plan.batch.global_size:
        raise DataError(
            f"the training data has {found} samples, and one step takes {plan.batch.global_size}\n"
            "hint: give it more data, or a smaller train.micro_batch_size or train.grad_accum"
        )
    return data
