"""The trackers of one run, started with its ranks and ended with them. They are never waited for
longer than a moment; a failure is reported once and noted in the result."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from paceline.records.rundir import RunDir
from paceline.records.words import visible

LAST_S = 30.0  # what all trackers of a run have, together, to send what is left


class Trackers:
    """While inside, a process per tracker sends the run's numbers. Set `outcome` when it is known;
    read `notes` afterwards."""

    def __init__(
        self, run: RunDir, names: Sequence[str], say: Callable[[str], None], last_s: float = LAST_S
    ) -> None:
        self._files, self._names, self._say, self._last_s = run, names, say, last_s
        self._live: list[_Tracker] = []
        self.outcome, self.notes = "", list[str]()

    def __enter__(self) -> Self:
        for name in self._names:
            try:
                self._live.append(_Tracker(self._files, name, self._note))
            except OSError as error:
                self._note(f"tracker {name} could not be started: {error.strerror or error}")
        return self

    def __exit__(self, *_: object) -> None:
        """Tell all how it ended, then wait for all; kill those that take too long."""
        for tracker in self._live:
            tracker.tell(self.outcome)
        deadline = time.monotonic() + self._last_s
        for tracker in self._live:
            tracker.end(max(0.0, deadline - time.monotonic()), self._last_s)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(f"warning: {text}")


class _Tracker:
    """One process. It is in a session of its own: Ctrl-C is for the run, whose last numbers it has
    to send yet; it ends when its stdin does, however we end."""

    def __init__(self, run: RunDir, name: str, note: Callable[[str], None]) -> None:
        self._name, self._note, self._log = name, note, run.tracker_log(name)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.track", name, str(run.root)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._is_told = False
        self._watch = threading.Thread(target=self._wait, name=f"tracker-{name}", daemon=True)
        self._watch.start()

    def tell(self, outcome: str) -> None:
        """Say that the run has ended: by a word, then by the end of its stdin."""
        self._is_told = True
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone
            self._process.stdin.write(f"{outcome}\n".encode())
        with suppress(OSError):
            self._process.stdin.close()

    def end(self, seconds: float, allowed_s: float) -> None:
        self._watch.join(seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._note(
                f"tracker {self._name} was killed: it had not sent all {allowed_s:g} s after the"
                f" run's end ({self._log.name})"
            )

    def _wait(self) -> None:
        """Note a failure as soon as it happens: a run may be long."""
        code = self._process.wait()
        if code > 0 or (code < 0 and not self._is_told):
            self._note(
                f"tracker {self._name} failed, and the run goes on without it: {self._last_line()}"
                f" ({self._log.name})"
            )

    def _last_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return visible(next((line for line in reversed(lines) if line.strip()), "no word"))[:300]
