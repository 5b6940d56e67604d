"""Values for a model built on the meta device: module by module, the same whatever its sharding.

Each module is seeded by its own name, so that a weight depends only on the seed and its place in
the model: not on the number of ranks, nor on which other modules this rank has. A sharded rank
holds one module whole at a time, and keeps its part.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

Initialise = Callable[[str, nn.Module], None]


@torch.no_grad()
def fill_weights(
    model: nn.Module,
    initialise: Initialise,
    seed: int,
    device: torch.device,
    rest: torch.device | None = None,
) -> None:
    """Give every parameter and buffer of `model` memory and its first value. `rest` is where
    parameters lie between steps, if not on `device`."""
    names = _tied_names(model)
    model.to_empty(device=rest or device)
    _tie(model, names)
    done: set[int] = set()
    for name, module in model.named_modules():
        if not any(True for _ in _own_tensors(module)):
            continue
        with _whole(module, done, device):
            torch.manual_seed(seed_of(seed, name))
            initialise(name, module)
        done |= {id(parameter) for parameter in module.parameters(recurse=False)}


def seed_of(seed: int, name: str) -> int:
    return (seed << 32) + zlib.crc32(name.encode())


@contextmanager
def _whole(module: nn.Module, done: set[int], device: torch.device) -> Iterator[None]:
    """While inside, `module` has whole tensors instead of shards, and spare ones instead of tied
    weights that another module has filled already."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    swapped = {name: p for name, p in own.items() if isinstance(p, DTensor) or id(p) in done}
    for name, parameter in swapped.items():
        spare = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(spare, parameter.requires_grad)
    buffers = {name: b for name, b in module._buffers.items() if b is not None}
    for name, buffer in buffers.items():
        module._buffers[name] = buffer.to(device)
    yield
    for name, parameter in swapped.items():
        filled = module._parameters[name]
        assert filled is not None, name
        module._parameters[name] = parameter
        if isinstance(parameter, DTensor) and id(parameter) not in done:
            _keep_part(parameter, filled)


def _keep_part(parameter: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's rows. `src_data_rank=None`: every rank has the whole, none need send it."""
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of one parameter, if it has more than one."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Join tied parameters into one again: moving off the meta device makes one for every name."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = parameter
