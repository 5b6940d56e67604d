"""Chooses bucket sizes and prefetching from the link that `paceline check` has measured, so that
communication hides behind computation.

Each all-reduce costs its latency, and the last bucket is reduced when nothing is left to compute:
with buckets of b bytes, G bytes of gradients, a latency l and a rate r the exposed time is about
G/b * l + b/r, smallest at b = sqrt(G * l * r).
"""

from math import sqrt

from paceline.config.schema import RunConfig
from paceline.machine.datasheets import choose_arithmetic
from paceline.machine.measures import load_latency, load_link, load_matmul_tflops
from paceline.records import Choice, Crew, Env, Plan
from paceline.records.words import count, duration
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape

MIB = 2**20
DEFAULT_BUCKET = 25.0  # torch's own
SMALLEST, LARGEST = 1.0, 256.0
# Of a small all-reduce, where none was measured: NCCL on one machine about 30 us, gloo over
# loopback 0.24 ms.
LATENCY_S = {"nccl": 30e-6, "gloo": 240e-6}
HARD_TO_HIDE = 0.5  # of a block's forward pass


def choose_bucket(
    config: RunConfig, env: Env, crew: Crew, model: ModelShape, strategy: Strategy
) -> Choice[float]:
    """Choose the MiB of gradients in one all-reduce."""
    asked = getattr(config.strategy, "bucket_mb", "auto")
    matters = "bucket_mb" in strategy.Settings.model_fields
    if asked != "auto":
        return Choice.as_asked(float(asked), matters=matters)
    link = load_link(env, crew.device.value, crew.num_nodes)
    if link is None or not matters or crew.world_size == 1:
        because = "torch's own: no link was measured here (paceline check)"
        return Choice(requested=asked, value=DEFAULT_BUCKET, because=because, matters=False)
    gradients = sum(p.num_bytes for p in model.trainable)
    measured = load_latency(env, crew.device.value, crew.num_nodes)
    latency_s = measured or LATENCY_S[crew.backend.value]
    best = sqrt(gradients * latency_s * link.gb_per_s * 1e9) / MIB
    value = round(min(max(best, SMALLEST), LARGEST), 1)
    because = f"least exposed at the {link.gb_per_s:.3g} GB/s that check measured, with a latency"
    because += f" of {duration(latency_s)}{'' if measured else ', which is assumed'}"
    return Choice(requested=asked, value=value, because=because)


def choose_prefetch(
    config: RunConfig, env: Env, plan: Plan, model: ModelShape, strategy: Strategy
) -> Choice[int]:
    """Choose how many blocks are gathered ahead, each way: one, where a gather is hard to hide
    behind a block's computation, else torch's own order."""
    share: float | str = "no weight is gathered"
    if strategy.shards(config) and plan.crew.world_size > 1:
        share = _gather_share(env, plan, model)
    if isinstance(share, str):
        because = f"torch's own order: {share}"
        return Choice(requested="auto", value=0, because=because, matters=False)
    because = f"a block's gather is estimated at {share:.0%} of its forward pass"
    return Choice(requested="auto", value=int(share > HARD_TO_HIDE), because=because)


def _gather_share(env: Env, plan: Plan, model: ModelShape) -> float | str:
    """Return how long the gather of a block takes, of the forward pass that may hide it, the
    shorter one; a text says what is not known of it."""
    crew, each = plan.crew, plan.flops_per_sample.value
    link = load_link(env, crew.device.value, crew.num_nodes)
    rate = _matmul_tflops(env, plan)
    if link is None:
        return "no link was measured here (paceline check)"
    if rate is None:
        by = "" if plan.on_gpu else f" by {count(plan.threads.value, 'thread')}"
        return f"no matmul{by} was measured here (paceline check)"
    if not each or not model.num_blocks:
        return "how long a block computes is not known"
    forward_s = each / 3 * plan.batch.micro / model.num_blocks / rate / 1e12
    others = (crew.world_size - 1) / crew.world_size
    return _gathered_bytes(plan, model) * others / (link.gb_per_s * 1e9) / forward_s


def _matmul_tflops(env: Env, plan: Plan) -> float | None:
    """Return the measured rate of a rank, in the arithmetic of the plan; that of a CPU, whose fp32
    alone is measured, holds for as many threads only."""
    device, precision = plan.device.value, plan.precision.value
    kind = choose_arithmetic(env, device, precision, plan.matmul.value) if plan.on_gpu else "fp32"
    rate = load_matmul_tflops(env, device, kind, plan.threads.value)
    return rate * plan.fp8.gain if rate is not None and plan.fp8 is not None else rate


def _gathered_bytes(plan: Plan, model: ModelShape) -> float:
    """Return the bytes of a block's weights on their way, the mean of all blocks."""
    wide = 4 if plan.precision.value == "fp32" else 2
    fp8 = plan.fp8 if plan.fp8 is not None and plan.fp8.gathers_fp8 else None
    low = {f"{layer}.weight" for layer in fp8.layers} if fp8 is not None else set()
    inside = [p for p in model.parameters if p.unit < model.num_blocks]
    return sum(p.numel * (1 if p.name in low else wide) for p in inside) / model.num_blocks
