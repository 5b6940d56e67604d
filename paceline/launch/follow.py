"""Follows a live run by its files: copies rank logs into train.log, turns rows of training.csv into
progress, and a new attempt into a line for the user."""

from collections.abc import Callable

from paceline.errors import DataError
from paceline.records import Attempt, list_unwritten
from paceline.records.disk import Appender
from paceline.records.rundir import RunDir
from paceline.records.tails import RowTail, Tail
from paceline.records.timing_ranks import Spreads
from paceline.records.words import visible
from paceline.train.heartbeat import Ticker

INTERVAL_S = 0.2


class Follower(Ticker):
    """A thread of the supervisor. `on_row` gets each new row of training.csv, in order; those that
    are there already are an earlier attempt's. `say` gets a line per attempt but the first."""

    def __init__(
        self,
        run: RunDir,
        num_ranks: int,
        on_row: Callable[[dict[str, str]], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(INTERVAL_S, "follower")
        self._files, self._on_row, self._say = run, on_row, say
        self._logs = {rank: Tail.from_end(run.rank_log(rank)) for rank in range(num_ranks)}
        self._train_log = Appender(run.train_log, run.lost)
        self._train_log.flush()
        self._has_said, self._has_failed = False, False
        self._spreads = Spreads(num_ranks)
        self._training = RowTail(run.training)
        self._attempt = self._find_attempt()
        self._training.rows()

    def stop(self) -> None:
        super().stop()
        self._try(lambda: self._copy_logs(last=True))
        self._train_log.close()

    def tick(self) -> None:
        self._try(lambda: self._copy_logs(last=False))
        self._try(lambda: self._pass_rows(self._training.rows()))
        self._try(self._say_attempt)
        self._try(self._say_unwritten)

    def _try(self, follow: Callable[[], None]) -> None:
        """Follow one of the files. Whatever stands there, the run and the other files go on: what
        is wrong is said once, as a line and not as the end of this thread."""
        try:
            follow()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                told = f"{type(error).__name__}: {error}"
                self._say(f"warning: some of the run could not be followed ({told}); it goes on")

    def _say_unwritten(self) -> None:
        """Say once that a file cannot be written; the end of the run tells how much of which."""
        unwritten = list_unwritten(self._files)
        if unwritten and not self._has_said and self._files.root.is_dir():
            first = f"{unwritten[0].file}: {unwritten[0].error}"
            self._say(f"warning: the run's files cannot be written ({first}); it goes on")
            self._has_said = True

    def _pass_rows(self, rows: list[dict[str, str]]) -> None:
        for row in rows:
            self._on_row(row)

    def _find_attempt(self) -> Attempt | None:
        """Return the live attempt; None in the moment between two."""
        try:
            return Attempt.load(self._files.attempt)
        except DataError:
            return None

    def _say_attempt(self) -> None:
        found = self._find_attempt()
        if found is None or self._attempt is None or found.number == self._attempt.number:
            self._attempt = self._attempt or found
            return
        ended = Attempt.load(self._files.past_attempt(found.number - 1) / self._files.attempt.name)
        self._say(f"{ended.cause}\nstarting all ranks again: attempt {found.number}")
        self._attempt = found

    def _copy_logs(self, last: bool) -> None:
        for rank, tail in self._logs.items():
            for line in tail.lines(last):
                self._train_log.append(f"[rank {rank}] {visible(line)}\n".encode())
                for spread in self._spreads.note(line):
                    self._train_log.append(f"{spread}\n".encode())
        self._train_log.flush()
