"""Environment lint: variables and a machine -> findings, before an hour of training is lost.

The rules stand here, what is known of each variable in variables.py, how its value is read in
values.py. Pure but for the probe and the look-up of MASTER_ADDR. A value is shown only of a
variable with a row there, never under an unknown name: that may be a secret. Run by
`paceline check`.
"""

import ipaddress
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.check.values import gloo_interfaces, nccl_interfaces, split_functions, unknown_parts
from paceline.check.variables import (
    ALGO,
    ALIASES,
    COSTLY,
    INSTEAD,
    KNOWN,
    OTHER_LIBRARIES,
    OTHER_NAMES,
    Variable,
)
from paceline.records import Finding

GIB = 2**30
# Docker gives 64 MiB. NCCL's guide (troubleshooting, shared memory) asks for --shm-size=1g: its
# segments have 4 MiB and more for each pair of GPUs and channel; loaders pass batches there too.
SHM_NEEDED_BYTES = GIB
# A checkpoint of 0.4 billion parameters with AdamW's state in float32 is 5 GB, and a run that
# replaces it safely holds two for a moment.
DISK_NEEDED_BYTES = 10 * GIB
# Shorter names are too often somebody's own: RANKS, NNODES.
SHORTEST_MISSPELT = 8
LONGEST_SHOWN = 60


def resolve_host(name: str) -> list[str]:
    """The addresses of a host; none when it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(entry[4][0]) for entry in found})


@dataclass(frozen=True)
class Situation:
    """What the environment is held against."""

    num_nodes: int  # hosts that take part
    ranks_here: int  # ranks on this host
    cores: int  # cores this process may use
    interfaces: tuple[str, ...]  # those with an address; empty: not known
    shm_free_bytes: int | None
    disk_free_bytes: int | None  # where the run directory lies
    num_workers: int = 0  # loader processes of a rank, if known
    sets_threads: bool = True  # Paceline sets OMP_NUM_THREADS for ranks itself
    resolve: Callable[[str], list[str]] = resolve_host


def probe_situation(
    num_nodes: int,
    ranks_here: int,
    folder: Path,
    num_workers: int = 0,
    sets_threads: bool = True,
) -> Situation:
    """This host as it is; `folder` is where run directories lie, or will."""
    addresses, state = psutil.net_if_addrs(), psutil.net_if_stats()
    usable = [
        name
        for name, entries in addresses.items()
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
        and (name not in state or state[name].isup)
    ]
    existing = next(
        path for path in [folder.absolute(), *folder.absolute().parents] if path.exists()
    )
    shm = Path("/dev/shm")
    return Situation(
        num_nodes=num_nodes,
        ranks_here=ranks_here,
        cores=len(os.sched_getaffinity(0)),
        interfaces=tuple(sorted(usable)),
        shm_free_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        disk_free_bytes=shutil.disk_usage(existing).free,
        num_workers=num_workers,
        sets_threads=sets_threads,
    )


def lint(environment: Mapping[str, str], situation: Situation) -> list[Finding]:
    """Everything wrong with, idle in or costly about the environment of ranks on this host."""
    found: list[Finding] = []
    for name, value in sorted(environment.items()):
        variable = KNOWN.get(name)
        if variable is None:
            found += _check_name(name)
        else:
            found += [*_check_use(variable), *_check_value(variable, value)]
            found += _check_cost(variable, value, situation)
    found += _check_ring(environment.get("NCCL_ALGO", ""), situation)
    found += _check_threads(environment, situation)
    found += _check_master(environment.get("MASTER_ADDR", ""), situation)
    found += _check_interfaces(environment, situation)
    found += _check_machine(situation)
    return found


# Names


def _check_name(name: str) -> Iterator[Finding]:
    if len(name) < SHORTEST_MISSPELT or name in OTHER_NAMES:
        return
    if name.removeprefix("TORCH_").startswith(OTHER_LIBRARIES):
        return
    long = (known for known in KNOWN if len(known) >= SHORTEST_MISSPELT)
    near = [known for known in long if one_edit_apart(name, known)]
    if near:
        what = " or ".join(f"{known} ({KNOWN[known].does})" for known in near)
        yield Finding(
            severity="warning",
            where=name,
            what=f"is set, and nothing reads it; one letter away is {what}",
            hint=f"use {' or '.join(INSTEAD.get(known, known) for known in near)}, or unset it",
        )


def one_edit_apart(a: str, b: str) -> bool:
    """One letter too many, too few or wrong, or two neighbours swapped."""
    if a == b or abs(len(a) - len(b)) > 1:
        return False
    shared = len(os.path.commonprefix([a, b]))
    short, long = sorted((a[shared:], b[shared:]), key=len)
    if len(short) < len(long):
        return long[1:] == short
    swapped = short[:2] == long[:2][::-1] and short[2:] == long[2:]
    return short[1:] == long[1:] or swapped


def _check_use(variable: Variable) -> Iterator[Finding]:
    """Is it read at all, and under this name?"""
    name, instead = variable.name, INSTEAD.get(variable.name)
    if variable.reader == "nothing":
        yield Finding(
            severity="warning",
            where=name,
            what=f"is set, and nothing reads it: {variable.does}",
            hint=f"use {instead}" if instead else "unset it",
        )
    elif instead:
        yield Finding(
            severity="note" if name in ALIASES else "warning",
            where=name,
            what=f"is the old name of {instead}; {variable.reader} still reads it",
            hint=f"rename it to {instead}",
        )


# Values


def _check_value(variable: Variable, value: str) -> Iterator[Finding]:
    values = variable.values
    if values is None or (not value and values.empty):
        return
    bad = unknown_parts(values, value)
    if bad:
        within = "" if bad == [value] else f" in {_shown(value)}"
        then = f": {values.otherwise}" if values.otherwise else ""
        yield Finding(
            severity="error" if values.refused else "warning",
            where=variable.name,
            what=f"{' and '.join(map(_shown, bad))}{within} is no value {variable.reader} knows"
            f"{then}",
            hint=f"it takes {values.describe()}; or unset it",
        )


def _check_ring(text: str, situation: Situation) -> Iterator[Finding]:
    """Only Ring broadcasts and reduces; since NCCL 2.24 it must be allowed for them."""
    alone = situation.num_nodes * situation.ranks_here <= 1
    if alone or not text or unknown_parts(ALGO, text):
        return
    allowed = {"broadcast": True, "reduce": True}
    for function, words in split_functions(text.lower()):
        ring = ("ring" in words.removeprefix("^").split(",")) != words.startswith("^")
        for name in allowed:
            if function in (None, name):
                allowed[name] = ring
    lacking = [name for name, ring in allowed.items() if not ring]
    if lacking:
        yield Finding(
            severity="warning",
            where="NCCL_ALGO",
            what=f"{_shown(text)} leaves {' and '.join(lacking)} without an algorithm: they have"
            " only Ring, and NCCL since 2.24 fails rather than use it unasked",
            hint="name the function: NCCL_ALGO=allreduce:tree, or add Ring",
        )


def _check_cost(variable: Variable, value: str, situation: Situation) -> Iterator[Finding]:
    costly = COSTLY.get(variable.name) or COSTLY.get(INSTEAD.get(variable.name, ""))
    if costly is None or (costly.across_nodes and situation.num_nodes == 1):
        return
    if value.strip().lower() in {at.lower() for at in costly.at}:
        yield Finding(
            severity="warning",
            where=variable.name,
            what=f"{_shown(value)} was asked: {costly.cost}",
            hint="unset it, unless you are looking for a fault",
        )


# Against the machine


def _check_threads(environment: Mapping[str, str], situation: Situation) -> Iterator[Finding]:
    ranks, cores = situation.ranks_here, situation.cores
    share = max(1, cores // max(1, ranks))
    if not environment.get("OMP_NUM_THREADS", "").strip() and ranks > 1:
        then = f"each takes its share of {cores} cores, set by Paceline"
        if not situation.sets_threads:
            then = f"each starts {cores} threads, {ranks} x {cores} on {cores} cores"
        yield Finding(
            severity="note" if situation.sets_threads else "warning",
            where="OMP_NUM_THREADS",
            what=f"is unset with {ranks} ranks on this host: {then}",
            hint="" if situation.sets_threads else f"export OMP_NUM_THREADS={share}",
        )
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = environment.get(name, "").split(",")[0].strip()
        threads = int(first) if re.fullmatch(r"[0-9]{1,9}", first) else 0
        if threads * ranks > cores:
            yield Finding(
                severity="warning",
                where=name,
                what=f"{threads} threads x {ranks} ranks on {cores} cores: they take turns",
                hint=f"set it to {share}" if threads > share else "start fewer ranks",
            )


def _check_master(host: str, situation: Situation) -> Iterator[Finding]:
    if not host:
        return
    addresses = situation.resolve(host)
    if not addresses:
        yield Finding(
            severity="error",
            where="MASTER_ADDR",
            what=f"{_shown(host)} does not resolve on this host: ranks cannot meet there",
            hint="set it to a name or an address of rank 0's host that every host can look up",
        )
    elif situation.num_nodes > 1 and all(map(_stays_here, addresses)):
        yield Finding(
            severity="error",
            where="MASTER_ADDR",
            what=f"{_shown(host)} is {', '.join(addresses)}, this host itself; with"
            f" {situation.num_nodes} hosts the others wait for a rank 0 of their own",
            hint="set it to the address of rank 0's host on the network between them",
        )


def _stays_here(address: str) -> bool:
    parsed = ipaddress.ip_address(address.split("%")[0])
    return parsed.is_loopback or parsed.is_unspecified


def _check_interfaces(environment: Mapping[str, str], situation: Situation) -> Iterator[Finding]:
    here = situation.interfaces
    readers = {"NCCL_SOCKET_IFNAME": nccl_interfaces, "GLOO_SOCKET_IFNAME": gloo_interfaces}
    for name, choose in readers.items():
        asked = environment.get(name, "")
        if len(asked) < 2 or not here:  # both readers take one letter for unset
            continue
        chosen = choose(asked, here)
        apart = situation.num_nodes > 1 and all(re.fullmatch(r"lo\d*", one) for one in chosen)
        if not chosen:
            what = f"{_shown(asked)} does not fit the network interfaces here ({', '.join(here)})"
        elif apart:
            what = f"{_shown(asked)} is the loopback: other hosts cannot be reached over it"
        else:
            continue
        syntax = "prefixes, =exact names or ^all but these" if "NCCL" in name else "exact names"
        yield Finding(
            severity="error",
            where=name,
            what=what,
            hint=f"it takes {syntax}, with commas and no spaces; or unset it",
        )


def _check_machine(situation: Situation) -> Iterator[Finding]:
    shm, disk = situation.shm_free_bytes, situation.disk_free_bytes
    sharing = situation.ranks_here > 1 or situation.num_workers > 0
    if shm is not None and sharing and shm < SHM_NEEDED_BYTES:
        yield Finding(
            severity="warning",
            where="/dev/shm",
            what=f"{shm / 2**20:.0f} MiB free for {situation.ranks_here} ranks with"
            f" {situation.num_workers} loaders each; NCCL and loaders pass data there, and NCCL's"
            f" guide asks for {SHM_NEEDED_BYTES / GIB:.0f} GiB (docker gives 64 MiB)",
            hint="docker: --shm-size=1g or --ipc=host; kubernetes: an emptyDir of medium Memory"
            " on /dev/shm",
            cause="cluster",
        )
    if disk is not None and disk < DISK_NEEDED_BYTES:
        yield Finding(
            severity="warning",
            where="disk",
            what=f"{disk / GIB:.1f} GiB free where the run directory lies; less than"
            f" {DISK_NEEDED_BYTES / GIB:.0f} GiB is soon filled by checkpoints",
            hint="free some, or choose another folder with --out",
            cause="cluster",
        )


def _shown(value: str) -> str:
    """A value fit for one line of a message."""
    text = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return repr(text)
