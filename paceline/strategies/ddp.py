"""One replica per rank: DistributedDataParallel, and the plain model if there is only one rank."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.schema import RunConfig, StrategyConfig
from paceline.config.section import Positive
from paceline.records import Crew, Exchange, Finding, Plan, StateBytes
from paceline.strategies.base import Case, Engine, EngineParts, Share, Strategy, Unread
from paceline.strategies.optimizers import ema_bytes, optimizer_bytes
from paceline.strategies.shape import ModelShape, ParameterShape, sum_bytes

CASTS = ("fp16", "bf16")
MIN_RATE = 2.0  # torch's default for PowerSGD: a matrix that shrinks less is sent whole


class Exchanging(StrategyConfig):
    exchange: Literal["collectives", "symmetric", "fused"] = Field(
        "collectives",
        description="Who moves gradients and weights: NCCL or gloo, or the ranks themselves through"
        " symmetric memory, where NVLink joins them all. fused (zero2, zero3): in parts, beside the"
        " products that need them.",
    )


class Buckets(StrategyConfig):
    bucket_mb: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        "auto",
        description="MiB of gradients per all-reduce. auto: by the link that `paceline check` has"
        " measured, else 25.",
    )


class DDPSettings(Buckets, Exchanging):
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none", description="What gradients are sent as."
    )
    powersgd_rank: Positive = Field(
        1, description="powersgd: rank of the matrices that stand for a gradient."
    )
    powersgd_start: Annotated[int, Field(ge=2)] = Field(
        10, description="powersgd: steps that send whole gradients before it begins."
    )
    static_graph: bool = Field(
        False, description="The same parameters are used, in the same order, every step."
    )
    find_unused_parameters: bool = Field(
        False, description="Look for parameters that got no gradient; costs a walk each step."
    )


class Single(Strategy):
    """One rank: the engine of DDP without other ranks."""

    name = "single"
    summary = "the plain model on one rank"
    compiles_whole = True

    def problems(self, config: RunConfig, crew: Crew, model: ModelShape) -> list[Finding]:
        if crew.world_size == 1:
            return []
        return [
            Finding.error(
                "strategy.name",
                f"single trains on one rank, and {crew.world_size} were asked for",
                hint="set strategy.name=ddp, or launch.nproc=1",
            )
        ]

    def zero_stage(self, config: RunConfig) -> int | None:
        return 0

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        return replica_bytes(model, config)

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        return Exchange(plain=0, sent=0, because="one rank has no other to reduce with")

    def build(self, parts: EngineParts) -> Engine:
        from paceline.strategies.ddp_engine import build_single

        return build_single(parts)

    def cases(self, config: RunConfig, world: int, micro: int) -> list[Case]:
        """Return none: it is the reference for all others."""
        return []


class Replicated(Strategy):
    name = "ddp"
    summary = "DistributedDataParallel: everything whole on every rank, gradients all-reduced"
    aliases: tuple[str, ...] = ("zero0",)
    Settings = DDPSettings
    lossy = ("comm_hook", "powersgd_rank", "powersgd_start")
    alone = "single"

    def problems(self, config: RunConfig, crew: Crew, model: ModelShape) -> list[Finding]:
        return list(ddp_problems(config, model))

    def unread(self, config: RunConfig, plan: Plan) -> Iterator[Unread]:
        if DDPSettings.of(config).comm_hook != "powersgd":
            yield Unread(("powersgd_rank", "powersgd_start"), "strategy.comm_hook is another")

    def zero_stage(self, config: RunConfig) -> int | None:
        return 0

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        return replica_bytes(model, config)

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        return plan_exchange(model.trainable, DDPSettings.of(config))

    def lost_on_resume(self, config: RunConfig) -> list[str]:
        if DDPSettings.of(config).comm_hook != "powersgd":
            return []
        return ["PowerSGD's memory of errors is in no checkpoint: it began anew"]

    def build(self, parts: EngineParts) -> Engine:
        from paceline.strategies.ddp_engine import build_ddp

        return build_ddp(parts)


def replica_bytes(model: ModelShape, config: RunConfig) -> StateBytes:
    """Return the bytes of everything whole: 16 per parameter with AdamW on fp32 weights."""
    trainable = sum_bytes(model.trainable)
    return StateBytes(
        parameters=trainable + sum_bytes(model.frozen),
        gradients=trainable,
        optimizer=optimizer_bytes(config, model.trainable) + ema_bytes(config, model.trainable),
    )


def ddp_problems(config: RunConfig, model: ModelShape) -> Iterator[Finding]:
    settings = DDPSettings.of(config)
    if settings.exchange == "symmetric" and settings.comm_hook != "none":
        yield Finding.error(
            "strategy.exchange",
            f"symmetric sums gradients as they are, and strategy.comm_hook is {settings.comm_hook}",
            hint="set one of the two",
        )
    if settings.static_graph and settings.find_unused_parameters:
        yield Finding.warning(
            "strategy.find_unused_parameters",
            "has no effect beside strategy.static_graph, which learns it at step 1",
            hint="set one of the two",
        )
    if settings.comm_hook != "none":
        yield from _hook_findings(config, model, settings)


def _hook_findings(
    config: RunConfig, model: ModelShape, settings: DDPSettings
) -> Iterator[Finding]:
    """Say what a hook saves, and from which step on."""
    exchange = plan_exchange(model.trainable, settings)
    if exchange.sent >= exchange.plain:
        yield Finding.warning(
            "strategy.comm_hook",
            f"{settings.comm_hook} saves nothing: {exchange.plain:,} bytes of gradients a"
            f" step are {exchange.sent:,} with it",
            hint="set strategy.comm_hook=none",
        )
    else:
        yield Finding.note(
            "strategy.comm_hook",
            f"{exchange.plain:,} bytes of gradients a step become {exchange.sent:,}"
            f" ({exchange.because})",
        )
    starts, num_steps = settings.powersgd_start, config.train.num_steps
    if settings.comm_hook == "powersgd" and num_steps is not None and num_steps <= starts:
        yield Finding.warning(
            "strategy.powersgd_start",
            f"powersgd begins after step {starts}, and the run ends at {num_steps}: every"
            " gradient is sent whole",
        )


def plan_exchange(parameters: Iterable[ParameterShape], settings: DDPSettings) -> Exchange:
    """Return the bytes per step before and after the hook."""
    kept = list(parameters)
    plain, hook = sum_bytes(kept), settings.comm_hook
    if hook == "none":
        return Exchange(plain=plain, sent=plain, because="all gradients are reduced as they are")
    if hook in CASTS:
        sent = sum(p.numel * min(2, p.itemsize) for p in kept)
        why = f"sent as {hook}" if sent < plain else f"{hook} saves nothing: already 16 bits"
        return Exchange(plain=plain, sent=sent, because=why)
    sent = sum(_powersgd_numel(p, settings.powersgd_rank) * p.itemsize for p in kept)
    why = f"powersgd of rank {settings.powersgd_rank} after step {settings.powersgd_start}"
    return Exchange(plain=plain, sent=sent, because=why)


def _powersgd_numel(parameter: ParameterShape, rank: int) -> int:
    """Count what PowerSGD sends: it sees every tensor as a matrix of its first axis by all
    others."""
    if len(parameter.shape) < 2:
        return parameter.numel
    rows = parameter.shape[0]
    columns = parameter.numel // rows
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * MIN_RATE < parameter.numel else parameter.numel


SINGLE = Single()
DDP = Replicated()
