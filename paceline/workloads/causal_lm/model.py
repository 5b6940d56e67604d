"""Any causal language model of transformers: built, checked, and its FLOPs counted."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.packing import Rows
from paceline.kernels.cross_entropy import chunked_loss  # and how its FLOPs are counted
from paceline.records import Finding
from paceline.workloads.generation import Request, Writing
from paceline.workloads.hf.model import WHERE, build_from_config, require_extra
from paceline.workloads.meta import on_meta

# Keys that say a model is not a plain decoder: experts, compressed attention, state spaces.
NOT_PLAIN = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "state_size")


def build_causal_lm(config: Any, impl: str, chunk: int = 0) -> nn.Module:
    """Build the model. Its loss is computed `chunk` tokens at a time; 0: all at once."""
    model: Any = build_from_config("AutoModelForCausalLM", config, impl)
    model.loss_chunk = chunk
    return model


# Architectures that keep documents apart when they are given positions which restart, and no mask:
# transformers reads the documents from the positions. tests/unit/test_documents.py proves each;
# some others see the document before (opt, falcon), and are refused.
KEEPS_DOCUMENTS_APART = (
    "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral",
    "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2",
)  # fmt: skip


# Architectures whose logits are the product of the last hidden states with the head, and nothing
# more: no bias, no scale, no cap. tests/unit/test_causal_lm.py proves each.
ONLY_A_HEAD = (
    "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3",
    "smollm3", "starcoder2",
)  # fmt: skip


def loss_sum(model: Any, rows: Rows) -> Tensor:
    """Return the cross entropy summed over tokens. The model is given no labels, which it would
    shift by itself: `split_rows` has shifted them. With `model.loss_chunk` the logits of so many
    tokens exist at a time."""
    apart = {} if rows.positions_BT is None else {"position_ids": rows.positions_BT}
    targets = rows.targets_BT.flatten()
    if model.loss_chunk:
        hidden = model.base_model(input_ids=rows.inputs_BT, use_cache=False, **apart)
        return _chunked_loss(model, hidden.last_hidden_state, targets)
    logits_BTV = model(input_ids=rows.inputs_BT, use_cache=False, **apart).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets, reduction="sum")


def _chunked_loss(model: Any, hidden_BTD: Tensor, targets: Tensor) -> Tensor:
    device = hidden_BTD.device.type
    if torch.is_autocast_enabled(device):  # as the head, which is a Linear, would
        hidden_BTD = hidden_BTD.to(torch.get_autocast_dtype(device))
    head_VD = model.get_output_embeddings().weight
    return chunked_loss(hidden_BTD.flatten(0, 1), head_VD, targets, model.loss_chunk)


@torch.no_grad()
def generate(model: Any, request: Request) -> list[list[int]]:
    """Continue the prompts by transformers' own `generate`, with the model's own cache. Tokens are
    chosen by us, as for any other model: it only sees the one that was."""
    library, device = require_extra(), next(model.parameters()).device
    request.require_ids(model.config.vocab_size)
    writing, length = Writing(request), max(map(len, request.prompts))

    def choose(input_ids: Tensor, scores_BV: Tensor) -> Tensor:
        chosen_B = writing.take(scores_BV)
        return torch.full_like(scores_BV, -torch.inf).scatter(1, chosen_B[:, None], 0.0)

    def has_ended(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor(writing.ended, device=input_ids.device)

    pads = [length - len(ids) for ids in request.prompts]
    rows = [[0] * pad + list(ids) for pad, ids in zip(pads, request.prompts, strict=True)]
    masks = [[0] * pad + [1] * (length - pad) for pad in pads]
    asked = library.GenerationConfig(
        max_new_tokens=request.room(getattr(model.config, "max_position_embeddings", None)),
        do_sample=False,
        use_cache=request.use_cache,
    )
    kept, model.generation_config = model.generation_config, asked  # else its own fill the gaps
    try:
        model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            generation_config=asked,
            logits_processor=[choose],
            stopping_criteria=[has_ended],
        )
    finally:
        model.generation_config = kept
    return writing.rows


def head_width(config: Any) -> int | None:
    """Return the width of an attention head; None where the config has no heads."""
    width = getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    return int(width or config.hidden_size // heads) if heads else None


def flops_per_token(config: Any, seq_len: int, causal: bool = True) -> float | None:
    """Return the forward and backward FLOPs per token, as in lm/model.py: 6 per weight of a matrix,
    and half the square of attention. None where the model is more than a plain decoder."""
    head = head_width(config)
    if head is None or not _is_plain(config, seq_len):
        return None
    with on_meta():
        matrices = _matrix_numel(build_causal_lm(config, "eager"))
    if matrices is None:
        return None
    square = 12 * config.num_hidden_layers * config.num_attention_heads * head * seq_len
    return 6 * matrices + square * (0.5 if causal else 1.0)


def _is_plain(config: Any, seq_len: int) -> bool:
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    has_window = window is not None and window < seq_len and "full_attention" not in kinds
    other = kinds - {"full_attention"}
    return not (has_window or other or any(getattr(config, key, None) for key in NOT_PLAIN))


def _matrix_numel(model: nn.Module) -> int | None:
    """Count the weights that every token is multiplied with; None where some do not look like that.
    A tied head is a product too; embeddings are lookups."""
    total, seen = 0, set()
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) or kind == "Conv1D":
            total += module.weight.numel()  # type: ignore[operator]
            seen.add(id(module.weight))
        elif isinstance(module, nn.Embedding):
            seen.add(id(module.weight))
    hidden = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in seen]
    return None if hidden else total


def check_shape(config: Any, seq_len: int, has_mask: bool) -> Iterator[Finding]:
    """Check that this model can be trained on samples of `seq_len`, with documents apart if it
    `has_mask`."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", True) is False:
        yield Finding.error(
            "model.hf",
            f"{config.model_type} sees what comes after a token: it is not a causal model",
            hint="choose another, or set model.hf_config.is_decoder=true where it has that key",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        yield Finding.error(
            "data.seq_len",
            f"{seq_len} tokens are more than the model's {longest} positions",
            hint=f"set it to {longest} or less, or {WHERE}.max_position_embeddings to {seq_len}",
        )
    if has_mask and config.model_type not in KEEPS_DOCUMENTS_APART:
        yield Finding.error(
            "data.document_mask",
            f"{config.model_type} is not known to keep packed documents apart; known are"
            f" {', '.join(KEEPS_DOCUMENTS_APART)}",
            hint="set data.document_mask=false, or data.pack=padded",
        )
