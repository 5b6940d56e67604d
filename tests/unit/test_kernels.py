"""Kernels against plain torch, forward and backward: by Triton's interpreter where there is no
GPU."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.kernels.products import project
from tests.skips import has_gpu, needs_torchao, needs_triton

# Read when a kernel is defined, so before its module is imported.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if has_gpu() else "cpu"
MOMENTS = ("exp_avg", "exp_avg_sq")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
pytestmark = needs_triton


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def assert_same_gradients(a: Any, b: Any, inputs: tuple[Tensor, ...]) -> None:
    """Of the same outputs by the same inputs."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)
    seeds = [torch.randn_like(x) for x in a]
    expected, found = (torch.autograd.grad(outputs, inputs, seeds) for outputs in (a, b))
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (3, 1, 6), (2, 2, 16)])
def test_rope(heads: int, kv_heads: int, width: int) -> None:
    """Widths and counts that are not powers of two have masked lanes."""
    from paceline.kernels.rope import split_rotated
    from paceline.workloads.lm.model import rotate

    B, T, H, K, E = 2, 5, heads, kv_heads, width
    qkv = random(B, T, (H + 2 * K) * E)
    angle = torch.randn(T, E // 2, device=DEVICE).repeat(1, 2)
    tables = angle.cos(), angle.sin()
    q, k, v = (
        part.unflatten(-1, (-1, E)).transpose(1, 2)
        for part in qkv.split([H * E, K * E, K * E], dim=-1)
    )
    plain = rotate(q, tables), rotate(k, tables), v
    assert_same_gradients(plain, split_rotated(qkv, tables, H, K), (qkv,))


def test_swiglu_with_its_product() -> None:
    from paceline.kernels.swiglu import swiglu_down

    gate_up, down = random(2, 3, 40), random(7, 20)
    gate, up = gate_up.chunk(2, dim=-1)
    plain = F.linear(F.silu(gate) * up, down)
    assert_same_gradients([plain], [swiglu_down(gate_up, down)], (gate_up, down))


def test_a_weights_gradient_has_the_weights_type() -> None:
    """In fp32 from bf16 it is the sum before it is rounded."""
    from paceline.kernels.products import linear

    x = random(64, 16).detach().bfloat16().requires_grad_()
    weight = random(8, 16)
    y = linear(x, weight)
    g = torch.randn_like(y)
    y.backward(g)
    assert y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    exact = g.double().t() @ x.double()
    torch.testing.assert_close(weight.grad.double(), exact, rtol=1e-5, atol=1e-4)
    rounded = exact.bfloat16().double()
    assert (weight.grad - exact).norm() < (rounded - exact).norm() / 100


@pytest.mark.parametrize("block", [16, 64])
def test_losses_of_tokens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in one block and in three; a token that does not count; a logit of -inf."""
    from paceline.kernels import softmax

    monkeypatch.setattr(softmax, "BLOCK", block)
    logits, targets = random(5, 37).detach(), torch.tensor([0, 36, -100, 5, 16], device=DEVICE)
    logits[0, 17:] = float("-inf")
    leaf = logits.clone().requires_grad_()
    losses = F.cross_entropy(leaf, targets, reduction="none")
    (expected,) = torch.autograd.grad(losses.sum(), leaf)
    kept = logits.clone()
    found = softmax.take_losses(logits, targets, has_gradients=True)
    torch.testing.assert_close(found, losses.detach(), **CLOSE)
    torch.testing.assert_close(logits, expected, **CLOSE)
    softmax.take_losses(kept, targets, has_gradients=False)
    assert kept[0, 17:].isinf().all(), "without gradients nothing is written"


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_target_beyond_the_vocabulary_has_no_loss(has_gradients: bool) -> None:
    """Neither the next row is read nor what lies behind the last: the run ends as nan."""
    from paceline.kernels.softmax import take_losses

    logits, targets = random(4, 8).detach(), torch.tensor([8, 1, -100, 9], device=DEVICE)
    expected = F.cross_entropy(logits[1], targets[1])
    losses = take_losses(logits, targets, has_gradients)
    assert losses.isnan().tolist() == [True, False, False, True]
    torch.testing.assert_close(losses[1], expected, **CLOSE)
    assert losses[2] == 0
    if has_gradients:
        assert logits.isnan().all(1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("chunk", [4, 11, 100])
def test_chunked_loss(chunk: int) -> None:
    """Also scaled afterwards, as every loss is, and without gradients."""
    from paceline.kernels.cross_entropy import chunked_loss

    x, head = random(11, 6), random(37, 6)
    targets = torch.randint(0, 37, (11,), device=DEVICE)
    targets[3] = -100
    plain = F.cross_entropy(F.linear(x, head), targets, reduction="sum") * 3
    found = chunked_loss(x, head, targets, chunk) * 3
    assert_same_gradients([plain], [found], (x, head))
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(x, head, targets, chunk) * 3, plain.detach())


def test_a_chunked_loss_of_nothing_has_no_gradient() -> None:
    from paceline.kernels.cross_entropy import chunked_loss

    x, head = random(0, 6), random(37, 6)
    loss = chunked_loss(x, head, torch.zeros(0, dtype=torch.int64, device=DEVICE), 4)
    loss.backward()
    assert loss == 0 and not head.grad.any()


def test_adamw_is_torchs() -> None:
    """With the divisor of clipping, and a veto that leaves all as it is."""
    from paceline.strategies.update_rules import OneReadAdamW

    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(random(70, 71).detach().clone()) for _ in range(2))
    with torch.no_grad():
        ours.copy_(theirs)
    mine, torchs = OneReadAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    mine.grad_scale = torch.tensor(2.0, device=DEVICE)
    for veto in (0.0, 0.0, 1.0, 0.0):
        gradient = torch.randn_like(theirs)
        ours.grad = gradient / (0.0 if veto else 1.0)
        mine.found_inf = torch.tensor(veto, device=DEVICE)
        mine.step()
        if not veto:
            theirs.grad = gradient / 2
            torchs.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for name, value in torchs.state[theirs].items():
        torch.testing.assert_close(mine.state[ours][name].cpu(), value.cpu(), **CLOSE)


@pytest.mark.parametrize("layout", ["channels last", "turned", "columns of another"])
@pytest.mark.parametrize("has_state", [False, True])
def test_adamw_is_torchs_however_weights_lie(layout: str, has_state: bool) -> None:
    """Also with moments that lie by rows, as they come from elsewhere."""
    from paceline.strategies.update_rules import OneReadAdamW

    values = {
        "channels last": random(4, 3, 2, 5).detach().to(memory_format=torch.channels_last),
        "turned": random(6, 4).detach().t(),
        "columns of another": random(6, 8).detach()[:, 1:5],
    }[layout]
    ours, theirs = torch.nn.Parameter(values), torch.nn.Parameter(values.clone())
    assert not ours.is_contiguous()
    mine, torchs = OneReadAdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    if has_state:
        moments = {name: torch.zeros(values.shape, device=DEVICE) for name in MOMENTS}
        mine.state[ours] = {"step": torch.zeros((), device=DEVICE), **moments}
    for _ in range(2):
        gradient = torch.randn(values.shape, device=DEVICE)
        ours.grad, theirs.grad = gradient.clone(), gradient
        mine.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for name in MOMENTS:
        torch.testing.assert_close(mine.state[ours][name], torchs.state[theirs][name], **CLOSE)


def test_a_model_by_kernels_is_the_model() -> None:
    """Loss and gradients of all weights; documents that do not see each other too."""
    from paceline.workloads.lm.model import LM
    from paceline.workloads.lm.workload import LMModel

    config = LMModel(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
    plain, fused = LM(config, 12).to(DEVICE), LM(config, 12, kernels="triton", chunk=5).to(DEVICE)
    fused.load_state_dict(plain.state_dict())
    tokens, targets = (torch.randint(0, 64, (2, 12), device=DEVICE) for _ in range(2))
    positions = torch.arange(12, device=DEVICE).remainder(7).expand(2, 12)
    for apart in ((), (positions,)):
        expected, found = plain(tokens, targets, *apart), fused(tokens, targets, *apart)
        assert_same_gradients_by_name(expected, found, plain, fused)


def assert_same_gradients_by_name(
    expected: Tensor, found: Tensor, a: torch.nn.Module, b: torch.nn.Module
) -> None:
    torch.testing.assert_close(expected, found, **CLOSE)
    grads = [torch.autograd.grad(x, list(m.parameters())) for x, m in ((expected, a), (found, b))]
    for (name, _), x, y in zip(a.named_parameters(), *grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_swiglu_alone() -> None:
    from paceline.kernels.swiglu import swiglu

    gate_up = random(2, 3, 12)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same_gradients((F.silu(gate) * up,), (swiglu(gate_up),), (gate_up,))


@needs_torchao
@pytest.mark.parametrize(("N", "D", "F"), [(96, 80, 144), (256, 128, 384)])
def test_a_layer_in_fp8_has_torchaos_numbers(N: int, D: int, F: int) -> None:
    """Sides that are and are not multiples of a tile, outliers, a gradient that only e5m2 holds."""
    from paceline.kernels import fp8
    from paceline.strategies.fp8 import load_torchao

    float8 = load_torchao("float8")
    layer = torch.nn.Linear(D, F, bias=False, device=DEVICE)
    layer.weight.data = layer.weight.data.bfloat16().float()
    x = random(3, N // 3, D) if N % 3 == 0 else random(N, D)
    x = x.detach().bfloat16()
    x[..., 0, 0] = 50
    x.requires_grad_()
    seed = torch.randn(*x.shape[:-1], F, device=DEVICE, dtype=x.dtype) * 1e-6
    seed[..., 0, 0] = 1
    ours = fp8.linear(x, layer.weight)
    found = torch.autograd.grad(ours, (x, layer.weight), seed)
    config = float8.Float8LinearConfig(emulate=DEVICE == "cpu")
    theirs = float8.convert_to_float8_training(layer, config=config)
    expected = theirs(x)
    torch.testing.assert_close(ours, expected)
    wanted = torch.autograd.grad(expected, (x, theirs.weight), seed)
    torch.testing.assert_close(found[0], wanted[0])
    # They write the weight's gradient in the type of the output, and cast it.
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-2, atol=1e-6)


def build_layer(is_freed: bool) -> torch.nn.Module:
    from paceline.kernels import fp8

    layer = torch.nn.Linear(128, 256, bias=False, device=DEVICE, dtype=torch.bfloat16)
    layer.forward = lambda x: fp8.linear(x, layer.weight, is_freed)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_kept_of_a_weight_that_is_freed(is_compiled: bool) -> None:
    """Beside the weight itself, which whoever frees it brings back; and gradients are the same."""
    x, found, kept = random(16, 128).detach().bfloat16().requires_grad_(), [], []
    for is_freed in (False, True):
        torch.manual_seed(0)
        layer = build_layer(is_freed)
        if is_compiled:
            torch._dynamo.reset()
            layer.compile(backend="aot_eager_decomp_partition")
        saved: list[Tensor] = []

        def pack(value: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            product = layer(x)
        found.append(torch.autograd.grad(product.float().square().sum(), (x, layer.weight)))
        others = [v for v in saved if v.data_ptr() != layer.weight.data_ptr()]
        kept.append(sum(value.nbytes for value in others if value.numel() >= 128 * 256))
    assert kept == [128 * 256, 0]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


class Projected(torch.nn.Sequential):
    """Layers that FSDP gathers in fp8, each torchao's or ours."""

    kernels = "torch"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            assert isinstance(layer, torch.nn.Linear)
            x = project(layer, x, self.kernels)
        return x * 1  # FSDP warns of a view


class GatherCase(NamedTuple):
    frees: bool  # weights between forward and backward
    is_compiled: bool


class Gathered(NamedTuple):
    """A product of weights that were gathered in fp8, all gradients, and the bytes of what as large
    as a weight was kept for them beside the weights."""

    tensors: list[Tensor]
    kept: int


def build_gathered(mesh: DeviceMesh, kernels: str, frees: bool) -> Projected:
    from paceline.strategies.fp8 import convert_layers

    torch.manual_seed(0)
    model = Projected(*(torch.nn.Linear(128, 128, bias=False, device=DEVICE) for _ in range(2)))
    model.kernels = kernels
    layers = Mock(recipe="tensorwise", gathers_fp8=True, layers=["0", "1"])
    convert_layers(model, Mock(fp8=layers), torch.device(DEVICE))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    return model


def gather_and_multiply(mesh: DeviceMesh, x: Tensor, kernels: str, how: GatherCase) -> Gathered:
    model, saved = build_gathered(mesh, kernels, how.frees), list[Tensor]()
    torch._dynamo.reset()
    if how.is_compiled:
        model.compile(backend="aot_eager_decomp_partition")
    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda v: (saved.append(v), v)[1], lambda v: v):
        y = model(x)
    weights: list[Any] = [layer.weight for layer in model]
    own = {0} if how.frees else {weight._data.data_ptr() for weight in weights}
    large = [v for v in saved if type(v) is Tensor and v.numel() >= 128**2]
    kept = sum(v.nbytes for v in large if v.data_ptr() not in own)
    (y.float() * torch.linspace(-1, 1, 128, device=DEVICE)).sum().backward()
    assert x.grad is not None
    weights = [layer.weight for layer in model]
    tensors = [y.detach(), x.grad, *(weight.grad.to_local() for weight in weights)]
    return Gathered(tensors, kept)


@needs_torchao
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_weight_gathered_in_fp8_has_torchaos_numbers(
    frees: bool, is_compiled: bool, one_rank: DeviceMesh
) -> None:
    """And nothing else of its size is kept for backward."""
    x, how = random(2, 16, 128).detach().bfloat16(), GatherCase(frees, is_compiled)
    theirs, ours = (gather_and_multiply(one_rank, x, by, how) for by in ("torch", "triton"))
    for a, b in zip(theirs.tensors, ours.tensors, strict=True):
        torch.testing.assert_close(a, b)
    assert ours.kept == 0


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_few_graphs_serve_any_rows(dynamic: bool | None, one_rank: DeviceMesh) -> None:
    """What counts rows must not make numbers of a compiler's symbols. One for those that are filled
    up, one for those that need not be; and one for the first, before they are seen to vary."""
    model = build_gathered(one_rank, "triton", frees=False)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager_decomp_partition")
    model.compile(backend=counted, dynamic=dynamic)
    for rows in range(20, 30):
        model(random(2, rows, 128).detach().bfloat16()).sum().backward()
    assert counted.frame_count == (2 if dynamic else 3)


@needs_torchao
def test_a_model_in_fp8_multiplies_by_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four matrices of a block, to torchao's numbers."""
    from paceline.kernels import fp8
    from paceline.strategies.fp8 import load_torchao
    from paceline.workloads.lm.model import LM
    from paceline.workloads.lm.workload import LMModel

    widths: list[int] = []
    linear = fp8.linear
    monkeypatch.setattr(fp8, "linear", lambda x, w, *_: (widths.append(len(w)), linear(x, w))[1])
    config = LMModel(vocab_size=64, dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=48)
    model, float8 = LM(config, 16, kernels="triton").to(DEVICE), load_torchao("float8")
    layers = float8.Float8LinearConfig(emulate=DEVICE == "cpu")
    float8.convert_to_float8_training(model.blocks, config=layers)
    tokens = torch.randint(0, 64, (2, 16), device=DEVICE)
    theirs = model(tokens, tokens)
    assert not widths, "not marked"
    for part in model.blocks.modules():
        if isinstance(part, torch.nn.Linear):
            part.is_cast_whole = True  # type: ignore[assignment]
    ours = model(tokens, tokens)
    assert widths == [64, 32, 96, 32]  # qkv, out, gate and up, down
    assert_same_gradients_by_name(theirs, ours, model, model)


@needs_triton
@pytest.mark.parametrize(("N", "D"), [(48, 200), (256, 128), (128, 640)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_cast_is_turned_too(N: int, D: int, dtype: torch.dtype) -> None:
    from paceline.kernels import fp8

    x = random(N, D).detach().to(dtype)
    for is_gradient, low in ((False, fp8.NUMBERS), (True, fp8.GRADIENTS)):
        scale, limit = fp8.scale_of(x, low), torch.finfo(low).max
        plain, turned = fp8.cast_both(x, scale, is_gradient)
        assert plain.dtype == turned.dtype == low
        expected = (x.float() * scale).clamp(-limit, limit).to(low).float()
        assert torch.equal(plain.float(), expected) and torch.equal(turned.float(), expected.t())
        assert plain.float().abs().max() == limit
        assert torch.equal(fp8.turn(plain, x).float(), turned.float())
    assert torch.isfinite(fp8.scale_of(torch.zeros(2, 2), fp8.NUMBERS))
    arguments = (x, torch.tensor(2.0, device=DEVICE), True)
    torch.library.opcheck(fp8.cast_both, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(fp8.turn, (plain, x), test_utils=("test_faketensor",))


@needs_torchao
def test_rows_that_fp8_cannot_sum_over_are_filled_up(one_rank: DeviceMesh) -> None:
    """Batches by length have any number of rows; `_scaled_mm` sums over multiples of 16."""
    from paceline.kernels import fp8

    layer = torch.nn.Linear(128, 256, bias=False, device=DEVICE)
    x = random(3, 5, 128).detach().bfloat16().requires_grad_()
    filled = F.pad(x.flatten(0, 1), (0, 0, 0, 1)), F.pad(x, (0, 0, 0, 11))
    found = fp8.linear(x, layer.weight)
    expected = fp8.linear(filled[0], layer.weight)[:15].unflatten(0, (3, 5))
    assert_same_gradients((expected,), (found,), (x, layer.weight))
    how = GatherCase(frees=True, is_compiled=False)
    none = gather_and_multiply(one_rank, x[:, :0], "triton", how).tensors
    assert none[0].shape == none[1].shape == (3, 0, 128) and not none[2].any()
    few, many = (gather_and_multiply(one_rank, a, "triton", how) for a in (x, filled[1]))
    for a, b in zip(few.tensors[:2], many.tensors[:2], strict=True):
        assert torch.equal(a, b[:, :5])
    for a, b in zip(few.tensors[2:], many.tensors[2:], strict=True):
        assert torch.equal(a, b)
