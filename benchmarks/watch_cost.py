"""What watching costs a step: on and off in turns inside one run, so that nothing else differs
between the two, and neighbours compared, since they share what other work does to them.

    python benchmarks/watch_cost.py                                2 ranks on the CPU
    taskset -c 2,3 python benchmarks/watch_cost.py                 and all of it on their 2 cores
    python benchmarks/watch_cost.py --beside 4                     4 such runs on cores of their own
    python benchmarks/watch_cost.py --turn 10 --steps 4000 --peers launch.device=cuda \\
        launch.nproc=1 train.micro_batch_size=32 data.seq_len=512 model.dim=1024 \\
        model.num_layers=12 model.num_heads=8 model.num_kv_heads=8             a GPU

Heartbeats and telemetry, which every run always had, are on in both. Three things are switched
(benchmarks/watch_switch.py), and the answer is their sum:

    calls     What a rank does in every step: times in which it waits, with DDP's arrival, and the
              count of collectives. Changes every --turn steps: the difference in wall time of rank
              0, and beside it in CPU time of a rank's process, which stands still while others run.
    rows      What a rank does once in some steps: more columns of steps.csv, which is written
              every 5 steps instead of every 10. By the CPU time of the threads that do it, as if
              the step waited for all of it. With --turn 10 rows change with the calls, and are
              counted there.
    watcher   The thread of the process that started the run, which reads rows 4 times a second and
              judges by all rules every 10 s. One alone drowns in noise; so there are --watchers of
              them, in turns of 20 steps or more, and the difference is divided by their number. The
              CPU time of one is printed, too: its cost if a rank had to give all of it.

Of all differences between two neighbouring turns the largest fifth and the smallest fifth are left
out, and the mean of the others counts. Its 95 % interval is by drawing stretches of 40 steps (or of
two pairs of turns) again; on a busy machine, with turns renamed at random, it held 0 in 91 to 95 of
100. The parts' turns are drawn apart, so their errors do not go together: the ends of the sum are
away from it by the root of the sum of squares. A goal is met where the whole interval is below it,
and not met where all of it is above; else it is not shown. Of runs that stood side by side all
differences are taken together.

--plant MS is the proof that it sees what is there: so much more work in each step with it.

One rank alone waits for nobody and records nothing of it. --peers has it record as if it had some:
the quietest measurement on one GPU, where device events tell the time. Two ranks can share one,
    launch.device=cuda launch.nproc=2 launch.devices=[0,0] launch.backend=gloo
but they take turns on it, and a step then is as long as the driver's slices happen to fall.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from watch_switch import FIRST, Turns  # noqa: E402

GOAL = {"cpu": 0.005, "cuda": 0.001}
CUT = 0.2  # of the differences, on each side
STRETCH = 40  # steps, at least, that are drawn together
ROUNDS = 2000
SIZE = [
    "data.source=synthetic", "data.synthetic_samples=2048", "data.seq_len=64", "model.dim=96",
    "model.num_layers=4", "train.eval_every=off", "train.eval_samples=all",
    "checkpoint.at_end=false",
]  # fmt: skip
Times = NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    words: list[str]
    num_steps: int
    turns: Turns
    num_watchers: int
    peers: bool
    plant_ms: float = 0.0


@dataclass(frozen=True)
class Difference:
    """On less off, in ms a step, with its 95 % interval."""

    at: float
    low: float
    high: float

    def __add__(self, other: "Difference") -> "Difference":
        """Add what was drawn apart: errors by the root of the sum of squares."""
        at = self.at + other.at
        below = np.hypot(self.at - self.low, other.at - other.low)
        above = np.hypot(self.high - self.at, other.high - other.at)
        return Difference(at, at - float(below), at + float(above))

    def __truediv__(self, number: float) -> "Difference":
        return Difference(self.at / number, self.low / number, self.high / number)

    def words(self, step_ms: float) -> str:
        ends = f"{self.low / step_ms:+.3%} to {self.high / step_ms:+.3%}"
        return f"{self.at:+.4f} ms, {self.at / step_ms:+.3%} of a step (95 % interval {ends})"


@dataclass
class Spent:
    """CPU time of all watchers, in ns: in all, and in judging by all rules."""

    ticks: int = 0
    rules: int = 0


def multiply_watchers(asked: Asked, spent: Spent) -> None:
    """Start several in place of one, and let them sleep in the turns without: rank 0's mark says
    which step it is. They judge by all rules one after the other, as one would."""
    from paceline.run import watching
    from paceline.run.watching import Watcher
    from paceline.train.heartbeat import read_mark

    start, stop, tick, judge_all = Watcher.start, Watcher.stop, Watcher.tick, watching.judge
    others: list[Watcher] = []

    def start_all(self: Watcher) -> None:
        for number in range(1, asked.num_watchers):
            more = Watcher(self._files, self._plan, self._rules, lambda words: None)
            more._rules_at += watching.RULES_S * number / asked.num_watchers
            others.append(more)
            start(more)
        start(self)

    def stop_all(self: Watcher) -> None:
        for one in (*others, self):
            stop(one)

    def tick_in_turn(self: Watcher) -> None:
        if asked.turns.watchers(read_mark(self._files.step_mark(0))):
            began = time.thread_time_ns()
            tick(self)
            spent.ticks += time.thread_time_ns() - began

    gather = Watcher._all

    def gather_counted(self: Watcher, now: float) -> Any:
        began = time.thread_time_ns()
        found = gather(self, now)
        spent.rules += time.thread_time_ns() - began
        return found

    def judge_counted(evidence: Any) -> Any:
        began = time.thread_time_ns()
        found = judge_all(evidence)
        spent.rules += time.thread_time_ns() - began
        return found

    Watcher.start, Watcher.stop = start_all, stop_all  # type: ignore[method-assign]
    Watcher.tick, Watcher._all = tick_in_turn, gather_counted  # type: ignore[method-assign]
    watching.judge = judge_counted


@dataclass(frozen=True)
class Measured:
    """Of each step from FIRST on, in ms: wall time of rank 0 by its clock, CPU time of its process,
    and time spent on rows; and CPU time of one watcher per step."""

    wall: Times
    cpu: Times
    rows: Times
    device: str
    tick_ms: float
    rules_ms: float

    def save(self, path: Path) -> None:
        np.savez(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def load(cls, path: Path) -> "Measured":
        with np.load(path) as kept:
            arrays = {name: kept[name] for name in ("wall", "cpu", "rows")}
            figures = {name: float(kept[name]) for name in ("tick_ms", "rules_ms")}
            return cls(**arrays, **figures, device=str(kept["device"]))


def measure(asked: Asked, out: Path) -> Measured:
    import paceline
    from paceline.records import Plan
    from paceline.records.rundir import RunDir
    from paceline.records.tables import read_steps

    spent = Spent()
    multiply_watchers(asked, spent)
    told = {"FOLDER": out, "TURN": asked.turns.turn, "PEERS": "1" if asked.peers else ""}
    if asked.plant_ms:
        told["PLANT"] = asked.plant_ms
    result = paceline.train(
        f"{ROOT / 'benchmarks' / 'watch_switch.py'}:Switched",
        *asked.words,
        *(f"launch.env.WATCH_COST_{name}={value}" for name, value in told.items()),
        f"train.steps={asked.num_steps}",
        out=out / "run",
        quiet=True,
    )
    run = RunDir(Path(result.run_dir))
    rows = read_steps(run.steps(0)).since(FIRST)
    wall = rows.column("wall_s")[:-1] * 1e3
    assert (np.diff(rows.column("step")) == 1).all(), "a step is missing"
    # Of all ranks the one that spent most: waiting for another takes no CPU time.
    noted = [np.load(file) for file in out.glob("notes.*.npy")]
    noted = [np.diff(n[n[:, 0] >= FIRST], axis=0) / 1e6 for n in noted]
    most = max(noted, key=lambda n: float(n[:, 2].sum()))
    length = min(len(wall), len(most))
    per_step = 1e6 * asked.num_watchers * asked.num_steps
    # They read and compare in half of the steps, and judge by all rules as often as one always on.
    return Measured(
        wall[:length], most[:length, 2], most[:length, 3], Plan.load(run.plan).device.value,
        2 * (spent.ticks - spent.rules) / per_step, spent.rules / per_step,
    )  # fmt: skip


def stretches_of(times: Times, is_on: list[bool], turn: int, skips: int) -> Times:
    """Compare each turn with its neighbour; return differences by stretches of steps. The first
    `skips` steps of a turn are left out, which may still do what the turn before has left."""
    num_turns = len(times) // turn // 4 * 4
    turns = times[: num_turns * turn].reshape(num_turns, turn)[:, skips:].mean(axis=1)
    signs = np.where(np.array(is_on[: num_turns * turn : turn]), 1.0, -1.0)
    differences = (turns * signs).reshape(-1, 2).sum(axis=1)  # of each pair one is on
    per_stretch = max(2, STRETCH // (2 * turn))
    num = max(1, len(differences) // per_stretch)
    return differences[: num * per_stretch].reshape(num, -1)


def compare(runs: list[Times], is_on: list[bool], turn: int, skips: int = 0) -> Difference:
    """Compare turns with their neighbours, in all runs together."""
    stretches = np.concatenate([stretches_of(run, is_on, turn, skips) for run in runs])
    rng, num = np.random.default_rng(0), len(stretches)
    drawn = [trimmed(stretches[rng.integers(num, size=num)].ravel()) for _ in range(ROUNDS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Difference(trimmed(stretches.ravel()), float(low), float(high))


def trimmed(values: Times) -> float:
    cut = int(CUT * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def report(asked: Asked, runs: list[Measured]) -> bool:
    turns, step_ms = asked.turns, float(np.median(np.concatenate([run.wall for run in runs])))
    walls, device = [run.wall for run in runs], runs[0].device
    steps = range(FIRST, FIRST + max(map(len, walls)))
    calls, long = [turns.calls(s) for s in steps], [turns.watchers(s) for s in steps]
    skips = 1 if turns.turn > 1 else 0
    beside = f"{len(runs)} runs beside each other, " if len(runs) > 1 else ""
    print(f"device {device}, {beside}{asked.num_steps} steps, the median {step_ms:.3f} ms")

    def tell(name: str, part: Difference) -> Difference:
        print(f"{name:24}{part.words(step_ms)}")
        return part

    by_wall = tell("calls", compare(walls, calls, turns.turn, skips))
    cpus = [run.cpu for run in runs]
    by_cpu = tell("  by CPU time", compare(cpus, calls, turns.turn, skips))
    rows = Difference(0.0, 0.0, 0.0)
    if turns.rows_by_call:
        print("rows                    counted with the calls")
    else:
        rows = tell("rows", compare([run.rows for run in runs], long, turns.long))
    watcher = compare(walls, long, turns.long, skips) / asked.num_watchers
    tell(f"watcher, of {asked.num_watchers}", watcher)
    rules_ms = float(np.mean([run.rules_ms for run in runs]))
    cpu_ms = float(np.mean([run.tick_ms for run in runs])) + rules_ms
    print(
        f"  its CPU time          {cpu_ms:.4f} ms a step ({rules_ms:.4f} by all rules),"
        f" {cpu_ms / step_ms:.3%} if a rank gave it all"
    )
    tell("sum by CPU time", by_cpu + rows + Difference(cpu_ms, cpu_ms, cpu_ms))
    total = tell("sum", by_wall + rows + watcher)
    told = verdict(total.low / step_ms, total.high / step_ms, GOAL[device])
    print(f"goal: at most {GOAL[device]:.1%}: {told}")
    return told == "met"


def verdict(low: float, high: float, goal: float) -> str:
    """Say whether a goal is met: only where the interval leaves no doubt."""
    if high <= goal:
        return "met"
    return "NOT met" if low > goal else "not shown: the interval reaches both sides of it"


def measure_beside(num_runs: int, folder: Path) -> list[Measured]:
    """Start this script so often, each on cores of its own, and return what all have measured."""
    cores, files = sorted(os.sched_getaffinity(0)), [folder / f"{n}.npz" for n in range(num_runs)]
    each = len(cores) // num_runs
    started = []
    for number, file in enumerate(files):
        own = ",".join(map(str, cores[number * each : (number + 1) * each]))
        command = ["taskset", "-c", own, sys.executable, *sys.argv, "--save", str(file)]
        started.append(subprocess.Popen([*command, "--beside", "1"]))
    if any(one.wait() for one in started):
        sys.exit("a run failed")
    return [Measured.load(file) for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--turn", type=int, default=1, help="steps; 10 where a host runs ahead")
    parser.add_argument("--watchers", type=int, default=10)
    parser.add_argument("--beside", type=int, default=1, help="runs, each on cores of its own")
    parser.add_argument("--peers", action="store_true", help="one rank records as if it had some")
    parser.add_argument("--plant", type=float, default=0.0, help="ms of work more, to be found")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further key=value")
    got = parser.parse_intermixed_args()
    words = [*SIZE, *(got.words or ["launch.nproc=2", "launch.device=cpu"])]
    asked = Asked(words, got.steps, Turns(got.turn), got.watchers, got.peers, got.plant)
    with tempfile.TemporaryDirectory() as folder:
        if got.beside > 1:
            runs = measure_beside(got.beside, Path(folder))
        else:
            runs = [measure(asked, Path(folder))]
    if got.save:
        return runs[0].save(got.save)
    sys.exit(0 if report(asked, runs) else 1)


if __name__ == "__main__":
    main()
