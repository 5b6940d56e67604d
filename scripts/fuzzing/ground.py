"""Where the inputs of a kind lie: valid files, changed for one case and put back after it."""

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Content = bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One input and who reads it: `act` ends as the program does, in an exit code or an error.
    `words` is what a person would type."""

    words: tuple[str, ...]
    act: Callable[[], object]


class Ground:
    """The files of one kind below `root`. `made`: what its readers leave there, removed again."""

    def __init__(self, root: Path, made: tuple[str, ...] = ()) -> None:
        self.root, self.made = root, made
        self.valid: dict[str, bytes] = {}
        self._changed: set[str] = set()
        root.mkdir(parents=True)

    def add(self, name: str, raw: bytes) -> None:
        self.valid[name] = raw
        self._write(name, raw)

    def add_folder(self, source: Path, name: str = "") -> None:
        """Take all files of a folder as valid ones."""
        for path in sorted(source.rglob("*")):
            if path.is_file():
                self.add(str(Path(name) / path.relative_to(source)), path.read_bytes())

    def change(self, name: str, content: Content) -> Path:
        """Put other content, or something that is not a file, at a name until `restore`."""
        self._changed.add(name)
        self._write(name, content)
        return self.root / name

    def restore(self) -> None:
        for name in self._changed:
            self._write(name, self.valid[name]) if name in self.valid else _remove(self.root / name)
        self._changed.clear()
        for name in self.made:
            _remove(self.root / name)

    def keep(self, folder: Path) -> None:
        """Copy everything as it lies now: the input that a report of a failure comes with."""
        for path in sorted(self.root.rglob("*")):
            copy = folder / path.relative_to(self.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode):
                copy.symlink_to(os.readlink(path))
            elif stat.S_ISFIFO(facts.st_mode):
                os.mkfifo(copy)
            elif stat.S_ISREG(facts.st_mode):
                shutil.copyfile(path, copy)
            else:
                copy.mkdir(exist_ok=True)

    def _write(self, name: str, content: Content) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, bytes):
            _remove(path)
            content(path)
            return
        if path.is_symlink() or (path.exists() and not path.is_file()):
            _remove(path)
        path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
