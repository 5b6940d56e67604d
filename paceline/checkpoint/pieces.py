"""A run's state in pieces: what each rank holds of each tensor, and who writes what.

A piece is a block of rows of one named tensor. Every strategy cuts along rows or not at all, so
any strategy on any number of ranks can read what any other has written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from paceline.errors import ConfigError

Section = Literal["model", "optimizer"]
SECTIONS: tuple[Section, ...] = ("model", "optimizer")
MAX_NAMED = 8
EMA = "ema"  # the average of a weight, beside exp_avg and the like


class Piece(NamedTuple):
    """Rows `row` and following of a tensor of `shape`; one without axes is a single row.

    `holders` are the ranks that hold this very piece: one of them writes it.
    """

    section: Section
    name: str
    shape: tuple[int, ...]
    row: int
    value: Tensor
    holders: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.value.numel() * self.value.element_size()


class Source(Protocol):
    """Where an engine reads its pieces from, whoever wrote them."""

    def shapes(self, section: Section) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor there is."""
        ...

    def rows(self, section: Section, name: str, first: int, count: int) -> Tensor:
        """Return a block of rows of one tensor, on the CPU; the tensor itself where it has no
        axes."""
        ...

    def fill(self, section: Section, name: str, first: int, out: Tensor) -> None:
        """Read row `first` and following, as many as fit into `out`, which has memory already."""
        ...


def moment_name(parameter: str, slot: str) -> str:
    """Name what an optimizer keeps for a parameter: `exp_avg/blocks.0.weight`."""
    return f"{slot}/{parameter}"


def own_pieces(pieces: Iterable[Piece], rank: int, first_holder_only: bool) -> list[Piece]:
    """Return what `rank` writes.

    Each piece is written by one of its holders. Which one follows from the sizes alone, so all
    ranks come to the same answer without asking: holders share by bytes; or, with
    `first_holder_only`, the first of them writes all.
    """
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.holders].append(piece)
    own: list[Piece] = []
    for holders, group in groups.items():
        if first_holder_only or len(holders) == 1:
            own += group if holders[0] == rank else []
            continue
        loads = dict.fromkeys(holders, 0)
        for piece in sorted(group, key=lambda p: (-p.num_bytes, p.section, p.name)):
            writer = min(loads, key=lambda holder: (loads[holder], holder))
            loads[writer] += piece.num_bytes
            if writer == rank:
                own.append(piece)
    return own


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by their first name: tied ones once."""
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def require_same_shapes(source: Source, held: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model, and say where the two differ."""
    kept = source.shapes("model")
    differences = [f"{name}: not in the checkpoint" for name in held.keys() - kept.keys()]
    differences += [f"{name}: not in the model" for name in kept.keys() - held.keys()]
    differences += [
        f"{name}: {list(kept[name])} in the checkpoint, {list(held[name])} in the model"
        for name in held.keys() & kept.keys()
        if kept[name] != held[name]
    ]
    if differences:
        shown = "\n".join(f"  {line}" for line in sorted(differences)[:MAX_NAMED])
        more = (
            f"\n  and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
        )
        raise ConfigError(
            f"the checkpoint is of another model; {len(differences)} tensors differ:\n{shown}{more}"
            "\nhint: resume with the model's own settings, or start a new run"
        )
