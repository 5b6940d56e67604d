"""How a run can end, and the exceptions that say so.

    PacelineError
    ├── ConfigError          the user asked for something impossible      exit 2
    ├── ClusterError         the machines cannot do what was asked        exit 3
    ├── AuditError           what ran is not what was decided             exit 1
    ├── DataError            the data is missing, damaged or too small    exit 4
    │   └── LoaderError      a loader process died or hangs               exit 4
    ├── LaunchError          ranks did not come, or left before the run   exit 5
    ├── SaveError            a checkpoint could not be written            exit 8
    ├── RestoreError         no checkpoint can be trusted                 exit 9
    └── StopAsked            a signal came before any rank had started    exit 75

Library code raises these; only `paceline.cli` prints them and exits. What happens to a rank is no
exception in the supervisor: it is an outcome, read from the rank's verdict (conclude.py).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar


class Outcome(StrEnum):
    """How a run ended. `EXIT_CODES` maps each to the process exit code of every verb."""

    OK = "ok"
    CHECK_FAILED = "check_failed"
    REFUSED_CONFIG = "refused_config"
    REFUSED_CLUSTER = "refused_cluster"
    REFUSED_DATA = "refused_data"
    CRASHED = "crashed"
    STALL = "stall"
    NAN = "nan"
    CHECKPOINT_NOT_WRITTEN = "checkpoint_not_written"
    NO_VALID_CHECKPOINT = "no_valid_checkpoint"
    OUT_OF_RESOURCES = "out_of_resources"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"


EXIT_CODES: dict[Outcome, int] = {
    Outcome.OK: 0,
    Outcome.CHECK_FAILED: 1,
    Outcome.REFUSED_CONFIG: 2,
    Outcome.REFUSED_CLUSTER: 3,
    Outcome.REFUSED_DATA: 4,
    Outcome.CRASHED: 5,
    Outcome.STALL: 6,
    Outcome.NAN: 7,
    Outcome.CHECKPOINT_NOT_WRITTEN: 8,
    Outcome.NO_VALID_CHECKPOINT: 9,
    Outcome.OUT_OF_RESOURCES: 10,
    Outcome.PREEMPTED: 75,
    Outcome.INTERRUPTED: 130,
}


class PacelineError(Exception):
    """One or more problems for a person: each says what was asked, what is true, what to change."""

    outcome: ClassVar[Outcome] = Outcome.CRASHED

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


class ConfigError(PacelineError):
    outcome = Outcome.REFUSED_CONFIG


class AuditError(PacelineError):
    outcome = Outcome.CHECK_FAILED


class ClusterError(PacelineError):
    outcome = Outcome.REFUSED_CLUSTER


class DataError(PacelineError):
    outcome = Outcome.REFUSED_DATA


class LoaderError(DataError):
    """Not the data's fault for certain: another attempt may succeed."""


class LaunchError(PacelineError):
    outcome = Outcome.CRASHED


class SaveError(PacelineError):
    outcome = Outcome.CHECKPOINT_NOT_WRITTEN


class RestoreError(PacelineError):
    outcome = Outcome.NO_VALID_CHECKPOINT


class StopAsked(PacelineError):
    outcome = Outcome.PREEMPTED
