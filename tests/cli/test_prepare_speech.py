"""`paceline prepare speech` as a user runs it: totals, exit codes, a kill at half way, archives."""

import io
import json
import os
import shutil
import signal
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile

from tests.cli.bench import wait_until
from tests.cli.program import Ran, paceline, start
from tests.speech_signals import CORPUS
from tests.speech_signals import signal as tone

pytestmark = pytest.mark.slow


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*") if path.is_file()
    }  # fmt: skip


def words(source: Path | str, out: str, *more: str) -> list[str]:
    roots = ["--input-root", str(source), "--output-root", out]
    return ["prepare", "speech", *roots, "--target-sr", "16000", "--trim", *more]


def test_the_command_of_the_seed(tmp_path: Path) -> None:
    """The manifest goes into a folder that the command makes, as it stands there."""
    manifest = tmp_path / "out/manifest_16k_trim.tsv"
    more = ["--manifest-path", "out/manifest_16k_trim.tsv", "--workers", "2", "--log-every", "16"]
    ran = paceline(*words(CORPUS, "out", *more), cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "| train-clean-100 | 22 | " in ran.out
    assert "manifest: out/manifest_16k_trim.tsv" in ran.out
    assert "\n16/32 files" in ran.err and "32/32 files" in ran.err and " h/s" in ran.err
    assert len(manifest.read_text().splitlines()) == 33
    assert not (tmp_path / "out/manifest.tsv").exists()
    again = paceline(*words(CORPUS, "out", *more, "--json"), cwd=tmp_path)
    record = json.loads(again.out)
    assert (record["num_kept"], record["num_made"], again.code) == (32, 0, 0)
    refused = paceline(*words("nowhere", "other", "--json"), cwd=tmp_path)
    assert refused.code == 4 and json.loads(refused.out)["problems"]
    assert "nowhere is not a folder" in refused.err and not (tmp_path / "other").exists()


def test_f43_bad_audio_is_listed_and_beyond_the_quota_it_is_exit_4(tmp_path: Path) -> None:
    """Corrupt, cut off, of no length, of an absurd rate, NaN, silent, too long, a link outside."""
    source, outside = tmp_path / "in", tmp_path / "outside.flac"
    shutil.copytree(CORPUS / "dev-clean", source / "dev-clean")
    whole = next(source.rglob("*.flac")).read_bytes()
    shutil.copy(next(source.rglob("*.flac")), outside)
    (source / "cut.flac").write_bytes(whole[: len(whole) // 2])
    (source / "flip.flac").write_bytes(whole[:9000] + bytes([whole[9000] ^ 8]) + whole[9001:])
    (source / "empty.flac").write_bytes(b"")
    soundfile.write(source / "rate.flac", tone("tiny"), 1)
    soundfile.write(source / "nan.wav", np.full(9000, np.nan), 16000, subtype="FLOAT")
    soundfile.write(source / "silent.flac", np.zeros(9000), 16000)
    soundfile.write(source / "long.flac", np.tile(tone("all_loud"), 8), 16000)
    (source / "link.flac").symlink_to(outside)
    more = ("--max-seconds", "10", "--max-rejects")
    ran = paceline(*words(source, "out", *more, "7"), cwd=tmp_path)
    assert ran.code == 4 and "8 of 13 files were rejected; --max-rejects=7" in ran.err
    assert not (tmp_path / "out/manifest.tsv").exists() and "--max-rejects 8 writes it" in ran.err
    lines = (tmp_path / "out/rejected.tsv").read_text().splitlines()
    reasons = dict(line.split("\t") for line in lines[1:])
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == {
        "cut.flac": "cannot be decoded", "empty.flac": "cannot be decoded",
        "flip.flac": "cannot be decoded", "link.flac": "a link that leads out of the input root",
        "long.flac": "over-long", "nan.wav": "not finite", "silent.flac": "silent",
        "rate.flac": "sample rate of 1 Hz is not between 2,000 and 384,000",
    }  # fmt: skip
    ran = paceline(*words(source, "out", *more, "8"), cwd=tmp_path)
    assert ran.code == 0 and "5 files, 5 were there and sound, 8 rejected" in ran.out
    assert (tmp_path / "out/manifest.tsv").read_text().count("\n") == 6


def test_f44_killed_at_half_way_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "train").mkdir(parents=True)
    wide = np.stack([np.tile(tone("burst5"), 8)] * 2, axis=1)
    for number in range(60):
        soundfile.write(source / f"train/{number:02d}.wav", np.roll(wide, number * 999), 44100)
    process = start(*words(source, "out", "--workers", "2"), cwd=tmp_path)
    journal = tmp_path / "out/prepared.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_bytes().count(b"\n") < 21:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    Ran(process.returncode, out, err)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, workers)), 10, "workers are gone")
    assert not (tmp_path / "out/manifest.tsv").exists(), "it lists what is verified"
    made = sorted((tmp_path / "out").rglob("*.flac"))
    assert 20 <= len(made) < 60
    for path in made:
        soundfile.read(path)  # none is torn
    made[3].write_bytes(made[3].read_bytes()[:4000])  # as a power cut may leave one
    ran = paceline(*words(source, "out", "--workers", "1", "--json"), cwd=tmp_path)
    assert ran.code == 0 and json.loads(ran.out)["num_kept"] >= 19, ran.err
    paceline(*words(source, "whole", "--workers", "2"), cwd=tmp_path)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def hostile_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../escaped.flac", "/tmp/absolute.flac", "train/bomb.flac"):
            member = tarfile.TarInfo(name)
            body = bytes(5_000_000) if "bomb" in name else b"audio"
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
        link = tarfile.TarInfo("train/link.flac")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


def hostile_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../escaped.flac", b"audio")
        archive.writestr("bomb.flac", bytes(5_000_000))


@pytest.mark.parametrize("name", ["corpus.tar.gz", "corpus.zip", "corpus.flac"])
def test_f46d_an_archive_is_refused_and_nothing_of_it_is_written(name: str, tmp_path: Path) -> None:
    """As the input itself by its name; among the audio, disguised as audio, by its content."""
    home = tmp_path / "home"
    home.mkdir()
    (hostile_zip if name.endswith(".zip") else hostile_tar)(home / name)
    is_disguised = name.endswith(".flac")
    source = home if is_disguised else home / name
    before = contents(tmp_path)
    ran = paceline(*words(source, "../out"), cwd=home)
    assert ran.code == 4, ran.err
    told = "corpus.flac: cannot be decoded" if is_disguised else "archives are not unpacked here"
    assert told in ran.err
    after = {name for name in contents(tmp_path) if not name.startswith("out/")}
    assert after == set(before) and not Path("/tmp/absolute.flac").exists()
    written = {path.suffix for path in (tmp_path / "out").rglob("*")}
    assert ".flac" not in written and (is_disguised or not (tmp_path / "out").exists())


def test_parquet_audio_from_the_command_line(tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "dev-clean/128/1000", tmp_path / "in/clips")
    names = sorted(path.name for path in (tmp_path / "in/clips").glob("*.flac"))
    lines = [f"{name}\tsaid {name}\n" for name in names]
    (tmp_path / "in/dev.tsv").write_text("path\tsentence\n" + "".join(lines))
    roots = ["--input-root", "in", "--output-root", "out", "--workers", "1"]
    ran = paceline("prepare", "parquet-audio", *roots, cwd=tmp_path)
    assert ran.code == 0, ran.err
    rows = (tmp_path / "out/manifest.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[3] for row in rows] == [f"said {name}" for name in names]
    wrong = paceline("prepare", "parquet-audio", *roots, "--columns", "txt=x", cwd=tmp_path)
    assert wrong.code == 2 and "did you mean text?" in wrong.err
