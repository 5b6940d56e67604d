"""The sizes of native sparse attention, and what follows from them. No torch here."""

from dataclasses import dataclass
from typing import Self

SMALLEST_BLOCK = 16  # tokens that a tile of the tensor cores takes at once
WIDEST_HEAD = 256


@dataclass(frozen=True)
class Sizes:
    """A compressed key stands for `l` tokens, and one begins every `d`; blocks of `l_sel` tokens
    are selected, `n_sel` of them per query; the window has `w` tokens."""

    l: int = 32  # noqa: E741  the paper's letters
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    w: int = 512

    @classmethod
    def of(cls, section: object) -> Self:
        """Return the sizes that a config's `attention.nsa` asks for."""
        return cls(*(getattr(section, name) for name in cls.__dataclass_fields__))

    def no_kernels(self, head_dim: int) -> str:
        """Return why no Triton kernel supports these sizes; empty if they do."""
        each = self.l_sel // self.d
        if self.l_sel < SMALLEST_BLOCK or self.l_sel & (self.l_sel - 1) or each & (each - 1):
            return (
                f"l_sel {self.l_sel} over d {self.d}: not powers of two, or below {SMALLEST_BLOCK}"
            )
        return f"heads of {head_dim} are above {WIDEST_HEAD}" if head_dim > WIDEST_HEAD else ""

    def num_compressed(self, num_tokens: int) -> int:
        """Return how many whole compression blocks `num_tokens` tokens have."""
        return 0 if num_tokens < self.l else (num_tokens - self.l) // self.d + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many selection blocks `num_tokens` tokens begin."""
        return -(-num_tokens // self.l_sel)

    def seen(self, num_tokens: int) -> tuple[float, float, float]:
        """Return how many keys a query of a sequence sees in the compressed, the selected and the
        window branch, on average; keys of a chosen block that lie ahead are not counted."""
        T, most = num_tokens, self.n_sel * self.l_sel
        # The sums of all queries, not one by one: T may be a million. A query that ends k tokens
        # behind the first block sees k // d + 1 of them.
        ends = max(0, T - self.l + 1)
        compressed = ends + _sum_to(ends // self.d) * self.d + ends // self.d * (ends % self.d)
        # Before `most` tokens all are chosen; after, the block of the query is half full.
        late = max(0, T - most)
        rest = late // self.l_sel * _sum_to(self.l_sel) + _sum_to(late % self.l_sel)
        selected = _sum_to(min(T, most) + 1) + late * (most - self.l_sel + 1) + rest
        window = _sum_to(min(T, self.w) + 1) + max(0, T - self.w) * self.w
        return compressed / T, selected / T, window / T


def _sum_to(end: int) -> int:
    """Return 0 + 1 + ... + (end - 1)."""
    return end * (end - 1) // 2
