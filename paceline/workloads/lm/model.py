"""A decoder language model: RMSNorm, RoPE, grouped-query attention, SwiGLU, optional tied head.

Attention goes by name: spelt out, through torch's SDPA, or through FlexAttention. Which kernel SDPA
takes is a setting of the process (train/torch_settings.py:apply_policy), not of the call.

Shape letters: B batch, T tokens, S keys, D model width, H query heads, K key/value heads, E head
width, F width inside SwiGLU, V vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.products import is_cast_whole, linear, project
from paceline.workloads.generation import Request, Writing
from paceline.workloads.lm.workload import LMModel

INIT_STD = 0.02


def attend(impl: str, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Any = None) -> Tensor:
    """Compute causal attention, (B, H, T, E). `impl` is eager, flex, or any name that SDPA
    serves; `mask` is what `keep_apart` returned for it, or a layer's `Seen`, where tokens before
    these are known."""
    if isinstance(mask, Seen):
        return mask.attend(q_BHTE, k_BKSE, v_BKSE)
    if impl == "eager":
        return _spelt_out(q_BHTE, k_BKSE, v_BKSE, mask)
    is_grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    if impl == "flex":
        return _flex(q_BHTE, k_BKSE, v_BKSE, is_grouped, mask)
    if impl == "efficient" and is_grouped:  # the one kernel that does not know groups
        num_groups = q_BHTE.shape[1] // k_BKSE.shape[1]
        k_BKSE, v_BKSE = (x.repeat_interleave(num_groups, dim=1) for x in (k_BKSE, v_BKSE))
        is_grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def keep_apart(impl: str, positions_BT: Tensor) -> Any:
    """Return the mask of attention that is causal and stays inside documents, whose tokens are
    counted from 0: (B, 1, T, T), True where a query may see a key; for flex a block mask, for
    nsa where each token's document begins (B, T)."""
    T = positions_BT.shape[1]
    if impl == "nsa":  # the first token of each one's document
        return (torch.arange(T, device=positions_BT.device) - positions_BT).int()
    document_BT = (positions_BT == 0).cumsum(dim=1)
    if impl == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_BT[b, query] == document_BT[b, key])

        return create_block_mask(
            sees, len(positions_BT), None, T, T, device=str(positions_BT.device)
        )
    is_past_TT = torch.ones(T, T, dtype=torch.bool, device=positions_BT.device).tril()
    is_same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return (is_same_BTT & is_past_TT)[:, None]


def _spelt_out(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None) -> Tensor:
    """Attend by two products and a softmax, in fp32 where it would overflow."""
    H, K = q_BHTE.shape[1], k_BKSE.shape[1]
    T, S, E = q_BHTE.shape[2], k_BKSE.shape[2], q_BHTE.shape[3]
    k_BHSE = k_BKSE.repeat_interleave(H // K, dim=1)
    v_BHSE = v_BKSE.repeat_interleave(H // K, dim=1)
    scores_BHTS = (q_BHTE @ k_BHSE.transpose(-2, -1)).float() * E**-0.5
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTE.device).tril()
    weights_BHTS = scores_BHTS.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights_BHTS.to(v_BHSE.dtype) @ v_BHSE


def _flex(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, is_grouped: bool, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # with it comes the compiler

    mask = mask or _causal_mask(q_BHTE.shape[2], q_BHTE.device)
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return kernel(q_BHTE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=is_grouped)


@cache
def _compiled_flex() -> Any:
    """Return flex_attention compiled: without a compiler it holds the whole square of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(num_tokens: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_past(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_past, None, None, num_tokens, num_tokens, device=str(device))


class Past:
    """Keys and values of the tokens so far, of all layers: a new token then costs one position.

    Rows of unequal length end together. Before a row's first token are `pads_B` places that it does
    not see; its positions count from there.
    """

    def __init__(self, num_layers: int, pads_B: Tensor, num_places: int) -> None:
        self.pads_B, self.num_places, self.num_seen = pads_B, num_places, 0
        self.has_pads = bool(pads_B.any())
        self.layers = [Seen(self) for _ in range(num_layers)]
        self.mask: Tensor | None = None

    def begin(self, T: int) -> Tensor:
        """Make room for T more tokens; return their positions (B, T)."""
        first, S = self.num_seen, self.num_seen + T
        self.num_seen = S
        query_T = torch.arange(first, S, device=self.pads_B.device)
        if T > 1 or self.has_pads:
            key_S = torch.arange(S, device=self.pads_B.device)
            is_past_TS = key_S <= query_T[:, None]
            # A place before the first token sees itself: a softmax over nothing would be NaN.
            is_own_TS = key_S == query_T[:, None]
            is_real_BTS = (key_S >= self.pads_B[:, None, None]) | is_own_TS
            self.mask = (is_past_TS & is_real_BTS)[:, None]
        else:
            self.mask = None  # the newest token sees all
        return (query_T - self.pads_B[:, None]).clamp(min=0)


class Seen:
    """One layer's part of a `Past`."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self.keys_BKSE = self.values_BKSE = torch.empty(0)

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Attend from the new tokens to all that are seen, and keep the new ones."""
        B, K, T, E = k_BKTE.shape
        if not self.keys_BKSE.numel():
            self.keys_BKSE, self.values_BKSE = (
                x.new_empty(B, K, self.past.num_places, E) for x in (k_BKTE, v_BKTE)
            )
        S = self.past.num_seen
        self.keys_BKSE[:, :, S - T : S] = k_BKTE
        self.values_BKSE[:, :, S - T : S] = v_BKTE
        return F.scaled_dot_product_attention(
            q_BHTE,
            self.keys_BKSE[:, :, :S],
            self.values_BKSE[:, :, :S],
            self.past.mask,
            enable_gqa=q_BHTE.shape[1] != K,
        )


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
        if self.kernels == "triton" and is_cast_whole(self.down):
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
        for name, table in zip(("rope_cos", "rope_sin"), self._rope_tables(), strict=True):
            self.register_buffer(name, table.to(torch.get_default_device()), persistent=False)

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
