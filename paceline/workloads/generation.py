"""Generates text from a language model: the request, how a token is chosen, and when to stop.

    request = Request(prompts, sampling, codec)       prompts as ids
    rows = workload.generate(model, request)          new ids of each, without the end mark

Every row has random numbers of its own, drawn from (seed, row): a prompt is continued in the same
way whatever stands beside it in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.tokenizer import BYTE_END, FILE, MAX_FILE_BYTES, parse_definition
from paceline.errors import ConfigError
from paceline.records.base import load_map
from paceline.records.files import read_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNREADABLE = "\ufffd"
Told = Callable[[Sequence["int | None"]], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the likeliest; `top_k` and `top_p` leave the
    likeliest ones to choose from, by number and by share."""

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Codec:
    """Text to ids and back. `end_ids` end a document; ids from `num_ids` on mean nothing."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end_ids: frozenset[int]
    num_ids: int
    name: str = "bytes"

    def prompt(self, text: str) -> list[int]:
        """Return the ids to continue; of an empty text the mark that stands before a document. A
        mark that the tokenizer has put behind the text would end it."""
        ids = self.encode(text) or sorted(self.end_ids)[:1]
        if len(ids) > 1 and ids[-1] in self.end_ids:
            ids = ids[:-1]
        if not ids:
            raise ConfigError("an empty prompt, and the tokenizer names no mark to begin with")
        return ids


@dataclass(frozen=True)
class Request:
    """`told` hears of each new token of each row, None where the row has ended. `agree` makes the
    logits those of rank 0, where ranks share a model: all must go on, or stop, together."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    codec: Codec
    told: Told = lambda tokens: None
    agree: Callable[[Tensor], Tensor] = lambda logits: logits
    use_cache: bool = True

    def require_ids(self, num_rows: int) -> None:
        """Refuse prompts with tokens that the model has no row for."""
        largest = max(max(ids) for ids in self.prompts)
        if largest >= num_rows:
            raise ConfigError(
                f"a prompt has the token {largest} of {self.codec.name}, and the model has"
                f" {num_rows} tokens: it was trained with another tokenizer"
            )

    def room(self, longest: int | None) -> int:
        """Return how many tokens fit behind the prompts, where the model has `longest` positions:
        the last token that is drawn needs none."""
        length = max(map(len, self.prompts))
        if longest is None:
            return self.sampling.max_new_tokens
        if length > longest:
            raise ConfigError(
                f"a prompt has {length} tokens, and the model sees {longest}\nhint: shorten it"
            )
        return min(self.sampling.max_new_tokens, longest - length + 1)


@dataclass
class Writing:
    """The rows that are being written."""

    request: Request
    rows: list[list[int]] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    draws: list[torch.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        num_rows = len(self.request.prompts)
        seed = self.request.sampling.seed
        self.rows, self.ended = [[] for _ in range(num_rows)], [False] * num_rows
        seeds = [(seed * 1_000_003 + row) % (1 << 63) for row in range(num_rows)]
        self.draws = [torch.Generator().manual_seed(number) for number in seeds]

    @property
    def is_over(self) -> bool:
        return all(self.ended)

    def take(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token of every row, and tell of it; return the ids (B), on the device."""
        import torch

        codec = self.request.codec
        logits_BV = self.request.agree(logits_BV)[:, : codec.num_ids]
        drawn = torch.stack([torch.rand((), generator=draw) for draw in self.draws])
        ids = choose(logits_BV, self.request.sampling, drawn.to(logits_BV.device))
        told: list[int | None] = []
        for row, token in enumerate(ids.tolist()):
            self.ended[row] = self.ended[row] or token in codec.end_ids
            told.append(None if self.ended[row] else token)
            if not self.ended[row]:
                self.rows[row].append(token)
        self.request.told(told)
        return ids


def choose(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """Return one id per row; `draws_B` are uniform in [0, 1)."""
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    shares, order = (
        (logits_BV.float() / sampling.temperature)
        .softmax(dim=-1)
        .sort(dim=-1, descending=True, stable=True)
    )
    if sampling.top_k is not None:
        shares[:, sampling.top_k :] = 0
    shares = shares / shares.sum(dim=-1, keepdim=True)
    # A token stays while those before it have not reached top_p: the likeliest always does.
    shares = shares * (shares.cumsum(dim=-1) - shares < sampling.top_p)
    reached = shares.cumsum(dim=-1)
    place = (reached <= draws_B[:, None] * reached[:, -1:]).sum(dim=-1, keepdim=True)
    # Rounding may lead past the last share that is left, and a top_p of 0 leaves none.
    last = (shares > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, place.minimum(last).clamp(min=0))[:, 0]


class Stream:
    """Gives text piece by piece: what is not a whole character yet is held back."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.ids, self.num_given = codec, list[int](), 0

    def add(self, token: int | None) -> str:
        """Return the text that a token completes; None ends the row."""
        self.ids += [] if token is None else [token]
        text = self.codec.decode(self.ids)
        if token is not None:
            text = text.rstrip(UNREADABLE)
        new, self.num_given = text[self.num_given :], max(len(text), self.num_given)
        return new


def codec_of(prepared: Mapping[str, Any]) -> Codec:
    """Return the codec of a run, from what data.json says of its data: the shards' own tokenizer,
    else bytes."""
    place = prepared.get("shards")
    return open_codec(Path(place) if isinstance(place, str) else None)


def open_codec(folder: Path | None) -> Codec:
    """Return the codec that a folder of shards or of a model names: its tokenizer.json, else
    bytes."""
    if folder is None or not (folder / FILE).is_file():
        return bytes_codec()
    name = str(folder / FILE)
    library = parse_definition(read_text(folder / FILE, MAX_FILE_BYTES, follow=True), name)
    library.no_padding()
    library.no_truncation()
    end_ids = _end_ids(folder)
    return Codec(
        encode=lambda text: list(library.encode(text).ids),
        decode=lambda ids: str(library.decode(list(ids))),
        end_ids=end_ids,
        num_ids=max(library.get_vocab_size(with_added_tokens=True), *(x + 1 for x in end_ids), 0),
        name=name,
    )


def bytes_codec() -> Codec:
    return Codec(
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(x for x in ids if x < BYTE_END).decode(errors="replace"),
        end_ids=frozenset({BYTE_END}),
        num_ids=BYTE_END + 1,
    )


def _end_ids(folder: Path) -> frozenset[int]:
    """Return which ids end a document: as the shards' manifest says, or the model's own files."""
    found: set[int] = set()
    for file, key in (
        ("manifest.json", "end_id"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
    ):
        named = load_map(folder / file).get(key) if (folder / file).is_file() else None
        found |= {x for x in (named if isinstance(named, list) else [named]) if isinstance(x, int)}
    return frozenset(found)
