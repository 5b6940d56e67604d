"""The ranks as a grid: which of them shard together, which hold copies of each other."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.records import Plan


def build_mesh(plan: Plan, device: torch.device, timeout_s: float) -> DeviceMesh:
    """The plan's mesh over all ranks; the last axis varies fastest, so it stays inside a node."""
    mesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    for group in mesh.get_all_groups():
        # Groups of a mesh start with torch's default of half an hour, not with the world's.
        if dist.get_backend(group) in ("nccl", "gloo"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh
