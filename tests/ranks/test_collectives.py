"""Collectives on real gloo ranks: right ones pass, a wrong one is caught and its rank named."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.check import answers
from paceline.check import rank as rank_module
from paceline.check.bandwidth import LOADS, measure_collectives
from paceline.check.collectives import verify_collectives
from paceline.check.links import measure_clock_offsets, measure_pairs
from paceline.check.rank import find_missing_ranks
from tests.harness import warm_fork_server

CPU = torch.device("cpu")
TIMEOUT_S = 60


def run_group(folder: Path, world_size: int, task: Callable[[int], Any]) -> list[Any]:
    """What `task(rank)` returned on every rank of a gloo group, through JSON."""
    warm_fork_server()
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rank, args=(str(folder), world_size, rank, task))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    errors = [path.read_text() for path in folder.glob("error*")]
    assert not errors, "\n".join(errors)
    assert not stuck, f"{len(stuck)} ranks did not finish in {TIMEOUT_S} s"
    return [json.loads((folder / f"verdict{rank}.json").read_text()) for rank in range(world_size)]


def _rank(folder: str, world_size: int, rank: int, task: Callable[[int], Any]) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
        Path(folder, f"verdict{rank}.json").write_text(json.dumps(task(rank)))
        find_missing_ranks(store, rank, world_size, 10)  # who leaves takes its connections along
    except BaseException:
        Path(folder, f"error{rank}.txt").write_text(traceback.format_exc())
    os._exit(0)  # gloo sometimes aborts in interpreter exit, after the verdict


def verify(rank: int) -> Any:
    return verify_collectives(CPU).model_dump()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_gives_the_exact_answers(tmp_path: Path, world_size: int) -> None:
    ends = run_group(tmp_path, world_size, verify)
    for end in ends:
        assert end["wrong"] == [] and end["lacking"] == []
        assert (end["backend"], end["world_size"]) == ("gloo", world_size)
        # The barrier, then three sizes: nine ops of seven dtypes and an average of four.
        assert end["num_cases"] == 1 + 3 * (9 * 7 + 4)


def spoil_all_reduce_of_bf16_on_the_last_rank(rank: int) -> Any:
    right = dist.all_reduce

    def wrong(data: Tensor, **options: Any) -> None:
        right(data, **options)
        if (
            data.dtype == torch.bfloat16
            and len(data) == 1021
            and options["op"] == dist.ReduceOp.MAX
        ):
            data[7] += 1
            data[1020] = float("nan")

    if rank == dist.get_world_size() - 1:
        dist.all_reduce = wrong
    return verify(rank)


def test_a_wrong_answer_names_its_rank(tmp_path: Path) -> None:
    ends = run_group(tmp_path, 3, spoil_all_reduce_of_bf16_on_the_last_rank)
    # At element 7 ranks 0, 1, 2 have 1 + (rank + 21) % 5 = 2, 3, 4.
    expected = {
        "rank": 2, "op": "all_reduce max", "dtype": "bfloat16", "numel": 1021, "num_wrong": 2,
        "index": 7, "expected": "4", "got": "5",
    }  # fmt: skip
    assert ends[0]["wrong"] == [expected]
    assert ends[1]["wrong"] == [] and ends[2]["wrong"] == [expected]


def spoil_each_op_on_rank_1(rank: int) -> Any:
    """Every op but the sends does nothing; what is sent is not what it should be."""
    if rank == 1:
        right = dist.isend
        dist.isend = lambda data, peer: right(torch.full_like(data, answers.BLANK), peer)
        for name in ("all_reduce", "broadcast", answers.ALL_GATHER, answers.REDUCE_SCATTER):
            setattr(dist, name, _run_on_a_copy(getattr(dist, name)))
        dist.all_to_all_single = _run_on_a_copy(dist.all_to_all_single)
    return verify(rank)


def _run_on_a_copy(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op takes part, so that the others go on, but its result is lost."""
    return lambda result, *rest, **options: op(result.clone(), *rest, **options)


def test_every_op_is_really_checked(tmp_path: Path) -> None:
    wrong = run_group(tmp_path, 3, spoil_each_op_on_rank_1)[0]["wrong"]
    caught = {(each["op"], each["rank"]) for each in wrong}
    own = set(answers.CHECKS) - {"send_recv"}
    assert caught == {(op, 1) for op in own} | {("send_recv", 2)}
    # Each dtype and size, too; but a lone element of a sum may happen to be the rank's own.
    for op in own:
        dtypes = 4 if op == "all_reduce avg" else 7
        assert sum(each["op"] == op and each["numel"] > 1 for each in wrong) == 2 * dtypes, op


def leave_barriers_at_once_on_rank_0(rank: int) -> Any:
    if rank == 0:
        dist.barrier = lambda **options: dist.all_reduce(torch.zeros(1), async_op=True)
    else:
        dist.barrier = lambda **options: dist.all_reduce(torch.zeros(1))
    return verify(rank)


def test_a_barrier_that_does_not_wait_is_caught(tmp_path: Path) -> None:
    wrong = run_group(tmp_path, 2, leave_barriers_at_once_on_rank_0)[0]["wrong"]
    # A loaded machine may make rank 1 late in both of its two rounds.
    assert {(each["op"], each["rank"], each["got"]) for each in wrong} == {("barrier", 0, "1")}


def all_to_all_is_not_there(rank: int) -> Any:
    def absent(*_: Any) -> None:
        raise RuntimeError("ProcessGroup does not support alltoall_base\nat line 12")

    dist.all_to_all_single = absent
    return verify(rank)


def test_what_a_backend_lacks_is_neither_wrong_nor_silent(tmp_path: Path) -> None:
    end = run_group(tmp_path, 2, all_to_all_is_not_there)[0]
    assert end["wrong"] == []
    (lacking,) = end["lacking"]
    assert lacking["op"] == "all_to_all" and len(lacking["dtypes"]) == 7
    assert lacking["reason"] == "not in gloo (ProcessGroup does not support alltoall_base)"


def measure(rank: int) -> Any:
    speeds = measure_collectives(CPU, sizes=(8, 2**20), budget_s=0.5)
    pairs = measure_pairs(CPU, size=2**18, budget_s=0.2)
    return {
        "speeds": [speed.model_dump() for speed in speeds],
        "pairs": [pair.model_dump() for pair in pairs],
        "clocks": [clock.model_dump() for clock in measure_clock_offsets(CPU)],
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_speeds_add_up(tmp_path: Path, world_size: int) -> None:
    ends = run_group(tmp_path, world_size, measure)
    speeds = ends[0]["speeds"]
    assert all(end["speeds"] == speeds for end in ends), "ranks must agree"
    assert [speed["op"] for speed in speeds] == [op for op in LOADS for _ in range(2)]
    factors = {"all_reduce": {2: 1.0, 3: 4 / 3}, "broadcast": {2: 1.0, 3: 1.0}}
    factors["send_recv"] = factors["broadcast"]
    for speed in speeds:
        # 8 bytes are two floats: three ranks with a float each make 12 of them.
        assert speed["num_bytes"] in {8, 12, 2**20, 2**20 - 4}
        rate = speed["num_bytes"] / speed["median_s"] / 1e9
        assert speed["algbw_gb_per_s"] == pytest.approx(rate)
        factor = factors.get(speed["op"], {2: 1 / 2, 3: 2 / 3})[world_size]
        assert speed["busbw_gb_per_s"] == pytest.approx(rate * factor)
    pairs = [(pair["a"], pair["b"]) for pair in ends[0]["pairs"]]
    assert pairs == [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    assert all(pair["gb_per_s"] > 0 for pair in ends[0]["pairs"])
    # One machine has one clock.
    assert [clock["rank"] for clock in ends[0]["clocks"]] == list(range(world_size))
    assert all(abs(c["offset_s"]) <= c["round_trip_s"] / 2 + 1e-6 for c in ends[0]["clocks"])
    assert all(end["pairs"] == [] and end["clocks"] == [] for end in ends[1:])


@pytest.mark.parametrize("absent", [0, 2])
def test_a_missing_rank_is_named(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "GRACE_S", 0.3)
    store = dist.HashStore()

    def call(rank: int, timeout_s: float) -> list[int]:
        return find_missing_ranks(store, rank, 3, timeout_s)

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(call, range(3), [10] * 3)) == [[], [], []]
        present = [rank for rank in range(3) if rank != absent]
        assert list(ranks.map(call, present, [0.2] * 2)) == [[absent]] * 2
