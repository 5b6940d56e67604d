"""The language model with native sparse attention: `attention.impl=nsa`.

    x --> q, and k, v of each branch --> rotated --> compressed, selected, window --> gates --> out

`paceline/attention` has the attention itself. Here are the weights around it, the cache of a text
that is being written, and what the layers tell of their gates and choices.

Shape letters as in model.py, with G for the groups of key/value heads.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.attention import stats
from paceline.attention.decode import Cache
from paceline.attention.marks import mark
from paceline.attention.nsa import BRANCHES, Attended, Keys, Settings, attend
from paceline.attention.plain import mean_blocks
from paceline.attention.sizes import Sizes
from paceline.workloads.lm.attend import Past
from paceline.workloads.lm.model import LM, rotate
from paceline.workloads.lm.workload import LMModel

# Gates begin nearly open, sigmoid(2) = 0.88. Half open, every branch learns from half its gradient:
# copying is learned after 164 steps so, after 135 nearly open, densely after 145
# (benchmarks/nsa_learns.py copy).
OPEN = 2.0


@dataclass(frozen=True)
class Sparse:
    """What `attention.nsa` asks for, as a layer is built from it."""

    settings: Settings = Settings()
    phi: str = "avg"
    stats: bool = True

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return it from a run's config."""
        asked = config.attention.nsa
        nvtx = bool(getattr(config.observe, "nvtx", False))
        settings = Settings(Sizes.of(asked), asked.ranges, asked.kernels, nvtx)
        return cls(settings, asked.phi, asked.stats)


class Compress(nn.Module):
    """Turns the l tokens of a compression block into one: their mean, and with phi=mlp what a small
    network adds to it, which knows where in the block a token stands."""

    def __init__(self, sizes: Sizes, head_dim: int, phi: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = nn.Embedding(sizes.l, head_dim) if phi == "mlp" else None
        if phi == "mlp":
            self.up = nn.Linear(sizes.l * head_dim, 2 * head_dim, bias=False)
            self.down = nn.Linear(2 * head_dim, head_dim, bias=False)

    def forward(self, x_BSGE: Tensor) -> Tensor:
        mean_BMGE = mean_blocks(x_BSGE, self.sizes)
        if self.place is None or mean_BMGE.shape[1] == 0:
            return mean_BMGE
        block_BMGEL = x_BSGE.unfold(1, self.sizes.l, self.sizes.d)
        block_BMGEL = block_BMGEL + self.place.weight.t().to(x_BSGE.dtype)
        return mean_BMGE + self.down(F.silu(self.up(block_BMGEL.flatten(-2))))


class SparseAttention(nn.Module):
    """Causal grouped-query attention by three branches. `stats` holds what the last forward pass
    was like (paceline/attention/stats.py)."""

    stats: Tensor

    def __init__(self, config: LMModel, sparse: Sparse) -> None:
        super().__init__()
        self.sparse = sparse
        self.num_heads, self.num_groups = config.num_heads, config.num_kv_heads
        self.head_dim = E = config.head_dim
        kv_dim = 2 * len(BRANCHES) * self.num_groups * E
        self.qkv = nn.Linear(config.dim, config.dim + kv_dim, bias=False)
        self.gate_in = nn.Linear(config.dim, E, bias=False)
        self.gate_out = nn.Linear(E, len(BRANCHES) * self.num_heads)
        self.compress_k = Compress(sparse.settings.sizes, E, sparse.phi)
        self.compress_v = Compress(sparse.settings.sizes, E, sparse.phi)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.register_buffer("stats", torch.zeros(len(stats.NAMES)), persistent=False)

    def forward(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        B, T, D = x_BTD.shape
        settings = self.sparse.settings
        with mark("projections+rope", x_BTD, settings.nvtx):
            q_BTHE, raw = self._project(x_BTD, rope_TE)
        gates_BTH3 = self._gates(x_BTD)
        if isinstance(mask, SparseSeen):
            found = mask.attend(self, q_BTHE, raw, gates_BTH3)
        else:
            found = attend(q_BTHE, self.compressed(raw), gates_BTH3, mask, settings)
            if self.sparse.stats:
                # Written, not added: a block that is recomputed says the same again.
                self.stats.copy_(stats.measure(gates_BTH3, found.blocks, settings.sizes.l_sel))
        return self.out(found.out.reshape(B, T, D))

    def _project(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor]) -> tuple[Tensor, Keys]:
        """Return queries, and keys and values of each branch; keys are rotated as queries are."""
        B, T, D = x_BTD.shape
        G, E = self.num_groups, self.head_dim
        q, kv = self.qkv(x_BTD).split([D, 2 * len(BRANCHES) * G * E], dim=-1)
        rope = tuple(table.transpose(-3, -2) if table.dim() == 4 else table[:, None]
                     for table in rope_TE)  # fmt: skip
        k_BTXE, v_BTXE = kv.view(B, T, 2, len(BRANCHES) * G, E).unbind(dim=2)
        q_BTHE = rotate(q.view(B, T, -1, E), rope)  # type: ignore[arg-type]
        k_BTXE = rotate(k_BTXE, rope)  # type: ignore[arg-type]
        ks, vs = k_BTXE.chunk(len(BRANCHES), dim=2), v_BTXE.chunk(len(BRANCHES), dim=2)
        return q_BTHE, Keys(*(x for pair in zip(ks, vs, strict=True) for x in pair))

    def _gates(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        logits = self.gate_out(F.silu(self.gate_in(x_BTD)))
        return torch.sigmoid(logits).view(B, T, self.num_heads, len(BRANCHES))

    def compressed(self, raw: Keys) -> Keys:
        """Return the keys and values with those of the first branch compressed."""
        return raw._replace(k_cmp=self.compress_k(raw.k_cmp), v_cmp=self.compress_v(raw.v_cmp))


class SparseLM(LM):
    """An LM whose layers attend by three branches."""

    def __init__(self, config: LMModel, seq_len: int, sparse: Sparse, **more: Any) -> None:
        super().__init__(config, seq_len, "nsa", **more)
        for block in self.blocks:
            block.attention = SparseAttention(config, sparse)

    def init_module(self, name: str, module: nn.Module) -> None:
        super().init_module(name, module)
        if isinstance(module, SparseAttention):
            module.stats.zero_()
        elif name.endswith("gate_out"):
            nn.init.constant_(module.bias, OPEN)  # type: ignore[arg-type]

    def new_past(self, pads_B: Tensor, num_places: int) -> Past:
        return SparsePast(len(self.blocks), pads_B, num_places)

    def told(self) -> dict[str, tuple[Tensor, float]]:
        """Return what the layers of this rank tell of the last forward pass, as means."""
        layers: list[Any] = [block.attention for block in self.blocks]
        if not self.training or not layers[0].sparse.stats:
            return {}
        kept = [layer.stats for layer in layers if not layer.stats.is_meta]
        means = torch.stack(kept).mean(dim=0)
        return {name: (value, 1.0) for name, value in zip(stats.NAMES, means, strict=True)}


def sparse_flops_per_token(config: LMModel, seq_len: int, asked: Any) -> float:
    """Forward and backward FLOPs of a token: 6 per matrix weight, 12 per head, channel and key that
    a query sees. Recomputation, as that of scores for the choice, is not counted."""
    E, G, z = config.head_dim, config.num_kv_heads, Sizes.of(asked)
    projections = config.dim * (2 * config.dim + 2 * len(BRANCHES) * G * E)
    gates = config.dim * E + E * len(BRANCHES) * config.num_heads
    network = (z.l + 1) * 2 * E * E if asked.phi == "mlp" else 0  # of each compressed key or value
    compression = 2 * G * network * z.num_compressed(seq_len) / seq_len
    ffn = 3 * config.dim * config.hidden_dim
    matrices = config.num_layers * (projections + gates + compression + ffn)
    keys = sum(z.seen(seq_len))
    attention = 12 * config.num_layers * config.dim * keys
    return 6 * (matrices + config.dim * config.vocab_size) + attention


class SparsePast(Past):
    """The tokens so far. Rows of unequal length end together, as in `Past`; caches begin at each
    row's first token, so that its blocks lie where they lay in training."""

    def __init__(self, num_layers: int, pads_B: Tensor, num_places: int) -> None:
        super().__init__(num_layers, pads_B, num_places)
        self.layers = [SparseSeen(self) for _ in range(num_layers)]  # type: ignore[misc]

    def begin(self, T: int) -> Tensor:
        query_T = torch.arange(self.num_seen, self.num_seen + T, device=self.pads_B.device)
        self.num_seen += T
        return (query_T - self.pads_B[:, None]).clamp(min=0)


class SparseSeen:
    """One layer's part of a `SparsePast`."""

    def __init__(self, past: SparsePast) -> None:
        self.past = past
        self.cache: Cache | None = None

    def attend(
        self, layer: SparseAttention, q_BTHE: Tensor, raw: Keys, gates_BTH3: Tensor
    ) -> Attended:
        """Attend from new tokens to all that are seen, and keep them: a prompt, then one token at a
        time."""
        past, settings = self.past, layer.sparse.settings
        if self.cache is not None:
            at_B = past.num_seen - 1 - past.pads_B
            return self.cache.attend(q_BTHE, raw, gates_BTH3, at_B, past.num_seen)
        # To the front of each row, where the places before its first token were. What is then
        # behind its last one is seen by none that counts.
        T = q_BTHE.shape[1]
        place_T = torch.arange(T, device=past.pads_B.device)
        ahead_BT, back_BT = ((place_T + sign * past.pads_B[:, None]) % T for sign in (1, -1))
        raw = Keys(*(_moved(x, ahead_BT) for x in raw))
        keys = layer.compressed(raw)
        q_BTHE, gates_BTH3 = _moved(q_BTHE, ahead_BT), _moved(gates_BTH3, ahead_BT)
        found = attend(q_BTHE, keys, gates_BTH3, None, settings)
        self.cache = Cache(
            settings.sizes, past.num_places, lambda k, v: (layer.compress_k(k), layer.compress_v(v))
        )
        self.cache.fill(raw, keys, T - past.pads_B)
        return Attended(*(_moved(x, back_BT) for x in found))


def _moved(x_BTXE: Tensor, place_BT: Tensor) -> Tensor:
    """Take the tokens of each row in another order."""
    return x_BTXE.gather(1, place_BT[..., None, None].expand(-1, -1, *x_BTXE.shape[2:]))
