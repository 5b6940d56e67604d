"""Following a live run from its files: rank logs into train.log, training.csv into progress."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.observe.heartbeat import Ticker
from paceline.rundir import RunDir

INTERVAL_S = 0.2


@dataclass
class Tail:
    """New complete lines of a file that may not exist yet."""

    path: Path
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def lines(self, last: bool = False) -> list[str]:
        """Lines since the last call; with `last`, the unfinished one too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if last and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]


class Follower(Ticker):
    """A thread of the supervisor; `on_row` gets each new row of training.csv, in order."""

    def __init__(
        self, run: RunDir, num_ranks: int, on_row: Callable[[dict[str, str]], None]
    ) -> None:
        super().__init__(INTERVAL_S, "follower")
        self._logs = {rank: Tail(run.rank_log(rank)) for rank in range(num_ranks)}
        self._train_log = run.train_log.open("a", buffering=1)
        self._training, self._columns = Tail(run.training), list[str]()
        self._on_row = on_row

    def stop(self) -> None:
        super().stop()
        self._copy_logs(last=True)
        self._train_log.close()

    def tick(self) -> None:
        self._copy_logs(last=False)
        for row in csv.reader(self._training.lines()):
            if not self._columns:
                self._columns = row
            else:
                self._on_row(dict(zip(self._columns, row, strict=False)))

    def _copy_logs(self, last: bool) -> None:
        for rank, tail in self._logs.items():
            for line in tail.lines(last):
                self._train_log.write(f"[rank {rank}] {line}\n")
