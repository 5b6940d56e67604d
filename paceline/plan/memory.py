"""Estimates what a step keeps for its backward pass, and chooses the blocks that recompute so
that it fits.

The model runs forward once on fake tensors, which have shapes and no memory, and autograd tells
what it saves, block by block. A block may keep all of it; its products only (`selective`); or its
input only (`full`). The fewest blocks recompute, and the cheaper way first."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.schema import RunConfig
from paceline.errors import PacelineError
from paceline.records import Choice, Env, Finding, MemoryPlan, Plan, Recompute
from paceline.records.words import size
from paceline.strategies import find_strategy
from paceline.strategies.blocks import KEPT_OPS, find_blocks
from paceline.strategies.precision import compute_context
from paceline.workloads.base import Workload
from paceline.workloads.returns import sketch_failed

GB = 10**9
# Of a GPU's memory: the rest is for CUDA itself, NCCL, and what the allocator cannot use.
USABLE = 0.92


@dataclass
class Kept:
    """Bytes that one block keeps, by what it recomputes."""

    whole: int = 0
    products: int = 0
    inputs: int = 0

    def of(self, kind: Recompute) -> int:
        if kind == "none":
            return self.whole
        return self.inputs + (self.products if kind == "selective" else 0)


@dataclass
class Saved:
    """What a forward pass of a microbatch keeps: in its blocks, and elsewhere."""

    blocks: list[Kept]
    rest: int = 0
    seen: set[int] = field(default_factory=set)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results that `selective` keeps, for the block that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block: Kept | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPS and self.block is not None:
            first = result[0] if isinstance(result, tuple | list) else result
            self.block.products += first.nbytes
        return result


def measure_saved(workload: Workload, config: RunConfig, precision: str) -> Saved | None:
    """Return what one microbatch keeps; None where the workload has no sketch of a batch. A loss
    that cannot be computed of one is refused by the user's line."""
    try:
        return _run_forward(workload, config, precision)
    except PacelineError:
        raise
    except Exception as error:
        raise sketch_failed(workload, error) from error


def _run_forward(workload: Workload, config: RunConfig, precision: str) -> Saved | None:
    # Autograd saves the same whatever the kernel: those for GPUs have no fake on a CPU.
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = workload.sketch_batch(config)
        if batch is None:
            return None
        model = workload.build_model(config)
        saved = Saved([Kept() for _ in find_blocks(model)])
        counting = _Counting()
        _follow_blocks(model, saved, counting)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage._cdata not in weights | saved.seen:
                saved.seen.add(storage._cdata)
                if counting.block is None:
                    saved.rest += storage.nbytes()
                else:
                    counting.block.whole += storage.nbytes()
            return value

        context = compute_context(precision, torch.device("cpu"))
        with saved_tensors_hooks(pack, lambda value: value), counting, context:
            loss, *_ = workload.loss(model, batch)
        del loss
        return saved


def _follow_blocks(model: nn.Module, saved: Saved, counting: _Counting) -> None:
    """Note which block runs, and the input that it would keep if it recomputed itself."""
    for block, kept in zip(find_blocks(model), saved.blocks, strict=True):

        def enter(_: nn.Module, args: Any, kwargs: Any, kept: Kept = kept) -> None:
            counting.block = kept
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            # A block may be called again: each call keeps its own.
            kept.inputs += sum(value.nbytes for value in inputs if value.requires_grad)

        def leave(*_: Any) -> None:
            counting.block = None

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)


def plan_memory(
    config: RunConfig, env: Env, plan: Plan, workload: Workload, built_from: RunConfig
) -> MemoryPlan | None:
    """Choose what each block recomputes; None where nobody asked, or nothing can be told."""
    budget = _budget(config, env, plan)
    if budget is None:
        return None
    saved = measure_saved(workload, built_from, plan.precision.value)
    if saved is None or not saved.blocks:
        return None
    state = find_strategy(plan.strategy.value).device_bytes(config, plan.state_bytes)
    kinds = choose_blocks(saved, budget.value - state)
    return MemoryPlan(
        budget=budget,
        state_bytes=state,
        activation_bytes=needed_bytes(saved, kinds),
        without_bytes=needed_bytes(saved, ["none"] * len(saved.blocks)),
        blocks=kinds,
    )


def choose_blocks(saved: Saved, free: int) -> list[Recompute]:
    """Return what each block recomputes so that all fits into `free` bytes: the first blocks, whose
    activations wait longest. Where nothing fits, all of all."""
    count = len(saved.blocks)
    ways: list[tuple[Recompute, Recompute]] = [("selective", "none"), ("full", "selective")]
    for more, less in ways:
        for number in range(count + 1):
            kinds = [more] * number + [less] * (count - number)
            if needed_bytes(saved, kinds) <= free:
                return kinds
    return ["full"] * count


def needed_bytes(saved: Saved, kinds: list[Recompute]) -> int:
    """Estimate the peak beside the state: what all blocks keep; and either what is saved outside of
    them with its gradient, or the block that is computed again, with gradients beside it."""
    kept = sum(block.of(kind) for block, kind in zip(saved.blocks, kinds, strict=True))
    largest = max(block.whole for block in saved.blocks)
    again = largest if any(kind != "none" for kind in kinds) else 0
    return kept + saved.rest + max(saved.rest, again + largest // 2)


def _budget(config: RunConfig, env: Env, plan: Plan) -> Choice[int] | None:
    asked = config.train.memory_budget
    if asked == "off":
        return None
    if asked != "auto":
        return Choice(requested=asked, value=int(asked * GB), because="as asked")
    smallest = min((gpu.memory_bytes for gpu in env.gpus), default=0) if plan.on_gpu else 0
    if not smallest:
        return None
    because = f"{USABLE:.0%} of {size(smallest)}, the smallest GPU's"
    return Choice(requested=asked, value=int(USABLE * smallest), because=because)


def check_memory(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what the budget leads to, or why it cannot."""
    asked, where = config.train.memory_budget, "train.memory_budget"
    if asked == "off":
        return
    if config.train.activation_checkpointing != "none" or plan.pipeline is not None:
        other = "a pipeline" if plan.pipeline is not None else "train.activation_checkpointing"
        yield Finding.error(
            where,
            f"is set together with {other}, which also decides what is recomputed",
            hint="set one of the two",
        )
    memory = plan.memory
    if memory is None:
        yield Finding.warning(where, f"has no effect: {_why(plan, asked)}")
        return
    together = memory.state_bytes + memory.activation_bytes
    told = (
        f"state {size(memory.state_bytes)} and activations {size(memory.activation_bytes)} of"
        f" {size(memory.budget.value)} (without recomputation {size(memory.without_bytes)})"
    )
    if together > memory.budget.value:
        offload = "train.activation_offload=true in its place, " if plan.on_gpu else ""
        yield Finding.warning(
            where,
            f"is not enough even where every block is recomputed: {told}",
            hint=f"a smaller train.micro_batch_size, {offload}optim.name=adamw8bit, or"
            " strategy.name=zero3 on more ranks",
        )
    else:
        yield Finding.note(where, f"{plan.recompute.because}: {told}")


def check_offload(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what cannot be had beside it."""
    train = config.train
    if not train.activation_offload or not plan.on_gpu:
        return
    if train.memory_budget != "off":
        yield Finding.error(
            "train.memory_budget",
            "is set beside train.activation_offload: it counts what blocks save as if it"
            " stayed on the GPU, and would recompute what leaves it",
            hint="set one of the two",
        )
    if plan.compile.value != "off" and train.compile_scope == "model":
        yield Finding.error(
            "train.compile_scope",
            "train.activation_offload works between the blocks, which one graph of the whole"
            " model leaves no room for",
            hint="set train.compile_scope=blocks, or auto",
        )


def _why(plan: Plan, asked: Any) -> str:
    if asked == "auto" and not plan.on_gpu:
        return "there is no GPU whose memory could be asked for; name the GB"
    return "this workload has no sketch of a batch, or its model no blocks"


def as_recompute(memory: MemoryPlan) -> Choice[str]:
    """Return the plan's choice of recomputation that follows from a budget."""
    kinds = memory.blocks
    value = kinds[0] if len(set(kinds)) == 1 else "mixed"
    counts = {kind: kinds.count(kind) for kind in ("full", "selective", "none") if kind in kinds}
    words = {"full": "recomputed", "selective": "but for their products", "none": "kept"}
    told = ", ".join(f"{number} blocks {words[kind]}" for kind, number in counts.items())
    return Choice(requested=f"budget {memory.budget.requested}", value=value, because=told)
