"""The GPUs of this machine, without creating a context on any: NVIDIA's through NVML (names,
memory, links, live samples), AMD's through what the kernel reports."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.records import Gpu, Link

# NVML's common-ancestor levels, nearest first.
ANCESTORS = {
    0: "same_board",
    10: "pcie_switch",
    20: "pcie_switches",
    30: "host_bridge",
    40: "numa_node",
    50: "system",
}

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# The kernel knows chips by code names; products by PCI id are in pci-ids.ucw.cz/read/PC/1002.
AMD_PRODUCTS = {
    0x7408: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
}


@dataclass(frozen=True)
class GpuHandle:
    """One GPU. `index` counts the visible GPUs, as torch does; `handle` is NVML's."""

    index: int
    handle: Any
    nvml: Any

    def describe(self) -> Gpu:
        major, minor = self.nvml.nvmlDeviceGetCudaComputeCapability(self.handle)
        return Gpu(
            index=self.index,
            name=_text(self.nvml.nvmlDeviceGetName(self.handle)),
            uuid=_text(self.nvml.nvmlDeviceGetUUID(self.handle)),
            compute_capability=f"{major}.{minor}",
            memory_bytes=int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).total),
        )

    def sample(self) -> dict[str, float]:
        """Return live values; one that this GPU does not report is left out."""
        nvml, handle = self.nvml, self.handle
        readings = {
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            # Bits: NVML's own list, nvmlClocksEventReasons.
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "num_processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        }
        values = {}
        for name, read in readings.items():
            try:
                values[name] = float(read())  # type: ignore[no-untyped-call]
            except nvml.NVMLError:
                continue
        return values


@dataclass(frozen=True)
class Nvml:
    """An open NVML session over the visible GPUs; None from `open` where there is no driver."""

    driver: str
    handles: list[GpuHandle]
    nvml: Any

    @classmethod
    def open(cls) -> Self | None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, no library, no GPU: each has its own exception type
            return None
        count = pynvml.nvmlDeviceGetCount()
        every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in every]
        visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        handles = [GpuHandle(n, every[index], pynvml) for n, index in enumerate(visible)]
        return cls(_text(pynvml.nvmlSystemGetDriverVersion()), handles, pynvml)

    def watch_errors(self) -> "Xids":
        """Return what hears of the driver's critical errors (Xid) from now on."""
        return Xids(self)

    def links(self) -> list[Link]:
        """Return how each pair of visible GPUs is connected, as the driver reports it."""
        pairs = [(a, b) for a in self.handles for b in self.handles if a.index < b.index]
        return [self._link(a, b) for a, b in pairs]

    def _link(self, a: GpuHandle, b: GpuHandle) -> Link:
        direct, switched = self._count_nvlinks(a, b)
        if direct or switched:
            kind = "nvlink" if direct else "nvswitch"
            return Link(a=a.index, b=b.index, kind=kind, nvlinks=direct or switched)
        try:
            level = int(self.nvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle))
            kind = ANCESTORS.get(level, f"level_{level}")
        except self.nvml.NVMLError:  # virtual machines hide their topology
            kind = "unknown"
        return Link(a=a.index, b=b.index, kind=kind, nvlinks=0)

    def _count_nvlinks(self, a: GpuHandle, b: GpuHandle) -> tuple[int, int]:
        """Count active NVLinks from a that end at b, and those at a switch if b's NVLinks do
        too."""
        to_b, to_switch = self._nvlink_ends(a, b)
        from_b, b_to_switch = self._nvlink_ends(b, a)
        return to_b or from_b, min(to_switch, b_to_switch)

    def _nvlink_ends(self, a: GpuHandle, b: GpuHandle) -> tuple[int, int]:
        nvml = self.nvml
        bus_of_b = _text(nvml.nvmlDeviceGetPciInfo(b.handle).busId)
        direct = switched = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(a.handle, link):
                    continue
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(a.handle, link)
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(a.handle, link)
            except nvml.NVMLError:
                continue
            direct += _text(remote.busId) == bus_of_b
            switched += kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        return direct, switched


class Xids:
    """Hears of critical errors of visible GPUs, where the driver tells them."""

    def __init__(self, session: Nvml) -> None:
        self._nvml, self._events = session.nvml, None
        self._known = dict[str, int]()  # by the GPU's UUID, the last one
        try:
            self._events = session.nvml.nvmlEventSetCreate()
            for handle in session.handles:
                kind = session.nvml.nvmlEventTypeXidCriticalError
                session.nvml.nvmlDeviceRegisterEvents(handle.handle, kind, self._events)
        except session.nvml.NVMLError:  # a virtual GPU, or a driver that has none
            self._events = None

    def last(self, gpu: GpuHandle) -> int:
        """Return the last Xid of a GPU since the watch began; 0: none. Never waits."""
        while self._events is not None:
            try:
                told = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # a time-out: nothing is new
                break
            self._known[_text(self._nvml.nvmlDeviceGetUUID(told.device))] = int(told.eventData)
        return self._known.get(_text(self._nvml.nvmlDeviceGetUUID(gpu.handle)), 0)


def visible_indices(setting: str | None, uuids: list[str]) -> list[int]:
    """Return the physical indices that CUDA_VISIBLE_DEVICES leaves visible, in its order, as
    CUDA reads it: the list ends at the first entry that does not name a device."""
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            chosen.append(int(entry))
            continue
        match = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen


def rocm_gpus(nodes: Path = KFD_NODES) -> list[Gpu]:
    """Return the visible GPUs, counted as torch does; CPUs are nodes too, and have no SIMD
    units."""
    found = [node for node in _sorted(nodes) if _facts(node / "properties").get("simd_count")]
    uuids = [f"GPU-{_facts(node / 'properties').get('unique_id', 0):x}" for node in found]
    asked = os.environ.get("ROCR_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES")
    visible = visible_indices(asked, uuids)
    return [_describe(n, found[index], uuids[index]) for n, index in enumerate(visible)]


def _describe(index: int, node: Path, uuid: str) -> Gpu:
    facts = _facts(node / "properties")
    version = facts.get("gfx_target_version", 0)  # 90010 is gfx90a
    banks = [_facts(bank / "properties") for bank in _sorted(node / "mem_banks")]
    return Gpu(
        index=index,
        name=AMD_PRODUCTS.get(facts.get("device_id", 0)) or (node / "name").read_text().strip(),
        uuid=uuid,
        compute_capability=f"{version // 10000}.{version // 100 % 100}",
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks),
    )


def _sorted(folder: Path) -> list[Path]:
    names = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return sorted(names, key=lambda path: int(path.name))


def _facts(file: Path) -> dict[str, int]:
    """Read lines of `name number`."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
