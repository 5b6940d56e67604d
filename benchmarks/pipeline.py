"""Pipelines against their formulas, their simulator, and torch.distributed.pipelining by hand.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--quick] [--ranks 2 4] [--schedules zbv ...]

Stages are calibrated: all take the same, and a forward takes at least 20 times as long as its result
travels. On 2 ranks, one a core, they are real matrix products. On 4 ranks, which share 2 cores, they
are timed waits in place of compute, in the forward and in either half of the backward.

Two contenders train the same model from the same weights on the same samples: Paceline with its
whole loop (ledger, heartbeat, telemetry, recorder), and the simplest script around PipelineStage and
Schedule*.step. They take turns: a referee lets one run SEGMENT steps at a time, in an order that
changes every round, and times the slower of its ranks. Losses that differ do not count. Figures of a
schedule come from the passes that Paceline's ranks recorded in the same race.
Goals: bubble within 3 points of the formula (gpipe, 1f1b, interleaved_1f1b); the simulator, fed with
the run's own times, within 5 % of its passes; a step at most 1.02x of the hand-written one; DualPipe
holds P + 1 microbatches, and is not slower than 1f1b in the simulator at P=4, M=16, F = I = W.
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
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from step_overhead import Turns, median_interval
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from paceline import Workload
from paceline.cluster.facts import probe
from paceline.cluster.group import Place, join_group
from paceline.config.load import dump_config
from paceline.config.schema import Positive, Section
from paceline.data.cursor import Order, StepSlice
from paceline.job import Job, load_job
from paceline.pipeline.account import account, times_measured
from paceline.pipeline.formulas import EQUAL, bubble_formula
from paceline.pipeline.measured import load_measured
from paceline.pipeline.schedules import NAMES, draw_schedule
from paceline.pipeline.simulate import pairing_of, simulate
from paceline.plan.planner import make_plan
from paceline.records import PipelineFacts
from paceline.rundir import RunDir
from paceline.strategies.pipeline.by_torch import SEVERAL, SINGLE
from paceline.tables import read_training
from paceline.train.worker import RankRun

SEED, LR, CLIP, COMPARED, SAMPLES, WARMUP_SEGMENTS = 0, 1e-3, 1.0, 8, 64, 2
BY_FORMULA = ("gpipe", "1f1b", "interleaved_1f1b")
MAX_POINTS, MAX_ERROR, MAX_RATIO, MIN_CALIBRATION = 3.0, 0.05, 1.02, 20.0
TURNS: Turns


@dataclass(frozen=True)
class Setup:
    """`blocks` are two a rank, so that one model serves schedules with one and with two stages."""

    ranks: int
    microbatches: int
    stuff: str
    rows: int
    dim: int

    @property
    def model(self) -> dict[str, Any]:
        return {"blocks": 2 * self.ranks, "stuff": self.stuff, "rows": self.rows, "dim": self.dim}


SETUPS = {
    2: Setup(2, 8, "products", rows=64, dim=512),
    4: Setup(4, 16, "waits", rows=8, dim=64),
}
LINEARS, WAIT_S = 16, 0.008  # in a block: matrix products; seconds of each third


class Model(Section):
    blocks: Positive = 4
    stuff: str = "products"
    rows: Positive = 64
    dim: Positive = 512


class Scale(nn.Module):
    """Before the blocks, so that the first one has a gradient of its inputs to compute too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Products(nn.Module):
    """A forward, an input backward and a weight backward of the same matrix products."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(dim, dim) * dim**-0.5 for _ in range(LINEARS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight)
        return x


class WaitForInput(torch.autograd.Function):
    """Waits in forward, and in the backward of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return gradient


class WaitForWeight(torch.autograd.Function):
    """Waits in the backward of the weights: a branch of its own, so that halves can run apart."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return gradient


class Waits(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return WaitForInput.apply(x) + WaitForWeight.apply(self.weight)


class Stack(nn.Module):
    def __init__(self, blocks: int, stuff: str, dim: int) -> None:
        super().__init__()
        kind = {"products": Products, "waits": Waits}[stuff]
        self.stem = Scale(dim)
        self.blocks = nn.ModuleList(kind(dim) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Rows:
    """A sample is a matrix: one microbatch."""

    def __init__(self, rows: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, rows, dim, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]

    def batch(self, indices: Any) -> Tensor:
        TURNS.tick()
        return self.x[indices]


class Bench(Workload):
    Model = Model

    def build_model(self, config: Any) -> nn.Module:
        torch.manual_seed(SEED)
        return Stack(config.model.blocks, config.model.stuff, config.model.dim)

    def build_data(self, config: Any, split: str) -> Rows | None:
        return Rows(config.model.rows, config.model.dim) if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum(), len(batch)

    def flops(self, config: Any) -> float:
        return 1.0


class Part(nn.Module):
    """A stage as one writes it by hand."""

    def __init__(self, model: Stack, index: int, num_stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // num_stages
        own = list(model.blocks)[index * each : (index + 1) * each]
        self.layers = nn.Sequential(*([model.stem] if index == 0 else []), *own)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def by_hand(setup: Setup, name: str, rank: int, steps: int, folder: Path) -> list[float]:
    """torch.distributed.pipelining by its public API, and nothing else."""
    torch.manual_seed(SEED)
    model = Stack(setup.model["blocks"], setup.stuff, setup.dim)
    homes = draw_schedule(name, setup.ranks, setup.microbatches).homes[0]
    own = [index for index, home in enumerate(homes) if home == rank]
    has_first, has_last = 0 in own, len(homes) - 1 in own
    parts = [Part(model, index, len(homes)) for index in own]
    stages = [
        PipelineStage(part, index, len(homes), torch.device("cpu"))
        for part, index in zip(parts, own, strict=True)
    ]
    settings = {
        "n_microbatches": setup.microbatches,
        "loss_fn": lambda output, target: output.square().sum() / setup.microbatches,
        "scale_grads": False,
    }
    kind = SINGLE.get(name) or SEVERAL[name]
    schedule = kind(stages[0] if name in SINGLE else stages, **settings)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR, fused=True)
    data, order = Rows(setup.rows, setup.dim), Order(SAMPLES, SEED)
    losses = []
    for step in range(steps):
        x = data.batch(order.at(StepSlice(setup.microbatches, 1, 1, 0).positions(step)))
        target = torch.zeros(setup.microbatches) if has_last else None
        made: list[Tensor] = []
        schedule.step(
            *([x] if has_first else []), target=target, losses=made, return_outputs=False
        )
        squared = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(sum(float(loss.detach()) for loss in made))
    return losses if has_last else []


def load_bench(setup: Setup, name: str, steps: int) -> Job:
    overrides = [
        f"train.steps={steps}", f"train.micro_batch_size={setup.microbatches}",
        "optim.name=sgd", f"optim.lr={LR}", "optim.weight_decay=0", f"optim.clip={CLIP}",
        "optim.schedule.name=constant", "data.num_workers=0",
        f"launch.nproc={setup.ranks}", "launch.device=cpu",
        "strategy.name=pipeline", f"strategy.schedule={name}", "strategy.split=layers",
        f"strategy.microbatches={setup.microbatches}",
        *(f"model.{key}={value}" for key, value in setup.model.items()),
    ]  # fmt: skip
    return load_job(f"{__file__}:Bench", overrides)


def ours(setup: Setup, name: str, rank: int, steps: int, folder: Path) -> list[float]:
    job = load_bench(setup, name, steps)
    sys.modules["paceline_job_pipeline"].TURNS = TURNS  # type: ignore[attr-defined]
    run = RunDir(folder)
    run.config.write_text(dump_config(job.config))
    RankRun(job, make_plan(job, probe()), run, Place(rank, rank, setup.ranks)).execute()
    return [row.loss for row in read_training(run.training)] if rank == 0 else []


CONTENDERS: dict[str, Callable[[Setup, str, int, int, Path], list[float]]] = {
    "by hand": by_hand,
    "paceline": ours,
}


@dataclass(frozen=True)
class Race:
    """`segment` steps at a time, `rounds` times each."""

    setup: Setup
    name: str
    rounds: int
    segment: int

    @property
    def contenders(self) -> list[str]:
        return ["paceline"] if self.name == "dualpipe" else list(CONTENDERS)  # torch has none

    @property
    def steps(self) -> int:
        return self.segment * (WARMUP_SEGMENTS + self.rounds + 1)


def contend(race: Race, contender: str, rank: int, folder: Path, referee: Connection) -> None:
    global TURNS
    if race.setup.ranks <= len(cores := sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # below Python too: the profiler talks in C++
    os.dup2(1, 2)
    TURNS = Turns(referee, race.segment)
    place = Place(rank, rank, race.setup.ranks)
    try:
        store = dist.FileStore(str(folder / "store"), race.setup.ranks)
        join_group("gloo", place, torch.device("cpu"), store, 600)
        losses = CONTENDERS[contender](race.setup, race.name, rank, race.steps, folder)
        referee.send(losses[:COMPARED])
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    os._exit(0)


@dataclass(frozen=True)
class Outcome:
    """Seconds a step of every segment, the first losses, and what ranks recorded."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    facts: PipelineFacts


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
            losses = {name: turn(ranks, max) for name, ranks in lines.items()}
        except EOFError as error:
            said = [path.read_text() for path in sorted(Path(made).glob("*/error*"))]
            raise SystemExit(f"{race.name}: a contender failed\n{said[0] if said else ''}") from error
        return Outcome(seconds, losses, read_facts(race, Path(made) / "paceline"))


def take_turns(race: Race, lines: dict[str, list[Connection]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    draw = random.Random(0)
    for number in range(WARMUP_SEGMENTS + race.rounds):
        for name in draw.sample(list(lines), len(lines)):
            elapsed_s = turn(lines[name], max)
            if number >= WARMUP_SEGMENTS:
                seconds[name].append(elapsed_s / race.segment)
    return seconds


def turn(ranks: list[Connection], reduce: Callable[[list[Any]], Any]) -> Any:
    for line in ranks:
        line.send("go")
    return reduce([line.recv() for line in ranks])


def read_facts(race: Race, folder: Path) -> PipelineFacts:
    """As the report of a run makes them of the same files."""
    plan = make_plan(load_bench(race.setup, race.name, race.steps), probe())
    measured = load_measured(RunDir(folder), plan)
    assert measured is not None and plan.pipeline is not None
    return account(measured, plan.pipeline, {})


class Judge:
    """Prints figures beside their goals, and remembers whether all were met."""

    def __init__(self) -> None:
        self.is_met = True

    def word(self, is_good: bool) -> str:
        self.is_met &= is_good
        return "ok" if is_good else "MISS"

    def race(self, race: Race, outcome: Outcome) -> None:
        facts, name = outcome.facts, race.name
        parts = [f"  {name:<17} pass {facts.pass_s * 1e3:6.1f} ms", self._bubble(race, facts)]
        parts += [self._simulated(facts), self._ratio(outcome)]
        print("  ".join(parts), flush=True)

    def _bubble(self, race: Race, facts: PipelineFacts) -> str:
        formula = bubble_of(race)
        points = 100 * (facts.idle - formula)
        word = f" {self.word(abs(points) <= MAX_POINTS)}" if race.name in BY_FORMULA else ""
        return f"bubble {facts.idle:6.1%} formula {formula:6.1%} {points:+5.1f}{word:<5}"

    def _simulated(self, facts: PipelineFacts) -> str:
        predicted_s = predict_s(facts)
        error = predicted_s / facts.pass_s - 1
        return f"simulated {predicted_s * 1e3:6.1f} ms {error:+5.1%} {self.word(abs(error) <= MAX_ERROR):<4}"

    def _ratio(self, outcome: Outcome) -> str:
        own, hand = outcome.seconds["paceline"], outcome.seconds.get("by hand")
        if hand is None:
            return f"step {statistics.median(own) * 1e3:6.1f} ms, not in torch"
        pairs = [a / b for a, b in zip(own, hand, strict=True)]
        low, high = median_interval(pairs)
        ratio = statistics.median(pairs)
        both = zip(outcome.losses["paceline"], outcome.losses["by hand"], strict=True)
        apart = max(abs(a - b) / abs(b) for a, b in both)
        word = self.word(ratio <= MAX_RATIO and apart <= 1e-5)
        return (
            f"step {ratio:.3f}x [{low:.3f}, {high:.3f}] of {statistics.median(hand) * 1e3:6.1f} ms"
            f" by hand, minima {min(own) / min(hand):.3f}x, losses within {apart:.0e} {word}"
        )

    def dualpipe(self, race: Race, facts: PipelineFacts) -> None:
        held = [rank.max_in_flight for rank in facts.ranks]
        drawn = [rank.in_flight_limit for rank in facts.ranks]
        formula = race.setup.ranks + 1
        print(
            f"  dualpipe holds at most {held} microbatches on its ranks; its schedule {drawn};"
            f" formula P+1 = {formula} {self.word(max(held) <= formula)}"
        )

    def slots(self) -> None:
        ours, other = (
            simulate(draw_schedule(name, 4, 16), EQUAL, pairing_of(name)).total_s
            for name in ("dualpipe", "1f1b")
        )
        print(
            f"simulator, P=4, M=16, F = I = W: dualpipe {ours:g} slots, 1f1b {other:g}:"
            f" not slower {self.word(ours <= other)}"
        )


def bubble_of(race: Race) -> float:
    """Of equal stages with F = I = W."""
    setup, pairing = race.setup, pairing_of(race.name)
    formula = bubble_formula(race.name, setup.ranks, setup.microbatches, EQUAL, pairing=pairing)
    return formula.bubble


def predict_s(facts: PipelineFacts) -> float:
    """The simulator on the run's own stages, with its overhead and transfers."""
    schedule = draw_schedule(
        facts.schedule, facts.num_ranks, facts.num_microbatches, facts.stages_per_rank
    )
    times = replace(
        times_measured(facts.stages), overhead_s=facts.overhead_s, transfer_s=facts.transfer_s
    )
    return simulate(schedule, times, pairing_of(facts.schedule)).total_s


def reasons(race: Race, facts: PipelineFacts, whole_s: dict[int, float]) -> Iterator[str]:
    """Where idle time comes from that the formula does not know of; what a split backward costs."""
    shares = facts.shares
    named = {
        "actions that are not equal": shares.unequal_actions,
        "stages that are not even": shares.uneven_stages,
        f"overhead of {facts.overhead_s * 1e3:.2f} ms an action": shares.overhead,
        f"transfers of {facts.transfer_s * 1e3:.2f} ms": shares.transfers,
        "waits passed on": shares.passed_on,
    }
    listed = ", ".join(f"{what} {100 * share:+.1f}" for what, share in named.items())
    yield f"    {race.name}: formula {shares.formula:.1%} of its own times; points: {listed}"
    halves = [s.input_s + s.weight_s for s in facts.stages if s.input_s and s.weight_s]
    whole = whole_s.get(len(facts.stages))
    if halves and whole:
        ratio = statistics.fmean(halves) / whole
        yield f"    {race.name}: the halves of a backward take {ratio:.2f}x of a whole one"


def judge_setup(setup: Setup, names: list[str], rounds: int, judge: Judge) -> None:
    kind = "real matrix products" if setup.stuff == "products" else "timed waits, no compute"
    print(f"\n{setup.ranks} ranks, {setup.microbatches} microbatches, {kind}:")
    outcomes: dict[str, tuple[Race, Outcome]] = {}
    for name in names:
        race = Race(setup, name, rounds, segment=2)
        outcomes[name] = race, run_race(race)
        judge.race(*outcomes[name])
    whole_s = {
        len(outcome.facts.stages): statistics.fmean(s.backward_s for s in outcome.facts.stages if s.backward_s)
        for race, outcome in outcomes.values()
        if race.name in BY_FORMULA
    }
    for name, (race, outcome) in outcomes.items():
        facts = outcome.facts
        if facts.idle - bubble_of(race) > MAX_POINTS / 100:
            print("\n".join(reasons(race, facts, whole_s)))
        if name == "dualpipe":
            judge.dualpipe(race, facts)
        forward_s = min(stage.forward_s for stage in facts.stages)
        factor = forward_s / facts.transfer_s if facts.transfer_s else float("inf")
        print(f"  calibration {name}: forward {forward_s*1e3:.1f} transfer {facts.transfer_s*1e3:.2f} overhead {facts.overhead_s*1e3:.2f} {factor:.0f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(SETUPS))
    parser.add_argument("--schedules", nargs="*", default=list(NAMES), choices=NAMES)
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["paceline.train.worker", "torch.distributed.pipelining"])
    judge = Judge()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    judge.slots()
    for ranks in arguments.ranks:
        rounds = 3 if arguments.quick else arguments.rounds
        judge_setup(SETUPS[ranks], arguments.schedules, rounds, judge)
    sys.exit(0 if judge.is_met else 1)


if __name__ == "__main__":
    main()
