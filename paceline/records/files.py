"""Files that are whole or absent (temp file, fsync, rename), and files that one process holds."""

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Self


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`; a reader, or a kill, sees the old file or the new one."""
    raw = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileLock:
    """An exclusive lock on a file, which the kernel takes back when its process dies. Without
    `wait` a lock that another process holds is a BlockingIOError."""

    def __init__(self, path: Path, wait: bool = True) -> None:
        self.path, self.wait = path, wait
        self._handle: int | None = None

    def __enter__(self) -> Self:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if self.wait else fcntl.LOCK_NB))
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None, "the lock was not taken"
        os.close(self._handle)


def fingerprint(*parts: bytes | str) -> str:
    """A short name for content: equal content, equal name."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()[:16]
