"""A decoder language model: RMSNorm, RoPE, grouped-query attention, SwiGLU, optional tied head.

Shape letters: B batch, T tokens, D model width, H query heads, K key/value heads, E head
width, F width inside SwiGLU, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.products import is_cast_whole, linear, project
from paceline.workloads.generation import Request, Writing
from paceline.workloads.lm.attend import Past, attend, keep_apart
from paceline.workloads.lm.workload import LMModel

INIT_STD = 0.02


class Norm(nn.RMSNorm):
    """RMSNorm in the type of its input: with an fp32 weight torch would leave its fused kernel."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.normalized_shape, self.weight.to(x_BTD.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LMModel, impl: str, kernels: str) -> None:
        super().__init__()
        self.impl, self.kernels = impl, kernels
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        kv_dim = self.num_kv_heads * self.head_dim
        # One matrix for q, k and v: one larger product is faster than three.
        self.qkv = nn.Linear(config.dim, config.dim + 2 * kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        qkv_BTX = project(self.qkv, x_BTD, self.kernels)
        q_BHTE, k_BKTE, v_BKTE = self.split(qkv_BTX, rope_TE)
        y_BHTE = attend(self.impl, q_BHTE, k_BKTE, v_BKTE, mask)
        return project(self.out, y_BHTE.transpose(1, 2).flatten(2), self.kernels)

    def split(self, qkv_BTX: Tensor, rope_TE: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return queries, keys and values by heads, the first two turned by their positions."""
        B, T, _ = qkv_BTX.shape
        H, K, E = self.num_heads, self.num_kv_heads, self.head_dim
        if self.kernels == "triton" and rope_TE[0].dim() == 2:  # one position for all of a column
            from paceline.kernels.rope import split_rotated

            return split_rotated(qkv_BTX, rope_TE, H, K)
        q, k, v = qkv_BTX.split([H * E, K * E, K * E], dim=-1)
        q_BHTE = rotate(q.view(B, T, H, E).transpose(1, 2), rope_TE)
        k_BKTE = rotate(k.view(B, T, K, E).transpose(1, 2), rope_TE)
        return q_BHTE, k_BKTE, v.view(B, T, K, E).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, config: LMModel, kernels: str) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_up_BTF = project(self.gate_up, x_BTD, self.kernels)
        if self.kernels == "triton" and type(self.down) is nn.Linear:
            from paceline.kernels.swiglu import swiglu_down

            return swiglu_down(gate_up_BTF, self.down.weight)
        takes_parts = getattr(self.down, "takes_parts", False)  # strategies/fused.py
        if self.kernels == "triton" and (takes_parts or is_cast_whole(self.down)):
            from paceline.kernels.swiglu import swiglu

            return project(self.down, swiglu(gate_up_BTF), self.kernels)
        gate_BTF, up_BTF = gate_up_BTF.chunk(2, dim=-1)
        return self.down(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    def __init__(self, config: LMModel, impl: str, kernels: str = "torch") -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim)
        self.attention = Attention(config, impl, kernels)
        self.ffn_norm = Norm(config.dim)
        self.ffn = SwiGLU(config, kernels)

    def forward(self, x_BTD: Tensor, rope_TE: tuple[Tensor, Tensor], mask: Any = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope_TE, mask)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Tail(nn.Module):
    """From the last block to logits, or to the summed loss, so that one graph can hold both. The
    loss of `chunk` tokens at a time never has the logits of all; 0: of all at once."""

    def __init__(self, config: LMModel, kernels: str = "torch", chunk: int = 0) -> None:
        super().__init__()
        self.kernels, self.chunk = kernels, chunk
        self.norm = Norm(config.dim)
        # Tied by having one matrix, not two names for it: moving off meta would part them.
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x_BTD: Tensor, embedding_VD: Tensor, targets_BT: Tensor | None) -> Tensor:
        head_VD = embedding_VD if self.head is None else self.head.weight
        x_BTD = self.norm(x_BTD)
        if targets_BT is not None and self.chunk and x_BTD.dtype != torch.float16:
            from paceline.kernels.cross_entropy import chunked_loss

            return chunked_loss(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten(), self.chunk)
        if self.kernels == "triton":
            logits_BTV = linear(x_BTD, head_VD)
        else:
            logits_BTV = F.linear(x_BTD, head_VD)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum"
        )


class LM(nn.Module):
    """Token ids (B, T) to logits (B, T, V); with the targets, to the loss summed over tokens. With
    the tokens' positions in their documents, documents do not see each other. With a past the
    tokens stand behind it, and only the last one's logits are computed (B, 1, V)."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        config: LMModel,
        seq_len: int,
        impl: str = "sdpa",
        kernels: str = "torch",
        chunk: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.seq_len, self.impl = config, seq_len, impl
        self.tail_reads = ("embedding",) if config.tied else ()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, impl, kernels) for _ in range(config.num_layers))
        self.tail = Tail(config, kernels, chunk)
        for name, table in zip(("rope_cos", "rope_sin"), self._new_tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        T = tokens_BT.shape[1]
        rope_TE = (self.rope_cos[:T], self.rope_sin[:T])
        masks: Sequence[Any] = [None] * len(self.blocks)
        if past is not None:
            positions_BT, masks = past.begin(T), past.layers
        elif positions_BT is not None:
            masks = [keep_apart(self.impl, positions_BT)] * len(self.blocks)
        if positions_BT is not None:
            # (B, 1, T, E), the same for all heads
            rope_TE = (self.rope_cos[positions_BT][:, None], self.rope_sin[positions_BT][:, None])
        x_BTD = self.embedding(tokens_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):
            # The residual stream too: in fp32 it would double what every norm and sum moves.
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        for block, mask in zip(self.blocks, masks, strict=True):
            x_BTD = block(x_BTD, rope_TE, mask)
        if past is not None:
            x_BTD = x_BTD[:, -1:]
        return self.tail(x_BTD, self.embedding.weight, targets_BT)

    def new_past(self, pads_B: Tensor, num_places: int) -> Past:
        """Return an empty past for a text that is to be written."""
        return Past(len(self.blocks), pads_B, num_places)

    @torch.no_grad()
    def init_module(self, name: str, module: nn.Module) -> None:
        """Fill one module's own parameters and buffers: what a model built on meta still needs."""
        if isinstance(module, nn.Linear | nn.Embedding):
            # Residual branches start small, so that depth does not grow the variance (GPT-2).
            is_branch = name.endswith(("attention.out", "ffn.down"))
            shrink = (2 * self.config.num_layers) ** 0.5 if is_branch else 1.0
            nn.init.normal_(module.weight, std=INIT_STD / shrink)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif module is self:
            cos, sin = self._rope_tables()
            self.rope_cos.copy_(cos)
            self.rope_sin.copy_(sin)

    def _new_tables(self) -> tuple[Tensor, Tensor]:
        """Return the tables on the default device. On meta they are not filled, which takes what
        they take: a plan has no room for them, and `init_module` fills them where they are used."""
        device = torch.get_default_device()
        if device.type != "meta":
            cos, sin = self._rope_tables()
            return cos.to(device), sin.to(device)
        shape = (self.seq_len, 2 * len(range(0, self.config.head_dim, 2)))
        return torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)

    def _rope_tables(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of every position's angle, (T, E), with both halves of E alike. On
        the CPU: so they are the same on every device, and on meta torch would load its compiler."""
        with torch.device("cpu"):
            E = self.config.head_dim
            frequency = self.config.rope_theta ** (-torch.arange(0, E, 2, dtype=torch.float32) / E)
            angle_TE = torch.outer(torch.arange(self.seq_len, dtype=torch.float32), frequency)
            angle_TE = torch.cat((angle_TE, angle_TE), dim=-1)
            return angle_TE.cos(), angle_TE.sin()


@torch.no_grad()
def generate(model: LM, request: Request) -> list[list[int]]:
    """Continue the prompts; return the new ids of each. Without the cache all is computed again for
    every token."""
    request.require_ids(model.config.vocab_size)
    writing, device = Writing(request), model.rope_cos.device
    length = max(map(len, request.prompts))
    room = request.room(model.seq_len)
    pads_B = torch.tensor([length - len(ids) for ids in request.prompts], device=device)
    rows = [[0] * (length - len(ids)) + list(ids) for ids in request.prompts]
    all_BT = new_BT = torch.tensor(rows, device=device)
    past = model.new_past(pads_B, length + room)
    for _ in range(room):
        ids_B = writing.take(model(new_BT, past=past)[:, -1])
        if writing.is_over:
            break
        new_BT = ids_B[:, None]
        if not request.use_cache:
            all_BT = new_BT = torch.cat((all_BT, new_BT), dim=1)
            past = model.new_past(pads_B, length + room)
    return writing.rows


def rotate(x_BHTE: Tensor, rope_TE: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding: pairs (e, e + E/2) turn by their position's angle."""
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
