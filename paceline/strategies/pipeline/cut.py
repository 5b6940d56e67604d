"""A whole model -> one stage of it, in place, every weight under its own name."""

from typing import Any

import torch
from torch import nn

from paceline.strategies.blocks import find_blocks, place_modules
from paceline.strategies.pipeline.ghosts import Exit, Ghost, Region, hidden_of


def cut_model(model: nn.Module, held: range, region: Region, device: torch.device) -> None:
    """Keep the blocks `held` and what stands with them; make ghosts of the rest."""
    places = place_modules(model)
    blocks = {id(block): number for number, block in enumerate(find_blocks(model))}
    inside: set[int] = set()  # modules that belong to a block
    # By all their names: a module that the model has twice must not stay under the second.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        number = blocks.get(id(module))
        if number is not None:
            inside |= {id(part) for part in module.modules()}
            if number not in held:
                is_next = number == held.stop
                _replace(model, name, Exit() if is_next else Ghost(name, module, region))
        elif id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            if not any(place in held for place in places[name]):
                _forget(model, name, module, region, device)


def enter_at(block: nn.Module, region: Region) -> None:
    """Call this block with what was received in place of what ghosts have made. To be set up last:
    it must run before the hooks of any wrapper."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if region.is_real:  # a block that the model calls twice
            return args, kwargs
        ghost, received = hidden_of(args, kwargs), region.enter()
        swapped = tuple(received if value is ghost else value for value in args)
        return swapped, {k: received if v is ghost else v for k, v in kwargs.items()}

    block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)


def _forget(
    model: nn.Module, name: str, module: nn.Module, region: Region, device: torch.device
) -> None:
    """A module without children becomes a ghost. Of any other only its own weights go: its code may
    compute what later stages need, such as which patches are masked."""
    if name and not any(True for _ in module.children()):
        _replace(model, name, Ghost(name, module, region))
        return
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[key]
            setattr(module, key, region.stand_in(parameter.detach(), device))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
