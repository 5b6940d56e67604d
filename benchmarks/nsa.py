"""Native sparse attention against dense attention, forward and backward, on one GPU.

    python benchmarks/nsa.py [--lengths 1024,...,65536] [--heads 64] [--groups 4] [--width 128]

Dense is the fastest of cuDNN's and FlashAttention's kernels of torch's SDPA, causal, in bf16.
Sparse is all but the projections: compression, choice, three branches, the sum by gates. Times are
medians on the device; the goals are those of the issue. Where flash-linear-attention's kernels are
installed (`pip install fla-core`) they are timed too; the figures of others are as they publish
them, on their machines.
"""

import argparse
import importlib.util

import torch
import triton

from paceline.attention.crossover import Shape, Timed, judge, median_ms, time_both

GOALS = {16384: 1.5, 65536: 4.0}
PUBLISHED = (
    "paper (arXiv 2502.11089), A100, against FlashAttention-2 in Triton: 64k 9.0x forward, 6.0x"
    " backward",
    "fla-org/native-sparse-attention (README), forward + backward against flash: 1k 0.26x, 4k"
    " 0.63x, 8k 1.11x, 16k 1.89x",
    "Flash-Sparse-Attention (arXiv 2508.18224), H200: up to 3.5x, 1.6x on average, over the paper's"
    " kernel design",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768,65536")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    asked = parser.parse_args()
    shape = Shape(asked.heads, asked.groups, asked.width)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{asked.heads} heads over {asked.groups} groups of {asked.width}, bf16, batch 1")
    timed: list[Timed] = []
    for length in map(int, asked.lengths.split(",")):
        torch.cuda.reset_peak_memory_stats()
        row = time_both(shape, length)
        timed.append(row)
        peak = torch.cuda.max_memory_allocated() / 2**30
        goal = f"  goal {GOALS[length]}x" if length in GOALS else ""
        print(
            f"{length:6d} tokens: {row.dense_kernel} {row.dense_ms:8.2f} ms, nsa {row.nsa_ms:8.2f}"
            f" ms: {row.dense_ms / row.nsa_ms:.2f}x{goal}, {peak:.1f} GiB{_fla(shape, length)}",
            flush=True,
        )
    crossover = judge(timed)
    print(f"the router attends densely below {crossover} tokens" if crossover else "never faster")
    for line in PUBLISHED:
        print(f"published: {line}")


def _fla(shape: Shape, length: int) -> str:
    """Return the time of flash-linear-attention's kernels, where they are installed. They compress
    64 tokens to one key, where ours have one every 16, and share keys among branches."""
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError:
        return ""
    q = torch.randn(1, length, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (q[:, :, : shape.num_groups].clone().requires_grad_() for _ in range(2))
    gates = [torch.rand(q.shape[:3], device="cuda", dtype=q.dtype) for _ in range(3)]
    q.requires_grad_()
    grad = torch.randn_like(q)
    # Its window is FlashAttention's, which may not be installed.
    has_window = importlib.util.find_spec("flash_attn") is not None
    z = shape.sizes

    def step() -> None:
        out = parallel_nsa(
            q, k, v, *gates, block_counts=z.n_sel, block_size=z.l_sel,
            window_size=z.w if has_window else 0,
        )  # fmt: skip
        torch.autograd.grad(out, (q, k, v), grad)

    return f", fla {median_ms(step):.2f} ms{'' if has_window else ' without its window'}"


if __name__ == "__main__":
    main()
