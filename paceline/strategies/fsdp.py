"""FSDP2 around a model: the mesh, the units, and the engine of every sharded strategy."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.records import Plan, Proof
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.blocks import find_blocks
from paceline.strategies.compose import compose
from paceline.strategies.ddp_engine import exchange_proofs
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.fp8 import mark_freed, scale_after_updates
from paceline.strategies.fused import FusedLayers
from paceline.strategies.optim import build_optimizer
from paceline.strategies.precision import COMPUTE_TYPES
from paceline.strategies.waits import Waits
from paceline.strategies.zero import Gathering, ShardedSettings


def build_sharded(parts: EngineParts, reshards: bool) -> Engine:
    mesh = build_mesh(parts.plan, parts.device, parts.config.launch.collective_timeout_s)
    rest = torch.device("cpu") if _offloads(parts) else None
    by = parts.plan.exchange_by.value
    fused = FusedLayers(mesh, by) if by in ("pipelined", "fused") else None

    def shard(root: nn.Module) -> None:
        compute = COMPUTE_TYPES[parts.plan.precision.value]
        apart = fused.convert(root, not reshards, compute) if fused is not None else set()
        shard_model(root, parts, mesh, reshards, apart)

    objective = compose(parts, shard, rest)
    module = objective.model
    # Optimizer last: fully_shard replaces every parameter, an earlier one would step orphans.
    optimizer = build_optimizer(parts, module)
    find_scales = scale_after_updates(parts.plan, optimizer, module)
    shared = None
    if by in ("symmetric", "fused"):
        from paceline.strategies.symmetric import use_in_fsdp

        shared = use_in_fsdp(objective, mesh.get_group(mesh.ndim - 1))
    defers = ShardedSettings.of(parts.config).accumulate == "defer"
    wrapping = Wrapping(
        objective,
        unsynced=(lambda: _deferred(objective)) if defers else nullcontext,
        proofs=lambda: [
            *_proofs(objective),
            *exchange_proofs(parts, shared),
            *(fused.proofs() if fused is not None else []),
        ],
        settle=lambda: reshard(objective),
        replaced=find_scales,
        shards=mesh.get_group(mesh.ndim - 1),
    )
    count_waits(objective, wrapping.waits, parts.device)
    if fused is not None:
        wrapping.waits.around(fused.mover, "arrive")
    return ModuleEngine(parts, module, optimizer, wrapping)


def build_mesh(plan: Plan, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Build the plan's mesh over all ranks; the last axis varies fastest, so it stays inside a
    node."""
    mesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    for group in mesh.get_all_groups():
        # Groups of a mesh start with torch's default of half an hour, not with the world's.
        if dist.get_backend(group) in ("nccl", "gloo"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def shard_model(
    root: nn.Module,
    parts: EngineParts,
    mesh: DeviceMesh,
    reshards: bool,
    apart: Collection[nn.Parameter] = (),
) -> None:
    """Shard every weight below `root`, whose forward pass begins and ends a microbatch's, over the
    last axis of `mesh`, in place; `reshards`: free what a block has gathered after its forward;
    `apart` are weights that are sharded and gathered elsewhere."""
    asked = Gathering.of(parts.config)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshards,
        "mp_policy": _precision_policy(parts.plan.precision.value),
        "ignored_params": set(apart),
    }
    if _offloads(parts):
        settings["offload_policy"] = CPUOffloadPolicy()
    # Blocks before the root: what is left over, embeddings and head, is the root's own.
    blocks = find_blocks(root)
    for block in blocks:
        fully_shard(block, **settings)
        if reshards:
            mark_freed(block)
    # The root's weights are needed first in backward: freeing them would gather them again. It is
    # given the batch: what of it meets no weight, such as targets, must not be rounded.
    policy = replace(settings["mp_policy"], cast_forward_inputs=False)
    fully_shard(root, **(settings | {"reshard_after_forward": False, "mp_policy": policy}))
    ahead = (asked.forward_prefetch, asked.backward_prefetch)
    chosen = parts.plan.prefetch.value
    _prefetch(blocks, *(chosen if number == "auto" else number for number in ahead))


def _offloads(parts: EngineParts) -> bool:
    return Gathering.of(parts.config).offload and parts.device.type != "cpu"


def count_waits(root: nn.Module, waits: Waits, device: torch.device) -> None:
    """Count where FSDP waits for other ranks: with gloo the host, inside a collective; on a GPU the
    stream, when it needs what NCCL has gathered, or what an earlier block has scattered."""
    methods = ["unshard", "post_backward"]
    methods += ["wait_for_unshard"] if device.type == "cuda" else []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                for method in methods:
                    waits.around(group, method)


def _groups(module: FSDPModule) -> list[Any]:
    """Return the groups that gather the weights of one module: none if it has no weights of its
    own; several if a script has put them on several meshes (torch 2.12 on)."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Gather weights in the compute type; sum gradients in fp32."""
    compute = None if precision == "fp32" else COMPUTE_TYPES[precision]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _prefetch(blocks: Sequence[nn.Module], num_forward: int, num_backward: int) -> None:
    """Gather the next blocks while this one computes, in each direction."""
    for number, block in enumerate(blocks):
        assert isinstance(block, FSDPModule), "fully_shard has been applied"
        if num_forward:
            block.set_modules_to_forward_prefetch(_fsdp(blocks[number + 1 :][:num_forward]))
        if num_backward:
            block.set_modules_to_backward_prefetch(_fsdp(blocks[:number][::-1][:num_backward]))


def _fsdp(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


@contextmanager
def _deferred(module: nn.Module) -> Iterator[None]:
    """Keep whole gradients here until the last microbatch, instead of scattering each one's."""
    assert isinstance(module, FSDPModule), "fully_shard has been applied"
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def reshard(module: nn.Module) -> None:
    """Free gathered weights after a forward pass without a backward, which would have done it."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _proofs(module: nn.Module) -> list[Proof]:
    """Show how many units FSDP really made: one per block, and the rest of the model."""
    made = sum(isinstance(part, FSDPModule) for part in module.modules())
    blocks = len(find_blocks(module))
    return [
        Proof(
            what="FSDP units",
            requested=f"{blocks} blocks and the rest",
            effective=f"{made} units",
            proof="modules that fully_shard changed",
            ok=made == blocks + 1,
        )
    ]
