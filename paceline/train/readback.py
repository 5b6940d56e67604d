"""Scalars from the device to the host, late on purpose: reading them at once would stall it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a vector of one there, without a copy from the host, which would wait."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(1)
    return torch.full((1,), value, dtype=torch.float64, device=device)


class Readback:
    """A queue of small vectors of scalars; `pop` gives those whose copy has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self._queue: deque[tuple[int, Sequence[Tensor], torch.cuda.Event | None]] = deque()

    def push(self, tag: int, scalars: Sequence[Tensor]) -> None:
        """Start copying `scalars`; `tag` says what they are when they come out."""
        if not self.on_device:
            self._queue.append((tag, scalars, None))
            return
        stacked = torch.stack([scalar.double() for scalar in scalars])
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._queue.append((tag, host.unbind(), arrived))

    def pop(self, last_tag: int, wait: bool) -> list[tuple[int, list[Any]]]:
        """Return values up to `last_tag` in order: all of them (`wait`), or those that have
        arrived."""
        ready = []
        while self._queue and self._queue[0][0] <= last_tag:
            tag, scalars, arrived = self._queue[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    break
                arrived.synchronize()
            self._queue.popleft()
            ready.append((tag, [scalar.tolist() for scalar in scalars]))
        return ready
