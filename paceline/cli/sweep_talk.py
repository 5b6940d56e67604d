"""What a person sees of a sweep: a live table on a terminal, a line now and then elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.table import Table

from paceline.cli.talk import TAIL_LINES, ConsoleTalk, literal, say_failure
from paceline.records import Plan, Result
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord
from paceline.records.words import count, duration, elapsed, number, typed
from paceline.report.sweep_story import (
    SIGNS,
    SweepStory,
    answer,
    rate_cell,
    reference,
    say_of,
    speedup_cell,
    unit_of,
)
from paceline.sweep.board import Board
from paceline.sweep.flow import SweepEnd
from paceline.sweep.folder import SweepDir, load_manifest
from paceline.sweep.outputs import tell
from paceline.sweep.phases import describe_schedule
from paceline.sweep.spec import SweepSpec

FEW_STEPS = 20
MAX_CELLS = 40
BESIDE = 8  # lines of the screen that the live table leaves: it cannot be redrawn if higher


class Pulse(threading.Thread):
    """Calls `beat` every `interval_s` with the seconds since it began, until it is stopped."""

    def __init__(self, interval_s: float, beat: Callable[[float], None]) -> None:
        super().__init__(name="pulse", daemon=True)
        self._interval_s, self._beat = interval_s, beat
        self._over = threading.Event()

    def run(self) -> None:
        began_at = time.monotonic()
        while not self._over.wait(self._interval_s):
            self._beat(time.monotonic() - began_at)

    def stop(self) -> None:
        self._over.set()
        self.join()


class SweepConsole(ConsoleTalk):
    """Show all runs of a sweep as lines of one table."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._live: Live | None = None
        self._board: Board | None = None
        self._now = ""  # the heartbeat of the live run
        self._said: list[str] = []  # before there was a folder for it
        self._lock = threading.Lock()  # the pulse and those who follow runs speak too
        self._log: Path | None = None
        self._tail_lines, self._heartbeat_s = TAIL_LINES, 0.0
        self._pulse: Pulse | None = None

    def say(self, text: str) -> None:
        super().say(text)
        self._note(text)

    def _note(self, text: str) -> None:
        self._said.append(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}\n")
        if self._log is not None:
            self._write_log()

    def keep_log(self, path: Path) -> None:
        """Write all that is said into a file too, and what has been said already."""
        self._log = path
        self._write_log()

    def _write_log(self) -> None:
        assert self._log is not None
        try:
            with self._lock, self._log.open("a", encoding="utf-8") as file:
                file.write("".join(self._said))
                self._said.clear()
        except OSError:  # a full disk ends no sweep: it is tried again with the next line
            return

    def plan(self, spec: SweepSpec, record: SweepRecord) -> None:
        self._tail_lines, self._heartbeat_s = spec.tail_lines, spec.heartbeat_s
        refused = [cell for cell in record.cells if cell.refusal]
        for cell in refused:
            self.say(f"refused: {cell.name}: {cell.refusal}")
        able = [cell.name for cell in record.cells if not cell.refusal]
        more = f", and {len(able) - MAX_CELLS} more" if len(able) > MAX_CELLS else ""
        self.say(f"cells: {'  '.join(able[:MAX_CELLS])}{more}")
        for line in describe_schedule(spec, record.cells):
            self.say(line)
        self.say(
            f"compared by {record.metric}, differences below {record.margin:.1%} do not matter"
        )
        if min(phase.steps for phase in record.phases) < FEW_STEPS:
            self.say(f"warning: fewer than {FEW_STEPS} steps leave little after the warm-up")

    @contextmanager
    def live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield
        self._live = None

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        """Begin to tell of a run: every so many seconds, whether it has moved or not."""
        self._now = ""
        if self._heartbeat_s:
            self._pulse = Pulse(self._heartbeat_s, self._beat)
            self._pulse.start()
        return lambda row: self._heartbeat(row, plan)

    def trained(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
            self._pulse = None
        self._now = ""

    def _beat(self, elapsed_s: float) -> None:
        """Say where the run is; on a terminal the table shows it, and the log alone is told."""
        text = f"    {self._now or f'no step yet, after {elapsed(elapsed_s)}'}"
        if self._live is not None:
            self._note(text)
        else:
            self.say(text)

    def _heartbeat(self, row: dict[str, str], plan: Plan) -> None:
        step, step_s = int(row["step"]), float(row["step_s"])
        left_s = (plan.steps - step) * step_s
        self._now = f"step {step}/{plan.steps}  {duration(step_s)}  {elapsed(left_s)} left"
        if self._live is not None:
            self._redraw()

    def board(self, board: Board) -> None:
        self._board = board
        if self._live is not None:
            self._redraw()
        elif board.running:
            self.say(
                f"[{board.num_ended + 1}/{board.num_asked}] {board.running}, repeat {board.repeat}"
            )
        else:
            self.say(f"    {_status(board)}")

    def failed(self, cell: str, repeat: int, result: Result) -> None:
        self.say(f"{cell}, repeat {repeat}:")
        say_failure(self, result, self._tail_lines)

    def conclude(self, end: SweepEnd, folder: SweepDir) -> None:
        self.say("")
        if end.stopped_by:
            self.say(
                f"stopped ({end.stopped_by}): this is what there is so far; the same command with"
                f" --out {typed(folder.root)} resumes"
            )
        rows = load_manifest(folder.manifest)
        for line in _say_answer(end, tell(folder, end.record, rows, end.judgement)):
            self.say(line)
        self.say(f"summary: {typed(folder.summary)}")
        self.say(f"report: {typed(folder.report)}")

    def _redraw(self) -> None:
        assert self._live is not None and self._board is not None
        room = max(1, self.console.height - BESIDE)
        self._live.update(_table(self._board, self._now, room))


def _say_answer(end: SweepEnd, story: SweepStory) -> list[str]:
    """Return what the summary says first, then every cell that was measured."""
    judged = end.judgement
    lines = [*answer(story), ""]
    for line in story.measured:
        speedup = f"{speedup_cell(line)} times" if speedup_cell(line) else ""
        cells = (f"{rate_cell(line)} {story.unit}", speedup, line.verdict)
        chosen = " (chosen)" if line.is_chosen and line.is_tied else ""
        said = ", ".join(filter(None, cells))
        lines.append(f" {line.sign or ' '} {line.name}{chosen}: {said}")
    if story.measured:
        lines.append(story.say(f"{SIGNS}; a speedup is against ") + reference(story))
    lines += [f"cannot win: {name}: {why}" for name, why in judged.flagged.items()]
    lines += [f"note: {note}" for note in judged.notes]
    if end.num_failed:
        lines.append(f"{count(end.num_failed, 'run')} failed: see skipped_runs.tsv")
    return lines


def _status(board: Board) -> str:
    unit, best, left_s = unit_of(board.metric), board.best, board.left_s()
    parts = [f"{board.num_done} of {board.num_asked} done"]
    if board.num_failed:
        parts.append(f"{board.num_failed} failed")
    if best is not None and best.value is not None:
        apart = "" if board.is_told_apart else ", not yet told apart"
        fastest = say_of(board.metric, "fastest")
        parts.append(f"so far {fastest} {best.name} ({number(best.value)} {unit}){apart}")
    if left_s is not None and left_s >= 1:
        parts.append(f"about {elapsed(left_s)} left")
    return ", ".join(parts)


def _table(board: Board, now: str, room: int) -> Group:
    """Return the status above the cells, as many as there is room for, the one that runs first."""
    status = f"phase {board.phase}: {_status(board)}" if board.phase else _status(board)
    table = Table()
    for name in ("cell", "done", "failed", unit_of(board.metric), "now"):
        table.add_column(name, justify="left" if name in ("cell", "now") else "right")
    lines = sorted(board.lines.values(), key=lambda line: line.name != board.running)
    best = board.best
    for line in lines[:room]:
        mark = " *" if line is best and board.is_told_apart else ""
        value = "" if line.value is None else f"{number(line.value)}{mark}"
        running = (now or "starting ranks") if line.name == board.running else ""
        failed = str(line.num_failed) if line.num_failed else ""
        table.add_row(
            literal(line.name), f"{line.num_done}/{line.num_asked}", failed, value, running
        )
    if len(lines) > room:
        table.caption = f"and {len(lines) - room} more cells"
    return Group(literal(status), table)
