"""The `model` and `data` sections of the workload that strategies are proven on."""

from typing import Annotated

from pydantic import Field

from paceline.config.schema import DataConfig, Positive
from paceline.workloads.lm.config import LMModel


class UnevenModel(LMModel):
    """Sizes that two and four ranks cannot share evenly: padding is part of the proof."""

    vocab_size: Positive = Field(67, description="Rows of the embedding.")
    dim: Positive = Field(24, description="Width of the residual stream.")
    num_layers: Positive = Field(3, description="Transformer blocks.")
    num_heads: Positive = Field(2, description="Query heads.")
    num_kv_heads: Positive = Field(1, description="Key and value heads; divides num_heads.")


class UnevenData(DataConfig):
    seq_len: Positive = Field(16, description="Tokens of the longest sample.")
    num_samples: Positive = Field(4096, description="Length of the data set.")
    poison: Annotated[int, Field(ge=-1)] = Field(
        -1, description="The sample whose loss is NaN; -1: none."
    )
