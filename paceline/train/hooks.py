"""Hooks of the workload: called after steps, evaluations and checkpoints.

The loop calls whatever is in a tuple, which is empty where the workload has no such method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import JobError, PacelineError
from paceline.workloads.base import Workload

Hook = Callable[[int, Any], None]  # the step, and what there is to know of it


@dataclass(frozen=True)
class Hooks:
    on_step: tuple[Hook, ...] = ()
    on_eval: tuple[Hook, ...] = ()
    on_checkpoint: tuple[Hook, ...] = ()


def find_hooks(workload: Workload, rank: int) -> Hooks:
    """Return the hooks that this rank calls."""
    if rank > 0 and workload.hook_ranks == "first":
        return Hooks()
    return Hooks(
        *(_own(workload, name) for name in ("on_step", "on_eval", "on_checkpoint")),
    )


def _own(workload: Workload, name: str) -> tuple[Hook, ...]:
    if getattr(type(workload), name) is getattr(Workload, name):
        return ()

    def hook(step: int, what: Any) -> None:
        try:
            getattr(workload, name)(step, what)
        except PacelineError:
            raise
        except Exception as error:
            raised = f"{type(workload).__name__}.{name} raised {type(error).__name__}: {error}"
            told = JobError(f"{raised} at step {step}")
            # With its own traceback: the verdict names the line of the user's that led to it.
            raise told.with_traceback(error.__traceback__) from error

    return (hook,)
