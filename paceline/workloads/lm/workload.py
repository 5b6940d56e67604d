"""The language-model workload: next-token prediction on text or on synthetic tokens.

torch is imported where it is used, so that `paceline recipes` can read the schema without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.base import Dataset, TextData
from paceline.records import Finding
from paceline.workloads.base import Split, Workload
from paceline.workloads.lm.config import LMModel

if TYPE_CHECKING:
    from torch import Tensor, nn

BYTE_VOCABULARY = 257  # 256 bytes and the mark between documents


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
        return open_tokens(Path(self.prepared["shards"]), config.data.seq_len, split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        tokens_BT1 = batch["tokens"]  # T + 1 tokens: inputs are the first T, targets the last T
        targets_BT = tokens_BT1[:, 1:].long()
        return model(tokens_BT1[:, :-1].long(), targets_BT), targets_BT.numel()

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
