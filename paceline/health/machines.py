"""Rules about machines, from telemetry and heartbeats: memory that grows, GPUs that throttle or
report errors, clocks that disagree."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.health.evidence import Evidence
from paceline.health.stragglers import gpu_samples
from paceline.records.columns import Table
from paceline.records.findings import RunFinding, finite
from paceline.records.tables import TelemetryRow
from paceline.records.words import duration, size

Values = NDArray[np.float64]
MINUTE = 60.0
GPU_MIB_SHARE = 0.2
# NVML's reasons for a lower clock that are faults: power and heat, by software or hardware.
THROTTLE_BITS = {
    0x4: "its power limit", 0x8: "a hardware slowdown", 0x20: "heat (software)",
    0x40: "heat (hardware)", 0x80: "a power brake",
}  # fmt: skip


def find_ill_machines(evidence: Evidence) -> Iterator[RunFinding]:
    """Yield what breaks a rule about memory, GPUs or clocks."""
    yield from _memory(evidence)
    yield from _gpus(evidence)
    yield from _skew(evidence)


def _memory(evidence: Evidence) -> Iterator[RunFinding]:
    limit = evidence.rules.memory_growth_mib_per_min
    for rank, sources in evidence.sampled.items():
        for own in (sources[name] for name in ("host", "rank") if name in sources):
            yield from _growth(rank, own, "rss_bytes", limit, "its process")
    for rank, rows in gpu_samples(evidence).items():
        yield from _growth(rank, rows, "memory_bytes", GPU_MIB_SHARE * limit, "its GPU")


def _growth(
    rank: int, rows: Table[TelemetryRow], name: str, limit: float, where: str
) -> Iterator[RunFinding]:
    """Judge by the slope after the first fifth, in which everything grows, and only if nearly all
    of it is steady growth: not one large allocation."""
    known = rows.known(name)
    known = known[len(known) // 5 :]
    times, held = known.column("time"), known.column(name)
    if len(times) < 10 or times[-1] - times[0] < min(MINUTE, 3.0 * len(times)):
        return
    slope, start = np.polyfit(times - times[0], held, 1)
    spread = float(np.ptp(held)) or 1.0
    residue = float(np.abs(held - (start + slope * (times - times[0]))).max())
    per_minute = slope * MINUTE
    if per_minute > limit * 2**20 and residue < 0.25 * spread and spread > 0.05 * held[0]:
        yield RunFinding(
            kind="memory_growth",
            rank=rank,
            words=f"memory of rank {rank} grows all the time ({where}): {size(per_minute)} a"
            f" minute, from {size(held[0])} to {size(held[-1])}",
            evidence=finite({"bytes_per_min": per_minute, "first": held[0], "last": held[-1]}),
            to_try="look for lists that keep tensors, and for losses summed with their graph",
        )


def _gpus(evidence: Evidence) -> Iterator[RunFinding]:
    gpus = gpu_samples(evidence)
    clocks = {rank: _busy(rows, "clock_mhz")[-30:] for rank, rows in gpus.items()}
    usual = {rank: float(np.median(found)) for rank, found in clocks.items() if len(found)}
    for rank, rows in gpus.items():
        others = [mhz for other, mhz in usual.items() if other != rank]
        yield from _throttled(evidence, rank, rows, float(np.median(others)) if others else 0.0)
        for name, what in (("ecc_errors", "uncorrected ECC errors"), ("xid", "Xid")):
            seen = rows.known(name).column(name)
            if len(seen) and (most := seen.max()) > (seen[0] if name == "ecc_errors" else 0):
                yield RunFinding(
                    kind="gpu_errors",
                    rank=rank,
                    severity="error",
                    words=f"the GPU of rank {rank} reports {what}: {most:.0f}",
                    evidence=finite({name: most}),
                    to_try="take that GPU out of the job; its driver's log (dmesg) says more",
                )


def _throttled(
    evidence: Evidence, rank: int, rows: Table[TelemetryRow], others_mhz: float
) -> Iterator[RunFinding]:
    """Judge by what the driver says, if the clock is also below the GPU's own best, or that of the
    others: one that is throttled from its first step on has no better one of its own."""
    clocks, reasons = _busy(rows, "clock_mhz"), _busy(rows, "throttle_reasons").astype(int)[-30:]
    named = {
        words
        for bit, words in THROTTLE_BITS.items()
        if np.count_nonzero(reasons & bit) * 2 > len(reasons) > 4
    }
    if not named or not len(clocks):
        return
    now, best = float(np.median(clocks[-30:])), max(float(clocks.max()), others_mhz)
    if now < (1 - evidence.rules.gpu_throttle_share) * best:
        whose = "at its best" if best > others_mhz else "on the others"
        yield RunFinding(
            kind="gpu_throttle",
            rank=rank,
            words=f"the GPU of rank {rank} is throttled by {', '.join(sorted(named))}:"
            f" {now:.0f} MHz, {best:.0f} {whose}",
            evidence=finite({"clock_mhz": now, "best_mhz": best, "reasons": sorted(named)}),
            to_try="look at its cooling and power limit (nvidia-smi -q -d PERFORMANCE)",
        )


def _busy(rows: Table[TelemetryRow], name: str) -> Values:
    """Return what was sampled while the GPU had work, as far as that is known."""
    used = rows.column("utilisation_percent")
    is_busy = rows.is_empty["utilisation_percent"] | (used > 50)
    values: Values = rows.column(name)[is_busy & ~rows.is_empty[name]]
    return values


def _skew(evidence: Evidence) -> Iterator[RunFinding]:
    """Compare each rank's clock with that of the machine that keeps the files; a machine whose
    clock is off writes moments of the past or the future."""
    off = {rank: heart.beat.time - heart.written_at for rank, heart in evidence.hearts.items()}
    # The middle one, not between two of them: of two each would be off by half.
    usual = float(np.quantile(list(off.values()), 0.5, method="lower")) if off else 0.0
    for rank, seconds in off.items():
        if abs(seconds - usual) > evidence.rules.clock_skew_s and len(off) > 1:
            yield RunFinding(
                kind="clock_skew",
                rank=rank,
                words=f"the clock of rank {rank}'s machine is {duration(abs(seconds - usual))}"
                f" {'ahead of' if seconds > usual else 'behind'} the others'",
                evidence=finite({"skew_s": seconds - usual}),
                to_try="start a time service (chronyd, systemd-timesyncd) on that machine",
            )
