"""One replica a rank: DistributedDataParallel, and the plain model where there is one rank."""

from contextlib import AbstractContextManager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from paceline.config.schema import RunConfig
from paceline.records import Env, Exchange, Finding, Proof, StateBytes
from paceline.strategies.base import Engine, EngineParts, Share
from paceline.strategies.compose import compose
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.hooks import CAST_TYPES, Traffic, plan_exchange, register_hook
from paceline.strategies.objective import Objective
from paceline.strategies.optim import build_optimizer
from paceline.strategies.shape import ModelShape, sum_bytes

MIB = 2**20


class Replicated:
    """`wrap=False` is `single`: the same engine without anyone to talk to."""

    def __init__(self, wrap: bool) -> None:
        self.wrap = wrap

    def problems(self, config: RunConfig, env: Env, model: ModelShape) -> list[Finding]:
        return ddp_problems(config, model) if self.wrap else []

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Everything whole on every rank: 16 bytes a parameter with AdamW on fp32 weights."""
        trainable = sum_bytes(model.trainable)
        return StateBytes(
            parameters=trainable + sum_bytes(model.frozen),
            gradients=trainable,
            optimizer=optimizer_bytes(config, trainable, len(model.trainable)),
        )

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        if not self.wrap:
            return Exchange(plain=0, sent=0, because="one rank has nobody to reduce with")
        return plan_exchange(model.trainable, config.strategy)

    def build(self, parts: EngineParts) -> Engine:
        objective = compose(parts)
        module = objective.model
        wrapping = wrap_ddp(parts, objective) if self.wrap else Wrapping(objective)
        fused = parts.plan.fused_optimizer.value
        optimizer = build_optimizer(module.parameters(), parts.config.optim, fused)
        return ModuleEngine(parts, module, optimizer, wrapping)


def optimizer_bytes(config: RunConfig, num_bytes: int, num_parameters: int) -> int:
    """State that the optimizer keeps for `num_bytes` of weights, AdamW's step counts included."""
    if config.optim.name == "adamw":
        return 2 * num_bytes + 4 * num_parameters
    return num_bytes if config.optim.momentum else 0


def ddp_problems(config: RunConfig, model: ModelShape) -> list[Finding]:
    strategy, found = config.strategy, []
    if strategy.static_graph and strategy.find_unused_parameters:
        found.append(
            Finding(
                severity="warning",
                where="strategy.find_unused_parameters",
                what="has no effect beside strategy.static_graph, which learns it at step 1",
                hint="set one of the two",
            )
        )
    exchange = plan_exchange(model.trainable, strategy)
    if strategy.comm_hook != "none" and exchange.sent >= exchange.plain:
        found.append(
            Finding(
                severity="warning",
                where="strategy.comm_hook",
                what=f"{strategy.comm_hook} saves nothing: {exchange.plain:,} bytes of gradients a"
                f" step are {exchange.sent:,} with it",
                hint="set strategy.comm_hook=none",
            )
        )
    elif strategy.comm_hook != "none":
        found.append(
            Finding(
                severity="note",
                where="strategy.comm_hook",
                what=f"{exchange.plain:,} bytes of gradients a step become {exchange.sent:,}"
                f" ({exchange.because})",
            )
        )
    if strategy.comm_hook == "powersgd" and config.train.steps <= strategy.powersgd_start:
        found.append(
            Finding(
                severity="warning",
                where="strategy.powersgd_start",
                what=f"powersgd begins after step {strategy.powersgd_start}, and the run ends at"
                f" {config.train.steps}: every gradient is sent whole",
            )
        )
    return found


def wrap_ddp(parts: EngineParts, objective: Objective) -> Wrapping:
    strategy = parts.config.strategy
    wrapped = DistributedDataParallel(
        objective,
        bucket_cap_mb=strategy.bucket_mb,
        # Gradients live inside the buckets: no copy after the all-reduce, no second set.
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the engine does, after a step: a checkpoint needs them equal
        static_graph=strategy.static_graph,
        find_unused_parameters=strategy.find_unused_parameters,
    )
    traffic = register_hook(wrapped, strategy)
    is_static = strategy.static_graph
    unsynced = _Unsynced(wrapped, parts.plan.batch.grad_accum - 1, is_static)
    return Wrapping(
        wrapped,
        unsynced,
        proofs=lambda: _proofs(parts, wrapped, traffic),
        forget=traffic.forget if traffic.power is not None else None,
        # It sorts its buckets by the order in which the first gradients came; PowerSGD, which
        # counts passes, must not see one more.
        rehearsed=unsynced.has_learnt if traffic.power is None else None,
    )


class _Unsynced:
    """no_sync for all but the last microbatch of a step, so that each step exchanges once.

    A static graph learns the order of the gradients in its very first backward pass and asserts
    if that was not exchanged: the first step exchanges every time. The sum stays right, as the
    mean of what all ranks hold already is what they hold.
    """

    def __init__(self, model: DistributedDataParallel, per_step: int, static: bool) -> None:
        self.model = model
        self.num_exchanged = per_step if static else 0

    def __call__(self) -> AbstractContextManager[None]:
        if self.num_exchanged:
            self.num_exchanged -= 1
            return nullcontext()
        return self.model.no_sync()

    def has_learnt(self) -> None:
        self.num_exchanged = 0


def _proofs(parts: EngineParts, wrapped: DistributedDataParallel, traffic: Traffic) -> list[Proof]:
    """Buckets as DDP logs them, and the bytes that went through the hook."""
    strategy, told = parts.config.strategy, wrapped._get_ddp_logging_data()
    sizes = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes", ""))
    largest = max((int(size) for size in sizes.replace(" ", "").split(",") if size), default=0)
    buckets = Proof(
        what="DDP buckets",
        requested=f"{strategy.bucket_mb:g} MiB each",
        effective=f"{sizes.count(',') + 1} of up to {largest / MIB:.3g} MiB",
        proof="DDP's logging data",
        ok=int(told.get("bucket_cap_bytes", 0)) == int(strategy.bucket_mb * MIB),
    )
    if strategy.comm_hook == "none":
        return [buckets]
    ratio = traffic.sent / traffic.plain if traffic.plain else 1.0
    expected = 0.5 if strategy.comm_hook in CAST_TYPES else 1.0
    hook = Proof(
        what="DDP hook",
        requested=strategy.comm_hook,
        effective=f"{traffic.sent:,} of {traffic.plain:,} bytes of gradients sent so far",
        proof="counted in the hook, bucket by bucket",
        ok=traffic.plain > 0 and ratio <= expected,
    )
    return [buckets, hook]


SINGLE = Replicated(wrap=False)
DDP = Replicated(wrap=True)
