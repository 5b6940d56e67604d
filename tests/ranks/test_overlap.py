"""Communication that really runs beside the backward pass, and communication that waits for it."""

import pytest

from paceline.records import Overlap
from paceline.records.recorded import last_to_arrive
from tests.harness import RankEnds, run_each

pytestmark = [pytest.mark.slow, pytest.mark.serial]  # other work would send late what is ready
# The layer whose gradient is ready first has most of the weights; the others compute longest.
JOB = """
import torch
from torch import nn
from paceline import Workload

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256) for _ in range(24)])
        self.wide = nn.Linear(256, 8192)
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.wide(x[:64])

class Job(Workload):
    def build_model(self, config): return Deep()
    def build_data(self, config, split):
        return [torch.full((256,), n / 4096) for n in range(8192)] if split == "train" else None
    def loss(self, model, batch): return model(batch).square().mean() * len(batch), len(batch)
"""
ASKED = [
    "launch.device=cpu", "launch.nproc=2", "train.steps=5", "train.micro_batch_size=1024",
    "data.num_workers=0", "strategy.name=ddp",
]  # fmt: skip


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankEnds]:
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "job.py").write_text(JOB)
    cases = {"small": [*ASKED, "strategy.bucket_mb=1"], "one": [*ASKED, "strategy.bucket_mb=64"]}
    return run_each(folder, f"{folder / 'job.py'}:Job", cases)


def measured(ends: RankEnds) -> Overlap:
    """What the rank has that came last, which waited for nobody."""
    found = last_to_arrive([Overlap.load(ends.run.overlap(rank)) for rank in range(2)])
    assert found.communication_s > 0
    return found


def test_one_bucket_is_sent_when_all_is_computed(ends: dict[str, RankEnds]) -> None:
    found = measured(ends["one"])
    assert found.exposed_s > 0.8 * found.communication_s


def test_small_buckets_are_sent_beside_the_backward_pass(ends: dict[str, RankEnds]) -> None:
    found = measured(ends["small"])
    assert found.exposed_s < 0.7 * found.communication_s
