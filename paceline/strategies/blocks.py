"""The repeated parts of a model: what is sharded, recomputed or compiled one by one. Its sizes."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from paceline.strategies.shape import ModelShape, ParameterShape

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# What `selective` keeps: the products that cost most to repeat. All else is cheap to redo.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the items of every outermost ModuleList; empty for a model without one.

    A list inside a block belongs to that block. A list of lists is searched too: a list is never
    called, and what is never called is never gathered.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += _items(child) if isinstance(child, nn.ModuleList) else find_blocks(child)
    return blocks


def _items(container: nn.Module) -> list[nn.Module]:
    items: list[nn.Module] = []
    for item in container.children():
        if isinstance(item, CONTAINERS):
            items += _items(item)
        elif not getattr(item, "is_elsewhere", False):  # on another stage of a pipeline
            items.append(item)
    return items


def find_tail(model: nn.Module) -> list[nn.Module]:
    """Return what comes after the blocks, if the model says so: an attribute `tail` with the
    loss."""
    tail = getattr(model, "tail", None)
    return [tail] if isinstance(tail, nn.Module) else []


def tied_modules(model: nn.Module) -> list[list[str]]:
    """Return the names of modules that read the same parameter: they have it, or the model passes
    it to them, as it says in `tail_reads`."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    groups = [names for names in owners.values() if len(names) > 1]
    return groups + [[name, "tail"] for name in getattr(model, "tail_reads", ())]


def place_modules(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return for each module the block that it belongs to, by the order in which a model is written
    down: a block and all inside it; what follows until the next block; what is before all, with the
    first. Those that read one parameter belong to all their blocks."""
    numbers = {id(block): number for number, block in enumerate(find_blocks(model))}
    places: dict[str, tuple[int, ...]] = {}
    here = 0
    for name, module in model.named_modules(remove_duplicate=False):
        here = numbers.get(id(module), here)
        places[name] = (here,)
    for names in tied_modules(model):
        together = sorted({place for name in names for place in places[name]})
        for name in names:
            places[name] = tuple(together)
    return places


def find_hidden(model: nn.Module) -> set[int]:
    """Return the ids of the matrices inside the blocks, which Muon is made for: not of tables, and
    not of what comes before and after the blocks."""
    return {
        id(parameter)
        for block in find_blocks(model)
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
    }


def is_called_linear(module: nn.Module) -> bool:
    """Say whether another layer may replace this one: an nn.Linear with the forward of nn.Linear.
    nn.MultiheadAttention reads the weight of its `out_proj` and never calls it."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def measure_shape(model: nn.Module) -> ModelShape:
    """Measure the sizes of a model, which may be on the meta device."""
    blocks = find_blocks(model)
    unit_of: dict[int, int] = {}
    is_shared = False
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            is_shared |= unit_of.setdefault(id(parameter), number) != number
    places = place_modules(model)
    seen: set[int] = set()
    parameters = []
    hidden = find_hidden(model)
    tied = {name for names in tied_modules(model) for name in names}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            at = places[name]
            is_table = isinstance(module, nn.Embedding) and len(at) == 1
            parameters.append(
                ParameterShape(
                    shape=tuple(p.shape),
                    itemsize=p.element_size(),
                    is_trainable=p.requires_grad,
                    unit=unit_of.get(id(p), len(blocks)),
                    places=at,
                    is_matrix=p.dim() >= 2 and not is_table,
                    is_hidden=id(p) in hidden,
                    is_linear=key == "weight" and is_called_linear(module),
                    is_tied=name in tied,
                    name=f"{name}.{key}" if name else key,
                )
            )
    own = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    num_batchnorms = sum(not isinstance(m, nn.SyncBatchNorm) for m in own)
    return ModelShape(
        parameters,
        len(blocks) + 1,
        is_shared,
        num_batchnorms=num_batchnorms,
        no_sharding=str(getattr(model, "no_sharding", "")),
    )
