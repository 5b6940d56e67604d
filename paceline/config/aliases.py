"""Keys of other trainers' commands and the keys they stand for: `dataset.root_dir=X` is
`data.root_dir=X`.

Those of the speech trainer whose runbook docs/speech.md follows: its overrides are Hydra's, and
name DeepSpeed's own config. What has no counterpart here is taken where it asks for what happens
anyway, and refused where it asks for something else.
"""

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
}
TRIMMED = "silence is cut off once, by paceline prepare speech --trim"
# The value that is meant here anyway, and why there is no other.
IMPLIED = {
    "dataset.use_trim": ("false", TRIMMED),
    "dataset.offline_trimmed": ("true", TRIMMED),
}


def in_our_words(text: str) -> list[str]:
    """Return an override under our keys: itself, or its equivalent; nothing if it asks for what
    happens anyway. `ValueError` says what is not possible."""
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or text.startswith("~"):
        return [text]
    if key in RENAMED:
        return [word.format(value) for word in RENAMED[key]]
    if key not in IMPLIED:
        return [text]
    meant, because = IMPLIED[key]
    if value.lower() != meant:
        hint = f"write {key}={meant}, or nothing"
        raise ValueError(f"'{text}' cannot be had: {because}\nhint: {hint}")
    return []
