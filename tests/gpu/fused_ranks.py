"""Two ranks of one GPU, and products in parts through symmetric memory: `test_limits.py`."""

import faulthandler
import os
import socket

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from paceline.strategies import fused

WORLD, F, D, N, ROUNDS, LIMIT_S = 2, 256, 128, 64, 6, 90


def run_rank(rank: int, port: int) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    assert dist.group.WORLD is not None
    fused.MOVERS["all"] = fused.BySymmetricMemory(dist.group.WORLD)
    torch.manual_seed(0)
    weight_FD, x_ND = torch.randn(F, D, device="cuda"), torch.randn(N, D, device="cuda")
    rows = slice(rank * F // WORLD, (rank + 1) * F // WORLD)
    for number in range(ROUNDS):
        shard, x = weight_FD[rows].clone().requires_grad_(), x_ND.clone().requires_grad_()
        y, _ = fused.fused_linear(x, shard, "all", number % 2 == 0)
        (y.sin().sum() * (rank + 1)).backward()
        whole, plain = weight_FD.clone().requires_grad_(), x_ND.clone().requires_grad_()
        (plain @ whole.t()).sin().sum().backward()
        # Ranks weigh their losses by 1 and 2, so the mean gradient is 1.5 times that of one.
        torch.testing.assert_close(shard.grad, 1.5 * whole.grad[rows], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad, (rank + 1) * plain.grad, rtol=1e-4, atol=1e-4)
    print("right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spawn(run_rank, (port,), nprocs=WORLD)
