"""Profiles of some steps on every rank: `observe.profile=steps:20-24`, or asked of a live run by
its file control/profile. One trace per rank, profiles/rank<r>_steps<a>-<b>.json.gz.

No rank waits for another: where nothing but "now" was asked, rank 0 writes into the file which
steps are meant, a few seconds ahead, and every rank finds them there.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.errors import DataError
from paceline.records.disk import Losses
from paceline.records.files import modified_at, read_text, write_atomic
from paceline.records.profiled import AUDITED_STEP, parse_profile
from paceline.records.rundir import RunDir
from paceline.strategies.clock import Clock
from paceline.traces.events import STEP
from paceline.traces.flow import trace_name
from paceline.train.heartbeat import Progress, Ticker
from paceline.train.ranges import PHASE, Ranges

POLL_S = 0.5
AHEAD_S = 3.0  # of what rank 0 chooses: all ranks must have read it by then
NUM_STEPS = 5
MAX_REQUEST = 200  # bytes
MAX_STEPS = 100  # of a request: a trace is held in memory until it is written
LOG = logging.getLogger("paceline")
COUNT = re.compile("[0-9]{0,9}")
Detail = Literal["minimal", "full"]


class ProfileRequests(Ticker):
    """Looks at control/profile; `wanted` are the steps to trace: those of the config, and what was
    asked for since. A file that was there before the run is not a request."""

    def __init__(
        self, path: Path, progress: Progress, is_first: bool, configured: range | None = None
    ) -> None:
        super().__init__(POLL_S, "profile requests")
        # Only this thread replaces it, the loop only reads. Steps that are over want nothing more.
        self.wanted: list[range] = [configured] if configured else []
        self._path, self._progress, self._is_first = path, progress, is_first
        self._seen = self._looked_at = modified_at(path)
        self._begun_at, self._begun_step = time.monotonic(), progress.step

    def tick(self) -> None:
        found = modified_at(self._path)
        if found is None or found == self._seen:
            return
        is_new, self._seen = found != self._looked_at, found
        self._looked_at = found
        try:
            asked = read_text(self._path, MAX_REQUEST).strip()
            if not asked and is_new:  # a shell makes the file and then writes it: look again
                self._seen = None
                return
            steps = self._take(asked)
        except (DataError, OSError, ValueError) as error:
            self._say(f"control/profile asks for nothing: {error}")
            return
        if steps is not None:
            now = self._progress.step
            self.wanted = [*(each for each in self.wanted if each[-1] >= now), steps]

    def _take(self, asked: str) -> range | None:
        """Return the steps that are asked for; None where rank 0 must say first which these are."""
        if not asked.startswith("steps:"):
            return self._choose(_read_count(asked)) if self._is_first else None
        steps = parse_profile(asked)
        assert steps is not None, "off does not begin like steps"
        steps = self._cut(steps)  # before what is over is dropped: ranks may differ by a step
        if steps[-1] <= max(self._progress.step, AUDITED_STEP):
            raise ValueError(f"{asked} is over, or before step {AUDITED_STEP + 1}")
        return range(max(steps[0], AUDITED_STEP + 1), steps[-1] + 1)

    def _choose(self, num_steps: int) -> range:
        """Choose steps ahead for all ranks, and write them into the file."""
        first = max(self._progress.step + self._steps_ahead(), AUDITED_STEP + 1)
        steps = self._cut(range(first, first + num_steps))
        for other in sorted(self.wanted, key=lambda each: each[0]):
            if other[0] <= steps[-1] and steps[0] <= other[-1]:  # one profile at a time
                steps = range(other[-1] + 1, other[-1] + 1 + len(steps))
        write_atomic(self._path, f"steps:{steps[0]}-{steps[-1]}\n")
        self._seen = modified_at(self._path)
        return steps

    def _cut(self, steps: range) -> range:
        if len(steps) > MAX_STEPS:
            self._say(f"a profile of {len(steps)} steps is asked for: {MAX_STEPS} are traced")
        return steps[:MAX_STEPS]

    def _say(self, text: str) -> None:
        if self._is_first:  # the others would say the same
            LOG.warning("%s", text)

    def _steps_ahead(self) -> int:
        taken = self._progress.step - self._begun_step
        step_s = (time.monotonic() - self._begun_at) / max(1, taken)
        return 2 + math.ceil(AHEAD_S / max(step_s, 1e-3))


class Profiler:
    """Call `begin` and `end` around each step. While it traces, the phases of a step stand in the
    trace too."""

    def __init__(
        self,
        run: RunDir,
        rank: int,
        clock: Clock,
        device: torch.device,
        wanted: range | None,
        detail: Detail = "minimal",
    ) -> None:
        self._files, self._rank, self._clock, self._device = run, rank, clock, device
        self._detail = detail
        self.notes: list[str] = []
        self._live: tuple[profile, range] | None = None
        self._steps, self._phases = Ranges(_recorded, STEP), Ranges(_recorded, PHASE)
        self.requests = ProfileRequests(run.profile_request, clock, rank == 0, wanted)

    def begin(self, step: int, is_free: bool = True) -> None:
        """`is_free`: no other profile is being taken of this step; there is one at a time."""
        if self._live is not None:
            self._steps.turn_to(step)
            return
        steps = next((each for each in self.requests.wanted if step in each), None)
        if steps is None or not is_free:
            return
        # A rank that learns of it late takes what is left.
        self._start(range(step, steps[-1] + 1))

    def end(self, step: int) -> None:
        if self._live is not None and step >= self._live[1][-1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, also where the run ends before the last of the steps."""
        if self._live is None:
            return
        traced, steps = self._live
        self._live = None
        self._clock.on_phase.remove(self._phases.turn_to)
        self._phases.close()
        self._steps.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        traced.stop()
        span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        self.notes.append(f"{span} were profiled: they are slower, and count in the rates")
        path = self._files.profiles / trace_name(self._rank, steps)
        _export(traced, path, self._files.lost)

    def _start(self, steps: range) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # see audit.py
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        is_full = self._detail == "full"
        traced = profile(
            activities=activities, record_shapes=is_full, with_stack=is_full, profile_memory=is_full
        )
        traced.start()
        self._steps.turn_to(steps[0])
        self._clock.on_phase.append(self._phases.turn_to)
        self._phases.turn_to(self._clock.phase)
        self._live = (traced, steps)


def _read_count(asked: str) -> int:
    """Return how many steps are asked for: by a number, or by an empty file."""
    if not COUNT.fullmatch(asked):
        raise ValueError(f"{asked!r} is no number of steps, and no steps:20-24")
    return int(asked or 0) or NUM_STEPS


def _recorded(name: str) -> Callable[[], None]:
    """Open a range in torch's profile; return what closes it."""
    mark: Any = record_function(name)
    mark.__enter__()
    return lambda: mark.__exit__(None, None, None)


def _export(traced: profile, path: Path, lost: Losses) -> None:
    """Write a trace under its name once it is whole."""
    try:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.json.gz")
        traced.export_chrome_trace(str(partial))
        os.replace(partial, path)
    except OSError as error:
        lost.note(path, error)
    except RuntimeError as error:  # kineto, which says no errno
        lost.note(path, OSError(0, str(error)[:120]))
