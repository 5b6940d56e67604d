"""Two ranks of one GPU, and products in parts through symmetric memory: `test_limits.py`."""

import faulthandler
import os
import socket

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from paceline.strategies import fused

WORLD, F, D, N, ROUNDS, LIMIT_S = 2, 256, 128, 64, 6, 90


def compare(rank: int, num_rows: int, dtype: torch.dtype) -> None:
    """Hold a matrix in parts against the whole one. Weights are fp32, products are of `dtype`."""
    weight_FD, x_ND = torch.randn(num_rows, D, device="cuda"), torch.randn(N, D, device="cuda")
    each = num_rows // WORLD
    rows = slice(rank * each, (rank + 1) * each)
    # Copies: in fp32 both sides would else add to the gradient of one tensor.
    shard, x = weight_FD[rows].clone().requires_grad_(), x_ND.to(dtype, copy=True).requires_grad_()
    y, _ = fused.fused_linear(x, shard, "all", dtype == torch.float32)
    (y.float().sin().sum() * (rank + 1)).backward()
    whole, plain = weight_FD.clone().requires_grad_(), x_ND.to(dtype, copy=True).requires_grad_()
    (plain @ whole.to(dtype).t()).float().sin().sum().backward()
    assert x.grad is not None and shard.grad is not None
    assert plain.grad is not None and whole.grad is not None
    # Ranks weigh their losses by 1 and 2, so the mean gradient is 1.5 times that of one.
    close = 1e-4 if dtype == torch.float32 else 2e-2
    for found, expected in (
        (shard.grad, 1.5 * whole.grad[rows]),
        (x.grad, (rank + 1) * plain.grad),
    ):
        assert (found - expected).float().norm() < close * expected.float().norm()


def run_rank(rank: int, port: int) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    assert dist.group.WORLD is not None
    mover = fused.MOVERS["all"] = fused.BySymmetricMemory(dist.group.WORLD)
    torch.manual_seed(0)
    for number in range(ROUNDS):  # buffers grow while both are busy
        compare(rank, F << number, torch.bfloat16 if number % 2 else torch.float32)
    assert mover.num_bytes > 0
    print("right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spawn(run_rank, (port,), nprocs=WORLD)
