"""Imports point one way, and what must run without torch does."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"

# Each layer may import from itself and from those before it.
LAYERS = [
    ["paceline.errors", "paceline.records.files"],
    ["paceline.records", "paceline.records.rundir", "paceline.records.tables"],
    ["paceline.config"],
    ["paceline.stats", "paceline.schedules"],
    ["paceline.report", "paceline.machine", "paceline.models"],
    ["paceline.workloads", "paceline.job"],
    ["paceline.data"],
    ["paceline.observe"],
    ["paceline.checkpoint"],
    ["paceline.strategies.clock", "paceline.strategies.optim", "paceline.strategies.precision"],
    ["paceline.train.readback", "paceline.train.feed", "paceline.train.flops"],
    ["paceline.strategies"],
    ["paceline.plan.crew"],
    ["paceline.train", "paceline.plan"],
    ["paceline.launch"],
    ["paceline.run.conclude", "paceline.run.resume"],
    ["paceline.run.flow"],
    ["paceline.check.flow", "paceline.verify", "paceline.sweep"],
    ["paceline.bench", "paceline.compare"],
    ["paceline.cli", "paceline.__main__"],
]
TORCH_FREE = [
    "records", "config", "stats", "report", "rundir", "tables", "files", "errors", "job", "compare",
    "pipeline",
]  # fmt: skip


def modules() -> list[str]:
    files = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return sorted(names)


def layer_of(module: str) -> int:
    """The layer whose name is the longest prefix of the module's."""
    matches = [
        (len(name), number)
        for number, layer in enumerate(LAYERS)
        for name in layer
        if module == name or module.startswith(f"{name}.")
    ]
    assert matches, f"{module} stands in no layer: add it to LAYERS"
    return max(matches)[1]


def top_level_imports(module: str) -> set[str]:
    """Paceline modules imported when `module` is; those inside functions come later, if at all."""
    file = PACKAGE.parent / Path(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & set(modules())) or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("paceline.")}
    return found - {"paceline"}


@pytest.mark.parametrize("module", [m for m in modules() if m != "paceline"])
def test_imports_point_down(module: str) -> None:
    for imported in top_level_imports(module):
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported} from above"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_runs_without_torch(name: str) -> None:
    within = [m for m in modules() if m == f"paceline.{name}" or m.startswith(f"paceline.{name}.")]
    code = f"import sys, {', '.join(within)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"{name} imports torch"


@pytest.mark.parametrize("module", modules())
def test_every_module_imports(module: str) -> None:
    # The nursery makes its process deaf to signals, and this one has tests to run that send some.
    if module not in ("paceline.__main__", "paceline.launch.nursery"):
        importlib.import_module(module)


def test_models_know_nothing_of_ranks() -> None:
    for file in (PACKAGE / "models").glob("*.py"):
        assert "distributed" not in "".join(
            ast.unparse(node)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        )
