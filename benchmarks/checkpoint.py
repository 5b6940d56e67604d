"""What never losing a run costs: saving, stalling, loading, going on, and time lost to kills.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--rounds 15] [--megabytes 300] [--dir DIR]
        [--skip-soak]

One process, one disk, the same tensors: a language model's weights and both moments of AdamW. The
contenders of a figure take turns, a round is one turn of each, a ratio is between two of the same
round, and the figure is the median over rounds, with the ratio of minima beside it.

    save     Saver, mode sync, one rank: temporary folder, safetensors with xxh3, fsync, manifest,
             rename, latest; then, behind the run's back, prune, which reads back the one before.
             Against torch.save and fsync of the file. A new file each time; old ones are removed
             outside the timed part for both, and how long that takes is printed.
    stall    how long the call holds training up: mode async against sync, once the memory for
             copies exists; the first call, which makes it, is printed too.
    load     choose the newest checkpoint, read every byte of it against its sum, copy all tensors
             into existing ones; against safetensors' load_file and the same copies. Both files
             have just been read: the page cache is warm for both. Then a few rounds with a cold
             cache, as after a restart on another machine; printed, not judged.
    ettr     scripts/soak, a rank killed every 20 s for 2 minutes: time of the steps that stand
             over wall time, from the first step until the kills are over. The calm end of the run
             does not count; ETTR of the whole run stands beside it.
    resume   from "checkpoint chosen" to "first microbatch ready", at position 5,000,000 of
             10,000,000 samples. For scale: torch's DataLoader going through 1 % of those batches.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import Workload
from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import Piece, moment_name
from paceline.checkpoint.restore import choose_checkpoint
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.tensors import TensorFiles
from paceline.config.schema import CheckpointConfig
from paceline.data.cursor import EvenPicks, Order, StepSlice
from paceline.data.loader import LoaderPlan, Microbatches, MicrobatchSource, Rules
from paceline.data.rng import capture_rng
from paceline.records import DataPosition, Kept
from paceline.workloads.lm.model import LM
from paceline.workloads.lm.workload import LMModel

GOALS = {"save": 1.25, "stall": 0.35, "load": 1.35, "ettr": 0.75, "resume": 1.0}
CPU, SOAK = torch.device("cpu"), Path(__file__).parents[1] / "scripts" / "soak"
NUM_SAMPLES, POSITION, BATCH = 10_000_000, 5_000_000, 32
SKIPPED_SHARE, COLD_ROUNDS = 0.01, 5
Timed = dict[str, list[float]]


# The state


def build_state(megabytes: int) -> list[Piece]:
    """A language model's weights and AdamW's moments, 12 bytes a parameter; step counts too."""
    layers = max(1, round((megabytes * 1e6 / 12 - 2 * 320 * 512) / 3.15e6))
    model = LM(LMModel(dim=512, num_layers=layers, num_heads=8, num_kv_heads=8), 64)
    pieces = []
    for name, value in model.state_dict().items():
        held = torch.randn(value.shape)
        pieces.append(Piece("model", name, tuple(held.shape), 0, held, (0,)))
        for slot in ("exp_avg", "exp_avg_sq"):
            pieces.append(_moment(name, slot, torch.randn(value.shape)))
        pieces.append(_moment(name, "step", torch.tensor(10.0)))
    return pieces


def _moment(name: str, slot: str, value: Tensor) -> Piece:
    return Piece("optimizer", moment_name(name, slot), tuple(value.shape), 0, value, (0,))


def tensors_of(pieces: list[Piece]) -> dict[str, Tensor]:
    return {piece.name: piece.value for piece in pieces}


class Ours:
    """One rank's saver, and a new step for every save."""

    def __init__(self, root: Path, mode: str, pieces: list[Piece]) -> None:
        config = CheckpointConfig(mode=mode, every=1)  # type: ignore[arg-type]
        root.mkdir()
        self.folder = CheckpointFolder(root / "checkpoints")
        writer = Writer(self.folder, config, dist.HashStore(), 0, 1, 1, root / "checkpoints.csv")
        self.saver, self.pieces, self.step = Saver(writer), pieces, 0

    def save(self) -> None:
        """Back as soon as training may go on."""
        self.step += 1
        self.saver.save(kept_at(self.step), self.pieces, capture_rng(CPU))

    def wait(self) -> None:
        self.saver.wait()
        if self.saver.failure is not None:
            raise self.saver.failure

    def remove_old(self) -> None:
        """All but the newest, which the next prune reads back."""
        for step in self.folder.steps()[1:]:
            shutil.rmtree(self.folder.path(step))


def kept_at(step: int) -> Kept:
    data = DataPosition(
        position=step, num_samples=NUM_SAMPLES, seed=0, epoch=0, segment=step,
        start_index=step, end_index=step, fingerprint="bench",
    )  # fmt: skip
    return Kept(
        step=step, reason="every", saved_at=time.time(), data=data, num_skips=0, lr=1e-3,
        num_steps=1000, best=None, strategy="ddp", world_size=1, precision="fp32",
        global_size=BATCH, config_fingerprint="bench", versions={},
    )  # fmt: skip


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    """Plain, and durable: as much as any save must do."""
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


# Measuring


def seconds(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def measure_saves(folder: Path, pieces: list[Piece], rounds: int) -> Timed:
    """Three contenders in an order that turns; the first two rounds warm up and do not count."""
    sync, background = Ours(folder / "sync", "sync", pieces), Ours(folder / "a", "async", pieces)
    plain, tensors = folder / "plain.pt", tensors_of(pieces)
    times: Timed = defaultdict(list)

    def run_plain() -> None:
        times["plain"].append(seconds(lambda: torch_save(tensors, plain)))
        times["remove plain"].append(seconds(plain.unlink))

    def run_ours(ours: Ours, stall: str, whole: str) -> None:
        stall_s = seconds(ours.save)
        times[stall].append(stall_s)
        times[whole].append(stall_s + seconds(ours.wait))
        times["remove"].append(seconds(ours.remove_old))

    turns = [
        run_plain,
        lambda: run_ours(sync, "save", "whole save"),
        lambda: run_ours(background, "async", "async whole"),
    ]
    for number in range(rounds + 2):
        for turn in turns[number % 3 :] + turns[: number % 3]:
            os.sync()  # nobody pays for what another has left in the cache
            turn()
    times["first async"] = times["async"][:1]
    return {name: own if name == "first async" else own[2:] for name, own in times.items()}


def measure_loads(folder: Path, pieces: list[Piece], rounds: int) -> tuple[Timed, Timed]:
    """Into the same tensors, in turn; with a warm cache, then with a cold one."""
    ours, plain = Ours(folder / "kept", "sync", pieces), folder / "plain.safetensors"
    ours.save()
    ours.wait()
    save_file(tensors_of(pieces), plain)
    targets = {name: torch.empty_like(value) for name, value in tensors_of(pieces).items()}

    def run_plain() -> None:
        for name, value in load_file(plain).items():
            targets[name].copy_(value)

    def fill(source: TensorFiles) -> None:
        for piece in pieces:
            source.fill(piece.section, piece.name, 0, targets[piece.name])

    def run_ours() -> None:
        found = choose_checkpoint(ours.folder, CPU, fill)
        assert found is not None and not found.damages, "it was just written"

    turns = {"load_file": run_plain, "load": run_ours}
    files = [plain, *ours.folder.path(ours.step).iterdir()]
    warm = in_turn(turns, rounds + 2, lambda: None)
    assert all(torch.equal(targets[p.name], p.value) for p in pieces), "loaded is what was saved"
    cold = in_turn(turns, COLD_ROUNDS, lambda: forget(files))
    return {name: own[2:] for name, own in warm.items()}, cold


def in_turn(turns: dict[str, Callable[[], None]], rounds: int, before: Callable[[], None]) -> Timed:
    """Seconds of every turn; who is first changes every round."""
    times: Timed = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            before()
            times[name].append(seconds(turns[name]))
    return times


def forget(files: list[Path]) -> None:
    """Out of the page cache; they are on disk already."""
    os.sync()
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Samples:
    """Ten million samples that cost next to nothing."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


class Nothing(Workload):
    def build_model(self, config: Any) -> torch.nn.Module:
        raise AssertionError("only its data is used")

    def build_data(self, config: Any, split: str) -> None:
        return None

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        raise AssertionError("only its data is used")


def resume_data(num_workers: int) -> list[int]:
    """From a position to the first microbatch, as a rank builds it (train/worker.py)."""
    own = StepSlice(BATCH, 1, 2, 1, POSITION)
    picks = EvenPicks(Order(NUM_SAMPLES, 0), own)
    source = MicrobatchSource(Samples(), picks, Rules(Nothing(), 1))
    loader = LoaderPlan(num_workers, prefetch=2, timeout_s=120, pin_memory=False)
    microbatches = Microbatches(source, 1000, loader)
    ids = next(microbatches).sample_ids.tolist()
    microbatches.close()
    return ids


def skip_through(num_batches: int) -> None:
    """What a loader without a position does: go through all batches that were taken already."""
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Samples(), BATCH, shuffle=True, generator=generator)
    for number, _ in enumerate(loader):
        if number == num_batches:
            return


def measure_resume(rounds: int) -> tuple[Timed, float]:
    times: Timed = {"0 loaders": [], "2 loaders": []}
    expected = Order(NUM_SAMPLES, 0).at(StepSlice(BATCH, 1, 2, 1, POSITION).positions(0)).tolist()
    for _ in range(rounds):
        for num_workers in (0, 2):
            started_at = time.perf_counter()
            ids = resume_data(num_workers)
            times[f"{num_workers} loaders"].append(time.perf_counter() - started_at)
            assert ids == expected, "the samples that stand at this position"
    num_batches = POSITION // BATCH
    few_s, some_s = (seconds(lambda n=n: skip_through(n)) for n in (0, int(num_batches / 100)))
    return times, few_s + (some_s - few_s) / SKIPPED_SHARE


def measure_ettr() -> tuple[float, str]:
    """The soak's own last words; it also judges that nothing was lost."""
    asked = ["--seconds", "120", "--every", "20", "--kinds", "kill", "--seed", "0"]
    done = subprocess.run([sys.executable, SOAK, *asked], capture_output=True, text=True)
    found = re.search(r"^ETTR (\S+) .*$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        return 0.0, f"the soak failed:\n{done.stdout}{done.stderr}"
    return float(found[1]), found[0]


# Judging


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Of pairs of the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def judge_ratio(name: str, ours: list[float], theirs: list[float], words: str) -> bool:
    ratio = median_ratio(ours, theirs)
    return judge(
        name,
        ratio <= GOALS[name],
        f"{ratio:.3f}x (minima {min(ours) / min(theirs):.3f}x), goal at most {GOALS[name]}x: "
        f"{words.format(milliseconds(ours), milliseconds(theirs))}",
    )


def judge(name: str, is_met: bool, words: str) -> bool:
    print(f"{name:<7} {'OK  ' if is_met else 'MISS'} {words}", flush=True)
    return is_met


def milliseconds(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ms (least {min(values) * 1e3:.0f})"


@contextmanager
def bench_folder(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def judge_files(folder: Path, pieces: list[Piece], rounds: int) -> list[bool]:
    saves = measure_saves(folder, pieces, rounds)
    loads, cold = measure_loads(folder, pieces, rounds)
    whole, plain = saves["whole save"], saves["plain"]
    met = [
        judge_ratio("save", whole, plain, "{} with read-back, torch.save and fsync {}"),
        judge_ratio("stall", saves["async"], saves["save"], "{} held up async, {} sync"),
        judge_ratio("load", loads["load"], loads["load_file"], "{} verified, load_file {}"),
    ]
    held = median_ratio(saves["save"], plain)
    print(f"        a sync save holds training up {held:.3f}x as long as torch.save and fsync")
    ratio = median_ratio(cold["load"], cold["load_file"])
    print(f"        with a cold page cache a verified load takes {ratio:.3f}x as long")
    first, whole_async = saves["first async"], saves["async whole"]
    print(f"        the first async save, which makes its memory: {milliseconds(first)}")
    print(f"        an async save until all is done: {milliseconds(whole_async)}")
    removed = (milliseconds(saves[name]) for name in ("remove", "remove plain"))
    print("        to remove an old one: ours {}, torch.save's {}".format(*removed))
    return met


def judge_resume(rounds: int) -> bool:
    times, skipping_s = measure_resume(rounds)
    slowest = max(statistics.median(own) for own in times.values())
    told = ", ".join(f"{milliseconds(own)} with {name}" for name, own in times.items())
    return judge(
        "resume",
        slowest < GOALS["resume"],
        f"{told}, goal under {GOALS['resume']:g} s; going through the batches with torch's"
        f" DataLoader: {skipping_s:.0f} s (extrapolated from {SKIPPED_SHARE:.0%} of them)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--skip-soak", action="store_true", help="leave out the figure of minutes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pieces = build_state(asked.megabytes)
    size = sum(piece.num_bytes for piece in pieces) / 1e6
    print(
        f"{size:.0f} MB in {len(pieces)} tensors, {asked.rounds} rounds, {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}, torch {torch.__version__}",
        flush=True,
    )
    with bench_folder(asked.dir) as folder:
        met = judge_files(folder, pieces, asked.rounds)
    del pieces
    gc.collect()
    met.append(judge_resume(asked.rounds))
    if not asked.skip_soak:
        ettr, words = measure_ettr()
        met.append(judge("ettr", ettr >= GOALS["ettr"], f"goal at least {GOALS['ettr']}: {words}"))
    dist.destroy_process_group()
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
