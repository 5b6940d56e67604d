"""Activations that wait elsewhere and moments in 8 bits: the same numbers come back."""

from array import array
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.job import load_job
from paceline.strategies.gather import storage_bytes
from paceline.strategies.offload import Offloader, offload_proofs
from paceline.strategies.optimizers import optimizer_bytes
from paceline.strategies.shape import ParameterShape
from tests.skips import needs_torchao, needs_triton


def test_what_blocks_save_comes_back() -> None:
    """Without streams of a GPU: each tensor sent once, weights never, and gradients the same."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)

    def run() -> torch.Tensor:
        y = x
        for block in blocks:
            y = y + block(y)
        return y.square().sum()

    wanted = torch.autograd.grad(run(), [x, *(p for b in blocks for p in b.parameters())])
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    for number, block in enumerate(blocks):
        offloader.wrap(block, number)
    loss = run()
    # Of each block: the input of both products and of GELU, in fp32.
    assert offloader.num_bytes == 3 * 4 * (8 + 16 + 16) * 4
    found = torch.autograd.grad(loss, [x, *(p for b in blocks for p in b.parameters())])
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
    (proof,) = offload_proofs(nn.Sequential(*blocks))
    assert proof.ok and proof.effective == "1,920 bytes of 3 blocks sent so far"
    assert not offloader.parked, "nothing waits, nor is held on the device, once it was read"
    with torch.no_grad():
        before = offloader.num_bytes
        run()
        assert offloader.num_bytes == before, "nothing is saved without gradients"


def test_an_offload_that_sends_nothing_is_told() -> None:
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    (proof,) = offload_proofs(blocks)
    assert not proof.ok and proof.effective == "0 bytes of 0 blocks sent so far"
    offloader = Offloader(torch.device("cpu"))
    for number, block in enumerate(blocks):
        offloader.wrap(block, number)
    blocks(torch.randn(4, 8)).sum().backward()
    (proof,) = offload_proofs(blocks)
    assert not proof.ok and proof.effective == "0 bytes of 2 blocks sent so far"
    assert "1 MiB or more" in proof.proof


class Recycling(nn.Module):
    """Multiplies by two tensors, the second made where the first one lay: the allocator does so
    with casts, which are dropped as soon as a layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(8 * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (2.0, 3.0):
            self.memory[:] = array("f", [number] * 8).tobytes()
            x = x * torch.frombuffer(self.memory, dtype=torch.float32)
        return x


def test_a_copy_is_for_its_own_tensor_only() -> None:
    block, x = Recycling(), torch.ones(8, requires_grad=True)
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    offloader.wrap(block, 0)
    (gradient,) = torch.autograd.grad(block(x).sum(), x)
    assert gradient.tolist() == [2.0 * 3.0] * 8
    assert offloader.num_bytes == 2 * 8 * 4


def test_what_is_saved_twice_is_sent_once() -> None:
    x = torch.ones(8, requires_grad=True)
    block = nn.Module()
    block.forward = lambda y: y.exp().square()  # type: ignore[method-assign]
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    offloader.wrap(block, 0)
    (gradient,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(gradient, 2 * (2 * x).exp())
    assert offloader.num_bytes == 8 * 4, "exp saves its result, square its input: they are one"


class Strict(torch.autograd.Function):
    """As a compiled graph: what it saved must lie as it did."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x[:, 2:4].t(), x[:1].expand(4, 6))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        part, wide = ctx.saved_tensors
        assert part.stride() == (1, 6) and wide.stride() == (0, 1)
        assert part.tolist() == [[2.0, 8.0], [3.0, 9.0]] and wide[3].tolist() == list(range(6))
        return gradients[0] * 2


def test_a_graph_gets_back_the_strides_that_it_saved() -> None:
    block, x = nn.Module(), torch.arange(12.0).view(2, 6).requires_grad_()
    block._compiled_call_impl = Strict.apply  # type: ignore[assignment]
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    offloader.wrap(block, 0)
    block(x).sum().backward()
    assert offloader.num_bytes == 2 * 2 * 4, "what is expanded stays: it is one row"


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


@pytest.mark.slow  # imports the compiler
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_compiled_block_saves_on_the_host(is_whole: bool) -> None:
    """Hooks are no part of what is compiled, also where the compiler takes a block layer by layer:
    it would compile them too, and fail."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    block, x = Feed() if is_whole else plain, torch.randn(4, 8)
    wanted = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    torch._dynamo.reset()
    block.compile(backend="aot_eager")
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    offloader.wrap(block, 0)
    before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    found = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    if is_whole:
        after = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        assert after == (before[0] + 1, before[1])
    assert offloader.num_bytes >= 4 * 16 * 4, "the input of GELU, at least"
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow  # imports the compiler
def test_as_many_tokens_as_a_compiled_weight_has_rows_are_sent_too() -> None:
    """Its graph has no history to tell them by: each token sends as much as elsewhere."""
    sent = []
    for num_tokens in (8, 12, 16):
        torch._dynamo.reset()
        block, x = Feed(), torch.randn(num_tokens, 8)
        block.compile(backend="aot_eager", dynamic=False)
        offloader = Offloader(torch.device("cpu"), min_bytes=0)
        offloader.wrap(block, 0)
        block(x).sum().backward()
        sent.append(offloader.num_bytes / num_tokens)
    assert sent[0] >= sent[1] and sent[2] >= sent[1] > 0


class Low(nn.Module):
    """A layer in fp8, which keeps its input turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from paceline.kernels.fp8 import linear

        return linear(x, self.weight)


@needs_triton
@pytest.mark.slow  # imports the compiler
def test_as_many_tokens_as_a_weight_in_fp8_has_rows_are_sent_turned() -> None:
    sent = []
    for num_tokens in (48, 64, 80):
        torch._dynamo.reset()
        block = Low()
        block.compile(backend="aot_eager", dynamic=False)
        offloader = Offloader(torch.device("cpu"), min_bytes=0)
        offloader.wrap(block, 0)
        block(torch.randn(num_tokens, 16, requires_grad=True)).sum().backward()
        sent.append(offloader.num_bytes / num_tokens)
    assert sent[1] >= max(sent[0], sent[2]) > 0


def test_a_weight_is_told_by_its_history() -> None:
    """As many tokens as the model is wide: activations and weights have one shape."""
    block, x = nn.Linear(8, 8, bias=False), torch.randn(8, 8, requires_grad=True)
    offloader = Offloader(torch.device("cpu"), min_bytes=0)
    offloader.wrap(block, 0)
    block(x + 1).sum()
    assert offloader.num_bytes == 8 * 8 * 4
    with torch.autocast("cpu", torch.bfloat16):
        block(x + 1).sum()
    assert offloader.num_bytes == 8 * 8 * (4 + 2), "the input cast to bf16, not the weight's cast"


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize(
    "like",
    [
        torch.randn(32, 64, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(512, 512).t(),
        torch.randn(16, 512).bfloat16(),
        torch.randn(16).bfloat16(),
        torch.randn(16, 512).double(),
    ],
    ids=["channels last", "turned", "bf16", "bf16, few", "double"],
)
def test_moments_in_8_bits_of_other_weights_resume_bit_by_bit(like: torch.Tensor) -> None:
    from paceline.strategies.eight_bit import AdamW8bit

    def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.randn_like(weight)
        optimizer.step()

    weight, exact = nn.Parameter(like.clone()), nn.Parameter(like.double())
    mine, torchs = AdamW8bit([weight], lr=1e-2), torch.optim.AdamW([exact], lr=1e-2, weight_decay=0)
    for seed in range(4):
        step(mine, seed)
        torch.manual_seed(seed)
        exact.grad = torch.randn_like(like).double()
        torchs.step()
    assert (exact - weight).norm() < 0.01 * exact.norm()
    again = nn.Parameter(weight.detach().clone())
    resumed = AdamW8bit([again], lr=1e-2)
    resumed.load_state_dict(deepcopy(mine.state_dict()))
    step(mine, 9)
    step(resumed, 9)
    assert torch.equal(weight, again)
    planned = ParameterShape(tuple(like.shape), like.element_size(), is_trainable=True, unit=0)
    config = load_job("lm_tiny", ["optim.name=adamw8bit"]).config
    assert storage_bytes(mine.state[weight].values()) == optimizer_bytes(config, [planned])


@needs_torchao
@pytest.mark.slow
def test_moments_in_8_bits_follow_adamw_and_resume_bit_by_bit() -> None:
    from paceline.strategies.eight_bit import AdamW8bit

    torch.manual_seed(0)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    weights = [nn.Parameter(torch.randn(16, 512)), nn.Parameter(torch.randn(7))]
    exact = [nn.Parameter(p.detach().clone()) for p in weights]
    mine, torchs = AdamW8bit(weights, **settings), torch.optim.AdamW(exact, **settings)

    def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    for seed in range(8):
        step(mine, weights, seed)
        step(torchs, exact, seed)
    torch.testing.assert_close(weights[1], exact[1])
    moved = (exact[0] - weights[0]).norm() / exact[0].norm()
    assert 0 < moved < 5e-3
    assert mine.state[weights[0]]["exp_avg_codes"].dtype == torch.uint8

    again = [nn.Parameter(p.detach().clone()) for p in weights]
    resumed = AdamW8bit(again, **settings)
    resumed.load_state_dict(deepcopy(mine.state_dict()))
    step(mine, weights, 100)
    step(resumed, again, 100)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
