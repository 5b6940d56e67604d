"""Profiled steps and memory on the pages: sentences and tables from their records."""

from dataclasses import dataclass

from paceline.errors import DataError
from paceline.records.memory import MemoryDump
from paceline.records.profiled import ProfileFacts
from paceline.records.rundir import RunDir
from paceline.records.words import count, duration, size

MAX_NAME, LEAST = 90, 0.005
MOMENTS = ("oom", "peak")  # the dumps that are worth a place in the report


@dataclass(frozen=True)
class Sheet:
    """Sentences and a table below a title."""

    title: str
    sentences: list[str]
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def profile_sheets(facts: list[ProfileFacts]) -> list[Sheet]:
    """Return one sheet for each profiled rank: categories in words, the longest kernels as rows."""
    return [_profile_sheet(each) for each in facts]


def _profile_sheet(facts: ProfileFacts) -> Sheet:
    steps = f"steps {facts.first_step} to {facts.last_step}"
    if facts.num_steps == 1:
        steps = f"step {facts.first_step}"
    what = "kernel" if facts.on_device else "operation"
    return Sheet(
        title=f"Profile of rank {facts.rank}, {steps}",
        sentences=list(profile_sentences(facts)),
        columns=(what, "category", "calls", "time", "share"),
        rows=[
            (
                _short(kernel.name),
                kernel.category,
                f"{kernel.count:,}",
                duration(kernel.total_s),
                f"{kernel.share:.1%}",
            )
            for kernel in facts.top
        ],
    )


def profile_sentences(facts: ProfileFacts) -> list[str]:
    """Say where the time of the profiled steps went, and where the trace is."""
    window = facts.window_s or 1.0
    total = sum(facts.categories.values()) or 1.0
    shares = {name: s / total for name, s in facts.categories.items() if s / total >= LEAST}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    where = "the device" if facts.on_device else "the host's operations"
    said = [
        f"{duration(facts.window_s / facts.num_steps)} a step while it was profiled;"
        f" {where}: {parts}.",
        f"Communication {facts.communication_s / window:.1%} of the time, of which nothing hides"
        f" {facts.exposed_s / window:.1%} (exposed {duration(facts.exposed_s / facts.num_steps)} a"
        " step).",
    ]
    if facts.on_device:
        gaps = count(facts.num_launch_gaps, "launch gap")
        said.append(
            f"The device was idle for {facts.idle_s / window:.1%}; {gaps}, in which it waited for"
            f" the host, are {facts.launch_gaps_s / window:.1%}."
        )
    return [*said, f"Trace for ui.perfetto.dev: {facts.trace}"]


def read_memory(run: RunDir, num_ranks: int) -> list[MemoryDump]:
    """Return the dumps of all ranks that ran out of memory, and rank 0's of the peak."""
    found = []
    for moment in MOMENTS:
        for rank in range(num_ranks if moment == "oom" else 1):
            path = run.memory_dump(rank, moment)
            if path.is_file():
                try:
                    found.append(MemoryDump.load(path))
                except DataError:
                    continue
    return found


def memory_sheets(dumps: list[MemoryDump]) -> list[Sheet]:
    titles = {"oom": "What held memory when it ran out", "peak": "What held memory at its peak"}
    return [
        Sheet(
            title=f"{titles.get(dump.moment, dump.moment)}: rank {dump.rank}, step {dump.step}",
            sentences=[dump.sentence() + "."],
            columns=("module", "holds", "bytes"),
            rows=[(o.module, o.kind, size(o.num_bytes)) for o in dump.owners],
        )
        for dump in dumps
    ]


def _short(name: str) -> str:
    """Cut the templates of a C++ kernel, which may be a thousand letters long."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
