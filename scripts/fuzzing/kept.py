"""Kinds of input that a run has left: run directories, checkpoints, manifests of data. What reads
them is the program itself, or what a rank calls first."""

import importlib
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
import yaml

from fuzzing.asked import paceline, recipe_in
from fuzzing.ground import Case, Content, Ground
from fuzzing.mutate import (
    ODD_FILES,
    as_bytes,
    change_bytes,
    change_text,
    change_tree,
    odd,
    to_json,
    to_yaml,
)
from paceline.checkpoint.folder import MANIFEST, STATE, CheckpointFolder, seal, step_name
from paceline.checkpoint.pieces import Piece
from paceline.checkpoint.restore import choose_checkpoint
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.tensors import TensorFiles, sum_file
from paceline.config.load import dump_config
from paceline.config.schema import CheckpointConfig
from paceline.data.base import TextData
from paceline.data.text import open_tokens, prepare_tokens
from paceline.job import load_job, reload_job
from paceline.launch import find_launcher
from paceline.plan.planner import make_plan
from paceline.records import DataPosition, Env, Kept, Manifest
from paceline.records.events import Event
from paceline.records.profiled import ProfileFacts
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord
from paceline.run.flow import order_for
from paceline.run.resume import load_resumption
from paceline.sweep.folder import SweepDir, load_manifest
from paceline.sweep.judge import judge_sweep
from paceline.sweep.outputs import write_outputs
from paceline.watch.fleet import Fleet

RUNS = Path(__file__).parents[2] / "tests" / "data" / "runs" / "0.6.0"
CPU = torch.device("cpu")
EVENTS = "".join(
    Event(time=9.0 + n, rank=n, step=n, kind="hang", severity="error", words="it waits").to_line()
    for n in range(3)
).encode()
FACTS = ProfileFacts(
    rank=0, first_step=3, last_step=3, trace="t.json.gz", on_device=True, window_s=1.0, busy_s=0.8,
    categories={"communication": 0.5}, top=[], communication_s=0.5, exposed_s=0.4, idle_s=0.2,
    launch_gaps_s=0.1, num_launch_gaps=3,
)  # fmt: skip


def change_file(name: str, raw: bytes, rng: random.Random) -> Content:
    """Change a file of a run by what it is: a tree, a table, or bytes."""
    how = rng.random()
    if how < 0.04:
        return rng.choice(ODD_FILES)
    if how < 0.3:
        return change_bytes(raw, rng)
    if name.endswith((".csv", ".tsv", ".jsonl")):
        return change_table(raw, rng) if how < 0.8 else change_text(raw, rng)
    if how < 0.4 or not name.endswith((".json", ".yaml")):
        return change_text(raw, rng)
    is_json = name.endswith(".json")
    tree = json.loads(raw) if is_json else yaml.load(raw, yaml.CSafeLoader)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = change_tree(tree, rng)
    return to_json(tree) if is_json else to_yaml(tree)


def change_table(raw: bytes, rng: random.Random) -> bytes:
    """Change a column or a cell of a table."""
    mark = b"\t" if b"\t" in raw else b","
    rows = [line.split(mark) for line in raw.rstrip(b"\n").split(b"\n")]
    column, how = rng.randrange(len(rows[0])), rng.random()
    if how < 0.2:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif how < 0.3:
        rows[0][column] = rng.choice((b"", b"x", rows[0][0], rows[0][column].upper()))
    elif how < 0.4:
        rows[0][0] = b"\xef\xbb\xbf" + rows[0][0]
    elif how < 0.5:
        rows = rows[: rng.randint(0, 3)]
    else:
        row = rng.choice(rows)
        value = as_bytes(odd(rng))
        row[rng.randrange(len(row))] = rng.choice(
            (value, b"", b"0", b"-1", b"nan", b"inf", b"1e300")
        )
    return b"\n".join(mark.join(row) for row in rows) + b"\n"


def read_run(folder: Path) -> None:
    """Read what `paceline watch` shows of a folder: its runs in short and in whole, its sweeps."""
    fleet = Fleet(folder)
    fleet.read()
    fleet.sweeps()
    for name in fleet.readers:
        fleet.follow(name)


def flight_dump(rank: int) -> dict[str, Any]:
    """A flight recorder's dump; rank 1 never came to the third collective."""
    entries = [
        {
            "process_group": ["0", "default_pg"], "collective_seq_id": number, "is_p2p": False,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[8, number]],
            "output_sizes": [[8, number]], "state": "completed" if number < 3 else "started",
        }
        for number in range(1, 4 - rank)
    ]  # fmt: skip
    return {"version": "2.10", "rank": rank, "entries": entries}


class RunDirs:
    """Run and sweep directories: report, compare, list, resume, watch, diagnose; a sweep that is
    judged again."""

    name, refusals = "runs", frozenset({1, 2, 4, 9})  # 1: diagnose found an error

    def __init__(self, root: Path, env: Env) -> None:
        outputs = ("summary.md", "report.html", "timeline.json")
        runs = ("ddp1", "ddp2", "pipeline")
        made = [f"{run}/{name}" for run in runs for name in outputs]
        tables = (
            "per_run_metrics.csv", "timing_points.csv", "group_summary.csv", "skipped_runs.tsv",
            "ranked_groups.csv", "best_config.json", "best_overrides.txt", *outputs,
        )  # fmt: skip
        self.ground = Ground(root, made=(*made, *(f"sweep/{name}" for name in tables)))
        self.ground.add_folder(RUNS)
        job = load_job("lm_tiny", [])
        order = order_for(job, env, make_plan(job, env), str(root / "ddp1"))
        self.ground.add("ddp1/launch.json", find_launcher("local").plan(order).to_json().encode())
        for rank in (0, 1):
            dump = json.dumps(flight_dump(rank)).encode()
            self.ground.add(f"ddp1/ranks/rank{rank}/collectives.json", dump)
        self.ground.add("ddp1/events.jsonl", EVENTS)
        self.ground.add("pipeline/profiles/rank0_steps3-3.facts.json", FACTS.to_json().encode())
        self.names = sorted(self.ground.valid)
        self.verbs: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
            ("report", self._verb("report", "ddp1"), ("ddp1",)),
            ("report", self._verb("report", "pipeline", "--json"), ("pipeline",)),
            ("report", self._verb("report", "ddp1", "--with", "ddp2"), ("ddp1", "ddp2")),
            ("compare", self._verb("compare", "ddp1", "ddp2"), ("ddp1", "ddp2")),
            ("compare", self._verb("compare", "ddp2", "ddp1", "--json"), ("ddp1", "ddp2")),
            ("list", self._verb("checkpoints", "list", "ddp1"), ("ddp1/run.yaml",)),
            ("diagnose", self._verb("diagnose", "ddp1"), ("ddp1",)),
            ("diagnose", self._verb("diagnose", "pipeline", "--json"), ("pipeline",)),
            ("watch", lambda: read_run(root / "ddp2"), ("ddp2",)),
            ("watch", lambda: read_run(root / "sweep"), ("sweep",)),
            ("resume", self._resume, ("ddp1/run.yaml", "ddp1/launch.json", "ddp1/plan.json")),
            ("compare", self._cells, ("sweep",)),
            ("judge", self._judge, ("sweep",)),
        ]

    def _verb(self, *words: str) -> Callable[[], object]:
        folders = ("ddp1", "ddp2", "pipeline")
        typed = [str(self.ground.root / word) if word in folders else word for word in words]
        return lambda: paceline(*typed)

    def _cells(self) -> None:
        folder = self.ground.root / "sweep"
        paceline("compare", *(f"{folder}:micro_batch_size={n}" for n in (1, 2)))

    def _resume(self) -> object:
        return load_resumption(self.ground.root / "ddp1", ["train.steps=9"], allow_change=True)

    def _judge(self) -> None:
        folder = SweepDir(self.ground.root / "sweep")
        record, rows = SweepRecord.load(folder.record), load_manifest(folder.manifest)
        write_outputs(folder, record, rows, judge_sweep(record, folder, rows))

    def make(self, rng: random.Random) -> Case:
        # The last read four runs each, and what they read is mostly what the others read.
        verb, act, folders = rng.choice(self.verbs[: -2 if rng.random() < 0.9 else None])
        read = [name for name in self.names if name.startswith(folders)]
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice(read)
            self.ground.change(name, change_file(name, self.ground.valid[name], rng))
        return Case((verb, *folders), act)


class Checkpoints:
    """Checkpoints of one rank and of two: listed, verified, converted, restored. Half of the
    changes are sealed again, as somebody would who means it."""

    name, refusals = "checkpoints", frozenset({1, 2, 4, 9})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground = Ground(root, made=("run/converted", "out"))
        run = RunDir(root / "run")
        run.root.mkdir()
        run.config.write_text(dump_config(load_job(recipe_in(self.ground), []).config))
        torch.manual_seed(0)  # a case of a seed is the same in every process
        for step, num_ranks in ((1, 1), (2, 2)):
            self._save(run, step, num_ranks)
        self.ground.add_folder(root)
        self.run = run
        self.files = [name for name in self.ground.valid if "/step_" in name]
        # The backend of one process that talks to nobody; importing it makes it known.
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        if not dist.is_initialized():
            dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)

    def _save(self, run: RunDir, step: int, num_ranks: int) -> None:
        config = CheckpointConfig(mode="sync", keep=9)
        folder, store = CheckpointFolder.of_run(run, config), dist.HashStore()
        savers = [
            Saver(Writer(folder, config, store, rank, num_ranks, 1, run.checkpoint_log))
            for rank in range(num_ranks)
        ]
        threads = [
            threading.Thread(
                target=saver.save,
                args=(_kept(step), _pieces(rank, num_ranks), {"torch_cpu": torch.get_rng_state()}),
            )
            for rank, saver in enumerate(savers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for saver in savers:
            saver.wait()

    def make(self, rng: random.Random) -> Case:
        for _ in range(rng.choice((1, 1, 1, 2))):
            self._change(rng)
        run, root = str(self.run.root), self.ground.root
        which = rng.choice(("latest", "best", "1", "2", "step_1", "-1"))
        verbs: list[tuple[str, ...]] = [
            ("list", run), ("list", run, "--json"), ("verify", run), ("verify", run, "--json"),
            ("convert", run, "--out", str(root / "out"), "--", which),
        ]  # fmt: skip
        if rng.random() < 0.35:
            return Case(("restore", run), self._restore)
        words = ("checkpoints", *rng.choice(verbs))
        return Case(("paceline", *words), lambda: paceline(*words))

    def _change(self, rng: random.Random) -> None:
        """Damage any file; or change what a file says and make its sums fit again."""
        if rng.random() < 0.4:
            name = rng.choice(list(self.ground.valid))
            self.ground.change(name, change_file(name, self.ground.valid[name], rng))
            return
        step = rng.choice((1, 2))
        home = f"run/checkpoints/{step_name(step)}"
        body = json.loads(self.ground.valid[f"{home}/{MANIFEST}"])
        if rng.random() < 0.6:
            for _ in range(rng.choice((1, 1, 2))):
                body = change_tree(body, rng)
        else:
            files = [name for name in self.files if name.startswith(home)]
            name = rng.choice([f"{home}/{STATE}", *files])
            self.ground.change(name, change_file(name, self.ground.valid[name], rng))
            self._sum_again(body, home, Path(name).name)
        self.ground.change(f"{home}/{MANIFEST}", _sealed(body))

    def _sum_again(self, body: dict[str, dict[str, object]], home: str, name: str) -> None:
        path = self.ground.root / home / name
        if name in body["files"] and path.is_file() and not path.is_symlink():
            found = sum_file(path).model_dump()
            head = min(int(body["files"][name]["head_bytes"]), found["num_bytes"])  # type: ignore[index]
            if head:
                raw = path.read_bytes()[:head]
                found |= {"head_bytes": head, "head_xxh3": xxhash.xxh3_64(raw).hexdigest()}
            body["files"][name] = found

    def _restore(self) -> object:
        folder = CheckpointFolder.of_run(self.run, CheckpointConfig())

        def load(source: TensorFiles) -> None:
            for section in ("model", "optimizer"):
                for name, shape in source.shapes(section).items():  # type: ignore[arg-type]
                    source.rows(section, name, 0, (*shape, 1)[0])  # type: ignore[arg-type]

        found = choose_checkpoint(folder, CPU, load)
        return found and found.rng(0)


def _sealed(body: object) -> bytes:
    """Return a manifest with its seal; where it is none any more, as it is."""
    try:
        plain = {key: value for key, value in body.items() if key != "schema"}  # type: ignore[attr-defined]
        return seal(Manifest.model_validate(plain)).to_json().encode()
    except (ValueError, AttributeError, TypeError):
        return to_json(body)


def _kept(step: int) -> Kept:
    data = DataPosition(
        position=step * 8, num_samples=512, seed=0, epoch=0, segment=step, start_index=step * 8 - 8,
        end_index=step * 8, fingerprint="data",
    )  # fmt: skip
    return Kept(
        step=step, reason="every", saved_at=1_700_000_000.0 + step, data=data, num_skips=0, lr=1e-3,
        num_steps=100, best=None, strategy="zero3", world_size=2, precision="fp32", global_size=8,
        config_fingerprint="config", versions={"paceline": "test"},
    )  # fmt: skip


def _pieces(rank: int, num_ranks: int) -> list[Piece]:
    """Return this rank's rows of a matrix, and what all ranks have."""
    rows, everybody = 8 // num_ranks, tuple(range(num_ranks))
    block = torch.arange(24.0).reshape(8, 3)[rank * rows : (rank + 1) * rows]
    return [
        Piece("model", "weight", (8, 3), rank * rows, block, (rank,)),
        Piece("model", "small", (2,), 0, torch.ones(2, dtype=torch.bfloat16), everybody),
        Piece("model", "scalar", (), 0, torch.tensor(1.0), everybody),
        Piece("optimizer", "exp_avg/weight", (8, 3), rank * rows, block, (rank,)),
    ]


class DataManifests:
    """data.json as ranks read it, token caches as a run and its ranks read them, rows of JSONL."""

    name, refusals = "data", frozenset({2, 4})

    def __init__(self, root: Path, env: Env) -> None:
        self.ground = Ground(root, made=("fresh",))
        rows = [json.dumps({"text": f"document {n} " * 40}) for n in range(30)]
        self.ground.add("source.jsonl", ("\n".join(rows) + "\n").encode())
        os.utime(root / "source.jsonl", (1, 1))
        self.config = self._config(root / "cache")
        self.home, manifest = prepare_tokens(self.config, lambda text: None)
        words = [f"data.source={root / 'source.jsonl'}", f"data.cache_dir={root / 'cache'}"]
        run = RunDir(root / "run")
        run.root.mkdir()
        run.config.write_text(dump_config(load_job(recipe_in(self.ground), words).config))
        facts = {"shards": str(self.home), "unigram_entropy": manifest.unigram_entropy}
        run.data.write_text(json.dumps(facts))
        self.run = run
        self.ground.add_folder(root)
        self.tokens = [name for name in self.ground.valid if name.startswith("cache/")]
        self.tokens = [name for name in self.tokens if not name.endswith(".lock")]

    def _config(self, cache: Path) -> TextData:
        source = str(self.ground.root / "source.jsonl")
        return TextData(source=source, seq_len=16, val_fraction=0.2, cache_dir=str(cache))

    def make(self, rng: random.Random) -> Case:
        chosen = rng.random()
        if chosen < 0.4:
            name = rng.choice(("run/data.json", "run/data.json", "run/run.yaml", *self.tokens))
            self.ground.change(name, change_file(name, self.ground.valid[name], rng))
            return Case(("rank", str(self.run.root)), self._as_rank)
        if chosen < 0.8:
            name = rng.choice([n for n in self.tokens if n.endswith(".json")] * 3 + self.tokens)
            self.ground.change(name, change_file(name, self.ground.valid[name], rng))
            return Case(("prepare", str(self.home)), self._as_run)
        name = "source.jsonl"
        self.ground.change(name, change_file(name, self.ground.valid[name], rng))
        return Case(("prepare", "source.jsonl"), lambda: self._anew(self.ground.root / "fresh"))

    def _as_rank(self) -> object:
        job = reload_job(self.run, "lm")
        data = job.workload.build_data(job.config, "train")
        return None if data is None else data.batch([0, len(data) - 1])  # type: ignore[attr-defined]

    def _as_run(self) -> object:
        os.utime(self.ground.root / "source.jsonl", (1, 1))
        home, _ = prepare_tokens(self.config, lambda text: None)
        found = [open_tokens(home, self.config, split) for split in ("train", "val")]
        return [data.batch([0, len(data) - 1]) for data in found if data is not None]

    def _anew(self, cache: Path) -> object:
        return prepare_tokens(self._config(cache), lambda text: None)
