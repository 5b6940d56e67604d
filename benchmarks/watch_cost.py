"""What watching costs a step: on and off in turns of ten steps, inside one run, so that nothing
else differs between the two.

    python benchmarks/watch_cost.py                              2 ranks on the CPU
    python benchmarks/watch_cost.py --steps 2000 launch.device=cuda launch.nproc=1 ...

"On" is all that tells work from waiting and judges it: the clock's blocked times with DDP's
arrival, the count of collectives, rows written every ten steps, and the watcher thread of the
process that started the run. Heartbeats and telemetry, which every run always had, stay on in both.
The answer compares whole turns, since part of it happens once in some steps: the mean step of a
turn, at the quarter of the turns that other work disturbed least, with an interval by
resampling turns. The ratio of the medians of all turns is printed beside it. A goal is met where
the whole interval is below it, and not met where all of it is above; else it is not shown.

A shared machine is noisier than the goal. So what is spent inside of it is summed, too, by the
clock of the thread, which stands still while others run: in each rank, and in the watcher, which is
a thread of another process. That leaves out what it does to caches, and counts its own clock.
One rank alone waits for nobody and records nothing of it: on one GPU give it two,
    launch.device=cuda launch.nproc=2 launch.devices=[0,0] launch.backend=gloo
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TURN, QUIET = 10, 0.25  # steps; the quantile of turns that counts
GOAL = {"cpu": 0.005, "cuda": 0.001}
SIZE = [
    "data.source=synthetic", "data.synthetic_samples=2048", "data.seq_len=64", "model.dim=96",
    "model.num_layers=4", "train.eval_every=off", "train.eval_samples=all",
    "checkpoint.at_end=false",
]  # fmt: skip
# A job in a file of its own: ranks import it, and there it puts a switch around what is measured.
JOB = """
import os
import time
from pathlib import Path

import paceline.train.metrics as metrics
from paceline.strategies import clock as clocks
from paceline.workloads.lm.workload import LanguageModel

IS_ON = True
SPENT = 0


def switched(owner, name, off):
    real = getattr(owner, name)

    def call(*args, **kwargs):
        global SPENT
        if not IS_ON:
            return off
        began = time.thread_time_ns()
        try:
            return real(*args, **kwargs)
        finally:
            SPENT += time.thread_time_ns() - began
    setattr(owner, name, call)


for kind in (clocks.HostClock, clocks.DeviceClock):
    begin = kind.begin

    def begin_turn(self, step, begin=begin):
        global IS_ON
        if step % {turn} == 0:
            Path("{folder}", f"spent.{os.getpid()}").write_text(f"{step} {SPENT}")
        IS_ON = (step // {turn}) % 2 == 0
        begin(self, step)
    kind.begin = begin_turn
    switched(kind, "block", None)
    switched(kind, "unblock", None)
switched(clocks.Waits, "until_returned", None)
switched(metrics, "count_collectives", 0)


class Switched(LanguageModel):
    pass
"""


def is_on(step: int) -> bool:
    return (step // TURN) % 2 == 0


def pause_watcher(spent_ns: list[int]) -> None:
    """Let the watcher sleep in the turns without it: rank 0's mark says which step it is."""
    from paceline.run.watching import Watcher
    from paceline.train.heartbeat import read_mark

    tick = Watcher.tick

    def tick_in_turn(self: Watcher) -> None:
        if is_on(read_mark(self._files.step_mark(0))):
            began = time.thread_time_ns()
            tick(self)
            spent_ns.append(time.thread_time_ns() - began)

    Watcher.tick = tick_in_turn  # type: ignore[method-assign]


def spent_inside(folder: Path, watcher_ns: list[int]) -> tuple[float, float]:
    """Return the milliseconds of a step with it that the busiest rank and the watcher spend."""
    told = [map(int, file.read_text().split()) for file in folder.glob("spent.*")]
    ranks = [spent / (step / 2) for step, spent in told if step > 0]
    num_steps = max(int(file.read_text().split()[0]) for file in folder.glob("spent.*"))
    return max(ranks) / 1e6, sum(watcher_ns) / (num_steps / 2) / 1e6


def measure(
    words: list[str], num_steps: int, out: Path
) -> tuple[np.ndarray, np.ndarray, str, float]:
    """Return the step times of the turns with and without, a row each, the device, and the
    milliseconds of a step inside of a rank."""
    import paceline
    from paceline.records import Plan
    from paceline.records.rundir import RunDir
    from paceline.records.tables import read_steps

    job = out / "switched_job.py"
    job.write_text(JOB.replace("{turn}", str(TURN)).replace("{folder}", str(out)))
    watcher_ns: list[int] = []
    pause_watcher(watcher_ns)
    result = paceline.train(f"{job}:Switched", *words, f"train.steps={num_steps}", out=out / "run")
    rank_ms, watcher_ms = spent_inside(out, watcher_ns)
    print(f"inside of it: {rank_ms:.4f} ms of a step in a rank, {watcher_ms:.4f} ms in the watcher")
    run = RunDir(Path(result.run_dir))
    rows = read_steps(run.steps(0)).since(3 * TURN)
    steps, times = rows.column("step"), rows.column("wall_s")
    turns = {True: [], False: []}
    for first in range(4 * TURN, num_steps - TURN, TURN):
        inside = (steps >= first + 1) & (steps < first + TURN)  # the first step of a turn is mixed
        turns[is_on(first)].append(times[inside])
    length = min(map(len, turns.values()))
    on, off = (np.array([t for t in turns[key][:length]]) for key in (True, False))
    return on, off, Plan.load(run.plan).device.value, rank_ms


def compare(
    on: np.ndarray, off: np.ndarray, quantile: float, rounds: int = 2000
) -> tuple[float, float, float]:
    """Return the ratio of the turns' mean steps at a quantile, less one, with its 95 % interval:
    a turn with and the one after it without are drawn again together."""
    rng = np.random.default_rng(0)
    with_it, without = on.mean(axis=1), off.mean(axis=1)

    def ratio(pick: np.ndarray) -> float:
        at = np.quantile(with_it[pick], quantile) / np.quantile(without[pick], quantile)
        return float(at) - 1

    drawn = [ratio(rng.integers(len(on), size=len(on))) for _ in range(rounds)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return ratio(np.arange(len(on))), float(low), float(high)


def verdict(low: float, high: float, goal: float) -> str:
    """Say whether a goal is met: only where the interval leaves no doubt."""
    if high <= goal:
        return "met"
    return "NOT met" if low > goal else "not shown: the interval reaches both sides of it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("words", nargs="*", help="further key=value")
    asked = parser.parse_args()
    words = [*SIZE, *(asked.words or ["launch.nproc=2", "launch.device=cpu"])]
    with tempfile.TemporaryDirectory() as folder:
        on, off, device, rank_ms = measure(words, asked.steps, Path(folder))
    print(f"device {device}, {asked.steps} steps, {len(on)} turns of {TURN} each way")
    for name, quantile in (("all turns, their median", 0.5), ("the quiet quarter", QUIET)):
        steps_ms = [1e3 * float(np.quantile(turns.mean(axis=1), quantile)) for turns in (off, on)]
        ratio, low, high = compare(on, off, quantile)
        print(f"{name}: step without {steps_ms[0]:.3f} ms, with {steps_ms[1]:.3f} ms")
        print(f"    watching adds {ratio:+.3%} (95 % interval {low:+.3%} to {high:+.3%})")
    print(f"inside of a rank it is {rank_ms / steps_ms[0]:.3%} of a quiet step")
    told = verdict(low, high, GOAL[device])
    print(f"goal: at most {GOAL[device]:.1%}: {told}")
    sys.exit(0 if told == "met" else 1)


if __name__ == "__main__":
    main()
