"""Hugging Face's models as ours: configs checked key by key, weights filled module by module.

transformers is an extra and takes seconds to import: it is imported where it is used.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.extras import require_extra as import_extra
from paceline.errors import ConfigError
from paceline.records import Finding
from paceline.records.words import did_you_mean

WHERE = "model.hf_config"
# What transformers calls the attention that is not torch's SDPA.
ATTENTION = {"eager": "eager", "flex": "flex_attention"}
# Keys of every Hugging Face config that something else decides here.
DECIDED = {
    "dtype": "weights are fp32, and precision.mode is what is computed in",
    "torch_dtype": "weights are fp32, and precision.mode is what is computed in",
    "attn_implementation": "attention.impl chooses it",
    "use_cache": "training keeps no cache",
    "return_dict": "the workload reads the outputs by name",
}


def require_extra(name: str = "transformers") -> Any:
    """Import and return a module of the extra `hf`. It imports torchao where that is installed,
    about which torch then has something to say to torchao's developers."""
    log = logging.getLogger("torch.utils._pytree")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        return import_extra(name, "hf")
    finally:
        log.setLevel(before)


def attention_name(impl: str) -> str:
    return ATTENTION.get(impl, "sdpa")


def known_keys(kind: Any) -> set[str]:
    """Return the keys of a config class that a user may set."""
    listed = inspect.signature(kind).parameters.values()
    named = {p.name for p in listed if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return (named | set(kind.attribute_map)) - set(DECIDED)


def check_keys(given: Mapping[str, Any], kind: Any) -> Iterator[Finding]:
    """Yield a finding for each key that `kind` does not have: it would store it and never look at
    it."""
    known = known_keys(kind)
    for key in given:
        if key in known:
            continue
        guess = did_you_mean(key, known).rstrip() or f"it has {', '.join(sorted(known))}"
        yield Finding.error(
            f"{WHERE}.{key}",
            DECIDED.get(key, f"{kind.__name__} has no key {key}"),
            hint="take it out" if key in DECIDED else guess,
        )


def build_config(kind: Any, given: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> Any:
    """Build a config of class `kind` from the known keys of `given`, over those of `base`."""
    known = known_keys(kind)
    kept = {key: value for key, value in given.items() if key in known}
    try:
        return kind.from_dict({**(base or {}), **kept})
    except Exception as error:  # transformers has no one class for what it refuses
        problems = [str(finding) for finding in check_keys(given, kind)]
        why = " ".join(str(error).split())
        raise ConfigError([*problems, f"{WHERE}: {kind.__name__} refuses it: {why}"]) from error


def build_from_config(auto: str, config: Any, impl: str) -> nn.Module:
    """Build the model of a config by one of transformers' Auto classes, in fp32."""
    factory = getattr(require_extra(), auto)
    try:
        model: nn.Module = factory.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_name(impl),
            trust_remote_code=False,
        )
    except Exception as error:
        why = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"{auto} cannot build a {config.model_type} of it: {why}\n"
            f"hint: change {WHERE}, or attention.impl if that is what it lacks"
        ) from error
    return model


@torch.no_grad()
def init_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Fill one module's own tensors by the rules that its model has for random weights.

    As transformers does, the module's rule first, then those of the modules around it: GPT-2's
    attention, for one, shrinks the projection inside it. What is not this module's own carries
    the mark that transformers' initialisers leave alone.
    """
    own = list(own_tensors(module))
    mine = {id(tensor) for tensor in own}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in mine]
    for tensor in others:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for tensor in own:
        tensor._is_hf_initialized = False  # type: ignore[attr-defined]
        tensor.fill_(_marker(tensor))
    versions = [tensor._version for tensor in others]
    with require_extra("transformers.initialization").guard_torch_init_functions():
        for path in _outwards(name):
            _rules_for(model, path)(model.get_submodule(path))
    if versions != [t._version for t in others] or any(_is_unfilled(tensor) for tensor in own):
        raise ConfigError(
            f"{type(model).__name__} gives {name or 'itself'} no random weights of its own\n"
            "hint: set model.weights=load and give model.hf a folder with weights"
        )


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _outwards(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `a.b`, `a`, and "", which is the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _rules_for(model: nn.Module, path: str) -> Any:
    """Return `_init_weights` of the innermost model that holds `path`: a model may consist of
    several."""
    for outer in _outwards(path):
        rules = getattr(model.get_submodule(outer), "_init_weights", None)
        if rules is not None:
            return rules
    raise AssertionError("a model of transformers has _init_weights")


def _marker(tensor: Tensor) -> float | int | bool:
    """Return a value that no initialiser writes; a bool has none to spare."""
    if tensor.is_floating_point():
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _is_unfilled(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == _marker(tensor)).any())
