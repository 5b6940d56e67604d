"""Our language model as a Llama of transformers, which computes the same: names and shapes differ.

blocks.N.attention.qkv     (D + 2 K E, D)    q_proj, k_proj, v_proj, one below the other
blocks.N.ffn.gate_up       (2 F, D)          gate_proj, up_proj
"""

from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.workloads.hf.model import build_from_config, require_extra
from paceline.workloads.lm.model import LM
from paceline.workloads.meta import on_meta

SAME = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}
OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "tail.norm.weight": "model.norm.weight",
    "tail.head.weight": "lm_head.weight",
}


def as_llama(model: LM) -> nn.Module:
    """Return a LlamaForCausalLM with the weights of this model."""
    if model.impl == "nsa":
        raise ConfigError(
            "no other program has native sparse attention (attention.impl=nsa)\n"
            "hint: `paceline generate` writes text with it"
        )
    with on_meta():
        made = build_from_config("AutoModelForCausalLM", _llama_config(model), "sdpa")
    made.to_empty(device="cpu")
    ours = model.config
    widths = [ours.dim] + 2 * [ours.num_kv_heads * ours.head_dim]
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        found |= _renamed(name, value, widths)
    if ours.tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    problem = made.load_state_dict(found, strict=False)
    if problem.missing_keys or problem.unexpected_keys:
        raise ConfigError(
            f"this model is more than a Llama: {[*problem.missing_keys, *problem.unexpected_keys]}"
        )
    made.tie_weights()  # type: ignore[operator]
    _fill_computed(made)
    return made.eval()


def _llama_config(model: LM) -> Any:
    ours = model.config
    return require_extra().LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.dim,
        intermediate_size=ours.hidden_dim,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        max_position_embeddings=model.seq_len,
        rms_norm_eps=model.tail.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=ours.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _renamed(name: str, value: Tensor, widths: list[int]) -> dict[str, Tensor]:
    if name in OUTSIDE:
        return {OUTSIDE[name]: value}
    _, number, leaf = name.split(".", 2)
    layer = f"model.layers.{number}"
    if leaf == "attention.qkv.weight":
        parts = value.split(widths)
        return {
            f"{layer}.self_attn.{which}_proj.weight": part.contiguous()
            for which, part in zip("qkv", parts, strict=True)
        }
    if leaf == "ffn.gate_up.weight":
        gate, up = value.chunk(2)
        return {
            f"{layer}.mlp.gate_proj.weight": gate.contiguous(),
            f"{layer}.mlp.up_proj.weight": up.contiguous(),
        }
    return {f"{layer}.{SAME.get(leaf, leaf)}": value}


def _fill_computed(model: nn.Module) -> None:
    """Compute the tables of positions, which are in no file."""
    from paceline.workloads.hf.model import init_module

    for name, module in model.named_modules():
        if module._non_persistent_buffers_set:
            init_module(model, name, module)
