"""How a run can end, and the exceptions that say so.

    PacelineError
    ├── ConfigError          the user asked for something impossible      exit 2
    ├── ClusterError         the machines cannot do what was asked        exit 3
    ├── AuditError           what ran is not what was decided             exit 1
    ├── DataError            the data is missing, damaged or too small    exit 4
    │   └── LoaderError      a loader process died or hangs               exit 4
    ├── LaunchError          ranks did not come, or left before the run   exit 5
    ├── DiskError            a disk is full or read-only, or a folder gone exit 10
    ├── JobError             a method of the job itself raised            exit 5
    ├── SaveError            a checkpoint could not be written            exit 8
    ├── RestoreError         no checkpoint can be trusted                 exit 9
    ├── StopAsked            a signal came before any rank had started    exit 75
    └── RunFailed            a run ended badly; only from Python          its outcome's

Library code raises these; only `paceline.cli` prints them and exits. What happens to a rank is not
an exception in the supervisor: it is an outcome, read from the rank's verdict (launch/ending.py).

A new way to end is one row of `Outcome` and, where code raises it, one class.
"""

import errno
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from paceline.records import Result

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
FACTS = ("is_refusal", "is_retryable", "is_stop", "is_orderly", "beats_stop")


class Outcome(StrEnum):
    """How a run ended. One row per outcome; nobody else lists them.

    name and value, exit code of every verb, what it means, and what follows from it:
    `is_refusal`    ours, in words for people: the error's class and its log say nothing more
    `is_retryable`  another attempt of the same run may succeed
    `is_stop`       somebody asked for it: not a failure, and the run can be resumed
    `is_orderly`    all ranks left together, after the same step
    `beats_stop`    decides even if a stop was asked: exit code 75 would promise a sound checkpoint
    """

    exit_code: int
    words: str
    is_refusal: bool
    is_retryable: bool
    is_stop: bool
    is_orderly: bool
    beats_stop: bool

    OK = "ok", 0, "ok", "is_orderly"
    CHECK_FAILED = "check_failed", 1, "a check or a proof failed"
    REFUSED_CONFIG = "refused_config", 2, "config", "is_refusal"
    REFUSED_CLUSTER = "refused_cluster", 3, "machine", "is_refusal"
    REFUSED_DATA = "refused_data", 4, "data", "is_refusal"
    CRASHED = "crashed", 5, "a rank died", "is_retryable"
    STALL = "stall", 6, "a deadline passed", "is_retryable"
    NAN = "nan", 7, "not a number", "is_orderly"
    CHECKPOINT_NOT_WRITTEN = "checkpoint_not_written", 8, "checkpoint not written", "beats_stop"
    NO_VALID_CHECKPOINT = "no_valid_checkpoint", 9, "no checkpoint can be trusted"
    OUT_OF_RESOURCES = "out_of_resources", 10, "out of memory or disk", "is_retryable"
    PREEMPTED = "preempted", 75, "preempted: resume it with --resume", "is_stop", "is_orderly"
    INTERRUPTED = "interrupted", 130, "interrupted", "is_stop", "is_orderly"

    # Rows give all; the defaults are for `Outcome("ok")`, which only looks a row up.
    def __new__(cls, value: str, exit_code: int = 5, words: str = "", *facts: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.exit_code, member.words = exit_code, words
        assert set(facts) <= set(FACTS), f"{value} has a fact that nobody asks for"
        for fact in FACTS:
            setattr(member, fact, fact in facts)
        return member

    @classmethod
    def of_signal(cls, number: int) -> "Outcome":
        """Return what a run ends as that this signal has stopped."""
        return cls.INTERRUPTED if number == signal.SIGINT else cls.PREEMPTED


class PacelineError(Exception):
    """One or more problems for a person: each says what was asked, what is true, what to change."""

    outcome: Outcome = Outcome.CRASHED
    is_retryable: ClassVar[bool] = False  # True where the class knows better than its outcome

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    @property
    def exit_code(self) -> int:
        return self.outcome.exit_code


class ConfigError(PacelineError):
    outcome = Outcome.REFUSED_CONFIG


class AuditError(PacelineError):
    outcome = Outcome.CHECK_FAILED


class ClusterError(PacelineError):
    outcome = Outcome.REFUSED_CLUSTER


class DataError(PacelineError):
    outcome = Outcome.REFUSED_DATA


class LoaderError(DataError):
    """A failure of a loader process, for which the data may not be to blame: a retry may
    succeed."""

    is_retryable = True


class LaunchError(PacelineError):
    outcome = Outcome.CRASHED


class DiskError(PacelineError):
    outcome = Outcome.OUT_OF_RESOURCES

    @staticmethod
    def is_meant(error: BaseException) -> bool:
        """Tell whether an error says that a disk takes nothing: full, read-only, broken, gone."""
        return isinstance(error, OSError) and error.errno in DISK_ERRORS

    @classmethod
    def of(cls, error: OSError, hint: str = "") -> Self:
        """Return what a person should know of such an error."""
        what = error.filename if isinstance(error.filename, str) else "a file"
        change = hint or "free space there, or choose another place, and start it again"
        return cls(f"{what} cannot be written: {error.strerror or error}\nhint: {change}")


class MemoryFull(PacelineError):
    outcome = Outcome.OUT_OF_RESOURCES


class JobError(PacelineError):
    outcome = Outcome.CRASHED


class SaveError(PacelineError):
    outcome = Outcome.CHECKPOINT_NOT_WRITTEN


class RestoreError(PacelineError):
    outcome = Outcome.NO_VALID_CHECKPOINT


class StopAsked(PacelineError):
    outcome = Outcome.PREEMPTED


class RunFailed(PacelineError):
    """What `paceline.train` raises when the run did not end well; `result` is its whole record."""

    def __init__(self, problems: str | Sequence[str], result: "Result") -> None:
        super().__init__(problems)
        self.outcome, self.result = result.outcome, result


def is_retryable_kind(kind: str) -> bool:
    """Say whether an error is retryable, given only the name of its class, as in a verdict."""
    known = {PacelineError}
    while more := {sub for cls in known for sub in cls.__subclasses__()} - known:
        known |= more
    return any(cls.__name__ == kind and cls.is_retryable for cls in known)


def users_line(error: BaseException) -> str:
    """Return `job.py:14 in loss`, the last line of the traceback outside of libraries; empty if
    there is none."""
    ours, installed = str(Path(__file__).parent), ("site-packages", "dist-packages")
    stdlib = sysconfig.get_paths()["stdlib"]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_library = any(part in frame.filename for part in installed)
        if not is_library and not frame.filename.startswith((ours, stdlib, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""
