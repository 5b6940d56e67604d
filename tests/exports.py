"""Run directories with a checkpoint, as far as `paceline export` reads them, without training."""

from pathlib import Path
from typing import Any

from paceline.config.schema import LaunchConfig
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.records.rundir import RunDir
from paceline.run.rank import TRAIN
from tests.kept import keep, make_run
from tests.machines import machine, plan

LM = [
    "data.source=synthetic", "model.vocab_size=320", "model.dim=32", "model.num_layers=2",
    "model.num_heads=4", "model.num_kv_heads=2", "data.seq_len=64", "launch.device=cpu",
]  # fmt: skip
LLAMA = [
    "model.hf=llama", "data.source=synthetic", "data.seq_len=32", "launch.device=cpu",
    "model.hf_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,"
    " num_key_value_heads: 2, intermediate_size: 48, vocab_size: 320,"
    " max_position_embeddings: 64}",
]  # fmt: skip
MAE = ["launch.device=cpu"]


def make(
    folder: Path, source: str = "lm_tiny", overrides: list[str] = LM, workload: str = "lm",
    data: str = "{}", num_ranks: int = 1,
) -> tuple[RunDir, dict[str, Any]]:  # fmt: skip
    """A run with one checkpoint at step 5, written by `num_ranks` ranks that share its rows."""
    run, tensors = make_run(folder, source, overrides)
    planned = plan(*overrides, source=source)
    planned.save(run.plan)
    machine().save(run.env)
    order = LaunchOrder(LaunchConfig(), planned.crew, machine(), 1, TRAIN, workload)
    draw_plan(order, argv=[], hosts=["box"]).save(run.launch)
    run.data.write_text(data)
    keep(run, tensors, 5, num_ranks=num_ranks)
    return run, tensors
