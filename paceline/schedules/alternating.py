"""A few forwards, then forwards and backwards in turn: 1f1b, interleaved_1f1b, interleaved_zb.

1f1b and interleaved: https://arxiv.org/abs/2104.04473, section 2.2.
Zero bubble (ZB-H1, with several stages a rank): https://arxiv.org/abs/2401.10241.
"""

from dataclasses import dataclass

from paceline.schedules.actions import Action, Kind, Slot


@dataclass(frozen=True)
class Rounds:
    """Microbatches go through a rank's stages in rounds: `per_round` of them through its first
    stage, then the same through its next. `rank` has the stages rank, rank + num_ranks, ..."""

    rank: int
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1

    @property
    def per_round(self) -> int:
        return self.num_microbatches // max(1, self.num_microbatches // self.num_ranks)

    @property
    def num_ops(self) -> int:
        return self.num_microbatches * self.stages_per_rank

    def forward(self, number: int) -> Action:
        return self._at(Kind.FORWARD, number, is_reversed=False)

    def backward(self, kind: Kind, number: int) -> Action:
        """Backwards (of any kind) visit the rank's last stage first."""
        return self._at(kind, number, is_reversed=True)

    def _at(self, kind: Kind, number: int, is_reversed: bool) -> Action:
        turn, place = divmod(number, self.per_round)
        finished, chunk = divmod(turn, self.stages_per_rank)
        chunk = self.stages_per_rank - 1 - chunk if is_reversed else chunk
        stage = chunk * self.num_ranks + self.rank
        return Action(kind, stage, finished * self.per_round + place)


def order_1f1b(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    """Rank r runs P - 1 - r forwards ahead, so it never holds more than P - r microbatches."""
    rounds = Rounds(rank, num_ranks, num_microbatches)
    return _alternate(rounds, warmup=num_ranks - 1 - rank)


def order_interleaved_1f1b(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """All but the last chunk of a round ahead, and two more for each rank behind this one."""
    rounds = Rounds(rank, num_ranks, num_microbatches, stages_per_rank)
    ahead = (stages_per_rank - 1) * rounds.per_round
    return _alternate(rounds, warmup=ahead + 2 * (num_ranks - 1 - rank))


def order_interleaved_zb(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """Only one more forward ahead for each rank behind; rank r lets its weight gradients lag by r,
    so that they fill what would be its bubble at the end."""
    rounds = Rounds(rank, num_ranks, num_microbatches, stages_per_rank)
    ahead = (stages_per_rank - 1) * rounds.per_round
    order = _alternate(rounds, warmup=ahead + num_ranks - 1 - rank, kind=Kind.INPUT)
    return _with_weights(rounds, order, lag=rank)


def _alternate(rounds: Rounds, warmup: int, kind: Kind = Kind.BACKWARD) -> list[Slot]:
    warmup = min(warmup, rounds.num_ops)
    order = [Slot((rounds.forward(number),), "warm-up") for number in range(warmup)]
    for number in range(rounds.num_ops - warmup):
        order.append(Slot((rounds.forward(warmup + number),), "steady"))
        order.append(Slot((rounds.backward(kind, number),), "steady"))
    for number in range(rounds.num_ops - warmup, rounds.num_ops):
        order.append(Slot((rounds.backward(kind, number),), "cool-down"))
    return order


def _with_weights(rounds: Rounds, order: list[Slot], lag: int) -> list[Slot]:
    """After the n-th input backward, the weight backward of the one `lag` before it."""
    mixed, num_inputs, num_weights = [], 0, 0
    for slot in order:
        mixed.append(slot)
        num_inputs += slot.actions[0].kind == Kind.INPUT
        if slot.actions[0].kind == Kind.INPUT and num_inputs > lag:
            mixed.append(Slot((rounds.backward(Kind.WEIGHT, num_weights),), slot.phase))
            num_weights += 1
    rest = range(num_weights, rounds.num_ops)
    return mixed + [Slot((rounds.backward(Kind.WEIGHT, n),), "weights") for n in rest]
