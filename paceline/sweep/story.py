"""From the judged runs of a sweep to what its summary and page tell: plain data, in order."""

from statistics import fmean
from urllib.parse import quote

from paceline.errors import DataError
from paceline.records import Result
from paceline.records.swept import SweepRecord, SweptCell
from paceline.report.sweep_story import CellLine, RunLine, SweepStory
from paceline.stats.figures import RunFigures
from paceline.stats.standings import Standing, Standings
from paceline.sweep.folder import SweepDir
from paceline.sweep.judge import SweepJudgement
from paceline.sweep.manifest import NOT_THERE, SUCCESS, Row
from paceline.sweep.phases import plain_name


def tell(
    folder: SweepDir, record: SweepRecord, rows: list[Row], judgement: SweepJudgement
) -> SweepStory:
    by_group: dict[str, list[Row]] = {cell.name: [] for cell in record.cells}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    lines = [
        _cell_line(folder, record, cell, by_group[cell.name], judgement)
        for cell in in_order(record, judgement)
    ]
    target = judgement.target
    return SweepStory(
        name=folder.root.name,
        record=record,
        cells=lines,
        rounds=rounds(judgement),
        others=judgement.others,
        winner=judgement.winner,
        target=target.state if target else "",
        target_text=f"Target {target.text}: {target.state}; {target.because}." if target else "",
        notes=judgement.notes,
    )


def rounds(judgement: SweepJudgement) -> list[Standings]:
    """The standings of all phases, the last first."""
    last = [judgement.standings] if judgement.standings else []
    return [*last, *reversed(judgement.earlier)]


def in_order(record: SweepRecord, judgement: SweepJudgement) -> list[SweptCell]:
    """The cells of the standings, phase by phase, then the others as they were drawn."""
    placed = [row.group.name for standings in rounds(judgement) for row in standings.rows]
    known = {cell.name: cell for cell in record.cells}
    rest = [cell for cell in record.cells if cell.name not in placed]
    return [*(known[name] for name in placed if name in known), *rest]


def standing_of(name: str, judgement: SweepJudgement) -> Standing | None:
    """In its own phase. None for a cell without a number, which standings may list too."""
    rows = [row for standings in rounds(judgement) for row in standings.rows]
    return next((row for row in rows if row.group.name == name and row.group.values), None)


def is_winner(name: str, judgement: SweepJudgement) -> bool:
    """One of those that cannot be told apart in the last phase; never one whose loss departs."""
    leading = judgement.standings.winners if judgement.standings else []
    tied = {row.group.name for row in leading} - judgement.flagged.keys()
    return name in tied or name == judgement.winner


def _cell_line(
    folder: SweepDir,
    record: SweepRecord,
    cell: SweptCell,
    rows: list[Row],
    judgement: SweepJudgement,
) -> CellLine:
    standing = standing_of(cell.name, judgement)
    flag = judgement.flagged.get(cell.name, "")
    batches = sorted({row["global_batch"] for row in rows})
    return CellLine(
        cell=cell,
        runs=[_run_line(folder, record, row, judgement) for row in rows],
        standing=standing,
        throughput=_throughput(record, standing, _figures(rows, judgement)),
        peak_bytes=peak_bytes(standing, rows),
        global_batch=" or ".join(batches),
        flag=flag,
        is_winner=is_winner(cell.name, judgement),
        is_chosen=cell.name == judgement.winner,
        is_baseline=plain_name(cell.name) == record.baseline,
    )


def _figures(rows: list[Row], judgement: SweepJudgement) -> list[RunFigures]:
    found = (judgement.figures.get(row["run_dir"]) for row in rows)
    return [figures for figures in found if figures is not None]


def _throughput(
    record: SweepRecord, standing: Standing | None, figures: list[RunFigures]
) -> float | None:
    """What the standings say, where they compare rates; else the mean over the runs."""
    if standing is None:
        return None
    if record.metric != "tail_mean_iter_p50_ms":
        return standing.rate.value if standing.rate else fmean(standing.group.values)
    return fmean(item.samples_per_s for item in figures) if figures else None


def peak_bytes(standing: Standing | None, rows: list[Row]) -> float | None:
    """What the standings order by; of a cell that has none, the most that a run of it took."""
    if standing is not None and standing.group.memory_bytes is not None:
        return standing.group.memory_bytes
    known = [float(row["peak_bytes"]) for row in rows if row["peak_bytes"] not in ("", NOT_THERE)]
    return max(known, default=None)


def _run_line(
    folder: SweepDir, record: SweepRecord, row: Row, judgement: SweepJudgement
) -> RunLine:
    problem = problem_of(folder, record, row, judgement)
    return RunLine(
        repeat=row["repeat"],
        outcome=row["outcome"],
        exit_code=row["exit_code"],
        last_step=row["last_step"],
        href=_href(folder, row),
        figures=judgement.figures.get(row["run_dir"]),
        problem=problem,
        detail=cause_of(folder, row) if problem else "",
    )


def problem_of(folder: SweepDir, record: SweepRecord, row: Row, judgement: SweepJudgement) -> str:
    """Return why a run is not in the comparison; empty where it is."""
    if row["status"] != SUCCESS:
        return "run_failed"
    figures = judgement.figures.get(row["run_dir"])
    if figures is not None and figures.value(record.metric) is not None:
        return ""
    has_log = folder.run(row).train_log.is_file()
    return "no_timing_points" if has_log else "train_log_missing"


def cause_of(folder: SweepDir, row: Row) -> str:
    """The root cause that the run's own record names, in one line."""
    try:
        failure = Result.load(folder.run(row).result).failure
    except DataError:
        return "it left no result"
    if failure is None:
        return ""
    return f"rank {failure.rank} on {failure.host}: {' '.join(failure.message.split())}"


def _href(folder: SweepDir, row: Row) -> str:
    """Its report; of a run that has none, its directory."""
    run = folder.run(row)
    if run.report.is_file():
        return quote(f"{row['run_dir']}/{run.report.name}")
    return quote(f"{row['run_dir']}/") if run.root.is_dir() else ""
