"""The head and its cross-entropy, a chunk of tokens at a time: the logits never exist as a whole.

With a vocabulary of 128k, the logits of 8192 tokens take 2 GiB in bf16, and their softmax and
gradient as much again or more: most of the memory of a long step. But they can be used up as soon
as they are there. The gradient of a summed loss by its logits is softmax - one, known before any
backward pass; so each chunk's products with it are computed in the forward pass and its logits
are freed. No product is computed twice: the time stays the same, and the gradient of the head is
kept instead.

Shape letters: N tokens, D model width, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from paceline.kernels.products import add_outer

IGNORED = -100  # as in torch's cross_entropy


def chunked_loss(x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy of x @ head.T, summed over tokens, `chunk` of them at a time."""
    has_gradients = torch.is_grad_enabled() and (x_ND.requires_grad or head_VD.requires_grad)
    loss: Tensor = _ChunkedLoss.apply(x_ND, head_VD, targets_N, chunk, has_gradients)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, chunk: int, has_gradients: bool
    ) -> Tensor:
        loss, d_x, d_head = loss_and_gradients(x, head.to(x.dtype), targets, chunk, has_gradients)
        ctx.save_for_backward(d_x, d_head)
        ctx.head_type = head.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_x, d_head = ctx.saved_tensors
        (g,) = gradients
        return (d_x * g).to(d_x.dtype), (d_head * g).to(ctx.head_type), None, None, None


@torch.library.custom_op("paceline::chunked_loss", mutates_args=())
def loss_and_gradients(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, chunk: int, has_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss in fp32, and its gradients by x and, in fp32, by the head: empty if
    they are not needed."""
    x_ND = x_ND.contiguous()
    d_x = torch.empty_like(x_ND if has_gradients else x_ND[:0])
    d_head = x_ND.new_empty(head_VD.shape if has_gradients else (0,), dtype=torch.float32)
    losses_N = x_ND.new_empty(len(x_ND), dtype=torch.float32)
    if not len(x_ND):
        d_head.zero_()  # the first chunk writes it, and there is none
    for first in range(0, len(x_ND), chunk):
        rows = slice(first, first + chunk)
        logits_NV = x_ND[rows] @ head_VD.t()
        losses_N[rows] = take_losses(logits_NV, targets_N[rows], has_gradients)
        if has_gradients:
            torch.mm(logits_NV, head_VD, out=d_x[rows])
            add_outer(d_head, logits_NV, x_ND[rows], is_first=first == 0)
    return losses_N.sum(), d_x, d_head


@loss_and_gradients.register_fake
def _(
    x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, chunk: int, has_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_x = x_ND.new_empty(x_ND.shape if has_gradients else (0, x_ND.shape[1]))
    d_head = x_ND.new_empty(head_VD.shape if has_gradients else (0,), dtype=torch.float32)
    return x_ND.new_empty((), dtype=torch.float32), d_x, d_head


@register_flop_formula(torch.ops.paceline.chunked_loss)
def _(x_shape: Any, head_shape: Any, *shapes: Any, **named: Any) -> int:
    """Count the logits and both gradients, as of a head that is trained."""
    return 6 * math.prod(x_shape) * int(head_shape[0])


def take_losses(logits_NV: Tensor, targets_N: Tensor, has_gradients: bool) -> Tensor:
    """Return each token's loss; with gradients, write them over the logits."""
    if logits_NV.is_cuda:
        from paceline.kernels.softmax import take_losses as take_by_kernel

        return take_by_kernel(logits_NV, targets_N, has_gradients)
    z_NV = logits_NV.float()
    losses_N = F.cross_entropy(z_NV, targets_N, reduction="none", ignore_index=IGNORED)
    if has_gradients:
        is_real_N = targets_N != IGNORED
        d_NV = z_NV.softmax(dim=-1)
        d_NV.scatter_add_(1, targets_N.clamp(min=0)[:, None], -torch.ones_like(d_NV[:, :1]))
        logits_NV.copy_(d_NV * is_real_N[:, None])
    return losses_N
