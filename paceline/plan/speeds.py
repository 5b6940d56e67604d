"""How fast a device multiplies and a link carries: measured by `paceline check`, else stated, else
assumed. For plans; each choice with its reason."""

from dataclasses import dataclass

from paceline.machine.datasheets import choose_peak, expected_link_gb_per_s, find_sheet
from paceline.machine.kept_rates import load_link, load_matmul_tflops
from paceline.records import Crew, Env, Sourced

# GB/s one way. Two gloo ranks on one machine: 0.7 to 2.3 in benchmarks/results/check_bandwidth.txt;
# PCIe 4.0 x16: 32 by its standard, less what its packets take; between machines: 100 Gbit/s.
PCIE_SHARE = 0.8
CPU_LINK_GB_PER_S, GPU_LINK_GB_PER_S, NETWORK_GB_PER_S = 2.0, 25.0, 12.5


@dataclass(frozen=True)
class Speed:
    """FLOP/s of a device, or bytes/s of a link."""

    per_s: float
    source: Sourced


def choose_rate(
    env: Env, crew: Crew, arithmetic: str, threads: int, asked: float | str = "auto"
) -> Speed:
    """FLOP/s of one rank that multiplies in `arithmetic`."""
    device = crew.device.value
    measured = load_matmul_tflops(env, device, arithmetic, threads)
    if measured is not None:
        because = (
            f"{measured:.3g} TFLOP/s in {arithmetic}, measured here by `paceline check` on large"
            " matrices; layers reach less"
        )
        return Speed(measured * 1e12, Sourced(what="rate", kind="measured", because=because))
    peak = choose_peak(asked, env, device, arithmetic)
    if peak.value is not None:
        because = f"{peak.because}; layers reach about half"
        return Speed(peak.value, Sourced(what="rate", kind="assumed", because=because))
    because = (
        "1 TFLOP/s, for the rate of this device is not known: only relative times mean something;"
        " `paceline check` measures it"
    )
    return Speed(1e12, Sourced(what="rate", kind="assumed", because=because))


def choose_link(env: Env, crew: Crew) -> Speed:
    """Bytes/s from rank to rank, one way."""
    device = crew.device.value
    measured = load_link(env, device, crew.num_nodes)
    if measured is not None:
        because = (
            f"{measured.gb_per_s:.3g} GB/s, the slowest link that `paceline check` measured here,"
            f" with {measured.num_bytes / 2**20:.0f} MiB"
        )
        return _link(measured.gb_per_s, "measured", because)
    if crew.num_nodes > 1:
        because = f"{NETWORK_GB_PER_S:g} GB/s between machines (100 Gbit/s)"
        return _link(NETWORK_GB_PER_S, "assumed", because)
    if device == "cpu":
        because = f"{CPU_LINK_GB_PER_S:g} GB/s, about what gloo carries inside a machine"
        return _link(CPU_LINK_GB_PER_S, "assumed", because)
    stated = [
        expected_link_gb_per_s(link.kind, link.nvlinks, env.gpus[link.a].name)
        for link in env.links
        if link.a < len(env.gpus)
    ]
    known = [rate for rate in stated if rate is not None]
    if known and len(known) == len(stated):
        because = f"{min(known):g} GB/s, the NVLinks that the driver reports by their data sheet"
        return _link(min(known), "assumed", because)
    sheet = find_sheet(env.gpus[0].name) if env.gpus else None
    if sheet is not None and sheet.pcie_gb_per_s is not None:
        rate = PCIE_SHARE * sheet.pcie_gb_per_s
        because = f"{rate:.3g} GB/s between GPUs (PCIe, {sheet.pcie_gb_per_s:g} by its data sheet)"
        return _link(rate, "assumed", because)
    because = f"{GPU_LINK_GB_PER_S:g} GB/s between GPUs (PCIe 4.0 x16)"
    return _link(GPU_LINK_GB_PER_S, "assumed", because)


def _link(gb_per_s: float, kind: str, because: str) -> Speed:
    source = Sourced.model_validate({"what": "link", "kind": kind, "because": because})
    return Speed(gb_per_s * 1e9, source)
