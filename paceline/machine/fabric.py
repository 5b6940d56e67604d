"""Presets of NCCL's variables: each applied only where the probed links give it a meaning.

A variable that the user has set, in the environment or in `launch.env`, is never touched.
"""

import ctypes
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.records import Choice, Crew, Env, Finding

NVLINK = ("nvlink", "nvswitch")
NVLS_CAPABILITY = 9.0  # NVLink SHARP came with Hopper's switches
PLUGIN = "librccl-net.so"
MIOPEN_CACHES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")
NODE_CACHE = "{tmp}/paceline-miopen-{user}"  # of each rank's own node, filled in there


@dataclass(frozen=True)
class Fabric:
    """A preset. `variables` maps a name to its value and the reason for it."""

    choice: Choice
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def choose_fabric(asked: str, env: Env, crew: Crew, run_name: str) -> Fabric:
    """Choose the preset that the user names, or the one that what was probed matches."""
    name, because = _match(asked, env, crew)
    choice = Choice(requested=asked, value=name, because=because)
    if name == "nvlink":
        return Fabric(choice, dict(_nvlink(env, crew, is_asked=asked == "nvlink")))
    if name == "pcie":
        return Fabric(choice, dict(_pcie()))
    if name == "frontier":
        return Fabric(choice, dict(_frontier(run_name)), list(_plugin_problems()))
    return Fabric(choice)


def _match(asked: str, env: Env, crew: Crew) -> tuple[str, str]:
    if asked == "off":
        return "off", "as asked"
    if crew.backend.value != "nccl":
        return "off", f"{crew.backend.value} reads none of NCCL's variables"
    if asked != "auto":
        return asked, "as asked"
    if env.hip and "hsn0" in env.interfaces:
        return "frontier", "ROCm and a Slingshot interface hsn0 are here"
    kinds = {link.kind for link in env.links}
    if kinds & set(NVLINK):
        return "nvlink", f"{len(env.gpus)} GPUs are joined by {' and '.join(sorted(kinds))}"
    if len(env.gpus) == 2 and "unknown" not in kinds:
        return "pcie", f"2 GPUs meet at a {''.join(kinds).replace('_', ' ')}, without NVLink"
    why = "no links between GPUs were found" if not kinds - {"unknown"} else "no preset for PCIe"
    return "off", why


Setting = tuple[str, tuple[str, str]]


def _nvlink(env: Env, crew: Crew, is_asked: bool) -> Iterator[Setting]:
    kinds = {link.kind for link in env.links}
    capability = min((float(gpu.compute_capability) for gpu in env.gpus), default=0.0)
    # On bridged pairs it would switch off the direct PCIe path between the pairs.
    if kinds and kinds <= set(NVLINK):
        yield "NCCL_P2P_LEVEL", ("NVL", "NVLink joins every pair of GPUs")
    if kinds == {"nvswitch"} and capability >= NVLS_CAPABILITY:
        yield (
            "NCCL_NVLS_ENABLE",
            ("1", f"NVSwitch and compute capability {capability}: switches can add"),
        )
    if is_asked:
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            ("1", "the preset was named: kernels start in launch order, at the cost of overlap"),
        )
    if crew.num_nodes == 1:
        return
    docker = [name for name in env.interfaces if name.startswith("docker")]
    if docker:
        yield (
            "NCCL_SOCKET_IFNAME",
            ("^lo,docker", f"several nodes, and {docker[0]} reaches none of the others"),
        )
    if env.infiniband:
        found = f"{env.infiniband[0]} is here"
        yield "NCCL_IB_DISABLE", ("0", f"several nodes, and {found}")
        yield (
            "NCCL_NET_GDR_LEVEL",
            ("5", f"several nodes, and {found}: read GPUs from any distance"),
        )


def _pcie() -> Iterator[Setting]:
    why = "two GPUs without NVLink: a ring of large messages is the whole topology"
    yield "NCCL_ALGO", ("Ring", why)
    yield "NCCL_PROTO", ("Simple", why)


def _frontier(run_name: str) -> Iterator[Setting]:
    yield "NCCL_SOCKET_IFNAME", ("hsn0", "the Slingshot interface")
    yield "NCCL_CROSS_NIC", ("1", "each node has four NICs, used crosswise")
    yield "NCCL_NET_GDR_LEVEL", ("3", "each NIC hangs on a GPU")
    why = "MIOpen locks its caches: on a shared disk ranks would wait for each other"
    cache = f"{NODE_CACHE}-{re.sub(r'[^A-Za-z0-9._-]', '-', run_name)}-{{local_rank}}"
    for name in MIOPEN_CACHES:
        yield name, (cache, why)


def make_node_caches(environment: dict[str, str], local_rank: int) -> dict[str, str]:
    """Return the environment with MIOpen's caches on this node's own disk, and make them."""
    made = dict(environment)
    for name in MIOPEN_CACHES:
        template = environment.get(name, "")
        if template.startswith(NODE_CACHE):
            tmp = environment.get("TMPDIR") or "/tmp"
            words = {"tmp": tmp, "user": str(os.getuid()), "local_rank": str(local_rank)}
            made[name] = _own_folder(Path(template.format_map(words)))
    return made


def _own_folder(path: Path) -> str:
    """Make a folder that this user owns: everybody can write into /tmp, and a folder that
    another user put there is not used."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return str(path)
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="paceline-miopen-")


def _plugin_problems() -> Iterator[Finding]:
    """Warn where AWS-OFI-RCCL is missing: RCCL falls back to TCP over Slingshot, which is right,
    and many times slower."""
    try:
        ctypes.CDLL(PLUGIN)
    except OSError as error:
        yield Finding.warning(
            "LD_LIBRARY_PATH",
            f"the AWS-OFI-RCCL plugin cannot be loaded ({error}); RCCL will use TCP",
            hint="load its module, or put the folder that holds it on LD_LIBRARY_PATH",
            cause="cluster",
        )
