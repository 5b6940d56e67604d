"""Counts where this rank waits for others, from inside the modules that an engine is made of.

Libraries (DDP, FSDP) exchange in hooks and callbacks of their own. `Waits` wraps the calls that
wait in them, or registers a callback with autograd before theirs. Code that exchanges inside a
forward pass gets `counted`: layers from strategies/batchnorm.py, a workload as
`self.waiting_for_ranks`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from paceline.strategies.clock import Clock


class Waits:
    """Tells the clock of the step that this rank waits, from inside the parts of an engine, which
    are built before there is a clock."""

    def __init__(self) -> None:
        self.clock: Clock | None = None

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy, of a model or in another process, has no step to tell of

    def counted(self) -> AbstractContextManager[None]:
        """Count what is inside as waiting for other ranks. A stream beside that of the step holds
        nothing up by waiting, until the step waits for that stream."""
        if self.clock is None or not self.clock.is_here:
            return nullcontext()
        return self.clock.blocked()

    def around(self, owner: Any, name: str) -> None:
        """Count a method of one object as waiting for other ranks, from now on."""
        method = getattr(owner, name)

        @wraps(method)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            with self.counted():
                return method(*args, **kwargs)

        setattr(owner, name, waiting)

    def around_forward(self, layer: nn.Module) -> None:
        """Count the forward pass of a layer that exchanges by itself, from now on. By hooks, which
        a copy of the layer calls for itself."""

        def begin(*_: Any) -> None:
            if self.clock is not None and self.clock.is_here:
                self.clock.block()

        def end(*_: Any) -> None:
            if self.clock is not None and self.clock.is_here:
                self.clock.unblock()

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end, always_call=True)

    def around_collective(self, owner: Any, name: str) -> None:
        """Count a method of one object that is a collective: for as long as it takes; if it is only
        started (`async_op`), for as long as its result is waited for."""
        method = getattr(owner, name)

        @wraps(method)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("async_op") or any(value is True for value in args):
                started = method(*args, **kwargs)
                return None if started is None else Started(started, self)
            with self.counted():
                return method(*args, **kwargs)

        setattr(owner, name, waiting)

    def until_returned(self, objective: Tensor) -> None:
        """Count the time of a backward pass after all gradients are computed as waiting: DDP then
        waits for its buckets, and FSDP for what it has scattered. The first node of the graph
        registers the callback, so it runs before theirs. The caller of backward unblocks the
        clock."""
        if self.clock is not None:
            self._at_end(objective, self.clock.block)

    def until_done(self, output: Tensor) -> None:
        """Count the same if nothing can tell that backward has returned: a callback that a callback
        registers runs after all others."""
        if self.clock is None:
            return
        block, unblock = self.clock.block, self.clock.unblock

        def wait() -> None:
            block()
            _queue(unblock)

        self._at_end(output, wait)

    def _at_end(self, tensor: Tensor, act: Callable[[], None]) -> None:
        """Call `act` when the backward pass through a tensor has computed all gradients."""
        if tensor.requires_grad and self.clock is not None and not self.clock.is_alone:
            tensor.register_hook(lambda gradient: _queue(act))


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Started:
    """A collective under way (torch's Work), which tells when it is waited for."""

    def __init__(self, work: Any, waits: Waits) -> None:
        self._work, self._waits = work, waits

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._waits.counted():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
