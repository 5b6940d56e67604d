"""Which of the user's files may run: those that were typed on this machine.

    remember(files)     somebody typed FILE.py:Class: what it holds now may run again
    strangers(files)    files that a run directory names, and whose content nobody here has typed
    own_files(file)     a file with what it imports from its own folder

What was typed is kept beside no run, in the user's own state folder: a directory that came from
elsewhere cannot bring it. A file counts with its path and the SHA-256 of its content.
"""

import ast
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.errors import DataError
from paceline.records.files import FileLock, read_regular, write_atomic

LEDGER = "trusted.json"
MAX_ENTRIES = 4096
MAX_BYTES = 4 << 20
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Code(NamedTuple):
    """A file as it is now."""

    path: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} (SHA-256 {self.sha256})"


def state_folder() -> Path:
    """Return where this user's own state is kept. XDG: a relative path there is to be ignored."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "paceline"


def open_state() -> Path:
    """Return the state folder, made if need be; nobody else may look into it."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def remember(files: Iterable[Path]) -> None:
    """Keep that these files, as they are now, may run. Where the folder cannot be written nothing
    is kept, and a later --resume asks."""
    found = [_code_of(file) for file in files]
    if not set(found) - _known():
        return
    with suppress(OSError):
        folder = open_state()
        with FileLock(folder / f".{LEDGER}.lock"):
            entries = [entry for entry in _load() if entry not in found] + found
            body = {"schema": 1, "files": entries[-MAX_ENTRIES:]}
            write_atomic(folder / LEDGER, json.dumps(body, indent=1) + "\n", mode=0o600)


def strangers(files: Iterable[Path]) -> list[Code]:
    """Return those of these files whose content was never typed at this path."""
    known = _known()
    return [code for code in map(_code_of, files) if code not in known]


def own_files(file: Path) -> list[Path]:
    """Return a workload's file, and what it imports from its own folder, directly or not."""
    found, left = [file], [file]
    while left:
        for name in _imported(left.pop()):
            module, package = file.parent / f"{name}.py", file.parent / name
            # Python takes a package, or a module that was compiled, before the file of that name.
            compiled = [*file.parent.glob(f"{name}.*so"), *package.rglob("*.so")]
            files = [*compiled, *package.rglob("*.py"), *([module] if module.is_file() else ())]
            new = sorted(path for path in files if path not in found)
            found += new
            left += new
    return found


def _imported(file: Path) -> set[str]:
    """Return the first words of its imports, at the top of the file or inside a function; none of
    a file that python cannot read."""
    names: set[str] = set()
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's own limits
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - {"paceline"}


def _code_of(file: Path) -> Code:
    path = file.resolve()
    return Code(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def _known() -> set[Code]:
    return set(_load())


def _load() -> list[Code]:
    """Return what was typed, oldest first. A ledger that another user could have written, or that
    is damaged, says nothing."""
    path = state_folder() / LEDGER
    try:
        facts = path.lstat()
        if facts.st_uid != os.geteuid() or facts.st_mode & OTHERS_WRITE:
            return []
        entries = json.loads(read_regular(path, MAX_BYTES))["files"]
        return [Code(str(file), str(digest)) for file, digest in entries]
    except (OSError, DataError, ValueError, KeyError, TypeError, RecursionError):
        return []
