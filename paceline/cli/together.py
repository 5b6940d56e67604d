"""A verb under torchrun, srun, mpirun or deepspeed: rank 0 leads, the others follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from paceline.errors import ConfigError
from paceline.machine import resolve_topology
from paceline.machine.launchers import any_wide_launcher

if TYPE_CHECKING:
    from paceline.launch.base import Task
    from paceline.launch.rendezvous import Rendezvous


def require_alone(verb: str) -> None:
    """Refuse a launcher around a verb that starts the ranks of many runs itself."""
    topology = resolve_topology()
    if not topology.is_alone:
        raise ConfigError(
            f"paceline {verb} was started as {topology.world_size} ranks; it starts the ranks of"
            f" its runs itself\nhint: start it once; launch.launcher={any_wide_launcher()} says by"
            " what its runs are started"
        )


@contextmanager
def among_ranks(load_task: Callable[[], Task]) -> Iterator[Rendezvous | None]:
    """Yield the rendezvous with the other ranks to rank 0, and None to a process that is alone. Any
    other rank follows rank 0 here and leaves with its own exit code: it runs the task of the verb,
    which is loaded only now because that imports torch."""
    topology = resolve_topology()
    if topology.is_alone:
        yield None
        return
    from paceline.launch.rendezvous import join_rendezvous

    with join_rendezvous(topology) as rendezvous:
        if topology.rank > 0:
            from paceline.launch.member import follow_rank0

            raise typer.Exit(follow_rank0(rendezvous, load_task()))
        yield rendezvous
