"""Adapters (LoRA) in a model of transformers, by peft: put in, frozen around, loaded, merged.

    pack_base(model)                  QLoRA: linear layers in 4 bits, by bitsandbytes
    add_adapters(model, settings)     in place: NAME.lora_A.default.weight, NAME.base_layer.weight
    keep_base(model, "bf16")          what is not trained takes less room
    merge_adapters(model)             in place: the plain model again, adapters added in
    base_hash(folder, known, seed)    which base they are of

peft and bitsandbytes are extras, imported where they are used.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from paceline.data.extras import require_extra
from paceline.errors import ConfigError, DataError
from paceline.records.base import load_map
from paceline.records.files import fingerprint
from paceline.records.words import few
from paceline.workloads.hf.pretrained import list_tensors

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE_HASH = "base_hash"  # in adapter_config.json, where Paceline wrote it
NAME = "default"  # peft's name of an adapter that has none
EXTRA = "lora"
NO_SHARDING = "what bitsandbytes packs has a table for each block of numbers beside it, not rows"


def add_adapters(model: nn.Module, settings: Any) -> None:
    """Put adapters into the linear layers that `settings` names. They alone are trained."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    leaves = {name.rpartition(".")[2] for name in names}
    missing = [target for target in settings.lora_targets if target not in leaves]
    if missing:
        raise ConfigError(
            f"model.lora_targets: {type(model).__name__} has no linear layer called"
            f" {', '.join(missing)}\nhint: it has {', '.join(sorted(leaves))}"
        )
    peft = require_extra("peft", EXTRA)
    asked = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.lora_targets),
    )
    peft.inject_adapter_in_model(asked, model, adapter_name=NAME)


def keep_base(model: nn.Module, kind: str) -> None:
    """Keep the matrices of linear layers that are not trained in bf16, where that is asked for.
    Tables and norms stay as they are, so what layers add to is summed in fp32."""
    if kind != "bf16":
        return
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            if id(module.weight) not in tables:  # an output layer may be tied to one
                module.weight.data = module.weight.data.to(torch.bfloat16)


def pack_base(model: nn.Module) -> None:
    """Replace the linear layers inside blocks by bitsandbytes' of 4 bits (NF4), in place."""
    library = require_extra("bitsandbytes", EXTRA)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not _is_in_block(name):
            continue
        packed = library.nn.Linear4bit(
            module.in_features, module.out_features, bias=module.bias is not None, quant_type="nf4"
        )
        packed.bias = module.bias
        # On a CPU with AVX512-BF16 the first evaluation would pack its weight anew: for good, in a
        # layout through which no gradient goes and that is not computed back when merged, and only
        # where rows come in 32s.
        packed.support_avx512bf16_for_cpu = False
        if module.weight.is_meta:  # to count bytes: two numbers in each
            empty = torch.empty(-(-module.weight.numel() // 2), 1, dtype=torch.uint8, device="meta")
            packed.weight = nn.Parameter(empty, requires_grad=False)
        else:
            values = module.weight.data
            packed.weight = library.nn.Params4bit(values, requires_grad=False, quant_type="nf4").to(
                values.device
            )
        _replace(model, name, packed)
    model.no_sharding = NO_SHARDING  # type: ignore[assignment]


def _is_in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' tensors under the names that peft's files have."""
    peft = require_extra("peft", EXTRA)
    found: dict[str, Tensor] = peft.get_peft_model_state_dict(model, adapter_name=NAME)
    return found


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Begin with adapters that were trained before; `require_adapter` has checked that they fit."""
    peft = require_extra("peft", EXTRA)
    found = require_extra("safetensors.torch", "hf").load_file(folder / ADAPTER)
    plain = {key.removeprefix("base_model.model."): value for key, value in found.items()}
    peft.set_peft_model_state_dict(model, plain, adapter_name=NAME)


def require_adapter(model: nn.Module, folder: Path, base: str) -> None:
    """Refuse adapters that are not of this model, built on any device, or of another base."""
    path = folder / ADAPTER
    if not path.is_file() or not (folder / ADAPTER_CONFIG).is_file():
        pickled = sorted(file.name for file in folder.glob("adapter_model.bin"))
        has = f"only {pickled[0]}, a pickle, which can run code" if pickled else "none"
        raise DataError(
            f"model.adapter={folder}: adapters are read from {ADAPTER} and {ADAPTER_CONFIG}; it has"
            f" {has}\nhint: paceline export RUN_DIR --format safetensors writes them"
        )
    theirs = load_map(folder / ADAPTER_CONFIG).get(BASE_HASH)
    if theirs is not None and theirs != base:
        raise DataError(
            f"model.adapter={folder} was trained on another base model: {theirs}, and this one is"
            f" {base}\nhint: set model.hf to the model that it was trained with"
        )
    with require_extra("safetensors", "hf").safe_open(path, framework="pt") as opened:
        found = {
            key.removeprefix("base_model.model."): tuple(opened.get_slice(key).get_shape())
            for key in opened.keys()  # noqa: SIM118  (not a dict)
        }
    wanted = {key: tuple(value.shape) for key, value in adapter_tensors(model).items()}
    if found != wanted:
        wrong = sorted(set(found.items()) ^ set(wanted.items()))
        raise DataError(
            f"model.adapter={folder} is not of this model and these model.lora_* keys:"
            f" {few([f'{key} {list(shape)}' for key, shape in wrong])}\n"
            "hint: lora_rank and lora_targets must be those that it was trained with"
        )


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights below them, in place, and take them out: the model has the
    names and the number type, fp32, that it had before `add_adapters` and `keep_base`."""
    for name, layer in list(_iter_layers(model)):
        base = unpacked(layer.get_base_layer())
        with torch.no_grad():
            added = layer.get_delta_weight(NAME).float()
            base.weight = nn.Parameter(base.weight.float() + added)
        _replace(model, name, base)
    for name, module in list(model.named_modules()):  # those that had no adapter
        if isinstance(module, nn.Linear):
            _replace(model, name, unpacked(module).float())


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def unpacked(layer: Any) -> Any:
    """Return a linear layer of plain numbers; one of 4 bits is computed back."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer
    functional = require_extra("bitsandbytes.functional", EXTRA)
    values = functional.dequantize_4bit(layer.weight.data, state).float()
    plain = nn.Linear(values.shape[1], values.shape[0], bias=layer.bias is not None)
    plain.weight = nn.Parameter(values)
    if layer.bias is not None:
        plain.bias = layer.bias
    return plain


def _iter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    tuners = require_extra("peft.tuners.tuners_utils", EXTRA)
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            yield name, module


def base_hash(folder: Path | None, config: Mapping[str, Any], seed: int) -> str:
    """Return what tells one base model from another: a sum of its files of weights, or, of random
    weights, of the config and the seed that they are drawn from."""
    if folder is None:
        return f"random-{fingerprint(json.dumps(config, sort_keys=True, default=str), str(seed))}"
    total = xxhash.xxh3_128()
    for path in sorted(set(list_tensors(folder).values())):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                total.update(block)
    return f"xxh3-{total.hexdigest()}"
