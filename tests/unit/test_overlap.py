"""Exposed communication from spans of time, and the settings that the plan chooses to hide it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.autograd import DeviceType

from paceline.machine.measures import MatmulRate, PairSpeed, Speed, keep_rates
from paceline.traces.intervals import merge, subtract
from paceline.train.overlap import measure_overlap
from tests.machines import MACHINE, box, machine, plan

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


@dataclass
class Event:
    """One of kineto's, in ms."""

    what: str
    start: int
    end: int
    device: DeviceType = CPU

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return self.start * 10**6

    def duration_ns(self) -> int:
        return (self.end - self.start) * 10**6

    def device_type(self) -> DeviceType:
        return self.device


def test_spans() -> None:
    assert merge([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert subtract([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert subtract([(0, 4), (6, 8)], [(0, 8)]) == []
    assert subtract([(0, 4)], []) == [(0, 4)]


def test_gloo_beside_operations() -> None:
    """Sent from 10 to 30; computed until 20, and in 25 to 26."""
    events = [
        Event("aten::mm", 0, 20), Event("aten::t", 5, 6), Event("c10d::allreduce_", 8, 40),
        Event("gloo:all_reduce", 10, 22), Event("gloo:all_reduce", 20, 30),
        Event("aten::add_", 25, 26),
    ]  # fmt: skip
    found = measure_overlap(events, rank=1, step=3)
    assert (found.communication_s, found.exposed_s) == pytest.approx((0.020, 0.009))
    assert found.compute_s == pytest.approx(0.021) and found.rank == 1


def test_nccl_beside_kernels() -> None:
    """On a GPU operations of the host are only launches, and copies compute nothing."""
    events = [
        Event("aten::mm", 0, 100), Event("gemm", 0, 10, CUDA), Event("Memcpy HtoD", 10, 20, CUDA),
        Event("ncclDevKernel_AllGather", 5, 20, CUDA), Event("gemm", 18, 30, CUDA),
    ]  # fmt: skip
    found = measure_overlap(events, rank=0, step=3)
    assert (found.communication_s, found.exposed_s) == pytest.approx((0.015, 0.008))


def test_barriers_of_symmetric_memory_are_communication() -> None:
    """Waited for 50 ms and 10, and computed for 10 between them; one copy came from a peer."""
    barrier = "barrier_kernel(unsigned int**, int, int, int, unsigned long)"
    add = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"
    events = [
        Event(barrier, 0, 50, CUDA), Event(add, 50, 60, CUDA), Event(barrier, 60, 70, CUDA),
        Event("Memcpy PtoP (Device -> Device)", 80, 90, CUDA),
    ]  # fmt: skip
    found = measure_overlap(events, rank=0, step=3)
    assert (found.communication_s, found.exposed_s) == pytest.approx((0.070, 0.070))
    assert found.compute_s == pytest.approx(0.010)


def link(gb_per_s: float) -> PairSpeed:
    return PairSpeed(a=0, b=1, num_bytes=2**26, one_way_s=0.1, gb_per_s=gb_per_s)


@pytest.mark.parametrize(("rate", "low", "high"), [(1.5, 1, 3), (300.0, 20, 60)])
def test_buckets_follow_the_measured_link(
    rate: float, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqrt(4 MB x 0.24 ms x 1.5 GB/s) = 1.2 MB; of lm_125m sqrt(500 MB x 30 us x 300 GB/s) is too
    large for one bucket to be the last, 67 MB."""
    monkeypatch.setattr("paceline.plan.overlap.load_link", lambda *_: link(rate))
    made = plan("launch.nproc=2") if rate < 2 else plan(source="lm_125m", machine=box(4))
    assert low <= made.bucket_mb.value <= high * 1.2
    assert "that check measured" in made.bucket_mb.because


def test_without_a_measured_link_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.overlap.load_link", lambda *_: None)
    made = plan("launch.nproc=2")
    assert made.bucket_mb.value == 25.0 and made.prefetch.value == 0
    assert plan("launch.nproc=2", "strategy.bucket_mb=7").bucket_mb.value == 7.0


@pytest.mark.parametrize(("rate", "ahead"), [(0.1, 1), (10_000.0, 0)])
def test_blocks_are_gathered_ahead_where_the_link_is_slow(
    rate: float, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.plan.overlap.load_link", lambda *_: link(rate))
    monkeypatch.setattr("paceline.plan.overlap.load_matmul_tflops", lambda *_: 700.0)
    made = plan("strategy.name=zero3", source="lm_125m", machine=box(4))
    assert made.prefetch.value == ahead and "of its forward pass" in made.prefetch.because
    assert plan("strategy.name=zero3", machine=machine()).prefetch.value == 0


def test_a_gather_is_held_against_the_forward_pass_in_its_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the FLOPs, at the rate of what is computed in; numbers of 4 bytes, 2, or 1."""
    rates = {"bf16": 700.0, "tf32": 350.0}
    monkeypatch.setattr("paceline.plan.overlap.load_link", lambda *_: link(100.0))
    rate_of = "paceline.plan.overlap.load_matmul_tflops"
    monkeypatch.setattr(rate_of, lambda env, device, kind, threads: rates[kind])
    bf16, fp32 = (
        plan("strategy.name=zero3", f"precision.mode={mode}", source="lm_125m", machine=box(4))
        for mode in ("bf16", "fp32")
    )
    assert bf16.flops_per_sample.value is not None
    found = [int(re.findall(r"(\d+)%", made.prefetch.because)[0]) for made in (bf16, fp32)]
    assert found[0] == found[1] > 0, "twice the bytes, and half the rate"
    in_blocks = 12 * (4 * 768**2 + 3 * 768 * 2048)
    gather_s = 2 * in_blocks / 12 * 3 / 4 / 100e9
    forward_s = bf16.flops_per_sample.value / 3 * bf16.batch.micro / 12 / 700e12
    assert found[0] == pytest.approx(100 * gather_s / forward_s, abs=1)


def test_a_cpu_is_asked_with_the_threads_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`paceline check` has measured 8 threads, as many as a rank without loaders has; what 6
    compute is not known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ["launch.nproc=2", "strategy.name=zero3"]
    made = plan(*asked, "data.num_workers=0")
    assert made.threads.value == 8 and "no link was measured" in made.prefetch.because
    rate = MatmulRate(precision="fp32", side=512, tflop_per_s=0.5, best_tflop_per_s=0.5)
    keep_rates(MACHINE, made.crew, 8, [rate], [link(0.01)])
    assert plan(*asked, "data.num_workers=0").prefetch.value == 1
    assert "no matmul by 6 threads" in plan(*asked, "data.num_workers=2").prefetch.because


def test_buckets_follow_the_measured_latency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 times the assumed 0.24 ms make buckets 10 times as large; of a file that an older version
    kept the latency is assumed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    crew = plan("launch.nproc=2").crew
    keep_rates(MACHINE, crew, 8, [], [link(4.0)])
    (file,) = tmp_path.rglob("*.json")
    older = json.loads(file.read_text())
    del older["latency_s"]
    file.write_text(json.dumps(older))
    assumed = plan("launch.nproc=2").bucket_mb
    assert "240 µs, which is assumed" in assumed.because
    keep_rates(MACHINE, crew, 8, [], [link(4.0)], [all_reduce(2**20, 1.0), all_reduce(8, 0.024)])
    measured = plan("launch.nproc=2").bucket_mb
    assert measured.value == pytest.approx(10 * assumed.value, rel=0.1)
    assert "latency of 24 ms" in measured.because and "assumed" not in measured.because


def all_reduce(num_bytes: int, median_s: float) -> Speed:
    return Speed(
        op="all_reduce", num_bytes=num_bytes, median_s=median_s, algbw_gb_per_s=1,
        busbw_gb_per_s=1, iterations=5,
    )  # fmt: skip
