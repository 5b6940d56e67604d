"""The machines: what is there (facts, gpus, datasheets), who am I (topology), joining (group)."""

from paceline.machine.topology import Topology, resolve_topology

__all__ = ["Topology", "resolve_topology"]
