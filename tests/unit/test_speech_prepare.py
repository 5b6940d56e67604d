"""A corpus is prepared whole, the same bytes however it went, and nothing outside is touched."""

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from paceline.cli.prepare_speech import describe
from paceline.data.manifest import read_manifest
from paceline.errors import ConfigError, DataError
from paceline.prepare import speech_made
from paceline.prepare.speech import Prepared, Progress, SpeechRequest, prepare
from paceline.prepare.speech_audio import Sound, render
from paceline.prepare.speech_made import load_journal
from paceline.prepare.speech_pool import Died, each_in_parallel
from paceline.prepare.speech_tree import scan_tree
from paceline.records.files import FileLock
from tests.speech_signals import CORPUS
from tests.speech_signals import signal as tone


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two speakers of the fixture, at 8 and 16 kHz."""
    root = tmp_path / "in"
    for folder in ("train-clean-100/114", "test-clean/135"):
        shutil.copytree(CORPUS / folder, root / folder)
    shutil.copy(CORPUS / "SPEAKERS.TXT", root)
    return root


def run(source: Path, out: Path, sound: Sound | None = None, **more: Any) -> Prepared:
    asked = SpeechRequest(source, out, sound or Sound(trim=True), **more)
    return prepare(asked, lambda text: None, lambda progress: None)


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*") if path.is_file()
    }  # fmt: skip


def test_a_corpus_of_librispeechs_shape(small: Path, tmp_path: Path) -> None:
    done = run(small, tmp_path / "out")
    lines = (tmp_path / "out/manifest.tsv").read_text().splitlines()
    assert lines[0].split("\t")[:3] == ["rel_path", "num_samples", "duration_sec"]
    paths = [line.split("\t")[0] for line in lines[1:]]
    assert paths == sorted(paths) and len(paths) == done.num_files == done.num_made
    for row in read_manifest(tmp_path / "out/manifest.tsv", 16000):
        path = tmp_path / "out" / row.rel_path
        with soundfile.SoundFile(path) as file:
            assert (file.samplerate, file.channels, file.frames) == (16000, 1, row.num_samples)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == row.sha256
        assert row.rel_path.split("/")[:2] == [row.split, row.speaker]
        assert row.transcript.isupper() and row.duration_s == round(row.num_samples / 16000, 6)
    texts = {name for name in contents(small) if name.lower().endswith(".txt")}
    kept = contents(tmp_path / "out")
    assert all(kept[name] == contents(small)[name] for name in texts) and len(texts) == 3
    assert set(kept) == {*texts, *paths, "manifest.tsv", "rejected.tsv", "prepared.jsonl",
                         ".prepare.lock"}  # fmt: skip
    total = {one.split: one for one in done.splits}["train-clean-100"]
    assert (total.num_files, total.num_speakers, total.num_without_transcript) == (5, 1, 0)
    assert 0 < total.hours < total.source_hours, "silence was cut off"


def test_the_same_bytes_whatever_the_number_of_processes(small: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        run(small, tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_any_tree_and_any_format(tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "one/deep").mkdir(parents=True)
    for name in ("top.wav", "one/a.MP3", "one/deep/b.ogg"):
        soundfile.write(root / name, tone("all_loud"), 16000, format=name[-3:].upper())
    (root / "top.txt").write_text("what was\tsaid\n")
    run(root, tmp_path / "out")
    rows = read_manifest(tmp_path / "out/manifest.tsv", 16000)
    assert [(row.rel_path, row.split) for row in rows] == [
        ("one/a.flac", "one"), ("one/deep/b.flac", "one"), ("top.flac", ""),
    ]  # fmt: skip
    assert rows[2].transcript == "what was said"


# Made once


def test_what_is_there_is_kept_and_what_is_missing_is_made(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(small, out)
    whole = contents(out)
    victims = sorted(out.rglob("*.flac"))
    victims[0].unlink()
    victims[1].write_bytes(victims[1].read_bytes()[:-9])  # torn, as by a power cut
    (out / "manifest.tsv").unlink()
    again = run(small, out)
    assert (again.num_made, again.num_kept) == (2, 8) and contents(out) == whole


def test_a_changed_source_and_changed_settings_are_made_again(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(small, out)
    source = next(small.rglob("114-*-0001.flac"))
    shutil.copy(next(small.rglob("114-*-0002.flac")), source)
    assert run(small, out).num_made == 1
    assert run(small, out, Sound(trim=True, top_db=30)).num_made == 10
    assert run(small, out, Sound(trim=True, top_db=30), overwrite=True).num_made == 10
    assert run(small, out, Sound(trim=True, top_db=30)).num_made == 0


def test_a_torn_journal_costs_only_its_last_line(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(small, out)
    journal = out / "prepared.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    assert run(small, out).num_made == 1


def test_a_second_kill_loses_nothing_either(small: Path, tmp_path: Path) -> None:
    """The first line of a run must not be glued to the torn one of the run before."""
    out = tmp_path / "out"
    run(small, out)
    journal, how = out / "prepared.jsonl", Sound(trim=True).how
    journal.write_bytes(journal.read_bytes()[:-20])
    seen: list[int] = []

    def look(progress: Progress) -> None:
        if progress.num_done == progress.num_files:
            seen.append(len(load_journal(journal, how)))

    prepare(SpeechRequest(small, out, Sound(trim=True)), lambda text: None, look)
    assert seen == [10]


def test_a_grown_corpus_and_a_source_that_is_gone(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(small, out)
    shutil.copytree(CORPUS / "dev-clean", small / "dev-clean")
    next(small.rglob("135-*-0000.flac")).unlink()
    done = run(small, out)
    assert (done.num_made, done.num_kept) == (5, 9)
    assert len(read_manifest(out / "manifest.tsv", 16000)) == 14


# What is not sound


def test_all_that_is_bad_is_listed_and_the_rest_is_made(small: Path, tmp_path: Path) -> None:
    (small / "empty.flac").write_bytes(b"")
    (small / "junk.wav").write_bytes(b"RIFF" * 50)
    soundfile.write(small / "zeros.flac", np.zeros(9000), 16000)
    soundfile.write(small / "=1+1.wav", np.full(9000, np.nan), 16000, subtype="FLOAT")
    out = tmp_path / "out"
    with pytest.raises(DataError, match="(?s)4 of 14 files.*max-rejects=3.*empty.flac.*hint"):
        run(small, out, max_rejects=3)
    assert not (out / "manifest.tsv").exists(), "training cannot begin with less than was meant"
    lines = (out / "rejected.tsv").read_text().splitlines()
    listed = dict(line.split("\t") for line in lines)
    assert list(listed) == ["path", "'=1+1.wav", "empty.flac", "junk.wav", "zeros.flac"]
    assert "not finite" in listed["'=1+1.wav"] and "silent" in listed["zeros.flac"]
    done = run(small, out, max_rejects=4)
    assert (done.num_kept, done.num_rejected) == (10, 4)
    assert len(read_manifest(out / "manifest.tsv", 16000)) == 10


def test_an_output_of_other_settings_goes_when_its_source_is_bad_now(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        soundfile.write(tmp_path / f"in/{name}.wav", tone("all_loud"), 16000)
    run(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/a.wav").write_bytes(b"")
    with pytest.raises(DataError, match="1 of 2 files"):
        run(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/a.flac").exists()
    assert not (tmp_path / "out/manifest.tsv").exists(), "the one of before lists it"


def test_two_sources_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "in/b.flac").mkdir(parents=True)
    for name in ("a.wav", "a.flac", "b.wav", "b.flac/c.wav"):
        soundfile.write(tmp_path / "in" / name, tone("all_loud"), 16000)
    found = scan_tree(tmp_path / "in")
    assert [clip.origin for clip in found.clips] == ["a.flac", "b.flac/c.wav"]
    assert sorted(found.rejects) == [
        ("a.wav", "would be written to a.flac, as a.flac is"),
        ("b.wav", "would be written to b.flac, which is a folder"),
    ]


def test_a_decoder_that_dies_costs_its_file_only(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged file can make a C library do."""

    def dying(file: Any, sound: Sound) -> Any:
        if os.readlink(f"/proc/self/fd/{file.fileno()}").endswith(("0002.flac", "0004.flac")):
            os.kill(os.getpid(), signal.SIGKILL)
        return render(file, sound)

    monkeypatch.setattr(speech_made, "render", dying)
    done = run(small, tmp_path / "out", max_rejects=9)
    assert (done.num_made, done.num_rejected) == (6, 4)
    reasons = (tmp_path / "out/rejected.tsv").read_text()
    assert reasons.count("the process that decoded it died (SIGKILL)") == 4


def test_a_full_disk_ends_it_and_rejects_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if str(target).endswith("0003.flac"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(speech_made.os, "replace", full)
        with pytest.raises(OSError, match="No space left") as caught:
            run(small, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename.endswith("0003.flac")
    assert not (tmp_path / "out/.partial").exists()
    assert not (tmp_path / "out/rejected.tsv").exists()
    done = run(small, tmp_path / "out")
    assert done.num_kept > 0 and done.num_files == 10


def test_one_process_prepares_a_folder_at_a_time(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/.prepare.lock"):
        with pytest.raises(ConfigError, match="another process prepares"):
            run(small, tmp_path / "out")


def test_processes_that_die_and_errors_that_are_no_answer() -> None:
    def work(numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            if number == 13:
                os._exit(3)
            if number == 40:
                raise OSError(28, "No space left on device", "x")
            yield number * number

    groups = [list(range(first, first + 5)) for first in range(0, 40, 5)]
    answers = dict(each_in_parallel(groups, work, 2))
    assert answers == {n: n * n for n in range(40)} | {13: Died("exit code 3")}
    with pytest.raises(OSError, match="No space left"):
        list(each_in_parallel([[40]], work, 1))


# Places


def test_links_out_of_either_root_are_not_followed(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    soundfile.write(other / "secret.wav", tone("all_loud"), 16000)
    (small / "link.wav").symlink_to(other / "secret.wav")
    (small / "folder").symlink_to(other)
    (small / "loop.wav").symlink_to(small / "loop.wav")
    (small / "inside.flac").symlink_to(next(small.rglob("114-*-0000.flac")))
    os.mkfifo(small / "pipe.wav")
    found = scan_tree(small)
    assert dict(found.rejects) == {
        "link.wav": "a link that leads out of the input root",
        "folder": "a link that leads out of the input root",
        "pipe.wav": "not a file",
        "loop.wav": "not a file",
    }
    assert "inside.flac" in [clip.origin for clip in found.clips]
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-clean-100").symlink_to(other)
    (out / "prepared.jsonl").touch()
    with pytest.raises(DataError, match="train-clean-100 is a link"):
        run(small, out, max_rejects=9)
    assert [path.name for path in other.iterdir()] == ["secret.wav"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    small: Path, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("mine")
    run(small, out)
    target = next(out.rglob("*.flac"))
    target.unlink()
    target.symlink_to(victim)
    assert run(small, out).num_made == 1
    assert victim.read_text() == "mine" and not target.is_symlink()


def test_names_that_no_table_can_hold_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in (b"a\tb.wav", b"c\nd.wav", b"\xff.wav", b"e\x1b[2J.wav", b"f\\..\\g.wav"):
        (tmp_path / "in").joinpath(os.fsdecode(name)).touch()
    found = scan_tree(tmp_path / "in")
    assert len(found.rejects) == 5 and not found.clips
    assert all(origin.isascii() and origin.isprintable() for origin, _ in found.rejects)


def test_places_that_would_destroy_something_are_refused(small: Path, tmp_path: Path) -> None:
    taken, note = tmp_path / "taken", tmp_path / "note.tsv"
    taken.mkdir()
    (taken / "precious.flac").write_bytes(b"mine")
    note.write_text("my notes")
    for out, match in ((small, "lie in each other"), (small / "x", "lie in each other"),
                       (tmp_path, "lie in each other"), (note, "is not a folder"),
                       (taken, "--overwrite")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            run(small, out)
    with pytest.raises(ConfigError, match="(?s)lie in each other.*is not a manifest"):
        run(small, small, manifest_path=note)
    assert note.read_text() == "my notes" and (taken / "precious.flac").read_bytes() == b"mine"
    assert run(small, taken, overwrite=True).num_files == 10
    with pytest.raises(DataError, match="is not a folder"):
        run(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="holds no audio"):
        run(tmp_path / "void", tmp_path / "out")


def test_archives_beside_the_audio_are_named_and_not_opened(small: Path, tmp_path: Path) -> None:
    (small / "train-clean-360.tar.gz").write_bytes(b"anything")
    said: list[str] = []
    asked = SpeechRequest(small, tmp_path / "out", Sound())
    prepare(asked, said.append, lambda progress: None)
    assert "note: 1 archive not read: unpack what you need of it (train-clean-360.tar.gz)" in said


# Words


def test_progress_says_hours_per_second_and_time_left() -> None:
    assert describe(Progress(120, 2703, 0.2, 0.42, 30.0)) == (
        "120/2,703 files  0.42 h of audio  0.014 h/s  about 2 min 0 s left"
    )
    assert describe(Progress(5, 5, 1.0, 0.01, 2.0)) == "5/5 files  0.01 h of audio  0.005 h/s"


def test_progress_reaches_the_end(small: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    prepare(
        SpeechRequest(small, tmp_path / "out", Sound(trim=True)), lambda text: None, seen.append
    )
    assert [one.num_done for one in seen] == list(range(1, 11)) and seen[-1].share == 1
    rows = [
        json.loads(line) for line in (tmp_path / "out/prepared.jsonl").read_text().split("\n")[:-1]
    ]
    assert seen[-1].hours == pytest.approx(sum(row["source_s"] for row in rows) / 3600)
