"""Speech on a CUDA device: the host never waits inside a pass."""

import pytest
import torch

from paceline.job import load_job
from paceline.plan.policy import effective_config
from paceline.workloads.speech_clip.wide_conv import quicken
from tests.skips import needs_gpu
from tests.speech_clip import RECIPE, TINY

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, needs_gpu]


def test_the_wide_convolution_is_cudnns_to_the_rounding() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(96, 96, 64, padding=32, groups=4, device="cuda")
    x = torch.randn(3, 96, 50, device="cuda")
    found = []
    for module, kind in ((conv, torch.float32), (quicken(conv), torch.bfloat16)):
        held = x.clone().requires_grad_()
        conv.zero_grad()
        with torch.autocast("cuda", kind, enabled=kind is torch.bfloat16):
            made = module(held)
        made.float().square().sum().backward()
        assert conv.weight.grad is not None and held.grad is not None
        found.append((made.float(), held.grad, conv.weight.grad.clone()))
    for exact, quick in zip(*found, strict=True):
        assert (exact - quick).norm() / exact.norm() < 0.02


def test_a_pass_asks_the_device_for_nothing() -> None:
    job = load_job(RECIPE, [*TINY, "launch.device=cuda", "data.root_dir=/none"])
    model = job.workload.build_model(effective_config(job.config, "sdpa")).cuda().train()
    batch = {
        "waveforms": torch.randn(4, 8000, device="cuda"),
        "num_samples": torch.tensor([8000, 7000, 5000, 4000], device="cuda"),
        "tokens": torch.randint(0, 250, (4, 9), device="cuda"),
        "num_tokens": torch.tensor([9, 8, 3, 1], device="cuda"),
    }

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss, *_ = job.workload.loss(model, batch)
        loss.backward()

    step()  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
