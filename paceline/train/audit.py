"""audit.json: what was decided against what really ran, with the proof of each.

One early step is profiled on rank 0: late enough that kernels are chosen and graphs compiled,
early enough that a mismatch costs minutes and not days.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.attention.flash3 import KERNEL as FLASH3
from paceline.config.schema import RunConfig
from paceline.errors import AuditError
from paceline.records import Audit, Choice, Fp8Plan, Plan, Proof
from paceline.records.disk import Losses
from paceline.records.profiled import AUDITED_STEP
from paceline.strategies import find_strategy
from paceline.strategies.base import Collective
from paceline.strategies.optimizers import KINDS as OPTIMIZERS
from paceline.strategies.update_rules import ONE_READ
from paceline.train.audit_sparse import find_ranges, sparse_proofs
from paceline.train.overlap import measure_overlap

# How torch names the kernels that SDPA chooses from, and where each takes a mask.
KERNELS = {
    "aten::_scaled_dot_product_flash_attention": ("flash", None),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash", 5),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", 3),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 3),
    "aten::_scaled_dot_product_attention_math": ("math", 3),
    "aten::_scaled_dot_product_fused_attention_overrideable": ("overrideable", 3),
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
FUSED = ("aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", ONE_READ)
PROFILE = "profile of the step"
TYPE_NAMES = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "unsigned char": "uint8",
}


@dataclass(frozen=True)
class Op:
    """A call of an operation: its tensors' shapes and types by position; () and "" where an
    argument is not a tensor."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[Any, ...]


class StepProfile:
    """Profiles what runs between `start` and `stop`."""

    def __init__(self, with_kernels: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if with_kernels:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self.events: Any = []
        self.ops: list[Op] = []
        self.names: Counter[str] = Counter()
        self.ranges: dict[str, Counter[str]] = {}  # of sparse attention's branches

    def start(self) -> None:
        # kineto announces each start and stop on stderr, as if it were graver than an error (5). It
        # reads its level once, when a process profiles for the first time.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        # The public list of events has shapes, but not the types.
        results = self._profile.profiler.kineto_results if self._profile.profiler else None
        assert results is not None, "stopped after it was started"
        self.events = results.events()
        self.ops, self.ranges = list(_iter_ops(self.events)), find_ranges(self.events)
        self.names = Counter(op.name for op in self.ops)

    def find(self, *names: str) -> list[Op]:
        return [op for op in self.ops if op.name in names]

    def types_of(self, *names: str) -> Counter[str]:
        """Count the types of the first tensor that the named operations took."""
        firsts = ((t for t in op.types if t in TYPE_NAMES.values()) for op in self.find(*names))
        return Counter(next(types, "other") for types in firsts)


def _iter_ops(events: Any) -> Iterator[Op]:
    for event in _outermost(events):
        yield Op(
            event.name(),
            tuple(tuple(shape) for shape in event.shapes()),
            tuple(TYPE_NAMES.get(name, name) for name in event.dtypes()),
            tuple(event.concrete_inputs()),
        )


def _outermost(events: Any) -> Iterator[Any]:
    """Leave out calls inside a call of the same name: a dispatch mode, as selective recomputation
    has one, passes each operation on to itself."""
    running: dict[tuple[int, str], int] = {}  # thread and name, to when the outermost ends
    for event in sorted(events, key=lambda event: event.start_ns()):
        key = event.start_thread_id(), event.name()
        if event.start_ns() >= running.get(key, -1):
            running[key] = event.start_ns() + event.duration_ns()
            yield event


def compile_counts() -> tuple[int, int, int]:
    """Return the graphs compiled, graph breaks and recompilations in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0, 0, 0  # nothing was compiled, and to import it takes a second
    from torch._dynamo.utils import counters, get_compilation_metrics

    again = sum(bool(metrics.recompile_reason) for metrics in get_compilation_metrics())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), again


def group_timeouts_s(device: torch.device) -> list[float]:
    """Return how long a collective really waits, as the backend of every group has it."""
    from torch.distributed.distributed_c10d import _world

    groups = [group for group in _world.pg_map if hasattr(group, "_get_backend")]
    options = [group._get_backend(device).options for group in groups]
    return [float(option._timeout.total_seconds()) for option in options]


class Auditor:
    """Call `begin` and `end` around every step. Ranks other than 0 only measure how much of their
    communication was exposed."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        device: torch.device,
        engine_proofs: Callable[[], list[Proof]],
        path: Path | None,
        lost: Losses | None = None,
    ) -> None:
        self.config, self.plan, self.device = config, plan, device
        self.engine_proofs, self.path = engine_proofs, path
        self.lost = Losses() if lost is None else lost
        self.overlap: tuple[int, Path] | None = None
        self.step = min(AUDITED_STEP, plan.steps) if path else 0
        self._profile: StepProfile | None = None
        self._compiled = [0, 0, 0]
        self._counts = (0, 0, 0)

    @property
    def is_profiling(self) -> bool:
        return self._profile is not None

    def keep_overlap(self, rank: int, path: Path) -> None:
        """Also write to `path` how much of this rank's communication was exposed."""
        if self.plan.world_size > 1:
            self.overlap, self.step = (rank, path), min(AUDITED_STEP, self.plan.steps)

    def begin(self, step: int) -> None:
        if step <= self.step:
            self._counts = compile_counts()
        if step == self.step:
            # Kernels that a compiler wrote leave no trace but their own name on the device, and
            # what runs beside communication is seen there only.
            by_name = self.plan.attention.value in ("flash3", "flex", "nsa")
            needs_kernels = by_name or self.overlap is not None
            self._profile = StepProfile(needs_kernels and self.device.type == "cuda")
            self._profile.start()

    def end(self, step: int) -> None:
        """Write the audit; raise AuditError where something differs and the user is strict."""
        if step <= self.step:  # evaluation compiles too, between steps: that is not a recompilation
            now = zip(self._compiled, compile_counts(), self._counts, strict=True)
            self._compiled = [total + after - before for total, after, before in now]
        if self._profile is None or step != self.step:
            return
        self._profile.stop()
        if self.overlap is not None:
            rank, place = self.overlap
            found = measure_overlap(self._profile.events, rank, step)
            self.lost.keep(place, found.to_json())
        if self.path is None:
            self._profile = None
            return
        if self._was_skipped(self._profile) and step < self.plan.steps:
            self._profile, self.step = None, step + 1
            return
        audit = Audit(step=step, proofs=list(self._proofs(self._profile)))
        self.lost.keep(self.path, audit.to_json())
        self._profile = None
        if self.config.audit.strict and audit.mismatches:
            raise AuditError([str(proof) for proof in audit.mismatches])

    def _proofs(self, seen: StepProfile) -> Iterator[Proof]:
        plan = self.plan
        yield from _attention(plan, seen)
        yield from _precision(plan, seen)
        yield _matmul(plan)
        yield self._compilation()
        yield from _recompute(plan, seen)
        strategy = find_strategy(plan.strategy.value)
        # Else its engine says what updates, or the workload has chosen it.
        if not strategy.updates_itself and plan.fused_optimizer.matters:
            yield _optimizer(plan, seen)
        yield from _determinism(plan)
        yield from _collectives(strategy.collectives(self.config, plan), seen)
        yield from self.engine_proofs()
        yield _timeouts(self.config.launch.collective_timeout_s, self.device)

    def _was_skipped(self, seen: StepProfile) -> bool:
        """Say whether the step had no update to see: fp16 searches for its loss scale in the first
        steps."""
        is_fused = self.plan.fused_optimizer.value
        return self.plan.precision.value == "fp16" and is_fused and not seen.find(*FUSED)

    def _compilation(self) -> Proof:
        graphs, breaks, again = self._compiled
        asked = self.plan.compile.value
        effective = f"{graphs} graphs, {breaks} breaks, {again} recompilations"
        # FlexAttention is compiled by itself where nothing else is; so are updates of some
        # optimizers on a GPU, anew for each shape of a parameter.
        kind, strategy = OPTIMIZERS.get(self.plan.optimizer.value), self.plan.strategy.value
        on_host = not self.plan.on_gpu or find_strategy(strategy).updates_on_host(self.config)
        by_optimizer = kind is not None and kind.compiles and not on_host
        may_have_none = asked == "off" and self.plan.attention.value != "flex" and not by_optimizer
        is_steady = breaks == 0 and (again == 0 or by_optimizer)
        ok = graphs == 0 if may_have_none else graphs > 0 and is_steady
        return _proof("torch.compile", asked, effective, "torch._dynamo's counters", ok)


def _attention(plan: Plan, seen: StepProfile) -> Iterator[Proof]:
    """Yield one row for each distinct call: kernel, shapes, type, mask."""
    asked, said = plan.attention.value, _asked(plan.attention)
    if asked == "nsa":
        yield from sparse_proofs(plan, seen.ranges)
        return
    calls = Counter(_call(op) for op in seen.find(*KERNELS))
    for (kernel, text), count in sorted(calls.items()):
        if kernel == "flash" and any(FLASH3 in name for name in seen.names):
            kernel = "flash3"
        ok = asked in ("sdpa", kernel)
        yield _proof("attention", said, f"{kernel} x {count}", f"{PROFILE}: {text}", ok)
    if calls or (asked in ("sdpa", "flash3") and plan.attention.requested == "auto"):
        return
    if asked == "flex":
        kernels = [name for name in seen.names if "flex" in name]
        yield _proof("attention", said, ", ".join(kernels) or "none", PROFILE, bool(kernels))
    elif asked == "eager":
        yield _proof("attention", said, "no fused kernel", PROFILE, True)
    elif asked == "math" and plan.compile.value != "off":
        # The compiler takes it apart into products and a softmax of its own.
        products = seen.names["aten::bmm"]
        effective = f"math, as {products} batched products in compiled graphs"
        yield _proof("attention", said, effective, f"{PROFILE}: no fused kernel", products > 0)
    else:
        yield _proof("attention", said, "no attention of SDPA's", PROFILE, False)


def _call(op: Op) -> tuple[str, str]:
    kernel, mask_at = KERNELS[op.name]
    has_mask = mask_at is not None and mask_at < len(op.shapes) and bool(op.shapes[mask_at])
    shapes = " ".join("x".join(str(size) for size in shape) for shape in op.shapes[:3])
    return kernel, f"q k v {shapes}, {op.types[0]}, {'a mask' if has_mask else 'no mask'}"


def _precision(plan: Plan, seen: StepProfile) -> Iterator[Proof]:
    """Compare the type that most matrix products took. Kernels that a compiler wrote itself are not
    among them."""
    if plan.fp8 is not None:
        yield from _scaled_products(plan.fp8, seen)
        return
    types = seen.types_of(*PRODUCTS)
    if types:
        most, _ = types.most_common(1)[0]
        effective = ", ".join(f"{name} x {count}" for name, count in types.most_common())
        ok = most == plan.precision.value
        said = _asked(plan.precision)
        yield _proof("precision", said, effective, f"{PROFILE}: matrix products", ok)


def _scaled_products(fp8: Fp8Plan, seen: StepProfile) -> Iterator[Proof]:
    """Count products of matrices with scales; on a CPU there are none, and the engine shows its
    layers instead."""
    count, asked = seen.names["aten::_scaled_mm"], len(fp8.layers)
    if not fp8.is_emulated:
        effective = f"{count} products with scales"
        yield _proof("precision", f"fp8 in {asked} layers", effective, PROFILE, count >= 2 * asked)


def _matmul(plan: Plan) -> Proof:
    real, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    ok = real == plan.matmul.value and cudnn == (real != "highest")
    effective = f"{real}, TF32 in cuDNN {'on' if cudnn else 'off'}"
    return _proof("fp32 products", plan.matmul.value, effective, "torch's own settings", ok)


def _recompute(plan: Plan, seen: StepProfile) -> Iterator[Proof]:
    """Count calls of attention: a recomputed block has two forward for one backward; `selective`
    finds the second one's result already there, but asks for it all the same."""
    counted = (*KERNELS, "paceline::nsa")
    forward = sum(seen.names[name] for name in counted)
    backward = sum(seen.names[f"{name}_backward"] for name in counted)
    if not backward or plan.compile.value != "off":
        return
    asked = plan.recompute.value
    kinds = plan.memory.blocks if asked == "mixed" and plan.memory is not None else None
    share = sum(kind != "none" for kind in kinds) / len(kinds) if kinds else asked != "none"
    expected = backward + round(share * backward)
    effective = f"{forward} attention calls forward, {backward} backward"
    yield _proof("activation checkpointing", asked, effective, PROFILE, forward == expected)


def _optimizer(plan: Plan, seen: StepProfile) -> Proof:
    found = [name for name in FUSED if seen.names[name]]
    asked = "fused" if plan.fused_optimizer.value else "not fused"
    ok = bool(found) == plan.fused_optimizer.value
    return _proof("optimizer", asked, found[0] if found else "not fused", PROFILE, ok)


def _determinism(plan: Plan) -> Iterator[Proof]:
    """Compare determinism if it was asked for, or is on anyway."""
    real = torch.are_deterministic_algorithms_enabled()
    if plan.deterministic or real:
        told = ("off", "on")
        ok = real == plan.deterministic
        yield _proof(
            "deterministic", told[plan.deterministic], told[real], "torch's own setting", ok
        )


def _collectives(expected: Sequence[Collective], seen: StepProfile) -> Iterator[Proof]:
    """Compare the types on the wire with those that the strategy says it sends."""
    for what, op, asked in expected:
        types = seen.types_of(op)
        effective = ", ".join(f"{kind} x {count}" for kind, count in types.items()) or "none seen"
        yield _proof(what, asked, effective, PROFILE, set(types) == set(asked.split(" and ")))


def _timeouts(asked_s: float, device: torch.device) -> Proof:
    real_s = group_timeouts_s(device)
    effective = ", ".join(f"{real:g} s" for real in sorted(set(real_s)))
    seen = f"the backends of {len(real_s)} process groups"
    ok = set(real_s) == {asked_s}
    return _proof("process group timeout", f"{asked_s:g} s", effective, seen, ok)


def _asked(choice: Choice) -> str:
    if choice.requested == choice.value:
        return str(choice.value)
    return f"{choice.requested}, so {choice.value}"


def _proof(what: str, requested: str, effective: str, proof: str, ok: bool) -> Proof:
    return Proof(what=what, requested=requested, effective=effective, proof=proof, ok=ok)
