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
    of its own, so that a rank never reads what one that died before it left. `is_served_here`: by
    this process or its parent, whatever name the others know its machine by."""

    host: str
    port: int
    prefix: str
    is_served_here: bool = False

    def connect(self, timeout_s: float = CONNECT_S) -> Store:
        host = "127.0.0.1" if self.is_served_here else self.host
        store = TCPStore(host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return PrefixStore(self.prefix, store)


def serve_store(port: int = 0, is_public: bool = False, timeout_s: float = CONNECT_S) -> TCPStore:
    """Serve a store in this process; port 0 is any free one. `OSError` when the port is taken.

    It speaks to whoever connects, so it listens on loopback unless other machines take part.
    """
    if is_public and socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("" if is_public else "127.0.0.1", port))
    try:
        return TCPStore(
            "127.0.0.1",
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
