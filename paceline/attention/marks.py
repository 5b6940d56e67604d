"""Names in profiles for the parts of native sparse attention. torch's profiler sees them whenever
it runs (the audit reads them there), nsys where `observe.nvtx` asks for ranges.

    projections+rope      queries, keys and values
    pcmp_all              nsa.cmp: compressed keys
    topk+ranges           nsa.choose: scores to blocks
    branch_attn+gate      nsa.sel, nsa.win, nsa.gate

In plain torch nsa.choose is inside map_pcmp_to_pslc, and topk+ranges has nsa.sel.ranges_v1 or _v2:
kernels read the blocks themselves. Backward passes of kernels have names too (ops.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def mark(name: str, near: Tensor, nvtx: bool = False) -> Iterator[None]:
    """Name what runs inside. A compiled graph has no room for it, but the operations in it do."""
    is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    if torch.compiler.is_compiling() or not (nvtx or is_profiled()):
        yield
        return
    with torch.profiler.record_function(name):
        if not (nvtx and near.is_cuda):
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
