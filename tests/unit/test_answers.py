"""The exact answers of collectives, against plain arithmetic over all ranks' questions."""

import pytest
import torch
from torch import Tensor

from paceline.check.answers import CHECKS, Case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
WORLDS = (1, 2, 3, 8, 9, 300)


def ask_all(op: str, world_size: int, numel: int) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank's input, and every rank's expected result."""
    asked = [CHECKS[op].ask(Case(r, world_size, CPU, numel)) for r in range(world_size)]
    return [each.given for each in asked], [each.expected for each in asked]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", [1, 61])
def test_answers_are_the_arithmetic_of_all_questions(world_size: int, numel: int) -> None:
    reductions = {
        "all_reduce sum": lambda given: given.sum(0),
        "all_reduce max": lambda given: given.amax(0),
        "all_reduce min": lambda given: given.amin(0),
        "all_reduce avg": lambda given: given.double().mean(0),
    }
    for op, reduce in reductions.items():
        given, expected = ask_all(op, world_size, numel)
        for own in expected:
            torch.testing.assert_close(own, reduce(torch.stack(given)), check_dtype=False)
    given, expected = ask_all("all_gather", world_size, numel)
    assert all(torch.equal(own, torch.cat(given)) for own in expected)
    given, expected = ask_all("reduce_scatter", world_size, numel)
    assert torch.equal(torch.cat(expected), torch.stack(given).sum(0))
    given, expected = ask_all("all_to_all", world_size, numel)
    pieces = torch.stack(given).view(world_size, world_size, -1)
    assert torch.equal(torch.stack(expected).view_as(pieces), pieces.transpose(0, 1))
    given, expected = ask_all("send_recv", world_size, numel)
    assert torch.equal(torch.stack(expected), torch.stack(given).roll(1, 0))


@pytest.mark.parametrize("op", [op for op in CHECKS if op != "all_reduce avg"])
def test_answers_are_exact_in_every_dtype(op: str) -> None:
    given, expected = ask_all(op, 300, 61)
    for values in (*given, *expected):
        for dtype in DTYPES:
            assert torch.equal(values.to(dtype).to(values.dtype), values)


def test_every_rank_matters_and_messages_differ() -> None:
    given, _ = ask_all("all_reduce sum", 300, 1021)
    assert all(own.any() for own in given)
    given, _ = ask_all("send_recv", 300, 61)
    assert len({tuple(own.tolist()) for own in given}) == 300
