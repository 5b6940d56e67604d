"""Maps a position of the run to a sample, as a pure function: nothing to save or to skip.

`Order(num_samples, seed).at(positions)` maps global positions 0, 1, 2, ... to sample indices.
Each epoch is another permutation, computed in place by a small Feistel network, so position
ten million costs the same as position zero and nothing depends on ranks or loader workers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
ROUNDS = 4
BLOCK = 128  # microbatches whose sample ids are computed together: the hash costs more than the sum
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Order:
    """The endless sequence of samples of one run; `shuffle=False` goes through them in order."""

    num_samples: int
    seed: int
    shuffle: bool = True

    def at(self, positions: Indices) -> Indices:
        """Return the sample indices at global positions (any shape)."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        return _permute(offsets, epochs, self.num_samples, self.seed)


@dataclass(frozen=True)
class StepSlice:
    """Which positions of a step one data-parallel rank reads.

    A step takes `global_size` consecutive positions, whatever the number of ranks; microbatch a
    of rank r is the (a * dp + r)-th piece of `micro` of them. `start` is the position where this
    attempt begins: all that a run must know of the previous one in order to resume.
    """

    micro: int
    grad_accum: int
    dp: int
    dp_rank: int
    start: int = 0

    @property
    def global_size(self) -> int:
        return self.micro * self.grad_accum * self.dp

    def positions(self, microbatch: int) -> Indices:
        """Return the positions of this rank's n-th microbatch, counted from `start`."""
        step, a = divmod(microbatch, self.grad_accum)
        first = self.start + step * self.global_size + (a * self.dp + self.dp_rank) * self.micro
        return np.arange(first, first + self.micro, dtype=np.int64)


class Picks(Protocol):
    """Which samples are in which microbatch of one rank; microbatches are counted from where this
    attempt begins."""

    seed: int
    epoch_size: int  # positions in an epoch

    def sample_ids(self, microbatch: int) -> Indices: ...

    def place(self, microbatch: int) -> int:
        """Return a number that is this microbatch's own in the whole run, on any rank; its samples
        count on from there."""
        ...

    def samples_in_step(self, step: int) -> int:
        """Return the samples of all ranks in the step, counted from 0."""
        ...

    def of(self, step_slice: StepSlice) -> "Picks":
        """Return the part of the same sequence for another rank, or for another start."""
        ...


class EvenPicks:
    """Microbatches of `micro` samples each, in the run's order."""

    def __init__(self, order: Order, step_slice: StepSlice) -> None:
        self.order, self.step_slice = order, step_slice
        self.seed, self.epoch_size = order.seed, order.num_samples
        self._block, self._block_ids = -1, np.empty((0, 0), dtype=np.int64)

    def sample_ids(self, microbatch: int) -> Indices:
        block, row = divmod(microbatch, BLOCK)
        if block != self._block:
            first = block * BLOCK
            positions = [self.step_slice.positions(n) for n in range(first, first + BLOCK)]
            self._block, self._block_ids = block, self.order.at(np.stack(positions))
        ids: Indices = self._block_ids[row]
        return ids

    def place(self, microbatch: int) -> int:
        return int(self.step_slice.positions(microbatch)[0])

    def samples_in_step(self, step: int) -> int:
        return self.step_slice.global_size

    def of(self, step_slice: StepSlice) -> "EvenPicks":
        return EvenPicks(self.order, step_slice)


def _permute(offsets: Indices, epochs: Indices, size: int, seed: int) -> Indices:
    """Permute [0, size) by a Feistel network over the next even power of two, cycle-walking.

    A Feistel network is a bijection of [0, 4^h); stepping again while outside [0, size) keeps it
    one on [0, size). Fewer than four steps are needed on average, as 4^h < 4 * size.
    """
    # Both halves need the same number of bits, so the network's range is 4^h >= size.
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    # One key per position: seed and epoch, mixed so that epochs do not resemble each other.
    keys = _mix(epochs.astype(np.uint64) + _mix(np.full_like(epochs, seed).astype(np.uint64)))
    value = _feistel(offsets.astype(np.uint64), keys, half_bits)
    # Cycle-walking: follow the permutation of the larger range until it is back inside. Two offsets
    # never end at the same value, as they are at different places of their cycles.
    while np.any(outside := value >= size):
        value = np.where(outside, _feistel(value, keys, half_bits), value)
    return value.astype(np.int64)


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Permute numbers of 2 * `bits` bits. A round can be undone whatever `_mix` returns: `right` is
    kept, and gives back what `left` was changed by."""
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    left, right = value >> shift, value & mask
    for turn in range(ROUNDS):
        # Each round mixes differently: its number goes in above the bits of `right`.
        left, right = right, left ^ (_mix(right ^ keys ^ np.uint64(turn << 48)) & mask)
    return (left << shift) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & _MASK
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
