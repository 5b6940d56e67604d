"""Numbers that a job reports beside its loss: how it hands them over, and the usual ones.

    loss      returns (loss sum, count, {"accuracy": accuracy(logits, labels)})   -> train/accuracy
    evaluate  returns {"loss": (loss sum, count), "texts": Items(texts)}          -> val/loss
    metrics   returns {"wer": wer(found["texts"])}                                -> val/wer

torch is not imported: what is computed is computed by methods of the tensors that are given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

TRAIN, VAL = "train/", "val/"
LOSS = "loss"
PADDING = "padding"  # the share of a step that only fills samples up; known where data has lengths
NAME = re.compile(r"[A-Za-z_][\w.@-]*(/[\w.@-]+)*")  # no comma, colon or space: columns and keys
# A metric called so gets better as it rises; to take the least of it would be a silent mistake.
RISING = re.compile(r"acc|accuracy|auc|auroc|bleu|dice|f1|iou|map|precision|psnr|r2|recall|rouge")


class Items:
    """One value for each sample of a batch: a list, or a tensor with a row per sample. Those of all
    ranks are put together on rank 0, in the order of the samples, each once."""

    def __init__(self, values: Sequence[Any] | Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)


class Goal(NamedTuple):
    """A metric by its whole name, as `val/accuracy`, and whether more of it is better."""

    name: str
    is_max: bool

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Read `val/wer`, `val/wer:min` or `val/accuracy:max`; ValueError says what is wrong."""
        name, colon, way = text.partition(":")
        if not name.startswith((TRAIN, VAL)) or not NAME.fullmatch(name):
            raise ValueError(
                f"{text!r} is not a metric\nhint: write val/NAME:min or val/NAME:max, as in"
                " val/loss:min"
            )
        if colon and way not in ("min", "max"):
            raise ValueError(f"{text!r} ends in {way!r}\nhint: {name}:min or {name}:max")
        words = re.split(r"[^a-z0-9]+", name.lower())
        if not colon and any(RISING.fullmatch(word) for word in words):
            raise ValueError(f"is more or less of {name} better?\nhint: {name}:max or {name}:min")
        return cls(name, way == "max")

    @classmethod
    def of_best(cls, text: str) -> Goal:
        """Return what `train.best` asks for; auto is the validation loss."""
        return cls(f"{VAL}{LOSS}", False) if text == "auto" else cls.parse(text)

    def beats(self, value: float, other: float) -> bool:
        return value > other if self.is_max else value < other

    def __str__(self) -> str:
        return f"{self.name}:{'max' if self.is_max else 'min'}"


def accuracy(logits: Tensor, targets: Tensor, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Return how many targets have the highest logit, and how many targets there are. The classes
    are the last axis of `logits`; targets that are `ignored` do not count."""
    counts = targets != ignored
    return ((logits.argmax(-1) == targets) & counts).sum(), counts.sum()


def perplexity(mean_loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token."""
    return math.inf if mean_loss > 700 else math.exp(mean_loss)  # e^710 is not a float any more


def bits_per_byte(mean_loss: float, bytes_per_token: float = 1.0) -> float:
    """Return the bits per byte of text of a mean loss in nats per token."""
    return mean_loss / math.log(2) / bytes_per_token
