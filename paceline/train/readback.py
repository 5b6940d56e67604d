"""Scalars from the device to the host, late on purpose: reading them at once would stall it."""

from collections import deque

import torch
from torch import Tensor


class Readback:
    """A queue of small float64 vectors; `pop` gives those whose copy has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self._queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, tag: int, values: Tensor) -> None:
        """Start copying `values`; `tag` says what they are when they come out."""
        if not self.on_device:
            self._queue.append((tag, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._queue.append((tag, host, arrived))

    def pop(self, last_tag: int, wait: bool) -> list[tuple[int, list[float]]]:
        """Vectors up to `last_tag` in order: all of them (`wait`), or those that have arrived."""
        ready = []
        while self._queue and self._queue[0][0] <= last_tag:
            tag, host, arrived = self._queue[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    break
                arrived.synchronize()
            self._queue.popleft()
            ready.append((tag, host.tolist()))
        return ready
