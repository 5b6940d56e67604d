"""A training loop of your own, with the record of a run: `paceline.attach()`.

    run = paceline.attach(model, optimizer, loader, out="runs/mine", epochs=3)
    for x, y in run.batches():            in place of: for x, y in loader
        ...                               forward, backward, optimizer.step(), as before
        run.record(loss, len(x))
    run.close()                           before destroy_process_group

The loop stays the script's. Phases are seen by hooks on the model and the optimizer; tables,
heartbeat, telemetry, verdict, result and report are those of `paceline train`.
"""

import atexit
import faulthandler
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TextIO, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.api.runs import place_of
from paceline.api.script_run import (
    OTHERS_S,
    LoopFacts,
    Watchdog,
    conclude_run,
    open_run,
    say,
    wait_for,
)
from paceline.api.waiting import count_backward, find_waits
from paceline.config.load import load_config
from paceline.errors import ConfigError, Outcome, StopAsked
from paceline.job import job_schema
from paceline.launch.rank import dump_stacks_on_request
from paceline.metrics import VAL
from paceline.records import Plan, RankVerdict, Result, list_unwritten
from paceline.records.moments import wall_time
from paceline.records.phases import Phase
from paceline.strategies.base import StepInfo, Totals
from paceline.strategies.clock import build_clock
from paceline.track.flow import Trackers
from paceline.track.sinks import SINKS
from paceline.train.feed import StepBatch
from paceline.train.heartbeat import StepMark, Ticker, build_tickers
from paceline.train.ledger import Ledger, LedgerFiles
from paceline.train.loop import LATENESS
from paceline.train.readback import on_device
from paceline.train.verdict import explain, outcome_of, peak_memory, save_verdict
from paceline.workloads.base import Workload
from paceline.workloads.returns import add_pairs

END = object()
NO_FLOPS = "a loop of the script's own says nothing of its FLOPs"
NO_CLOSE = "the script ended without run.close(): whether it ended well is not known"
LAST_S = 10.0  # for trackers; a launcher gives ranks 30 s to leave once one has failed


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    out: str | Path | None = None,
    name: str = "",
    epochs: int = 0,
    steps: int = 0,
    batch_size: int = 0,
    accumulate: int = 1,
    log_every: int = 10,
    start_s: float = 300.0,
    progress_s: float = 600.0,
    trackers: Sequence[str] = (),
) -> "Attached":
    """Give a training loop the record of a run. Call it on every rank, after
    init_process_group where there are several.

    out, name            the run directory, else runs/NAME-UTC; NAME is the script's unless given
    epochs or steps      how long it will train, for the report; neither: not known
    batch_size           samples per batch and rank, where the loader does not say
    accumulate           batches per optimizer step
    log_every            steps between gathering the losses of all ranks
    start_s, progress_s  how long a rank may take to its first step, and get nowhere after it
    trackers             where numbers go too, as observe.trackers
    """
    if odd := [each for each in trackers if each not in SINKS]:
        raise ConfigError(f"{odd[0]!r} is not a tracker\nhint: {', '.join(SINKS)}")
    if not steps and epochs and hasattr(loader, "__len__"):
        steps = epochs * len(loader) // accumulate
    asked = LoopFacts(
        name=name or Path(sys.argv[0]).stem or "script",
        out=None if out is None else place_of(out),
        batch_size=batch_size or _batch_size(loader),
        accumulate=accumulate,
        steps=steps,
        log_every=log_every,
        loader_workers=int(getattr(loader, "num_workers", 0)),
        start_s=start_s,
        progress_s=progress_s,
        trackers=tuple(trackers),
    )
    return Attached(asked, model, optimizer, loader)


def _batch_size(loader: Any) -> int:
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not size:
        raise ConfigError(
            "paceline.attach cannot tell how many samples a batch has\nhint: batch_size=N"
        )
    return int(size)


class Attached:
    """A rank of a run whose loop is a script's. `path` is the run directory, on all ranks."""

    def __init__(
        self, asked: LoopFacts, model: nn.Module, optimizer: Optimizer, loader: Any
    ) -> None:
        self._run, self._place = open_run(asked, model, optimizer)
        self.path = self._run.root
        self._loader, self._optimizer, self._accumulate = loader, optimizer, asked.accumulate
        self._plan = Plan.load(self._run.plan)
        self._config = load_config(self._run.config, job_schema(Workload))
        self._device = next(model.parameters()).device
        self._clock = build_clock(self._device, is_alone=self._place.world_size == 1)
        self._ledger = self._build_ledger()
        self._lock = self._run.lock() if self._place.rank == 0 else None
        trackers = asked.trackers if self._place.rank == 0 else ()
        self._trackers = Trackers(self._run, trackers, say, LAST_S)
        self.step = self._recorded = self._num_batches = 0
        self._evaluation: dict[str, float] = {}
        self._sums: list[tuple[Tensor, int, Mapping[str, Any]]] = []
        self._lr, self._grad_norm = float("nan"), cast("Tensor | float", float("nan"))
        self._is_closed = False
        self._stop: StopAsked | None = None
        self._stacks: TextIO | None = None
        self._notes: list[str] = []
        self._waits = find_waits(model, optimizer, self._device)
        self._hooks = self._watch(model, optimizer)
        self._tickers = self._start()

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the loader, for one pass over it; `accumulate` batches are a step.
        What the script does between epochs belongs to no step."""
        source = iter(self._loader)
        while True:
            is_first = self._num_batches % self._accumulate == 0
            if is_first:
                self._end_step()
                self._clock.begin(self.step + 1)
            else:
                self._clock.enter(Phase.DATA)
            batch = next(source, END)
            if batch is END:
                break
            self.step += is_first
            self._num_batches += 1
            self._clock.enter(Phase.OTHER)
            yield batch
        if is_first:
            self._clock.withdraw()
            self._clock.pause(Phase.OTHER)

    def record(
        self,
        loss: Tensor | float,
        count: int,
        metrics: Mapping[str, Any] = MappingProxyType({}),
        *,
        grad_norm: Tensor | float | None = None,
    ) -> None:
        """Record a batch: its mean loss, the number of samples (or tokens) that it is the mean of,
        and further sums as (sum, count) by name. Nothing here waits for the device."""
        mean = on_device(loss, self._device)[0]
        self._sums.append((mean * count, count, metrics))
        if grad_norm is not None:
            self._grad_norm = grad_norm

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Record the results of an evaluation after the last step; those of rank 0 count."""
        named = {k if k.startswith(VAL) else f"{VAL}{k}": float(v) for k, v in metrics.items()}
        self._evaluation |= named
        self._note_evaluation()

    def close(self) -> Result | None:
        """End the run: write what is left, and on rank 0 the result and the report. All ranks call
        it, while their process group still exists."""
        return None if self._is_closed else self._close_well()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._fail(error)

    # The steps

    def _end_step(self) -> None:
        """Hand the step that was taken to the ledger, as the loop of a run does after each."""
        if self.step == self._recorded:
            return
        self._record_step()
        self._note_evaluation()
        for step, _ in self._ledger.vetoes(through=self.step - LATENESS):
            self._notes.append(f"the loss of step {step} was not finite")
        self._ledger.settle(self.step)

    def _note_evaluation(self) -> None:
        """Put an evaluation into the row of its step, once there is one."""
        if self._evaluation and self.step == self._recorded:
            self._ledger.note_evaluation(self.step, self._evaluation)
            self._evaluation = {}

    def _record_step(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        loss_sum = sum((loss for loss, _, _ in self._sums), zero)
        units = sum(count for _, count, _ in self._sums)
        extras: dict[str, tuple[Any, Any]] = {}
        for _, _, metrics in self._sums:
            add_pairs(extras, metrics)
        info = StepInfo(on_device(self._grad_norm, self._device)[0], zero)
        # Nobody promised how many there would be: batches may differ from rank to rank.
        unknown = float("nan")
        batch = StepBatch([], unknown, unknown, [], self._plan.batch.global_size)
        totals = Totals(loss_sum, units, extras)
        self._ledger.record(self.step, self._lr, totals, info, batch)
        self._sums, self._recorded = [], self.step

    def _watch(self, model: nn.Module, optimizer: Optimizer) -> list[Any]:
        """Note phases as the script's own calls begin and end them."""
        clock, waits = self._clock, self._waits
        if waits is not None:
            waits.clock, clock.knows_blocked = clock, True

        def forward(module: nn.Module, inputs: Any) -> None:
            clock.enter(Phase.FORWARD if module.training else Phase.EVAL)

        def forwarded(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                if waits is not None:
                    count_backward(waits, output)
                clock.enter(Phase.BACKWARD)

        def update(*_: Any) -> None:
            self._lr = float(optimizer.param_groups[0].get("lr", float("nan")))
            clock.enter(Phase.OPTIMIZER)

        return [
            model.register_forward_pre_hook(forward),
            # Before FSDP's own: who asks autograd first for a callback is called first.
            model.register_forward_hook(forwarded, prepend=True),
            optimizer.register_step_pre_hook(update),
            optimizer.register_step_post_hook(lambda *_: clock.enter(Phase.OTHER)),
        ]

    # Its begin and its end

    def _build_ledger(self) -> Ledger:
        run, rank = self._run, self._place.rank
        training = run.training if rank == 0 else None
        files = LedgerFiles(run.steps(rank), training, lost=run.lost)
        return Ledger(self._config, self._plan, self._clock, self._device, files)

    def _start(self) -> list[Ticker]:
        run, rank = self._run, self._place.rank
        if self._lock is not None:
            self._lock.__enter__()
        self._trackers.__enter__()
        if threading.current_thread() is threading.main_thread():
            # Handlers of the script's own stay.
            if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                self._stacks = dump_stacks_on_request(run, rank)
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._asked_to_stop)
        self._clock.on_step = StepMark(run.step_mark(rank), run.lost).set
        tickers = [
            *build_tickers(run, self._place, self._clock, self._config.observe),
            Watchdog(run, self._place),
        ]
        for ticker in tickers:
            ticker.start()
        self._excepthook, sys.excepthook = sys.excepthook, self._caught
        atexit.register(self._left)
        return tickers

    def _asked_to_stop(self, number: int, frame: Any) -> None:
        """Leave by an exception, wherever the script is: a handler must not write files."""
        self._stop = StopAsked(f"{signal.Signals(number).name} came in step {self.step}")
        raise SystemExit(Outcome.PREEMPTED.exit_code)

    def _caught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # the script's own error is what counts, and is shown
            self._fail(error)
        self._excepthook(kind, error, trace)

    def _left(self) -> None:
        """The script ends without `close`. Other ranks may no longer answer a collective."""
        if self._is_closed:
            return
        if self._stop is not None:
            self._fail(self._stop)
            return
        self._notes.append(NO_CLOSE)
        if self._place.world_size == 1:
            self._close_well()
        else:
            self._ledger.abandon()
            self._end(Outcome.OK)
            self._conclude_all()

    def _close_well(self) -> Result | None:
        self._end_step()
        self._clock.pause(Phase.CHECKPOINT)  # ends the last step
        self._ledger.close()
        self._end(Outcome.OK)
        if self._place.world_size > 1:
            dist.barrier()  # all have left their verdicts
        return self._conclude_all()

    def _conclude_all(self) -> Result | None:
        if self._place.rank > 0:
            return None
        verdicts = [self._run.verdict(rank) for rank in range(self._place.world_size)]
        wait_for(lambda: all(path.is_file() for path in verdicts), OTHERS_S)
        return self._conclude()

    def _fail(self, error: BaseException) -> None:
        """Save what is known when the loop ends by an error, and conclude: the other ranks may
        never get to."""
        if self._is_closed:
            return
        stop = self._stop if isinstance(error, SystemExit) else None
        error = stop or error
        with suppress(RuntimeError):  # a device in error answers nothing more
            self._ledger.abandon()
        self._end(outcome_of(error), error)
        self._conclude()

    def _conclude(self) -> Result:
        self._trackers.__exit__()
        result = conclude_run(self._run, self._trackers.notes)
        if self._lock is not None:
            self._lock.__exit__()
            say(f"{self.path.name} ended as {result.outcome.value}: {self._run.report}")
        return result

    def _end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Stop watching, and save this rank's verdict."""
        self._is_closed, self._trackers.outcome = True, outcome
        for hook in self._hooks:
            hook.remove()
        if self._waits is not None:
            self._waits.clock = None
        for ticker in self._tickers:
            ticker.stop()
        sys.excepthook = self._excepthook
        atexit.unregister(self._left)
        with suppress(ValueError):  # another thread than the main one
            if signal.getsignal(signal.SIGTERM) == self._asked_to_stop:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks.close()
        active, reserved = peak_memory(self._device)
        verdict = RankVerdict(
            rank=self._place.rank,
            host=socket.gethostname(),
            outcome=outcome,
            step=self.step,
            ended_at=wall_time(),
            error=explain(error) if error is not None else None,
            flops_source=NO_FLOPS,
            notes=self._notes,
            peak_active_bytes=active,
            peak_reserved_bytes=reserved,
            unwritten=list_unwritten(self._run),
        )
        save_verdict(self._run, verdict, lambda word: None)
