"""Hosts and ports where ranks meet. A hostfile, as Open MPI and DeepSpeed read it, has one
`NAME slots=N` per line."""

import re
import socket
from pathlib import Path

from paceline.errors import ConfigError, DataError
from paceline.machine.topology import LOOPBACK
from paceline.records import Part
from paceline.records.files import read_text

MAX_BYTES = 1 << 20

# What a host may be called. Nothing here can be an option or a piece of shell.
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.\-]*[A-Za-z0-9])?")
LINE = re.compile(rf"({HOST.pattern})(?:\s+slots\s*=\s*(\d{{1,6}}))?")


class Host(Part):
    name: str
    slots: int


def free_port() -> int:
    """Return a port that nobody on this machine listens at now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def first_hosts(path: str, count: int) -> list[str]:
    """Return the names of the first machines of a hostfile."""
    names = [host.name for host in read_hostfile(path)]
    if len(names) < count:
        raise ConfigError(
            f"launch.nnodes={count}, and {path} names {len(names)}\n"
            "hint: add lines of NAME slots=N, or leave launch.nnodes at auto"
        )
    own = [name for name in names[:count] if LOOPBACK.match(name)]
    if own and count > 1:
        raise ConfigError(
            f"{path} names {own[0]} beside other machines, which each take it for themselves\n"
            "hint: give it the name by which the others reach it"
        )
    return names[:count]


def read_hostfile(path: str) -> list[Host]:
    """Return the machines of a hostfile; all lines that name none are refused at once."""
    try:
        lines = read_text(Path(path), MAX_BYTES, follow=True).splitlines()
    except DataError as error:
        raise ConfigError(f"launch.hostfile: {error}") from error
    hosts: list[Host] = []
    problems: list[str] = []
    for number, raw in enumerate(lines, start=1):
        text = raw.split("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if match is None:
            problems.append(f"{path}:{number}: {text!r} is not NAME slots=N")
        elif any(host.name == match[1] for host in hosts):
            problems.append(f"{path}:{number}: {match[1]} is named twice")
        else:
            hosts.append(Host(name=match[1], slots=int(match[2] or 1)))
    if not hosts and not problems:
        problems.append(f"{path} names no machine")
    if problems:
        raise ConfigError(problems)
    return hosts
