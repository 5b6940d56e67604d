"""Run directories with checkpoints, made by the real saver without a training run around it."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import Piece, Section, named_tensors
from paceline.checkpoint.saver import Saver, Writer
from paceline.config.load import dump_config
from paceline.config.schema import CheckpointConfig
from paceline.job import load_job
from paceline.records import BestMetric, DataPosition, Kept
from paceline.records.rundir import RunDir
from paceline.strategies.weights import fill_weights

CPU = torch.device("cpu")
TINY_LM = [
    "data.source=synthetic", "model.vocab_size=64", "model.dim=32", "model.num_layers=2",
    "model.num_heads=2", "model.num_kv_heads=2", "data.seq_len=16",
]  # fmt: skip


def make_run(folder: Path, source: str, overrides: list[str]) -> tuple[RunDir, dict[str, Any]]:
    """run.yaml as a run would write it, and the first weights of its model by name."""
    job = load_job(source, overrides)
    run = RunDir.create("test", folder)
    run.config.write_text(dump_config(job.config))
    with torch.device("meta"):
        model = job.workload.build_model(job.config)
    fill_weights(model, lambda n, m: job.workload.init_weights(model, n, m), 0, CPU)
    return run, {name: value.detach() for name, value in named_tensors(model)}


def keep(
    run: RunDir, tensors: Mapping[str, torch.Tensor], step: int, *, best: BestMetric | None = None,
    num_ranks: int = 1, config: CheckpointConfig | None = None,
) -> CheckpointFolder:  # fmt: skip
    """Save a checkpoint, with one moment for an optimizer, as `num_ranks` ranks together."""
    config = config or CheckpointConfig(mode="sync", keep=9)
    folder = CheckpointFolder.of_run(run, config)
    store = dist.HashStore()
    savers = [
        Saver(Writer(folder, config, store, rank, num_ranks, 1, run.checkpoint_log))
        for rank in range(num_ranks)
    ]
    threads = [
        threading.Thread(
            target=saver.save,
            args=(_kept(step, best, num_ranks), _pieces(tensors, rank, num_ranks), {"torch": CUT}),
        )
        for rank, saver in enumerate(savers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for saver in savers:
        saver.wait()
        assert saver.failure is None, saver.failure
    return folder


CUT = torch.zeros(8, dtype=torch.uint8)


def _pieces(tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> list[Piece]:
    """Tensors with rows are cut in contiguous blocks, as zero3 does; others are everybody's.
    `ema/NAME` is the average of a weight."""
    everybody, found = tuple(range(num_ranks)), []
    for name, value in tensors.items():
        rows = -(-len(value) // num_ranks) if value.dim() else 0
        if value.dim() and num_ranks > 1:
            block = value[rank * rows : (rank + 1) * rows]
            if len(block):
                found.append(Piece("model", name, tuple(value.shape), rank * rows, block, (rank,)))
        else:
            section: Section = "optimizer" if name.startswith("ema/") else "model"
            found.append(Piece(section, name, tuple(value.shape), 0, value, everybody))
    found.append(Piece("optimizer", "exp_avg/w", (4,), 0, torch.ones(4), everybody))
    return found


def _kept(step: int, best: BestMetric | None, num_ranks: int) -> Kept:
    data = DataPosition(
        position=step * 8, num_samples=512, seed=0, epoch=0, segment=step, start_index=step * 8 - 8,
        end_index=step * 8, fingerprint="data",
    )  # fmt: skip
    return Kept(
        step=step, reason="every", saved_at=1_700_000_000.0 + step, data=data, num_skips=0,
        lr=1e-3, num_steps=100, best=best, strategy="zero3" if num_ranks > 1 else "single",
        world_size=num_ranks, precision="fp32", global_size=8, config_fingerprint="config",
        versions={"paceline": "test"},
    )  # fmt: skip


def flip_bit(path: Path, place: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
