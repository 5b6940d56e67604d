"""The environment lint: each rule where it speaks and where it keeps silent."""

import os
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.check.lint import (
    Situation,
    lint,
    nccl_interfaces,
    one_edit_apart,
    probe_situation,
    resolve_host,
)
from paceline.check.variables import COSTLY, OTHER_LIBRARIES, REAL, RENAMED, SWITCHED_OFF, UNREAD
from paceline.records import Finding

GIB = 2**30
HOSTS = {
    "localhost": ["127.0.0.1", "::1"],
    "node1": ["10.0.0.1"],
    "both": ["10.0.0.1", "127.0.1.1"],
    "debian": ["127.0.1.1"],
    "any": ["0.0.0.0"],
}
ALONE = Situation(
    num_nodes=1,
    ranks_here=1,
    cores=16,
    interfaces=("eth0", "eth1", "hsn0", "ib0", "lo"),
    shm_free_bytes=32 * GIB,
    disk_free_bytes=500 * GIB,
    resolve=lambda name: HOSTS.get(name, []),
)
BOX = replace(ALONE, ranks_here=8)
CLUSTER = replace(BOX, num_nodes=2)
CLEAN = {
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "NODE_RANK": "0",
    "NCCL_DEBUG": "WARN",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "NCCL_SOCKET_IFNAME": "^lo,docker",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_NET_GDR_LEVEL": "3",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NVLS_ENABLE": "1",
    "NCCL_CROSS_NIC": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "2",
    "FI_CXI_ATS": "0",
    "MIOPEN_USER_DB_PATH": "/tmp/job1",
    "SLURM_JOB_ID": "1",
    "LOG_LEVEL": "info",
    "NODE_NAME": "pod-1",
    "RANKS": "16",
    "NCCL_VERSION": "2.28.9-1",
    "HCCL_BUFFSIZE": "4",
    "TORCH_XCCL_BLOCKING_WAIT": "1",
}


def about(where: str, environment: dict[str, str], situation: Situation = ALONE) -> list[Finding]:
    return [finding for finding in lint(environment, situation) if finding.where == where]


def severity(where: str, value: str, situation: Situation = ALONE) -> str | None:
    """The gravest thing said of one variable alone in the environment."""
    said = {finding.severity for finding in about(where, {where: value}, situation)}
    return next((one for one in ("error", "warning", "note") if one in said), None)


# No false alarms


@pytest.mark.parametrize("environment", [{}, CLEAN], ids=["empty", "clean"])
def test_nothing_to_say(environment: dict[str, str]) -> None:
    assert lint(environment, CLUSTER if environment else ALONE) == []


def test_this_machine(tmp_path: Path) -> None:
    situation = probe_situation(1, 1, tmp_path / "not" / "yet")
    assert situation.cores >= 1 and situation.interfaces and situation.disk_free_bytes
    found = lint(os.environ, situation)
    assert not [finding for finding in found if finding.severity == "error"]


# Values


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_ALGO", "TREE or RING", "error"),
        ("NCCL_ALGO", "tree, ring", "error"),  # a blank is part of NCCL's word
        ("NCCL_ALGO", "ring;gather:tree", "error"),
        ("NCCL_ALGO", "TREE,ring", None),
        ("NCCL_ALGO", "^NVLSTree", None),
        ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring", None),
        ("NCCL_ALGO", "", None),
        ("NCCL_PROTO", "LL256", "error"),
        ("NCCL_PROTO", "^LL128;allreduce:LL128", None),
        ("NCCL_DMABUF_ENABLE", "true", "warning"),  # strtoll makes it 0
        ("NCCL_DMABUF_ENABLE", "0x1", None),
        ("OMP_NUM_THREADS", "0", "warning"),
        ("OMP_NUM_THREADS", "four", "warning"),
        ("OMP_NUM_THREADS", "4,2", None),  # OpenMP: one for each level of nesting
    ],
)
def test_values(name: str, value: str, expected: str | None) -> None:
    assert severity(name, value) == expected


def test_a_bad_value_is_named_and_explained() -> None:
    (finding,) = about("NCCL_ALGO", {"NCCL_ALGO": "Ring,TREE or RING"})
    assert "'TREE or RING' is not known to NCCL" in finding.what
    assert "refuses" in finding.what and "Tree, Ring" in finding.hint
    assert finding.cause == "config"


@pytest.mark.parametrize(
    ("value", "lacks"), [("Tree", True), ("Tree,Ring", False), ("allreduce:tree", False)]
)
def test_a_broadcast_needs_the_ring(value: str, lacks: bool) -> None:
    said = [f.what for f in about("NCCL_ALGO", {"NCCL_ALGO": value}, BOX)]
    assert bool(said) == lacks and all("leaves broadcast and reduce without" in s for s in said)
    assert not about("NCCL_ALGO", {"NCCL_ALGO": value}), "one rank broadcasts nothing"


@pytest.mark.parametrize(
    ("switch", "idle"), [(switch, idle) for switch in SWITCHED_OFF for idle in SWITCHED_OFF[switch]]
)
def test_settings_that_contradict_each_other(switch: str, idle: str) -> None:
    (finding,) = about(idle, {switch: "1", idle: "NVL"})
    assert finding.severity == "warning" and f"{switch} is 1" in finding.what
    assert not about(idle, {switch: "0", idle: "NVL"})


# Names


@pytest.mark.parametrize("name", UNREAD)
def test_what_nothing_reads(name: str) -> None:
    (finding,) = about(name, {name: "1800"})
    assert finding.severity == "warning" and "nothing reads it" in finding.what
    assert UNREAD[name][1] in finding.hint


@pytest.mark.parametrize("name", RENAMED)
def test_old_names(name: str) -> None:
    (finding,) = [f for f in about(name, {name: "x"}) if "old name" in f.what]
    assert finding.severity == ("note" if name == "PYTORCH_CUDA_ALLOC_CONF" else "warning")
    assert RENAMED[name] in finding.hint and not about(RENAMED[name], {RENAMED[name]: "x"})


def misspellings(name: str) -> set[str]:
    """Every name one letter away, or with two neighbours swapped."""
    letters = string.ascii_uppercase + string.digits + "_"
    cuts = [(name[:at], name[at:]) for at in range(len(name) + 1)]
    found = {left + letter + right for left, right in cuts for letter in letters}
    found |= {left + letter + right[1:] for left, right in cuts if right for letter in letters}
    found |= {left + right[1:] for left, right in cuts if right}
    found |= {left + right[1::-1] + right[2:] for left, right in cuts if len(right) > 1}
    return found - {name}


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_ALGO",
        "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG",
        "PYTORCH_ALLOC_CONF",
    ],
)  # fmt: skip
def test_every_misspelling_is_seen(name: str) -> None:
    wrong = misspellings(name) - REAL - set(RENAMED) - set(UNREAD)
    wrong = {one for one in wrong if not one.startswith(OTHER_LIBRARIES)}  # HCCL_ALGO is real
    assert len(wrong) > 500 and all(one_edit_apart(one, name) for one in wrong)
    found = {f.where: f for f in lint(dict.fromkeys(wrong, "hunter2"), ALONE)}
    assert set(found) == wrong
    assert all(name in finding.what and name in finding.hint for finding in found.values())
    assert {finding.severity for finding in found.values()} == {"warning"}


@pytest.mark.parametrize(
    "name", ["NCLL_DEBUG", "NCCL_SOCKET_IFNAM", "OMP_NUM_THREAD", "WORLDSIZE", "MASTER_ADRD"]
)
def test_common_slips(name: str) -> None:
    assert len(about(name, {name: "1"})) == 1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("AB", "AB", False),
        ("AB", "ABC", True),
        ("ABC", "AC", True),
        ("ABC", "AXC", True),
        ("ABCD", "ACBD", True),
        ("ABCD", "ADCB", False),
        ("ABC", "AXY", False),
        ("A", "ABC", False),
    ],
)
def test_one_edit_apart(a: str, b: str, expected: bool) -> None:
    assert one_edit_apart(a, b) == one_edit_apart(b, a) == expected


@pytest.mark.parametrize("name", ["RANKS", "RNAK", "NODE", "KMP_STACKSIZE", "MCCL_DEBUG", "HOME"])
def test_names_of_others_are_left_alone(name: str) -> None:
    assert not about(name, {name: "1"}, CLUSTER)


def test_secrets_are_never_shown() -> None:
    secret = "hunter2"
    unknown = {"NCCL_SOCKET_IFNAM": secret, "NCCL_PSK": secret, "NCCL_PSKX": secret}
    assert secret not in " ".join(map(str, lint(unknown | {"HF_TOKEN": secret}, CLUSTER)))


def test_a_long_value_is_cut() -> None:
    (finding,) = about("NCCL_ALGO", {"NCCL_ALGO": "x" * 5000})
    assert len(finding.what) < 300


# Costs


@pytest.mark.parametrize("name", sorted(COSTLY))
def test_costly_values(name: str) -> None:
    for value in COSTLY[name][0]:
        assert severity(name, value, CLUSTER) == "warning"
    is_free = name == "NCCL_IB_DISABLE"
    assert severity(name, COSTLY[name][0][0], ALONE) == (None if is_free else "warning")
    harmless = "3" if "HANDLING" in name else "0"
    assert not about(name, {name: harmless}, CLUSTER)


def test_an_old_name_costs_the_same() -> None:
    said = about("NCCL_BLOCKING_WAIT", {"NCCL_BLOCKING_WAIT": "1"})
    assert any(COSTLY["TORCH_NCCL_BLOCKING_WAIT"][1] in finding.what for finding in said)


# Threads


@pytest.mark.parametrize(
    ("threads", "ranks", "hint"),
    [("4", 8, "set it to 2"), ("1", 32, "start fewer ranks"), ("4,2", 8, "set it to 2")],
)
def test_too_many_threads(threads: str, ranks: int, hint: str) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        situation = replace(ALONE, ranks_here=ranks)
        said = [f for f in about(name, {name: threads}, situation) if "cores" in f.what]
        said = [finding for finding in said if "unset" not in finding.what]
        assert [(finding.severity, finding.hint) for finding in said] == [("warning", hint)]


def test_threads_that_fit() -> None:
    assert not about("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "2"}, BOX)  # 2 x 8 = 16 cores
    assert not about("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "16"}, ALONE)


def test_threads_unset() -> None:
    assert not about("OMP_NUM_THREADS", {}, ALONE)
    (note,) = about("OMP_NUM_THREADS", {}, BOX)
    assert note.severity == "note" and "set by Paceline" in note.what


# Where ranks meet


@pytest.mark.parametrize(
    ("host", "situation", "expected"),
    [
        ("localhost", CLUSTER, "error"),
        ("debian", CLUSTER, "error"),
        ("any", CLUSTER, "error"),
        ("localhost", BOX, None),
        ("node1", CLUSTER, None),
        ("both", CLUSTER, None),
        ("no-such-host", BOX, "error"),
        ("", CLUSTER, None),
    ],
)
def test_master_address(host: str, situation: Situation, expected: str | None) -> None:
    assert severity("MASTER_ADDR", host, situation) == expected


def test_the_real_look_up() -> None:
    assert "127.0.0.1" in resolve_host("127.0.0.1")
    assert resolve_host("no such host.invalid") == resolve_host("a" * 300) == []


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^lo,docker", ["eth0", "eth1", "hsn0", "ib0"]),
        ("^=lo", ["eth0", "eth1", "hsn0", "ib0"]),
        ("^eth,ib,hsn,lo", []),
        ("ens", []),
        (" eth0", []),  # a blank is part of the prefix
        ("eth0:1", ["eth0"]),
    ],
)
def test_interfaces_as_nccl_chooses_them(asked: str, chosen: list[str]) -> None:
    assert nccl_interfaces(asked, ALONE.interfaces) == chosen
    assert severity("NCCL_SOCKET_IFNAME", asked) == (None if chosen else "error")


@pytest.mark.parametrize(
    ("name", "value", "situation", "expected"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", ALONE, None),
        ("GLOO_SOCKET_IFNAME", "eth", ALONE, "error"),  # gloo knows no prefixes
        ("GLOO_SOCKET_IFNAME", "^lo", ALONE, "error"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", ALONE, "error"),
        ("GLOO_SOCKET_IFNAME", "lo", BOX, None),
        ("GLOO_SOCKET_IFNAME", "lo", CLUSTER, "error"),
        ("NCCL_SOCKET_IFNAME", "lo", BOX, None),
        ("NCCL_SOCKET_IFNAME", "lo", CLUSTER, "error"),
        ("NCCL_SOCKET_IFNAME", "lo,eth0", CLUSTER, None),
        ("NCCL_SOCKET_IFNAME", "x", ALONE, None),  # one letter counts as unset
        ("NCCL_SOCKET_IFNAME", "ens", replace(ALONE, interfaces=()), None),  # nothing probed
    ],
)
def test_interfaces(name: str, value: str, situation: Situation, expected: str | None) -> None:
    assert severity(name, value, situation) == expected


# The machine


@pytest.mark.parametrize(
    ("free_bytes", "ranks", "expected"),
    [(64 * 2**20, 8, 1), (GIB - 1, 2, 1), (64 * 2**20, 1, 0), (GIB, 8, 0), (None, 8, 0)],
)
def test_shared_memory(free_bytes: int | None, ranks: int, expected: int) -> None:
    situation = replace(ALONE, shm_free_bytes=free_bytes, ranks_here=ranks)
    said = about("/dev/shm", {"OMP_NUM_THREADS": "1"}, situation)
    assert [(f.severity, f.cause) for f in said] == [("warning", "cluster")] * expected
    assert all("--shm-size" in finding.hint for finding in said)


def test_disk() -> None:
    (finding,) = about("disk", {}, replace(ALONE, disk_free_bytes=2 * GIB))
    assert finding.severity == "warning" and finding.cause == "cluster"
    assert "2 GiB free" in finding.what
    assert not about("disk", {}, replace(ALONE, disk_free_bytes=10 * GIB))
    assert not about("disk", {}, replace(ALONE, disk_free_bytes=None))


def test_runs_without_torch() -> None:
    code = "import sys, paceline.check.lint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
