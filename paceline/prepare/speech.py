"""Turn a speech corpus into what training reads: FLAC files of one kind, and a manifest of them.

    paceline prepare speech --input-root LibriSpeech --output-root LibriSpeech_16k --trim

In the output root, beside the mirrored tree:

    manifest.tsv      the files that are sound, sorted; written when all is done
    rejected.tsv      the others, each with its reason
    prepared.jsonl    what is made already, of which source and how: a run that was killed, or one
                      over a corpus that has grown, goes on from there. Its sums decide, so a file
                      that is torn or was changed is made again.

A file is written beside the tree and moved into it, whole. Nothing depends on how many processes
work or in which order they finish: the same input gives the same bytes.
"""

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.data.extras import require_extra
from paceline.data.manifest import COLUMNS, MANIFEST, Utterance, save_manifest
from paceline.errors import ConfigError, DataError
from paceline.prepare.speech_audio import Sound
from paceline.prepare.speech_made import (
    PARTIAL,
    Done,
    Kept,
    Made,
    journal_line,
    load_journal,
    make_clips,
    put_file,
)
from paceline.prepare.speech_pool import Died, each_in_parallel
from paceline.prepare.speech_tables import TABLES, Columns, scan_tables
from paceline.prepare.speech_tree import (
    MAX_TEXT_BYTES,
    Clip,
    Found,
    Reject,
    require_tree,
    scan_tree,
)
from paceline.records import Part, Record
from paceline.records.files import FileLock, read_regular, write_atomic
from paceline.records.words import count, text_cell

REJECTED, JOURNAL = "rejected.tsv", "prepared.jsonl"
LOCK = ".prepare.lock"
GROUP_FILES, GROUP_ROWS = 16, 256  # what one process takes at a time
MAX_NAMED = 5
HOUR_S = 3600


@dataclass(frozen=True)
class SpeechRequest:
    """What shall be prepared, and where to. `columns` is None for a tree of files. `max_files`:
    of tables, only the first of each split."""

    input_root: Path
    output_root: Path
    sound: Sound
    manifest_path: Path | None = None
    workers: int = 1
    overwrite: bool = False
    max_rejects: int = 0
    columns: Columns | None = None
    max_files: int | None = None

    @property
    def manifest(self) -> Path:
        return self.manifest_path or self.output_root / MANIFEST


class Progress(NamedTuple):
    """How far it is, after each file. `hours` is of audio, as it was recorded."""

    num_done: int
    num_files: int
    share: float  # of the bytes to read
    hours: float
    elapsed_s: float


class SplitTotal(Part):
    """One split: hours as recorded, and hours as prepared."""

    split: str
    num_files: int
    source_hours: float
    hours: float
    num_speakers: int
    num_without_transcript: int


class Prepared(Record):
    """What `paceline prepare speech` has done."""

    output_root: str
    manifest_path: str
    how: str
    num_files: int
    num_made: int
    num_kept: int
    num_rejected: int
    elapsed_s: float
    audio_hours_per_s: float
    splits: list[SplitTotal]


def prepare(
    asked: SpeechRequest, say: Callable[[str], None], tell: Callable[[Progress], None]
) -> Prepared:
    """Prepare a corpus, or what is missing of it. More rejects than allowed are a `DataError` at
    the end, when all are listed; there is no manifest then."""
    require_places(asked)
    for library in ("soundfile", "soxr"):
        require_extra(library, "audio")  # before the first file, not in a process
    root = asked.output_root
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / LOCK, wait=False):
            try:
                return _prepare(asked, say, tell)
            finally:
                shutil.rmtree(root / PARTIAL, ignore_errors=True)
    except BlockingIOError as error:
        raise ConfigError(f"another process prepares {root} now") from error


def require_places(asked: SpeechRequest) -> None:
    """Refuse, all at once, an input that cannot be read and an output that would destroy
    something."""
    kinds = TABLES if asked.columns is not None else frozenset()
    require_tree(asked.input_root, kinds)
    source, target = asked.input_root.resolve(), asked.output_root.resolve()
    problems = []
    if source == target or source in target.parents or target in source.parents:
        problems.append(
            f"--input-root={asked.input_root} and --output-root={asked.output_root} lie in each"
            " other\nhint: write to a folder of its own"
        )
    if target.exists() and not target.is_dir():
        problems.append(f"--output-root={asked.output_root} is not a folder")
    elif not asked.overwrite and _is_foreign(target):
        problems.append(
            f"--output-root={asked.output_root} holds files, and no {JOURNAL} says that they were"
            " prepared\nhint: choose a new folder, or write over them with --overwrite"
        )
    if asked.manifest.exists() and not _is_manifest(asked.manifest):
        problems.append(f"--manifest-path={asked.manifest} is there and is not a manifest")
    folder = asked.manifest.parent
    if not folder.is_dir() and folder.resolve() != target:  # that one is made
        problems.append(f"--manifest-path={asked.manifest_path}: there is no such folder")
    if problems:
        raise ConfigError(problems)


def _is_foreign(root: Path) -> bool:
    names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    return bool(names - {LOCK, PARTIAL}) and JOURNAL not in names


def _is_manifest(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(COLUMNS[0])) == COLUMNS[0].encode()


def _prepare(
    asked: SpeechRequest, say: Callable[[str], None], tell: Callable[[Progress], None]
) -> Prepared:
    root, started_at = asked.output_root, time.monotonic()
    say(f"looking through {asked.input_root}")
    found = _scan(asked)
    for note in found.notes:
        say(f"note: {note}")
    if not found.clips and not found.rejects:
        raise DataError(f"--input-root={asked.input_root} holds no audio")
    shutil.rmtree(root / PARTIAL, ignore_errors=True)
    (root / PARTIAL).mkdir()
    _make_folders(root, found)
    # It would list files that are about to change.
    asked.manifest.unlink(missing_ok=True)
    (root / REJECTED).unlink(missing_ok=True)
    size = sum(clip.num_bytes for clip in found.clips) / 1e6
    with_ = f"with {count(asked.workers, 'process', 'processes')}"
    say(f"preparing {count(len(found.clips), 'file')} ({size:,.1f} MB) {with_}")
    kept = {} if asked.overwrite else load_journal(root / JOURNAL, asked.sound.how)
    made = _make_all(asked, found, kept, started_at, tell)
    _copy_texts(root, found)
    os.sync()  # the audio is on the disk before a manifest says so
    return _conclude(asked, found, made, time.monotonic() - started_at)


def _scan(asked: SpeechRequest) -> Found:
    if asked.columns is None:
        return scan_tree(asked.input_root)
    return scan_tables(asked.input_root, asked.columns, asked.max_files)


def _make_folders(root: Path, found: Found) -> None:
    """Make the folders of the tree. One that is a link is refused: it leads out of the root."""
    outs = [clip.out for clip in found.clips] + [rel for _, rel in found.texts]
    for folder in sorted({str(Path(out).parent) for out in outs}):
        place = root
        for part in Path(folder).parts:
            place = place / part
            if place.is_symlink():
                raise DataError(
                    f"{place} is a link, and nothing is written through links\n"
                    "hint: remove it, or choose another --output-root"
                )
            try:
                place.mkdir(exist_ok=True)
            except FileExistsError as error:
                raise DataError(f"{place} is in the way of a folder of that name") from error


def _make_all(
    asked: SpeechRequest,
    found: Found,
    kept: Kept,
    started_at: float,
    tell: Callable[[Progress], None],
) -> dict[str, tuple[Made, bool]]:
    """Have processes make or verify every file; return what is sound by its path."""
    clips, root = found.clips, asked.output_root
    total_bytes = sum(clip.num_bytes for clip in clips) or 1
    made: dict[str, tuple[Made, bool]] = {}
    num_done, num_bytes, source_s = 0, 0, 0.0

    def work(numbers: Sequence[int]) -> Iterator[Done]:
        return make_clips([clips[number] for number in numbers], root, asked.sound, kept)

    with (root / JOURNAL).open("a", buffering=1) as journal:
        journal.write("\n")  # the last line of a run that was killed may have no end
        for number, done in each_in_parallel(_groups(clips), work, asked.workers):
            clip = clips[number]
            if isinstance(done, Died):
                done = Done(None, False, f"the process that decoded it died ({done.how})")
            if done.made is not None:
                made[clip.out] = done.made, done.is_new
                source_s += done.made.source_s
                journal.write(journal_line(clip, asked.sound.how, done.made) * done.is_new)
            else:
                found.reject(clip.origin, done.reason)
                (root / clip.out).unlink(missing_ok=True)  # of a run with other settings
            num_done, num_bytes = num_done + 1, num_bytes + clip.num_bytes
            elapsed_s = time.monotonic() - started_at
            share = num_bytes / total_bytes
            tell(Progress(num_done, len(clips), share, source_s / HOUR_S, elapsed_s))
    return made


def _copy_texts(root: Path, found: Found) -> None:
    for path, rel in found.texts:
        try:
            raw = read_regular(path, MAX_TEXT_BYTES, follow=True)
        except (OSError, DataError) as error:
            found.reject(rel, f"cannot be read: {error}")
        else:
            put_file(root, rel, raw)


def _groups(clips: Sequence[Clip]) -> list[list[int]]:
    """Return what a process takes at a time: some files, or rows of one row group in order."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, clip in enumerate(clips):
        key = (str(clip.path), clip.cell.group) if clip.cell else ("", 0)
        groups[key].append(number)
    pieces = []
    for (path, _), numbers in groups.items():
        length = GROUP_ROWS if path else GROUP_FILES
        if path:
            numbers.sort(key=lambda number: clips[number].cell or ())
        pieces += [numbers[n : n + length] for n in range(0, len(numbers), length)]
    return pieces


def _conclude(
    asked: SpeechRequest, found: Found, made: dict[str, tuple[Made, bool]], elapsed_s: float
) -> Prepared:
    """Write the lists, or refuse; both are sorted, so that they are the same however it went."""
    root, rate = asked.output_root, asked.sound.target_sr
    sound = [clip for clip in found.clips if clip.out in made]
    lines = [journal_line(clip, asked.sound.how, made[clip.out][0]) for clip in sound]
    write_atomic(root / JOURNAL, "".join(lines))
    rejects = sorted(found.rejects)
    cells = [f"{text_cell(origin)}\t{text_cell(reason)}" for origin, reason in rejects]
    write_atomic(root / REJECTED, "\n".join(["path\treason", *cells]) + "\n")
    _require_enough(asked, rejects, len(sound))
    save_manifest(asked.manifest, (_utterance(c, made[c.out][0], rate) for c in sound))
    num_made = sum(is_new for _, is_new in made.values())
    hours = sum(one.source_s for one, _ in made.values()) / HOUR_S
    return Prepared(
        output_root=str(root),
        manifest_path=str(asked.manifest),
        how=asked.sound.how,
        num_files=len(sound),
        num_made=num_made,
        num_kept=len(sound) - num_made,
        num_rejected=len(rejects),
        elapsed_s=elapsed_s,
        audio_hours_per_s=hours / elapsed_s,
        splits=list(_totals(sound, made, rate)),
    )


def _require_enough(asked: SpeechRequest, rejects: list[Reject], num_sound: int) -> None:
    if len(rejects) <= asked.max_rejects and num_sound:
        return
    named = [f"  {text_cell(one.origin)}: {text_cell(one.reason)}" for one in rejects[:MAX_NAMED]]
    more = len(rejects) - MAX_NAMED
    named += [f"  and {more:,} more"] * (more > 0)
    total = count(num_sound + len(rejects), "file")
    way_on = (
        f"; the same command with --max-rejects {len(rejects)} writes it, and makes nothing anew"
    )
    raise DataError(
        "\n".join(
            [
                f"{len(rejects):,} of {total} were rejected; --max-rejects={asked.max_rejects}."
                " There is no manifest:",
                *named,
                f"hint: look at {asked.output_root / REJECTED}{way_on if num_sound else ''}",
            ]
        )
    )


def _utterance(clip: Clip, made: Made, rate: int) -> Utterance:
    duration_s = made.num_samples / rate
    labels = clip.transcript, clip.speaker, clip.split
    return Utterance(clip.out, made.num_samples, duration_s, *labels, made.sha256)


def _totals(
    sound: list[Clip], made: dict[str, tuple[Made, bool]], rate: int
) -> Iterator[SplitTotal]:
    by_split: dict[str, list[Clip]] = defaultdict(list)
    for clip in sound:
        by_split[clip.split].append(clip)
    for split, clips in sorted(by_split.items()):
        files = [made[clip.out][0] for clip in clips]
        yield SplitTotal(
            split=split,
            num_files=len(clips),
            source_hours=sum(one.source_s for one in files) / HOUR_S,
            hours=sum(one.num_samples for one in files) / rate / HOUR_S,
            num_speakers=len({clip.speaker for clip in clips} - {""}),
            num_without_transcript=sum(not clip.transcript for clip in clips),
        )
