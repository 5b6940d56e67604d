"""The ledger: what every step did, into training.csv (rank 0) and ranks/rank<r>/steps.csv.

Losses, and what else the workload sums beside them, stay on the device and are summed over ranks
once in `log_every` steps, in one collective.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.schema import RunConfig
from paceline.data.cursor import Indices
from paceline.errors import ConfigError, PacelineError
from paceline.metrics import TRAIN
from paceline.records import Plan
from paceline.records.columns import LOSS_COLUMNS
from paceline.records.disk import Losses
from paceline.records.phases import OWN_PHASES, STEP_PHASES
from paceline.records.table_file import TableFile
from paceline.records.tables import SAMPLES, STEPS, TRAINING, Cell
from paceline.records.timing_ranks import step_line, timing_line
from paceline.strategies.base import StepInfo, Totals
from paceline.strategies.clock import Clock, StepTimes
from paceline.strategies.precision import OVERFLOWED
from paceline.train.feed import StepBatch
from paceline.train.hooks import Hook
from paceline.train.readback import Readback, on_device
from paceline.train.verdict import peak_memory

LOG = logging.getLogger("paceline")
TIMES_EVERY = 5  # steps after which times are written, whatever log_every: who watches needs them


@dataclass(frozen=True)
class LedgerFiles:
    """`training` is None on every rank but 0. Rows of steps from `first_step` on are cut off: a run
    that resumes takes those steps again."""

    steps: Path
    training: Path | None
    samples: Path | None = None
    first_step: int = 1
    lost: Losses = field(default_factory=Losses)


@dataclass
class _Row:
    """One step while its numbers come in from device, clock and other ranks."""

    lr: float
    num_samples: int
    own_loss: float | None = None
    loss: float | None = None
    count: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False
    overflowed: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)  # by column
    own_units: float = math.nan
    collectives: int | None = None  # that this rank has begun so far
    read_s: float = 0.0
    joined_s: float = 0.0
    times: StepTimes | None = None

    @property
    def own_mean(self) -> float:
        """This rank's own loss, nan where its units are on the device."""
        return math.nan if self.own_loss is None else self.own_loss / (self.own_units or math.nan)

    @property
    def is_judged(self) -> bool:
        """Say whether its veto counts. An overflow of fp16's scaled gradient is not a fault: the
        scale is halved, and training continues."""
        return self.skipped and not self.overflowed

    @property
    def is_complete(self) -> bool:
        return self.loss is not None and self.grad_norm is not None and self.times is not None


class Ledger:
    """Call `record` and `settle` every step, `close` at the end.

    A row is filled from three queues, each read only when the device has passed it:

        _scalars  this rank's loss sum, gradient norm and veto; read one step late
        _sums     losses and units of a window of `log_every` steps, over all ranks
        clock     step and phase times

    It waits in `_rows` until all three have come. With log_every=4:

        step      1  2  3  4  5  6  7  8  9
        _gather            x           x      begins the sums of steps 1-4, 5-8
        _collect              x           x   they have arrived: rows 1-4, 5-8 are written
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        clock: Clock,
        device: torch.device,
        files: LedgerFiles,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.hooks = hooks  # called with each row
        self.plan, self.clock, self.device = plan, clock, device
        self.log_every = config.train.log_every
        self._logs_own_times = config.observe.timing_ranks == "all"
        self.last_warmup = files.first_step - 1 + config.observe.warmup_steps
        self._rows: dict[int, _Row] = {}  # in the order of steps, not written yet
        self._window: list[tuple[int, Totals, float | Tensor]] = []  # recorded, not gathered yet
        self._windows: dict[int, list[int]] = {}  # last step of a gathered window -> its steps
        self._late_vetoes: list[tuple[int, bool]] = []  # seen in the sums only, see `_fill`
        self._names: list[str] | None = None  # of what is summed beside the loss, see `_agree`
        self._scalars, self._sums = Readback(device), Readback(device)
        kept = files.first_step - 1
        self._steps = TableFile(files.steps, STEPS, kept, files.lost)
        self._training = self._samples = None
        if files.training:
            self._training = TableFile(files.training, TRAINING, kept, files.lost)
        if files.samples:
            self._samples = TableFile(files.samples, SAMPLES, kept, files.lost)

    def record(
        self, step: int, lr: float, totals: Totals, info: StepInfo, batch: StepBatch
    ) -> None:
        """Take in a step, and the batch that it took."""
        own = math.nan if isinstance(totals.units, Tensor) else float(totals.units)
        begun = count_collectives() if self.plan.world_size > 1 else None
        row = _Row(lr, batch.num_samples, own_units=own, collectives=begun)
        row.read_s, row.joined_s = batch.read_s, batch.joined_s
        self._rows[step] = row
        if batch.sums:
            totals = totals._replace(extras={**batch.sums, **totals.extras})
        self._window.append((step, totals, batch.units))
        self._scalars.push(step, (totals.loss_sum, info.grad_norm, info.skipped))

    def vetoes(self, through: int, wait: bool = True) -> list[tuple[int, bool]]:
        """Return the steps up to `through` that were vetoed, and whether this rank's loss was
        finite."""
        found, self._late_vetoes = self._late_vetoes, []
        for step, (loss_sum, grad_norm, skipped) in self._scalars.pop(through, wait):
            row = self._rows[step]
            row.own_loss, row.grad_norm, row.skipped = loss_sum, grad_norm, bool(skipped)
            row.overflowed = skipped == OVERFLOWED
            if row.is_judged:
                found.append((step, math.isfinite(loss_sum)))
        return found

    def note_samples(self, step: int, sample_ids: list[Indices]) -> None:
        if self._samples is not None:
            for number, ids in enumerate(sample_ids):
                shown = " ".join(map(str, ids.tolist()))
                self._samples.add({"step": step, "microbatch": number, "sample_ids": shown})

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the numbers of an evaluation to the step that was just taken, or to the last one
        before this attempt."""
        columns = {LOSS_COLUMNS.get(name, name): value for name, value in metrics.items()}
        if self._training is not None:
            self._training.widen(list(columns))
        if step in self._rows:
            self._rows[step].metrics |= columns
        elif self._training is not None:
            for column, value in columns.items():
                self._training.amend_last(column, value)

    def settle(self, step: int) -> None:
        """Gather the losses every `log_every` steps; a step later write what has arrived."""
        if step % self.log_every == 0:
            self._gather()
        # A step later the device has passed the collective, and reading it stalls nothing. Where
        # every step is a window of its own the remainder of 1 is 0: each step gathers its own sums
        # and collects those of the step before.
        if step % self.log_every == 1 % self.log_every:
            self._collect(through=step - 1, wait=False)
        elif step % TIMES_EVERY == 1:
            self._take_times(wait=False)
            self._steps.flush_soon()

    def close(self) -> list[tuple[int, bool]]:
        """Gather, wait for and write what is left; return the vetoes that were not returned yet."""
        found = self.catch_up()
        self._close_files()
        return found

    def catch_up(self) -> list[tuple[int, bool]]:
        """Write all steps that have ended, for good: a checkpoint must not be ahead of the tables.
        Return the vetoes that were not returned yet."""
        if self._window:
            self._gather()
        last = max(self._rows, default=0)
        found = self.vetoes(through=last)
        self._collect(through=last, wait=True)
        for file in self._files():
            file.sync()
        late, self._late_vetoes = self._late_vetoes, []
        return found + late

    def abandon(self) -> None:
        """Keep what this rank knows by itself, and call no hook. After an error other ranks may not
        answer a collective: of several, this one writes what has arrived and waits for nothing."""
        is_alone, last = self.plan.world_size == 1, max(self._rows, default=0)
        self.hooks = ()
        try:
            for times in self.clock.finished(wait=is_alone):
                self._steps.add(self._step_row(times))
                if times.step in self._rows:
                    self._rows[times.step].times = times
            if is_alone and self._window:
                self._gather()
            self.vetoes(last, wait=is_alone)
            self._take_sums(last, wait=is_alone)
            self._write_complete()
        except PacelineError:
            pass  # the loss is not what was promised: told already, or less than the first error
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[TableFile]:
        return [f for f in (self._steps, self._training, self._samples) if f is not None]

    def _gather(self) -> None:
        """Start summing this window's losses, counts and further sums over all ranks."""
        window = [totals for _, totals, _ in self._window]
        losses = torch.stack([totals.loss_sum for totals in window]).double()
        rows = [losses, _as_vector([totals.units for totals in window], self.device)]
        for name in self._agree(window):
            pairs = [totals.extras.get(name, (0.0, 0.0)) for totals in window]
            rows += [_as_vector([pair[n] for pair in pairs], self.device) for n in (0, 1)]
        sums = torch.stack(rows)
        if self.plan.world_size > 1:
            with self.clock.blocked():
                dist.all_reduce(sums)
        # What the losses were divided by, known before the step: `_fill` compares the two counts.
        promised = _as_vector([units for *_, units in self._window], self.device)
        last = self._window[-1][0]
        self._windows[last] = [step for step, *_ in self._window]
        self._sums.push(last, (promised, *sums))
        self._window = []

    def _agree(self, window: Sequence[Totals]) -> list[str]:
        """Return the names of what is summed beside the loss: those that any rank had in its first
        window. Ranks ask each other once; a rank of a pipeline that computes no loss knows none."""
        own = sorted({name for totals in window for name in totals.extras})
        if self._names is None:
            heard = [own] * self.plan.world_size
            if self.plan.world_size > 1:
                dist.all_gather_object(heard, own)
            self._names = sorted({name for names in heard for name in names})
            if self._training is not None:
                self._training.widen([f"{TRAIN}{name}" for name in self._names])
        if new := set(own) - set(self._names):
            raise ConfigError(
                f"the loss returned {', '.join(sorted(new))} beside it, which it did not in the"
                f" first {self.log_every} steps\n"
                "hint: return the same names from the first step on; (0, 0) where there is nothing"
            )
        return self._names

    def _collect(self, through: int, wait: bool) -> None:
        """Take in step times, and the sums of windows that end at step `through` or before."""
        self._take_times(wait)
        # Always waited for, unlike times: the sums were enqueued a step ago, and a veto that shows
        # only in them must reach all ranks at the same step.
        self._take_sums(through, wait=True)
        self._write_complete()

    def _take_sums(self, through: int, wait: bool) -> None:
        for tag, sums in self._sums.pop(through, wait):
            for step, *values in zip(self._windows.pop(tag), *sums, strict=True):
                self._fill(step, *values)

    def _take_times(self, wait: bool) -> None:
        for times in self.clock.finished(wait):
            self._rows[times.step].times = times
            self._steps.add(self._step_row(times))
            if self._logs_own_times and self._is_due(times.step):
                LOG.info("%s", self._own_line(times))

    def _fill(
        self, step: int, promised: float, loss_sum: float, count: float, *further: float
    ) -> None:
        # Counts are exact; sums of weights are rounded on their way; nan promises nothing.
        slack = 0.0 if promised.is_integer() else 1e-4 * promised
        if abs(count - promised) > max(0.5, slack):
            raise ConfigError(
                f"the loss of step {step} summed {count:.10g} {self.plan.unit}, but the workload"
                f" promised {promised:.10g} before it\n"
                "hint: units_per_sample(), or units(batch) where it is None, must say how many"
                " loss() will sum"
            )
        row = self._rows[step]
        row.loss, row.count = (loss_sum / count if count else math.nan), count
        pairs = zip(self._names or (), further[::2], further[1::2], strict=True)
        row.metrics |= {f"{TRAIN}{name}": total / n if n else None for name, total, n in pairs}
        if not math.isfinite(loss_sum) and not row.is_judged:
            # Every path from this loss to a weight was cut, so no gradient carried the news; or
            # its NaN looked like an overflow.
            self._late_vetoes.append((step, math.isfinite(row.own_loss or 0.0)))

    def _write_complete(self) -> None:
        """Write rows in order, as far as they are whole; at most one window's worth is held."""
        is_any = False
        for step, row in list(self._rows.items()):
            if not row.is_complete:
                break  # later rows wait, too: the table is in order
            is_any = True
            del self._rows[step]  # now, lest it is written twice: a hook may raise
            if self._training:
                self._training.add(self._training_row(step, row))
            self._log_progress(step, row)
            for hook in self.hooks:
                hook(step, self._training_row(step, row))
        if is_any:
            for file in self._files():
                file.flush_soon()

    def _log_progress(self, step: int, row: _Row) -> None:
        """Log one line per window to the rank's log, and so to train.log."""
        if self._training is not None and self._is_due(step):
            cells, memory = self._training_row(step, row), peak_memory(self.device)
            LOG.info("%s", step_line(cells, self.plan, *memory))

    def _own_line(self, times: StepTimes) -> str:
        own_loss = self._rows[times.step].own_mean
        step, phases, waits = times.step, times.phases_s, times.blocked_s
        return timing_line(step, dist.get_rank(), own_loss, phases, times.wall_s, waits)

    def _is_due(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.plan.steps

    def _training_row(self, step: int, row: _Row) -> dict[str, Cell]:
        assert row.times is not None
        step_s = row.times.step_s
        return {
            "step": step,
            "loss": row.loss,
            "lr": row.lr,
            "grad_norm": row.grad_norm,
            "step_s": step_s,
            "samples_per_s": row.num_samples / step_s,
            "tokens_per_s": row.count / step_s if self.plan.unit == "tokens" else None,
            "skipped": row.skipped,
            "overflowed": row.overflowed,
            "warmup": step <= self.last_warmup,
            "val_loss": None,
            **row.metrics,
        }

    def _step_row(self, times: StepTimes) -> dict[str, Cell]:
        phases = {phase.column: times.phases_s.get(phase, 0.0) for phase in STEP_PHASES}
        waits, row = times.blocked_s, self._rows.get(times.step)
        blocked = {
            phase.blocked_column: waits.get(phase, 0.0) if waits is not None else None
            for phase in OWN_PHASES
        }
        return {
            "step": times.step,
            "warmup": times.step <= self.last_warmup,
            "wall_s": times.wall_s,
            **phases,
            "unaccounted_s": times.unaccounted_s,
            **blocked,
            "units": row.own_units if row is not None and row.own_units >= 0 else None,
            "collectives": row.collectives if row is not None else None,
            "read_s": row.read_s if row is not None else None,
            "joined_s": row.joined_s if row is not None else None,
        }


def count_collectives() -> int:
    """Return how many collectives this rank has begun, over all its groups: all ranks of a job have
    begun equally many, or one has left one out. The groups count for themselves."""
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_names
    return sum(group._get_sequence_number_for_group() for group in groups)


def _as_vector(counts: Sequence[float | Tensor], device: torch.device) -> Tensor:
    if any(isinstance(count, Tensor) for count in counts):
        return torch.cat([on_device(count, device) for count in counts])
    # From pinned memory: a copy from pageable memory would make the host wait for the device.
    vector = torch.tensor(counts, dtype=torch.float64, pin_memory=device.type == "cuda")
    return vector.to(device, non_blocking=True)
