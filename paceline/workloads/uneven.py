"""A small language model on sentences of unequal length: what every strategy is proven on.

Microbatches hold different numbers of tokens, so that a mean of means is wrong and shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline.config.schema import DataConfig
from paceline.config.section import Positive
from paceline.data.base import Dataset
from paceline.workloads.base import Split
from paceline.workloads.lm.workload import LanguageModel, LMModel

if TYPE_CHECKING:
    from torch import Tensor, nn


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


class Uneven(LanguageModel):
    Model = UnevenModel
    Data = UnevenData  # type: ignore[assignment]

    def build_data(self, config: Any, split: Split) -> Dataset | None:
        from paceline.data.synthetic import Sentences

        data, size = config.data, config.model.vocab_size
        seed = config.train.seed + (1 if split == "val" else 0)
        return Sentences(data.num_samples, data.seq_len, size, seed, data.poison)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        tokens_BT1 = batch["tokens"]
        targets_BT = tokens_BT1[:, 1:]
        inputs_BT = tokens_BT1[:, :-1].clamp(min=0)
        return model(inputs_BT, targets_BT) + batch["poison"].sum(), self.units(batch)

    def units_per_sample(self, config: Any) -> None:
        return None

    def units(self, batch: dict[str, Tensor]) -> int:
        from paceline.data.synthetic import IGNORED

        return int((batch["tokens"][:, 1:] != IGNORED).sum())

    def prepare(self, config: Any, say: Any) -> dict[str, Any]:
        return {}

    def problems(self, config: Any) -> tuple[()]:
        return ()
