"""docs/faults.md says what tests have shown: its rows are those of tests/faults.py, all passed."""

import ast
from pathlib import Path

import pytest

from tests.faults import LIST, OPEN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/faults.md"


def test_the_page_has_every_fault_of_the_list_and_no_other() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| ")]
    shown = [(row[0].strip("| "), row[1], row[2]) for row in rows[2:]]
    assert shown == [(fault.number, fault.what, fault.then) for fault in LIST], "make faults"
    assert all(row[-1].startswith("passed") for row in rows[2:]), "a fault is not as promised"


@pytest.mark.parametrize("path", sorted({fault.test.partition("::")[0] for fault in LIST}))
def test_every_fault_names_a_test_that_is_there(path: str) -> None:
    names = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }  # fmt: skip
    named = {f.test.partition("::")[2].partition("[")[0] for f in LIST if f.test.startswith(path)}
    assert named <= names


def test_every_number_of_the_matrix_is_in_the_list_or_open() -> None:
    matrix = {f"F{n}" for n in range(1, 46)} | {f"F46{letter}" for letter in "abcdef"}
    listed = {number for fault in LIST for number in fault.number.split(", ") if number}
    assert listed | OPEN.keys() == matrix and not listed & OPEN.keys()
