"""Models without memory: built on torch's meta device, for their shapes alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_}
)


@contextmanager
def on_meta() -> Iterator[None]:
    """While inside, tensors are made on meta, and nothing is drawn for them."""
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Leaves tensors on meta as they are. To draw numbers for them has no effect, but torch does it
    by way of its compiler, and to load that takes 2 s in the supervisor and in every rank."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)
