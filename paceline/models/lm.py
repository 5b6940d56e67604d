"""A decoder language model: RMSNorm, RoPE, grouped-query attention, SwiGLU, optional tied head.

Shape letters: B batch, T tokens, D model width, H query heads, K key/value heads, E head width,
F width inside SwiGLU, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.lm import LMModel

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal grouped-query attention through torch's SDPA."""

    def __init__(self, config: LMModel) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        kv_dim = self.num_kv_heads * self.head_dim
        # One matrix for q, k and v: one larger product is faster than three.
        self.qkv = nn.Linear(config.dim, config.dim + 2 * kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor]) -> Tensor:
        B, T, D = x_BTD.shape
        H, K, E = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = self.qkv(x_BTD).split([H * E, K * E, K * E], dim=-1)
        q_BHTE = rotate(q.view(B, T, H, E).transpose(1, 2), rope_TE)
        k_BKTE = rotate(k.view(B, T, K, E).transpose(1, 2), rope_TE)
        v_BKTE = v.view(B, T, K, E).transpose(1, 2)
        y_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=K != H
        )
        return self.out(y_BHTE.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    def __init__(self, config: LMModel) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    def __init__(self, config: LMModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = SwiGLU(config)

    def forward(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope_TE)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class LM(nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: LMModel, seq_len: int) -> None:
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        # Tied by having one matrix, not two names for it: moving off meta would part them.
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        for name, table in zip(("rope_cos", "rope_sin"), self._rope_tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        rope_TE = (self.rope_cos[:T], self.rope_sin[:T])
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rope_TE)
        head_VD = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x_BTD), head_VD)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter and buffer in place: what a model built on meta still needs."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        # Residual branches start small, so that depth does not grow the variance (GPT-2).
        for block in self.blocks:
            assert isinstance(block, Block)
            for branch in (block.attention.out, block.ffn.down):
                nn.init.normal_(branch.weight, std=INIT_STD / (2 * len(self.blocks)) ** 0.5)
        cos, sin = self._rope_tables()
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)

    def _rope_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angle, (T, E), with both halves of E alike."""
        E = self.config.head_dim
        frequency = self.config.rope_theta ** (-torch.arange(0, E, 2, dtype=torch.float32) / E)
        angle_TE = torch.outer(torch.arange(self.seq_len, dtype=torch.float32), frequency)
        angle_TE = torch.cat((angle_TE, angle_TE), dim=-1)
        return angle_TE.cos(), angle_TE.sin()


def rotate(x_BHTE: Tensor, rope_TE: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding: pairs (e, e + E/2) turn by their position's angle."""
    cos, sin = (table.to(x_BHTE.dtype) for table in rope_TE)
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat((-second, first), dim=-1) * sin


def flops_per_token(config: LMModel, seq_len: int, causal: bool = True) -> float:
    """Forward and backward FLOPs of a token: 6 per matrix weight, and attention's two products.

    Attention is counted over the whole T x T square, or half of it when `causal`; the embedding
    is a lookup and counts nothing; recomputation in the backward pass is not counted.
    """
    kv_dim = config.num_kv_heads * config.head_dim
    attention = config.dim * (2 * config.dim + 2 * kv_dim)
    ffn = 3 * config.dim * config.hidden_dim
    matrices = config.num_layers * (attention + ffn) + config.dim * config.vocab_size
    square = 12 * config.num_layers * config.dim * seq_len
    return 6 * matrices + square * (0.5 if causal else 1.0)
