"""Workloads that a Python program hands over as classes: `paceline.train(MyJob)`.

Such a class may be defined in a notebook or a script, and then it is in no file that a rank could
load. So it has a name, `python:MyJob`, that only this process knows; and it travels to the ranks
that this process forks, pickled, through the pipe by which they are started. It is never written:
no file of a run can bring code, and a run that is resumed needs the class again.
"""

import pickle
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

PREFIX = "python:"
ATTACHED = "attached"  # the workload of a run whose loop is a script's own (paceline.attach)
_GIVEN: dict[str, type[Any]] = {}  # as sys.modules: what a name means in this process


def give(kind: type[Any]) -> str:
    """Return the name by which this process knows a class from now on."""
    name = f"{PREFIX}{kind.__name__}"
    _GIVEN[name] = kind
    return name


def is_given(name: str) -> bool:
    """Tell whether a workload's name stands for a class that a program handed over."""
    return name.startswith(PREFIX) or name == ATTACHED


def find_given(name: str) -> type[Any]:
    """Return the class; `ConfigError` in a process that was not given it."""
    if name == ATTACHED:
        raise ConfigError(
            "the loop of this run is a script's own, which called paceline.attach: Paceline cannot"
            " run it\nhint: start the script again"
        )
    if name not in _GIVEN:
        short = name.removeprefix(PREFIX)
        raise ConfigError(
            f"{name}: this workload was a class of a Python program, and is in no file\n"
            f"hint: hand it over again: paceline.resume(RUN_DIR, {short}), or"
            f" paceline.train({short}); from a file, FILE.py:{short}, the command line finds it too"
        )
    return _GIVEN[name]


def training(name: str, words: Sequence[str]) -> str:
    """Return what trains this job: a command or, of a class that only its program has, a call from
    Python."""
    if is_given(name):
        return f"paceline.train({', '.join([name.removeprefix(PREFIX), *map(repr, words)])})"
    return shlex.join(["paceline", "train", name, *words])


def resuming(run_dir: Path | str, name: str) -> str:
    """Return what resumes a run of this workload, in the same way."""
    if is_given(name) and name != ATTACHED:
        return f"paceline.resume({str(run_dir)!r}, {name.removeprefix(PREFIX)})"
    return f"paceline train --resume {shlex.quote(str(run_dir))}"


def pack(name: str) -> bytes:
    """Return a class with all that it uses of the program that defined it: what is importable by
    its name, the rest by value. Empty where the name is not that of a class that was given."""
    if not is_given(name):
        return b""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(find_given(name)))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name.removeprefix(PREFIX)} cannot be sent to ranks: {error}\n"
            "hint: something that its methods use of your program cannot be copied into another"
            " process (an open file, a lock, a connection): make it inside build_data or"
            " build_model, or put the class into a file and name that: FILE.py:Class"
        ) from error


def unpack(packed: bytes) -> None:
    """In a rank: take over the class that its own supervisor has sent."""
    if packed:
        give(pickle.loads(packed))
