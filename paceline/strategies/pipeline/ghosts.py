"""Placeholders in a stage's model for the parts that other stages hold.

A stage runs the model's own forward pass from the start, so that masks, positions and whatever else
the code around the blocks computes are there. But modules of other stages are ghosts: they have no
weights, and what they return has the right shape and holds NaN. The pass becomes real where the
stage's first block is called with the received tensor, and ends where the next stage's first block
would be. If a ghost's result reaches the real part, the loss is NaN: never silently wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data.rng import capture_rng
from paceline.errors import ConfigError

PLAIN = (int, float, str, bool, type(None))
SEQUENCES = (tuple, list)


class Reached(BaseException):
    """The next stage's first block was called with `hidden`: ends a forward pass. Not an Exception,
    so that no model's own handler stops it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the end of a stage")
        self.hidden = hidden


class Region:
    """Whether the forward pass has become real, and what it becomes real with."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.is_real = False
        self.learns = False  # True in the first pass, which checks for what cannot work
        self._drawn: dict[str, Tensor] = {}
        self._fillings: list[Tensor] = []  # the one number that a stand-in is made of
        self._lent: list[tuple[Ghost, Any, Any]] = []

    def begin(self, received: Tensor | None) -> None:
        self.received, self.is_real = received, received is None
        if self.learns and received is not None:
            self._drawn = capture_rng(received.device)

    def enter(self) -> Tensor:
        assert self.received is not None, "only later stages are entered"
        if self.learns:
            self._require_no_draws(self.received.device)
        self.is_real = True
        return self.received

    def lend(self, ghost: "Ghost", key: Any, copy: Any) -> None:
        self._lent.append((ghost, key, copy))

    def end(self) -> None:
        self.received, self.is_real = None, False
        for ghost, key, copy in self._lent:
            ghost.note_use(key, is_written=_is_written(copy))
        self._lent.clear()

    def _require_no_draws(self, device: torch.device) -> None:
        """Refuse random numbers before the first block: each stage would draw its own, but the
        model means the same ones."""
        now = capture_rng(device)
        if any(not torch.equal(now[name], before) for name, before in self._drawn.items()):
            raise ConfigError(
                "the model draws random numbers before its blocks, and every stage would draw"
                " others\nhint: draw them in the data set, as a part of the sample"
            )

    def stand_in(self, value: Any, device: torch.device) -> Any:
        """Return a tensor of the same shape, without memory: NaN, or 0 where there is no NaN."""
        if not torch.is_tensor(value):
            return value
        self._fillings.append(_fill_nan(torch.empty((), dtype=value.dtype, device=device)))
        return self._fillings[-1].expand(value.shape)

    @contextmanager
    def filled_with_ones(self) -> Iterator[None]:
        """While inside, ghosts return ones. What is real does not depend on it."""
        for filling in self._fillings:
            filling.fill_(1)
        try:
            yield
        finally:
            for filling in self._fillings:
                _fill_nan(filling)


class Ghost(nn.Module):
    """Another stage's module. It stays on the meta device, where a call costs no memory and little
    time, and is called once for each shape of its inputs, to learn what it would return."""

    is_elsewhere = True

    def __init__(self, name: str, module: nn.Module, region: Region) -> None:
        super().__init__()
        self.name, self.region = name, region
        self._elsewhere = (module.to("meta"),)  # in a tuple: its weights are not this model's
        self._results: dict[Any, Any] = {}
        self._are_written: dict[Any, bool] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_elsewhere"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.region.is_real:
            raise ConfigError(
                f"{self.name} belongs to another stage, and this one calls it: the model uses it"
                " after blocks that stand behind it\n"
                "hint: create the model's parts in the order in which its forward uses them"
            )
        # With the mode: some models write into what they were given only when they train.
        key = (_shapes_of(args), _shapes_of(kwargs), torch.is_grad_enabled())
        if key not in self._results:
            self._results[key] = self._run_on_meta(args, kwargs)
        made = self._results[key]
        if not self._are_written.get(key, True):
            return made.detach() if torch.is_tensor(made) else tree_map(_alias, made)
        # A copy with memory of its own, for callers that write into it. Deep models have many
        # ghosts, so the first pass finds out which of them need one.
        copy = tree_map(_copied, made)
        self.region.lend(self, key, copy)
        return copy

    def note_use(self, key: Any, is_written: bool) -> None:
        """Note whether a result was written into: once written into, always copied."""
        self._are_written[key] = is_written or self._are_written.get(key, False)

    @torch.no_grad()
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _run_on_meta(self, args: Any, kwargs: Any) -> Any:
        """Return stand-ins for what the module would return, by running it on meta."""
        devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        there_args, there_kwargs = tree_map(_on_meta, (args, kwargs))
        made = self._elsewhere[0](*there_args, **there_kwargs)
        device = devices[0] if devices else torch.device("cpu")
        return tree_map(lambda leaf: self.region.stand_in(leaf, device), made)


class Exit(nn.Module):
    """Replaces the next stage's first block, and ends the forward pass there."""

    is_elsewhere = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached(hidden_of(args, kwargs))


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return what flows from block to block: the first tensor of numbers that a block is called
    with."""
    for value in (*args, *kwargs.values()):
        if torch.is_tensor(value) and value.is_floating_point():
            return value
    raise ConfigError(
        "a block is called without a tensor: nothing can be sent from stage to stage\n"
        "hint: call blocks with what flows through the model as their first argument"
    )


def _fill_nan(filling: Tensor) -> Tensor:
    """Fill with NaN, or with 0 where the type has none."""
    return filling.fill_(torch.nan if filling.is_floating_point() else 0)


def _copied(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _alias(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def _is_written(copy: Any) -> bool:
    """Say whether something was written into a tensor: torch counts that, through any view."""
    return any(leaf._version > 0 for leaf in tree_leaves(copy) if torch.is_tensor(leaf))


def _on_meta(value: Any) -> Any:
    return value.to("meta") if torch.is_tensor(value) else value


def _shapes_of(value: Any) -> Any:
    """Return all that the shape of a result can depend on. By hand if possible: torch's walk over a
    tree takes ten times as long, and every ghost is called for every microbatch."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, SEQUENCES):
        return tuple([_shapes_of(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _shapes_of(item)) for name, item in value.items()])
    leaves = tree_leaves(value)
    is_leaf = len(leaves) == 1 and leaves[0] is value
    return type(value) if is_leaf else (type(value), _shapes_of(leaves))
