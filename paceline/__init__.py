"""Paceline: a PyTorch training job from bare machines to a finished, explained run.

Start at `paceline/run/flow.py`: it calls the stages in order, and each stage is one folder.
`from paceline import Workload` is all that a job of your own needs; `paceline.train(...)` and the
other verbs run it from Python (docs/python.md).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api.attached import attach
    from paceline.api.runs import load_run
    from paceline.api.verbs import compare, plan, resume, sweep, train, verify
    from paceline.config.schema import DataConfig
    from paceline.config.section import Section
    from paceline.errors import PacelineError, RunFailed
    from paceline.metrics import Items
    from paceline.workloads.base import Workload

__version__ = "0.7.0"
__all__ = [
    "DataConfig", "Items", "PacelineError", "RunFailed", "Section", "Workload", "__version__",
    "attach", "compare", "load_run", "plan", "resume", "sweep", "train", "verify",
]  # fmt: skip

_HOMES = {
    "Workload": "paceline.workloads.base",
    "DataConfig": "paceline.config.schema",
    "Items": "paceline.metrics",
    "Section": "paceline.config.section",
    "PacelineError": "paceline.errors",
    "RunFailed": "paceline.errors",
    "attach": "paceline.api.attached",
    "load_run": "paceline.api.runs",
    "resume": "paceline.api.verbs",
}
# Verbs that have a module of their name, which is what `paceline.train` is once it is imported.
_VERBS = ("compare", "plan", "sweep", "train", "verify")


class _Verb(ModuleType):
    """A module that can be called: `paceline.train.loop` is a module of ours, and
    `paceline.train("lm_tiny")` trains."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)

    @property
    def _function(self) -> Any:
        verbs = import_module("paceline.api.verbs")
        return getattr(verbs, self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: the import system sets a module on it once it is loaded, whoever asked."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `paceline --help` stays instant."""
    if name in _VERBS:
        return import_module(f"paceline.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
