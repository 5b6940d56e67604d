"""Environment lint: variables and a machine -> findings, before an hour of training is lost.

Rules are here for what has cost somebody a night; what is known of names is in variables.py. Pure
but for the probe and the look-up of MASTER_ADDR. A value is shown only under a name that is known:
another may be a secret. Run by `paceline check`.
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

from paceline.check.variables import (
    ACROSS_NODES,
    ALIASES,
    COSTLY,
    FUNCTIONS,
    NCCL_WORDS,
    OTHER_LIBRARIES,
    REAL,
    RENAMED,
    SWITCHED_OFF,
    UNREAD,
)
from paceline.records import Finding
from paceline.records.words import size

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
    """Return the addresses of a host; none when it does not resolve."""
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
    resolve: Callable[[str], list[str]] = resolve_host

    @property
    def is_group(self) -> bool:
        return self.num_nodes * self.ranks_here > 1


def probe_situation(num_nodes: int, ranks_here: int, folder: Path) -> Situation:
    """Look at this host; `folder` is where run directories lie, or will."""
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
    )


def lint(environment: Mapping[str, str], situation: Situation) -> list[Finding]:
    """Return everything wrong with, idle in or costly about the environment of ranks here."""
    found: list[Finding] = []
    for name, value in sorted(environment.items()):
        found += [*_check_name(name), *_check_value(name, value, situation)]
    found += _check_idle(environment)
    found += _check_threads(environment, situation)
    found += _check_master(environment.get("MASTER_ADDR", ""), situation)
    found += _check_interfaces(environment, situation)
    found += _check_machine(situation)
    return found


# Names


def _check_name(name: str) -> Iterator[Finding]:
    """Report a name that nothing reads, or that is read under another name."""
    if name in UNREAD:
        why, instead = UNREAD[name]
        yield _find(name, f"is set, and nothing reads it: {why}", f"use {instead}")
    elif name in RENAMED:
        new, severity = RENAMED[name], "note" if name in ALIASES else "warning"
        what = f"is the old name of {new}; torch still reads it"
        yield _find(name, what, f"rename it to {new}", severity)
    elif name not in REAL and (near := _misspelt(name)):
        right = " or ".join(RENAMED.get(known, known) for known in near)
        what = f"is set, and nothing reads it; one letter away is {' or '.join(near)}"
        yield _find(name, what, f"use {right}, or unset it")


def _misspelt(name: str) -> list[str]:
    is_others = name.removeprefix("TORCH_").startswith(OTHER_LIBRARIES)
    if len(name) < SHORTEST_MISSPELT or is_others:
        return []
    long = (known for known in (*REAL, *RENAMED) if len(known) >= SHORTEST_MISSPELT)
    return sorted(known for known in long if one_edit_apart(name, known))


def one_edit_apart(a: str, b: str) -> bool:
    """Tell whether two names differ by one letter too many, too few or wrong, or by two
    neighbours that are swapped."""
    if a == b or abs(len(a) - len(b)) > 1:
        return False
    shared = len(os.path.commonprefix([a, b]))
    short, long = sorted((a[shared:], b[shared:]), key=len)
    if len(short) < len(long):
        return long[1:] == short
    swapped = short[:2] == long[:2][::-1] and short[2:] == long[2:]
    return short[1:] == long[1:] or swapped


# Values


def _check_value(name: str, value: str, situation: Situation) -> Iterator[Finding]:
    costs, cost = COSTLY.get(RENAMED.get(name, name), ((), ""))
    is_free = name in ACROSS_NODES and situation.num_nodes == 1
    if value.strip().lower() in costs and not is_free:
        what = f"{_shown(value)} was asked: {cost}"
        yield _find(name, what, "unset it, unless you are looking for a fault")
    # NCCL reads numbers by strtoll: NCCL_IB_DISABLE=true disables nothing.
    is_flag = name in REAL and re.fullmatch(r"NCCL_\w+_(DISABLE|ENABLE)", name)
    if is_flag and value.strip() and not re.match(r"\s*[+-]?\d", value):
        what = f"{_shown(value)} is not a number, and NCCL takes any word as 0"
        yield _find(name, what, "set it to 1 or 0, or unset it")
    if name in NCCL_WORDS:
        yield from _check_words(name, value, situation)


def _check_words(name: str, value: str, situation: Situation) -> Iterator[Finding]:
    known = {word.lower() for word in (*NCCL_WORDS[name], *FUNCTIONS)}
    words = [word.removeprefix("^") for word in re.split("[,;:]", value)]
    bad = [word for word in words if word and word.lower() not in known]
    if bad:
        what = f"{' and '.join(map(_shown, bad))} is not known to NCCL: since 2.24 it refuses it,"
        hint = f"it takes {', '.join(NCCL_WORDS[name])}, as a list with commas; or unset it"
        yield _find(name, f"{what} and no communicator is made", hint, "error")
    is_short = not any(mark in value for mark in "^:") and "ring" not in value.lower()
    if name == "NCCL_ALGO" and value and is_short and not bad and situation.is_group:
        what = f"{_shown(value)} leaves broadcast and reduce without an algorithm: they have only"
        what += " Ring, and NCCL since 2.24 fails rather than use it unasked"
        yield _find(name, what, "name the function: NCCL_ALGO=allreduce:tree, or add Ring")


def _check_idle(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report settings that another one switches off."""
    for switch, names in SWITCHED_OFF.items():
        for name in names:
            if environment.get(switch) == "1" and environment.get(name):
                yield _find(name, f"has no effect: {switch} is 1", f"unset {name} or {switch}")


# Against the machine


def _check_threads(environment: Mapping[str, str], situation: Situation) -> Iterator[Finding]:
    ranks, cores = situation.ranks_here, situation.cores
    share = max(1, cores // max(1, ranks))
    if not environment.get("OMP_NUM_THREADS", "").strip() and ranks > 1:
        what = f"is unset with {ranks} ranks on this host: each takes its share of {cores} cores,"
        yield _find("OMP_NUM_THREADS", f"{what} set by Paceline", severity="note")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = environment.get(name, "").split(",")[0].strip()
        threads = int(first) if re.fullmatch(r"[0-9]{1,9}", first) else 0
        if first and not threads:
            yield _find(name, f"{_shown(first)} is not a number of threads", f"set it to {share}")
        if threads * ranks > cores:
            on = "1 rank" if ranks == 1 else f"{ranks} ranks"
            hint = f"set it to {share}" if threads > share else "start fewer ranks"
            yield _find(name, f"{threads} threads x {on} on {cores} cores: they take turns", hint)


def _check_master(host: str, situation: Situation) -> Iterator[Finding]:
    addresses = situation.resolve(host) if host else []
    if host and not addresses:
        what = f"{_shown(host)} does not resolve on this host: ranks cannot meet there"
        hint = "set it to a name or an address of rank 0's host that every host can look up"
        yield _find("MASTER_ADDR", what, hint, "error")
    elif host and situation.num_nodes > 1 and all(map(_stays_here, addresses)):
        what = f"{_shown(host)} is {', '.join(addresses)}, this host itself; with"
        what += f" {situation.num_nodes} hosts the others wait for a rank 0 of their own"
        hint = "set it to the address of rank 0's host on the network between them"
        yield _find("MASTER_ADDR", what, hint, "error")


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
        hint = f"it takes {syntax}, with commas and no spaces; or unset it"
        yield _find(name, what, hint, "error")


def nccl_interfaces(asked: str, here: tuple[str, ...]) -> list[str]:
    """Return those NCCL uses (ncclFindInterfaces in src/misc/socket.cc): prefixes, =exact, ^all
    but."""
    rest = asked.removeprefix("^")
    parts = (part.split(":")[0] for part in rest.removeprefix("=").split(","))
    named = tuple(part for part in parts if part)
    exact, without = rest.startswith("="), asked.startswith("^")
    fits = [not named or (name in named if exact else name.startswith(named)) for name in here]
    return [name for name, fit in zip(here, fits, strict=True) if fit != without]


def gloo_interfaces(asked: str, here: tuple[str, ...]) -> list[str]:
    """Return those gloo uses: exact names, and none at all when one of them is not here."""
    named = asked.split(",")
    return named if set(named) <= set(here) else []


def _check_machine(situation: Situation) -> Iterator[Finding]:
    shm, disk = situation.shm_free_bytes, situation.disk_free_bytes
    if shm is not None and situation.ranks_here > 1 and shm < SHM_NEEDED_BYTES:
        what = f"{size(shm)} free for {situation.ranks_here} ranks; NCCL and loaders pass"
        what += " data there, and NCCL's guide asks for 1 GiB (docker gives 64 MiB)"
        hint = "docker: --shm-size=1g or --ipc=host; kubernetes: an emptyDir of medium Memory there"
        yield _find("/dev/shm", what, hint, cause="cluster")
    if disk is not None and disk < DISK_NEEDED_BYTES:
        what = f"{size(disk)} free where the run directory lies; less than"
        what += f" {size(DISK_NEEDED_BYTES)} is soon filled by checkpoints"
        yield _find("disk", what, "free some, or choose another folder with --out", cause="cluster")


def _find(
    where: str, what: str, hint: str = "", severity: str = "warning", cause: str = "config"
) -> Finding:
    words = {"severity": severity, "where": where, "what": what, "hint": hint, "cause": cause}
    return Finding.model_validate(words)


def _shown(value: str) -> str:
    """Return a value fit for one line of a message."""
    text = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return repr(text)
