"""Keys as the commands of other trainers write them, in ours: `dataset.root_dir=X` is
`data.root_dir=X`.

Those of the speech trainer whose runbook docs/speech.md follows: its overrides are Hydra's, and
name DeepSpeed's own config. And those of the masked-autoencoder stub of docs/mae.md, whose YAML
file is trained as it stands. What has no counterpart here is taken where it asks for what happens
anyway, and refused where it asks for something else.
"""

from collections.abc import Iterator
from typing import Any

DEEPSPEED = "deepspeed_config_yaml"
RENAMED: dict[str, tuple[str, ...]] = {
    "dataset.root_dir": ("data.root_dir={}",),
    "dataset.manifest_path": ("data.manifest_path={}",),
    "train.data.num_workers": ("data.num_workers={}",),
    "train.data.prefetch_factor": ("data.prefetch={}",),
    "train.timing_rank_scope": ("observe.timing_ranks={}",),
    # Phases are timed by events on the device: exact as with waiting for it, free as without.
    "train.enable_cuda_sync_timing": (),
    f"{DEEPSPEED}.train_micro_batch_size_per_gpu": ("train.micro_batch_size={}",),
    f"{DEEPSPEED}.gradient_accumulation_steps": ("train.grad_accum={}",),
    f"{DEEPSPEED}.zero_optimization.stage": ("strategy.name=deepspeed", "strategy.stage={}"),
    "dist.cpu_only": ("launch.device={}",),
    "dist.backend": ("launch.backend={}",),
    "dist.dtype": ("precision.mode={}",),
    "dist.sharding_stage": ("strategy.name={}",),
    "dataset.batch_size": ("train.micro_batch_size={}",),
    "dataset.num_workers": ("data.num_workers={}",),
    "dataset.path_train": ("data.path_train={}",),
    "dataset.path_eval": ("data.path_eval={}",),
    "loss.grad_accum_steps": ("train.grad_accum={}",),
    "lr_scheduler.total_iterations": ("train.steps={}",),
    "lr_scheduler.warmup_iterations": ("optim.schedule.warmup_steps={}",),
    "optim.grad_clip": ("optim.clip={}",),
    "misc.compiles_model": ("train.compile={}",),
    "misc.peak_flops_per_sec": ("observe.peak_flops={}",),
    "checkpoint.state_dict_type": ("checkpoint.state={}",),
    "checkpoint.chkpt_saving_iterations": ("checkpoint.every={}",),
    "checkpoint.directory": ("checkpoint.dir={}",),
    "checkpoint.prefix": ("name={}",),
}
# Values that have another name here.
VALUES = {
    "dist.cpu_only": {"true": "cpu", "false": "auto"},
    "dist.dtype": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
    "misc.compiles_model": {"true": "default", "false": "off"},
    "optim.grad_clip": {"0": "off", "0.0": "off"},
}
STUB_SECTION, STUB_WORKLOAD = "dist", "mae"  # that no config of ours has, and what it trains
TRIMMED = "silence is cut off once, by paceline prepare speech --trim"
# The value that is meant here anyway, and why there is no other.
IMPLIED = {
    "dataset.use_trim": ("false", TRIMMED),
    "dataset.offline_trimmed": ("true", TRIMMED),
}


def in_our_words(text: str) -> list[str]:
    """Return an override under our keys: itself, or what stands for it; none where it asks for
    what happens anyway. `ValueError` says what cannot be asked."""
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or text.startswith("~"):
        return [text]
    if key in RENAMED:
        said = VALUES.get(key, {}).get(value.lower(), value)
        return [word.format(said) for word in RENAMED[key]]
    if key not in IMPLIED:
        return [text]
    meant, because = IMPLIED[key]
    if value.lower() != meant:
        hint = f"write {key}={meant}, or nothing"
        raise ValueError(f"'{text}' cannot be had: {because}\nhint: {hint}")
    return []


def take_from_file(tree: dict[str, Any]) -> Iterator[str]:
    """Take keys of other trainers out of the map that a YAML file holds; yield what stands for
    them. `ValueError` says what cannot be asked."""
    if STUB_SECTION in tree and "workload" not in tree:
        yield f"workload={STUB_WORKLOAD}"
    for key in (*RENAMED, *IMPLIED):
        *sections, name = key.split(".")
        inside: Any = tree
        for section in sections:
            inside = inside.get(section) if isinstance(inside, dict) else None
        if isinstance(inside, dict) and isinstance(inside.get(name), str | int | float):
            value = inside.pop(name)
            said = str(value).lower() if isinstance(value, bool) else value
            yield from in_our_words(f"{key}={said}")
    for section in {key.partition(".")[0] for key in RENAMED}:
        if tree.get(section) == {}:
            del tree[section]
