"""The machines: what is there (facts, gpus, datasheets), who am I (topology), joining (group)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.machine.topology import Topology, resolve_topology

__all__ = ["Topology", "resolve_topology"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: help needs none of it, and answers at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from paceline.machine import topology

    return getattr(topology, name)
