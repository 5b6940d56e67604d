"""Precision and attention: the table of devices, and one clear refusal for each impossible wish."""

import pytest

from tests.machines import machine as env
from tests.machines import plan

V100 = env(num_gpus=1, capability="7.0", name="Tesla V100-SXM2-16GB")
H200 = env(num_gpus=1)
CPU = env()


@pytest.mark.parametrize(
    ("machine", "precision", "attention"),
    [(V100, "fp16", "eager"), (H200, "bf16", "sdpa"), (CPU, "fp32", "sdpa")],
)
def test_auto_follows_the_compute_capability(machine, precision: str, attention: str) -> None:  # type: ignore[no-untyped-def]
    made = plan(machine=machine)
    assert (made.precision.value, made.attention.value) == (precision, attention)
    assert made.precision.requested == made.attention.requested == "auto"
    assert not made.problems()


@pytest.mark.parametrize(
    ("overrides", "machine", "what", "hint"),
    [
        (["precision.mode=bf16"], V100, "7.0 has no bf16", "precision.mode=fp16"),
        (
            ["precision.mode=fp16", "precision.loss_scale=off"],
            H200,
            "fp16 without a gradient scaler",
            "loss_scale=auto",
        ),
        (["attention.impl=flash", "precision.mode=fp32"], H200, "takes bf16 or fp16", "bf16"),
        (
            ["attention.impl=flash", "model.dim=120", "model.num_heads=2", "model.num_kv_heads=2"],
            H200,
            "heads of 60: flash takes multiples of 8",
            "number of heads",
        ),
        (["attention.impl=flash"], V100, "needs 8.0", "eager"),
        (["attention.impl=cudnn"], CPU, "a kernel for GPUs", "sdpa"),
        (["attention.impl=flex"], CPU, "no backward pass on CPU", "eager or sdpa"),
        (
            ["strategy.name=zero3_hybrid", "launch.nproc=4", "strategy.shard_size=3"],
            CPU,
            "4 ranks in groups of 3 is not a grid",
            "strategy.shard_size=2",
        ),
        (["strategy.name=zero2_hybrid", "launch.nproc=2"], CPU, "2 ranks in groups", "use zero2"),
        (["strategy.name=single", "launch.nproc=2"], CPU, "one rank", "ddp"),
    ],
)
def test_the_impossible_is_refused_with_a_way_out(  # type: ignore[no-untyped-def]
    overrides: list[str], machine, what: str, hint: str
) -> None:
    problems = plan(*overrides, machine=machine).problems()
    assert len(problems) == 1, problems
    assert what in problems[0].what and hint in problems[0].hint


def test_attention_that_a_workload_lacks_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    job = tmp_path / "plain.py"
    job.write_text(
        "from torch import nn\nfrom paceline import Workload\n"
        "class Plain(Workload):\n"
        "    def build_model(self, config): return nn.Linear(4, 1)\n"
        "    def build_data(self, config, split): return None\n"
        "    def loss(self, model, batch): return model(batch).sum(), 1\n"
    )
    made = plan("attention.impl=eager", source=f"{job}:Plain")
    assert "has no eager attention" in made.problems()[0].what


def test_a_scalar_parameter_cannot_be_cut(tmp_path) -> None:  # type: ignore[no-untyped-def]
    job = tmp_path / "scalar.py"
    job.write_text(
        "import torch\nfrom torch import nn\nfrom paceline import Workload\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.gain = nn.Parameter(torch.ones(()))\n"
        "class Scalar(Workload):\n"
        "    def build_model(self, config): return Net()\n"
        "    def build_data(self, config, split): return None\n"
        "    def loss(self, model, batch): return model.gain.sum(), 1\n"
    )
    made = plan("strategy.name=zero3", "launch.nproc=2", source=f"{job}:Scalar")
    assert "one without axes" in made.problems()[0].what
    assert not plan("strategy.name=zero1", "launch.nproc=2", source=f"{job}:Scalar").problems()


def test_settings_that_another_strategy_reads_are_named() -> None:
    made = plan(
        "strategy.name=zero3", "launch.nproc=2", "strategy.bucket_mb=5", "strategy.shard_size=2",
        "strategy.stage=3", "strategy.comm_hook=bf16", "strategy.offload=true",
        "strategy.accumulate=defer", "precision.loss_scale=8.0",
    )  # fmt: skip
    said = {finding.where for finding in made.findings if "no effect" in finding.what}
    assert said == {
        "strategy.bucket_mb", "strategy.shard_size", "strategy.stage", "strategy.comm_hook",
        "strategy.offload", "strategy.accumulate", "precision.loss_scale",
    }  # fmt: skip
