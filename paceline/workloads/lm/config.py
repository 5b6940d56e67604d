"""The `model` and `data` sections of the language-model workload."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.schema import DataConfig, Positive, Section


class LMModel(Section):
    vocab_size: Positive = Field(320, description="Rows of the embedding; bytes need 257.")
    dim: Positive = Field(128, description="Width of the residual stream.")
    num_layers: Positive = Field(4, description="Transformer blocks.")
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


class LMData(DataConfig):
    source: str = Field(
        "stdlib",
        description="synthetic, stdlib (Python's own sources), or a file or folder of text or"
        " JSONL.",
    )
    seq_len: Positive = Field(256, description="Tokens per sample.")
    max_files: Literal["all"] | Positive = Field(
        "all", description="Read only this many files of the source."
    )
    text_field: str = Field("text", description="The field of a JSONL row that holds the text.")
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Share of the documents kept apart for validation."
    )
    cache_dir: str = Field(
        "~/.cache/paceline", description="Where token shards are kept between runs."
    )
    synthetic_samples: Positive = Field(
        1_000_000, description="Length of the synthetic data set, in samples."
    )
