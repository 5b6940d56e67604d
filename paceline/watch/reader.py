"""Follows one run directory: each call of `RunReader.read` takes in what its files have gained.

    training.csv          whole, into bounded series       telemetry*.csv   the last 256 KiB and on
    ranks/*/steps.csv     the last 16 KiB and on           heartbeats       their last lines
    events.jsonl          as it grows                      train.log        its last lines and on

Memory and time of a call do not grow with the length of a run, except for the first call, which
reads training.csv (10 MB for 100,000 steps). Files are read in place: a run on other machines is
followed through the folder that it shares with this one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from paceline.errors import DataError
from paceline.metrics import TRAIN, VAL
from paceline.records import Attempt, LaunchPlan, Plan, Result
from paceline.records.cells import Chunk
from paceline.records.events import parse_event
from paceline.records.files import modified_at
from paceline.records.findings import Findings
from paceline.records.growing import GrowingTable, known, num_rows
from paceline.records.heartbeats import Beat, last_beat
from paceline.records.moments import wall_time
from paceline.records.phases import OWN_PHASES, STEP_PHASES
from paceline.records.rundir import RunDir
from paceline.records.tables import STEPS, TELEMETRY, TRAINING
from paceline.records.tails import Tail
from paceline.records.words import count, visible
from paceline.watch.series import Series
from paceline.watch.state import judge_state
from paceline.watch.view import WAITING, RankView, RunView

NUM_RECENT = 50  # steps whose medians are shown
STEPS_BYTES, TELEMETRY_BYTES, LOG_BYTES = 16 << 10, 256 << 10, 32 << 10
DRAWN = ("loss", "val_loss", "grad_norm", "lr", "step_s", "samples_per_s", "tokens_per_s")
# What a step is made of: each phase without the time in collectives, which is waiting for others.
PARTS = (*(str(phase) for phase in STEP_PHASES), WAITING, "unaccounted")


class RunReader:
    """Keeps a `RunView` up to date. `now` is the watcher's own clock, which measures silence: that
    of another machine may be wrong. Threads may share it: the pages of a list and of a run do.
    """

    def __init__(self, run: RunDir, now: Callable[[], float] = time.monotonic) -> None:
        self.run, self._now = run, now
        self.view = RunView(run.root, run.root.name)
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._training = GrowingTable(run.training, TRAINING)
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._events, self._log = Tail(run.events), _last_lines(run.train_log)
        self._ranks: list[_RankReader] = []
        self._result_seen: int | None = None

    def read(self) -> RunView:
        """Read what is new; return a view that later calls do not change, as others may be drawing
        it during those calls."""
        with self._lock:
            self._read()
            return self.view.copy()

    def _read(self) -> None:
        if self._plan is None:
            self._read_plan()
        self._read_training()
        for each in self._ranks:
            each.read(self._now())
        self._read_gpus()
        self._read_events()
        self._read_lines()
        self._read_result()
        self.view.state = judge_state(self.run, self.view, wall_time())

    def _read_plan(self) -> None:
        try:
            plan = Plan.load(self.run.plan)
        except DataError:
            return
        self._plan, view = plan, self.view
        view.name, view.num_steps, view.on_gpu = plan.name, plan.steps, plan.on_gpu
        view.unit = "tokens/s" if plan.unit == "tokens" else "samples/s"
        workload = plan.workload.rpartition("/")[2]
        view.title = (
            f"{workload} on {count(plan.world_size, 'rank')}, {plan.device.value},"
            f" {plan.strategy.value}, {plan.precision.value}"
        )
        ranks = range(plan.world_size)
        self._ranks = [_RankReader(self.run, rank, plan.on_gpu) for rank in ranks]
        view.ranks = [each.view for each in self._ranks]
        self._place_ranks()

    def _place_ranks(self) -> None:
        """Learn where each rank runs, and on which GPU: telemetry names GPUs by machine."""
        try:
            launch = LaunchPlan.load(self.run.launch)
        except DataError:
            return
        index = launch.crew.device_indices or list(range(launch.crew.per_node))
        for place in launch.ranks[: len(self._ranks)]:
            reader = self._ranks[place.rank]
            reader.first_of_machine = place.rank - place.local_rank
            reader.view.host = place.host
            reader.view.gpu = f"gpu{index[place.local_rank % len(index)]}"

    def _read_training(self) -> None:
        chunk, is_reset = self._training.read()
        view = self.view
        if is_reset:
            view.series, view.step, view.last = {}, 0, {}
            self._recent.clear()
        while num_rows(chunk):
            self._take_training(chunk)
            chunk, _ = self._training.read()

    def _take_training(self, chunk: Chunk) -> None:
        view, steps = self.view, chunk["step"][0]
        is_new = steps > view.step
        for name in chunk:
            is_metric = name.startswith((TRAIN, VAL))
            if name in DRAWN or is_metric:
                has_value, values = known(chunk, name)
                # A row that was amended comes again: only what it lacked before is new in it.
                if not is_metric and name != "val_loss":
                    has_value &= is_new
                    values = chunk[name][0][has_value]
                if len(values):
                    view.series.setdefault(name, Series()).extend(steps[has_value], values)
                    view.last[name] = float(values[-1])
        warm = ~chunk["warmup"][0] & np.isfinite(chunk["step_s"][0]) & is_new
        self._recent.extend(chunk["step_s"][0][warm][-NUM_RECENT:].tolist())
        view.step = max(view.step, int(steps.max()))
        view.step_s = median(self._recent) if self._recent else view.last.get("step_s")
        if "tokens_per_s" in view.last:
            view.unit = "tokens/s"
        ahead = max(0, view.num_steps - view.step)
        view.left_s = ahead * median(self._recent) if self._recent and view.num_steps else None

    def _read_gpus(self) -> None:
        """Give each rank the samples of its GPU, which the first rank of its machine recorded."""
        for each in self._ranks:
            found = self._ranks[each.first_of_machine].gpu_samples.get(each.view.gpu, [])
            for at, percent, used in found:
                each.view.gpu_busy.add(at, percent)
                each.view.memory.add(at, used)
            if found:
                each.view.gpu_percent, each.view.memory_bytes = found[-1][1], found[-1][2]
        rounds = {
            each.view.rank: [percent for _, percent, _ in samples]
            for each in self._ranks
            if (samples := self._ranks[each.first_of_machine].gpu_samples.get(each.view.gpu))
        }
        for number in range(max(map(len, rounds.values()), default=0)):
            self.view.balance.note({r: v[number] for r, v in rounds.items() if number < len(v)})
        for each in self._ranks:
            each.gpu_samples = {}

    def _read_events(self) -> None:
        for line in self._events.lines() if self.run.events.is_file() else ():
            event = parse_event(line)
            if event is not None:
                self.view.events.append(event)
                self.view.num_events += 1

    def _read_lines(self) -> None:
        is_plain = self.run.train_log.is_file()  # a FIFO would be waited for
        new = [visible(line) for line in self._log.lines()] if is_plain else []
        self.view.lines.extend(new)
        self.view.num_lines += len(new)

    def _read_result(self) -> None:
        try:
            self.view.attempt = Attempt.load(self.run.attempt).number
        except DataError:
            pass
        found = modified_at(self.run.result)
        if found == self._result_seen:
            return
        self._result_seen = found
        try:
            self.view.result = Result.load(self.run.result) if found is not None else None
        except DataError:
            self.view.result = None
        with suppress(DataError):
            if self.run.findings.is_file():
                self.view.findings = [str(f) for f in Findings.load(self.run.findings).findings]


class _RankReader:
    """What one rank writes: its heartbeat, the phases of its steps, its memory."""

    def __init__(self, run: RunDir, rank: int, on_gpu: bool) -> None:
        self.run, self.view, self.first_of_machine = run, RankView(rank), rank
        self._on_gpu = on_gpu  # then its memory is its GPU's
        self.gpu_samples: dict[str, list[tuple[float, float, float]]] = {}  # since the last call
        self._beat, self._beaten_at, self._moved_at = Beat(), 0.0, 0.0
        self._steps = GrowingTable(run.steps(rank), STEPS, STEPS_BYTES)
        self._telemetry = GrowingTable(run.telemetry_of(rank), TELEMETRY, TELEMETRY_BYTES)
        self._times: dict[str, deque[float]] = {
            name: deque(maxlen=NUM_RECENT) for name in ("wall", *PARTS)
        }
        self._began_at: float | None = None

    def read(self, now: float) -> None:
        self._read_beat(now)
        self._read_steps()
        self._read_telemetry()

    def _read_beat(self, now: float) -> None:
        beat = last_beat(self.run.heartbeat(self.view.rank))
        if beat == Beat():
            return
        if self._beat == Beat():
            # It was there before this watcher: only its writer's clock says how old it is.
            age = max(0.0, wall_time() - beat.time)
            self._beaten_at = self._moved_at = now - age
        elif beat.time != self._beat.time:
            self._beaten_at = now
            if (beat.step, beat.phase, beat.marks) != self._place():
                self._moved_at = now
        self._beat, view = beat, self.view
        view.step, view.phase = beat.step, beat.phase
        view.silent_s, view.still_s = now - self._beaten_at, now - self._moved_at

    def _place(self) -> tuple[int, str, int]:
        return self._beat.step, self._beat.phase, self._beat.marks

    def _read_steps(self) -> None:
        chunk, is_reset = self._steps.read()
        if is_reset:
            for times in self._times.values():
                times.clear()
        if not num_rows(chunk):
            return
        last = {name: np.nan_to_num(values[-NUM_RECENT:]) for name, (values, _) in chunk.items()}
        blocked = {str(phase): last[phase.blocked_column] for phase in OWN_PHASES}
        parts = {str(p): last[p.column] - blocked.get(str(p), 0.0) for p in STEP_PHASES}
        parts |= {"wall": last["wall_s"], WAITING: sum(blocked.values(), np.zeros(1))}
        parts["unaccounted"] = last["unaccounted_s"]
        for name, times in self._times.items():
            times.extend(parts[name].tolist())
        self.view.wall_s = median(self._times["wall"])
        self.view.phases_s = {name: median(self._times[name]) for name in PARTS}

    def _read_telemetry(self) -> None:
        if self._on_gpu and self.first_of_machine != self.view.rank:
            return  # its GPU is in the table of the first rank of its machine
        chunk, _ = self._telemetry.read()
        if not num_rows(chunk):
            return
        times, sources = chunk["time"][0], chunk["source"][0]
        self._began_at = float(times[0]) if self._began_at is None else self._began_at
        at = times - self._began_at
        is_own = np.isin(sources, ("host", "rank"))
        rss = chunk["rss_bytes"][0]
        is_own &= np.isfinite(rss)
        if is_own.any() and not self._on_gpu:
            self.view.memory.extend(at[is_own], rss[is_own])
            self.view.memory_bytes = float(rss[is_own][-1])
        for source in {s for s in sources if s.startswith("gpu")}:
            own = (sources == source) & np.isfinite(chunk["utilisation_percent"][0])
            columns = (at, chunk["utilisation_percent"][0], chunk["memory_bytes"][0])
            cells = (np.nan_to_num(column[own]).tolist() for column in columns)
            self.gpu_samples[source] = list(zip(*cells, strict=True))


def _last_lines(path: Path) -> Tail:
    """Return a tail that begins some lines before the end of what is there."""
    try:
        return Tail(path, max(0, path.stat().st_size - LOG_BYTES))
    except OSError:
        return Tail(path)
