"""A verb under torchrun, srun, mpirun or deepspeed: rank 0 leads, the others take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from paceline.cluster import resolve_topology

if TYPE_CHECKING:
    from paceline.launch.muster import RollCall


@contextmanager
def among_ranks() -> Iterator[RollCall | None]:
    """The meeting with the other ranks, for rank 0; None in a process that is alone. Any other
    rank takes part in what rank 0 decides and leaves here with its own exit code."""
    topology = resolve_topology()
    if topology.is_alone:
        yield None
        return
    from paceline.launch.muster import muster  # imports torch

    with muster(topology) as call:
        if topology.rank > 0:
            from paceline.launch.member import attend

            raise typer.Exit(attend(call))
        yield call
