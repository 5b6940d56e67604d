"""No peer gives orders: what a stranger writes to the ranks' store is refused and reported.

The strangers are processes of their own that know the address and torch's protocol, list every key
and overwrite it, but have no secret.
"""

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from paceline.errors import ClusterError, ConfigError
from paceline.launch import rendezvous as module
from paceline.launch.rendezvous import Rendezvous, join_rendezvous
from paceline.launch.signed import SignedStore
from paceline.machine import secret
from paceline.machine.topology import Topology
from tests.harness import warm_fork_server

EVIL = "/x/evil"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(secret.SECRET, raising=False)
    return tmp_path / "state" / "paceline"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def pair() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    """Both ranks of a run, met."""
    topology = Topology(world_size=2, local_world_size=2, master_port=free_port(), launcher="env")
    with ExitStack() as stack:
        zero = stack.enter_context(join_rendezvous(topology))
        other = replace(topology, rank=1, local_rank=1)
        yield zero, stack.enter_context(join_rendezvous(other, 10))


def attack(work: Callable[[TCPStore], None], port: int) -> None:
    """Run by a process of its own, which has only the address."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    work(store)


def by_stranger(work: Callable[[TCPStore], None], port: int) -> Any:
    warm_fork_server()
    process = multiprocessing.get_context("forkserver").Process(target=attack, args=(work, port))
    process.start()
    return process


def finish(process: Any) -> None:
    process.join(30)
    assert process.exitcode == 0


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work)


def overwrite_everything(store: TCPStore) -> None:
    """In the old places, and in all that the store tells of."""
    orders = json.dumps({"run_dir": EVIL, "exit_code": 0})
    signed = json.dumps({"says": orders, "mac": "0" * 64})
    for _ in range(20):
        keys = [key.removeprefix("/") for key in store.list_keys()]
        for key in ["paceline/0/orders", "paceline/0/0/failed", *keys]:
            if key.endswith("/hello"):
                for name in ("orders/1", "0/failed", "0/next"):
                    store.set(key.replace("hello", name), signed)
            store.set(key, "garbage")
        time.sleep(0.01)


def test_b2_a_strangers_orders_are_refused_and_reported(
    pair: tuple[Rendezvous, Rendezvous], caplog: pytest.LogCaptureFixture
) -> None:
    zero, one = pair
    zero.wait_for_all(5)
    number = one.number
    heard = in_thread(one.wait_for_orders)
    finish(by_stranger(overwrite_everything, zero.address.port))
    assert not heard.done(), "orders of a stranger"
    assert not one.has_failed() and not zero.has_failed()
    assert one.wait_for_next(iter([False, True]).__next__) is None
    assert "'orders/1' at the ranks' store is not signed by this run" in caplog.text
    zero.words.hear("here/1")
    assert "connected from 127.0.0.1" in caplog.text, "known to the process that serves"
    assert EVIL not in caplog.text
    zero.words.say("orders/1", {"run_dir": "mine"}, to=number)
    assert heard.result(5) == {"run_dir": "mine"}


def test_orders_reach_those_who_have_come(
    pair: tuple[Rendezvous, Rendezvous], capfd: pytest.CaptureFixture[str]
) -> None:
    zero, one = pair
    places = zero.wait_for_all(5)
    assert [(place.rank, place.local_rank) for place in places] == [(0, 0), (1, 1)]
    heard = in_thread(one.wait_for_orders)
    time.sleep(1.5 * module.WAIT_S)
    zero.publish_orders(run_dir="r", workload="lm")
    assert heard.result(5) == {"run_dir": "r", "workload": "lm"}
    assert capfd.readouterr().err == "", "a rank that waits says nothing"
    one.publish_failure(1)
    assert zero.has_failed() and one.has_failed()
    for rank in pair:
        rank.publish_end()
    zero.wait_for_ends(5)
    zero.publish_next(1)
    assert one.wait_for_next(lambda: False) == 1 and (zero.round, one.round) == (1, 1)
    assert not one.has_failed(), "a new round"
    zero.publish_next(None)
    assert one.wait_for_next(lambda: False) is None


def test_a_second_run_at_the_same_port_takes_nobodys_place(
    pair: tuple[Rendezvous, Rendezvous],
) -> None:
    """By the same user, so with the same secret: its rank 1 finds the store of the first run."""
    zero, one = pair
    intruder = replace(one.topology)
    heard = in_thread(one.wait_for_orders)
    with pytest.raises(ClusterError, match="rank 1 of the run that meets at .* is another process"):
        join_rendezvous(intruder, 10).__enter__()  # while rank 1 waits
    zero.wait_for_all(5)
    zero.publish_orders(run_dir="r")
    assert heard.result(5) == {"run_dir": "r"}, "the first run goes on"
    started_at = time.monotonic()
    with pytest.raises(ClusterError, match="two runs use this port"):
        join_rendezvous(intruder, 10).__enter__()  # while rank 1 trains
    assert time.monotonic() - started_at < 2


def test_a_rank_that_died_before_it_got_orders_is_replaced(
    pair: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ALIVE_S", 0.2)
    zero, dead = pair
    with join_rendezvous(dead.topology, 10) as second:
        heard = in_thread(second.wait_for_orders)
        zero.publish_orders(run_dir="r")
        assert heard.result(5) == {"run_dir": "r"}
        with pytest.raises(ClusterError, match="is another process"):
            dead.wait_for_orders()  # not dead at all, only slow: it leaves


def test_rank_0s_error_is_the_exit_code_of_all() -> None:
    topology = Topology(world_size=2, local_world_size=2, master_port=free_port(), launcher="env")

    def lead() -> None:
        with join_rendezvous(topology) as zero:
            zero.wait_for_all(5)
            raise ConfigError("no")

    led = in_thread(lead)
    with join_rendezvous(replace(topology, rank=1, local_rank=1), 10) as one:
        assert one.wait_for_orders() == {"exit_code": 2}
    with pytest.raises(ConfigError):
        led.result(10)


class Words:
    """A store's dictionary, to look at words without a network."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, name: str, text: str) -> None:
        self.held[name] = text.encode()

    def get(self, name: str) -> bytes:
        return self.held[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self.held for name in names)


def words_of(store: Words, session: str = "a", key: bytes = b"k") -> SignedStore:
    return SignedStore(store, key, lambda: "here", session)  # type: ignore[arg-type]


def test_a_word_is_heard_only_where_it_belongs() -> None:
    store = Words()
    words_of(store).say("orders/1", {"exit_code": 0}, to="nonce")
    heard = words_of(store).hear
    assert heard("orders/1", to="nonce") == {"exit_code": 0}
    assert heard("orders/1", to="another") is None, "for an earlier process of this rank"
    assert words_of(store, session="b").hear("orders/1", to="nonce") is None, "of another run"
    assert words_of(store, key=b"x").hear("orders/1", to="nonce") is None
    store.held["1/next"] = store.held["orders/1"]
    assert heard("1/next") is None and heard("1/next", to="nonce") is None, "said elsewhere"


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"[]", b"{}", b'{"says": 1, "mac": 2}', b"[" * 100_000, b"null",
            b'{"says": "{}", "mac": "\\u00e9"}'],
)  # fmt: skip
def test_garbage_is_no_word(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = Words()
    store.held["orders/1"] = raw
    words = words_of(store)
    assert words.hear("orders/1") is None and words.hear("orders/1") is None
    assert caplog.text.count("refused") == 1, "said once"


def test_reports_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    store, words = Words(), None
    words = words_of(store)
    for number in range(100):
        store.held["x"] = str(number).encode()
        assert words.hear("x") is None
    assert caplog.text.count("refused") == 8


def test_other_secrets_are_told_from_late_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on nodes that share no home."""
    monkeypatch.setattr(module, "SUSPECT_S", 0.1)
    topology = Topology(world_size=2, local_world_size=2, master_port=free_port(), launcher="env")
    with join_rendezvous(topology):
        other = replace(topology, rank=1, local_rank=1)
        with (
            pytest.raises(ClusterError, match="different secrets(.|\n)*PACELINE_SECRET"),
            join_rendezvous(other, 10, secret=b"another one"),
        ):
            pass


def test_the_users_key_is_made_once_and_kept_from_others(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: secret.shared_secret(), range(32)))
    assert len(keys) == 1 and len(keys.pop()) == 64
    assert (state / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.iterdir()] == ["key"], "no half of one is left"
    (state / "key").chmod(0o644)
    with pytest.raises(ClusterError, match="is not a secret"):
        secret.shared_secret()


def test_a_secret_that_can_be_guessed_or_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.SECRET, "short")
    with pytest.raises(ConfigError, match="anybody could guess"):
        secret.shared_secret()
    monkeypatch.setenv(secret.SECRET, "long enough to be one")
    assert secret.shared_secret() == b"long enough to be one"
    monkeypatch.delenv(secret.SECRET)
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    with pytest.raises(ClusterError, match="none can be kept(.|\n)*PACELINE_SECRET"):
        secret.shared_secret()


def flood(store: TCPStore) -> None:
    """Many connections: some say nothing, some say what is no word of the protocol."""
    held = []
    for number in range(200):
        connection = socket.create_connection(("127.0.0.1", store.port), timeout=5)
        if number % 2:
            connection.sendall(os.urandom(64))
        held.append(connection)
    time.sleep(0.2)


def test_a_flood_of_connections_disturbs_nobody(pair: tuple[Rendezvous, Rendezvous]) -> None:
    zero, one = pair
    finish(by_stranger(flood, zero.address.port))
    zero.wait_for_all(5)
    heard = in_thread(one.wait_for_orders)
    zero.publish_orders(exit_code=75)
    assert heard.result(5) == {"exit_code": 75}


def listening_on(port: int) -> set[str]:
    """Addresses that this process listens at, as the kernel says."""
    text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in text.splitlines() if " 0A " in line]
    return {row[1].split(":")[0] for row in rows if int(row[1].split(":")[1], 16) == port}


def test_the_store_listens_where_the_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store, local = module._serve(Topology(master_addr="localhost", master_port=port))
    assert listening_on(port) == {"0100007F"} and local == "127.0.0.1"
    del store
    assert module._own_address("10.1.2.3") == "10.1.2.3"
    found = [(0, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert module._own_address("box") == "", "Debian's own name is loopback at home only"
