"""What is known about a run at a moment: what a terminal or page shows and a watchdog judges."""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from paceline.records import Result
from paceline.records.events import Event
from paceline.records.words import elapsed
from paceline.watch.series import Series

MAX_EVENTS, MAX_LINES = 200, 400
# Use of one GPU compared with another of the same run, in percent, as in sweeps of speech models.
BUSY, IDLE = 90.0, 10.0
WAITING = "waiting"  # for other ranks, inside collectives
Kind = Literal["starting", "running", "silent", "died", "ok", "stopped", "failed", "foreign"]


@dataclass(frozen=True)
class State:
    """Whether a run lives, in one word, and what else a person should know. A dead run is not
    `is_sure` if it may be frozen: nothing shows that its supervisor has ended."""

    kind: Kind
    said: str = ""
    is_sure: bool = True

    @property
    def is_over(self) -> bool:
        return self.kind in ("died", "ok", "stopped", "failed", "foreign")

    @property
    def is_bad(self) -> bool:
        return self.kind in ("silent", "died", "failed")


@dataclass
class RankView:
    """One rank now. `silent_s` is since its last heartbeat, `still_s` since it last entered a
    phase, both by the watcher's clock."""

    rank: int
    host: str = ""
    step: int = 0
    phase: str = "start"
    silent_s: float | None = None
    still_s: float = 0.0
    wall_s: float = 0.0  # medians of its last steps
    phases_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: float | None = None
    memory: Series = field(default_factory=Series)
    gpu: str = ""
    gpu_percent: float | None = None
    gpu_busy: Series = field(default_factory=Series)

    def copy(self) -> "RankView":
        return replace(self, memory=self.memory.copy(), gpu_busy=self.gpu_busy.copy())

    @property
    def own_s(self) -> float:
        """Return the part of a step that is its own work: all ranks take equally long for a step;
        the slow one works, and the others wait for it."""
        return sum(s for part, s in self.phases_s.items() if part not in (WAITING, "unaccounted"))

    @property
    def worry(self) -> tuple[float, float]:
        """Return the sort key for ranks when not all are shown: silence, then own work."""
        return round((self.silent_s or 0.0) + self.still_s, -1), self.own_s


@dataclass
class Balance:
    """How evenly the GPUs of a run work, over the samples that were seen."""

    num_rounds: int = 0
    num_extreme: int = 0  # one at 90 % or more while another was at 10 % or less
    mean: float = 0.0
    least: float = 0.0
    least_rank: int = 0
    most: float = 0.0
    num_rejected: int = 0  # samples outside 0 to 100 %, which NVML gives now and then

    def note(self, percents: dict[int, float]) -> None:
        """Add one sample of each GPU, by rank."""
        sound = {rank: value for rank, value in percents.items() if 0 <= value <= 100}
        self.num_rejected += len(percents) - len(sound)
        if not sound:
            return
        self.num_rounds += 1
        self.mean, self.most = fmean(sound.values()), max(sound.values())
        self.least_rank = min(sound, key=lambda rank: sound[rank])
        self.least = sound[self.least_rank]
        self.num_extreme += self.most >= BUSY and self.least <= IDLE

    def __str__(self) -> str:
        if not self.num_rounds:
            return "no sample of a GPU yet"
        even = f"mean {self.mean:.0f}%, least {self.least:.0f}% (rank {self.least_rank})"
        share = self.num_extreme / self.num_rounds
        return (
            f"{even}, most {self.most:.0f}%; one busy while another idles in {share:.0%} of samples"
        )


@dataclass
class RunView:
    """A run according to its files. `series` are by column of training.csv."""

    path: Path
    name: str
    title: str = ""
    state: State = State("starting")
    step: int = 0
    num_steps: int = 0
    step_s: float | None = None
    left_s: float | None = None
    unit: str = "samples/s"
    series: dict[str, Series] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # of each column, where it is a number
    ranks: list[RankView] = field(default_factory=list)
    on_gpu: bool = False
    balance: Balance = field(default_factory=Balance)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_events: int = 0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    num_lines: int = 0
    findings: list[str] = field(default_factory=list)
    attempt: int = 1
    result: Result | None = None

    def copy(self) -> "RunView":
        """Return a copy that does not change while the run goes on."""
        return replace(
            self,
            series={name: series.copy() for name, series in self.series.items()},
            last=dict(self.last),
            ranks=[each.copy() for each in self.ranks],
            balance=replace(self.balance),
            events=self.events.copy(),
            lines=self.lines.copy(),
        )

    @property
    def rate(self) -> float | None:
        return self.last.get(self.unit.replace("/", "_per_"))

    @property
    def metrics(self) -> list[str]:
        """Return the names of what the job measures beside its loss."""
        return [name for name in self.series if "/" in name]

    def progress(self) -> str:
        of = f" of {self.num_steps:,}" if self.num_steps else ""
        is_known = self.left_s is not None and self.left_s >= 1 and not self.state.is_over
        left = f", about {elapsed(self.left_s or 0)} left" if is_known else ""
        return f"step {self.step:,}{of}{left}"

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot that `--json` prints."""
        return {
            "run_dir": str(self.path),
            "name": self.name,
            "state": self.state.kind,
            "said": self.state.said,
            "step": self.step,
            "steps": self.num_steps,
            "left_s": self.left_s,
            "step_s": self.step_s,
            "last": self.last,
            "ranks": [
                {
                    "rank": each.rank,
                    "host": each.host,
                    "step": each.step,
                    "phase": each.phase,
                    "silent_s": each.silent_s,
                    "still_s": each.still_s,
                    "wall_s": each.wall_s,
                    "phases_s": each.phases_s,
                    "memory_bytes": each.memory_bytes,
                    "gpu_percent": each.gpu_percent,
                }
                for each in self.ranks
            ],
            "gpu_balance": str(self.balance) if self.on_gpu else None,
            "num_events": self.num_events,
            "findings": self.findings,
        }
