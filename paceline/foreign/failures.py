"""Recognises failures in the logs of launchers, NCCL and Python: lines into faults."""

import re
from collections.abc import Iterator

from paceline.records.decided import MAX_RANKS
from paceline.records.imported import Fault

# A rank in front of a line, as torchrun and DeepSpeed write it.
PREFIX = re.compile(r"^\s*(?:\[(?:rank|default) ?(\d+)\]:?|\(rank (\d+)\))\s*:?\s*")
ERROR = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt)): ?(.*)")
MEMORY = re.compile(
    r"(?:CUDA out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate)"
)
WATCHDOG = re.compile(
    r"\[Rank (\d+)\] .*?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+),"
    r" OpType=(\w+),.*?ran for (\d+) milliseconds"
)
GLOO = re.compile(
    r"(?:Timed out waiting (\d+)ms|Connection closed by peer|Connection reset by peer)"
)
ROOT = "Root Cause (first observed failure)"
CHILD = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
FIELD = re.compile(r"^\s*(host|exitcode|error_file|traceback|time)\s*: (.*)")
KILLED = re.compile(r"Signal (\d+) \((SIG\w+)\) received by PID")
ECHOES = ("ChildFailedError", "DistBackendError", "DistNetworkError", "CalledProcessError")
MAX_WORDS, MAX_FAULTS = 300, 200


def known_rank(number: object) -> int | None:
    """Return a rank that some run may have; None for a number that is none: each rank up to the
    largest is looked at later."""
    rank = int(number) if isinstance(number, int | str) else -1
    return rank if 0 <= rank < MAX_RANKS else None


class FaultReader:
    """Takes in the lines of one log; `rank` is whose log it is, where it is one rank's alone."""

    def __init__(self, file: str, rank: int | None = None) -> None:
        self.file, self.rank = file, rank
        self.faults: list[Fault] = []
        self._child: dict[str, str] | None = None  # of torchrun's table
        self._is_root = False

    def read(self, line: str, step: int) -> None:
        prefix = PREFIX.match(line)
        rank = self.rank
        if prefix:
            rank = known_rank(prefix[1] or prefix[2])
            line = line[prefix.end() :]
        if self._read_table(line) or len(self.faults) >= MAX_FAULTS:
            return
        for fault in self._iter_faults(line, rank, step):
            self.faults.append(fault)

    def _iter_faults(self, line: str, rank: int | None, step: int) -> Iterator[Fault]:
        at = step or None
        if found := WATCHDOG.search(line):
            seconds = int(found[4]) / 1000
            yield Fault(
                kind="hang",
                rank=known_rank(found[1]),
                step=at,
                file=self.file,
                words=f"{found[3].lower()} number {found[2]} waited {seconds:.0f} s for others",
            )
        elif found := ERROR.match(line.strip()):
            kind = "out_of_memory" if MEMORY.search(line) else "crash"
            is_echo = found[1] in ECHOES or GLOO.search(line) is not None
            words = f"{found[1]}: {found[2]}"[:MAX_WORDS]
            yield Fault(kind=kind, rank=rank, step=at, file=self.file, words=words, is_echo=is_echo)
        elif found := KILLED.search(line):
            words = f"its process was ended by {found[2]}"
            yield Fault(kind="killed", rank=rank, step=at, file=self.file, words=words)

    def _read_table(self, line: str) -> bool:
        """Read torchrun's table of failures, a field a line; True while inside it."""
        if ROOT in line:
            self._is_root = True
        if found := CHILD.match(line):
            self._child = {"rank": found[1]} | (self._child or {})
            return True
        field = FIELD.match(line)
        if field is None or (self._child is None and field[1] not in ("time", "host")):
            return False
        self._child = {**(self._child or {}), field[1]: field[2].strip()}
        if field[1] == "traceback":
            self._close_table()
        return True

    def _close_table(self) -> None:
        child, self._child = self._child or {}, None
        code = child.get("exitcode", "").split(" ")[0]
        is_killed = code.startswith("-")
        words = (
            f"ended with exit code {code}" if not is_killed else f"was killed by signal {code[1:]}"
        )
        if "rank" in child:
            self.faults.append(
                Fault(
                    kind="killed" if is_killed else "crash",
                    rank=known_rank(child["rank"]),
                    host=child.get("host", ""),
                    file=self.file,
                    words=words,
                    is_root=self._is_root,
                    is_echo=not self._is_root,
                )
            )
        self._is_root = False
