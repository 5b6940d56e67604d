"""Paceline: a PyTorch training job from bare machines to a finished, explained run.

Start at `paceline/run/flow.py`: it calls the stages in order, and each stage is one folder.
`from paceline import Workload` is all that a job of your own needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config.schema import DataConfig
    from paceline.config.section import Section
    from paceline.metrics import Items
    from paceline.workloads.base import Workload

__version__ = "0.6.0"
__all__ = ["DataConfig", "Items", "Section", "Workload", "__version__"]

_HOMES = {
    "Workload": "paceline.workloads.base",
    "DataConfig": "paceline.config.schema",
    "Items": "paceline.metrics",
    "Section": "paceline.config.section",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `paceline --help` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
