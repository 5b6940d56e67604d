"""Native sparse attention in plain torch: against the paper's formulas in fp64, and its properties.

`tests/nsa_reference.py` is the reference; it shares no line with what is tested.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.attention import plain
from paceline.attention.nsa import Attended, Keys, Settings, attend
from paceline.attention.ranges import ranges_to_mask, ranges_v1, ranges_v2
from paceline.attention.sizes import Sizes
from tests import nsa_reference as reference

SIZES = Sizes(l=4, d=2, l_sel=8, n_sel=4, w=5)


def draw(T: int, H: int, G: int, E: int, B: int = 1, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values of three branches, and gates, in fp64."""
    noise = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, E), *[(B, T, G, E)] * 6, (B, T, H, 3)]
    made = [torch.randn(s, generator=noise, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in (*made[:-1], torch.sigmoid(made[-1]))]


def run(made: list[Tensor], sizes: Sizes, first: Tensor | None = None) -> Attended:
    q, *kv, gates = made
    compressed = [plain.mean_blocks(x, sizes) for x in kv[:2]]
    return attend(q, Keys(*compressed, *kv[2:]), gates, first, Settings(sizes))


def expect(made: list[Tensor], z: Sizes, firsts: list[int]) -> tuple[Tensor, list[list[list[int]]]]:
    """The same of a batch of one, by the reference."""
    letters = reference.Letters(z.l, z.d, z.l_sel, z.n_sel, z.w)
    q, *kv, gates = (x[0] for x in made)
    compressed = [
        torch.stack([reference.compress(x[:, g], letters) for g in range(x.shape[1])], dim=1)
        for x in kv[:2]
    ]
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    keys = dict(zip(names, (*compressed, *kv[2:]), strict=True))
    return reference.attend(q, keys, gates, letters, firsts)


def real(blocks: Tensor) -> list[int]:
    return [block for block in blocks.tolist() if block >= 0]


@pytest.mark.parametrize(
    ("T", "H", "G", "begins"),
    [(1, 2, 1, []), (3, 2, 2, []), (45, 4, 2, []), (29, 3, 1, [11, 12]), (26, 2, 2, [8])],
)
def test_equals_the_paper(T: int, H: int, G: int, begins: list[int]) -> None:
    made = draw(T, H, G, E=6)
    firsts = [max((b for b in begins if b <= t), default=0) for t in range(T)]
    first = torch.tensor([firsts]) if begins else None
    found = run(made, SIZES, first)
    out = found.out
    expected, chosen = expect(made, SIZES, firsts)
    for t in range(T):
        for g in range(G):
            assert real(found.blocks[0, t, g]) == chosen[t][g]
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((out * weight).sum(), made, allow_unused=True)
    theirs = torch.autograd.grad((expected * weight[0]).sum(), made, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        other = torch.zeros_like(mine) if other is None else other
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_as_its_type_does(dtype: torch.dtype) -> None:
    """fp32 to 1e-5; bf16 no further from fp64 than twice what dense attention is in bf16."""
    made = draw(33, 4, 1, E=16)
    exact = run(made, SIZES).out
    rounded = [x.detach().to(dtype) for x in made]
    # The choice of the exact ones: a rounded score may choose another block.
    error = (run(rounded, SIZES).out.double() - exact).abs().max().item()
    q, _, _, k, v, *_ = rounded
    wide = [x.double() for x in (q, k, v)]
    own = (_dense(q, k, v).double() - _dense(*wide)).abs().max().item()
    assert error < (1e-5 if dtype == torch.float32 else max(2 * own, 3e-2))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    return plain.masked(q, k, v, mask[None, None])


@given(
    T=st.integers(1, 40), G=st.sampled_from([1, 2]), R=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=12, deadline=None, derandomize=True)
def test_wide_windows_and_many_blocks_are_dense_attention(
    T: int, G: int, R: int, seed: int
) -> None:
    made = draw(T, G * R, G, E=4, seed=seed)
    q, _, _, k_sel, v_sel, k_win, v_win, _ = made
    found = run(made, Sizes(l=4, d=2, l_sel=8, n_sel=5, w=40))
    torch.testing.assert_close(found.win, _dense(q, k_win, v_win))
    torch.testing.assert_close(found.sel, _dense(q, k_sel, v_sel))


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_later_token_changes_an_earlier_output(data: st.DataObject) -> None:
    d = data.draw(st.sampled_from([1, 2, 4]))
    l, l_sel = d * data.draw(st.integers(1, 2)), d * data.draw(st.sampled_from([2, 4]))  # noqa: E741
    sizes = Sizes(l, d, l_sel, n_sel=4, w=data.draw(st.integers(1, 12)))
    T, G = data.draw(st.integers(2, 40)), data.draw(st.sampled_from([1, 3]))
    made = [x.detach() for x in draw(T, G * 2, G, E=4, B=2, seed=data.draw(st.integers(0, 99)))]
    cut = data.draw(st.integers(1, T - 1))
    changed = [x.clone() for x in made]
    for x in changed:
        x[:, cut:] = 9 * torch.randn_like(x[:, cut:])
    before, after = run(made, sizes), run(changed, sizes)
    for name, mine, other in zip(Attended._fields, before, after, strict=True):
        assert torch.equal(mine[:, :cut], other[:, :cut]), f"{name} of {sizes}, T {T}, cut {cut}"


def test_one_choice_per_group_and_more_than_one_key() -> None:
    """All heads of a group read the same blocks, chosen by their sum: turning one head's queries
    changes the choice of all its group, and of no other."""
    made = [x.detach() for x in draw(64, 4, 2, E=8)]
    base = run(made, SIZES).blocks
    made[0] = made[0].clone()
    made[0][:, :, 1] *= -8
    turned = run(made, SIZES).blocks
    assert base.shape == (1, 64, 2, 4)  # no axis of heads
    assert not torch.equal(base[:, :, 0], turned[:, :, 0])
    assert torch.equal(base[:, :, 1], turned[:, :, 1])
    values = made[4].clone()
    values[:, 0] += 1
    made[4] = values
    with_first = run(made, SIZES).sel[:, -1]
    assert (with_first != values[:, 0, :1]).any(), "more than the first key is seen"


def test_gradients_are_those_of_finite_differences() -> None:
    sizes = Sizes(l=2, d=1, l_sel=2, n_sel=3, w=2)
    made = draw(7, 2, 1, E=2, seed=3)
    assert torch.autograd.gradcheck(lambda *x: run(list(x), sizes).out, made, atol=1e-6)


def patterns() -> Iterator[tuple[str, Tensor]]:
    """The seed's patterns: block numbers (2, 8, 2, 12) of 16 blocks of 4 tokens."""
    draw_ = random.Random(0)
    shape, places = (2, 8, 2, 12), range(12)
    number = torch.tensor(sorted([draw_.randrange(-1, 16) for _ in places]))
    yield "random", number.expand(shape)
    yield "sequential", torch.arange(12).expand(shape)
    yield "duplicates", torch.tensor([0, 0, 1, 1, 1, 4, 4, 5, 9, 9, 9, 9]).expand(shape)
    yield "gaps", torch.tensor([0, 2, 4, 6, 8, 10, 12, 14, 15, 16, 17, 40]).expand(shape)
    yield "single_valid", torch.tensor([*[-1] * 11, 3]).expand(shape)
    yield "all_invalid", torch.full(shape, -1)
    yield "empty", torch.zeros(2, 8, 2, 0, dtype=torch.int64)


@pytest.mark.parametrize(("name", "blocks"), list(patterns()))
def test_both_ways_to_ranges_agree(name: str, blocks: Tensor) -> None:
    at = torch.tensor([0, 1, 3, 4, 17, 40, 62, 63])
    slow, fast = (of(blocks, 4, 64, at) for of in (ranges_v1, ranges_v2))
    assert torch.equal(slow, fast)
    assert (fast[..., 1] <= at[:, None, None] + 1).all()
    token = torch.arange(64)
    chosen = (blocks[..., None] == token // 4).any(dim=-2) & (token <= at[:, None, None])
    assert torch.equal(ranges_to_mask(fast, 64), chosen.transpose(1, 2))


def test_scores_follow_eq_9() -> None:
    """Of the paper's sizes a block takes 1, 2, 2, 2, 1 of the five compressed keys around it."""
    shared = plain.overlaps(12, 3, Sizes(32, 16, 64, 16, 512), torch.zeros(()))
    assert shared[:, 1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0]


def test_ties_go_to_the_earlier_block_in_every_type() -> None:
    sizes = Sizes(l=4, d=4, l_sel=4, n_sel=5, w=4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = torch.full((1, 1, 1, 10), 0.1, dtype=dtype)
        found = plain.choose_blocks(weights, torch.tensor([39]), torch.zeros(1, 1), sizes)
        assert real(found[0, 0, 0]) == [0, 1, 2, 8, 9]
