"""AMD GPUs through the kernel's own description of them: no HIP context is created."""

import os
from pathlib import Path

from paceline.machine.gpus import visible_indices
from paceline.records import Gpu

NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def rocm_gpus(nodes: Path = NODES) -> list[Gpu]:
    """The visible GPUs, counted as torch does; CPUs are nodes too, and have no SIMD units."""
    found = [node for node in _sorted(nodes) if _facts(node / "properties").get("simd_count")]
    uuids = [f"GPU-{_facts(node / 'properties').get('unique_id', 0):x}" for node in found]
    asked = os.environ.get("ROCR_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES")
    visible = visible_indices(asked, uuids)
    return [_describe(n, found[index], uuids[index]) for n, index in enumerate(visible)]


def _describe(index: int, node: Path, uuid: str) -> Gpu:
    version = _facts(node / "properties").get("gfx_target_version", 0)  # 90010 is gfx90a
    banks = [_facts(bank / "properties") for bank in _sorted(node / "mem_banks")]
    return Gpu(
        index=index,
        name=(node / "name").read_text().strip(),
        uuid=uuid,
        compute_capability=f"{version // 10000}.{version // 100 % 100}",
        memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks),
    )


def _sorted(folder: Path) -> list[Path]:
    names = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return sorted(names, key=lambda path: int(path.name))


def _facts(file: Path) -> dict[str, int]:
    """Lines of `name number`."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
