"""Named ranges over what a rank does: its phases and its model's blocks. In torch's profile while
one is taken, and for nsys by NVTX where `observe.nvtx` asks for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.strategies.blocks import find_blocks
from paceline.strategies.clock import Clock

Close = Callable[[], None]
PHASE = "phase "


class Ranges:
    """One range at a time: the next one closes it. `begin` opens a range by name and returns what
    closes it; `prefix` stands before each name."""

    def __init__(self, begin: Callable[[str], Close], prefix: str) -> None:
        self._begin, self._end, self._prefix = begin, _nothing, prefix

    def turn_to(self, name: object) -> None:
        self._end()
        self._end = self._begin(f"{self._prefix}{name}")

    def close(self) -> None:
        self._end()
        self._end = _nothing


def _nothing() -> None:
    pass


def mark_by_nvtx(model: nn.Module, clock: Clock) -> None:
    """Mark phases, and the forward pass of each block by its name, for as long as the process
    lives. Backward has its phase alone: hooks on it would hold a block's gradients back."""
    clock.on_phase.append(Ranges(_pushed, PHASE).turn_to)
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(find_blocks(model)):
        _mark_forward(block, names.get(id(block), f"block {number}"))


def _mark_forward(block: nn.Module, name: str) -> None:
    def begin(*_: Any) -> None:
        torch.cuda.nvtx.range_push(name)

    def end(*_: Any) -> None:
        torch.cuda.nvtx.range_pop()

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end, always_call=True)


def _pushed(name: str) -> Close:
    # A range of its own: blocks push and pop inside it, but a phase may end after the next began.
    handle = torch.cuda.nvtx.range_start(name)
    return lambda: torch.cuda.nvtx.range_end(handle)
