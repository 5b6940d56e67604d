"""`observe.rules`: the rules by which a run is judged while it goes on and at its end, with their
limits and the action taken when it is broken. `paceline/health/` applies them."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from paceline.config.section import Positive, Seconds, Section

# What follows when a rule is broken. All but `off` report it; `halt` asks for the stacks, too.
Action = Literal["off", "warn", "dump", "checkpoint", "halt"]
ACTIONS = get_args(Action)
Share = Annotated[float, Field(gt=0, le=10)]
Factor = Annotated[float, Field(gt=1)]
Amount = Annotated[float, Field(gt=0)]


def _rule(default: Action, description: str) -> Action:
    made: Action = Field(default, description=description)
    return made


class RulesConfig(Section):
    """off: not judged. warn: an event and a finding. dump: the stacks of all ranks too. checkpoint:
    one is written. halt: as dump, and .anomaly_type and .HALT are written, so that all ranks stop
    after the same step."""

    straggler: Action = _rule("warn", "A rank is slower than the others at its own work.")
    straggler_share: Share = Field(
        0.1, description="How much slower, as a share of the others' time, in four of five steps."
    )
    straggler_steps: Positive = Field(15, description="Seen over at least this many steps.")
    straggler_s: Seconds = Field(0.75, description="And for at least this long, in a live run.")
    spikes: Action = _rule("warn", "Single steps now and then take far longer.")
    spike_factor: Factor = Field(
        3.0, description="How long, in multiples of the rank's median step."
    )
    heartbeat_stall: Action = _rule("dump", "A rank writes no heartbeat.")
    heartbeat_stall_s: Seconds = Field(180.0, description="For at least this long.")
    throughput_flatline: Action = _rule("dump", "No step ends.")
    throughput_flatline_s: Seconds = Field(
        120.0, description="For at least this long, and for ten median steps."
    )
    throughput_drift: Action = _rule("warn", "Steps become slower as the run goes on.")
    throughput_drift_share: Share = Field(
        0.2, description="How much slower the last tenth of the run is than its second tenth."
    )
    nan_loss: Action = _rule("warn", "A loss or a gradient is not finite, and no update is made.")
    loss_spike: Action = _rule("warn", "The loss jumps up.")
    loss_spike_sigmas: Amount = Field(
        8.0, description="How far, in multiples of its usual change from step to step."
    )
    loss_plateau: Action = _rule("warn", "The loss no longer falls.")
    loss_plateau_steps: Positive = Field(
        2000, description="Its mean over this many steps is no lower than over as many before."
    )
    zero_grad: Action = _rule("warn", "The gradient norm is zero.")
    gradient_explosion: Action = _rule("warn", "The gradient norm explodes.")
    gradient_explosion_factor: Factor = Field(
        100.0, description="In multiples of the run's median."
    )
    gate_collapse: Action = _rule(
        "warn", "In sparse attention one gate takes everything and the other branches do nothing."
    )
    gate_collapse_share: Share = Field(
        0.5, description="For more than this share of tokens and heads."
    )
    gate_entropy_min: Amount = Field(
        0.2, description="Or the entropy of the gates falls below this; equal gates have 1.0986."
    )
    gate_collapse_steps: Positive = Field(20, description="In this many consecutive steps.")
    memory_growth: Action = _rule("warn", "A rank's memory keeps growing.")
    memory_growth_mib_per_min: Amount = Field(
        100.0, description="How fast, over a minute or more; a fifth of it for a GPU's memory."
    )
    gpu_throttle: Action = _rule("warn", "A GPU lowers its clock because of heat or power.")
    gpu_throttle_share: Share = Field(
        0.1, description="How far below its best minute, or below the other GPUs."
    )
    gpu_errors: Action = _rule("checkpoint", "A GPU reports ECC errors, or the driver an Xid.")
    data_starvation: Action = _rule("warn", "All ranks wait for data.")
    data_starvation_share: Share = Field(0.2, description="For at least this share of a step.")
    clock_skew: Action = _rule("warn", "The clocks of machines disagree.")
    clock_skew_s: Seconds = Field(5.0, description="By at least this much.")
    desync: Action = _rule("dump", "Ranks have not run the same number of collectives.")
    shapes_differ: Action = _rule(
        "warn", "Ranks passed tensors of different shapes to one collective."
    )
    unequal_batches: Action = _rule("warn", "Ranks get unequal shares of the work of a step.")
    unequal_batches_share: Share = Field(
        0.2, description="How much larger the largest share is, in the median step."
    )
    exchange_share: Share = Field(
        0.25, description="Share of a step in communication from which it counts as bound by it."
    )
    host_share: Share = Field(
        0.15, description="Idle share of a GPU's step from which it counts as bound by its host."
    )

    def actions(self) -> dict[str, Action]:
        """Return what is done about each kind of finding that has a rule."""
        names = [n for n in type(self).model_fields if getattr(self, n) in ACTIONS]
        return {name: getattr(self, name) for name in names}
