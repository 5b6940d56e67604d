"""Pipelines against their formulas, their simulator, and torch.distributed.pipelining by hand.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--quick] [--ranks 2 4] [--schedules zbv ...]

Stages are calibrated: all take the same, and a forward takes at least 20 times as long as the way
of its result to the next rank: the transfer, with the overhead of sending and receiving. On 2
ranks, one a core, they are real matrix products. On 4 ranks, which share 2 cores, they are timed
waits in place of compute, in the forward and in either half of the backward.

Two contenders train the same model from the same weights on the same samples: Paceline with its
whole loop (ledger, heartbeat, telemetry, recorder), and the simplest script around PipelineStage
and Schedule*.step. They take turns: a referee lets one run SEGMENT steps at a time, in an order
that changes every round, and times the slower of its ranks. A race in which losses differ does not
count. Bubbles and stage times are those that Paceline's ranks recorded in the same race.
Goals: the bubble within 3 points of the formula (gpipe, 1f1b, interleaved_1f1b); the simulator, fed
with the run's own times, within 5 % of its median pass; a step at most 1.02x of the hand-written
one; DualPipe holds P + 1 microbatches, and is not slower than 1f1b in the simulator at P=4, M=16,
F = I = W. Where a schedule idles more than its formula says, the reasons are listed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from pipeline_contenders import CONTENDERS, Setup, load_bench, set_turns
from step_overhead import Turns, median_interval

from paceline.machine.facts import probe
from paceline.machine.group import join_group
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records import PipelineFacts
from paceline.records.rundir import RunDir
from paceline.schedules.account import account, times_measured
from paceline.schedules.formulas import EQUAL, bubble_formula
from paceline.schedules.measured import load_measured
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.simulate import pairing_of, simulate

SETUPS = {
    2: Setup(2, 8, "products", rows=128, dim=512),
    4: Setup(4, 16, "waits", rows=8, dim=64),
}
ROUNDS = {"products": 16, "waits": 10}  # waits take longer, and differ less
KINDS = {"products": "real matrix products", "waits": "timed waits in place of compute"}
BY_FORMULA = ("gpipe", "1f1b", "interleaved_1f1b")
MAX_POINTS, MAX_ERROR, MAX_RATIO, MIN_FACTOR, MAX_APART = 3.0, 0.05, 1.02, 20.0, 1e-5
QUICK_ROUNDS, SEGMENT, WARMUP_SEGMENTS, COMPARED = 2, 2, 2, 8


@dataclass(frozen=True)
class Race:
    """One schedule: its contenders take turns, `rounds` times SEGMENT steps each."""

    setup: Setup
    name: str
    rounds: int

    @property
    def contenders(self) -> list[str]:
        return ["paceline"] if self.name == "dualpipe" else list(CONTENDERS)  # torch has none

    @property
    def steps(self) -> int:
        return SEGMENT * (WARMUP_SEGMENTS + self.rounds + 1)

    @property
    def formula(self) -> float:
        """The bubble of equal stages with F = I = W."""
        ranks, parts, pairing = self.setup.ranks, self.setup.microbatches, pairing_of(self.name)
        return bubble_formula(self.name, ranks, parts, EQUAL, pairing=pairing).bubble


@dataclass(frozen=True)
class Outcome:
    """Seconds a step of every segment, the first losses, and what Paceline's ranks recorded."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    facts: PipelineFacts

    @property
    def forward_s(self) -> float:
        """Of the shortest stage."""
        return min(stage.forward_s for stage in self.facts.stages)

    @property
    def way_s(self) -> float:
        """From the end of an action to the start of what waits for it on another rank."""
        return self.facts.overhead_s + self.facts.transfer_s


def contend(race: Race, contender: str, rank: int, folder: Path, referee: Connection) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if race.setup.ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # below Python: the profiler talks in C++
    os.dup2(1, 2)
    set_turns(Turns(referee, SEGMENT))
    place = RankId(rank, rank, race.setup.ranks)
    try:
        store = dist.FileStore(str(folder / "store"), race.setup.ranks)
        join_group("gloo", place, torch.device("cpu"), store, 600)
        losses = CONTENDERS[contender](race.setup, race.name, rank, race.steps, folder)
        referee.send(losses[:COMPARED])
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    os._exit(0)


def run_race(race: Race) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as made:
        lines: dict[str, list[Connection]] = {}
        for name in race.contenders:
            folder = Path(made) / name.replace(" ", "_")
            folder.mkdir()
            pipes = [context.Pipe() for _ in range(race.setup.ranks)]
            for rank, (_, theirs) in enumerate(pipes):
                arguments = (race, name, rank, folder, theirs)
                context.Process(target=contend, args=arguments, daemon=True).start()
                theirs.close()
            lines[name] = [mine for mine, _ in pipes]
        try:
            seconds = take_turns(race, lines)
            losses = {name: turn(ranks) for name, ranks in lines.items()}
        except (EOFError, BrokenPipeError) as error:
            said = [path.read_text() for path in sorted(Path(made).glob("*/error*"))]
            raise SystemExit(f"{race.name}: a contender failed\n" + "\n".join(said)) from error
        return Outcome(seconds, losses, read_facts(race, Path(made) / "paceline"))


def take_turns(race: Race, lines: dict[str, list[Connection]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    draw = random.Random(0)
    for number in range(WARMUP_SEGMENTS + race.rounds):
        for name in draw.sample(list(lines), len(lines)):
            elapsed_s = turn(lines[name])
            if number >= WARMUP_SEGMENTS:
                seconds[name].append(elapsed_s / SEGMENT)
    return seconds


def turn(ranks: list[Connection]) -> Any:
    """The seconds of the slowest rank; of lists of losses, the one that is not empty."""
    for line in ranks:
        line.send("go")
    return max(line.recv() for line in ranks)


def read_facts(race: Race, folder: Path) -> PipelineFacts:
    """As the report of a run makes them of the same files."""
    plan = make_plan(load_bench(race.setup, race.name, race.steps), probe())
    measured = load_measured(RunDir(folder), plan)
    assert measured is not None and plan.pipeline is not None
    return account(measured, plan.pipeline, {})


def predict_s(facts: PipelineFacts) -> float:
    """A pass in the simulator, with the run's own stages, overhead and transfers."""
    schedule = draw_schedule(
        facts.schedule, facts.num_ranks, facts.num_microbatches, facts.stages_per_rank
    )
    times = replace(
        times_measured(facts.stages), overhead_s=facts.overhead_s, transfer_s=facts.transfer_s
    )
    return simulate(schedule, times, pairing_of(facts.schedule)).total_s


class Judge:
    """Prints figures beside their goals, and remembers whether all were met."""

    def __init__(self) -> None:
        self.is_met = True

    def word(self, is_good: bool) -> str:
        self.is_met &= is_good
        return "ok" if is_good else "MISS"

    def judge(self, race: Race, outcome: Outcome) -> None:
        facts = outcome.facts
        factor = outcome.forward_s / outcome.way_s
        calibrated = (
            f"F {outcome.forward_s * 1e3:.1f} ms, {factor:.0f}x of {outcome.way_s * 1e3:.2f}"
        )
        calibrated += f" ms from rank to rank {self.word(factor >= MIN_FACTOR)}"
        print(
            f"{race.name:<17}{facts.pass_s * 1e3:8.1f} ms | {self._bubble(race, facts)} |"
            f" {self._simulated(facts)} | {self._step(outcome)} | {calibrated}",
            flush=True,
        )

    def _bubble(self, race: Race, facts: PipelineFacts) -> str:
        points = 100 * (facts.idle - race.formula)
        word = self.word(abs(points) <= MAX_POINTS) if race.name in BY_FORMULA else ""
        return f"{facts.idle:6.1%} formula {race.formula:5.1%} {points:+5.1f} {word:<4}"

    def _simulated(self, facts: PipelineFacts) -> str:
        predicted_s = predict_s(facts)
        error = predicted_s / facts.pass_s - 1
        return f"{predicted_s * 1e3:7.1f} ms {error:+6.1%} {self.word(abs(error) <= MAX_ERROR):<4}"

    def _step(self, outcome: Outcome) -> str:
        own, hand = outcome.seconds["paceline"], outcome.seconds.get("by hand")
        if hand is None:
            return f"{statistics.median(own) * 1e3:7.1f} ms, {'not in torch':<53}"
        pairs = [a / b for a, b in zip(own, hand, strict=True)]
        low, high = median_interval(pairs)
        losses = zip(outcome.losses["paceline"], outcome.losses["by hand"], strict=True)
        apart = max(abs(a - b) / abs(b) for a, b in losses)
        ratio = statistics.median(pairs)
        return (
            f"{statistics.median(own) * 1e3:7.1f} ms, {ratio:.3f}x [{low:.3f}, {high:.3f}]"
            f" minima {min(own) / min(hand):.3f}x losses {apart:.0e}"
            f" {self.word(ratio <= MAX_RATIO and apart <= MAX_APART):<4}"
        )

    def dualpipe(self, outcome: Outcome) -> None:
        facts = outcome.facts
        held, formula = max(rank.max_in_flight for rank in facts.ranks), facts.num_ranks + 1
        beyond_s = statistics.median(outcome.seconds["paceline"]) - facts.pass_s
        print(
            f"dualpipe: {held} microbatches in flight, P+1 = {formula}"
            f" {self.word(held == formula)}; its steps take {beyond_s * 1e3:.0f} ms beyond their"
            " passes, in which the gradients of its two copies are summed and both are updated"
        )

    def slots(self) -> None:
        dualpipe_s, other_s = (
            simulate(draw_schedule(name, 4, 16), EQUAL, pairing_of(name)).total_s
            for name in ("dualpipe", "1f1b")
        )
        print(
            f"simulator, P=4, M=16, F = I = W = 1: dualpipe {dualpipe_s:g}, 1f1b {other_s:g};"
            f" not slower {self.word(dualpipe_s <= other_s)}"
        )


def reasons(race: Race, facts: PipelineFacts, whole_s: dict[int, float]) -> Iterator[str]:
    """Points of idle time that the formula does not know of, and what a split backward costs."""
    shares = facts.shares
    found = {
        f"{facts.overhead_s * 1e3:.2f} ms of overhead an action": shares.overhead,
        f"{facts.transfer_s * 1e3:.2f} ms a transfer": shares.transfers,
        "jitter, and what is passed on": shares.passed_on,
        "stages that are not even": shares.uneven_stages,
        "actions that are not equal": shares.unequal_actions + shares.formula - race.formula,
    }
    listed = ", ".join(f"{what} {100 * share:+.1f}" for what, share in found.items())
    yield f"{race.name} idles {facts.idle:.1%}, by formula {race.formula:.1%}: {listed}"
    halves = [s.input_s + s.weight_s for s in facts.stages if s.input_s and s.weight_s]
    wholes = [s.backward_s for s in facts.stages if s.backward_s]
    whole = statistics.fmean(wholes) if wholes else whole_s.get(len(facts.stages))
    if halves and whole:
        ratio = statistics.fmean(halves) / whole
        yield f"  the two halves of a backward take {ratio:.2f}x of a whole one"


def run_setup(setup: Setup, names: list[str], rounds: int, judge: Judge) -> None:
    print(
        f"\n{setup.ranks} ranks, {setup.microbatches} microbatches, {KINDS[setup.stuff]},"
        f" {rounds} rounds of {SEGMENT} steps; load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'':<17}{'pass':>8}    | {'bubble':<31} | {'simulated':<22} |"
        f" {'step, and ratio to that by hand':<65} | calibration"
    )
    outcomes: dict[Race, Outcome] = {}
    for name in names:
        race = Race(setup, name, rounds)
        outcomes[race] = run_race(race)
        judge.judge(race, outcomes[race])
    whole_s = {
        len(outcome.facts.stages): statistics.fmean(
            stage.backward_s or 0.0 for stage in outcome.facts.stages
        )
        for race, outcome in outcomes.items()
        if race.name in BY_FORMULA
    }
    for race, outcome in outcomes.items():
        if outcome.facts.idle - race.formula > MAX_POINTS / 100:
            print("\n".join(reasons(race, outcome.facts, whole_s)))
        if race.name == "dualpipe":
            judge.dualpipe(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, help="default: 16 of products, 10 of waits")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(SETUPS), choices=SETUPS)
    parser.add_argument("--schedules", nargs="*", default=list(NAMES), choices=NAMES)
    asked = parser.parse_args()
    multiprocessing.set_forkserver_preload(["pipeline_contenders"])
    judge = Judge()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}")
    judge.slots()
    for ranks in asked.ranks:
        setup = SETUPS[ranks]
        rounds = QUICK_ROUNDS if asked.quick else asked.rounds or ROUNDS[setup.stuff]
        run_setup(setup, asked.schedules, rounds, judge)
    sys.exit(0 if judge.is_met else 1)


if __name__ == "__main__":
    main()
