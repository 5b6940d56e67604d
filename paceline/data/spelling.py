"""Turns texts into rows of token ids, for an encoder that reads a whole text from its first token.

    spelling = find_spelling("bytes")
    spelling.rows(["a gate", ""])          tokens (2, 8) and how many of them each text has

A tokenizer of its own puts that first token, such as [CLS], before every text; bytes get one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.data.tokenizer import Tokenizer, find_tokenizer
from paceline.errors import DataError

PAD = 0  # what stands there is masked
ASKED = ("a", "b")  # two texts that share no token but those around them


@dataclass(frozen=True)
class Spelling:
    """`max_tokens` is how many positions the encoder has; longer texts lose their last words."""

    tokenizer: Tokenizer
    max_tokens: int

    @property
    def num_ids(self) -> int:
        """How many rows the encoder's table of tokens needs."""
        return self.tokenizer.vocab_size + self.tokenizer.is_bytes

    def rows(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens (B, L), padded to the longest, and the number of each text's own (B,)."""
        # Loader processes share the cores already; threads of the library would only fight.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        first = [self.tokenizer.vocab_size] if self.tokenizer.is_bytes else []
        found = self.tokenizer.encode([text.encode() for text in texts])
        ids = [self._fit([*first, *row.tolist()]) for row in found]
        lengths = torch.tensor([len(row) for row in ids])
        tokens = torch.full((len(ids), int(lengths.max())), PAD, dtype=torch.int64)
        for row, own in zip(tokens, ids, strict=True):
            row[: len(own)] = torch.tensor(own)
        return tokens, lengths

    def _fit(self, ids: list[int]) -> list[int]:
        """Leave words out, never the token that ends a text."""
        return ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], ids[-1]]


def find_spelling(asked: str, max_tokens: int, beside: Path | None = None) -> Spelling:
    """Load what `data.tokenizer` names; auto is what the text encoder's folder holds, else
    bytes."""
    spelling = Spelling(find_tokenizer(asked, beside), max_tokens)
    tokens, _ = spelling.rows(ASKED)
    if tokens[0, 0] != tokens[1, 0]:
        raise DataError(
            f"the tokenizer {spelling.tokenizer.name} puts no token before a text, and the text"
            " encoder is read there\nhint: give data.tokenizer a tokenizer of BERT's kind ([CLS])"
        )
    return spelling
