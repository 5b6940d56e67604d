"""Where this rank waits for others, told to the clock of the step from inside what it is made of.

Libraries (DDP, FSDP) exchange in hooks and callbacks of their own. `Waits` is put around what waits
in them, or asks autograd for a callback before theirs.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from paceline.strategies.clock import Clock


class Waits:
    """Tells the clock of the step that this rank waits, from inside what an engine is made of: it
    is built before there is a clock."""

    def __init__(self) -> None:
        self.clock: Clock | None = None

    def around(self, owner: Any, name: str) -> None:
        """Count a method of one object as waiting for other ranks, from now on."""
        method = getattr(owner, name)

        @wraps(method)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if self.clock is None:
                return method(*args, **kwargs)
            with self.clock.blocked():
                return method(*args, **kwargs)

        setattr(owner, name, waiting)

    def until_returned(self, objective: Tensor) -> None:
        """Count what a backward pass does once all gradients are computed as waiting: there DDP
        waits for its buckets, and FSDP for what it has scattered. The callback is asked for by the
        first node of the graph, and so it runs before those of their own."""
        if not objective.requires_grad or self.clock is None or self.clock.is_alone:
            return
        block = self.clock.block

        def ask(gradient: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(block)

        objective.register_hook(ask)
