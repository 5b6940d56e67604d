"""Turns what the ranks measured into findings with advice, and says what figures are compared with.

Pure: no torch, no machine.
"""

from collections.abc import Iterator, Sequence

from paceline.check.records import (
    Expected,
    ExpectedDevice,
    ExpectedLink,
    GroupCheckup,
    RankCheckup,
)
from paceline.check.slow_links import slow_pairs
from paceline.machine.datasheets import (
    expected_copy_gb_per_s,
    expected_link_gb_per_s,
    find_peak,
)
from paceline.machine.measures import Speed
from paceline.records import Env, Finding

FAIR_SHARE = 0.6  # of a link's stated rate: below it something is usually wrong
FAIR_DEVICE_SHARE = 0.6
MAX_SKEW_S = 0.5
LARGE_BYTES = 1 << 20


def judge(
    ranks: Sequence[RankCheckup],
    group: GroupCheckup | None,
    expected: Expected,
    may_share: bool,
) -> list[Finding]:
    """Return everything that is wrong, or worth knowing, most severe first."""
    # From what one rank says of itself, to what only a comparison of ranks shows, to what only all
    # ranks together can measure; last, each device against its data sheet.
    findings = [finding for rank in ranks for finding in _with_host(rank, ranks)]
    findings += _binding(ranks, may_share)
    findings += _versions(ranks)
    if group is not None:
        findings += _wrong_answers(group)
        findings += slow_pairs(group.pairs, [rank.host for rank in ranks])
        findings += _skew(group, ranks)
        findings += _slow_fabric(group, expected.link)
    for rank in ranks:
        findings += _slow_device(rank, expected.of(rank.rank).copy_gb_per_s)
    order = ("error", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _with_host(rank: RankCheckup, ranks: Sequence[RankCheckup]) -> list[Finding]:
    """Return a rank's own findings; on several machines each says which one it is about."""
    if len({other.host for other in ranks}) == 1:
        return rank.findings
    return [
        finding.model_copy(update={"where": f"{finding.where} on {rank.host}"})
        for finding in rank.findings
    ]


def _binding(ranks: Sequence[RankCheckup], may_share: bool) -> Iterator[Finding]:
    """Refuse ranks that share a GPU, unless the user named one twice."""
    owners: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.device_id != "cpu":
            owners.setdefault((rank.host, rank.device_id), []).append(rank.rank)
    for (host, identity), users in owners.items():
        if len(users) > 1 and not may_share:
            names = " and ".join(str(rank) for rank in users)
            yield Finding.error(
                "binding",
                f"ranks {names} on {host} share one GPU ({identity})",
                hint="let each rank see its own GPU, or name it twice in launch.devices to share",
                cause="cluster",
            )


def _versions(ranks: Sequence[RankCheckup]) -> Iterator[Finding]:
    # Another torch or CUDA may compute something else; another python only behaves otherwise.
    for name in ("torch", "cuda", "python"):
        found: dict[str, list[str]] = {}
        for rank in ranks:
            found.setdefault(str(getattr(rank, name)), []).append(rank.host)
        if len(found) > 1:
            each = "; ".join(f"{value} on {hosts[0]}" for value, hosts in found.items())
            severity = "warning" if name == "python" else "error"
            yield Finding(
                severity=severity,
                where=name,
                what=f"the ranks run different versions: {each}",
                hint="use one environment on all machines",
                cause="cluster",
            )


def _wrong_answers(group: GroupCheckup) -> Iterator[Finding]:
    for wrong in group.correctness.wrong:
        yield Finding.error(
            "collectives",
            str(wrong),
            hint="a wrong sum trains a wrong model: leave this rank's device or link out",
            cause="cluster",
        )


def _skew(group: GroupCheckup, ranks: Sequence[RankCheckup]) -> Iterator[Finding]:
    seen: set[str] = set()
    for clock in group.clocks:
        host = ranks[clock.rank].host
        # An offset is known to half the round trip: only what is left beyond that is skew.
        if abs(clock.offset_s) - clock.round_trip_s / 2 > MAX_SKEW_S and host not in seen:
            seen.add(host)
            side = "ahead of" if clock.offset_s > 0 else "behind"
            yield Finding.warning(
                f"clock of {host}",
                f"is {abs(clock.offset_s):.1f} s {side} rank 0's: logs of the two will not line up",
                hint="let both follow the same NTP or PTP source",
                cause="cluster",
            )


def expect(ranks: Sequence[RankCheckup], env: Env) -> Expected:
    """Return what the data sheets and the driver promise of these ranks; `env` is rank 0's."""
    devices = [_expect_device(rank) for rank in ranks if rank.device_id != "cpu"]
    known = [device for device in devices if device.matmul_tflops or device.copy_gb_per_s]
    return Expected(devices=known, link=_expect_link(ranks, env))


def _expect_device(rank: RankCheckup) -> ExpectedDevice:
    measured = [rate.precision for rate in rank.rates if rate.what == "matmul"]
    peaks = {arithmetic: find_peak(rank.device, arithmetic).value for arithmetic in measured}
    return ExpectedDevice(
        rank=rank.rank,
        matmul_tflops={name: peak / 1e12 for name, peak in peaks.items() if peak is not None},
        copy_gb_per_s=expected_copy_gb_per_s(rank.device),
    )


def _expect_link(ranks: Sequence[RankCheckup], env: Env) -> ExpectedLink | None:
    if len({rank.host for rank in ranks}) > 1:
        rates = [rank.network_gb_per_s for rank in ranks]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return None
        return ExpectedLink(gb_per_s=min(known), because="the network interface's own rate")
    if not env.gpus or not ranks or ranks[0].device_id == "cpu":
        return None
    expected = [
        (expected_link_gb_per_s(link.kind, link.nvlinks, env.gpus[link.a].name), link)
        for link in env.links
    ]
    known_links = [(rate, link) for rate, link in expected if rate is not None]
    if not known_links or len(known_links) < len(expected):
        return None
    rate, link = min(known_links, key=lambda pair: pair[0])
    return ExpectedLink(gb_per_s=rate, because=f"{link.nvlinks} NVLinks, as the driver reports")


def _slow_fabric(group: GroupCheckup, expected: ExpectedLink | None) -> Iterator[Finding]:
    best = best_all_reduce(group.speeds)
    if expected is None or best is None:
        return
    share = best.busbw_gb_per_s / expected.gb_per_s
    if share < FAIR_SHARE:
        yield Finding.warning(
            "all_reduce",
            f"reaches {best.busbw_gb_per_s:.3g} of about {expected.gb_per_s:.3g} GB/s"
            f" ({expected.because})",
            hint="set NCCL_DEBUG=INFO with launch.env and look for the transport it chose: P2P or"
            " NVLS inside a machine, IB and not Socket between machines",
            cause="cluster",
        )


def best_all_reduce(speeds: Sequence[Speed]) -> Speed | None:
    large = [s for s in speeds if s.op == "all_reduce" and s.num_bytes >= LARGE_BYTES]
    return max(large, key=lambda speed: speed.busbw_gb_per_s, default=None)


def _slow_device(rank: RankCheckup, expected: float | None) -> Iterator[Finding]:
    for rate in rank.rates:
        if rate.what == "copy" and expected and rate.gb_per_s < FAIR_DEVICE_SHARE * expected:
            yield Finding.warning(
                f"rank {rank.rank} on {rank.host}",
                f"its memory copies {rate.gb_per_s:.3g} of about {expected:.3g} GB/s"
                f" ({rank.device})",
                hint="another process may use this GPU; nvidia-smi shows it, and clocks and heat",
                cause="cluster",
            )
