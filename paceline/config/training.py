"""The sections `train` and `optim`: how long, how much per step, how weights are updated."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.config.section import Count, Positive, Section
from paceline.metrics import VAL, Goal

DEFAULT_STEPS = 100


class TrainConfig(Section):
    steps: Literal["auto"] | Positive = Field(
        "auto", description="Optimizer steps to take. auto: 100, or what train.epochs takes."
    )
    epochs: Literal["off"] | Annotated[float, Field(gt=0)] = Field(
        "off", description="How often to go through the training data, in place of train.steps."
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Seeds the weights, the data order and dropout."
    )
    micro_batch_size: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        8, description="Samples per forward pass on one rank."
    )
    grad_accum: Literal["auto"] | Positive = Field(
        "auto",
        description="Forward passes per optimizer step. auto: 1, or what global_batch_size needs.",
    )
    global_batch_size: Literal["auto"] | Positive = Field(
        "auto",
        description="Samples per optimizer step over all ranks. auto: micro x accumulation x dp.",
    )
    log_every: Positive = Field(
        10, description="Steps between gathering the losses of all ranks into training.csv."
    )
    eval_every: Literal["off"] | Positive = Field(
        "off", description="Steps between evaluations on validation data; also after the last."
    )
    eval_samples: Literal["all"] | Positive = Field(
        "all", description="Validation samples per evaluation."
    )
    eval_ema: bool = Field(
        False, description="Evaluate with the average of the weights that optim.ema keeps."
    )
    sample_prompts: list[str] = Field(
        [],
        description="Texts that a language model continues at every evaluation; what it writes is"
        " in samples.jsonl and in the report.",
    )
    sample_tokens: Positive = Field(64, description="Tokens to add to each prompt.")
    deterministic: bool = Field(
        False,
        description="Use only kernels that give the same bits every time; an operation without such"
        " a kernel ends the run.",
    )
    best: str = Field(
        "auto",
        description="The metric that decides which checkpoint is the best: val/NAME:min or"
        " val/NAME:max. auto: val/loss, where there is one.",
    )
    stop_after: Literal["off"] | Positive = Field(
        "off", description="End the run after this many evaluations without an improvement."
    )
    max_skips: Count = Field(
        0, description="Updates vetoed for a non-finite loss or gradient before the run ends."
    )
    compile: Literal[
        "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = Field("off", description="Mode of torch.compile.")
    compile_scope: Literal["auto", "blocks", "model"] = Field(
        "auto",
        description="What one graph holds: a block, or the model with its loss. auto: the model on"
        " one rank, else blocks, so that ranks gather and reduce between them; blocks also where"
        " activations are offloaded.",
    )
    compile_dynamic: Literal["auto", "off", "on"] = Field(
        "off", description="Dynamic shapes in torch.compile; auto lets it decide on a recompile."
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="What RoPE, SwiGLU and AdamW run on: torch and its compiler, or Triton kernels"
        " of our own. auto: Triton where it was measured to be faster.",
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="Recompute in backward: nothing, whole blocks, or blocks but for their matrix"
        " products.",
    )

    memory_budget: Literal["off", "auto"] | Annotated[float, Field(gt=0, lt=1e9)] = Field(
        "off",
        description="GB that a rank may use on its device: as few blocks as possible recompute"
        " their activations, the cheaper way first. auto: 92 % of the GPU.",
    )
    activation_offload: bool = Field(
        False,
        description="Keep what blocks save for backward in the host's memory, copied while others"
        " compute.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs != "off" and self.steps != "auto":
            raise ValueError(
                f"steps {self.steps} and epochs {self.epochs:g} both say how long to train\n"
                "hint: train.steps=auto lets train.epochs decide"
            )
        return self

    @property
    def num_steps(self) -> int | None:
        """The steps that were asked for; None where the data's length decides."""
        if self.epochs != "off":
            return None
        return DEFAULT_STEPS if self.steps == "auto" else self.steps

    @field_validator("best")
    @classmethod
    def _best_is_a_metric(cls, text: str) -> str:
        if text != "auto" and not Goal.parse(text).name.startswith(VAL):
            raise ValueError(f"{text!r} is not measured in evaluations\nhint: val/NAME:min")
        return text


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "onecycle", "constant"] = Field(
        "cosine",
        description="Shape after the warm-up. wsd: the top, then linearly down at the end."
        " onecycle: torch's OneCycleLR, up from lr / 25 and down, both by a cosine.",
    )
    warmup_steps: Count = Field(
        0,
        description="Steps of linear warm-up; step 1 uses lr / warmup_steps. onecycle: the step of"
        " the highest rate; 0: three tenths of them.",
    )
    total_steps: Literal["auto"] | Positive = Field(
        "auto",
        description="Step at which the floor is reached; it stays there. auto: train.steps.",
    )
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: the share of total_steps, at their end, in which the rate falls."
    )
    floor: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Last learning rate, as a share of optim.lr."
    )


class GroupConfig(Section):
    """Settings for the parameters whose names match a pattern."""

    match: str = Field(
        min_length=1, description="Pattern for names of parameters: * is any letters, dots too."
    )
    lr_scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Their learning rate, as a multiple of that of the step."
    )
    weight_decay: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        "auto", description="Theirs, vectors too. auto: optim.weight_decay on matrices."
    )
    frozen: bool = Field(False, description="They are not trained: no gradient, no state.")


class OptimConfig(Section):
    name: Literal["adamw", "adamw8bit", "adam", "sgd", "lion", "adafactor", "muon"] = Field(
        "adamw",
        description="The optimizer. muon updates the matrices of the model's blocks, and AdamW the"
        " rest; adamw8bit keeps the moments of large ones in 8 bits.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(3e-4, description="Highest learning rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="Applied to matrices only, not to norms and biases."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="First beta of AdamW, Adam and Lion."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, description="Second beta of AdamW, Adam and Lion."
    )
    eps: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        "auto",
        description="Added to the divisor of an update, or its lower bound. auto: 1e-8; the"
        " number type's own for adafactor.",
    )
    momentum: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto", description="Momentum of SGD and Muon. auto: 0 of SGD, 0.95 of Muon."
    )
    fused: Literal["auto", "on", "off"] = Field(
        "auto", description="One kernel for the update, with the veto inside. auto: on."
    )
    clip: Literal["off"] | Annotated[float, Field(gt=0)] = Field(
        1.0, description="Largest global gradient norm."
    )
    ema: Literal["off"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "off",
        description="Keep an average of the weights: this share of it, and the rest of the new"
        " weights, after each update.",
    )
    groups: list[GroupConfig] = Field(
        [],
        description="Parameters with settings of their own; the first pattern that fits a name"
        ' counts: [{match: "head.*", lr_scale: 0.1}].',
    )
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Learning rate over time.")
