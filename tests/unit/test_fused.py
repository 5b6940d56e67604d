"""Products in parts by both movers: that of symmetric memory on threads whose memory is one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies import fused

WORLD, F, D, N, ROUNDS = 3, 12, 5, 7, 3
TIMEOUT_S = 20


class Shared:
    """What ranks can reach of each other, and where they meet."""

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}
        self.barriers = [threading.Barrier(WORLD, timeout=TIMEOUT_S) for _ in range(3)]


class Exchange:
    """As `symmetric.Exchange`: buffers grow, on all ranks together."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def open(self, like: Tensor, numel: int) -> tuple[Any, Tensor]:
        if self.rank not in self.shared.buffers or len(self.shared.buffers[self.rank]) < numel:
            self.shared.barriers[2].wait()
            self.shared.buffers[self.rank] = torch.full((numel,), float("nan"), dtype=like.dtype)
            self.shared.barriers[2].wait()
        return self, self.shared.buffers[self.rank][:numel]

    def barrier(self, channel: int) -> None:
        self.shared.barriers[channel].wait()

    def get_buffer(
        self, peer: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        return self.shared.buffers[peer][storage_offset:][: sizes[0]]


class OnThreads(fused.BySymmetricMemory):
    """The same without a GPU: all is done when it is called."""

    def __init__(self, gathers: Shared, sums: Shared, rank: int) -> None:
        self.gathers, self.sums = Exchange(gathers, rank), Exchange(sums, rank)  # type: ignore[assignment]
        self.rank, self.world, self.num_bytes = rank, WORLD, 0
        self.stream = SimpleNamespace(record_event=lambda: None)

    def _beside(self, *used: Tensor) -> Any:
        return nullcontext()

    def arrive(self, mark: Any) -> None:
        pass


def on_each(task: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(task, range(WORLD)))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_parts_through_symmetric_memory(keeps: bool, is_frozen: bool) -> None:
    """Each rank has a batch of its own; matrices of two sizes go through the same buffers."""
    gathers, sums = Shared(), Shared()
    torch.manual_seed(0)
    weights = [torch.randn(F, D, dtype=torch.double), torch.randn(2 * F, D, dtype=torch.double)]
    batches = torch.randn(WORLD, N, D, dtype=torch.double)

    def check(rank: int) -> None:
        mover = fused.MOVERS[f"rank{rank}"] = OnThreads(gathers, sums, rank)
        for weight in weights * ROUNDS:
            each = len(weight) // WORLD
            rows = slice(rank * each, (rank + 1) * each)
            shard = weight[rows].clone().requires_grad_(not is_frozen)
            x = batches[rank].clone().requires_grad_()
            y, kept = fused.fused_linear(x, shard, f"rank{rank}", keeps)
            torch.testing.assert_close(y, batches[rank] @ weight.t())
            assert kept.numel() == (weight.numel() if keeps else 0)
            y.sin().sum().backward()
            whole, plain = weight.clone().requires_grad_(), batches.clone().requires_grad_()
            (plain @ whole.t()).sin().sum().backward()
            torch.testing.assert_close(x.grad, plain.grad[rank])
            if is_frozen:
                assert shard.grad is None
            else:
                torch.testing.assert_close(shard.grad, whole.grad[rows] / WORLD)
        assert mover.num_bytes > 0

    on_each(check)


def test_what_is_not_called_as_a_layer_stays_with_fsdp() -> None:
    tied, recomputed = nn.Linear(4, 4), nn.Linear(4, 4)
    recomputed.forward = nn.Linear.forward.__get__(recomputed)  # as compose does to a block
    plain = nn.Linear(4, 4)
    model = nn.Module()
    model.blocks = nn.ModuleList(
        [
            nn.Sequential(plain, nn.ReLU(), tied),
            nn.Sequential(tied),
            recomputed,
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.utils.spectral_norm(nn.Linear(4, 4)),
        ]
    )
    assert list(fused._iter_matrices(model)) == [plain]
