"""`python -m paceline.track NAME RUN_DIR`: sends the numbers of one run to one tracker, until stdin
says how the run ended, or is closed because whoever started this is gone."""

import os
import select
import sys
from pathlib import Path

from paceline.config.plain import read_plain
from paceline.metrics import TRAIN, VAL
from paceline.records import Attempt
from paceline.records.columns import LOSS_COLUMNS
from paceline.records.files import fingerprint
from paceline.records.rundir import RunDir
from paceline.records.tails import RowTail
from paceline.track.sinks import SINKS, Subject, config_to_send

INTERVAL_S = 1.0
UNKNOWN = "unknown"
# Columns that are no metric of the job, by the names that trackers group them by.
NAMES = {column: name for name, column in LOSS_COLUMNS.items()} | {
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "step_s": "speed/step_s",
    "samples_per_s": "speed/samples_per_s",
    "tokens_per_s": "speed/tokens_per_s",
}


def track(name: str, run: RunDir) -> None:
    """Send rows until the end; what an attempt before this one has written was sent by it."""
    rows = RowTail(run.training)
    attempt = Attempt.load(run.attempt)
    if attempt.number > 1:
        rows.rows()
    config = read_plain(run.config)
    first = run.past_attempt(1) / run.attempt.name
    began = Attempt.load(first).started_at if first.is_file() else attempt.started_at
    subject = Subject(
        name=str(config.get("name", run.root.name)),
        id=fingerprint(str(config.get("name")), str(began))[:12],
        root=run.root,
        config=config_to_send(config),
    )
    sink = SINKS[name][1](subject)
    outcome = ""
    while not outcome:
        outcome = _wait_for_end()
        for row in rows.rows():
            sink.send(int(row["step"]), numbers_of(row))
    sink.finish(outcome)


def numbers_of(row: dict[str, str]) -> dict[str, float]:
    """Return the numbers of a row by the names that trackers show."""
    named = {NAMES.get(column, column): text for column, text in row.items() if text}
    return {k: float(v) for k, v in named.items() if "/" in k or k.startswith((TRAIN, VAL))}


def _wait_for_end() -> str:
    """Return how the run ended; nothing while it goes on."""
    ready, _, _ = select.select([0], [], [], INTERVAL_S)
    return (os.read(0, 100).decode().strip() or UNKNOWN) if ready else ""


if __name__ == "__main__":
    track(sys.argv[1], RunDir(Path(sys.argv[2])))
