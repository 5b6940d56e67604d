"""What one rank does from start to verdict: build, loop, say how it ended.

Run by `paceline.run.rank` in a process of its own; tests call `RankRun(...).execute()`.
"""

import gc
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.restore import Found
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.tensors import TensorFiles
from paceline.data.base import Dataset
from paceline.data.loader import to_device
from paceline.data.stream_shards import is_stream
from paceline.errors import ConfigError, DataError, Outcome
from paceline.job import Job
from paceline.machine.group import StoreAddress, claim_device, join_group
from paceline.machine.topology import RankId
from paceline.plan.policy import effective_config
from paceline.records import Plan, RankVerdict, list_unwritten
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.schedules.passes import render_passes
from paceline.strategies import find_strategy
from paceline.strategies.base import Engine, EngineParts, Recorded
from paceline.strategies.clock import Clock, HostClock, build_clock
from paceline.strategies.engine import ModuleEngine
from paceline.strategies.optim import describe_own_rates, rate_of
from paceline.train.audit import Auditor
from paceline.train.control import ControlFiles, Requests
from paceline.train.drills import plant_asked
from paceline.train.evaluation import Evaluation
from paceline.train.feed import (
    Feed,
    TrainData,
    build_feed,
    build_split,
    idle_stream_keys,
    load_first,
    open_data,
    open_source,
)
from paceline.train.first_batch import (
    FirstBatch,
    describe_unreached,
    is_worth_asking,
    trace_first,
    try_evaluation,
)
from paceline.train.heartbeat import ActionMark, StepMark, build_tickers
from paceline.train.history import History, load_attempt, settle_rng
from paceline.train.hooks import find_hooks
from paceline.train.keeper import Best, Keeper, KeeperParts
from paceline.train.ledger import Ledger, LedgerFiles
from paceline.train.loop import LoopEnd, LoopParts, train
from paceline.train.observers import Observers
from paceline.train.samples import build_samples
from paceline.train.torch_settings import apply_policy
from paceline.train.verdict import (
    Tell,
    explain,
    outcome_of,
    peak_memory,
    runs_out_of_memory,
    save_collectives,
    save_verdict,
)


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
        self.tell: Tell = lambda word: None  # the supervisor, where there is one
        self.store = store  # None: this process has joined its group already
        self.requests = requests or Requests()
        self.attempt, self.hooks = load_attempt(run), find_hooks(job.workload, place.rank)
        self.device = torch.device("cpu")
        self.clock: Clock = HostClock()
        self.engine: Engine | None = None
        self.observers: Observers | None = None
        self.flops: float | None = None
        self.flops_source = ""
        self.data_fingerprint = "n/a"
        self.notes: list[str] = []

    def execute(self) -> RankVerdict:
        """Train; save a verdict before anything is torn down; raise what went wrong."""
        self.run.make_rank(self.place.rank)
        try:
            crew = self.plan.crew
            self.device = claim_device(crew.device.value, self.place, crew.device_indices)
            self.clock = build_clock(self.device, is_alone=self.plan.world_size == 1)
            self.observers = Observers(
                self.job.config.observe, self.run, self.place.rank, self.clock, self.device
            )
            with self._observed():
                if self.store is not None:
                    self._join(self.store)
                parts, found = self._build()
                with closing(parts.feed), _named_loaders(parts.feed), _settled_heap():
                    settle_rng(found, self.job, self.plan, self.place.rank, self.device)
                    self._use_first_batch(parts)
                    plant_asked(self.run, parts, self.place.rank)
                    end = self.take_steps(parts)
                    self.notes += parts.feed.notes(end.sample_ids)
                self.notes += [*parts.keeper.parts.saver.notes, *parts.observers.notes]
        except BaseException as error:
            with suppress(Exception):  # the error is what counts
                self._save_passes()
            save_collectives(self.run, self.place.rank, error)
            module = self.engine.module if self.engine is not None else None
            told = explain(error, is_built=module is not None, module=module)
            if self.observers is not None and runs_out_of_memory(error):
                told = self.observers.explain_memory(error, told)
            self._save(self._verdict(outcome_of(error), self.clock.step, error=told))
            raise
        self._save_passes()
        verdict = self._verdict(
            end.outcome,
            end.step,
            bad_step=end.bad_step,
            bad_sample_ids=list(end.sample_ids),
            loss_was_finite=end.loss_was_finite,
            why_early=end.why_early,
        )
        self._save(verdict)
        return verdict

    def take_steps(self, parts: LoopParts) -> LoopEnd:
        """Run the loop; a proof overrides this to look at what is around it (verify/trial.py)."""
        return train(parts)

    def _join(self, store: StoreAddress) -> None:
        timeout_s = self.job.config.launch.collective_timeout_s
        backend = self.plan.backend.value
        join_group(backend, self.place, self.device, store.connect(), timeout_s)

    def _build(self) -> tuple[LoopParts, Found | None]:
        """Build all that the loop drives, each part after those that it needs.

            workload.build_data --> data
                                     +--> History: step 1, position 0 --+
            apply_policy, strategy.build --> engine --------------------+
                                                                        |
            newest sound checkpoint --> restore: both stand where the run stopped
                                                                        |
              Feed        microbatches from that position on  <---------+
              Ledger      rows from that step on              <---------+
              Keeper      best loss so far, engine's pieces   <---------+
              Auditor     engine's proofs                     <---------+
              Evaluation  validation data, if there is any

        The engine and the data's fingerprint are set on `self` at once: where a later part
        cannot be built, the verdict still has them.
        """
        data = open_data(self.job, self.plan)
        self.data_fingerprint = data.fingerprint
        self.notes += idle_stream_keys(self.job, self.plan, data)
        self.engine = engine = self.build_engine()
        if isinstance(engine, ModuleEngine):
            self.notes += describe_own_rates(engine.optimizer, self.job.workload, self.job.config)
        history = History(self.job, self.plan, self.attempt, data)
        found = self._restore(engine, history, data)
        return self._wire(engine, history, data), found

    def build_engine(self) -> Engine:
        """Apply the plan's settings of torch, then build: kernels are chosen under them."""
        plan = self.plan
        apply_policy(plan)
        config = effective_config(self.job.config, plan.attention.value, plan.kernels.value)
        parts = EngineParts(config, plan, self.job.workload, self.device)
        return find_strategy(plan.strategy.value).build(parts)

    def _restore(self, engine: Engine, history: History, data: TrainData) -> Found | None:
        """Resume engine and history from a checkpoint, where this attempt is to resume."""
        source = open_source(self.job, self.plan, data, self.place.rank)
        has_rehearsed = False

        def load(state: TensorFiles) -> None:
            nonlocal has_rehearsed
            if not has_rehearsed:
                engine.rehearse(lambda: load_first(self.job, source), self.clock)
                has_rehearsed = True
            engine.load(state)

        return history.restore(self.run, self.place.rank, self.device, load, self.notes)

    def _wire(self, engine: Engine, history: History, data: TrainData) -> LoopParts:
        """Build the parts around the engine; `history` says where they begin."""
        config, plan, place, device = self.job.config, self.plan, self.place, self.device
        val = self._build_validation()
        source = open_source(
            self.job, plan, data, place.rank, history.start_position, history.stream
        )
        audit = self.run.audit if place.rank == 0 else None
        evaluation = Evaluation(self.job, plan, val, plan.dp_rank(place.rank), device)
        hooks, files = self.hooks, self._files(history)
        assert self.observers is not None
        self.observers.watch(engine, history.start.first_step)
        auditor = Auditor(config, plan, device, engine.proofs, audit, self.run.lost)
        auditor.keep_overlap(place.rank, self.run.overlap(place.rank))
        parts = LoopParts(
            config=config,
            plan=plan,
            engine=engine,
            clock=self.clock,
            ledger=Ledger(config, plan, self.clock, device, files, hooks.on_step),
            auditor=auditor,
            evaluation=evaluation,
            keeper=self._keeper(engine, history),
            observers=self.observers,
            rate=lambda step: rate_of(step, plan.steps, config, self.job.workload),
            hooks=hooks,
            samples=build_samples(self.job, engine, self.clock, self.run, evaluation),
            start=history.start,
            # Last: from here on loaders live, and may die.
            feed=build_feed(self.job, plan, source, history.start.first_step, device),
        )
        history.gather_places = parts.feed.gather_places
        return parts

    def _build_validation(self) -> Dataset | None:
        config = self.job.config
        if config.train.eval_every == "off":
            return None
        val = build_split(self.job, "val")
        if val is None:
            self.notes.append("train.eval_every is set, but this workload has no validation data")
        elif is_stream(val):
            raise ConfigError(
                f"the validation data is a stream ({type(val).__name__}): its samples must be known"
                " by index, so that each is counted once on any number of ranks\n"
                "hint: return a list of samples: list(itertools.islice(stream, 1000))"
            )
        elif not len(val):
            raise DataError(
                "train.eval_every is set, but build_data returned validation data without samples"
                '\nhint: return some, or None for the split "val" if there are none'
            )
        return val

    def _files(self, history: History) -> LedgerFiles:
        rank = self.place.rank
        return LedgerFiles(
            steps=self.run.steps(rank),
            training=self.run.training if rank == 0 else None,
            samples=self.run.samples(rank) if self._notes_samples() else None,
            first_step=history.start.first_step,
            lost=self.run.lost,
        )

    def _notes_samples(self) -> bool:
        """Say whether this rank notes its samples: ranks of one pipeline see the same ones, so
        only one per share of the batch does."""
        return self.job.config.observe.sample_ids and self.place.rank < self.plan.batch.dp

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
            lost=self.run.lost,
        )
        parts = KeeperParts(
            config=config,
            engine=engine,
            saver=Saver(writer),
            requests=self.requests,
            device=self.device,
            num_steps=self.plan.steps,
            describe=history.describe,
            hooks=self.hooks.on_checkpoint,
        )
        return Keeper(parts, Best(self.job.config.train, history.best, history.num_worse))

    def _use_first_batch(self, parts: LoopParts) -> None:
        """Count FLOPs on the first batch, look for what it does not train, and require that the
        loss is a sum."""
        job, plan, device, first_step = self.job, self.plan, self.device, parts.start.first_step
        if first_step <= plan.steps:
            self._trace(parts.feed)
        if first_step > 1:  # a run that resumes was asked when it began
            return
        self.notes += try_evaluation(job, parts.engine, parts.evaluation, parts.keeper.best)
        if not is_worth_asking(job.workload, plan):
            return
        if plan.pipeline is not None:
            self.notes.append("whether the loss is a sum is not checked in a pipeline")
            return
        first = parts.feed.peek()
        batch = to_device(first.batch, device)
        size = len(first.sample_ids)
        asked = FirstBatch(parts.engine, job.workload, plan, device, batch, size)
        self.notes += asked.require_summed_loss()

    def _trace(self, feed: Feed) -> None:
        traced = trace_first(self.job, self.plan, feed, self.device)
        self.flops, self.flops_source = traced.flops, traced.source
        if self.place.rank == 0 and self.flops:
            self.run.lost.keep(self.run.flops, f"{self.flops}\n")
        if traced.unreached:
            self.notes.append(describe_unreached(traced.unreached))

    def _verdict(self, outcome: Outcome, step: int, **more: Any) -> RankVerdict:
        active, reserved = peak_memory(self.device)
        return RankVerdict(
            rank=self.place.rank,
            host=socket.gethostname(),
            outcome=outcome,
            step=step,
            ended_at=wall_time(),
            flops_per_sample=self.flops,
            flops_source=self.flops_source,
            data_fingerprint=self.data_fingerprint,
            notes=self.notes,
            peak_active_bytes=active,
            peak_reserved_bytes=reserved,
            unwritten=list_unwritten(self.run),
            **more,
        )

    def _save_passes(self) -> None:
        if isinstance(self.engine, Recorded):
            self.run.lost.keep(
                self.run.passes(self.place.rank), render_passes(self.engine.passes())
            )

    def _save(self, verdict: RankVerdict) -> None:
        save_verdict(self.run, verdict, self.tell)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """While inside, threads write heartbeat and telemetry; on rank 0 one watches files too."""
        observe, run, rank = self.job.config.observe, self.run, self.place.rank
        tickers = build_tickers(run, self.place, self.clock, observe, self.tell)
        tickers += [self.observers.requests] if self.observers is not None else []
        if rank == 0:
            tickers.append(ControlFiles(run, self.requests, self.attempt.halt_seen))
        self.clock.on_step = StepMark(run.step_mark(rank), run.lost).set
        if self.plan.pipeline is not None:
            self.clock.on_action = ActionMark(run.action_mark(rank), run.lost).set
        for ticker in tickers:
            ticker.start()
        try:
            yield
        finally:
            for ticker in tickers:
                ticker.stop()


@contextmanager
def _named_loaders(feed: Feed) -> Iterator[None]:
    """Say in the error which loader process died, at its start or later."""
    try:
        yield
    except RuntimeError as error:
        named = feed.fault(error)
        if named is error:
            raise
        raise named from error


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
