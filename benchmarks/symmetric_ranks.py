"""Ranks that share one GPU: sums and gathers through symmetric memory against what they must be.

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/symmetric_ranks.py [--ranks 2]

Checks each operation of `strategies/symmetric.py` on sizes that are and are not multiples of what
the kernels take, then a small FSDP and a small DDP model against one process, and times a sum
beside gloo's: both over one GPU's memory, so the times compare latencies, not links.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn

from paceline.strategies.symmetric import Exchange, ddp_hook, use_in_fsdp

SIZES = (7, 4096, 100_003, 2**22)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")


def check_operations(rank: int, world: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    for size in SIZES:
        parts = [
            torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        mine = parts[rank].cuda()
        total = mine.clone()
        exchange.all_reduce(total)
        close(total.cpu(), torch.stack(parts).sum(0), f"all_reduce {size}")
        gathered = torch.empty(world * size, device="cuda")
        exchange.all_gather(gathered, mine)
        close(gathered.cpu(), torch.cat(parts), f"all_gather {size}")
        values = torch.arange(world * size, dtype=torch.float32, device="cuda") * (rank + 1)
        share = torch.empty(size, device="cuda")
        exchange.reduce_scatter(share, values, divides=True)
        expected = torch.arange(world * size).float()[rank * size : (rank + 1) * size]
        close(share.cpu(), expected * (world + 1) / 2, f"reduce_scatter {size}")
    say(rank, f"operations are right at sizes {SIZES}")


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()


def train(model: nn.Module, x: torch.Tensor, steps: int = 5) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def check_models(rank: int, world: int) -> None:
    x = torch.randn(8 * world, 64, generator=torch.Generator().manual_seed(9)).cuda()
    alone = train(build(), x)
    mine = x[rank * 8 : rank * 8 + 8]
    sharded = build()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    exchange = use_in_fsdp(sharded, dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(build())
    shared = Exchange(dist.group.WORLD)
    wrapped.register_comm_hook(shared, ddp_hook)
    for name, model in (("fsdp", sharded), ("ddp", wrapped)):
        found = torch.tensor(train(model, mine))
        dist.all_reduce(found)
        close(found / world, torch.tensor(alone), name)
    assert exchange.num_bytes and shared.num_bytes
    say(rank, f"fsdp and ddp learn as one process: {[f'{loss:.5f}' for loss in alone]}")


def time_operations(rank: int, world: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    for size in (2**12, 2**16, 2**22):
        values = torch.randn(size, device="cuda")
        for name, run in (
            ("gloo", lambda v=values: dist.all_reduce(v)),
            ("symmetric", lambda v=values: exchange.all_reduce(v)),
        ):
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            for _ in range(10):
                run()
            torch.cuda.synchronize()
            each = (time.perf_counter() - started_at) / 10
            say(rank, f"all_reduce of {size * 4:>10,} bytes, {name:<10} {each * 1e6:10.0f} us")


def run_rank(rank: int, world: int, port: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    check_operations(rank, world)
    check_models(rank, world)
    time_operations(rank, world)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29517)
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.ranks} ranks")
    spawn(run_rank, (arguments.ranks, arguments.port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
