"""Profiled: what the trace of some steps of one rank shows, kept beside the trace."""

import re

from pydantic import Field

from paceline.records.base import Part, Record

AUDITED_STEP = 3  # which rank 0 profiles for audit.json; one profile at a time
STEPS = re.compile(r"steps:(\d{1,9})-(\d{1,9})")


def parse_profile(asked: str) -> range | None:
    """Return the steps that `observe.profile` or the file control/profile names; None for off."""
    if asked == "off":
        return None
    found = STEPS.fullmatch(asked)
    steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not steps or steps[0] < 1:
        raise ValueError(f"{asked!r} names no steps\nhint: write it as steps:20-24, or off")
    return steps


class KernelTime(Part):
    """A kernel or an operation by its name."""

    name: str
    category: str
    count: int
    total_s: float
    share: float = Field(description="Of the time of all that is listed, device or host.")


class Gap(Part):
    """A time in which a device did nothing: `waits_for_host` where the next kernel was not even
    launched when it began."""

    length_s: float
    before: str = Field(description="The kernel that ended it.")
    waits_for_host: bool


class ProfileFacts(Record):
    """What one rank did in the profiled steps. Without a device the operations of the host stand
    where kernels would, by the time that each spends itself."""

    rank: int
    first_step: int
    last_step: int
    trace: str = Field(description="The file, for ui.perfetto.dev.")
    on_device: bool
    window_s: float = Field(
        description="From the first profiled step's begin to the last one's end."
    )
    busy_s: float = Field(description="Of it, with any kernel or operation running.")
    categories: dict[str, float] = Field(description="Seconds by category, the longest first.")
    top: list[KernelTime]
    communication_s: float = Field(description="With a collective or a transfer under way.")
    exposed_s: float = Field(description="Of it, with nothing computed meanwhile.")
    idle_s: float
    launch_gaps_s: float = Field(description="Idle while the next kernel was not launched yet.")
    num_launch_gaps: int
    longest_gaps: list[Gap] = []

    @property
    def num_steps(self) -> int:
        return max(1, self.last_step - self.first_step + 1)
