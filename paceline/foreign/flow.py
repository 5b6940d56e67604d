"""`paceline import`: turns the files of another trainer's run into a run directory.

DIR/imported.json            what was found where, and what went wrong
DIR/training.csv             loss, learning rate, speed by step, as far as logs have them
DIR/ranks/rank<r>/steps.csv  phases by rank, where they were logged
DIR/ranks/rank<r>/collectives.json   flight recorders
DIR/profiles/*.facts.json    what traces hold
DIR/train.log                the last lines of all logs
"""

import csv
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import DataError, PacelineError
from paceline.foreign.failures import PREFIX, FaultReader, known_rank
from paceline.foreign.flight import read_dump
from paceline.foreign.pickles import read_plain_pickle
from paceline.foreign.progress import HF_NAMES, LIGHTNING_NAMES, Progress
from paceline.records.base import DAMAGED
from paceline.records.files import open_regular, read_regular, write_atomic
from paceline.records.imported import Fault, Imported, SourceFile
from paceline.records.phases import STEP_PHASES
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import STEPS, TRAINING
from paceline.records.words import count, visible
from paceline.traces.account import account
from paceline.traces.events import STEP, load_trace

MAX_FILES, MAX_JSON, TAIL_LINES, MAX_SAID = 5000, 256 << 20, 400, 120
# A log is read a part at a time, and of a line no more than any trainer writes: patterns that look
# for a number take the square of its length.
PART_BYTES, MAX_LINE = 1 << 20, 4096
STEP_NUMBER = re.compile(STEP + r"(\d{1,18})", re.ASCII)
RANK_PATH = re.compile(r"(?:^|/)(\d+)/(?:stdout|stderr)\.log$|rank[_-]?(\d+)[^/]*$")
LOGS = {".log", ".txt", ".out", ".err", ""}
# What programs that start ranks write of themselves.
SAID_BY = {
    "torchrun": ("torch.distributed.elastic", "torch.distributed.run", "torchrun"),
    "deepspeed": ("[launch.py:", "deepspeed.launcher"),
}


@dataclass
class Found:
    """What all files have told so far."""

    progress: Progress = field(default_factory=Progress)
    faults: list[Fault] = field(default_factory=list)
    dumps: dict[int, str] = field(default_factory=dict)  # as JSON
    traces: list[tuple[Path, Any]] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    ranks: set[int] = field(default_factory=set)
    launcher: str = ""


def import_run(paths: Sequence[Path], out: Path | None) -> tuple[RunDir, Imported]:
    """Read all files, and write what was found into a new run directory."""
    files = list(_iter_files(paths))
    if not files:
        raise DataError(
            f"there is no file in {', '.join(map(str, paths))}\n"
            "hint: name logs, metrics.csv, trainer_state.json, flight recorders or traces"
        )
    found = Found()
    for path in files:
        found.files.append(_read_file(path, found))
    found.progress.finish()
    if not (found.progress.rows or found.faults or found.dumps or found.traces
            or found.progress.phases):  # fmt: skip
        kinds = "; ".join(f"{file.path}: {file.said or file.kind}" for file in found.files[:5])
        raise DataError(
            f"nothing was found that tells of a run ({kinds})\n"
            "hint: logs must have a step and a loss in a line; docs/diagnose.md shows what is read"
        )
    run = RunDir.create("imported", out, is_run=False)
    imported = _describe(run, found, paths)
    _write(run, found, imported)
    return run, imported


def _iter_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file())[:MAX_FILES]
        elif path.is_file():
            yield path
        else:
            raise DataError(f"{path} does not exist\nhint: name files or folders of a run")


def _read_file(path: Path, found: Found) -> SourceFile:
    """Read a file by what it is; one that cannot be read says why, and ends nothing."""
    try:
        with open_regular(path, follow=True) as file:
            head = file.read(2)
        if head == b"\x1f\x8b":
            return _take_trace(path, found)
        if head[:1] == b"\x80":
            raw = read_regular(path, MAX_JSON, follow=True)
            return _take_dump(path, read_plain_pickle(raw, path.name), found)
        if path.suffix == ".json" or head.lstrip()[:1] in (b"{", b"["):
            return _take_json(path, found)
        if path.suffix == ".csv":
            return _take_csv(path, found)
        if path.suffix in LOGS or path.suffix[1:].isdigit():
            return _take_log(path, found)
        return SourceFile(path=str(path), kind="other", said="left alone")
    except (PacelineError, OSError) as error:
        return SourceFile(path=str(path), kind="unreadable", said=str(error).partition("\n")[0])
    except (csv.Error, *DAMAGED) as error:
        said = f"it is damaged ({str(error)[:MAX_SAID]})"
        return SourceFile(path=str(path), kind="unreadable", said=said)


def _take_json(path: Path, found: Found) -> SourceFile:
    raw = read_regular(path, MAX_JSON, follow=True)
    try:
        body = json.loads(raw)
    except DAMAGED:
        return _take_log(path, found)  # a log of JSON lines, or one that begins with a brace
    if not isinstance(body, dict | list):
        return SourceFile(path=str(path), kind="other", said="left alone")
    if isinstance(body, list) or "traceEvents" in body:
        return _take_trace(path, found)
    if "entries" in body:
        return _take_dump(path, body, found)
    history = body.get("log_history")
    if not isinstance(history, list):
        return SourceFile(path=str(path), kind="other", said="left alone")
    for told in history:
        if isinstance(told, dict) and isinstance(told.get("step"), int):
            values = {HF_NAMES[k]: float(v) for k, v in told.items()
                      if k in HF_NAMES and isinstance(v, int | float)}  # fmt: skip
            found.progress.note("hf trainer", told["step"], values)
    return SourceFile(
        path=str(path), kind="trainer state", said=count(len(history), "entry", "entries")
    )


def _take_trace(path: Path, found: Found) -> SourceFile:
    trace = load_trace(path, follow=True)
    found.traces.append((path, trace))
    said = f"{count(len(trace.kernels), 'kernel')}, {count(len(trace.operations), 'operation')}"
    return SourceFile(path=str(path), kind="chrome trace", said=said)


def _take_dump(path: Path, body: Any, found: Found) -> SourceFile:
    rank, dump = read_dump(path, body)
    found.dumps[len(found.dumps) if rank is None else rank] = json.dumps(dump, default=str)
    return SourceFile(
        path=str(path), kind="flight recorder", said=count(len(dump["entries"]), "collective")
    )


def _take_csv(path: Path, found: Found) -> SourceFile:
    """Read the metrics of Lightning's CSVLogger, or a table without a header: step, loss, learning
    rate, tokens/s, as a plain training script writes it."""
    with open_regular(path, follow=True) as file:
        rows = list(csv.reader(file.read(MAX_JSON).decode("utf-8", "replace").splitlines()))
    if rows and "step" in rows[0]:
        columns = rows[0]
        for cells in rows[1:]:
            told = dict(zip(columns, cells, strict=False))
            if told.get("step", "").isdigit():
                values = {LIGHTNING_NAMES[k]: float(v) for k, v in told.items()
                          if k in LIGHTNING_NAMES and _is_number(v)}  # fmt: skip
                found.progress.note("lightning", int(told["step"]) + 1, values)
        return SourceFile(path=str(path), kind="metrics", said=count(len(rows) - 1, "row"))
    plain = [cells for cells in rows if len(cells) == 4 and all(map(_is_number, cells))]
    for step, loss, lr, speed in plain:
        values = {"loss": float(loss), "lr": float(lr), "tokens_per_s": float(speed)}
        found.progress.note("unknown", int(float(step)), values)
    return SourceFile(path=str(path), kind="table", said=count(len(plain), "row"))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _take_line(line: str, rank: int | None, reader: FaultReader, found: Found) -> None:
    prefix = PREFIX.match(line)
    own = known_rank(prefix[1] or prefix[2]) if prefix else rank
    found.ranks |= {own} if own is not None else set()
    found.launcher = found.launcher or _launcher(line)
    found.progress.read(line, own)
    reader.read(line, found.progress.step)


def _take_log(path: Path, found: Found) -> SourceFile:
    named = RANK_PATH.search(path.as_posix())
    rank = known_rank(named[1] or named[2]) if named else None
    reader = FaultReader(path.name, rank)
    before = len(found.progress.rows)
    found.progress.begin_log()
    with open_regular(path, follow=True) as file:
        for raw in iter(partial(file.readline, PART_BYTES), b""):
            # A progress bar goes back to the beginning of its line.
            for line in raw.decode("utf-8", "replace").replace("\r", "\n").splitlines():
                with suppress(*DAMAGED):  # one line that nobody wrote costs no other
                    _take_line(line[:MAX_LINE], rank, reader, found)
                found.lines.append(visible(line[:MAX_LINE]))
    found.faults += reader.faults
    found.ranks |= {fault.rank for fault in reader.faults if fault.rank is not None}
    new = count(len(found.progress.rows) - before, "step")
    said = f"{new}, {count(len(reader.faults), 'fault')}"
    return SourceFile(path=str(path), kind="log", said=said)


def _launcher(line: str) -> str:
    """Return whose line this is, or nothing."""
    return next((name for name, words in SAID_BY.items() if any(w in line for w in words)), "")


def _describe(run: RunDir, found: Found, paths: Sequence[Path]) -> Imported:
    progress = found.progress
    told = {name: n for name, n in progress.trainers.items() if name != "unknown"}
    trainer = max(told, key=lambda name: told[name]) if told else found.launcher or "unknown"
    ranks = found.ranks | set(found.dumps) | set(progress.phases)
    notes = []
    if progress.rows and not any("loss" in row for row in progress.rows.values()):
        notes.append("no line has a loss: only speed and phases are judged")
    return Imported(
        name=paths[0].resolve().name,
        trainer=trainer,
        num_ranks=max(ranks, default=0) + 1,
        num_steps=len(progress.rows),
        last_step=max(progress.last_step, max(progress.rows, default=0)),
        files=found.files,
        faults=found.faults,
        notes=notes,
    )


def _write(run: RunDir, found: Found, imported: Imported) -> None:
    _write_training(run, found.progress)
    _write_phases(run, found.progress)
    for rank, dump in found.dumps.items():
        run.make_rank(rank)
        write_atomic(run.collectives(rank), dump)
    if found.traces:
        run.profiles.mkdir()
    for number, (path, trace) in enumerate(found.traces):
        named = (STEP_NUMBER.fullmatch(span.name) for span in trace.steps)
        numbers = [int(each[1]) for each in named if each] or [1]
        rank = number if (own := known_rank(trace.rank)) is None else own
        facts = account(trace, rank, min(numbers), max(numbers), str(path))
        facts.save(run.profiles / f"{number}.facts.json")
    if found.lines:
        write_atomic(run.train_log, "\n".join(found.lines) + "\n")
    imported.save(run.imported)


def _write_training(run: RunDir, progress: Progress) -> None:
    """Write the steps that have a loss: one without would read as a loss that is not a number."""
    rows = {step: row for step, row in sorted(progress.rows.items()) if "loss" in row}
    if not rows:
        return
    table = TableFile(run.training, TRAINING)
    for step, row in rows.items():
        known = {name: row[name] for name in TRAINING.columns if name in row}
        is_bad = not math.isfinite(row.get("grad_norm", 0.0))  # of HF, with a loss of 0.0
        table.add({"step": step, "skipped": is_bad, "warmup": False, **known})
    table.close()


def _write_phases(run: RunDir, progress: Progress) -> None:
    """Write phases by rank; where none were logged, the time of each step as rank 0's."""
    timed = {
        step: {"wall_s": row["step_s"]} for step, row in progress.rows.items() if "step_s" in row
    }
    by_rank = progress.phases or ({0: timed} if timed else {})
    for rank, steps in by_rank.items():
        run.make_rank(rank)
        table = TableFile(run.steps(rank), STEPS)
        for step, times in sorted(steps.items()):
            phases = {p.column: times.get(p.column, 0.0) for p in STEP_PHASES}
            wall = times.get("wall_s") or sum(phases.values())
            rest = wall - sum(phases.values())
            table.add(
                {"step": step, "warmup": False, "wall_s": wall, **phases, "unaccounted_s": rest}
            )
        table.close()
