"""The average of the weights over the steps (`optim.ema`): one copy, sharded as they are.

It starts equal to the weights, and moves towards them after each update; after a veto neither
changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import EMA, Piece, Source, moment_name
from paceline.strategies.gather import locals_of
from paceline.strategies.stored import fill_like, piece_of


class Average:
    """`replaced` is called, on all ranks, when the model's weights were replaced."""

    def __init__(
        self, module: nn.Module, decay: float, replaced: Callable[[], None] = lambda: None
    ) -> None:
        self.decay, self.replaced = decay, replaced
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.values = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Move towards the weights. `skipped`, on the device, is 1 if the update was vetoed: the
        average then stays, and the host need not look."""
        mine, theirs = locals_of(self.values.values()), locals_of(self.weights.values())
        if skipped is None:
            torch._foreach_lerp_(mine, theirs, 1 - self.decay)
            return
        share = (1 - self.decay) * (1 - skipped)
        for value, weight in zip(mine, theirs, strict=True):
            value.lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, the average replaces the model's weights."""
        self._swap()
        self.replaced()
        try:
            yield
        finally:
            self._swap()
        self.replaced()  # not after an error: other ranks may have none, and would not join

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the numbers, one tensor at a time: code that gathers weights knows their place."""
        mine, theirs = locals_of(self.values.values()), locals_of(self.weights.values())
        for value, weight in zip(mine, theirs, strict=True):
            spare = weight.clone()
            weight.copy_(value)
            value.copy_(spare)

    def pieces(self) -> list[Piece]:
        found = (piece_of("optimizer", moment_name(n, EMA), v) for n, v in self.values.items())
        return [piece for piece in found if piece.value.numel() or 0 in piece.shape]

    @torch.no_grad()
    def load(self, source: Source) -> None:
        """Load the average; if the checkpoint has none, begin with the current weights."""
        known = source.shapes("optimizer")
        for name, value in self.values.items():
            if moment_name(name, EMA) in known:
                fill_like(source, moment_name(name, EMA), value)
            else:
                value.copy_(self.weights[name])
