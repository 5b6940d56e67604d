"""The language-model workload: next-token prediction on text or on synthetic tokens.

torch is imported where it is used, so that `paceline recipes` can read the schema without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.section import Positive, Section
from paceline.data.base import Dataset, TextData
from paceline.metrics import LOSS, bits_per_byte, perplexity
from paceline.records import Finding
from paceline.workloads.base import Split, Workload, prepared_path

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.workloads.generation import Request

BYTE_VOCABULARY = 257  # 256 bytes and the mark between documents


class LMModel(Section):
    vocab_size: Positive = Field(320, description="Rows of the embedding; bytes need 257.")
    dim: Positive = Field(128, description="Width of the residual stream.")
    num_layers: Annotated[int, Field(ge=1, le=1000)] = Field(4, description="Transformer blocks.")
    num_heads: Positive = Field(4, description="Query heads.")
    num_kv_heads: Positive = Field(4, description="Key and value heads; divides num_heads.")
    ffn_dim: Literal["auto"] | Positive = Field(
        "auto", description="Width inside SwiGLU. auto: 8/3 dim, rounded up to 64."
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(10000.0, description="Base of RoPE.")
    tied: bool = Field(False, description="The output head is the embedding, transposed.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim {self.dim} over num_heads {self.num_heads} must be an even whole number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Width inside SwiGLU, in channels."""
        if self.ffn_dim != "auto":
            return self.ffn_dim
        return -(-8 * self.dim // 3 // 64) * 64


class LanguageModel(Workload):
    Model = LMModel
    Data = TextData
    unit = "tokens"
    attention = "causal"
    meta_init = True
    own_attention = frozenset({"eager", "flex"})

    def build_model(self, config: Any) -> nn.Module:
        from paceline.workloads.lm.model import LM

        return LM(config.model, config.data.seq_len, config.attention.impl)

    def init_weights(self, model: nn.Module, name: str, module: nn.Module) -> None:
        model.init_module(name, module)  # type: ignore[operator]

    def head_dim(self, config: Any) -> int:
        return int(config.model.head_dim)

    def build_data(self, config: Any, split: Split) -> Dataset | None:
        from paceline.data.synthetic import SyntheticTokens
        from paceline.data.text import open_tokens

        if config.data.source == "synthetic":
            if split == "val":
                return None
            return SyntheticTokens(
                config.data.synthetic_samples,
                config.data.seq_len,
                config.model.vocab_size,
                config.train.seed,
            )
        return open_tokens(prepared_path(self.prepared, "shards"), config.data.seq_len, split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        tokens_BT1 = batch["tokens"]  # T + 1 tokens: inputs are the first T, targets the last T
        targets_BT = tokens_BT1[:, 1:].long()
        return model(tokens_BT1[:, :-1].long(), targets_BT), targets_BT.numel()

    def metrics(self, found: Mapping[str, Any]) -> dict[str, float]:
        if LOSS not in found:  # a subclass may evaluate something else
            return {}
        numbers = {"perplexity": perplexity(found[LOSS])}
        if "shards" in self.prepared:  # its tokens are bytes of text
            numbers["bits_per_byte"] = bits_per_byte(found[LOSS])
        return numbers

    def generate(self, model: nn.Module, request: Request) -> list[list[int]]:
        from paceline.workloads.lm.model import generate

        return generate(model, request)  # type: ignore[arg-type]

    def units_per_sample(self, config: Any) -> int:
        return int(config.data.seq_len)

    def flops(self, config: Any) -> float:
        from paceline.workloads.lm.model import flops_per_token

        seq_len: int = config.data.seq_len
        return flops_per_token(config.model, seq_len) * seq_len

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        from paceline.data.text import prepare_tokens

        if config.data.source == "synthetic":
            return {}
        shards, manifest = prepare_tokens(config.data, say)
        return {"shards": str(shards), "unigram_entropy": manifest.unigram_entropy}

    def problems(self, config: Any) -> Sequence[Finding]:
        vocab_size = config.model.vocab_size
        if config.data.source == "synthetic" or vocab_size >= BYTE_VOCABULARY:
            return ()
        return (
            Finding(
                severity="error",
                where="model.vocab_size",
                what=f"{vocab_size} rows cannot hold byte tokens, which need {BYTE_VOCABULARY}",
                hint=f"set model.vocab_size={BYTE_VOCABULARY} or more",
            ),
        )
