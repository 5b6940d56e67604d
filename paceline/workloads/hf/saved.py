"""A model of transformers in its own layout: config.json and safetensors, as the hub has them.

    save_layout(model, tensors, folder)     `model` was built on meta and takes these tensors
    load_layout(type(model), folder)        as anybody would load it, strictly

Nothing is pickled, nothing is fetched, and no code that a config names is run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError, SaveError
from paceline.workloads.hf.model import require_extra


def save_layout(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """By transformers' own `save_pretrained`: it knows the names on disk, and tied weights."""
    _fill(model, tensors)
    # Of a model that came with code of its own: what was trained here is transformers' class.
    model.config.__dict__.pop("auto_map", None)
    with _quiet():
        model.save_pretrained(folder)


def _fill(model: Any, tensors: dict[str, Tensor]) -> None:
    """Give a model on meta its values without a copy; the checkpoint has tied weights once."""
    try:
        found = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:  # another shape
        raise ConfigError(f"the checkpoint is not of the model in run.yaml: {error}") from error
    model.tie_weights()
    missing = [name for name, value in model.state_dict().items() if value.is_meta]
    if missing or found.unexpected_keys:
        raise ConfigError(
            "the checkpoint is not of the model in run.yaml:"
            f" {_count(missing, 'tensors it lacks')}, {_count(found.unexpected_keys, 'too many')}"
        )


def load_layout(kind: Any, folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model that transformers makes of `folder`."""
    with _quiet():
        model, info = kind.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    if wrong := {what: names for what, names in info.items() if names}:
        raise SaveError(f"transformers does not load what was written: {wrong}")
    state: dict[str, Tensor] = model.state_dict()
    return state


def _count(names: list[str], what: str) -> str:
    return f"{len(names)} {what}" + (f" ({names[0]}, ...)" if names else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without its progress bars: ours are the only words on stderr."""
    talk = require_extra("transformers.utils.logging")
    was_on = talk.is_progress_bar_enabled()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            talk.enable_progress_bar()
