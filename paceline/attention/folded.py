"""Attention over compressed keys by cuDNN's causal kernel, forward and backward.

A query at token t sees compressed key i when i d + l - 1 <= t. With t = l - 1 + p d + r and r below
d these are keys 0 to p, whatever r is: queries that stand d tokens apart attend as in causal
attention. So T queries are folded into d sequences of P queries over the same P keys, a batch that
is a view of the queries as they lie. Keys are few; they are repeated for the batch.

    before l - 1     a token sees no key: the output is 0, lse is +inf
    folded           P d tokens, by cuDNN
    the rest         fewer than d tokens, which see all keys: by torch's operations

Shapes and lse as in banded.py; documents are not known here.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from paceline.attention.sizes import Sizes

MIN_FOLDED = 256  # queries of a folded sequence; with fewer our own kernels are as fast
WIDEST = 128  # head that cuDNN's kernels take in both directions


def fits(q: Tensor, z: Sizes) -> bool:
    """Say whether cuDNN can and may compute it: on Hopper, if sums may have any order."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[3] > WIDEST:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    is_hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    return is_hopper and Fold.of(q, z).length >= MIN_FOLDED


class Fold(NamedTuple):
    """Which tokens are folded: `length` times `width` of them, from `begin` on."""

    begin: int
    length: int
    width: int

    @classmethod
    def of(cls, q: Tensor, z: Sizes) -> Self:
        return cls(z.l - 1, max(0, q.shape[1] - z.l + 1) // z.d, z.d)

    @property
    def end(self) -> int:
        return self.begin + self.length * self.width

    def view(self, x_THE: Tensor) -> Tensor:
        """Return the folded tokens as a batch of sequences (d, H, P, E)."""
        folded = x_THE[self.begin : self.end]
        return folded.reshape(self.length, self.width, *x_THE.shape[1:]).permute(1, 2, 0, 3)

    def repeat(self, x_MGE: Tensor) -> Tensor:
        """Return the keys of every sequence of the batch (d, G, P, E)."""
        turned = x_MGE[: self.length].transpose(0, 1)
        return turned.expand(self.width, -1, -1, -1).contiguous()


def folded_forward(
    q: Tensor, k: Tensor, v: Tensor, z: Sizes, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over compressed keys: the output and lse."""
    fold = Fold.of(q, z)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    out[:, : fold.begin], lse[:, : fold.begin] = 0, torch.inf
    for b in range(len(q)):
        found, stats = causal_forward(fold.view(q[b]), fold.repeat(k[b]), fold.repeat(v[b]), scale)
        fold.view(out[b]).copy_(found)
        fold.view(lse[b, :, :, None]).copy_(stats)
    if fold.end < q.shape[1]:
        weights, rest_lse = weights_of_rest(q[:, fold.end :], k, scale)
        rest = torch.einsum("btgrm,bmge->btgre", weights, v.float())
        out[:, fold.end :] = rest.flatten(2, 3).to(out.dtype)
        lse[:, fold.end :] = rest_lse.flatten(2, 3)
    return out, lse


def folded_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, z: Sizes,
    scale: float, dq: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the queries' gradient; return those of keys and values. `grad` is that of `out`."""
    fold = Fold.of(q, z)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    dq[:, : fold.begin] = 0
    for b in range(len(q)):
        of_out, queries, seen = (fold.view(x[b]) for x in (grad, q, out))
        keys, values = fold.repeat(k[b]), fold.repeat(v[b])
        stats = fold.view(lse[b, :, :, None]).contiguous()
        of_q, of_k, of_v = causal_backward(of_out, queries, seen, keys, values, stats, scale)
        fold.view(dq[b]).copy_(of_q)
        for sums, parts in ((dk[b], of_k), (dv[b], of_v)):
            sums[: fold.length] = parts.sum(dim=0, dtype=torch.float32).transpose(0, 1)
    if fold.end < q.shape[1]:
        _add_rest(fold, grad, q, k, v, scale, (dq, dk, dv))
    return dk.to(k.dtype), dv.to(v.dtype)


def weights_of_rest(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the weights of tokens that see all keys (B, t, G, R, M), and lse, in fp32."""
    q_BtGRE = _by_group(q, k)
    scores = torch.einsum("btgre,bmge->btgrm", q_BtGRE, k.float()) * scale
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp(), lse


def _by_group(x_BTHE: Tensor, k: Tensor) -> Tensor:
    """Return heads by group of keys (B, T, G, R, E), in fp32."""
    B, T, _, E = x_BTHE.shape
    return x_BTHE.reshape(B, T, k.shape[2], -1, E).float()


def _add_rest(
    fold: Fold, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write the gradient of the tokens behind the fold, and add to those of keys and values."""
    dq, dk, dv = into
    weights, _ = weights_of_rest(q[:, fold.end :], k, scale)
    q, grad = (_by_group(x[:, fold.end :], k) for x in (q, grad))
    dv += torch.einsum("btgrm,btgre->bmge", weights, grad)
    of_weights = torch.einsum("btgre,bmge->btgrm", grad, v.float())
    dots = (weights * of_weights).sum(dim=-1, keepdim=True)
    of_scores = weights * (of_weights - dots) * scale
    dk += torch.einsum("btgrm,btgre->bmge", of_scores, q)
    of_q = torch.einsum("btgrm,bmge->btgre", of_scores, k.float())
    dq[:, fold.end :] = of_q.flatten(2, 3).to(dq.dtype)


def causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend causally by cuDNN: the output (d, H, P, E) and lse (d, H, P, 1)."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1].view(*q.shape[:3], 1)


def causal_backward(
    grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values by cuDNN."""
    unread = q.new_empty((), dtype=torch.int64)  # the seed of a dropout that there is not
    length = q.shape[2]
    of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, unread, unread, None, None, None, length, length, 0.0, True,
        scale=scale,
    )  # fmt: skip
    return of_q, of_k, of_v
