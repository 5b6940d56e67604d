"""Sizes that keep the code readable: files, functions, flags. Over budget: split, do not raise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "paceline").rglob("*.py"))
VERBS = sorted((ROOT / "paceline" / "cli").glob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_FLAGS = 400, 80, 12
GRAB_BAGS = {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_file_and_functions_fit(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= MAX_FILE
    assert file.stem not in GRAB_BAGS
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it turns into what"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("file", VERBS, ids=lambda f: f.stem)
def test_flags_are_few(file: Path) -> None:
    """New knobs go to the config, where sweeps and records see them."""
    flags = set(re.findall(r'"(--[a-z-]+)"', file.read_text()))
    assert len(flags) <= MAX_FLAGS, sorted(flags)


def test_version_and_changelog_agree() -> None:
    from paceline import __version__

    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in pyproject
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(__version__)}\]?", changelog, re.MULTILINE)


def test_public_names_are_what_we_say() -> None:
    import paceline

    assert sorted(paceline.__all__) == paceline.__all__
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
