"""What the class of a workload must define, checked on the class alone: mistakes are refused, all
at once, before any of its code runs. Also explains why a file cannot be imported.

    sections    Model and Loss are built on paceline.Section, Data on paceline.DataConfig
    methods     the required ones are there; each can be called as Paceline calls it
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from paceline.config.schema import DataConfig
from paceline.config.section import Section

SECTIONS: dict[str, type[Section]] = {"Model": Section, "Data": DataConfig, "Loss": Section}
REQUIRED = ("build_model", "build_data", "loss")


def class_problems(kind: type[Any], seam: type[Any], name: str) -> Iterator[str]:
    """Yield what is wrong with a class that is built on `seam`, which a user knows by `name`."""
    for section, base in SECTIONS.items():
        if not _is_built_on(getattr(kind, section), base):
            yield _section_problem(name, section, getattr(kind, section), base)
    for method in REQUIRED:
        if getattr(kind, method) is getattr(seam, method):
            yield f"{name} must define {method}"
    for method, meant in vars(seam).items():
        if isinstance(meant, FunctionType) and not method.startswith("_"):
            yield from _call_problems(kind, method, meant, name)
    if not _takes(kind, 0):
        yield (
            f"{name}: __init__ needs arguments, and Paceline gives none\n"
            "hint: def __init__(self); what shall be set from outside is a key of class Model"
        )


def _is_built_on(value: object, base: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _section_problem(name: str, section: str, value: object, base: type[Section]) -> str:
    what = repr(value)
    if isinstance(value, type):
        parents = ", ".join(parent.__name__ for parent in value.__bases__ if parent is not object)
        what = f"class {value.__name__}({parents})" if parents else f"class {value.__name__}"
    return (
        f"{name}.{section} is {what:.60}; its keys are those of `{section.lower()}`, so it must be"
        f" built on paceline.{base.__name__}\n"
        f"hint: class {section}(paceline.{base.__name__}), with a line for each key: size: int = 8"
    )


def _call_problems(kind: type[Any], method: str, meant: FunctionType, name: str) -> Iterator[str]:
    """Yield a method that cannot be called with the arguments of the one that it replaces."""
    own, raw = getattr(kind, method), inspect.getattr_static(kind, method)
    if own is meant:
        return
    names = ", ".join(inspect.signature(meant).parameters)
    right, call = f"def {method}({names})", f"{method}({names.removeprefix('self, ')})"
    if not callable(own):
        yield (
            f"{name}.{method} is {own!r:.40}, and Paceline calls {call}\n"
            f"hint: {right}; what is no method needs another name"
        )
        return
    num_given = len(inspect.signature(meant).parameters)
    if isinstance(raw, staticmethod | classmethod) or not hasattr(raw, "__get__"):  # without self
        num_given -= 1
    if not _takes(own, num_given):
        yield (
            f"{name}.{method} is written {method}{_bare(own)}, and Paceline calls {call}\n"
            f"hint: {right}"
        )


def _takes(call: Any, num_given: int) -> bool:
    try:
        inspect.signature(call).bind(*range(num_given))
    except TypeError:
        return False
    except ValueError:  # in C: nobody knows
        return True
    return True


def _bare(call: Any) -> str:
    """Return `(self, config, split)`: the names, without types and values."""
    kinds: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = inspect.signature(call).parameters.values()
    return f"({', '.join(kinds.get(each.kind, '') + each.name for each in found)})"


def explain_import(file: str, error: BaseException) -> str:
    """Say why a job's file cannot be imported, with its own line."""
    at = f"{file}{_line_in(Path(file).resolve(), error)}"
    if isinstance(error, SystemExit):
        return (
            f"{at} ends the program while it is imported: SystemExit({error.code!r})\n"
            "hint: what it does as a script, reading arguments too, belongs under `if __name__ =="
            ' "__main__":`'
        )
    return f"{at} cannot be imported: {type(error).__name__}: {error}"


def _line_in(path: Path, error: BaseException) -> str:
    """Return `:12` for the user's own line that raised, if there is one."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line
