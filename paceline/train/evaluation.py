"""Validation: each sample once over all ranks, the same numbers everywhere.

every rank     Tally: sums on the device; Items with the indices of their samples
rank 0         gathers all, divides, puts Items in order, asks the workload's `metrics`
every rank     is told the numbers: all must agree on what is best and when to stop
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.base import Dataset
from paceline.data.buckets import cut_by_length, length_of
from paceline.data.collate import collate
from paceline.data.cursor import Indices
from paceline.data.loader import deal_batches, to_device
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.job import Job
from paceline.metrics import VAL, Goal, Items
from paceline.records import Plan
from paceline.records.phases import Phase
from paceline.strategies.base import Engine
from paceline.strategies.clock import Clock
from paceline.train.readback import on_device
from paceline.workloads.base import Workload, own_collate
from paceline.workloads.returns import Pair, join_rows, read_numbers, read_shown

LOG = logging.getLogger("paceline")
MAX_NAMED = 8
# What a job's code raises whatever the samples are.
MISTAKES = (NameError, AttributeError, ImportError, TypeError, KeyError)


class Tried(NamedTuple):
    """The full names of what an evaluation reports; None if `metrics` failed on so few samples, and
    why."""

    names: Sequence[str] | None
    why_not: str = ""


class Evaluation:
    """Knows when validation is due and runs it; without validation data it never is."""

    def __init__(
        self, job: Job, plan: Plan, data: Dataset | None, dp_rank: int, device: torch.device
    ) -> None:
        train = job.config.train
        self.every, self.num_steps = train.eval_every, plan.steps
        self.workload, self.data, self.device = job.workload, data, device
        self.config = job.config
        self.shown: Sequence[tuple[str, str]] = ()  # of the last evaluation, on rank 0
        self.collate = own_collate(job.workload)
        # A run that named none goes on: what it learns is worth more than its validation loss.
        self.deciding = "" if train.best == "auto" else Goal.of_best(train.best).name
        if data is not None:
            wanted = train.eval_samples
            num_samples = len(data) if wanted == "all" else min(wanted, len(data))
            self.batches = deal_batches(_cut(job, data, num_samples), plan.batch.dp, dp_rank)

    def due(self, step: int, is_last: bool = False) -> bool:
        if self.data is None or self.every == "off":
            return False
        return is_last or step % self.every == 0 or step == self.num_steps

    def run(
        self, engine: Engine, clock: Clock, is_cut: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the results on the validation samples of all ranks, by full name; None if the
        evaluation was cut short by `is_cut`, which all ranks ask together after each batch."""
        tally = Tally(self.workload)
        for ids in self.batches:
            clock.enter(Phase.EVAL)  # for each batch: a long evaluation is not a stall
            self._measure(engine, ids, tally)
            if is_cut():
                return None
        found: dict[str, float] = self._conclude(tally.close(), self._judge)
        return found

    def try_out(self, engine: Engine) -> Tried:
        """Evaluate the first batch of each rank, so that mistakes in a job show before step 1 and
        not hours later. A collective."""
        tally = Tally(self.workload)
        self._measure(engine, self.batches[0], tally)
        tried: Tried = self._conclude(tally.close(), self._try_metrics)
        return tried

    def _measure(self, engine: Engine, ids: Indices, tally: "Tally") -> None:
        assert self.data is not None, "asked to evaluate without data"
        # A rank without samples still runs a forward pass: others may wait for it inside one.
        some = ids if len(ids) else np.zeros(1, dtype=np.int64)
        batch = collate(self.data, some, self.collate)
        found = engine.measure(to_device(batch, self.device))
        if len(ids):
            tally.add(ids, found)

    def _conclude(self, own: "Share", judge: Callable[[list["Share"]], Any]) -> Any:
        """Gather the shares of all ranks on rank 0, and return on every rank what it makes of them.
        Shares are pickled: ranks of one run are one program, and trust each other."""
        rank, world = dist.get_rank(), dist.get_world_size()
        heard: list[Any] | None = [own] * world if rank == 0 else None
        if world > 1:
            dist.gather_object(own, heard, dst=0)
        told: list[Any] = [_judge_for_all(judge, heard) if heard is not None else None]
        if world > 1:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], PacelineError):
            raise told[0]
        return told[0]

    def _judge(self, shares: "list[Share]") -> dict[str, float]:
        return conclude(self.workload, shares, self.deciding, self._show)

    def _try_metrics(self, shares: "list[Share]") -> Tried:
        found, name = _put_together(shares), f"{type(self.workload).__name__}.metrics"
        try:
            made = read_numbers(self.workload, self.workload.metrics(found))
        except (PacelineError, *MISTAKES):
            raise
        except Exception as error:  # a few samples may all be of one class, or have no variance
            return Tried(None, f"{name} raised {type(error).__name__} on the first batch: {error}")
        names = [k for k, v in found.items() if isinstance(v, float)]
        return Tried([f"{VAL}{k}" for k in (*names, *made)])

    def _show(self, found: Mapping[str, Any]) -> None:
        self.shown = read_shown(self.workload, self.workload.shown(found, self.config))


def _judge_for_all(judge: Callable[[list["Share"]], Any], shares: "list[Share]") -> Any:
    """Return what is found, or the error that must end all ranks: none may wait for rank 0."""
    try:
        return judge(shares)
    except PacelineError as error:
        return error


def _cut(job: Job, data: Dataset, num_samples: int) -> list[Indices]:
    """Cut the first samples into batches as those of training are: by number, or by length."""
    settings = job.config.data
    tell, ids = length_of(data), np.arange(num_samples, dtype=np.int64)
    length = settings.batch_length
    if isinstance(length, float) and settings.batch_by == "length" and tell is not None:
        return cut_by_length(tell(ids), length)
    micro = job.config.train.micro_batch_size
    return [ids[first : first + micro] for first in range(0, num_samples, micro)]


class Share(NamedTuple):
    """What one rank found: by name, a row (first sample, last sample, sum, count) for each of its
    batches; and the values of its samples, each with the sample's index."""

    sums: dict[str, list[tuple[int, int, float, float]]]
    items: dict[str, list[tuple[Indices, Any]]]


class Tally:
    """Collects what `evaluate` returns, without waiting for the device."""

    def __init__(self, workload: Workload) -> None:
        self.name = f"{type(workload).__name__}.evaluate"
        self.sums: dict[str, list[tuple[Indices, Tensor]]] = {}
        self.items: dict[str, list[tuple[Indices, Any]]] = {}

    def add(self, ids: Indices, found: Mapping[str, Pair | Items]) -> None:
        for name, value in found.items():
            if isinstance(value, Items):
                if len(value) != len(ids):
                    raise ConfigError(
                        f"{self.name}: {name!r} has {len(value)} items for a batch of {len(ids)}"
                        " samples\nhint: Items holds one value per sample"
                    )
                self.items.setdefault(name, []).append((ids, _on_host(value.values)))
            else:
                self.sums.setdefault(name, []).append((ids, _stacked(value)))
        if both := self.sums.keys() & self.items.keys():
            raise ConfigError(f"{self.name}: {sorted(both)} is (sum, count) once and Items once")

    def close(self) -> Share:
        sums = {name: [(*_ends(ids), *pair.tolist()) for ids, pair in found]
                for name, found in self.sums.items()}  # fmt: skip
        return Share(sums, self.items)


def conclude(
    workload: Workload,
    shares: list[Share],
    deciding: str = "",
    show: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, float]:
    """Return all numbers of an evaluation by full name, from the shares of all ranks. The metric
    `deciding` which checkpoint is best must be finite if anything was counted. `show` is called
    with what was found."""
    found = _put_together(shares)
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    for name in [name for name, value in numbers.items() if not math.isfinite(value)]:
        told = f"{VAL}{name} is not finite: {_blame(name, shares)}"
        LOG.warning("%s", told)
        if f"{VAL}{name}" == deciding and _bad_rows(name, shares):
            raise DataError(
                f"{told}; it decides which checkpoint is the best\n"
                "hint: look at these samples, or let train.best name another metric"
            )
    made = read_numbers(workload, workload.metrics(found))
    for name in [name for name, value in made.items() if not math.isfinite(value)]:
        LOG.warning(
            "%s%s, which %s.metrics made, is not finite", VAL, name, type(workload).__name__
        )
    numbers |= made
    show(found)
    return {f"{VAL}{name}": value for name, value in numbers.items()}


def _put_together(shares: list[Share]) -> dict[str, Any]:
    """Return what `evaluate` found over all ranks, by name: means, and Items in order."""
    found: dict[str, Any] = {}
    for name in sorted({name for share in shares for name in share.sums}):
        found[name] = _mean([row for share in shares for row in share.sums.get(name, ())])
    for name in sorted({name for share in shares for name in share.items}):
        found[name] = _in_order([part for share in shares for part in share.items.get(name, ())])
    return found


def _mean(rows: list[tuple[int, int, float, float]]) -> float:
    """Divide once, by sums that do not depend on how samples were dealt out."""
    totals, counts = [total for *_, total, _ in rows], [count for *_, count in rows]
    if not all(map(math.isfinite, (*totals, *counts))):
        return math.nan
    return math.fsum(totals) / math.fsum(counts) if any(counts) else math.nan


def _blame(name: str, shares: list[Share]) -> str:
    """Say whose samples gave a sum that is not finite."""
    bad = _bad_rows(name, shares)
    more = f" and {len(bad) - MAX_NAMED} more batches" if len(bad) > MAX_NAMED else ""
    return "; ".join(bad[:MAX_NAMED]) + more if bad else "nothing was counted"


def _bad_rows(name: str, shares: list[Share]) -> list[str]:
    return [
        f"rank {rank}, samples {first} to {last}"
        for rank, share in enumerate(shares)
        for first, last, *pair in share.sums.get(name, ())
        if not all(map(math.isfinite, pair))
    ]


def _in_order(parts: list[tuple[Indices, Any]]) -> Any:
    """Return the values of all samples in the order of their indices."""
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    rows = join_rows([values for _, values in parts])
    return rows[torch.from_numpy(order)] if torch.is_tensor(rows) else [rows[n] for n in order]


def _stacked(pair: Pair) -> Tensor:
    """Return the two numbers as one vector, on the device if one of them is there."""
    device = next((part.device for part in pair if torch.is_tensor(part)), torch.device("cpu"))
    return torch.cat([on_device(part, device) for part in pair])


def _on_host(values: Any) -> Any:
    if torch.is_tensor(values):
        return values.detach().cpu()
    return [value.detach().cpu() if torch.is_tensor(value) else value for value in values]


def _ends(ids: Indices) -> tuple[int, int]:
    return int(ids.min()), int(ids.max())
