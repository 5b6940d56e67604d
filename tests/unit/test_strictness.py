"""The suite is strict: a flaky test is told from a broken one, and a skip needs an excuse."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import why_refused

ROOT = Path(__file__).parents[2]
FLAKY = """
from pathlib import Path

def test_second_time_lucky_{number}():
    mark = Path(__file__).with_name("mark{number}")
    seen = mark.exists()
    mark.touch()
    assert seen, "planted"
"""


def run(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (folder / "test_it.py").write_text("\n".join(tests))
    return subprocess.run(
        [sys.executable, ROOT / "scripts/test_strictly", "-n", "1", "-q", "test_it.py"],
        cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
def test_two_may_be_flaky_and_are_shown(tmp_path: Path) -> None:
    done = run(tmp_path, *(FLAKY.replace("{number}", str(n)) for n in range(2)))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("--- beside others it failed:") == 2
    assert done.stdout.count("--- alone it passed:") == 2 and "planted" in done.stdout


@pytest.mark.slow
def test_three_may_not(tmp_path: Path) -> None:
    done = run(tmp_path, *(FLAKY.replace("{number}", str(n)) for n in range(3)))
    assert done.returncode == 1 and "3 tests are flaky" in done.stdout


@pytest.mark.slow
def test_what_fails_alone_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_broken(): assert 0", FLAKY.replace("{number}", "0"))
    assert done.returncode == 1
    assert "FAILED test_it.py::test_broken" in done.stdout
    assert "FLAKY test_it.py::test_second_time_lucky_0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pytest.skip('no time')", "pytest.importorskip('no_such')"])
def test_a_skip_needs_an_excuse(where: str, tmp_path: Path) -> None:
    inside = run(tmp_path, f"import pytest\ndef test_it(): {where}")
    assert inside.returncode == 1 and "skipped without an excuse" in inside.stdout


def test_an_excuse_must_be_true(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not on the list" in why_refused("I do not like it")
    reason = "needs chromium"
    monkeypatch.delenv("PACELINE_REQUIRED", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert why_refused(reason) == ""
    monkeypatch.setenv("PACELINE_REQUIRED", "chromium slurm")
    assert "chromium must be here" in why_refused(reason)
    monkeypatch.delenv("PACELINE_REQUIRED")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert why_refused(reason) == "it is here"


def test_every_fault_that_mutants_plants_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/mutants` takes an hour, and plants none while one of them is stale."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    faults = importlib.import_module("mutating.faults").FAULTS
    times = {fault.name: (ROOT / fault.file).read_text().count(fault.old) for fault in faults}
    assert {name: count for name, count in times.items() if count != 1} == {}
    assert [fault.test for fault in faults if not has_test(fault.test)] == []


def has_test(node: str) -> bool:
    file, _, name = node.partition("::")
    return f"def {name.partition('[')[0]}" in (ROOT / file).read_text()
