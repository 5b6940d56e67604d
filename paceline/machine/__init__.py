"""The machines: what is there (facts), who am I (topology), what starts ranks (launchers)."""

from paceline.machine.topology import Topology, resolve_topology

__all__ = ["Topology", "resolve_topology"]
