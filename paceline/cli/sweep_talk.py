"""What a person sees of a sweep: a live table on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from paceline.cli.talk import ConsoleTalk, say_failure, shown
from paceline.records import Plan, Result
from paceline.records.swept import SweepRecord
from paceline.report.story import duration
from paceline.rundir import RunDir
from paceline.sweep.board import Board
from paceline.sweep.flow import SweepEnd
from paceline.sweep.folder import SweepDir
from paceline.sweep.phases import describe_schedule
from paceline.sweep.spec import SweepSpec

PLAIN_INTERVAL_S = 5.0
MAX_LINES = 30  # of a live table: one that is higher than the terminal cannot be redrawn
UNITS = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tail_mean_iter_p50_ms": "ms",
}


class SweepConsole(ConsoleTalk):
    """A talk whose runs are lines of one table."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._board: Board | None = None
        self._now = ""  # the heartbeat of the live run
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Every cell would say the same of the machine: once is enough."""
        if text not in self._said:
            self._said.add(text)
            super().say(text)

    def plan(self, spec: SweepSpec, record: SweepRecord) -> None:
        refused = [cell for cell in record.cells if cell.refusal]
        for cell in refused:
            self.say(f"refused: {cell.name}: {cell.refusal}")
        for line in describe_schedule(spec, record.cells):
            self.say(line)
        self.say(
            f"compared by {record.metric}, differences below {record.margin:.1%} do not matter"
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield
        self._live = None

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        self._last_line_at = time.monotonic()
        return lambda row: self._heartbeat(row, plan)

    def trained(self) -> None:
        self._now = ""

    def _heartbeat(self, row: dict[str, str], plan: Plan) -> None:
        step, step_s = int(row["step"]), float(row["step_s"])
        left_s = (plan.steps - step) * step_s
        self._now = f"step {step}/{plan.steps}  {step_s * 1000:.1f} ms  {left_s:.0f} s left"
        if self._live is not None:
            self._redraw()
        elif time.monotonic() - self._last_line_at >= PLAIN_INTERVAL_S:
            self._last_line_at = time.monotonic()
            super().say(f"    {self._now}")

    def board(self, board: Board) -> None:
        self._board = board
        if self._live is not None:
            self._redraw()
        elif board.running:
            super().say(
                f"[{board.num_ended + 1}/{board.num_asked}] {board.running}, repeat {board.repeat}"
            )
        else:
            super().say(f"    {_status(board)}")

    def failed(self, cell: str, repeat: int, result: Result) -> None:
        super().say(f"{cell}, repeat {repeat}:")
        say_failure(self, result)

    def conclude(self, end: SweepEnd, folder: SweepDir) -> None:
        super().say("")
        if end.stopped_by:
            super().say(
                f"stopped ({end.stopped_by}): this is what there is so far; the same command with"
                f" --out {shown(folder.root)} goes on"
            )
        for line in answer(end):
            super().say(line)
        super().say(f"summary: {shown(folder.summary)}")
        super().say(f"report: {shown(folder.report)}")

    def _redraw(self) -> None:
        assert self._live is not None and self._board is not None
        self._live.update(_table(self._board, self._now))


def figure(value: float) -> str:
    """`12,345`, `8.27`: four digits, never in powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def answer(end: SweepEnd) -> list[str]:
    """The standings and the target, in a few lines."""
    judged, record = end.judgement, end.record
    lines = []
    if judged.standings is None:
        lines.append("no run could be measured, so nothing can be compared")
    else:
        unit = UNITS[record.metric]
        against = f"against {judged.standings.reference}"
        lines.append(f"compared by {record.metric}, {against}:")
        for row in judged.standings.rows:
            speed = f"{row.speedup.value:.3f}x" if row.speedup else ""
            rate = f"{figure(row.rate.value)} {unit}" if row.rate else ""
            runs = f"n={len(row.group.values)}"
            mark = "*" if row.is_winner and row.group.name not in judged.flagged else " "
            lines.append(f" {mark} {row.group.name}  {rate}  {speed}  {row.verdict} ({runs})")
        num = len(judged.standings.winners)
        lines.append("* the best" if num == 1 else f"* these {num} cannot be told apart")
    lines += [f"not crowned: {name}: {why}" for name, why in judged.flagged.items()]
    lines += [f"note: {note}" for note in judged.notes]
    if judged.winner:
        lines.append(f"winner: {judged.winner}")
    if judged.target:
        lines.append(f"target {judged.target.text}: {judged.target.state}: {judged.target.because}")
    if end.num_failed:
        lines.append(f"{end.num_failed} runs failed: skipped_runs.tsv has them")
    return lines


def _status(board: Board) -> str:
    unit, best, left_s = UNITS[board.metric], board.best, board.left_s()
    parts = [f"{board.num_done} of {board.num_asked} done"]
    if board.num_failed:
        parts.append(f"{board.num_failed} failed")
    if best is not None and best.value is not None:
        parts.append(f"best so far {best.name} ({figure(best.value)} {unit})")
    if left_s is not None and left_s >= 1:
        parts.append(f"about {duration(left_s)} left")
    return ", ".join(parts)


def _table(board: Board, now: str) -> Table:
    title = f"phase {board.phase}: {_status(board)}" if board.phase else _status(board)
    table = Table(title=title, title_justify="left", title_style="")
    for name in ("cell", "done", "failed", UNITS[board.metric], "now"):
        table.add_column(name, justify="left" if name in ("cell", "now") else "right")
    lines = sorted(board.lines.values(), key=lambda line: line.name != board.running)
    best = board.best
    for line in lines[:MAX_LINES]:
        value = "" if line.value is None else f"{figure(line.value)}{' *' if line is best else ''}"
        running = (now or "starting ranks") if line.name == board.running else ""
        failed = str(line.num_failed) if line.num_failed else ""
        table.add_row(line.name, f"{line.num_done}/{line.num_asked}", failed, value, running)
    if len(lines) > MAX_LINES:
        table.caption = f"and {len(lines) - MAX_LINES} cells more"
    return table
