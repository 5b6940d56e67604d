"""Losses of tokens, and their gradients written over the logits: one Triton kernel that reads the
logits twice and writes them once.

Shape letters: N tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
NUM_WARPS = 16


def take_losses(logits_NV: Tensor, targets_N: Tensor, has_gradients: bool) -> Tensor:
    """Return each token's cross-entropy in fp32, 0 where its target is negative and NaN where
    the vocabulary has no such token; with gradients, write them over the logits."""
    N, V = logits_NV.shape
    losses_N = logits_NV.new_empty(N, dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(V))
    tensors = (logits_NV, targets_N, losses_N)
    _token_losses[(N,)](
        *tensors, V, targets_N.stride(0), GRADIENTS=has_gradients, BLOCK=block, num_warps=NUM_WARPS
    )
    return losses_N


@triton.jit
def _token_losses(logits, targets, losses, V, stride, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row * stride)
    # Every lane keeps the largest value of its columns and the sum relative to it: lanes meet once.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, z)
        # A lane that has seen nothing yet: -inf less -inf would be NaN.
        is_empty = larger == float("-inf")
        total = total * tl.where(is_empty, 1.0, tl.exp(largest - larger))
        total += tl.where(is_empty, 0.0, tl.exp(z - larger))
        largest = larger
    top = tl.max(largest, axis=0)
    total = tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top)), axis=0)
    # A target beyond the vocabulary does not exist: its loss and its gradients are NaN.
    log_sum = tl.where(target < V, top + tl.log(total), float("nan"))
    is_real = target >= 0
    at_target = tl.load(logits + target, mask=is_real & (target < V), other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(is_real, log_sum - at_target, 0.0))
    if GRADIENTS:
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
            d = tl.exp(z - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(logits + column, tl.where(is_real, d, 0.0), mask=column < V)
