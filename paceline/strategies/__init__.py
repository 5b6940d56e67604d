"""How ranks share the work: `base` is the seam, one idea a file, `REGISTRY` the list.

A new strategy is one file, one line here, one row in tests/ranks/test_parity.py.
"""

from importlib import import_module

from paceline.strategies.base import Strategy

REGISTRY = {
    "single": "paceline.strategies.ddp:SINGLE",
    "ddp": "paceline.strategies.ddp:DDP",
    "zero1": "paceline.strategies.zero:ZERO1",
    "zero2": "paceline.strategies.zero:ZERO2",
    "zero3": "paceline.strategies.zero:ZERO3",
    "zero2_hybrid": "paceline.strategies.zero:ZERO2",
    "zero3_hybrid": "paceline.strategies.zero:ZERO3",
    "pipeline": "paceline.strategies.pipeline.strategy:PIPELINE",
    "deepspeed": "paceline.strategies.deepspeed:DEEPSPEED",
}


def find_strategy(name: str) -> Strategy:
    module, _, attribute = REGISTRY[name].partition(":")
    strategy: Strategy = getattr(import_module(module), attribute)
    return strategy
