"""The parts of a schedule: actions in slots, in one order per rank.

An action is written as torch writes it: stage, kind, microbatch. `2F0` is the forward of stage 2 on
microbatch 0; `B` is a whole backward; `I` and `W` are its halves, the gradients of a stage's inputs
(which the stage before waits for) and of its weights (which nothing waits for).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    __hash__ = str.__hash__  # Enum's own is Python code; the simulator looks up actions all day


WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of the inputs",
    Kind.WEIGHT: "backward of the weights",
}


@dataclass(frozen=True, slots=True)
class Action:
    """`direction` 1 is DualPipe's second stream, which enters at the last rank. Microbatches are
    numbered over both directions, so stage, kind and microbatch name an action."""

    kind: Kind
    stage: int
    microbatch: int
    direction: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        return f"stage {self.stage}, {WORDS[self.kind]} of microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Slot:
    """What a rank does next: one action, or a forward and a backward that overlap."""

    actions: tuple[Action, ...]
    phase: str

    @property
    def is_pair(self) -> bool:
        return len(self.actions) > 1

    def __str__(self) -> str:
        return "&".join(str(action) for action in self.actions)


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]`: the order of rank r. `homes[direction][stage]`: the rank that has the stage."""

    name: str
    num_microbatches: int
    homes: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.homes[0])

    @property
    def num_copies(self) -> int:
        """Return how often the model's parameters are held: twice where stages run in both
        directions."""
        return len(self.homes)

    def home(self, action: Action) -> int:
        """Return the rank that runs this action."""
        return self.homes[action.direction][action.stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        return sorted(
            stage for homes in self.homes for stage, home in enumerate(homes) if home == rank
        )

    def iter_actions(self, rank: int) -> Iterator[Action]:
        """Yield the order of a rank, pairs opened: the forward first."""
        for slot in self.ranks[rank]:
            yield from slot.actions
