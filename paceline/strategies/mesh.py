"""The ranks as a grid: which of them shard together, which hold copies of each other."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.records import Plan


def build_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The plan's mesh over all ranks; the last axis varies fastest, so it stays inside a node."""
    return init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
