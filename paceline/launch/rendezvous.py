"""The rendezvous of a run whose processes another launcher has started: all meet at one store.

Rank 0 serves it, unless torchrun's agent does. Whoever has something to say publishes a key, and
whoever needs it waits for that key:

    here/<rank>        every rank      its host and local rank; rank 0 names those that are missing
    orders             rank 0          the run to take part in, or an exit code to leave with
    received           other ranks     how many have read the orders
    <round>/failed     any rank        it has failed: all others are to be ended
    <round>/ended      every rank      how many ranks have ended
    <round>/next       rank 0          does another attempt, a new round, follow?
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from paceline.errors import ClusterError, LaunchError, Outcome, PacelineError
from paceline.machine.group import StoreAddress, serve_store
from paceline.machine.topology import LOOPBACK, Topology
from paceline.records import RankPlace

CONNECT_S = 300.0
SUSPECT_S = 10.0
WAIT_S = 1.0
POLL_S = 0.02
NEXT_S = 0.1
LINGER_S = 5.0
MAX_NAMED = 16
AGAIN, STOP = "again ", "stop"
CRASHED = Outcome.CRASHED.exit_code


@dataclass
class Rendezvous:
    """One member's view of all the members of a run."""

    topology: Topology
    store: Store
    address: StoreAddress
    server: TCPStore | None  # kept alive by rank 0
    round: int = 0  # of starts: each has keys of its own

    @property
    def rank_store(self) -> StoreAddress:
        """Return where the ranks of this round meet: nothing that an earlier one left is there."""
        return replace(self.address, prefix=f"{self.address.prefix}/{self.round}")

    def wait_for_all(self, start_s: float) -> list[RankPlace]:
        """Return, to rank 0, host and local rank of every rank; raise where some are missing."""
        world, missing = self.topology.world_size, list(range(self.topology.world_size))
        deadline = time.monotonic() + start_s
        while missing:
            missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
            if missing and time.monotonic() > deadline:
                raise _absence(missing, world)
            time.sleep(POLL_S)
        facts = [json.loads(self.store.get(f"here/{rank}")) for rank in range(world)]
        return [RankPlace(rank=rank, device="", **fact) for rank, fact in enumerate(facts)]

    def publish_orders(self, **message: str | int) -> None:
        """Publish, as rank 0, what to do: take part in run_dir, or leave with exit_code."""
        self.store.set("orders", json.dumps(message))

    def publish_exit(self, exit_code: int) -> None:
        """Publish that rank 0 leaves, and give those who have come a moment to read it."""
        with suppress(RuntimeError):
            self.publish_orders(exit_code=exit_code)
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and self.server is not None:
                if self.store.add("received", 0) >= self.topology.world_size - 1:
                    return
                time.sleep(POLL_S)

    def wait_for_orders(self) -> dict[str, str | int]:
        """Return what rank 0 has decided. It may prepare data for an hour; it may not vanish."""
        while True:
            try:
                self.store.wait(["orders"], timedelta(seconds=WAIT_S))
                orders = json.loads(self.store.get("orders"))
                self.store.add("received", 1)
                return dict(orders)
            except dist.DistStoreError:
                continue
            except dist.DistNetworkError as error:
                raise LaunchError("rank 0 left before it had planned the run") from error

    def publish_failure(self, rank: int) -> None:
        with suppress(RuntimeError):
            self.store.set(f"{self.round}/failed", str(rank))

    def publish_end(self) -> None:
        with suppress(RuntimeError):
            self.store.add(f"{self.round}/ended", 1)

    def has_failed(self) -> bool:
        """True when a rank has published so, or the store is gone, and with it rank 0."""
        try:
            return bool(self.store.check([f"{self.round}/failed"]))
        except RuntimeError:
            return True

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait, as rank 0, which serves the store, until the others need it no more."""
        deadline = time.monotonic() + timeout_s
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self.store.add(f"{self.round}/ended", 0) >= self.topology.world_size:
                    return
                time.sleep(POLL_S)

    def publish_next(self, number: int | None) -> None:
        """Publish, as rank 0, that the attempt of this number has failed and another follows; or,
        with None, that none does."""
        with suppress(RuntimeError):
            self.store.set(f"{self.round}/next", AGAIN + str(number) if number else STOP)
        self.round += 1

    def wait_for_next(self, is_over: Callable[[], bool]) -> int | None:
        """Return the number of the failed attempt that another one follows; None where none does,
        or where rank 0 has gone before it could say."""
        while not is_over():
            try:
                if self.store.check([f"{self.round}/next"]):
                    text = self.store.get(f"{self.round}/next").decode()
                    self.round += 1
                    return int(text.removeprefix(AGAIN)) if text.startswith(AGAIN) else None
            except RuntimeError:
                return None
            time.sleep(NEXT_S)
        return None


@contextmanager
def join_rendezvous(topology: Topology, connect_s: float = CONNECT_S) -> Iterator[Rendezvous]:
    """Meet the other ranks. Should rank 0 leave with an error, the others get its exit code."""
    _require_address(topology)
    is_host = topology.rank == 0 and not topology.agent_store
    server = _serve(topology) if is_host else None
    # A restart by torchrun meets at the same store, under a name of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = StoreAddress(
        topology.master_addr, topology.master_port, f"paceline/{attempt}", server is not None
    )
    store = _connect(topology, address, connect_s)
    here = {"host": socket.gethostname(), "local_rank": topology.local_rank}
    store.set(f"here/{topology.rank}", json.dumps(here))
    rendezvous = Rendezvous(topology, store, address, server)
    try:
        yield rendezvous
    except BaseException as error:
        if topology.rank == 0:
            code = error.exit_code if isinstance(error, PacelineError) else CRASHED
            rendezvous.publish_exit(code)
        raise


def _require_address(topology: Topology) -> None:
    try:
        socket.getaddrinfo(topology.master_addr, None)
    except OSError as error:
        raise ClusterError(
            f"MASTER_ADDR={topology.master_addr} does not resolve on {socket.gethostname()}:"
            f" {error.strerror}\n"
            "hint: name a host that every node can resolve and reach"
        ) from error


def _connect(topology: Topology, address: StoreAddress, connect_s: float) -> Store:
    """Connect to the store. A name that means "this machine" here, while rank 0 is on another node,
    is tried for a moment only: it is right only where several nodes share one machine."""
    name, port = topology.master_addr, topology.master_port
    is_suspect = topology.node_rank > 0 and _means_here(name)
    patience_s = min(connect_s, SUSPECT_S) if is_suspect else connect_s
    try:
        return address.connect(patience_s)
    except RuntimeError as error:  # torch's network and store errors are both
        if is_suspect:
            raise ClusterError(
                f"MASTER_ADDR={name} is this machine itself, and rank 0 runs on another of"
                f" {topology.num_nodes} nodes\n"
                "hint: set MASTER_ADDR to a name or address of rank 0's node"
            ) from error
        raise LaunchError(
            f"rank {topology.rank} found nobody at {name}:{port} within {patience_s:g} s\n"
            "hint: rank 0 has not started, or a firewall stands between; see MASTER_ADDR"
        ) from error


def _means_here(name: str) -> bool:
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return all(LOOPBACK.match(address) for address in addresses)


def _serve(topology: Topology) -> TCPStore:
    try:
        is_public = LOOPBACK.match(topology.master_addr) is None
        return serve_store(topology.master_port, is_public)
    except OSError as error:
        raise ClusterError(
            f"port {topology.master_port}, where the ranks are to meet, is taken by"
            f" {_owner(topology.master_port)}\n"
            "hint: set MASTER_PORT to a free one, or let `paceline train` start the ranks: it"
            " always finds one"
        ) from error


def _owner(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.pid:
                return f"process {entry.pid} ({psutil.Process(entry.pid).name()})"
    return "another process"


def _absence(missing: list[int], world_size: int) -> LaunchError:
    named = ", ".join(str(rank) for rank in missing[:MAX_NAMED])
    more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    return LaunchError(
        f"{len(missing)} of {world_size} ranks never came: {named}{more}\n"
        f"hint: WORLD_SIZE says {world_size}; start as many processes, or raise launch.start_s if"
        " they are slow to start"
    )
