"""Audits native sparse attention, branch by branch, from the profile of one step.

Every branch runs inside a range of its own name (paceline/attention/marks.py). On a GPU the kernels
are found by what was launched inside the range; on CPU they are torch's operations there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]

from paceline.records import Plan, Proof

# The range of each branch, forward and backward, and what is said of it.
BRANCHES = {
    "nsa.cmp": "compressed", "nsa.choose": "choice of blocks", "nsa.sel": "selected",
    "nsa.win": "window", "nsa.cmp_backward": "compressed, backward",
    "nsa.sel_backward": "selected, backward", "nsa.win_backward": "window, backward",
}  # fmt: skip
OURS = "nsa_"  # how the names of our Triton kernels begin
FOLDED = "cudnn_generated"  # and those of cuDNN that compressed keys are folded for
# torch's operations that are attention, or what it is made of where it is spelt out.
OPERATIONS = ("aten::_scaled_dot_product", "aten::bmm", "aten::sort", "aten::_softmax")


def find_ranges(events: Any) -> dict[str, Counter[str]]:
    """Return what ran inside each branch's ranges, by name: kernels, and torch's operations."""
    events = list(events)
    ranges = [e for e in events if e.name() in BRANCHES and e.device_type() == DeviceType.CPU]
    if not ranges:
        return {}
    launched = {e.correlation_id(): e.name() for e in events if e.device_type() == DeviceType.CUDA}
    found: dict[str, Counter[str]] = {e.name(): Counter() for e in ranges}
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in ranges)
    for event in events:
        if event.device_type() != DeviceType.CPU or event.name() in BRANCHES:
            continue
        name = launched.get(event.correlation_id(), "") if event.name().startswith("cu") else ""
        name = name or (event.name() if event.name().startswith(OPERATIONS) else "")
        for begin, end, branch in spans if name else ():
            if begin <= event.start_ns() < end:
                found[branch][name] += 1
    return found


def sparse_proofs(plan: Plan, ranges: Mapping[str, Counter[str]]) -> Iterator[Proof]:
    """Yield a row for each branch: what was asked, and which kernels ran in it."""
    if not ranges and plan.compile.value != "off" and not plan.on_gpu:
        yield _proof("attention: nsa", "torch's operations in compiled graphs", True)
    for name, branch in BRANCHES.items():
        if name not in ranges and (name.endswith("backward") or plan.compile.value != "off"):
            continue  # plain torch goes back operation by operation
        ran = ranges.get(name, Counter())
        meant = (OURS, FOLDED) if name.startswith("nsa.cmp") else OURS
        ours = {kernel: count for kernel, count in ran.items() if kernel.startswith(meant)}
        shown = ours or {kernel.removeprefix("aten::"): count for kernel, count in ran.items()}
        effective = ", ".join(f"{kernel} x {count}" for kernel, count in sorted(shown.items()))
        # On a GPU plain torch would be right, and slow: it was not what was decided.
        yield _proof(
            f"attention: {branch}", effective or "none", bool(ours if plan.on_gpu else ran)
        )


def _proof(what: str, effective: str, ok: bool) -> Proof:
    proof = "profile of the step: what ran in the branch's range"
    return Proof(what=what, requested="nsa", effective=effective, proof=proof, ok=ok)
