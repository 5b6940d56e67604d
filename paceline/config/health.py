"""The rules by which a run is judged while it runs and after it: each with its limit and what is
done where it is broken. `paceline/health/` reads them; `observe.rules` is where they stand."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from paceline.config.section import Positive, Seconds, Section

# What a broken rule leads to: a word but for `off`; `halt` asks for the stacks, too.
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
    one is written. halt: as dump, and .anomaly_type and .HALT, so that all ranks stop at the same
    step."""

    straggler: Action = _rule("warn", "A rank does its own work slower than the others.")
    straggler_share: Share = Field(
        0.1, description="By so much of what the others take, in four of five steps."
    )
    straggler_steps: Positive = Field(15, description="Seen over so many steps at least.")
    straggler_s: Seconds = Field(0.75, description="And for so long, while the run goes on.")
    spikes: Action = _rule("warn", "Single steps take far longer, now and then.")
    spike_factor: Factor = Field(3.0, description="So many times a rank's median step.")
    heartbeat_stall: Action = _rule("dump", "A rank writes no heartbeat.")
    heartbeat_stall_s: Seconds = Field(180.0, description="For so long.")
    throughput_flatline: Action = _rule("dump", "No step ends.")
    throughput_flatline_s: Seconds = Field(
        120.0, description="For so long, and for ten times the median step."
    )
    throughput_drift: Action = _rule("warn", "Steps become slower in the course of the run.")
    throughput_drift_share: Share = Field(
        0.2, description="The last tenth of the steps against the first tenth of the steady ones."
    )
    nan_loss: Action = _rule("warn", "A loss or a gradient is not finite, and no update is made.")
    loss_spike: Action = _rule("warn", "The loss jumps up.")
    loss_spike_sigmas: Amount = Field(
        8.0, description="By so many times what it usually differs from step to step."
    )
    loss_plateau: Action = _rule("warn", "The loss no longer falls.")
    loss_plateau_steps: Positive = Field(
        2000, description="Its mean over so many steps is no lower than over as many before."
    )
    zero_grad: Action = _rule("warn", "The gradient norm is zero.")
    gradient_explosion: Action = _rule("warn", "The gradient norm explodes.")
    gradient_explosion_factor: Factor = Field(100.0, description="Times the median of the run.")
    gate_collapse: Action = _rule(
        "warn", "Of sparse attention: one gate has all, and its other branches do nothing."
    )
    gate_collapse_share: Share = Field(0.5, description="In more tokens and heads than this share.")
    gate_entropy_min: Amount = Field(
        0.2, description="Or the gates' entropy is below this; where all are alike it is 1.0986."
    )
    gate_collapse_steps: Positive = Field(20, description="In so many steps, up to the last.")
    memory_growth: Action = _rule("warn", "A rank's memory grows all the time.")
    memory_growth_mib_per_min: Amount = Field(
        100.0, description="By so much, over a minute at least; of a GPU, a fifth of it."
    )
    gpu_throttle: Action = _rule("warn", "A GPU lowers its clock: heat, power, or its slowdown.")
    gpu_throttle_share: Share = Field(
        0.1, description="Below the clock of its best minute, or of the other GPUs, by so much."
    )
    gpu_errors: Action = _rule("checkpoint", "A GPU reports ECC errors, or the driver an Xid.")
    data_starvation: Action = _rule("warn", "All ranks wait for data.")
    data_starvation_share: Share = Field(0.2, description="For so much of a step.")
    clock_skew: Action = _rule("warn", "The clocks of machines are apart.")
    clock_skew_s: Seconds = Field(5.0, description="By so much.")
    desync: Action = _rule("dump", "Ranks have not run the same number of collectives.")
    shapes_differ: Action = _rule("warn", "Ranks gave tensors of other shapes to one collective.")
    unequal_batches: Action = _rule("warn", "Ranks get unequal shares of a step.")
    unequal_batches_share: Share = Field(
        0.2, description="The largest is larger by so much, in the median step."
    )
    exchange_share: Share = Field(
        0.25, description="Of a step in the exchange, from which it is called bound by it."
    )
    host_share: Share = Field(
        0.15, description="Of a GPU's step without work for it, from which the host is the limit."
    )

    def actions(self) -> dict[str, Action]:
        """Return what is done about each kind of finding that has a rule."""
        names = [n for n in type(self).model_fields if getattr(self, n) in ACTIONS]
        return {name: getattr(self, name) for name in names}
