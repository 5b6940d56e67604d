"""Finds slow links, ranks or hosts from the bandwidth of pairs; no torch.

A link is slow under half of what its kind usually reaches: links inside a host are compared with
each other, and links between hosts with each other.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.machine.measures import PairSpeed
from paceline.records import Finding

SLOW_SHARE = 0.5
INSIDE, BETWEEN = "inside its host", "to other hosts"
HINTS = {
    INSIDE: "compare the devices in `nvidia-smi topo -m`, with their NVLink and PCIe state",
    BETWEEN: "look at its network card, cable and switch port, or train without it",
}


class Link(NamedTuple):
    a: int
    b: int
    gb_per_s: float
    slow: bool


# Whom a slow link speaks against, as the finding will call them.
Owners = Callable[[Link], set[str]]


class Culprit(NamedTuple):
    """A host or rank most of whose links are slow."""

    name: str
    slow: list[Link]
    num_links: int

    @property
    def share(self) -> float:
        return len(self.slow) / self.num_links


def slow_pairs(pairs: Sequence[PairSpeed], hosts: Sequence[str]) -> list[Finding]:
    """Return one finding for each host, rank or single link that is slow; `hosts[rank]` is its
    host.

    Where most links of a host (or rank) are slow, it is named and its links are not. With two
    ranks there is one link and nothing to compare it with.
    """
    inside = [pair for pair in pairs if hosts[pair.a] == hosts[pair.b]]
    between = [pair for pair in pairs if hosts[pair.a] != hosts[pair.b]]
    return _judge(inside, hosts, INSIDE) + _judge(between, hosts, BETWEEN)


def usual_gb_per_s(pairs: Sequence[PairSpeed]) -> float:
    """Return the median over ranks of each rank's best link.

    Not the median over links: one bad rank (or host) of three spoils two links of three, and the
    median link would be a bad one.
    """
    best: dict[int, float] = {}
    for pair in pairs:
        for rank in (pair.a, pair.b):
            best[rank] = max(pair.gb_per_s, best.get(rank, 0.0))
    return statistics.median(best.values())


def _judge(pairs: Sequence[PairSpeed], hosts: Sequence[str], kind: str) -> list[Finding]:
    """Blame hosts first, then ranks, then what is left: the widest cause explains the most
    links."""
    if not pairs:
        return []
    usual = usual_gb_per_s(pairs)
    links = [Link(p.a, p.b, p.gb_per_s, p.gb_per_s < SLOW_SHARE * usual) for p in pairs]
    bad_hosts, links = _set_aside_culprits(links, _blame_hosts(links, hosts, kind))
    bad_ranks, links = _set_aside_culprits(
        links, lambda link: {f"rank {rank} on host {hosts[rank]}" for rank in (link.a, link.b)}
    )
    return [
        *(_culprit_finding(culprit, kind, usual) for culprit in bad_hosts + bad_ranks),
        *(_link_finding(link, hosts, kind, usual) for link in links if link.slow),
    ]


def _blame_hosts(links: Sequence[Link], hosts: Sequence[str], kind: str) -> Owners:
    """Return whom a slow link speaks against: hosts with several ranks, where there are others
    to compare with.

    Two hosts have the same links between them, so neither can be blamed for those.
    """
    present = {hosts[rank] for link in links for rank in (link.a, link.b)}
    enough = len(present) >= (2 if kind == INSIDE else 3)
    blamable = {host for host in present if enough and hosts.count(host) > 1}
    return lambda link: {f"host {host}" for host in {hosts[link.a], hosts[link.b]} & blamable}


def _set_aside_culprits(links: list[Link], owners: Owners) -> tuple[list[Culprit], list[Link]]:
    """Return the culprits, worst first, and the links of none of them.

    The links of one found no longer count, so that its neighbours are not blamed for them.
    """
    found: list[Culprit] = []
    while worst := _worst(links, owners):
        found.append(worst)
        links = [link for link in links if worst.name not in owners(link)]
    return found, links


def _worst(links: Sequence[Link], owners: Owners) -> Culprit | None:
    """Return the owner with the largest share of slow links, where more than half of its links,
    and at least two, are slow; None where nobody is to blame."""
    touching: dict[str, list[Link]] = {}
    for link in links:
        for name in owners(link):
            touching.setdefault(name, []).append(link)
    counted = [
        Culprit(name, [link for link in own if link.slow], len(own))
        for name, own in touching.items()
    ]
    return max(
        (each for each in counted if len(each.slow) > 1 and each.share > 0.5),
        key=lambda each: (each.share, len(each.slow)),
        default=None,
    )


def _culprit_finding(culprit: Culprit, kind: str, usual: float) -> Finding:
    typical = statistics.median(link.gb_per_s for link in culprit.slow)
    return Finding.warning(
        culprit.name,
        f"{len(culprit.slow)} of its {culprit.num_links} links {kind} are slow: about "
        f"{typical:.3g} GB/s, where {usual:.3g} is usual here",
        hint=HINTS[kind],
        cause="cluster",
    )


def _link_finding(link: Link, hosts: Sequence[str], kind: str, usual: float) -> Finding:
    between = sorted({hosts[link.a], hosts[link.b]})
    return Finding.warning(
        f"link of rank {link.a} and rank {link.b} on host {' and '.join(between)}",
        f"slow: {link.gb_per_s:.3g} GB/s, where {usual:.3g} is usual {kind}",
        hint=HINTS[kind],
        cause="cluster",
    )
