"""A pipeline put together: the model cut to this rank's stages, the groups, the engine.

A whole model becomes one stage of it in place, so every weight keeps its own name.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.schedules.orders import draw_schedule
from paceline.schedules.requirements import SPLIT_BACKWARDS
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.blocks import find_blocks, place_modules
from paceline.strategies.compose import compose
from paceline.strategies.engine import Wrapping
from paceline.strategies.fp8 import scale_after_updates
from paceline.strategies.fsdp import build_mesh, count_waits, reshard, shard_model
from paceline.strategies.objective import Objective
from paceline.strategies.optim import build_optimizer
from paceline.strategies.pipeline.dualpipe import LANES, Lane
from paceline.strategies.pipeline.engine import Line, PipelineEngine
from paceline.strategies.pipeline.ghosts import Exit, Ghost, Region, hidden_of
from paceline.strategies.pipeline.holdings import Stages, gather_holdings
from paceline.strategies.pipeline.stage import Stage
from paceline.strategies.zero import Sharded


def build_pipeline(parts: EngineParts, inner: Sharded | None) -> Engine:
    """Build this rank's stages; `inner` shards them among the ranks that have the same ones."""
    config, plan = parts.config, parts.plan.pipeline
    assert plan is not None, "the plan has a pipeline"
    timeout_s = config.launch.collective_timeout_s
    mesh = build_mesh(parts.plan, parts.device, timeout_s)
    schedule = draw_schedule(
        plan.schedule, plan.num_ranks, plan.num_microbatches, plan.stages_per_rank
    )
    here = mesh.get_local_rank("pp")
    stages = Stages()
    for homes in schedule.homes:
        for index in [number for number, home in enumerate(homes) if home == here]:
            stages.append(_build_stage(parts, inner, index, mesh["dp"]))
    if inner is None:
        stages.tie()
    optimizer = build_optimizer(parts, stages)
    timeout = timedelta(seconds=timeout_s)
    line = Line(
        schedule,
        stages,
        mesh,
        gather_holdings(stages, mesh, timeout),
        _make_lanes(mesh, timeout) if schedule.num_copies > 1 else {},
        is_sharded=inner is not None,
    )
    wrapping = Wrapping(
        stages,
        settle=(lambda: reshard(stages)) if inner else lambda: None,
        replaced=scale_after_updates(parts.plan, optimizer, stages),
    )
    if inner is not None:
        count_waits(stages, wrapping.waits, parts.device)
    return PipelineEngine(parts, optimizer, line, wrapping)


def _build_stage(parts: EngineParts, inner: Sharded | None, index: int, mesh: DeviceMesh) -> Stage:
    """Build stage `index`: the whole model, cut in place, then sharded by `inner`."""
    plan = parts.plan.pipeline
    assert plan is not None, "the plan has a pipeline"
    held = range(plan.stages[index].first_block, plan.stages[index].end_block)
    region = Region()
    made: list[Stage] = []

    def cut(model: nn.Module) -> None:
        cut_model(model, held, region, parts.device)
        made.append(Stage(parts, model, region, index, len(plan.stages)))

    def shard(objective: Objective) -> None:
        if inner is None:
            return
        # The backward of the weights, if it runs apart, looks for those that the forward has
        # used: once freed, they are replaced by their pieces, and get no gradient.
        keeps = plan.schedule in SPLIT_BACKWARDS
        shard_model(made[0], parts, mesh, not keeps and inner.reshards(parts.config))

    model = compose(parts, shard, cut=cut).model
    if held.start > 0:
        enter_at(find_blocks(model)[0], region)
    return made[0]


def _make_lanes(mesh: DeviceMesh, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """Make the groups of all pipelines, on all ranks in one order; each keeps its own."""
    own = {}
    for lane in LANES:
        for dp_rank in range(mesh.size(1)):
            members = mesh.mesh[:, dp_rank].tolist()
            group = dist.new_group(members, timeout=timeout)
            if dp_rank == mesh.get_local_rank("dp"):
                own[lane] = group
    return own


def cut_model(model: nn.Module, held: range, region: Region, device: torch.device) -> None:
    """Keep the blocks `held` and what belongs to them; make ghosts of the rest."""
    places = place_modules(model)
    blocks = {id(block): number for number, block in enumerate(find_blocks(model))}
    inside: set[int] = set()  # modules that belong to a block
    # By all their names: a module that the model has twice must not stay under the second.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        number = blocks.get(id(module))
        if number is not None:
            inside |= {id(part) for part in module.modules()}
            if number not in held:
                is_next = number == held.stop
                _replace(model, name, Exit() if is_next else Ghost(name, module, region))
        elif id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            if not any(place in held for place in places[name]):
                _forget(model, name, module, region, device)


def enter_at(block: nn.Module, region: Region) -> None:
    """Call this block with the received tensor instead of what ghosts have made. To be set up last:
    it must run before the hooks of any wrapper."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if region.is_real:  # a block that the model calls twice
            return args, kwargs
        ghost, received = hidden_of(args, kwargs), region.enter()
        swapped = tuple(received if value is ghost else value for value in args)
        return swapped, {k: received if v is ghost else v for k, v in kwargs.items()}

    block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)


def _forget(
    model: nn.Module, name: str, module: nn.Module, region: Region, device: torch.device
) -> None:
    """Turn a module without children into a ghost. Any other loses only its own weights: its code
    may compute what later stages need, such as which patches are masked."""
    if name and not any(True for _ in module.children()):
        _replace(model, name, Ghost(name, module, region))
        return
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[key]
            setattr(module, key, region.stand_in(parameter.detach(), device))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
