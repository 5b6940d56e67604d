"""What the first batch shows before step 1: FLOPs per sample, parameters without a gradient, and
whether the loss is a sum.

The seam asks for a sum. A mean would train without a word: its loss and its gradients are too small
by the size of the microbatch, and change with it. A batch tells the two apart: its loss is the sum
of what its parts give, or their mean. What depends on the batch as a whole, as contrastive losses
do, is neither, and is left alone.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.loader import map_tensors
from paceline.data.rng import capture_rng, restore_rng
from paceline.errors import ConfigError, PacelineError
from paceline.job import Job
from paceline.metrics import TRAIN
from paceline.records import Plan
from paceline.records.words import few
from paceline.strategies.base import Engine, Totals
from paceline.strategies.gather import locals_of
from paceline.strategies.optim import freeze, trained_parameters
from paceline.train.evaluation import Evaluation
from paceline.train.feed import Feed
from paceline.train.keeper import Best
from paceline.workloads.base import Workload
from paceline.workloads.meta import on_meta

LOG = logging.getLogger("paceline")
CLOSE = 0.05  # of the parts' losses: models that draw random numbers while they evaluate are noisy
FAR = 0.25
OURS = "paceline."


class Compared(NamedTuple):
    """Losses of a batch and of two parts of it, summed over all ranks. The mean of the parts is
    taken in two ways, for they may be means over samples or over units."""

    whole: float
    parts: float
    mean_by_samples: float
    mean_by_units: float
    size: float  # of the parts, without their signs

    @property
    def is_sum(self) -> bool:
        return abs(self.whole - self.parts) <= CLOSE * self.size

    @property
    def is_mean(self) -> bool:
        """Say whether it is clearly a mean and clearly not a sum; never where a number is not
        finite."""
        means = (self.mean_by_samples, self.mean_by_units)
        is_near = min(abs(self.whole - mean) for mean in means) <= CLOSE * self.size / 2
        return is_near and abs(self.whole - self.parts) > FAR * self.size


@dataclass(frozen=True)
class FirstBatch:
    """The first microbatch, on its device, how many samples it has, and what it takes to compute
    its loss."""

    engine: Engine
    workload: Workload
    plan: Plan
    device: torch.device
    batch: Any
    size: int

    def require_summed_loss(self) -> list[str]:
        """Refuse a loss that is a mean over the batch, and tell of metrics beside it that are;
        leave no trace otherwise. A collective."""
        size = self.size
        # Ranks may have batches of different sizes, and all must do the same here.
        num_others = self._sum(torch.tensor([0.0 if can_cut(self.batch, size) else 1.0]))
        if any(num_others):
            return []
        with traceless(self.engine, self.device) as rewind:
            # A quarter and the rest, then halves: a chance likeness would not come twice.
            for first in (max(1, size // 4), size // 2):
                compared, totals = self._compare(first, rewind)
                if compared is None or not compared.is_mean:
                    is_sum = compared is not None and compared.is_sum
                    return list(self._tell_means(totals, first)) if is_sum else []
        assert compared is not None, "there is at least one cut"
        whole, parts = (x / self.plan.batch.dp for x in (compared.whole, compared.parts))
        raise ConfigError(
            f"{type(self.workload).__name__}.loss returns a mean: it is {whole:.4g} for the first"
            f" batch of {size} samples and {parts:.4g} for its parts together, where a sum is the"
            " same. Paceline divides once, over all ranks and microbatches\n"
            'hint: return the sum and the count: cross_entropy(..., reduction="sum"), len(targets)'
        )

    def _tell_means(self, totals: list[Totals], first: int) -> Iterator[str]:
        """Tell of metrics that are means, though the loss is a sum: they are divided once more."""
        name, samples = type(self.workload).__name__, [first, self.size - first]
        for key in totals[0].extras:
            (whole, count), *parts = (tuple(map(float, each.extras[key])) for each in totals)
            values, counts = zip(*parts, strict=True)
            if not math.isclose(count, sum(counts), rel_tol=1e-6):
                continue  # a count of its own, such as (value, 1): it is divided by the passes
            means = (_mean(values, samples), _mean(values, counts))
            if Compared(whole, sum(values), *means, sum(map(abs, values))).is_mean:
                yield (
                    f"{name}.loss returns a mean as {key!r}: {whole:.4g} for the first batch, and"
                    f" {sum(values):.4g} for its parts together, where a sum is the same. It is"
                    f" divided once more, here by {count:g}, so {TRAIN}{key} is too small: return"
                    " the sum, or (sum, count)"
                )

    def _compare(
        self, first: int, rewind: Callable[[], None]
    ) -> tuple[Compared | None, list[Totals]]:
        """Compare the batch with two parts of it, cut after the first samples; return None, on
        every rank, if that shows nothing; and what the passes of this rank gave."""
        size = self.size
        parts, samples = self._cut(first), [first, size - first]
        units = self._units(parts, samples)
        if units is None:
            return None, []
        totals: list[Totals] = []
        found = torch.zeros(len(Compared._fields) + 1, dtype=torch.float64)
        try:
            for part in [self.batch, *parts]:
                rewind()
                totals.append(self.engine.evaluate(part))
            whole, *two = (float(each.loss_sum) for each in totals)
            means = (_mean(two, samples), _mean(two, units))
            found[:-1] = torch.tensor([whole, sum(two), *means, sum(map(abs, two))])
        except PacelineError:
            raise
        except Exception as error:
            # A loss may be unable to evaluate; training shows whether it is wrong. But where others
            # hold parts of the model they wait for this rank, and must see it end.
            if not self._holds_all():
                raise
            LOG.info("not checked whether the loss is a sum: %s: %s", type(error).__name__, error)
            found[-1] = 1
        *figures, num_failed = self._sum(found)
        return None if num_failed else Compared(*figures), totals

    def _cut(self, first: int) -> list[Any]:
        leaves, form = tree_flatten(self.batch)
        return [
            tree_unflatten([leaf[rows] for leaf in leaves], form)
            for rows in (slice(first), slice(first, None))
        ]

    def _units(self, parts: list[Any], samples: list[int]) -> list[float] | None:
        """Return what the losses of the parts are divided by; None where that of the batch is not
        their sum: then a loss need not grow with the batch either."""
        if self.plan.units_per_sample is not None:
            return list(samples)
        units = [float(self.workload.units(part)) for part in parts]
        is_sum = math.isclose(float(self.workload.units(self.batch)), sum(units), rel_tol=1e-6)
        num_other = self._sum(torch.tensor([0.0 if is_sum else 1.0], dtype=torch.float64))
        return None if any(num_other) else units

    def _sum(self, values: Tensor) -> list[float]:
        """Sum over all ranks."""
        values = values.to(self.device)
        dist.all_reduce(values)
        numbers: list[float] = values.tolist()
        return numbers

    def _holds_all(self) -> bool:
        """Say whether this rank can run the model without waiting for another."""
        held = sum(part.numel() for part in locals_of(self.engine.module.parameters()))
        return held >= self.plan.model.num_trainable + self.plan.model.num_frozen


def is_worth_asking(workload: Workload, plan: Plan) -> bool:
    """Say whether to check the loss: not for one sample, which is its own mean, nor for a workload
    that we ship and test."""
    many = plan.batch.micro > 1 or plan.batch.counts == "batches"
    return many and not is_ours(workload)


def is_ours(workload: Workload) -> bool:
    return type(workload).__module__.startswith(OURS)


def can_cut(batch: Any, size: int) -> bool:
    """Say whether all of it is tensors with one row for each of `size` samples."""
    leaves = tree_flatten(batch)[0]
    return (
        size > 1
        and bool(leaves)
        and all(torch.is_tensor(leaf) and leaf.dim() > 0 and len(leaf) == size for leaf in leaves)
    )


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(x * w for x, w in zip(losses, weights, strict=True)) / total if total else 0.0


@contextmanager
def traceless(engine: Engine, device: torch.device) -> Iterator[Callable[[], None]]:
    """While inside, nothing is compiled; on leaving, generators and buffers are restored. Yields a
    function that restores the generators in between, so that all passes draw the same numbers."""
    drawn = capture_rng(device)
    kept = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield lambda: restore_rng(drawn, device)
    finally:
        restore_rng(drawn, device)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def try_evaluation(job: Job, engine: Engine, evaluation: Evaluation, best: Best) -> list[str]:
    """Find mistakes in the job's evaluation on its first batch; for built-in workloads only check
    the name in `train.best`. Return what could not be tried. A collective."""
    has_name = job.config.train.best != "auto"
    if evaluation.data is None or (is_ours(job.workload) and not has_name):
        return []
    with traceless(engine, evaluation.device):
        tried = evaluation.try_out(engine)
    if tried.names is None:
        return [tried.why_not]
    best.require_known(tried.names)
    return []


class Traced(NamedTuple):
    """FLOPs of one sample, forward and backward, and where the figure comes from; and parameters
    that are to be trained and got no gradient from the first batch."""

    flops: float | None
    source: str
    unreached: Sequence[str] = ()


def trace_first(job: Job, plan: Plan, feed: Feed, device: torch.device) -> Traced:
    """Count FLOPs on the first batch, unless the plan knows them, and see meanwhile what gets a
    gradient. The batch comes through the loader's time limit."""
    if plan.flops_per_sample.value is not None:
        return Traced(plan.flops_per_sample.value, plan.flops_per_sample.because)
    if job.config.data.num_buckets is not None:
        return Traced(None, "not counted: batches of samples of unequal length differ in it")
    batch = feed.peek().batch
    # To load a batch may draw random numbers, as it would in its step; to count must not.
    drawn = capture_rng(device)
    try:
        flops, unreached = run_on_meta(job, batch)
    except Exception as error:  # any operation of the user's may lack a meta kernel
        return Traced(None, f"not counted: {type(error).__name__} on meta tensors: {error}")
    finally:
        restore_rng(drawn, device)
    source = "counted on the first batch by torch.utils.flop_counter"
    return Traced(flops / plan.batch.micro, source, unreached)


def run_on_meta(job: Job, batch: Any) -> tuple[int, list[str]]:
    """Run a forward and a backward pass on meta tensors, where only shapes are computed; return
    their FLOPs, and the parameters to train that got no gradient."""
    with on_meta():
        model = job.workload.build_model(job.config)
    freeze(model, job.config.optim)
    shapes = map_tensors(lambda tensor: tensor.to("meta"), batch)
    # The counter sees attention only where it is spelt out as matrix products.
    spelt_out = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, on_meta(), spelt_out:
        loss, *_ = job.workload.loss(model, shapes)
        loss.backward()
    unreached = [n.name for n in trained_parameters(model) if n.parameter.grad is None]
    return int(counter.get_total_flops()), unreached


def describe_unreached(names: Sequence[str]) -> str:
    return (
        f"no gradient reached {few(names)} in the first batch, and what no batch reaches is not"
        ' trained: use it in the loss, or freeze it: optim.groups=[{match: "...", frozen: true}]'
    )
