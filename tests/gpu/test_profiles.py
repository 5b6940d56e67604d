"""Profiles and memory on a real GPU: kernels, launch gaps, which module holds what."""

import gc
from pathlib import Path

import pytest
import torch

from paceline.errors import MemoryFull
from paceline.records.memory import MemoryDump
from paceline.records.rundir import RunDir
from paceline.traces.flow import read_profile_facts, write_profile_facts
from tests.cli.program import paceline
from tests.harness import run_here
from tests.skips import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
SMALL = [
    "data.synthetic_samples=64", "model.dim=256", "model.num_layers=2", "model.num_heads=4",
    "model.num_kv_heads=4", "data.seq_len=128", "train.micro_batch_size=8", "train.compile=off",
    "data.num_workers=0", "launch.device=cuda",
]  # fmt: skip


def test_a_profile_has_kernels_and_a_snapshot_has_modules(tmp_path: Path) -> None:
    settings = ["train.steps=7", "observe.profile=steps:5-6", "observe.memory=snapshot"]
    # A process of its own: in ours other tests may hold memory.
    words = [*SMALL, *settings, "observe.nvtx=true", "launch.nproc=1"]
    ran = paceline("train", "lm_tiny", *words, "--out", "run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    run = RunDir(tmp_path / "run")
    write_profile_facts(run)
    (facts,) = read_profile_facts(run)
    assert facts.on_device and facts.categories["matrix products"] > 0
    assert facts.num_launch_gaps > 0 and 0 < facts.busy_s < facts.window_s
    peak = MemoryDump.load(run.memory_dump(0, "peak"))
    assert any(o.kind == "activations" and o.module.startswith("blocks.") for o in peak.owners)
    # All that the allocator had handed out at its peak has a name, to within its rounding.
    assert sum(peak.by_kind.values()) == pytest.approx(peak.counted_bytes, rel=0.2)
    assert (run.rank(0) / "memory_snapshot.pickle").stat().st_size > 1000


@pytest.mark.serial  # it takes all memory that there is
def test_out_of_memory_names_what_was_saved_for_backward(tmp_path: Path) -> None:
    large = ["model.dim=4096", "model.num_layers=8", "model.num_heads=32", "model.num_kv_heads=32",
             "data.seq_len=2048", "train.micro_batch_size=256", "data.synthetic_samples=512",
             "train.steps=2", "launch.overcommit=true"]  # fmt: skip
    with pytest.raises(MemoryFull, match="out of memory"):
        run_here(tmp_path / "run", "lm_tiny", [*SMALL, *large])
    gc.collect()
    torch.cuda.empty_cache()  # this process goes on, and others need the memory
    dump = MemoryDump.load(RunDir(tmp_path / "run").memory_dump(0, "oom"))
    assert dump.owners[0].kind == "activations" and dump.inside
    assert dump.by_kind["activations"] > 0.3 * dump.counted_bytes
