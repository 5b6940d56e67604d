"""What `paceline check` finds: checkup.json of each rank, group.json of all, check.json."""

from pathlib import Path

from paceline.machine.measures import ClockOffset, Correctness, PairSpeed, Rate, Speed
from paceline.records import Crew, Finding, Record
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


class CheckReport(Record):
    """The whole check: what `--json` prints and check.json holds."""

    run_dir: str
    fit: bool
    exit_code: int
    crew: Crew
    ranks: list[RankCheckup]
    group: GroupCheckup | None
    findings: list[Finding]
    elapsed_s: float


def checkup_path(run: RunDir, rank: int) -> Path:
    return run.rank(rank) / "checkup.json"


def group_path(run: RunDir) -> Path:
    return run.root / "group.json"
