"""Where the time of profiled steps went, worked out by hand on small traces."""

import gzip
import json
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.records.profiled import parse_profile
from paceline.report.profile import profile_sheets
from paceline.traces.account import account, categorise, simplify
from paceline.traces.events import Trace, load_trace
from paceline.traces.intervals import subtract


def event(name: str, cat: str, start: float, length: float, tid: int = 1, **more: int) -> dict:  # type: ignore[type-arg]
    return {
        "ph": "X", "name": name, "cat": cat, "ts": start, "dur": length, "pid": 0, "tid": tid,
        "args": more,
    }  # fmt: skip


# Microseconds:     0    100   200   300   400   500   600   700   800   900  1000
# compute stream    [gemm 0-300][gap ][elementwise 400-600]      [gemm 800-900]
# comm stream              [nccl 200 --- 500]        [nccl 650-750]
# launches          each kernel at -10, but the last gemm at 780: the host was late
GPU = [
    event("ProfilerStep#20", "user_annotation", 0, 1000),
    event("void cutlass_gemm<float>", "kernel", 0, 300, tid=7, correlation=1),
    event("ncclDevKernel_AllReduce_Sum", "kernel", 200, 300, tid=9, correlation=2),
    event(
        "void at::native::vectorized_elementwise_kernel<4>", "kernel", 400, 200, 7, correlation=3
    ),
    event("ncclDevKernel_AllReduce_Sum", "kernel", 650, 100, tid=9, correlation=4),
    event("void cutlass_gemm<float>", "kernel", 800, 100, tid=7, correlation=5),
    *(event("cudaLaunchKernel", "cuda_runtime", 0, 5, 2, correlation=n) for n in (1, 2, 3, 4)),
    event("cudaLaunchKernel", "cuda_runtime", 780, 5, 2, correlation=5),
]


def write(path: Path, events: list[dict]) -> Path:  # type: ignore[type-arg]
    body = {"traceEvents": events, "distributedInfo": {"rank": 3, "world_size": 8}}
    path.write_bytes(gzip.compress(json.dumps(body).encode()))
    return path


def test_exposed_communication_and_launch_gaps(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "t.json.gz", GPU))
    facts = account(trace, 3, 20, 20, "t.json.gz")
    assert trace.rank == 3 and facts.on_device
    assert facts.window_s == pytest.approx(1000e-6)
    assert facts.communication_s == pytest.approx(400e-6)
    # 300 to 400 beside the gap, and all of 650 to 750.
    assert facts.exposed_s == pytest.approx(200e-6)
    # 600-650, 750-800, and 900-1000 after the last kernel.
    assert facts.idle_s == pytest.approx(200e-6)
    # Of the two gaps before a kernel, only that before the last one was the host's.
    assert facts.num_launch_gaps == 1 and facts.launch_gaps_s == pytest.approx(50e-6)
    assert list(facts.categories) == ["matrix products", "communication", "elementwise"]
    assert facts.top[0].name == "cutlass_gemm" and facts.top[0].count == 2
    (sheet,) = profile_sheets([facts])
    assert "exposed 200 µs a step" in sheet.sentences[1]
    assert "1 launch gap" in sheet.sentences[2]


def test_copies_hide_no_communication(tmp_path: Path) -> None:
    """Of 100 us of NCCL 30 lie beside a product; a copy to the host computes nothing."""
    events = [
        event("ncclDevKernel_AllReduce_Sum", "kernel", 0, 100, tid=9, correlation=1),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 0, 70, tid=8, correlation=2),
        event("void cutlass_gemm<float>", "kernel", 70, 30, tid=7, correlation=3),
    ]
    facts = account(load_trace(write(tmp_path / "t.json.gz", events)), 0, 1, 1, "t")
    assert facts.exposed_s == pytest.approx(70e-6)


def test_steps_that_end_before_they_begin_are_one() -> None:
    facts = account(Trace(), 0, 5, 4, "t")  # of a file that somebody has changed
    assert facts.num_steps == 1 and profile_sheets([facts])


def test_on_a_cpu_operations_count_by_the_time_that_they_spend_themselves(tmp_path: Path) -> None:
    events = [
        event("aten::linear", "cpu_op", 0, 100),
        event("aten::addmm", "cpu_op", 10, 80),
        event("aten::add", "cpu_op", 200, 50),
        event("gloo:all_reduce", "user_annotation", 220, 80, tid=5),
    ]
    facts = account(load_trace(write(tmp_path / "t.json.gz", events)), 0, 1, 1, "t")
    assert not facts.on_device
    assert {k.name: round(k.total_s * 1e6) for k in facts.top} == {
        "aten::addmm": 80, "aten::add": 50, "aten::linear": 20,
    }  # fmt: skip
    # gloo ends at 300, the addition at 250.
    assert facts.exposed_s == pytest.approx(50e-6)


def test_what_is_left_of_intervals() -> None:
    assert subtract([(0, 10), (20, 30)], [(2, 3), (9, 22), (29, 40)]) == [(0, 2), (3, 9), (22, 29)]
    assert subtract([(0, 10)], []) == [(0, 10)] and subtract([(0, 10)], [(0, 10)]) == []


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void elementwise_kernel<128, 4, direct_copy_kernel_cuda(lambda)>", "elementwise"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused_3", "reductions"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("barrier_kernel(unsigned int**, int, int, int, unsigned long)", "communication"),
        ("wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)", "communication"),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>", "communication"),
        ("void multimem_one_shot_all_reduce_kernel<float, 16>", "communication"),
    ],
)  # fmt: skip
def test_categories(name: str, category: str) -> None:
    assert categorise(name) == category


def test_names_without_templates() -> None:
    full = (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}> >"
    )
    assert simplify(full) == "elementwise_kernel<direct_copy_kernel_cuda>"
    assert simplify("aten::mm") == "aten::mm"


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2", b'{"a": 1}', b"\x1f\x8bnot gzip"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError):
        load_trace(tmp_path / "t.json")


def test_which_steps_are_asked_for() -> None:
    assert parse_profile("steps:20-24") == range(20, 25) and parse_profile("off") is None
    for wrong in ("20-24", "steps:24-20", "steps:0-3", "steps:1", "on"):
        with pytest.raises(ValueError, match="names no steps"):
            parse_profile(wrong)
