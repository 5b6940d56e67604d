"""A verb under torchrun, srun, mpirun or deepspeed: rank 0 leads, the others take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from paceline.errors import ConfigError
from paceline.machine import resolve_topology

if TYPE_CHECKING:
    from paceline.launch.rendezvous import Rendezvous


def require_alone(verb: str) -> None:
    """Refuse a launcher around a verb that starts the ranks of many runs itself."""
    topology = resolve_topology()
    if not topology.is_alone:
        raise ConfigError(
            f"paceline {verb} was started as {topology.world_size} ranks; it starts the ranks of"
            f" its runs itself\nhint: start it once; launch.launcher=torchrun, slurm, mpi or"
            " deepspeed says by what its runs are started"
        )


@contextmanager
def among_ranks() -> Iterator[Rendezvous | None]:
    """The meeting with the other ranks, for rank 0; None in a process that is alone. Any other
    rank takes part in what rank 0 decides and leaves here with its own exit code."""
    topology = resolve_topology()
    if topology.is_alone:
        yield None
        return
    from paceline.launch.rendezvous import join_rendezvous  # imports torch

    with join_rendezvous(topology) as rendezvous:
        if topology.rank > 0:
            from paceline.launch.member import follow_rank0

            raise typer.Exit(follow_rank0(rendezvous))
        yield rendezvous
