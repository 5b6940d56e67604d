"""The utterances of a split, from what `data` names: prepared once, filtered, with their words.

prepared = locate_corpus(config.data, say)       before ranks start: where the manifest is
found, told = choose_utterances(...)             on every rank: those that can be used
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.data.manifest import Utterance, find_manifest, read_manifest
from paceline.errors import ConfigError, DataError
from paceline.prepare.speech import SpeechRequest, prepare
from paceline.prepare.speech_audio import Sound
from paceline.prepare.speech_tables import MEANINGS
from paceline.records.files import fingerprint
from paceline.records.words import count, did_you_mean, few
from paceline.workloads.asr.keys import AsrData
from paceline.workloads.asr.model import window_samples
from paceline.workloads.asr.texts import LetterSpeller, Speller, WhisperSpeller
from paceline.workloads.base import Split, prepared_path
from paceline.workloads.speech_clip.model import num_frames

MANIFEST, ROOT = "manifest", "speech_root"  # in data.json


def locate_corpus(data: AsrData, say: Callable[[str], None]) -> dict[str, str]:
    """Return where the manifest is and where its paths begin. A `source` that is not prepared yet
    is, into the cache: files that cannot be read are a `DataError` that names them."""
    if not data.source:
        root = Path(data.root_dir).expanduser().resolve()
        return {MANIFEST: str(find_manifest(data, os.environ)), ROOT: str(root)}
    if data.root_dir or data.manifest_path != "auto":
        raise ConfigError(
            "data.source and data.root_dir both say where speech is\n"
            "hint: set only one of them; root_dir is for what paceline prepare speech has made"
        )
    source = Path(data.source).expanduser().resolve()
    if not source.exists():
        raise DataError(f"data.source={data.source} does not exist")
    require_columns(data.columns)
    parts = (str(source), repr(sorted(data.columns.items())), str(data.max_files))
    root = Path(data.cache_dir).expanduser().resolve() / "speech" / fingerprint(*parts)
    say(f"the speech of {source} is prepared in {root}")
    asked = SpeechRequest(
        input_root=source,
        output_root=root,
        sound=Sound(data.sample_rate),
        workers=len(os.sched_getaffinity(0)),
        columns=dict(data.columns),
        max_files=None if data.max_files == "all" else data.max_files,
    )
    made = prepare(asked, say, lambda progress: None)
    return {MANIFEST: made.manifest_path, ROOT: str(root)}


def require_columns(columns: Mapping[str, str]) -> None:
    wrong = [meaning for meaning in columns if meaning not in MEANINGS]
    if wrong:
        raise ConfigError(
            f"data.columns: {wrong[0]} is not a meaning of a column\n"
            f"hint: {did_you_mean(wrong[0], MEANINGS)}a meaning is one of {', '.join(MEANINGS)}"
        )


@dataclass(frozen=True)
class Limits:
    """What a model can hear and write: `max_s` seconds, and transcripts that `fits` takes."""

    max_s: float
    fits: Callable[[Utterance], bool]

    @classmethod
    def of(cls, known: Any, speller: Speller, data: AsrData) -> "Limits":
        window = window_samples(known)
        most = math.inf if window is None else window / data.sample_rate
        asked = most if data.max_duration_s == "auto" else min(most, data.max_duration_s)
        if isinstance(speller, LetterSpeller):
            return cls(asked, lambda row: _fits_frames(row, known, speller))
        return cls(asked, lambda row: _fits_positions(row, known, speller))


def _fits_frames(row: Utterance, known: Any, speller: LetterSpeller) -> bool:
    """CTC says one letter per frame, and a frame of nothing between two that are equal."""
    _, ids = speller.lesson(row.transcript)
    doubles = sum(one == other for one, other in pairwise(ids))
    return bool(num_frames(known, row.num_samples) >= len(ids) + doubles)


def _fits_positions(row: Utterance, known: Any, speller: WhisperSpeller) -> bool:
    """A token is a byte or more, so most transcripts need not be spelled."""
    room = int(known.max_target_positions)
    size = len(row.transcript.encode()) + len(speller.prompt)
    return size <= room or len(speller.lesson(row.transcript)[0]) <= room


def choose_utterances(
    data: AsrData, split: Split, prepared: Mapping[str, Any], limits: Limits
) -> tuple[list[Utterance], str]:
    """Return the utterances of a split that have words and a fitting length, and say how many are
    left out. A transcript without a letter is refused: nothing can be learned from it or scored."""
    rows = _rows_of(data, split, prepared_path(prepared, MANIFEST))
    if not data.source and data.max_files != "all":
        rows = rows[: data.max_files]
    spoken = [row for row in rows if row.transcript]
    mute = [row for row in spoken if not any(map(str.isalnum, row.transcript))]
    if mute:
        named = few([f"{row.rel_path} {row.transcript!r}" for row in mute])
        raise DataError(
            f"{count(len(mute), 'transcript')} without a letter: {named}\n"
            "hint: correct them, or remove these utterances from the corpus"
        )
    long = [row for row in spoken if row.duration_s >= data.min_duration_s]
    short = [row for row in long if row.duration_s <= limits.max_s]
    found = [row for row in short if limits.fits(row)]
    told = {
        "without a transcript": len(rows) - len(spoken),
        f"shorter than {data.min_duration_s:g} s": len(spoken) - len(long),
        f"longer than {limits.max_s:g} s": len(long) - len(short),
        "with more words than the model can write": len(short) - len(found),
    }
    words = [f"{number} {why}" for why, number in told.items() if number]
    if not found:
        why = f": {', '.join(words)}" if words else ""
        raise DataError(
            f"none of the {len(rows)} utterances for {split} can be used{why}\n"
            "hint: data.min_duration_s and data.max_duration_s limit them; transcripts come from"
            " the corpus, data.columns names their column"
        )
    return found, f"; left out: {', '.join(words)}" if words else ""


def _rows_of(data: AsrData, split: Split, path: Path) -> list[Utterance]:
    """Return the rows of a split. A corpus without validation data has a share of it kept apart,
    chosen by names alone: always the same ones, whatever else is added."""
    rows = read_manifest(path, data.sample_rate)
    known = [row for row in rows if row.is_in(data.val_splits)]
    train = [row for row in rows if row.is_in(data.train_splits)]
    if not any(row.is_in(data.train_splits) for row in rows) and not known:
        train = rows  # its folders say nothing of splits
    if not known and data.val_fraction:
        known, train = _kept_apart(train, data.val_fraction)
    chosen = known if split == "val" else train
    if chosen:
        return chosen
    wanted = data.val_splits if split == "val" else data.train_splits
    there = sorted({row.split or row.rel_path.partition("/")[0] for row in rows})
    raise DataError(
        f"{path} lists no file of {', '.join(wanted)}: it has {', '.join(there[:20])}\n"
        "hint: data.train_splits and data.val_splits name them; data.val_fraction keeps some apart"
    )


def _kept_apart(rows: Sequence[Utterance], share: float) -> tuple[list[Utterance], list[Utterance]]:
    """Return what is kept apart, at least one of two or more, and the rest."""
    order = sorted(rows, key=lambda row: fingerprint(row.rel_path))
    number = max(1, round(len(rows) * share)) if len(rows) > 1 else 0
    apart = {row.rel_path for row in order[:number]}
    return [r for r in rows if r.rel_path in apart], [r for r in rows if r.rel_path not in apart]
