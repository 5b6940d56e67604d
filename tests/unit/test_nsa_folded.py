"""Compressed attention folded into causal attention, against the same spelt out with masks. The
causal kernel is cuDNN's, which no CPU has: here torch's operations stand in for it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.attention import folded, plain
from paceline.attention.folded import Fold, folded_backward, folded_forward
from paceline.attention.sizes import Sizes


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    R, P = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(R, dim=1) for x in (k, v))
    ahead = torch.ones(P, P, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(ahead, -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1, keepdim=True)


@torch.enable_grad()
def causal_backward(grad: Tensor, q: Tensor, out: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    k, v, lse, scale = others
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    again = causal(q, k, v, scale)
    torch.testing.assert_close(again, (out, lse))  # what it is given belongs together
    return torch.autograd.grad(again[0], leaves, grad)


# Tokens, l, d: a rest of one token, of several, of none; keys that do not overlap.
@pytest.mark.parametrize(("T", "l", "d"), [(64, 8, 4), (98, 8, 4), (63, 8, 8), (45, 6, 2)])
def test_a_fold_equals_masks(T: int, l: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: E741
    monkeypatch.setattr(folded, "causal_forward", causal)
    monkeypatch.setattr(folded, "causal_backward", causal_backward)
    z, scale = Sizes(l, d, 16, 2, 4), 16**-0.5
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2, T, 4, 16, generator=noise, requires_grad=True)
    kv = [torch.randn(2, z.num_compressed(T), 2, 16, generator=noise) for _ in range(2)]
    k, v = (x.requires_grad_() for x in kv)
    seen = plain.is_compressed_visible(torch.arange(T), torch.zeros(2, T), k.shape[1], z)
    want, _ = plain.compressed(q, k, v, seen)
    grad = torch.randn(want.shape, generator=noise)
    want_grads = torch.autograd.grad(want, (q, k, v), grad)

    with torch.no_grad():
        out, lse = folded_forward(q, k, v, z, scale)
        dq = torch.full_like(q, torch.nan)
        found = dq, *folded_backward(grad, q, k, v, out, lse, z, scale, dq)
    torch.testing.assert_close((out, *found), (want.detach(), *want_grads))
    assert torch.isinf(lse[:, : l - 1]).all() and torch.isfinite(lse[:, l - 1 :]).all()


def test_folded_tokens_are_a_view() -> None:
    x = torch.zeros(64, 2, 4)
    Fold(3, 15, 4).view(x).fill_(1)
    assert x.sum() == 60 * 2 * 4 and not x[:3].any() and not x[63:].any()


# What cuDNN takes, and what keeps it from each: tokens, width of a head, type, chip.
@pytest.mark.parametrize(
    ("T", "E", "dtype", "capability", "may"),
    [
        (4127, 128, torch.bfloat16, 9, True),
        (4126, 128, torch.bfloat16, 9, False),
        (4127, 256, torch.bfloat16, 9, False),
        (4127, 128, torch.float32, 9, False),
        (4127, 128, torch.bfloat16, 10, False),
    ],
)
def test_what_cudnn_cannot_take_is_left_to_our_kernels(
    T: int, E: int, dtype: torch.dtype, capability: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype, shape=torch.Size((1, T, 1, E)))
    assert folded.fits(q, Sizes()) == may  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not folded.fits(q, Sizes())  # type: ignore[arg-type]


def test_a_cpu_has_no_cudnn() -> None:
    assert not folded.fits(torch.zeros(1, 8192, 1, 64, dtype=torch.bfloat16), Sizes())
