"""The repeated parts of a model: what is sharded, recomputed or compiled one by one."""

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The items of every outermost ModuleList; empty for a model without one.

    A list inside a block belongs to that block. A list of lists is descended into: nobody calls
    a list, and what is never called is never gathered.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += _items(child) if isinstance(child, nn.ModuleList) else find_blocks(child)
    return blocks


def _items(container: nn.Module) -> list[nn.Module]:
    items: list[nn.Module] = []
    for item in container.children():
        items += _items(item) if isinstance(item, CONTAINERS) else [item]
    return items


def find_tail(model: nn.Module) -> list[nn.Module]:
    """What comes after the blocks, where the model says so: an attribute `tail` with the loss."""
    tail = getattr(model, "tail", None)
    return [tail] if isinstance(tail, nn.Module) else []
