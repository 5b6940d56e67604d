"""Where a Hugging Face model comes from and goes to: config.json and safetensors, by name.

    folder = find_folder("org/name")                 a folder with config.json, or None: no files
    source = choose_weights("auto", folder)          before ranks start: "load" or "random"
    load_module(model, name, module, folder)         on a rank: one module's own tensors
    save_layout(model, tensors, folder)              `model` was built on meta and takes these
    load_layout(type(model), folder)                 as transformers itself loads it, strictly

Nothing is pickled or unpickled, and no code of a model's repository is run.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, DataError, SaveError
from paceline.records.base import DAMAGED
from paceline.records.words import few
from paceline.workloads.hf.model import build_config, init_module, require_extra

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
NUMBERS = ("F64", "F32", "F16", "BF16")


def find_folder(name: str) -> Path | None:
    """Return the folder that holds a model's config.json; None for a bare architecture."""
    if name in require_extra("transformers.models.auto.configuration_auto").CONFIG_MAPPING:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise DataError(
            f"model.hf={name} is not a folder, and neither an architecture nor ORGANISATION/NAME\n"
            "hint: give a folder with config.json, a name on the hub, or llama, gpt2, ..."
        )
    return _download(name, ("config.json",))


def find_files(name: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder that holds these of a model's files, as far as it has them."""
    folder = Path(name).expanduser()
    return folder.resolve() if folder.is_dir() else _download(name, patterns)


@cache
def _download(name: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder of a model on the hub, from the local cache where the files are in it."""
    hub = require_extra("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the network, the hub, or the rights to a model: many classes
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"model.hf={name} is not a folder here and cannot be fetched from the hub: {why}\n"
            "hint: check the name and the network, or copy the model and give its folder"
        ) from error


def load_config(name: str, given: dict[str, Any], folder: Path | None) -> Any:
    """Load the model's config, with the keys of `given` in place of its own."""
    base: dict[str, Any] = {} if folder is None else read_config(folder)
    kind = config_class(name, base)
    return build_config(kind, given, base)


def config_class(name: str, base: dict[str, Any]) -> Any:
    architecture = base.get("model_type", name)
    mapping = require_extra("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if architecture not in mapping:
        raise ConfigError(
            f"model.hf={name} has the model_type {architecture}, which transformers does not know\n"
            "hint: a newer transformers may; code that comes with a model is never run"
        )
    return mapping[architecture]


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no config.json\nhint: give the folder that save_pretrained wrote"
        )
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *DAMAGED) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(read, dict):
        raise DataError(f"{path} is not a map of keys")
    return read


def choose_weights(asked: str, name: str, folder: Path | None) -> tuple[Path | None, str]:
    """Decide whether weights are loaded or random; return the folder they are in by then."""
    if folder is None or asked == "random":
        return folder, "random"
    is_local = Path(name).expanduser().is_dir()
    if not is_local:
        folder = _download(name, ("config.json", "model*.safetensors", INDEX))
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return folder, "load"
    pickled = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    # Only of a folder: from the hub nothing may have come because the network is down.
    if asked == "auto" and is_local and not pickled:
        return folder, "random"
    found = f"only {pickled[0]}, which is a pickle and can run code" if pickled else "none"
    raise DataError(
        f"the weights of model.hf={name} are read from {SINGLE}; {folder} has {found}\n"
        "hint: save the model with save_pretrained, or set model.weights=random"
    )


def list_tensors(folder: Path) -> dict[str, Path]:
    """Return which file holds each tensor."""
    index = folder / INDEX
    if not index.is_file():
        return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {tensor: folder / Path(file).name for tensor, file in names.items()}
    except (OSError, *DAMAGED) as error:
        raise DataError(f"cannot read {index}: {error!r}") from error


def _open(path: Path) -> Any:
    try:
        return require_extra("safetensors").safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # safetensors has an exception of its own for damaged files
        raise DataError(f"cannot read {path}: {error}") from error


def check_weights(model: nn.Module, folder: Path) -> None:
    """Require that the files hold what the model needs: every tensor, its shape, and no other."""
    files = list_tensors(folder)
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    found = _shapes(files)
    missing = [key for key in wanted if not any(n in found for n in _names(model, key))]
    spare = [key for key in found if key not in wanted and not _is_spare(model, key)]
    wrong = [
        f"{key} {list(found[key][0])} for {list(shape)}"
        for key, shape in wanted.items()
        if key in found and found[key][0] != shape
    ]
    types = [
        f"{key} {found[key][1]}" for key in wanted if key in found if found[key][1] not in NUMBERS
    ]
    labels = {"missing": missing, "not in the model": spare, "of another shape": wrong,
              "not floating point": types}  # fmt: skip
    problems = [f"{len(keys)} {what}: {few(keys)}" for what, keys in labels.items() if keys]
    if problems:
        raise DataError(
            f"the weights in {folder} do not fit {type(model).__name__}: {'; '.join(problems)}\n"
            "hint: '~model.hf_config' drops the recipe's keys, which go over the model's own"
        )


def _shapes(files: dict[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Read shape and type of every tensor, from the headers alone."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(set(files.values())):
        opened = _open(path)
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            if files.get(key) == path:
                part = opened.get_slice(key)
                found[key] = tuple(part.get_shape()), str(part.get_dtype())
    return found


def _names(model: Any, key: str) -> list[str]:
    """Return the names that stand for a tensor: tied weights are saved under one of them."""
    tied: dict[str, str] = model.all_tied_weights_keys
    source = tied.get(key, key)
    return [key, source, *(other for other, first in tied.items() if first == source)]


def _is_spare(model: nn.Module, key: str) -> bool:
    """Say whether it is a buffer that is computed, not loaded: older files hold them, at times in
    every layer."""
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    return key.rpartition(".")[2] in computed


@torch.no_grad()
def load_module(model: nn.Module, name: str, module: nn.Module, folder: Path) -> None:
    """Copy one module's own tensors from the files, as fp32; compute what is not in them."""
    if module._non_persistent_buffers_set:
        init_module(model, name, module)
    files = list_tensors(folder)
    for leaf, tensor in _iter_saved(module):
        key = f"{name}.{leaf}" if name else leaf
        there = [other for other in _names(model, key) if other in files]
        if not there:
            raise DataError(f"{folder} has no {key}: it has changed since the run was planned")
        tensor.copy_(_open(files[there[0]]).get_tensor(there[0]))


def _iter_saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for leaf, buffer in module.named_buffers(recurse=False):
        if leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def save_layout(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Save by transformers' own `save_pretrained`: it knows the names on disk, and tied weights."""
    _fill(model, tensors)
    # Of a model that came with code of its own: what was trained here is transformers' class.
    model.config.__dict__.pop("auto_map", None)
    with quiet():
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
    """Return every tensor of the model that transformers makes of `folder`."""
    with quiet():
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
def quiet() -> Iterator[None]:
    """While inside, transformers shows no progress bars: ours are the only words on stderr."""
    talk = require_extra("transformers.utils.logging")
    was_on = talk.is_progress_bar_enabled()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            talk.enable_progress_bar()
