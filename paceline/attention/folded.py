"""The compressed branch through torch's own attention kernels.

A query at t sees compressed keys 0 .. (t + 1 - l) // d: the d queries from t = l - 1 + a d on all
see the same a + 1 keys. Fold those d queries into the heads, and what is left is plain causal
attention of M positions over M keys, with d times the heads. So the fastest causal kernel there is
(cuDNN's, FlashAttention's) computes it, forward and backward, without a mask.

Their operations are called by name, for `scaled_dot_product_attention` keeps the logarithms of the
sums to itself, and the scores of blocks need them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention.sizes import Sizes


def fold_kernel(q: Tensor) -> str | None:
    """Return which of torch's kernels computes it here; None: none does."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    capability = torch.cuda.get_device_capability(q.device)
    if capability >= (9, 0) and q.shape[-1] <= 128 and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn"
    return "flash" if capability >= (8, 0) and torch.backends.cuda.flash_sdp_enabled() else None


def attend_folded(
    q_BTHE: Tensor, k_BMGE: Tensor, v_BMGE: Tensor, sizes: Sizes, kernel: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to compressed keys; return the output (B, T, H, E) and lse (B, T, H)."""
    B, T, H, E = q_BTHE.shape
    M, G = k_BMGE.shape[1:3]
    l, d = sizes.l, sizes.d  # noqa: E741
    num_real = T - l + 1
    q = F.pad(q_BTHE[:, l - 1 :], (0, 0, 0, 0, 0, M * d - num_real))
    q = q.view(B, M, d, G, H // G, E).permute(0, 3, 4, 2, 1, 5).reshape(B, H * d, M, E)
    k, v = k_BMGE.transpose(1, 2), v_BMGE.transpose(1, 2)
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
    out = out.reshape(B, G, H // G, d, M, E).permute(0, 4, 3, 1, 2, 5).reshape(B, M * d, H, E)
    lse = lse.reshape(B, G, H // G, d, M).permute(0, 4, 3, 1, 2).reshape(B, M * d, H)
    # The first l - 1 queries see no whole block.
    out = F.pad(out[:, :num_real], (0, 0, 0, 0, l - 1, 0))
    return out, F.pad(lse.detach()[:, :num_real].float(), (0, 0, l - 1, 0), value=torch.inf)
