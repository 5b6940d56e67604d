"""Reads the data of a job without its model: whether it can be read, how fast, and which file
hangs.

    smoke_data(job, timeout_s)    every file is opened, then batches are read for some seconds

A read that hangs cannot be interrupted from inside its process, so another one reads, says what it
is about to touch, and is killed when it falls silent. Text that is not prepared yet is read from
its source as it would be: document by document, tokenised and packed.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from paceline.data.base import TextData
from paceline.data.collate import collate
from paceline.data.cursor import Indices, Order
from paceline.data.documents import find_source, iter_documents, iter_file
from paceline.data.hub import parse_hub
from paceline.data.packing import split_rows
from paceline.data.stream_shards import is_stream
from paceline.data.text import find_prepared
from paceline.data.tokenizer import BYTES, Tokenizer, encode_documents
from paceline.errors import ConfigError, DataError, LoaderError, PacelineError
from paceline.job import Job
from paceline.machine.process import die_with_parent
from paceline.records import Part
from paceline.records.words import duration
from paceline.train.feed import build_split, prepare_data
from paceline.workloads.base import own_collate
from paceline.workloads.returns import require_sound

MOST_BATCHES, MOST_S = 2048, 10.0
BLOCK = 128  # batches whose samples are computed together, as in the loader


class Event(NamedTuple):
    """What the reader says: the file that it turns to, or what else it is about to touch; a batch
    with its units, the end, or why it cannot go on."""

    kind: Literal["file", "place", "batch", "end", "failed"]
    what: str = ""
    units: int = 0


class Smoke(Part):
    """What was found. Waits are from batch to batch; the longest is for a file or a batch."""

    source: str
    num_files: int
    num_batches: int
    unit: str
    units_per_s: float
    elapsed_s: float
    first_s: float
    wait_p50_s: float
    wait_p95_s: float
    longest_s: float
    longest_at: str


def smoke_data(job: Job, timeout_s: float) -> Smoke:
    """Read the job's training data in another process. `DataError` names the file that was being
    read when nothing came for `timeout_s`."""
    require_sound(job.workload, job.config)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    reader = context.Process(target=_read, args=(job, there), daemon=True)
    reader.start()
    there.close()
    try:
        return _follow(job, here, timeout_s)
    finally:
        reader.kill()


def _follow(job: Job, events: Connection, timeout_s: float) -> Smoke:
    """Time what the reader says, up to MOST_BATCHES or MOST_S."""
    begun = last = time.monotonic()
    at, files, stays = "", set[str](), dict[str, float]()
    batches: list[tuple[float, int]] = []  # when each came, and its units
    while len(batches) < MOST_BATCHES and (not batches or last - batches[0][0] < MOST_S):
        event = _next(events, timeout_s, at or "its source")
        now = time.monotonic()
        if at:
            stays[at] = max(stays.get(at, 0.0), now - last)
        last = now
        if event.kind == "end":
            break
        if event.kind == "batch":
            batches.append((now, event.units))
        else:
            at = event.what
            files |= {at} if event.kind == "file" else set()
    if not batches:
        raise DataError(
            "the source ended before its first batch\nhint: a smaller --batch or --seq-len"
        )
    # The first batch comes after all files were opened: it says nothing of the speed.
    first_s = batches[0][0] - begun
    later_s = batches[-1][0] - batches[0][0]
    units = sum(units for _, units in batches[1:])
    waits = np.diff([moment for moment, _ in batches]) if units else np.array([first_s])
    longest_at = max(stays, key=stays.__getitem__)
    return Smoke(
        source=str(getattr(job.config.data, "source", job.config.workload)),
        num_files=len(files),
        num_batches=len(batches),
        unit=job.workload.unit,
        units_per_s=units / later_s if units else batches[0][1] / first_s,
        elapsed_s=last - begun,
        first_s=first_s,
        wait_p50_s=float(np.percentile(waits, 50)),
        wait_p95_s=float(np.percentile(waits, 95)),
        longest_s=stays[longest_at],
        longest_at=longest_at,
    )


def _next(events: Connection, timeout_s: float, at: str) -> Event:
    """Return what the reader says next, which is at the file `at`."""
    try:
        if not events.poll(timeout_s):
            raise DataError(
                f"{at} gave nothing for {duration(timeout_s)}: it was being read, and hangs or is"
                " slow\nhint: read that file by other means; --timeout sets the limit"
            )
        event: Event = events.recv()
    except EOFError as error:
        raise LoaderError(f"the process that read {at} died") from error
    if event.kind == "failed":
        raise DataError(event.what)
    return event


def _read(job: Job, events: Connection) -> None:
    """Read on until killed, in a process of its own."""
    die_with_parent()
    try:
        for event in _iter_events(job):
            events.send(event)
        events.send(Event("end"))
    except PacelineError as error:
        events.send(Event("failed", str(error)))
    except BrokenPipeError:  # enough was read
        return


def _iter_events(job: Job) -> Iterator[Event]:
    data = job.config.data
    if isinstance(data, TextData) and data.source != "synthetic" and find_prepared(data) is None:
        yield Event("place", f"the tokenizer {data.tokenizer}")
        choose: Callable[[Any], Tokenizer | None] = getattr(job.workload, "tokenizer", _bytes)
        yield from _stream(job, data, choose(job.config) or BYTES)
    else:
        yield from _by_index(job)


def _bytes(config: Any) -> Tokenizer:
    return BYTES


def _stream(job: Job, data: TextData, tokenizer: Tokenizer) -> Iterator[Event]:
    """Open each file of the source, then tokenise and pack its documents."""
    yield Event("place", data.source)
    if parse_hub(data.source) is not None and data.max_files == "all":
        data = data.model_copy(update={"max_files": 1})  # to download all of it takes days
    source = find_source(data)
    source.require_text()
    for file in source.files:
        yield Event("file", str(file.path))
        next(iter_file(file.path, data.text_field, True), None)
    size = job.config.train.micro_batch_size
    held: list[Any] = []
    num_held = 0
    for file in source.files:
        yield Event("file", str(file.path))
        documents = iter_documents([file], data.text_field, not tokenizer.is_bytes)
        for _, tokens in encode_documents(documents, tokenizer, workers=1):
            held.append(tokens)
            num_held += len(tokens)
            while num_held > size * data.seq_len:
                flat = np.concatenate(held).astype(np.int32)
                yield Event("batch", units=_cut_rows(flat, size, data.seq_len))
                held = [flat[size * data.seq_len :]]
                num_held = len(held[0])


def _cut_rows(flat: Any, size: int, seq_len: int) -> int:
    """Make a batch as the loader does, and return how many targets it has."""
    rows = np.stack([flat[n * seq_len : (n + 1) * seq_len + 1] for n in range(size)])
    return int(split_rows({"tokens": torch.from_numpy(rows)}).num_targets)


def _by_index(job: Job) -> Iterator[Event]:
    """Open each shard of what is prepared, then read batches in the order of a run."""
    yield Event("place", str(getattr(job.config.data, "source", "what the job prepares")))
    job.workload.prepared = prepare_data(job, lambda text: None)
    data = build_split(job, "train")
    if data is None or is_stream(data):
        raise ConfigError("data smoke reads text, and data sets that have samples by index")
    size, file_of = job.config.train.micro_batch_size, getattr(data, "file_of", None)
    for part in getattr(data, "parts", ()):
        yield Event("file", str(part.filename))
        int(part[0])
    known, at = job.workload.units_per_sample(job.config), ""
    for ids in _iter_ids(Order(len(data), job.config.train.seed), size):
        files = {str(file_of(int(n))) for n in ids} if file_of else {f"samples {ids.tolist()}"}
        if (place := ", ".join(sorted(files))) != at:
            at = place
            yield Event("place", at)
        batch = collate(data, ids, own_collate(job.workload))
        units = job.workload.units(batch) if known is None else known * size
        yield Event("batch", units=round(units))


def _iter_ids(order: Order, size: int) -> Iterator[Indices]:
    for first in range(0, MOST_BATCHES * size, BLOCK * size):
        yield from order.at(np.arange(first, first + BLOCK * size)).reshape(BLOCK, size)
