"""The file of a workload called FILE.py:Class: where it lies, whether it may run, whether it has
changed. It runs only if it was typed on this machine (paceline/trust.py)."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from paceline.errors import ConfigError
from paceline.records.files import fingerprint
from paceline.trust import Code, own_files, remember, strangers
from paceline.workloads.given import find_given, is_given

# Asked about files that a run directory names and nobody has typed here: True where they may run.
Approve = Callable[[Sequence[Code]], bool]


def absolute_name(name: str) -> str:
    """Return FILE.py:Class with a full path: it is found whatever the working directory."""
    return f"{_file_of(name)}:{name.rpartition(':')[2]}" if ".py:" in name else name


def remember_typed(name: str) -> None:
    """Remember that a person has typed FILE.py:Class here: the file, and what it imports from its
    own folder, may run again. Names of installed workloads need no trust."""
    if ".py:" in name and _file_of(name).is_file():
        remember(own_files(_file_of(name)))


def require_trusted(name: str, run_dir: Path, approve: Approve | None = None) -> None:
    """Refuse a file that a run directory names: one inside it always, any other unless it was typed
    on this machine as it is now, or `approve` says yes."""
    if ".py:" not in name:
        return
    file = _file_of(name)
    if file.is_relative_to(run_dir.resolve()):
        raise ConfigError(
            f"{file} lies inside the run directory; code that comes with a run is not run\n"
            "hint: move it elsewhere and start a new run with it"
        )
    if not file.is_file():
        raise ConfigError(f"{file}, which {run_dir} was trained with, is gone\nhint: put it back")
    unknown = strangers(own_files(file))
    if not unknown:
        return
    if approve is None or not approve(unknown):
        raise ConfigError(
            [
                f"{run_dir} would run {code}, and nobody has typed that file on this machine as it"
                " is now\nhint: read it, then say --trust-code"
                for code in unknown
            ]
        )
    remember_typed(name)


def code_fingerprint(workload: str) -> str:
    """Return a checksum of Paceline's sources, torch's version, and the user's workload file with
    what it imports from its own folder; for a class that a program handed over, of its source."""
    if is_given(workload):
        return fingerprint(_own_fingerprint(), _source_of(find_given(workload)))
    try:
        files = own_files(_file_of(workload)) if ".py:" in workload else []
        return fingerprint(_own_fingerprint(), *(path.read_bytes() for path in files))
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is gone\nhint: put it back, and resume") from error


def _file_of(name: str) -> Path:
    return Path(name.rpartition(":")[0]).resolve()


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed at a prompt
        return kind.__qualname__


@cache
def _own_fingerprint() -> str:
    """Return the checksum of our own sources, taken once: later edits do not change what runs."""
    package = Path(__file__).parents[1]
    sources = [path.read_bytes() for path in sorted(package.rglob("*.py"))]
    return fingerprint(*sources, version("torch"))
