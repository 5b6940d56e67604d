"""Ghosts: what they return has no memory, unless the model writes into it."""

import torch
from torch import Tensor, nn

from paceline.strategies.pipeline.ghosts import Ghost, Region


def ghost() -> tuple[Ghost, Region]:
    region = Region()
    return Ghost("embed", nn.Linear(4, 8), region), region


def call(made: Ghost, region: Region, *, writes: bool = False, rows: int = 3) -> Tensor:
    """One pass of a later stage, up to where it is entered."""
    region.begin(torch.zeros(1))
    result: Tensor = made(torch.zeros(rows, 4))
    if writes:
        result[:, 1:].add_(1.0)
    region.end()
    return result


def has_memory(result: Tensor) -> bool:
    return result.untyped_storage().nbytes() >= result.numel() * result.element_size()


def test_a_result_that_nobody_writes_into_takes_memory_only_in_the_first_pass() -> None:
    made, region = ghost()
    assert has_memory(call(made, region))
    later = [call(made, region) for _ in range(3)]
    assert not any(has_memory(result) for result in later)
    assert all(result.shape == (3, 8) and result.isnan().all() for result in later)


def test_a_result_that_is_written_into_is_always_a_new_copy() -> None:
    made, region = ghost()
    results = [call(made, region, writes=True) for _ in range(3)]
    assert len({result.data_ptr() for result in results}) == 3
    assert call(made, region).isnan().all()


def test_once_written_into_always_copied() -> None:
    made, region = ghost()
    region.begin(torch.zeros(1))
    first, second = made(torch.zeros(3, 4)), made(torch.zeros(3, 4))
    first.add_(1.0)
    region.end()
    assert has_memory(second) and has_memory(call(made, region))


def test_each_shape_and_mode_finds_out_for_itself() -> None:
    made, region = ghost()
    with torch.no_grad():  # evaluation: dropout writes nothing
        call(made, region)
    assert has_memory(call(made, region, writes=True))
    assert has_memory(call(made, region, rows=5))
    with torch.no_grad():
        assert not has_memory(call(made, region))


def test_callers_get_objects_of_their_own() -> None:
    made, region = ghost()
    call(made, region)
    assert call(made, region) is not call(made, region)
