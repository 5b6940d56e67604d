"""How fast `paceline prepare speech` is, beside a bare loop and beside lhotse.

    OMP_NUM_THREADS=1 python benchmarks/audio_prepare.py [--rounds 7] [--files 120]
        [--lhotse-python PYTHON]

The corpus is the speech of tests/data/speech, joined to utterances of about 12 s, a third each as
16 kHz WAV, 22.05 kHz FLAC and 44.1 kHz FLAC. All contenders turn it into 16 kHz mono 16-bit FLAC of
the same tree, in a process that has everything imported, one after the other in each round:

    raw        a loop: soundfile.read, soxr.resample where the rate differs, soundfile.write
    ours       prepare(), 1 worker, no trim: the same work, and sums, journal, manifest, os.sync
    ours x 2   the same with 2 workers
    trimmed    ours with --trim, 1 worker; for information
    lhotse     Recording.from_file, cut.resample(16000), cut.save_audio; its own resampler

A ratio is between two of one round; the figure is the median over rounds, with the ratio of minima
beside it. Goals: ours at least 1.35x lhotse, at least 0.95x raw, and 2 workers at least 1.8x one.
Wall time decides. CPU seconds, of all processes of a contender, stand beside it: they do not grow
when somebody else works on the machine.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPEECH = Path(__file__).parents[1] / "tests/data/speech"
KINDS = ((16000, "wav"), (22050, "flac"), (44100, "flac"))
SECONDS = 12
RATE = 16000
WARMUP_ROUNDS = 1


def make_corpus(root: Path, num_files: int) -> float:
    """Write the sources; return hours of audio."""
    import numpy as np
    import soundfile
    import soxr

    loaded = [soundfile.read(path, dtype="float32") for path in sorted(SPEECH.rglob("*.flac"))]
    spoken = [soxr.resample(samples, rate, 44100) for samples, rate in loaded]
    for number in range(num_files):
        rate, suffix = KINDS[number % len(KINDS)]
        turns = np.roll(np.arange(len(spoken)), number * 7)
        joined = np.concatenate([spoken[turn] for turn in turns[:8]])[: SECONDS * 44100]
        folder = root / f"train/{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        samples = joined if rate == 44100 else soxr.resample(joined, 44100, rate)
        soundfile.write(folder / f"{number:04d}.{suffix}", samples, rate, subtype="PCM_16")
    return num_files * SECONDS / 3600


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def target(path: Path, root: Path, out: Path) -> Path:
    place = out / path.relative_to(root).with_suffix(".flac")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


# Contenders: each prepares `root` into `out`, which is not there yet


def raw(root: Path, out: Path) -> None:
    import soundfile
    import soxr

    for path in sources(root):
        samples, rate = soundfile.read(path, dtype="float32")
        if samples.ndim > 1:
            samples = samples.mean(axis=1)
        if rate != RATE:
            samples = soxr.resample(samples, rate, RATE)
        soundfile.write(target(path, root, out), samples, RATE, subtype="PCM_16")


def ours(workers: int, trim: bool = False) -> Callable[[Path, Path], None]:
    def run(root: Path, out: Path) -> None:
        from paceline.prepare.speech import SpeechRequest, prepare
        from paceline.prepare.speech_audio import Sound

        asked = SpeechRequest(root, out, Sound(RATE, trim), workers=workers)
        prepare(asked, lambda text: None, lambda progress: None)

    return run


def lhotse(root: Path, out: Path) -> None:
    from lhotse import Recording

    for path in sources(root):
        cut = Recording.from_file(path).to_cut()
        cut.resample(RATE).save_audio(target(path, root, out))


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "raw": raw, "ours": ours(1), "ours x 2": ours(2), "trimmed": ours(1, trim=True),
    "lhotse": lhotse,
}  # fmt: skip


def serve() -> None:
    """Prepare what each line on stdin names, and answer with the seconds it took."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, root, out = json.loads(line)
        before = os.times()
        CONTENDERS[name](Path(root), Path(out))
        after = os.times()
        cpu_s = sum(after[:4]) - sum(before[:4])
        print(json.dumps([after.elapsed - before.elapsed, cpu_s]), file=answers, flush=True)


class Server:
    """A contender in a process of its own."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, root: Path, out: Path) -> tuple[float, float]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps([self.name, str(root), str(out)]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} has died")
        wall_s, cpu_s = json.loads(answer)
        return wall_s, cpu_s

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


def check(root: Path, out: Path, name: str, is_trimmed: bool) -> None:
    """All files are there, of the right kind, and as long as their sources unless trimmed."""
    import soundfile

    for path in sources(root):
        found = soundfile.info(out / path.relative_to(root).with_suffix(".flac"))
        kind = (found.samplerate, found.channels, found.subtype)
        assert kind == (RATE, 1, "PCM_16"), f"{name}: {path} is {kind}"
        away = abs(found.frames / RATE - soundfile.info(path).duration)
        assert away < 0.01 or is_trimmed, f"{name}: {path} differs by {away} s"


def main() -> int:
    asked = parse()
    if asked.serve:
        serve()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "in"
        hours = make_corpus(root, asked.files)
        servers = [
            Server(name, asked.lhotse_python if name == "lhotse" else sys.executable)
            for name in CONTENDERS
        ]
        load = os.getloadavg()[0]
        seen = race(servers, root, Path(folder), asked.rounds)
        for server in servers:
            server.close()
    load = max(load, os.getloadavg()[0])
    print(
        f"{asked.files} files, {hours * 60:.0f} minutes of audio, {asked.rounds} rounds,"
        f" {os.cpu_count()} cores, load {load:.2f}, this run's own processes in it"
    )
    return report(seen, hours)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=120)
    parser.add_argument("--lhotse-python", default=sys.executable, help="one that has lhotse")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def race(
    servers: list[Server], root: Path, folder: Path, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    seen: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
    for number in range(WARMUP_ROUNDS + rounds):
        turn = number % len(servers)
        for server in servers[turn:] + servers[:turn]:
            out = folder / "out"
            os.sync()  # each begins with a clean disk
            time.sleep(0.2)
            took = server.run(root, out)
            if number == 0:
                check(root, out, server.name, server.name == "trimmed")
            else:
                seen[server.name].append(took)
            shutil.rmtree(out)
    return seen


def report(seen: dict[str, list[tuple[float, float]]], hours: float) -> int:
    for name, took in seen.items():
        wall_s = statistics.median(wall for wall, _ in took)
        cpu_s = statistics.median(cpu for _, cpu in took)
        rate = f"{hours * 3600 / wall_s:7.0f} seconds of audio per second"
        print(f"{name:<9} {wall_s:7.2f} s wall  {cpu_s:6.2f} s CPU  {rate}")
    goals: list[tuple[str, str, float]] = [
        ("ours", "lhotse", 1.35), ("ours", "raw", 0.95), ("ours x 2", "ours", 1.8),
    ]  # fmt: skip
    are_met = [judge(seen, *goal) for goal in goals]
    return 0 if all(are_met) else 1


def judge(seen: dict[str, Any], name: str, other: str, goal: float) -> bool:
    pairs = list(zip(seen[name], seen[other], strict=True))
    ratios = [theirs[0] / ours[0] for ours, theirs in pairs]
    cpu = statistics.median(theirs[1] / ours[1] for ours, theirs in pairs)
    best = min(wall for wall, _ in seen[other]) / min(wall for wall, _ in seen[name])
    ratio = statistics.median(ratios)
    print(f"{name} over {other}: {ratio:.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
          f" minima {best:.2f}x  CPU {cpu:.2f}x  goal {goal:g}x"
          f"  {'met' if ratio >= goal else 'MISSED'}")  # fmt: skip
    return ratio >= goal


if __name__ == "__main__":
    sys.exit(main())
