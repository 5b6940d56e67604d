"""Fixtures of the tests that run the real program."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.bench import Bench, wait_until
from tests.cli.program import EXIT_CODES


@pytest.fixture(autouse=True)
def exit_codes(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Note with which codes the programs of a test ended."""
    EXIT_CODES.clear()
    yield
    record_property("exit_codes", " → ".join(map(str, EXIT_CODES)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    try:
        wait_until(lambda: not made.processes(), 5, "processes are gone")
    finally:
        for process in made.processes():
            process.kill()
    left = [path for path in made.temporary.rglob("*") if not path.is_dir()]
    assert left == [], "temporary files are left"
    wrecks = [str(path) for name in (".tmp-*", ".old-*") for path in made.folder.rglob(name)]
    assert wrecks == [], "temporary folders are left"
