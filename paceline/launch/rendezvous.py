"""The rendezvous of a run whose processes another launcher has started: all meet at one store.

Rank 0 serves it, unless torchrun's agent does. Whoever has something to say publishes a key, and
whoever needs it waits for that key. Anybody who reaches the store may write there, so that each is
signed (signed.py), and the keys stand under a prefix that follows from the secret:

    hello              rank 0          the session: a number that its process has drawn
    here/<rank>        every rank      its host, local rank, and a number that it has drawn
    alive/<rank>       other ranks     again and again while they wait for orders
    orders/<rank>      rank 0          the run to take part in, or an exit code to leave with: for
                                       that number, so that an older one is not taken
    received/<rank>    other ranks     it has read its orders
    <round>/failed     any rank        it has failed: all others are to be ended
    <round>/ended/<rank>               every rank, when it has ended
    <round>/next       rank 0          does another attempt, a new round, follow?

Beside them, unsigned, `who` is a sum of rank 0's secret: a rank that knows another one can say so.
"""

import errno
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.errors import ClusterError, LaunchError, Outcome, PacelineError
from paceline.launch.signed import Body, SignedStore
from paceline.machine.group import StoreAddress, serve_store
from paceline.machine.secret import HINT, SECRET, derive, shared_secret
from paceline.machine.topology import LOOPBACK, Topology
from paceline.records import RankPlace
from paceline.records.words import few

CONNECT_S = 300.0
SUSPECT_S = 10.0
WAIT_S = 1.0
ALIVE_S = 4 * WAIT_S  # who waits for orders says so every WAIT_S
POLL_S = 0.02
NEXT_S = 0.1
LINGER_S = 5.0
MAX_NAMED = 16
CRASHED = Outcome.CRASHED.exit_code


@dataclass
class Rendezvous:
    """One member's view of all the members of a run."""

    topology: Topology
    words: SignedStore
    address: StoreAddress
    server: TCPStore | None  # kept alive by rank 0
    number: str = field(default_factory=lambda: secrets.token_hex(16))  # drawn by this process
    round: int = 0  # of starts: each has keys of its own

    @property
    def rank_store(self) -> StoreAddress:
        """Return where the ranks of this round meet: nothing that an earlier one left is there."""
        return replace(self.address, prefix=f"{self.address.prefix}/{self.round}")

    def greet(self, connect_s: float) -> None:
        """Begin a session as rank 0; as any other rank join rank 0's, and say who is here."""
        if self.topology.rank == 0:
            self.words.say("hello", {"session": self.number})
            self.words.session = self.number
        else:
            self.words.session = str(self._wait_for_hello(connect_s)["session"])
            self._require_free_place()
        here = {"host": socket.gethostname(), "local_rank": self.topology.local_rank}
        self.words.say(f"here/{self.topology.rank}", {**here, "number": self.number})

    def _require_free_place(self) -> None:
        """Refuse a place that another process has: two runs at one port, or a rank that was started
        twice. One that has died before it got orders may be replaced."""
        rank = self.topology.rank
        if self.words.hear(f"received/{rank}") is None:
            if self.words.hear(f"here/{rank}") is None:
                return
            before, deadline = self.words.hear(f"alive/{rank}"), time.monotonic() + ALIVE_S
            while self.words.hear(f"alive/{rank}") == before:
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)
        raise self._taken()

    def _taken(self) -> ClusterError:
        return ClusterError(
            f"rank {self.topology.rank} of the run that meets at {self.address.host}:"
            f"{self.address.port} is another process: two runs use this port, or the rank was"
            " started twice\n"
            "hint: give each run a MASTER_PORT of its own, or let `paceline train` start the ranks:"
            " it always finds a free one"
        )

    def _wait_for_hello(self, connect_s: float) -> Body:
        started_at, own = time.monotonic(), who_knows(self.words.key)
        plain = PrefixStore(attempt_prefix(), _beneath(self.words.store))
        while time.monotonic() < started_at + connect_s:
            if (hello := self.words.hear("hello")) is not None:
                return hello
            is_late = time.monotonic() > started_at + SUSPECT_S
            if is_late and plain.check(["who"]) and plain.get("who").decode("latin1") != own:
                raise ClusterError(
                    f"rank {self.topology.rank} on {socket.gethostname()} and rank 0 have different"
                    f" secrets, and so cannot tell each other from strangers\n{HINT}"
                )
            time.sleep(POLL_S)
        raise LaunchError(f"rank 0 has said nothing within {connect_s:g} s\nhint: see its log")

    def wait_for_all(self, start_s: float) -> list[RankPlace]:
        """Return, to rank 0, host and local rank of every rank; raise where some are missing."""
        world, here = self.topology.world_size, dict[int, Body]()
        deadline = time.monotonic() + start_s
        while len(here) < world:
            for rank in set(range(world)) - here.keys():
                if (body := self.words.hear(f"here/{rank}")) is not None:
                    here[rank] = body
            if len(here) < world and time.monotonic() > deadline:
                raise _absence(sorted(set(range(world)) - here.keys()), world)
            time.sleep(POLL_S)
        return [
            RankPlace(rank=rank, device="", host=body["host"], local_rank=body["local_rank"])
            for rank, body in sorted(here.items())
        ]

    def publish_orders(self, **message: str | int) -> None:
        """Publish, as rank 0, what those who have come are to do: take part in run_dir, with a
        workload that rank 0 has found trusted, or leave with exit_code."""
        for rank in range(1, self.topology.world_size):
            if (here := self.words.hear(f"here/{rank}")) is not None:
                self.words.say(f"orders/{rank}", message, to=str(here["number"]))

    def publish_exit(self, exit_code: int) -> None:
        """Publish that rank 0 leaves, and give those who have come a moment to read it."""
        read = [f"received/{rank}" for rank in range(1, self.topology.world_size)]
        deadline = time.monotonic() + LINGER_S
        with suppress(RuntimeError):
            while True:
                self.publish_orders(exit_code=exit_code)
                is_over = time.monotonic() > deadline or self.server is None
                if is_over or self.words.has_all(read):
                    return
                time.sleep(POLL_S)

    def wait_for_orders(self) -> Body:
        """Return what rank 0 has decided. It may prepare data for an hour; it may not vanish."""
        name, here = f"orders/{self.topology.rank}", f"here/{self.topology.rank}"
        for beat in itertools.count():
            try:
                self.words.say(f"alive/{self.topology.rank}", {"beat": beat, "of": self.number})
                if (found := self.words.hear(here)) and found["number"] != self.number:
                    raise self._taken()  # both came at the same moment
                if (orders := self._hear_orders(name, WAIT_S)) is not None:
                    self.words.say(f"received/{self.topology.rank}", {})
                    return orders
            except dist.DistNetworkError as error:
                raise LaunchError("rank 0 left before it had planned the run") from error
        raise AssertionError("counting never ends")

    def _hear_orders(self, name: str, for_s: float) -> Body | None:
        """Return orders that come within so many seconds. The store is asked again and again: of
        each wait that ends without a word torch writes two warnings."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            if (orders := self.words.hear(name, to=self.number)) is not None:
                return orders
            time.sleep(NEXT_S)
        return None

    def publish_failure(self, rank: int) -> None:
        with suppress(RuntimeError):
            self.words.say(f"{self.round}/failed", {"rank": rank})

    def publish_end(self) -> None:
        with suppress(RuntimeError):
            self.words.say(f"{self.round}/ended/{self.topology.rank}", {})

    def has_failed(self) -> bool:
        """True when a rank has published so, or the store is gone, and with it rank 0."""
        try:
            return self.words.hear(f"{self.round}/failed") is not None
        except RuntimeError:
            return True

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait, as rank 0, which serves the store, until the others need it no more."""
        names = [f"{self.round}/ended/{rank}" for rank in range(self.topology.world_size)]
        deadline = time.monotonic() + timeout_s
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self.words.has_all(names):
                time.sleep(POLL_S)

    def publish_next(self, number: int | None) -> None:
        """Publish, as rank 0, that the attempt of this number has failed and another follows; or,
        with None, that none does."""
        with suppress(RuntimeError):
            self.words.say(f"{self.round}/next", {"failed_attempt": number})
        self.round += 1

    def wait_for_next(self, is_over: Callable[[], bool]) -> int | None:
        """Return the number of the failed attempt that another one follows; None where none does,
        or where rank 0 has gone before it could say."""
        while not is_over():
            try:
                if (word := self.words.hear(f"{self.round}/next")) is not None:
                    self.round += 1
                    return word["failed_attempt"] or None
            except RuntimeError:
                return None
            time.sleep(NEXT_S)
        return None


@contextmanager
def join_rendezvous(
    topology: Topology, connect_s: float = CONNECT_S, secret: bytes = b""
) -> Iterator[Rendezvous]:
    """Meet the other ranks. Should rank 0 leave with an error, the others get its exit code.
    `secret` is the run's, where all ranks were handed one; else it is the user's."""
    _require_address(topology)
    key = derive(secret or shared_secret(), "orders", _job_of(topology))
    is_host = topology.rank == 0 and not topology.agent_store
    server, local = _serve(topology) if is_host else (None, "")
    prefix = f"{attempt_prefix()}/{derive(key, 'prefix').hex()[:16]}"
    address = StoreAddress(topology.master_addr, topology.master_port, prefix, local)
    store = _connect(topology, address, connect_s)
    where = partial(_describe, address, server is not None)
    rendezvous = Rendezvous(topology, SignedStore(store, key, where), address, server)
    try:
        if topology.rank == 0:
            PrefixStore(attempt_prefix(), _beneath(store)).set("who", who_knows(key))
        rendezvous.greet(connect_s)
        yield rendezvous
    except BaseException as error:
        if topology.rank == 0:
            code = error.exit_code if isinstance(error, PacelineError) else CRASHED
            rendezvous.publish_exit(code)
        raise


def attempt_prefix() -> str:
    """Return where this start's keys stand: a restart by torchrun meets at the same store."""
    return f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def who_knows(key: bytes) -> str:
    """Return a sum by which two ranks see whether they know the same key."""
    return derive(key, "who").hex()[:16]


def _job_of(topology: Topology) -> str:
    """Return what all ranks of this job, and of few others, are told by their launcher."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    told = [os.environ.get(name, "") for name in names]
    return " ".join([*told, str(topology.master_port), str(topology.world_size)])


def _beneath(store: Store) -> Store:
    """Return the store under a prefix."""
    assert isinstance(store, PrefixStore), "what StoreAddress.connect returns"
    found: Store = store.underlying_store
    return found


def _describe(address: StoreAddress, is_server: bool) -> str:
    """Say where the store is, and who is connected where this process serves it."""
    peers: set[str] = set()
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp") if is_server else []:
            if entry.raddr and entry.laddr and entry.laddr.port == address.port:
                peers.add(entry.raddr.ip)
    named = f", connected from {', '.join(sorted(peers)[:MAX_NAMED])}" if peers else ""
    return f"{address.host}:{address.port}{named}"


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
            "hint: rank 0 has not started, or a firewall stands between; see MASTER_ADDR. Nodes"
            f" that share no home arrive at different ports: set {SECRET}"
        ) from error


def _means_here(name: str) -> bool:
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return all(LOOPBACK.match(address) for address in addresses)


def _serve(topology: Topology) -> tuple[TCPStore, str]:
    """Serve the store, and return it with the address that it has for this machine. It listens
    where MASTER_ADDR leads, if that is one address of this machine; else, as with a name that means
    loopback here and something else elsewhere, on all."""
    host = _own_address(topology.master_addr)
    try:
        try:
            return serve_store(topology.master_port, host), host or "127.0.0.1"
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # an address that is translated on the way
                raise
            return serve_store(topology.master_port, ""), "127.0.0.1"
    except OSError as error:
        raise ClusterError(
            f"port {topology.master_port}, where the ranks are to meet, is taken by"
            f" {_owner(topology.master_port)}\n"
            "hint: set MASTER_PORT to a free one, or let `paceline train` start the ranks: it"
            " always finds one"
        ) from error


def _own_address(name: str) -> str:
    """Return the address to listen at; "" for all."""
    if LOOPBACK.match(name):
        return "127.0.0.1"
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    is_one = len(found) == 1 and not any(LOOPBACK.match(address) for address in found)
    return found.pop() if is_one else ""


def _owner(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.pid:
                return f"process {entry.pid} ({psutil.Process(entry.pid).name()})"
    return "another process"


def _absence(missing: list[int], world_size: int) -> LaunchError:
    return LaunchError(
        f"{len(missing)} of {world_size} ranks never came: {few(map(str, missing), MAX_NAMED)}\n"
        f"hint: WORLD_SIZE says {world_size}; start as many processes, or raise launch.start_s if"
        " they are slow to start"
    )
