"""Turns a trace into `ProfileFacts`: where the time of the profiled steps went.

window      |----------- ProfilerStep#20 ... ProfilerStep#24 -----------|
compute     ####   ######        ####    ########
collective     =======    ====              ===
exposed            .       ====                      communication that nothing hides
idle                   _        _    ____        ____ of it, launch gaps: the host was late
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from paceline.records.profiled import Gap, KernelTime, ProfileFacts
from paceline.traces.events import Span, Trace
from paceline.traces.intervals import length, merge, subtract

MAX_TOP, MAX_GAPS = 15, 5
MICRO = 1e-6
# The first that matches counts. Names are of NCCL, gloo, torch's symmetric memory, cuBLAS, CUTLASS,
# Triton and ATen. A copy from GPU to GPU (PtoP) is communication, not one of the copies.
CATEGORIES = {
    "communication": r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|broadcast_|sendrecv"
    r"|record_param_comms|symm_mem|multimem|\bbarrier_kernel|(?:put|wait)_signal|nvshmem|\bPtoP\b",
    "attention": r"flash|fmha|attention|attn|sdpa",
    "matrix products": r"gemm|cutlass|cublas|nvjet|xmma|wgmma|::(?:add|b|badd)?mm\b|matmul|linear"
    r"|conv(?:olution|\dd)|implicit_|einsum|mkldnn",
    "optimizer": r"multi_tensor|fused_?adam|_foreach_|adamw?\b|fused_sgd|muon",
    "normalisation": r"norm|GammaBeta",
    "loss and softmax": r"softmax|nll_loss|cross_entropy|logsumexp",
    "embedding": r"embedding|index_select|gather|scatter|indexing",
    "copies": r"memcpy|memset|\bcopy_|::to\b|::_to_copy|contiguous|::clone|::cat\b|catarray|::fill_"
    r"|::zero_",
    "reductions": r"reduce|::sum\b|::mean\b|::max\b|triton_(?:red|per)",
    "elementwise": r"elementwise|vectorized|triton_poi|::(?:add|mul|sub|div|pow|neg|silu|gelu"
    r"|sigmoid|where|exp|sqrt|rsqrt)(?:_backward)?_?\b",
}
NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at|native|c10|cuda|detail|std)::")
FUNCTOR = re.compile(r"\b(\w+(?:[Ff]unctor|_kernel_cuda|_kernel_impl|Ops?|_op))\b")
GLOO = re.compile(r"gloo:|nccl:")
MOVES = ("Memcpy", "Memset")  # by engines of their own: nothing is computed
PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES.items()]


def categorise(name: str) -> str:
    """Return the category of a kernel or an operation by its name."""
    return next((category for category, found in PATTERNS if found.search(name)), "others")


def is_communication(name: str) -> bool:
    """Say whether a kernel or an operation moves numbers between ranks, or waits for them to be
    moved."""
    return categorise(name) == "communication"


def is_computation(name: str) -> bool:
    """Say whether communication can hide behind this."""
    return not is_communication(name) and not name.startswith(MOVES)


def account(trace: Trace, rank: int, first_step: int, last_step: int, file: str) -> ProfileFacts:
    """Return where the time of the profiled steps went, on the device where there is one."""
    on_device = bool(trace.kernels)
    spans = trace.kernels if on_device else trace.operations
    own_s = _kernel_times(spans) if on_device else _own_times(spans)
    start, end = _window(trace, spans)
    spans = [span for span in spans if span.end > start and span.start < end]
    # On a CPU gloo works in a thread of its own, which is marked and calls no operation.
    marked = [] if on_device else [a for a in trace.annotations if GLOO.match(a.name)]
    sent = [*marked, *(s for s in spans if is_communication(s.name))]
    exchanged = merge(span.time for span in sent)
    computed = merge(span.time for span in spans if is_computation(span.name))
    busy = merge(span.time for span in spans)
    idle = subtract([(start, end)], busy)
    gaps = _gaps(trace, spans, idle) if on_device else []
    late = [gap for gap in gaps if gap.waits_for_host]
    categories: dict[str, float] = defaultdict(float)
    for name, seconds in own_s:
        categories[categorise(name)] += seconds
    return ProfileFacts(
        rank=rank,
        first_step=first_step,
        last_step=last_step,
        trace=file,
        on_device=on_device,
        window_s=(end - start) * MICRO,
        busy_s=length(busy) * MICRO,
        categories=dict(sorted(categories.items(), key=lambda item: -item[1])),
        top=_longest(own_s),
        communication_s=length(exchanged) * MICRO,
        exposed_s=length(subtract(exchanged, computed)) * MICRO,
        idle_s=length(idle) * MICRO,
        launch_gaps_s=sum(gap.length_s for gap in late),
        num_launch_gaps=len(late),
        longest_gaps=sorted(gaps, key=lambda gap: -gap.length_s)[:MAX_GAPS],
    )


def _window(trace: Trace, spans: Sequence[Span]) -> tuple[float, float]:
    """Return begin and end of the profiled steps; of what ran, where no step is marked. A device
    ends later than the host, which only hands work over."""
    steps = trace.steps
    ends = [span.end for span in (*steps, *spans)]
    starts = [span.start for span in steps] or [span.start for span in spans]
    return (min(starts), max(ends)) if starts else (0.0, 0.0)


def _kernel_times(spans: Sequence[Span]) -> list[tuple[str, float]]:
    return [(span.name, span.length * MICRO) for span in spans]


def _own_times(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Return of each operation the time that it spends itself: without those that it calls, which
    lie inside it on the same thread."""
    found: list[tuple[str, float]] = []
    by_lane: dict[tuple[int | str, int | str], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    for lane in by_lane.values():
        open_spans: list[tuple[Span, list[float]]] = []  # each with the time of its children

        def close(until: float, open_spans: list[tuple[Span, list[float]]] = open_spans) -> None:
            while open_spans and open_spans[-1][0].end <= until:
                span, inside = open_spans.pop()
                found.append((span.name, max(0.0, span.length - sum(inside)) * MICRO))

        for span in sorted(lane, key=lambda each: (each.start, -each.end)):
            close(span.start)
            if open_spans:
                open_spans[-1][1].append(span.length)
            open_spans.append((span, []))
        close(float("inf"))
    return found


def _longest(times: Sequence[tuple[str, float]]) -> list[KernelTime]:
    """Return the names that took most. Kernels that differ only in their C++ templates are one."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for full, seconds in times:
        key = (simplify(full), categorise(full))
        count, total = found.get(key, (0, 0.0))
        found[key] = (count + 1, total + seconds)
    whole = sum(seconds for _, seconds in times) or 1.0
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:MAX_TOP]
    return [
        KernelTime(name=name, category=category, count=count, total_s=s, share=s / whole)
        for (name, category), (count, s) in longest
    ]


def simplify(name: str) -> str:
    """Return a kernel's name without namespaces and templates, but with the functor that says what
    it does: `elementwise_kernel<direct_copy_kernel_cuda>`."""
    bare = NAMESPACES.sub("", name)
    kernel, _, inside = bare.partition("<")
    functors = [word for word in FUNCTOR.findall(inside) if word != kernel]
    return f"{kernel}<{functors[0]}>" if functors else kernel.partition("(")[0] or bare


def _gaps(trace: Trace, kernels: Sequence[Span], idle: Sequence[tuple[float, float]]) -> list[Gap]:
    """Return the times in which nothing ran, each with the kernel that ended it. The host was late
    where it launched that kernel only after the gap had begun."""
    by_start = {span.start: span for span in kernels}
    gaps = []
    for start, end in idle:
        following = by_start.get(end)
        if following is None:  # after the last kernel
            continue
        launch = trace.launches.get(following.correlation)
        is_late = launch is not None and launch.start > start
        gaps.append(
            Gap(length_s=(end - start) * MICRO, before=following.name, waits_for_host=is_late)
        )
    return gaps
