"""A slow rank on a GPU is named by the times between events: no host waits for the device."""

from pathlib import Path

import pytest

from paceline.cli.talk import ConsoleTalk
from paceline.drill.flow import load_drilled, run_drill
from paceline.records.drills import Drill, Fault
from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps
from tests.skips import needs_deepspeed, needs_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), needs_gpu]
TWO = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=128", "model.dim=256",
    "model.num_layers=2", "train.eval_every=off", "train.eval_samples=all", "train.compile=off",
    "launch.device=cuda", "launch.nproc=2", "launch.devices=[0,0]", "checkpoint.at_end=false",
]  # fmt: skip


OVERLAP = "+strategy.deepspeed_config.zero_optimization.overlap_comm"


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "zero3",
        # Exchanges on the stream of the step, and on others beside it.
        pytest.param(f"deepspeed strategy.stage=2 {OVERLAP}=false", marks=needs_deepspeed),
        pytest.param(f"deepspeed strategy.stage=2 {OVERLAP}=true", marks=needs_deepspeed),
        pytest.param("deepspeed strategy.stage=3", marks=needs_deepspeed),
    ],
)
def test_a_slow_rank_is_named_by_events_of_the_device(strategy: str, tmp_path: Path) -> None:
    job = load_drilled("lm_tiny", [*TWO, *f"strategy.name={strategy}".split()])
    drill = Drill(fault=Fault.SLOW_FORWARD, share=1.0)
    end = run_drill(job, drill, tmp_path / "run", ConsoleTalk(quiet=True))
    assert end.named is not None, end.found
    blocked = ("forward_blocked_s", "backward_blocked_s")  # sharded weights are waited for earlier
    waited = []
    for rank in (0, 1):
        steps = read_steps(RunDir(tmp_path / "run").steps(rank)).since(20)
        waited.append(sum(steps.column(name).mean() for name in blocked))
    assert waited[0] > waited[1], "who is early waits"
