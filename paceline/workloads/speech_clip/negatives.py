"""Turns vectors of speech and text into a loss and recall, over all ranks where that is asked for.

Shape letters: B pairs of this rank, N pairs that compete, C places per rank, D width.

    local    each pair against the others of its own microbatch            N = B
    global   against those of all ranks' microbatches of the same number   N = sum of B over ranks

A pair's loss is half the cross-entropy of finding its text among N texts, and half that of finding
its speech among N. The batch's loss is the sum over its B pairs, and it counts B units: so the sum
over all ranks is what one process with all N pairs in one microbatch computes, term by term.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from paceline.workloads.base import Waiting

CHUNK = 1024  # rows of a matrix of similarities that are in memory at a time
RANKS = (1, 5)


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, one below the other. Each rank's loss depends on the rows of all, so the
    gradient of a row is the sum of what all ranks find."""

    @staticmethod
    def forward(context: Any, rows_CD: Tensor, waiting: Waiting) -> Tensor:
        context.size, context.waiting = len(rows_CD), waiting
        world = dist.get_world_size()
        gathered = rows_CD.new_empty((world * len(rows_CD), rows_CD.shape[1]))
        with waiting():
            dist.all_gather(list(gathered.chunk(world)), rows_CD.contiguous())
        return gathered

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A sum and a slice: gloo has no reduce-scatter, and these are a few MB.
        total = grads[0].contiguous()
        with context.waiting():
            dist.all_reduce(total)
        first = dist.get_rank() * context.size
        return total[first : first + context.size], None


def loss_of(
    model: Any, speech_BD: Tensor, text_BD: Tensor, waiting: Waiting = nullcontext
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the pairs, and how many have their own text as the nearest.
    `waiting` is put around what waits for other ranks."""
    is_shared = dist.is_initialized() and dist.get_world_size() > 1 and not speech_BD.is_meta
    scale = model.scale
    if model.negatives != "global" or not is_shared:
        labels_B = torch.arange(len(speech_BD), device=speech_BD.device)
        to_text_BN = scale * speech_BD @ text_BD.T
        to_speech_BN = to_text_BN.T
    else:
        speech_ND, text_ND, is_real_N, first = gather_pairs(
            speech_BD, text_BD, model.capacity, waiting
        )
        labels_B = first + torch.arange(len(speech_BD), device=speech_BD.device)
        to_text_BN = (scale * speech_BD @ text_ND.T).masked_fill(~is_real_N, -math.inf)
        to_speech_BN = (scale * text_BD @ speech_ND.T).masked_fill(~is_real_N, -math.inf)
    both = cross_entropy(to_text_BN, labels_B, reduction="sum")
    both = both + cross_entropy(to_speech_BN, labels_B, reduction="sum")
    return both / 2, (to_text_BN.argmax(dim=1) == labels_B).sum()


def gather_pairs(
    speech_BD: Tensor, text_BD: Tensor, capacity: int | None, waiting: Waiting
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return speech and text of all ranks, which of those rows are pairs, and where ours begin.

    Ranks may have unequally many pairs: each fills up to `capacity`, the most that any can have.
    Where nobody knows that, ranks ask each other, and the host waits for the answer."""
    size = len(speech_BD)
    if capacity is None:
        most = torch.tensor(size, device=speech_BD.device)
        with waiting():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        capacity = int(most)
    assert size <= capacity, f"{size} pairs in a microbatch of at most {capacity}"
    # One collective for all: both vectors, and 1 where there is a pair.
    is_real_B1 = speech_BD.new_ones((size, 1))
    rows_BX = torch.cat((speech_BD, text_BD, is_real_B1), dim=1)
    rows_NX: Tensor = GatherRows.apply(pad(rows_BX, (0, 0, 0, capacity - size)), waiting)
    width = speech_BD.shape[1]
    speech_ND, text_ND, is_real_N1 = rows_NX.split((width, width, 1), dim=1)
    return speech_ND, text_ND, is_real_N1.squeeze(1) > 0, dist.get_rank() * capacity


def retrieval(speech_ND: Tensor, text_ND: Tensor, scale: float) -> dict[str, float]:
    """Return the loss of all pairs against each other, and recall at 1 and 5 both ways: how often
    the right one is among the nearest."""
    ways = {"speech_to_text": (speech_ND, text_ND), "text_to_speech": (text_ND, speech_ND)}
    found = {name: _one_way(a.double(), b.double(), scale) for name, (a, b) in ways.items()}
    numbers = {"loss": sum(loss for loss, _ in found.values()) / 2}
    for place, k in enumerate(RANKS):
        for name, (_, recalls) in found.items():
            numbers[f"{name}/recall@{k}"] = recalls[place]
        numbers[f"recall@{k}"] = sum(recalls[place] for _, recalls in found.values()) / 2
    return numbers


def _one_way(asked_ND: Tensor, among_ND: Tensor, scale: float) -> tuple[float, list[float]]:
    """Return the mean cross-entropy, and the recalls. Among equals the right one is first as often
    as chance says: a model that says the same of everything finds nothing."""
    total, hits = 0.0, [0.0] * len(RANKS)
    for first in range(0, len(asked_ND), CHUNK):
        scores = asked_ND[first : first + CHUNK] @ among_ND.T
        labels = first + torch.arange(len(scores))
        total += float(cross_entropy(scale * scores, labels, reduction="sum"))
        own = scores.gather(1, labels.unsqueeze(1))
        above, equal = (scores > own).sum(dim=1), (scores == own).sum(dim=1)
        for place, k in enumerate(RANKS):
            hits[place] += float(((k - above) / equal).clamp(0, 1).sum())
    return total / len(asked_ND), [hit / len(asked_ND) for hit in hits]
