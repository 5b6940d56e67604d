"""Token shards as samples of T + 1 tokens, by index: packed, with documents apart, or padded.

    {"tokens": (B, T + 1)}                             packed
    {"tokens": (B, T + 1), "positions": (B, T + 1)}    documents apart: 0 begins one
    {"tokens": (B, T + 1), "lengths": (B,)}            padded: so many tokens of a row are real

`split_rows` makes inputs and targets of any of them: the one place where targets are shifted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.synthetic import IGNORED
from paceline.data.tokenizer import Tokens

SCANNED = 1 << 24  # tokens that are searched for ends at once


class Rows(NamedTuple):
    """Targets that have no loss are IGNORED; `positions` is None where there is one document."""

    inputs_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None
    num_targets: int | Tensor


def split_rows(batch: dict[str, Tensor]) -> Rows:
    """Return inputs, the first T tokens, and targets, the last T."""
    tokens_BT1 = batch["tokens"]
    inputs_BT = tokens_BT1[:, :-1].long()
    targets_BT = tokens_BT1[:, 1:].long()
    has_loss_BT = _has_loss(batch)
    if has_loss_BT is None:
        return Rows(inputs_BT, targets_BT, None, targets_BT.numel())
    targets_BT = targets_BT.masked_fill(~has_loss_BT, IGNORED)
    positions = batch.get("positions")
    positions_BT = None if positions is None else positions[:, :-1].long()
    return Rows(inputs_BT, targets_BT, positions_BT, has_loss_BT.sum())


def count_targets(batch: dict[str, Tensor]) -> int:
    """Return how many tokens of a batch have a loss."""
    has_loss_BT = _has_loss(batch)
    return batch["tokens"][:, 1:].numel() if has_loss_BT is None else int(has_loss_BT.sum())


def _has_loss(batch: dict[str, Tensor]) -> Tensor | None:
    """Say for each target whether it is predicted from its own document; None: all count."""
    if "positions" in batch:
        return batch["positions"][:, 1:] > 0  # a document's first token follows from nothing
    if "lengths" in batch:
        places_T = torch.arange(1, batch["tokens"].shape[1], device=batch["tokens"].device)
        return places_T < batch["lengths"][:, None]
    return None


class PackedTokens:
    """Sample i is tokens [i T, i T + T], T + 1 of them: the last is the next sample's first. With
    `end_id` documents are kept apart."""

    def __init__(
        self, parts: list[Tokens], seq_len: int, name: str, end_id: int | None = None
    ) -> None:
        self.parts, self.seq_len, self.end_id = parts, seq_len, end_id
        self.fingerprint = f"{name}-{seq_len}" + ("" if end_id is None else "-apart")
        self.num_samples = [max(0, (len(part) - 1) // seq_len) for part in parts]
        self.starts = np.concatenate(([0], np.cumsum(self.num_samples)))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: rows[0] for key, rows in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples (B, T + 1) as int32: the narrowest type that indexing on a GPU accepts."""
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        places = np.searchsorted(self.starts, indices, side="right") - 1
        for row, (index, place) in enumerate(zip(indices, places, strict=True)):
            first = (index - self.starts[place]) * self.seq_len
            out[row] = self.parts[place][first : first + self.seq_len + 1]
        if self.end_id is None:
            return {"tokens": torch.from_numpy(out)}
        positions = positions_of(out, self.end_id)
        return {"tokens": torch.from_numpy(out), "positions": torch.from_numpy(positions)}

    def file_of(self, index: int) -> Path:
        """Return the shard that holds a sample."""
        place = int(np.searchsorted(self.starts, index, side="right")) - 1
        return _file(self.parts[place])


def positions_of(tokens_BT: NDArray[np.int32], end_id: int) -> NDArray[np.int32]:
    """Return each token's place in its document, counted from where the row begins or the document
    before it ends."""
    places = np.arange(tokens_BT.shape[1], dtype=np.int32)
    begins = np.zeros(tokens_BT.shape, dtype=np.int32)
    begins[:, 1:] = np.where(tokens_BT[:, :-1] == end_id, places[1:], 0)
    return places - np.maximum.accumulate(begins, axis=1)


class PaddedDocuments:
    """A sample is a document with its end, filled up behind it. One of more than T + 1 tokens is
    several samples, each of which begins with the last token of the one before: every token but
    the first is a target once."""

    def __init__(self, parts: list[Tokens], seq_len: int, name: str, end_id: int) -> None:
        self.parts, self.seq_len, self.end_id = parts, seq_len, end_id
        self.fingerprint = f"{name}-{seq_len}-padded"
        rows = [_cut(part, place, seq_len, end_id) for place, part in enumerate(parts)]
        self.rows = np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: rows[0] for key, rows in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples (B, T + 1), filled up with the document's end, and their lengths."""
        out = np.full((len(indices), self.seq_len + 1), self.end_id, dtype=np.int32)
        chosen = self.rows[np.asarray(indices, dtype=np.int64)]
        for row, (place, first, length) in enumerate(chosen):
            out[row, :length] = self.parts[place][first : first + length]
        lengths = torch.from_numpy(chosen[:, 2].copy())
        return {"tokens": torch.from_numpy(out), "lengths": lengths}

    def file_of(self, index: int) -> Path:
        """Return the shard that holds a sample."""
        return _file(self.parts[int(self.rows[index, 0])])


def _cut(part: Tokens, place: int, seq_len: int, end_id: int) -> NDArray[np.int64]:
    """Return (part, first token, length) of each sample of a part."""
    ends = _ends(part, end_id)
    begins = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends + 1 - begins
    num_rows = -(-(lengths - 1) // seq_len)  # none of an empty document: it has no target
    document = np.repeat(np.arange(len(ends)), num_rows)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    rows = np.empty((len(document), 3), dtype=np.int64)
    rows[:, 0] = place
    rows[:, 1] = begins[document] + nth * seq_len
    rows[:, 2] = np.minimum(lengths[document] - nth * seq_len, seq_len + 1)
    return rows


def _ends(part: Tokens, end_id: int) -> NDArray[np.int64]:
    """Return where documents end."""
    found = [
        np.flatnonzero(part[first : first + SCANNED] == end_id) + first
        for first in range(0, len(part), SCANNED)
    ]
    return np.concatenate(found).astype(np.int64)


def _file(part: Tokens) -> Path:
    assert isinstance(part, np.memmap) and part.filename is not None, "shards are files"
    return Path(part.filename)
