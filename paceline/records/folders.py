"""Folders that are whole or absent: written under another name, made durable, then renamed.

with appearing(target) as folder:        a kill leaves a hidden folder, never a `target`
    write_files(folder)
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import ConfigError, SaveError
from paceline.records.files import sync_directory

UNFINISHED = ".tmp-"
MOVE = "give --out another folder, or move this one away"


def require_unused(target: Path, hint: str = MOVE) -> None:
    """Refuse a folder that has something in it."""
    try:
        is_used = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise ConfigError(f"{target} cannot be looked at: {error.strerror}") from error
    if is_used:
        raise ConfigError(f"{target} already exists, and nothing is written over\nhint: {hint}")


@contextmanager
def appearing(target: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a folder to write to that becomes `target` at the end, or leaves no trace. Of several
    that write the same target one wins; the others are refused as if they had come later.
    `replaces`: what is there goes, once the new folder is whole."""
    temporary = target.parent / f"{UNFINISHED}{target.name}-{secrets.token_hex(4)}"
    old = temporary.with_name(f"{temporary.name}-old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # libraries make files that nobody else may read
            sync_directory(path)
        sync_directory(temporary)
        _put(temporary, target, old if replaces and target.exists() else None)
        sync_directory(target.parent)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            require_unused(target)
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SaveError(f"{target} could not be written: {why}") from error
    finally:
        for folder in (temporary, old):
            shutil.rmtree(folder, ignore_errors=True)


def _put(new: Path, target: Path, old: Path | None) -> None:
    """Rename `new` to `target`; what is there becomes `old`, and comes back if that fails."""
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
