"""Writes files whole or not at all (temp file, fsync, rename), locks files, and safely reads
files that others may have placed."""

import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from paceline.errors import DataError

TORN = re.compile(r"\..+\.(json|yaml|md|html|csv|tsv|txt|secret)\.[a-z0-9_]{8}")  # as mkstemp draws
TORN_S = 60.0


def open_regular(path: Path, follow: bool = False) -> BinaryIO:
    """Open a plain file. A link, which may lead anywhere, or something that is not a file, such as
    a FIFO without a writer, is a `DataError`; a missing one is an `OSError`. `follow`: a person
    named it, so it may be a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if path.is_symlink() and not follow:
            raise DataError(f"{path} is a link, and links are not read here") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path} is not a plain file\nhint: bring back the file that was there")
    return open(handle, "rb")


def read_regular(path: Path, max_bytes: int, follow: bool = False) -> bytes:
    """Return what a plain file holds; more than `max_bytes` is a `DataError` too."""
    with open_regular(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise DataError(
                f"{path} has {size} bytes; no file of its kind has more than {max_bytes}"
            )
        return file.read(max_bytes)


def read_text(path: Path, max_bytes: int, follow: bool = False) -> str:
    """Return the text of a plain file, without a byte order mark. Anything wrong with it is a
    `DataError` that names it."""
    try:
        return read_regular(path, max_bytes, follow).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: it is not text in UTF-8\n"
            "hint: save it as UTF-8, or restore the file that was there"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a name with a zero byte
        raise DataError(f"cannot read {str(path)!r}: {error}") from error


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace `path` by `content`; a reader, or a kill, sees the old file or the new one. An
    `OSError` names `path`, and nothing is left of it."""
    raw = content.encode() if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(handle, fcntl.LOCK_EX)  # while this process lives: see `sweep_torn`
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # on a disk that has become read-only it stays
                os.unlink(temporary)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sweep_torn(folder: Path) -> None:
    """Remove what `write_atomic` has left in a folder when its process was killed: files with the
    kind of name that it gives, a minute old, and locked by nobody."""
    torn = [path for path in folder.iterdir() if TORN.fullmatch(path.name)]
    for path in torn:
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(handle).st_mtime > TORN_S:
                    path.unlink()
            finally:
                os.close(handle)


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


def cache_folder(name: str) -> Path:
    """Return where this user's machine keeps what was found out once: rates, crossovers."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "paceline" / name


def fingerprint(*parts: bytes | str) -> str:
    """A short name for content: equal content, equal name."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()[:16]


def modified_at(path: Path) -> int | None:
    """Return when a file was modified, in nanoseconds; None if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
