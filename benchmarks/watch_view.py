"""What it costs to watch a large run: 64 ranks on 8 machines, 100,000 steps, an hour of telemetry.

    python benchmarks/watch_view.py [--ranks 64] [--steps 100000]

Writes the tables of such a run, reads them as `paceline watch` does, then lets the run go on for
some seconds and reads and draws it again. Goal: the first look within 2 s, each later one and its
drawing within 0.2 s of a core, memory that does not grow with steps.
"""

import argparse
import math
import random
import resource
import tempfile
import time
from pathlib import Path

from paceline.config.schema import LaunchConfig
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir
from paceline.run.rank import TRAIN
from paceline.watch.fragments import draw_run
from paceline.watch.reader import RunReader
from tests.machines import machine
from tests.machines import plan as make_plan
from tests.reported import HEADER, STEPS_HEADER

PER_NODE, SECONDS, LOOKS = 8, 3600, 10
MEASURES = (
    "time,source,utilisation_percent,memory_bytes,clock_mhz,power_w,temperature_c,rss_bytes\n"
)


def write_run(root: Path, ranks: int, steps: int) -> RunDir:
    """Write a live run as its ranks would have by now."""
    random.seed(1)
    run, env = RunDir.create("large", root), machine(PER_NODE)
    nodes = ranks // PER_NODE
    plan = make_plan(
        f"launch.nproc={PER_NODE}", f"launch.nnodes={nodes}", "launch.launcher=torchrun",
        "launch.device=cuda", f"train.steps={2 * steps}", machine=env,
    )  # fmt: skip
    plan.save(run.plan)
    env.save(run.env)
    run.config.write_text("name: large\n")
    order = LaunchOrder(LaunchConfig(), plan.crew, env, 1, TRAIN, "lm")
    draw_plan(order, argv=[], hosts=[f"node{n}" for n in range(nodes)]).save(run.launch)
    with run.training.open("w") as file:
        file.write(HEADER)
        file.writelines(training_row(step) for step in range(1, steps + 1))
    for rank in range(ranks):
        write_rank(run, rank, steps)
    return run


def training_row(step: int) -> str:
    loss = 2 + 6 / math.sqrt(step) + random.gauss(0, 0.05)
    val = f"{loss + 0.1:.4f}" if step % 5000 == 0 else ""
    return f"{step},{loss:.6f},0.0003,{1 + random.random():.5f},0.31,825.1,1690000,0,0,{val}\n"


def write_rank(run: RunDir, rank: int, steps: int) -> None:
    run.make_rank(rank)
    row = "0.31,0.002,0.1,0.19,0.01,0,0.001,0.002\n"
    with run.steps(rank).open("w") as file:
        file.write(STEPS_HEADER)
        file.writelines(f"{step},0,{row}" for step in range(1, steps + 1))
    now = time.time()
    with run.telemetry_of(rank).open("w") as file:
        file.write(MEASURES)
        for second in range(SECONDS):
            at = f"{now - SECONDS + second:.3f}"
            if rank % PER_NODE:
                file.write(f"{at},rank,,,,,,{2**33}\n")
                continue
            file.write(f"{at},host,35,{2**38},,,,{2**33}\n")
            file.writelines(
                f"{at},gpu{gpu},{random.randint(85, 99)},{60 * 2**30},1900,600,60,\n"
                for gpu in range(PER_NODE)
            )
    beat(run, rank, steps)


def beat(run: RunDir, rank: int, step: int) -> None:
    with run.heartbeat(rank).open("a") as file:
        file.write(Beat(time.time(), rank, step, "backward", 7 * step).to_line())


def look(reader: RunReader) -> tuple[float, float, int]:
    """Return the seconds of a core that a look takes, and its drawing, and the drawing's bytes."""
    start = time.process_time()
    view = reader.read()
    read = time.process_time()
    pieces = draw_run(view)
    return read - start, time.process_time() - read, sum(map(len, pieces.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "large", asked.ranks, asked.steps)
        on_disk = sum(path.stat().st_size for path in run.root.rglob("*") if path.is_file())
        print(f"{asked.ranks} ranks, {asked.steps:,} steps, {on_disk / 1e6:.0f} MB of files")
        reader = RunReader(run)
        first, drawn, num_bytes = look(reader)
        print(
            f"first look {first:.2f} s of a core, drawing {drawn:.3f} s, {num_bytes / 1e3:.0f} kB"
        )
        later = []
        for number in range(1, LOOKS + 1):
            with run.training.open("a") as file:
                file.write(training_row(asked.steps + number))
            for rank in range(asked.ranks):
                beat(run, rank, asked.steps + number)
            later.append(look(reader))
        read, drawn = (max(each[n] for each in later) for n in (0, 1))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"later looks {read:.3f} s, drawing {drawn:.3f} s, the slowest of {LOOKS}")
        print(f"largest resident set {peak:.0f} MiB, torch's import included")
        is_met = first < 2 and read + drawn < 0.2
        print("goal (2 s, then 0.2 s): " + ("met" if is_met else "MISSED"))


if __name__ == "__main__":
    main()
