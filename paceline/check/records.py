"""What `paceline check` finds: checkup.json of each rank, group.json of all, check.json."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from paceline.machine.measures import ClockOffset, Correctness, PairSpeed, Rate, Speed
from paceline.records import Crew, Finding, Part, Record
from paceline.records.rundir import RunDir


class RankCheckup(Record):
    """One rank: where it runs, what is wrong there, what its device can do."""

    rank: int
    local_rank: int
    host: str
    device: str
    device_id: str
    cores: int
    python: str
    torch: str
    cuda: str | None
    network_gb_per_s: float | None
    findings: list[Finding] = []
    rates: list[Rate] = []


class GroupCheckup(Record):
    """All ranks together. A world of one has nothing to measure."""

    correctness: Correctness
    speeds: list[Speed]
    pairs: list[PairSpeed]
    clocks: list[ClockOffset]


class ExpectedDevice(Part):
    """What the data sheet says of one rank's device, for the figures that were measured."""

    rank: int
    matmul_tflops: dict[str, float] = Field(description="By arithmetic, dense.")
    copy_gb_per_s: float | None


class ExpectedLink(Part):
    """What the slowest link between two ranks should carry one way, and who says so."""

    gb_per_s: float
    because: str


class Expected(Part):
    """What figures are held against; what is not known is left out."""

    devices: list[ExpectedDevice] = []
    link: ExpectedLink | None = None

    def of(self, rank: int) -> ExpectedDevice:
        unknown = ExpectedDevice(rank=rank, matmul_tflops={}, copy_gb_per_s=None)
        return next((device for device in self.devices if device.rank == rank), unknown)


class CheckReport(Record):
    """The whole check: what `--json` prints and check.json holds."""

    SCHEMA: ClassVar[int] = 2

    run_dir: str
    fit: bool
    exit_code: int
    crew: Crew
    ranks: list[RankCheckup]
    group: GroupCheckup | None
    expected: Expected
    findings: list[Finding]
    elapsed_s: float


def checkup_path(run: RunDir, rank: int) -> Path:
    return run.rank(rank) / "checkup.json"


def group_path(run: RunDir) -> Path:
    return run.root / "group.json"
