"""DeepSpeed's own config, generated from ours; what the plan shows is what runs.

`strategy.deepspeed_config` is merged over it last. What would contradict our own keys is refused,
with the key to use instead. Nothing here imports deepspeed: a laptop without it can plan.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from paceline.config.schema import RunConfig
from paceline.records import Finding, Plan
from paceline.records.words import did_you_mean
from paceline.strategies.zero import Offloading

ZERO = "zero_optimization"
AUTOCAST_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Elements of gradients exchanged at a time. DeepSpeed's own 5e8 would be 2 GB in fp32 on each rank.
MAX_BUCKET = 50_000_000
# Stage 3 keeps parameters below so many elements whole on every rank; DeepSpeed's own default.
MIN_SHARDED = 100_000

# What the engine relies on, and the key of ours that says it.
OURS = {
    "gradient_accumulation_steps": "train.grad_accum",
    "managed_gradient_accumulation": "train.grad_accum",
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim.name",
    "scheduler": "optim.schedule.name",
    "fp16": "precision.mode",
    "bf16": "precision.mode",
    "bfloat16": "precision.mode",
    "amp": "precision.mode",
    "data_types": "precision.mode",
    "torch_autocast.enabled": "precision.mode",
    "torch_autocast.dtype": "precision.mode",
    "zero_optimization.stage": "strategy.stage",
}
# What a user may not change: each breaks the sum of gradients or the veto, or chooses code.
FIXED = {
    "gradient_allreduce_op": "gradients are the mean over ranks, as the loss is scaled for it",
    "zero_optimization.compute_grad_norm": "the norm is what finds a bad gradient on any rank",
    "zero_optimization.zenflow": "it applies updates later than the step they belong to",
    "zero_optimization.mics_shard_size": "each rank's part is taken for one of all ranks'",
    "hybrid_engine": "it brings an engine of its own",
    "tensor_parallel": "every rank has its own share of the batch",
    "sequence_parallel_size": "every rank has its own share of the batch",
    "elasticity": "it chooses the batch by itself",
    "torch_autocast.lower_precision_safe_modules": "DeepSpeed imports what it names, and sums the"
    " gradients of those modules in 16 bits",
}
# Sections by which DeepSpeed writes, or sends, where they say; and what does the same inside of the
# run directory. Refused whoever has set them: a config comes from anywhere.
ELSEWHERE = {
    "csv_monitor": "training.csv has all numbers, observe.trackers sends them on",
    "tensorboard": "set observe.trackers=[tensorboard]",
    "wandb": "set observe.trackers=[wandb]",
    "comet": "set observe.trackers to one of those that it lists",
    "flops_profiler": "set observe.profile=steps:20-24; the plan counts the FLOPs",
    "autotuning": "paceline sweep compares settings",
    "nebula": "the keys of checkpoint.* say when and where the run is kept",
}
# What DeepSpeed 0.19 looks for beside the keys above; it passes over any other in silence.
KNOWN = frozenset(
    "activation_checkpointing aio autotuning checkpoint comet comms_logger communication_data_type"
    " compile compression_training csv_monitor curriculum_learning data_efficiency"
    " data_parallel_size dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc"
    " dump_state eigenvalue expert_parallel flops_profiler gradient_predivide_factor"
    " graph_harvesting keep_in_fp32_modules load_universal_checkpoint log_level memory_breakdown"
    " nebula pipeline prescale_gradients progressive_layer_drop quantize_training"
    " seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print"
    " tensorboard timers torch_autocast use_data_before_expert_parallelism use_node_local_storage"
    " vocabulary_size wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer"
    " zero_force_ds_cpu_optimizer zero_optimization".split()
)


class DeepSpeedSettings(Offloading):
    stage: Annotated[int, Field(ge=0, le=3)] = Field(1, description="DeepSpeed's ZeRO stage.")
    deepspeed_config: dict[str, Any] = Field(
        {}, description="More of DeepSpeed's own config: +strategy.deepspeed_config.KEY=value."
    )


def generate(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Generate the config that DeepSpeed is started with, the user's part merged in."""
    clip, batch = config.optim.clip, plan.batch
    settings: dict[str, Any] = {
        # Accumulation is ours: DeepSpeed would divide the loss by it, and the loop has scaled it.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": batch.micro,
        "train_batch_size": batch.micro * batch.dp,
        "gradient_clipping": 0.0 if clip == "off" else clip,
        # The optimizer is ours too, the same as of every strategy.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        ZERO: _zero(config, plan.model.num_trainable),
        # Its stopwatch would wait for the device at every microbatch.
        "timers": {"throughput": {"enabled": False}},
    }
    if DeepSpeedSettings.of(config).offload and plan.on_gpu:
        offload = {"device": "cpu", "pin_memory": True}
        settings[ZERO]["offload_optimizer"] = offload
    if plan.precision.value in AUTOCAST_TYPES:
        settings["torch_autocast"] = _autocast(plan.precision.value)
    return merge(settings, DeepSpeedSettings.of(config).deepspeed_config)


def zero_section(config: RunConfig, num_trainable: int) -> dict[str, Any]:
    """Return its part on sharding, as it will run: what memory is estimated from."""
    over = DeepSpeedSettings.of(config).deepspeed_config.get(ZERO, {})
    own = _zero(config, num_trainable)
    return merge(own, over) if isinstance(over, Mapping) else own


def num_elements(section: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a size in `section`; what is not a number has been refused, and must not end the
    planning."""
    value = section.get(key, default)
    return int(value) if isinstance(value, int | float) else default


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs: `over` wins, key by key down to the leaves."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def check_overrides(overrides: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield one error for every key that contradicts what the engine relies on."""
    for path, key in OURS.items():
        if _has(overrides, path):
            yield _refusal(path, f"is decided by {key}", f"set {key} instead")
    for path, because in FIXED.items():
        if _has(overrides, path):
            yield _refusal(path, f"cannot be changed: {because}", "drop it")
    for path, instead in ELSEWHERE.items():
        if _has(overrides, path):
            what = "cannot be set: DeepSpeed writes where it says, or sends numbers away"
            yield _refusal(path, what, f"drop it; {instead}")
    for key in overrides.keys() - KNOWN - OURS.keys() - FIXED.keys():
        yield _unknown(key)
    if not isinstance(overrides.get(ZERO, {}), Mapping):
        yield _refusal(ZERO, "is not a map", "name the keys inside it; strategy.stage is ours")
    for path in ("offload_optimizer", "offload_param"):
        if _has(overrides, f"{ZERO}.{path}.device") and overrides[ZERO][path]["device"] == "nvme":
            what = "is nvme, and what lies in DeepSpeed's own files is in no checkpoint"
            yield _refusal(f"{ZERO}.{path}.device", what, "set it to cpu")
    for path in _autos(overrides):
        what = "is auto, which the Hugging Face Trainer fills in and DeepSpeed does not know"
        yield _refusal(path, what, "drop it, or give it a value")


def _zero(config: RunConfig, num_trainable: int) -> dict[str, Any]:
    stage = DeepSpeedSettings.of(config).stage
    section: dict[str, Any] = {"stage": stage}
    if stage > 0:
        section["reduce_bucket_size"] = min(num_trainable, MAX_BUCKET)
    if stage == 3:
        section["stage3_param_persistence_threshold"] = MIN_SHARDED
    return section


def _autocast(precision: str) -> dict[str, Any]:
    """torch's autocast over weights that stay fp32, as in every other strategy.

    DeepSpeed's `bf16` section would turn the model itself to bf16, and stage 0 would keep no fp32
    copy to sum small updates in. No `lower_precision_safe_modules`: the gradients of those would
    be summed over ranks in 16 bits.
    """
    return {
        "enabled": True,
        "dtype": AUTOCAST_TYPES[precision],
        "lower_precision_safe_modules": [],
    }


def _has(settings: Mapping[str, Any], path: str) -> bool:
    value: Any = settings
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _autos(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{above}{key}.")
        elif value == "auto":
            yield f"{above}{key}"


def _unknown(key: str) -> Finding:
    return Finding.warning(
        f"strategy.deepspeed_config.{key}",
        "is not a key that DeepSpeed 0.19 looks at: it has no effect there",
        hint=did_you_mean(key, KNOWN).rstrip(),
    )


def _refusal(path: str, what: str, hint: str) -> Finding:
    where = f"strategy.deepspeed_config.{path}"
    return Finding.error(where, what, hint)
