"""The `model` section of the language-model workload. Its `data` section is data/settings.py."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.schema import Positive, Section


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
