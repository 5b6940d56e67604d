"""The machines: what is there (facts), who am I (rendezvous), is it fit (lint, collectives)."""

from paceline.machine.topology import Topology, resolve_topology

__all__ = ["Topology", "resolve_topology"]
