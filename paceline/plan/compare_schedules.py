"""`paceline plan --schedule`: compares pipeline schedules for a job, by simulation.

job, env -> the record `ScheduleComparison`. Needs no GPU, and no process group: any number of ranks
and microbatches. Where each number comes from is part of the record.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.config.schema import RunConfig
from paceline.errors import ConfigError
from paceline.job import Job
from paceline.machine.datasheets import choose_arithmetic
from paceline.machine.topology import Topology
from paceline.plan.batch import split_batch
from paceline.plan.costs import CountedBlock, Speed, choose_link, choose_rate, count_blocks
from paceline.plan.crew import choose_crew, choose_threads
from paceline.plan.planner import measure_model
from paceline.plan.policy import choose_attention, choose_precision, effective_config
from paceline.records import (
    Crew,
    Env,
    Finding,
    NeededMicrobatches,
    ScheduleComparison,
    ScheduleRow,
    Sourced,
)
from paceline.records.words import duration, size
from paceline.schedules.choose import (
    Block,
    Candidate,
    Setup,
    compare_schedules,
    find_microbatches,
)
from paceline.schedules.formulas import EQUAL
from paceline.schedules.orders import NAMES, draw_schedule, require_name
from paceline.schedules.requirements import SPLIT_BACKWARDS
from paceline.schedules.simulate import simulate
from paceline.schedules.sources import BlockTimes, load_measured_times, load_times_file
from paceline.schedules.timeline import draw_text
from paceline.strategies.base import Share
from paceline.strategies.pipeline.plan import (
    PipelineSettings,
    count_microbatches,
    ranks_of_pipeline,
)
from paceline.workloads.returns import require_sound

MAX_DRAWN_RANKS, MAX_DRAWN_MICROBATCHES = 8, 16
SLOW = 2048  # ranks times microbatches from which simulating takes a person's time
MEMORY_SOURCE = (
    "activations are what goes in and out of each matrix in the compute type, state is weights,"
    " gradients and optimizer"
)


@dataclass(frozen=True)
class Question:
    """What is asked besides the job. `times`: a file or a run directory; None: counted."""

    names: tuple[str, ...] = NAMES
    times: Path | None = None
    bubble: float = 0.1


def read_names(text: str) -> tuple[str, ...]:
    """Read `all`, or names with commas between them; refuse all that are not schedules."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("all",):
        return NAMES
    problems = []
    for name in names or ("",):
        try:
            require_name(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return names


def compare_for(
    job: Job, env: Env, topology: Topology, question: Question, say: Callable[[str], None]
) -> ScheduleComparison:
    """Compare every schedule that was asked for, in the order of `compare_schedules`."""
    if not 0 < question.bubble < 1:
        raise ConfigError(
            f"--bubble {question.bubble:g} is not a share of a step\nhint: --bubble 0.1 is 10 %"
        )
    config = job.config
    require_sound(job.workload, config)
    crew = choose_crew(config.launch, env, topology)
    num_ranks = _count_ranks(config, crew.world_size)
    cut, findings = cut_batch(config, num_ranks)
    blocks, sources, setup = _measure(job, env, crew, cut, question)
    setup = replace(setup, blocks=tuple(blocks))
    if num_ranks * cut.num_microbatches > SLOW:
        say(
            f"simulating {num_ranks} ranks with {cut.num_microbatches} microbatches: a minute or so"
        )
    candidates = compare_schedules(setup, question.names)
    rows = _rows(setup, candidates, question.bubble)
    return ScheduleComparison(
        name=config.name,
        workload=config.workload,
        num_ranks=num_ranks,
        num_pipelines=crew.world_size // num_ranks,
        num_microbatches=cut.num_microbatches,
        samples_per_microbatch=cut.samples,
        num_blocks=len(blocks),
        target_bubble=question.bubble,
        block_forward_s=[block.forward_s for block in blocks],
        block_input_s=[block.input_s for block in blocks],
        block_weight_s=[block.weight_s for block in blocks],
        transfer_s=setup.transfer_s,
        overhead_s=setup.overhead_s,
        memory_bytes=None if setup.memory_bytes == float("inf") else setup.memory_bytes,
        sources=sources,
        schedules=rows,
        drawing=_draw(setup, rows),
        findings=[*findings, *_idle_settings(config), *_compiled(config, question.names)],
    )


def _compiled(config: RunConfig, names: Sequence[str]) -> Iterator[Finding]:
    split = [name for name in names if name in SPLIT_BACKWARDS]
    if config.train.compile != "off" and split:
        yield Finding.warning(
            "train.compile",
            f"{', '.join(split)} cannot run compiled blocks: their times are without it",
            hint="set train.compile=off for them",
        )


def _count_ranks(config: RunConfig, world: int) -> int:
    """Return the ranks of one pipeline: all, or as many as `strategy.stages` asks for."""
    ranks = ranks_of_pipeline(config, world)
    if ranks < 2:
        raise ConfigError(
            f"a pipeline of {ranks} rank has no other rank to send to\n"
            "hint: set launch.nproc to 2 or more: any number can be planned for here"
        )
    if world % ranks:
        near = min((n for n in range(2, world + 1) if world % n == 0), key=lambda n: abs(n - ranks))
        raise ConfigError(
            f"strategy.stages={PipelineSettings.of(config).stages} needs {ranks} ranks for each"
            f" pipeline, and {world} are not a multiple\nhint: choose it for {near} ranks"
        )
    return ranks


@dataclass(frozen=True)
class Cut:
    """A batch cut into microbatches."""

    num_microbatches: int
    samples: int


def cut_batch(config: RunConfig, num_ranks: int) -> tuple[Cut, list[Finding]]:
    """Cut the batch as `train` would with `strategy.schedule`. What `train` refuses to cut is
    simulated as if the batch had the size that it needs."""
    micro, wanted = config.train.micro_batch_size, count_microbatches(config, num_ranks)
    samples = max(1, round(micro / wanted))
    if micro == samples * wanted:
        return Cut(wanted, samples), []
    divisors = [m for m in range(1, micro + 1) if micro % m == 0]
    near = min(divisors, key=lambda m: (abs(m - wanted), -m))
    finding = Finding.warning(
        "train.micro_batch_size",
        f"{micro} samples cannot be cut into {wanted} equal microbatches; simulated as if they"
        f" were {samples * wanted}",
        hint=f"set it to {samples * wanted}, or strategy.microbatches to {near}",
    )
    return Cut(wanted, samples), [finding]


def _measure(
    job: Job, env: Env, crew: Crew, cut: Cut, question: Question
) -> tuple[list[Block], list[Sourced], Setup]:
    """Return blocks with times and bytes of one microbatch, where these come from, and the rest
    of what the simulator needs."""
    config, workload = job.config, job.workload
    precision = choose_precision(config, env, crew.device).value
    attention = choose_attention(config, env, crew, precision, workload).value
    model = measure_model(workload, effective_config(config, attention))
    num_ranks = _count_ranks(config, crew.world_size)
    batch, _ = split_batch(config, crew.world_size // num_ranks)
    share = Share(batch.dp, None, 4 if precision == "fp32" else 2, batch.grad_accum)
    counted, how = count_blocks(workload, config, model, share)
    if not counted:
        raise ConfigError(
            "the model has no blocks to cut between\n"
            "hint: put its repeated layers into an nn.ModuleList, and call each of them"
        )
    arithmetic = choose_arithmetic(env, crew.device.value, precision, config.precision.matmul)
    threads = choose_threads(config.launch, env, crew, 0).value
    rate = choose_rate(env, crew, arithmetic, threads, config.observe.peak_flops)
    link = choose_link(env, crew)
    times, kind = _load_times(question.times, counted, cut)
    if times is None:
        times = _count_times(counted, cut, rate, how)
    sources = [Sourced(what="times", kind=kind, because=times.because)]
    sources += [rate.source] if kind == "counted" else []
    sources += [Sourced(what="times", kind=kind, because=note) for note in times.notes]
    setup, more = _surroundings(times, kind, counted, cut, link, _memory(env, crew))
    setup = replace(setup, num_ranks=num_ranks)
    return _blocks(times, counted, cut), sources + more, setup


Kinds = Literal["given", "measured", "counted"]


def _load_times(
    source: Path | None, counted: Sequence[CountedBlock], cut: Cut
) -> tuple[BlockTimes | None, Kinds]:
    if source is None:
        return None, "counted"
    if source.is_dir():
        costs = [block.flops for block in counted]
        return load_measured_times(source, costs, cut.samples), "measured"
    return load_times_file(source, len(counted)), "given"


def _count_times(counted: Sequence[CountedBlock], cut: Cut, rate: Speed, how: str) -> BlockTimes:
    scale = cut.samples / rate.per_s
    return BlockTimes(
        [block.forward_flops * scale for block in counted],
        [block.input_flops * scale for block in counted],
        [block.weight_flops * scale for block in counted],
        because=f"{how}, {cut.samples} per microbatch, over the rate; host work is free",
    )


def _surroundings(
    times: BlockTimes,
    kind: Kinds,
    counted: Sequence[CountedBlock],
    cut: Cut,
    link: Speed,
    memory: tuple[float, Sourced],
) -> tuple[Setup, list[Sourced]]:
    """Return transfers, overhead and memory: from where the times are from, or counted."""
    limit, limit_source = memory
    sources = []
    if times.transfer_s is not None:
        transfer_s = times.transfer_s
        because = f"{duration(transfer_s, 4)} per microbatch, from where the times are from"
        sources.append(Sourced(what="transfers", kind=kind, because=because))
    else:
        sent = max(block.sent_bytes for block in counted) * cut.samples
        transfer_s = sent / link.per_s
        because = f"{size(sent)} of activations from rank to rank over the link"
        sources += [Sourced(what="transfers", kind="counted", because=because), link.source]
    if times.activation_bytes is None or times.state_bytes is None:
        sources.append(Sourced(what="memory", kind="counted", because=MEMORY_SOURCE))
    if times.memory_bytes is not None:
        limit = times.memory_bytes
        limit_source = Sourced(what="memory of a rank", kind="given", because=times.because)
    setup = Setup((), 0, cut.num_microbatches, transfer_s, times.overhead_s or 0.0, limit)
    return setup, [*sources, limit_source]


def _memory(env: Env, crew: Crew) -> tuple[float, Sourced]:
    """Return the bytes that a rank may use, where it has a device of its own."""
    if crew.on_gpu and env.gpus:
        smallest = min(gpu.memory_bytes for gpu in env.gpus)
        because = f"{size(smallest)}, the smallest GPU here"
        return smallest, Sourced(what="memory of a rank", kind="measured", because=because)
    because = "not limited: no GPU is looked at; memory_bytes in a --times file states it"
    return float("inf"), Sourced(what="memory of a rank", kind="assumed", because=because)


def _blocks(times: BlockTimes, counted: Sequence[CountedBlock], cut: Cut) -> list[Block]:
    held = times.activation_bytes or [block.activation_bytes * cut.samples for block in counted]
    state = times.state_bytes or [block.state_bytes for block in counted]
    whole: Sequence[float | None] = times.backward_s or [None] * len(counted)
    columns = (times.forward_s, times.input_s, times.weight_s, held, state, whole)
    return [Block(*row) for row in zip(*columns, strict=True)]


def _rows(setup: Setup, candidates: Sequence[Candidate], bubble: float) -> list[ScheduleRow]:
    fitting = [candidate.step_s for candidate in candidates if candidate.status == "fits"]
    best_s = min(fitting, default=None)
    return [_row(setup, candidate, best_s, bubble) for candidate in candidates]


def _row(setup: Setup, candidate: Candidate, best_s: float | None, bubble: float) -> ScheduleRow:
    timeline, formula = candidate.timeline, candidate.formula
    if timeline is None or formula is None:
        return ScheduleRow(
            name=candidate.name,
            stages_per_rank=candidate.stages_per_rank,
            status=candidate.status,
            because=candidate.because,
        )
    needed = find_microbatches(setup, candidate.name, bubble)
    most = max(candidate.peak_bytes)
    share = setup.num_ranks / timeline.schedule.num_stages
    return ScheduleRow(
        name=candidate.name,
        stages_per_rank=candidate.stages_per_rank,
        status=candidate.status,
        because=candidate.because,
        step_s=candidate.step_s,
        against_best=candidate.step_s / best_s - 1 if best_s else None,
        bubble=timeline.bubble,
        formula=formula.text,
        formula_bubble=formula.bubble,
        formula_source=formula.source,
        is_exact=formula.is_exact,
        peak_bytes=most,
        fullest_rank=candidate.peak_bytes.index(most),
        in_flight=max(rank.max_in_flight for rank in timeline.ranks) * share,
        parameter_copies=timeline.schedule.num_copies,
        needed=NeededMicrobatches(
            num_microbatches=needed.num_microbatches,
            bubble=needed.bubble,
            because=needed.because,
        ),
    )


def _draw(setup: Setup, rows: Sequence[ScheduleRow]) -> str:
    """Draw the order of the best schedule in equal slots: real times do not fall into columns."""
    best = next((row for row in rows if row.status == "fits"), None)
    is_small = (
        setup.num_ranks <= MAX_DRAWN_RANKS and setup.num_microbatches <= MAX_DRAWN_MICROBATCHES
    )
    if best is None or not is_small:
        return ""
    schedule = draw_schedule(best.name, setup.num_ranks, setup.num_microbatches)
    return draw_text(simulate(schedule, EQUAL))


def _idle_settings(config: RunConfig) -> list[Finding]:
    """Report keys that one schedule has and a comparison of all does not read."""
    strategy, found = PipelineSettings.of(config), []
    why = {
        "stages_per_rank": "each schedule is compared with the stages that it has by itself",
        "split": "each schedule is compared with stages split by cost",
    }
    for key, because in why.items():
        if getattr(strategy, key) != "auto":
            what = f"is set but has no effect on --schedule: {because}"
            found.append(Finding.note(f"strategy.{key}", what))
    return found
