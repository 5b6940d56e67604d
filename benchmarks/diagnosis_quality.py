"""How often a planted fault is named right, and how often a clean run is called ill.

    python benchmarks/diagnosis_quality.py --out benchmarks/results/diagnosis_quality.jsonl
    python benchmarks/diagnosis_quality.py --seeds 1 --clean 2 --kinds kill slow_data   a quick look
    python benchmarks/diagnosis_quality.py --jobs 8 --out lines.jsonl     8 at a time, on 16 cores
    python benchmarks/diagnosis_quality.py --seeds 0 --clean 0 --long 8   clean runs of minutes

10 kinds of faults x 10 seeds x 3 strategies, then 100 clean runs, through `paceline drill`'s own
code: a run like any other in which one rank goes wrong. A seed draws the rank, the step, and by how
much a slow rank is slower (a fifth to the whole of a step). Right is: the kind, the rank, and for a
slow rank the part of the step; and no other rank accused of the same. A false alarm is any warning
or error about a clean run, while it ran or at its end. Goals: 95 % named, 1 % false alarms; half of
the slow ranks within 10 steps of their first slow one, nearly all within 20.
A line is appended per run, and what is there already is not run again.

A clean run takes seconds, in which all the rules are asked at its end alone. The --long ones take
longer than the time between two looks, evaluate, save, and are resumed once: on real text, as a
loss that cannot fall is no clean run.

With --jobs each run is started by a process of its own, which may use --cores-each cores that no
other one does: 2 ranks need 2. One that fails is a line that is not right, with its error.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

STRATEGIES = ("ddp", "zero3", "pipeline")
KINDS = (
    "slow_data", "slow_forward", "slow_backward", "slow_optimizer", "spikes", "slow_disk",
    "kill", "hang", "nan", "desync",
)  # fmt: skip
FURTHER = ("out_of_memory", "full_disk")  # by --kinds
CLEAN, LONG = "clean", "clean_long"
LONG_STEPS = 1200  # and as many again, after a resume
LONG_WORDS = [
    "data.source=stdlib", "~data.synthetic_samples", f"train.steps={LONG_STEPS}",
    "train.eval_every=200", "train.eval_samples=64", "checkpoint.every=400", "optim.lr=5e-4",
]  # fmt: skip
GOAL_NAMED, GOAL_ALARMS = 0.95, 0.01
SIZE = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=32", "model.dim=64",
    "model.num_layers=4", "train.eval_every=off", "train.eval_samples=all", "train.steps=60",
    "launch.device=cpu", "launch.nproc=2", "launch.progress_s=15", "checkpoint.at_end=false",
]  # fmt: skip
LONGEST_S = 300  # that a process takes for one run
Line = dict[str, Any]


def cases(
    seeds: int, clean: dict[str, int], kinds: list[str], strategies: list[str]
) -> Iterator[Line]:
    """Yield what is run: faults first, in turns over strategies, then clean runs of each kind."""
    for seed in range(seeds):
        for kind in kinds:
            for strategy in strategies:
                yield {"kind": kind, "strategy": strategy, "seed": seed}
    for kind, number in clean.items():
        for seed in range(number):
            yield {"kind": kind, "strategy": strategies[seed % len(strategies)], "seed": seed}


def key_of(line: Line) -> tuple[str, str, int]:
    return line["kind"], line["strategy"], line["seed"]


def run_clean(case: Line, words: list[str], out: Path) -> Line:
    """Run a job in which nothing is planted; a long one is resumed once."""
    import paceline
    from paceline.health import judge, read_evidence
    from paceline.records.events import iter_events
    from paceline.records.rundir import RunDir

    is_long = case["kind"] == LONG
    words = [*words, *LONG_WORDS] if is_long else words
    result = paceline.train("lm_tiny", *words, out=out, quiet=True, check=False)
    if is_long and result.exit_code == 0:
        further = f"train.steps={2 * LONG_STEPS}"
        result = paceline.resume(out, None, further, quiet=True, check=False)
    told = [f for f in judge(read_evidence(RunDir(out))) if f.severity != "note"]
    live = [e.words for e in iter_events(RunDir(out).events)]
    line: Line = {"alarms": [f.words for f in told] + live, "num_live": len(live)}
    if result.exit_code != 0:
        line["error"] = f"exit code {result.exit_code}"
    return line | {"right": not told and not live and result.exit_code == 0}


def run_fault(case: Line, words: list[str], out: Path) -> Line:
    """Plant the fault of a case."""
    from paceline.cli.talk import ConsoleTalk
    from paceline.drill.flow import load_drilled, names_fault, run_drill
    from paceline.records.drills import Drill, Fault
    from paceline.records.events import iter_events
    from paceline.records.rundir import RunDir

    rng = random.Random(f"{key_of(case)}")
    drill = Drill(
        fault=Fault(case["kind"]),
        rank=rng.randrange(2),
        step=rng.randrange(12, 25),
        share=rng.uniform(0.2, 1.0),
    )
    end = run_drill(load_drilled("lm_tiny", words), drill, out, ConsoleTalk(quiet=True))
    # One without a rank is the live event of a bad loss; the run's end names whose it was.
    told = [f for f in end.found if f.kind in drill.fault.found_as and f.rank is not None]
    wrong = [f for f in told if not names_fault(drill, f)]
    named_at = [
        e.step - drill.step + 1
        for e in iter_events(RunDir(out).events)
        if e.kind == "straggler" and e.rank == drill.rank and e.step is not None
    ]
    return {
        "right": end.named is not None and not wrong,
        "rank": drill.rank, "step": drill.step, "share": round(drill.share, 3),
        "after_steps": min(named_at, default=None), "found": [f.words for f in end.found],
    }  # fmt: skip


def run_case(case: Line, folder: Path) -> Line:
    """Run one case and say what was found in it."""
    words = [*SIZE, f"strategy.name={case['strategy']}", f"train.seed={case['seed']}"]
    out, begun = folder / "-".join(map(str, key_of(case))), time.time()
    run = run_clean if case["kind"] in (CLEAN, LONG) else run_fault
    found = run(case, words, out)
    shutil.rmtree(out, ignore_errors=True)
    return case | {"seconds": round(time.time() - begun, 1)} | found


def run_apart(case: Line, folder: Path, cores: set[int]) -> Line:
    """Run one case in a process that keeps to these cores; what it cannot say is an error."""
    begun, told = time.time(), folder / f"{'-'.join(map(str, key_of(case)))}.json"
    words = [__file__, "--case", json.dumps(case), "--out", str(told), "--on", *map(str, cores)]
    try:
        end = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=LONGEST_S
        )
        if told.is_file():
            return dict(json.loads(told.read_text()))
        last = (end.stderr.strip() or "no word").splitlines()[-1]
        error = f"exit code {end.returncode}: {last}"
    except subprocess.TimeoutExpired:
        error = f"no end within {LONGEST_S} s"
    return case | {"right": False, "seconds": round(time.time() - begun, 1), "error": error}


def run_alone(case: Line, told: Path, cores: set[int]) -> None:
    """Run one case here, as the child of `run_apart`: ranks inherit the cores."""
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory(dir=told.parent) as folder:
        line = run_case(case, Path(folder))
    told.write_text(json.dumps(line))


def deal_cores(num_jobs: int, each: int) -> SimpleQueue[set[int]]:
    """Return a set of cores for each job: neighbours, which share what cores share."""
    cores = sorted(os.sched_getaffinity(0))
    if num_jobs * each > len(cores):
        sys.exit(
            f"--jobs {num_jobs} with --cores-each {each} needs {num_jobs * each} cores; there are"
            f" {len(cores)}"
        )
    free: SimpleQueue[set[int]] = SimpleQueue()
    for job in range(num_jobs):
        free.put(set(cores[job * each : (job + 1) * each]))
    return free


def iter_lines(wanted: list[Line], folder: Path, num_jobs: int, cores_each: int) -> Iterator[Line]:
    """Run all cases and yield their lines: in order, or with several jobs as they end."""
    if num_jobs == 1:
        yield from (run_case(case, folder) for case in wanted)
        return
    free = deal_cores(num_jobs, cores_each)

    def run(case: Line) -> Line:
        cores = free.get()
        try:
            return run_apart(case, folder, cores)
        finally:
            free.put(cores)

    pool = ThreadPoolExecutor(num_jobs)
    try:
        for done in as_completed([pool.submit(run, case) for case in wanted]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def alarm_words(clean: list[Line]) -> str:
    """Say how many of the clean runs were called ill while they ran, how many at their end, and how
    many did not even run. Older lines do not tell the first two apart."""
    known = [line for line in clean if "num_live" in line]
    live = sum(line["num_live"] > 0 for line in known)
    at_end = sum(len(line["alarms"]) > line["num_live"] for line in known)
    failed = sum("error" in line for line in clean)
    return f"{live} while it ran, {at_end} at its end, {failed} failed; told by {len(known)}"


def report(lines: list[Line]) -> bool:
    """Print the table and the sums; say whether the goals are met."""
    faults = [line for line in lines if line["kind"] not in (CLEAN, LONG)]
    print(f"{'fault':16}" + "".join(f"{name:>12}" for name in STRATEGIES))
    for kind in dict.fromkeys(line["kind"] for line in faults):
        cells = []
        for strategy in STRATEGIES:
            own = [
                line["right"]
                for line in faults
                if (line["kind"], line["strategy"]) == (kind, strategy)
            ]
            cells.append(f"{sum(own)}/{len(own)}" if own else "")
        print(f"{kind:16}" + "".join(f"{cell:>12}" for cell in cells))
    clean = [line for line in lines if line["kind"] in (CLEAN, LONG)]
    named = sum(line["right"] for line in faults) / len(faults) if faults else 1.0
    alarms = sum(not line["right"] for line in clean) / len(clean) if clean else 0.0
    print(f"named right: {named:.1%} of {len(faults)} (goal {GOAL_NAMED:.0%})")
    print(f"false alarms: {alarms:.1%} of {len(clean)} clean runs (goal at most {GOAL_ALARMS:.0%})")
    if clean:
        print(f"    {alarm_words(clean)}")
    after = [line["after_steps"] for line in faults if line.get("after_steps")]
    if after:
        late = Counter(step > 20 for step in after)[True]
        print(
            f"slow ranks named while it ran: {len(after)}, after {median(after):.0f} steps in the"
            f" median, {late} after more than 20"
        )
    for line in lines:
        if not line["right"]:
            print("not right:", json.dumps(line))
    return named >= GOAL_NAMED and alarms <= GOAL_ALARMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--long", type=int, default=0, help="clean runs of a minute or more")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=[*KINDS, *FURTHER])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument(
        "--out", type=Path, help="lines of JSON; a run that is there is not repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, in processes")
    parser.add_argument("--cores-each", type=int, default=2, help="with several --jobs")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--on", type=int, nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case is not None:
        return run_alone(asked.case, asked.out, set(asked.on))
    lines: list[Line] = []
    if asked.out is not None and asked.out.is_file():
        lines = [json.loads(text) for text in asked.out.read_text().splitlines()]
    done = {key_of(line) for line in lines}
    clean = {CLEAN: asked.clean, LONG: asked.long}
    every = cases(asked.seeds, clean, asked.kinds, asked.strategies)
    wanted = [case for case in every if key_of(case) not in done]
    with tempfile.TemporaryDirectory() as folder:
        for line in iter_lines(wanted, Path(folder), asked.jobs, asked.cores_each):
            lines.append(line)
            print(json.dumps({k: v for k, v in line.items() if k != "found"}), flush=True)
            if asked.out is not None:
                with asked.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    sys.exit(0 if report(lines) else 1)


if __name__ == "__main__":
    main()
