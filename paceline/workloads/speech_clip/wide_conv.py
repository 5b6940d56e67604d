"""A wide grouped convolution over time as matrix products, for half precision on a GPU.

wav2vec2 and its kind find out where a frame stands by a convolution of 128 frames in 16 groups. For
its forward pass cuDNN takes kernels that use no tensor cores: a third of a whole step on an H200
(benchmarks/results/speech_throughput_h200.txt). Frames by channels, a window of K frames lies in
memory as one row of K x c numbers, so each group is one product of its windows with its weights.

Shape letters: B batch, C channels, T frames in and L out, G groups, c channels of a group (o of its
output), K width of the kernel, P frames with padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

MIN_WIDTH = 32  # below, cuDNN is quick enough
HALVES = (torch.bfloat16, torch.float16)


class WideConv(torch.autograd.Function):
    """As `conv1d` with stride 1. cuDNN's backward pass is quick, and stays."""

    @staticmethod
    def forward(context: Any, x_BCT: Tensor, weight: Tensor, groups: int, padding: int) -> Tensor:
        context.save_for_backward(x_BCT, weight)
        context.groups, context.padding = groups, padding
        return correlate(x_BCT, weight, groups, padding)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BCT, weight = (tensor.contiguous() for tensor in context.saved_tensors)
        how = ([1], [context.padding], [1], False, [0], context.groups)
        wanted = (*context.needs_input_grad[:2], False)
        backward = torch.ops.aten.convolution_backward
        grad_x, grad_weight, _ = backward(grads[0].contiguous(), x_BCT, weight, None, *how, wanted)
        return grad_x, grad_weight, None, None


def correlate(x_BCT: Tensor, weight: Tensor, groups: int, padding: int) -> Tensor:
    """Return (B, C, L); `weight` is (C, c, K), as conv1d has it."""
    split_GKco = weight.unflatten(0, (groups, -1)).permute(0, 3, 2, 1).flatten(1, 2)
    made = [
        _windows(rows, weight.shape[2]) @ split
        for rows, split in zip(_rows(x_BCT, groups, padding), split_GKco, strict=True)
    ]
    out_GBLo = torch.stack(made).unflatten(1, (len(x_BCT), -1))
    return out_GBLo.permute(1, 0, 3, 2).flatten(1, 2)


def _rows(x_BCT: Tensor, groups: int, padding: int) -> Tensor:
    """Return (G, B, P, c): of each group, frames one after the other."""
    padded = pad(x_BCT, (padding, padding))
    return padded.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).contiguous()


def _windows(rows_BPc: Tensor, width: int) -> Tensor:
    """Return every window as a row, (B x L, K x c)."""
    batch, frames, channels = rows_BPc.shape
    shape = (batch, frames - width + 1, width * channels)
    overlapping = rows_BPc.as_strided(shape, (frames * channels, channels, 1))
    return overlapping.reshape(-1, width * channels)


class _Wide(nn.Conv1d):
    """What a convolution becomes; weight norm and parameters stay as they are."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kind = (
            torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
        )
        if not input.is_cuda or kind not in HALVES:
            return super()._conv_forward(input, weight, bias)
        made: Tensor = WideConv.apply(
            input.to(kind), weight.to(kind), self.groups, int(self.padding[0])
        )
        return made if bias is None else made + bias.to(kind).unsqueeze(1)


def quicken(encoder: nn.Module) -> nn.Module:
    """Compute the wide convolutions of an encoder as products; all its names stay."""
    for module in encoder.modules():
        if isinstance(module, nn.Conv1d) and _is_wide(module):
            module.__class__ = type("WideConv1d", (_Wide, type(module)), {})
    return encoder


def _is_wide(conv: nn.Conv1d) -> bool:
    is_plain = conv.stride == conv.dilation == (1,) and not isinstance(conv.padding, str)
    is_plain = is_plain and conv.padding_mode == "zeros" and conv.padding[0] < conv.kernel_size[0]
    return is_plain and conv.groups > 1 and conv.kernel_size[0] >= MIN_WIDTH
