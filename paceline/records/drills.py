"""drill.json: the fault that a run plants in itself, so that one can see it named."""

from enum import StrEnum

from pydantic import Field

from paceline.records.base import Record
from paceline.records.phases import Phase


class Fault(StrEnum):
    """A fault that can be planted; its value is what is typed. `words` describe it."""

    words: str
    found_as: tuple[str, ...]
    is_everywhere: bool

    KILL = "kill", "one rank is killed (SIGKILL)", "crash"
    HANG = "hang", "one rank stops in the middle of a step and waits for ever", "hang"
    SLOW_DATA = "slow_data", "one rank gets its data late", "straggler"
    SLOW_FORWARD = "slow_forward", "one rank takes longer in forward", "straggler"
    SLOW_BACKWARD = "slow_backward", "one rank takes longer in backward", "straggler"
    SLOW_OPTIMIZER = "slow_optimizer", "one rank takes longer in its update", "straggler"
    SPIKES = "spikes", "one rank stalls in every eighth step", "spikes"
    SLOW_DISK = "slow_disk", "all ranks read their data from a slow disk", "data_starvation"
    NAN = "nan", "the loss of one rank becomes NaN", "nan_loss"
    DESYNC = "desync", "one rank leaves a collective out", "desync"
    OUT_OF_MEMORY = "out_of_memory", "one rank asks for more memory than there is", "out_of_memory"
    FULL_DISK = "full_disk", "the disk takes no more of what one rank writes", "full_disk"

    def __new__(cls, value: str, words: str = "", *found_as: str) -> "Fault":
        member = str.__new__(cls, value)
        member._value_ = value
        member.words, member.found_as = words, found_as
        member.is_everywhere = value in ("slow_disk",)
        return member

    @property
    def phase(self) -> Phase | None:
        """Return the part of a step that becomes slow; None for what is not about one."""
        parts = {p.value: p for p in Phase}
        return parts.get(self.value.removeprefix("slow_"))


class Drill(Record):
    """A fault on one rank, from a step on."""

    fault: Fault
    rank: int = Field(1, ge=0, description="Who has it; of some faults, all ranks.")
    step: int = Field(12, ge=1, description="When it begins.")
    share: float = Field(
        0.5, gt=0, description="By how much of its median step a slow rank is slower."
    )
