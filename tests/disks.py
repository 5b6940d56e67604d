"""Small file systems for tests: one that fills up, and one that becomes read-only while files on it
are open for writing, as after an error of the device."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
IMAGE_BYTES = 4 << 20  # of an ext4


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of so many bytes (`96k`, `2m`)."""
    place.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        _unmount(place)


@contextmanager
def breakable_disk(place: Path) -> Iterator[Path]:
    """An ext4 in a file, for `break_disk`: nobody else can make a disk read-only that is in use."""
    place.mkdir()
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    if subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    _mount("-o", "loop,errors=remount-ro", str(image), str(place))
    try:
        yield place
    finally:
        _unmount(place)


def break_disk(disk: Path) -> None:
    """Have the kernel do what it does after an error of the device: every write fails from now."""
    _mount("-o", "remount,abort", str(disk))


def fill(disk: Path) -> Path:
    """Fill a disk to its last page; return the file to remove."""
    path = disk / "filling"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 14))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


def _mount(*words: str) -> None:
    if subprocess.run(["mount", *words], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")


def _unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True)
