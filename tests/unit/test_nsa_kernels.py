"""The Triton kernels against plain torch, on CPU through Triton's interpreter: tests/conftest.py
asks for it."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paceline.attention.nsa import Attended, Keys, Settings, attend
from paceline.attention.plain import mean_blocks
from paceline.attention.sizes import Sizes

pytestmark = pytest.mark.slow
# T, H, G, E, sizes, where documents begin
CASES = {
    "by_query": (19, 16, 1, 16, (4, 2, 16, 3, 7), []),
    "by_block_documents": (37, 4, 2, 16, (8, 4, 16, 3, 9), [13]),
    "one_head_odd_width": (33, 2, 2, 12, (4, 4, 16, 3, 50), []),
    "tiles_seen_whole": (97, 2, 1, 16, (4, 2, 16, 3, 70), []),
    "one_token": (1, 2, 1, 16, (4, 2, 16, 3, 7), []),
    "two_rows": (37, 4, 2, 16, (8, 4, 16, 3, 9), []),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")
def test_kernels_equal_plain_torch(name: str) -> None:
    one, one_grads = run(name, "torch")
    other, other_grads = run(name, "triton")
    N = one.blocks.shape[-1]
    assert torch.equal(one.blocks, other.blocks[..., :N]) and (other.blocks[..., N:] < 0).all()
    for mine, theirs in zip((*one[:4], *one_grads), (*other[:4], *other_grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def run(name: str, kernels: str) -> tuple[Attended, list[Tensor]]:
    """Return the branches, and gradients of queries, keys and values."""
    T, H, G, E, letters, begins = CASES[name]
    sizes, noise = Sizes(*letters), torch.Generator().manual_seed(0)
    B = 2 if name == "two_rows" else 1
    q = torch.randn(B, T, H, E, generator=noise, requires_grad=True)
    kv = [torch.randn(B, T, G, E, generator=noise, requires_grad=True) for _ in range(6)]
    firsts = [max((b for b in begins if b <= t), default=0) for t in range(T)]
    first = torch.tensor([firsts], dtype=torch.int32) if begins else None
    compressed = [mean_blocks(x, sizes) for x in kv[:2]]
    gates = torch.rand(B, T, H, 3, generator=noise, requires_grad=True)
    settings = Settings(sizes, kernels=kernels)  # type: ignore[arg-type]
    found = attend(q, Keys(*compressed, *kv[2:]), gates, first, settings)
    leaves = [q, *kv, gates]
    total = (found.out * torch.randn(found.out.shape, generator=noise)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    pairs = zip(grads, leaves, strict=True)
    return found, [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]


def test_its_shapes_are_known_to_the_compiler() -> None:
    from paceline.attention.ops import nsa

    q, gates = torch.randn(1, 20, 2, 16, requires_grad=True), torch.rand(1, 20, 2, 3)
    keys = [torch.randn(1, size, 1, 16) for size in (9, 9, 20, 20, 20, 20)]
    first = torch.zeros(1, 20, dtype=torch.int32)
    arguments = (q, keys, gates, first, [4, 2, 16, 3, 7], 0.25, False)
    torch.library.opcheck(nsa, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has them compiled")
def test_it_is_one_node_of_a_compiled_graph() -> None:
    sizes, noise = Sizes(4, 2, 16, 3, 7), torch.Generator().manual_seed(0)
    made = [torch.randn(1, 20, heads, 16, generator=noise) for heads in (2, *[1] * 6)]
    made = [x.requires_grad_() for x in (*made, torch.rand(1, 20, 2, 3, generator=noise))]
    settings = Settings(sizes, kernels="triton")

    def loss(q: Tensor, *others: Tensor) -> Tensor:
        *kv, gates = others
        compressed = [mean_blocks(x, sizes) for x in kv[:2]]
        return attend(q, Keys(*compressed, *kv[2:]), gates, None, settings).out.square().sum()

    expected = torch.autograd.grad(loss(*made), made)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*made), made), expected)
