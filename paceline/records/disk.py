"""Writes to a disk that may be full, read-only or gone, without ending the training.

    Losses                what this process could not write, by file: counted, told at the end
    Appender              appends lines; what the disk does not take is held back for later, and
                          `flush_soon` waits for no disk at all
    reserve, save_last    the room of a record that is written last, taken when the run begins

Nothing here raises because of a disk but `reserve` and `save_last`.
"""

import io
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.records.files import sync_directory, write_atomic
from paceline.records.scribe import SCRIBE

HELD_BYTES = 1 << 20  # of one file, until there is room again
LOG_BYTES = 1 << 16  # the same of what a process prints
MAX_SPANS, MAX_BEGUN = 16, 4096
PATIENCE_S = 0.05  # of a rank that prints


@dataclass
class Loss:
    """What was not written to one file."""

    num_writes: int = 0  # that failed
    num_bytes: int = 0  # that are not there: less again once what was held back is written
    error: str = ""  # the first one
    missing: list[tuple[int, int]] = field(default_factory=list)  # spans of steps without a row

    def miss_step(self, step: int) -> None:
        """Note that a step has no row. Steps come in order, each perhaps several times; after
        MAX_SPANS spans the last one is stretched, so that the list does not grow."""
        first, last = self.missing[-1] if self.missing else (step, step - 1)
        if step <= last + 1 or len(self.missing) == MAX_SPANS:
            self.missing[-1:] = [(first, max(last, step))]
        else:
            self.missing.append((step, step))


@dataclass
class Losses:
    """What this process could not write, by file. Training goes on, and the user is informed."""

    by_file: dict[Path, Loss] = field(default_factory=dict)

    def note(self, path: Path, error: OSError, num_bytes: int = 0) -> Loss:
        """Count a write that failed, and the bytes that are lost with it."""
        loss = self.by_file.setdefault(path, Loss(error=error.strerror or str(error)))
        loss.num_writes += 1
        loss.num_bytes += num_bytes
        return loss

    def keep(
        self, path: Path, content: str, write: Callable[[Path, str], None] = write_atomic
    ) -> bool:
        """Replace a file by `content`; return False, and count it, if the disk does not take it."""
        try:
            write(path, content)
        except OSError as error:
            self.note(path, error).num_bytes = len(content.encode())
            return False
        if path in self.by_file:  # what an earlier try could not write is there now
            self.by_file[path].num_bytes = 0
        return True


class Appender:
    """Appends to a file and never fails. What the disk does not take is held back, and written
    before anything else once it takes something again; of more than `hold` bytes the oldest whole
    lines are dropped and counted.

    A disk that fills up takes a part of a line. Its rest stays in front of all that is held, so
    that no later line is glued to it. Threads may share an appender; a forked child holds nothing,
    for its parent will write that. Lines go to `_new` first, so that whoever appends does not wait
    for one who writes.
    """

    def __init__(
        self,
        path: Path,
        lost: Losses | None = None,
        hold: int = HELD_BYTES,
        handle: int | None = None,
    ) -> None:
        self.path, self.lost, self.hold = path, Losses() if lost is None else lost, hold
        self._handle = handle
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock, self._gate = os.getpid(), threading.RLock(), threading.RLock()
        self._new, self._held = bytearray(), bytearray()
        self._is_asked = False  # to be written by the scribe
        self._num_counted = 0  # bytes of it that count as lost, until they are written
        self._scrap = 0  # bytes on the disk of a line that is not whole
        self._begun = b""  # the first of them
        self._is_pinned = False

    def _alone(self) -> threading.RLock:
        """Return what keeps other threads out. In a child the parent's lock may never be free."""
        self._leave_parent()
        return self._lock

    def _leave_parent(self) -> None:
        if self._process != os.getpid():
            self._begin()

    def append(self, lines: bytes, is_pinned: bool = False) -> None:
        """Take lines in; `flush` writes them. The first one is never dropped if `is_pinned`."""
        self._leave_parent()
        with self._gate:
            self._is_pinned |= is_pinned and not (self._held or self._new)
            self._new += lines

    def flush_soon(self, patience_s: float = 0.0) -> None:
        """Have a thread write all that is held. Wait for it a moment, so that a process that dies
        next has said its last word; but not again before a disk that is slower has taken it."""
        self._leave_parent()
        with self._gate:
            if self._is_asked:
                return
            self._is_asked = True
        is_written = threading.Event()

        def write() -> None:
            self._is_asked = False  # what is appended from here on asks anew
            self.flush()
            is_written.set()

        SCRIBE.ask(write)
        if patience_s:
            is_written.wait(patience_s)

    def flush(self) -> bool:
        """Write all that is held; False where the disk has not taken all of it. The file is there
        from the first time on."""
        with self._alone():
            with self._gate:
                self._held += self._new
                self._new.clear()
            error = self._write()
            if error is not None:
                self.lost.note(self.path, error)
            self._count()
            if error is not None:
                self._drop(keep=self.hold)
            return error is None

    def _write(self) -> OSError | None:
        try:
            handle = self._open()
            while self._held:
                self._note_written(os.write(handle, bytes(self._held)))
        except OSError as error:
            return error
        return None

    def reopen(self) -> None:
        """Append to the file that has the name now: somebody has put another in its place."""
        with self._alone():
            if self._handle is not None:
                os.close(self._handle)
            self._handle = None

    def write_over(self, line: bytes) -> bool:
        """Put a line in the place of the last one, which is as long; False where the disk does not
        take it."""
        with self._alone():
            try:
                with self.path.open("r+b", buffering=0) as file:  # ours can only append
                    file.seek(-len(line), os.SEEK_END)
                    file.write(line)
            except OSError as error:
                self.lost.note(self.path, error)
                return False
            return True

    def sync(self) -> None:
        """Write all that is held, for good."""
        if self.flush() and self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                self.lost.note(self.path, error)

    def close(self) -> None:
        """Write all that is held, or lose it. What is there of a line that is not whole goes."""
        with self._alone():
            try:
                if not self.flush():
                    self._give_up()
                if self._handle is not None:
                    os.close(self._handle)
            except OSError as error:
                self.lost.note(self.path, error)
            self._handle = None

    def _give_up(self) -> None:
        scrap, rest = self._scrap, self._held.partition(b"\n")[0]
        if scrap:
            self.lost.by_file[self.path].num_bytes += scrap
            self.dropped(self._begun + bytes(rest))
        self._is_pinned = False
        self._drop(keep=0)
        self._held.clear()
        self._num_counted = 0
        if scrap and self._handle is not None:
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - scrap)
            self._scrap = 0

    def dropped(self, line: bytes) -> None:
        """Hear of a line that is lost."""

    def _open(self) -> int:
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._handle = os.open(self.path, flags, 0o644)
        return self._handle

    def _note_written(self, num_bytes: int) -> None:
        written = self._held[:num_bytes]
        last = written.rfind(b"\n") + 1
        self._scrap = num_bytes - last + (0 if last else self._scrap)
        self._begun = ((b"" if last else self._begun) + bytes(written[last:]))[:MAX_BEGUN]
        self._is_pinned &= not last
        del self._held[:num_bytes]

    def _drop(self, keep: int) -> None:
        """Drop the oldest whole lines, so that no more than `keep` bytes of them are held."""
        begin = self._held.find(b"\n") + 1 if self._scrap or self._is_pinned else 0
        excess = len(self._held) - begin - keep
        if excess <= 0:
            return
        end = self._held.find(b"\n", begin + excess - 1) + 1 or len(self._held)
        for line in bytes(self._held[begin:end]).splitlines():
            self.dropped(line)
        del self._held[begin:end]
        self._num_counted -= end - begin  # these stay lost

    def _count(self) -> None:
        """Count what is held as lost, or as written after all."""
        if more := len(self._held) - self._num_counted:
            self.lost.by_file[self.path].num_bytes += more
            self._num_counted = len(self._held)


class LogStream(io.RawIOBase):
    """A stream of this process's own output, such as fd 1, into which any code may print: a full
    disk must not raise there. Streams that go to one file share its appender, lest what one could
    not finish is glued to what the other writes."""

    def __init__(self, file: Appender, number: int, patience_s: float | None = None) -> None:
        self._file, self._number, self._patience_s = file, number, patience_s
        self.name = str(file.path)  # which a stream of Python has

    @classmethod
    def open_text(
        cls, file: Appender, number: int, patience_s: float | None = None
    ) -> io.TextIOWrapper:
        """Return it as the stream of text that sys.stdout is, written line by line. Whoever prints
        waits for the disk for `patience_s` at most; without it, as long as it takes."""
        buffered = io.BufferedWriter(cls(file, number, patience_s))
        return io.TextIOWrapper(buffered, "utf-8", "backslashreplace", line_buffering=True)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any, /) -> int:
        self._file.append(bytes(data))
        if self._patience_s is None:
            self._file.flush()
        else:
            self._file.flush_soon(self._patience_s)
        return len(data)


def reserve(path: Path, num_bytes: int) -> None:
    """Take the room of a record on the disk, for `save_last`; `OSError` where there is none."""
    handle = os.open(_reserved(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        release(path)
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def save_last(path: Path, content: str) -> None:
    """Replace `path` by `content`, as `write_atomic` does, in the room that was reserved for it:
    blocks that nobody else can have taken."""
    raw, room = content.encode(), _reserved(path)
    try:
        with room.open("r+b") as file:
            file.write(raw)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(room, path)
    except OSError:  # nothing was reserved, or too little
        release(path)
        write_atomic(path, content)
        return
    sync_directory(path.parent)


def release(path: Path) -> None:
    """Give back the room of a record that will not be written."""
    discard(_reserved(path))


def discard(path: Path) -> None:
    """Remove a file that is no longer needed, if that is possible."""
    with suppress(OSError):
        path.unlink()


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")
