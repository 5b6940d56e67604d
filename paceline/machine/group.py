"""Joins the other ranks: the store where they meet, this rank's device, the process group."""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.machine.topology import RankId

CONNECT_S = 60.0


@dataclass(frozen=True)
class StoreAddress:
    """Where ranks find their store, which outlives any of them. Each start of ranks has a `prefix`
    of its own, so that a rank never reads what one that died before it left. `local`: where it is
    found on the machine that serves it, whatever name the others know that machine by."""

    host: str
    port: int
    prefix: str
    local: str = ""

    def connect(self, timeout_s: float = CONNECT_S) -> Store:
        host, limit = self.local or self.host, timedelta(seconds=timeout_s)
        return PrefixStore(self.prefix, TCPStore(host, self.port, is_master=False, timeout=limit))


def serve_store(port: int = 0, host: str = "127.0.0.1", timeout_s: float = CONNECT_S) -> TCPStore:
    """Serve a store in this process; port 0 is any free one. `OSError` when the port is taken.

    It speaks to whoever connects, so it listens at one address of this machine, on loopback unless
    other machines take part; host "" is every address.
    """
    if not host and socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    try:
        return TCPStore(
            host or "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except BaseException:
        listener.close()
        raise


def claim_device(kind: str, place: RankId, indices: list[int]) -> torch.device:
    """Return this rank's device. `indices` are those of the visible GPUs that local ranks take."""
    if kind == "cpu":
        return torch.device("cpu")
    # A launcher that gives each rank one GPU shows it as device 0, whatever the local rank.
    index = indices[place.local_rank] if indices else place.local_rank
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else index)
    torch.cuda.set_device(device)
    return device


def join_group(
    backend: str, place: RankId, device: torch.device, store: Store, timeout_s: float
) -> None:
    """Join the process group. `timeout_s` is how long a collective may wait."""
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
