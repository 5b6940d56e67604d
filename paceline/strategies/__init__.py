"""How ranks share the work: `base` is the seam, one idea a file, `REGISTRY` the list.

A new strategy is one file, one line here, one row in tests/ranks/test_parity.py.
"""

from importlib import import_module

from paceline.strategies.base import Strategy

REGISTRY = {
    "single": "paceline.strategies.ddp:SINGLE",
    "ddp": "paceline.strategies.ddp:DDP",
}


def find_strategy(name: str) -> Strategy:
    module, _, attribute = REGISTRY[name].partition(":")
    strategy: Strategy = getattr(import_module(module), attribute)
    return strategy
