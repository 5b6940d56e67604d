"""Packages import one way, and what must run without torch does."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"

# Each package may import from itself, from those on its own line that do not import it, and from
# the lines before it. Imports inside functions count; those for type checkers alone do not.
LAYERS = [
    ["errors", "metrics"],
    ["records"],
    ["config", "trust"],
    ["stats", "schedules", "machine", "data", "prepare", "traces", "kernels", "attention"],
    ["report", "workloads", "track", "health"],
    ["checkpoint"],
    ["strategies"],
    ["job"],
    ["plan"],
    ["train"],
    ["launch"],
    ["run"],
    ["check", "verify", "sweep", "generate", "drill", "watch", "foreign", "diagnose"],
    ["export", "transcribe"],
    ["bench", "compare"],
    ["cli"],
    ["api"],
    ["__main__"],
]
TORCH_FREE = [
    "records", "config", "stats", "report", "errors", "job", "trust", "compare", "schedules",
    "metrics", "track", "health", "traces", "watch", "foreign",
]  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    files = {path.relative_to(PACKAGE.parent): path for path in PACKAGE.rglob("*.py")}
    return {
        ".".join(short.with_suffix("").parts).removesuffix(".__init__"): path
        for short, path in sorted(files.items())
    }


def imports_of(path: Path) -> set[str]:
    """Every module of ours that `path` imports, at its top or inside a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & set(modules())) or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("paceline.")}
    return found - {"paceline"}


def package_of(module: str) -> str:
    return module.split(".")[1]


@cache
def package_imports() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for module, path in modules().items():
        if module != "paceline":
            within = edges.setdefault(package_of(module), set())
            within |= {package_of(name) for name in imports_of(path)} - {package_of(module)}
    return edges


def test_packages_import_one_way() -> None:
    layer_of = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    assert set(package_imports()) == set(layer_of), "each package stands in one layer"
    wrong = [
        f"{package} imports {imported}"
        for package, all_imported in package_imports().items()
        for imported in all_imported
        if layer_of[imported] > layer_of[package]
        or (layer_of[imported] == layer_of[package] and package in package_imports()[imported])
    ]
    assert not wrong


# One process imports them all; the first whose import brings torch is named.
WITHOUT_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def test_runs_without_torch() -> None:
    within = [name for name in modules() if "." in name and package_of(name) in TORCH_FREE]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *within], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_module_imports() -> None:
    kernels = {name for name in modules() if name.startswith("paceline.kernels.")}
    without_triton = kernels if importlib.util.find_spec("triton") is None else set()
    # They make their process ignore signals, and this one has tests to run that send some; and
    # settle its heap.
    server = {f"paceline.launch.fork_server_{when}" for when in ("init", "loaded")}
    left_out = {"paceline.__main__"} | server | without_triton
    for module in set(modules()) - left_out:
        importlib.import_module(module)


def test_models_know_nothing_of_ranks() -> None:
    models = sorted((PACKAGE / "workloads").glob("*/model.py"))
    assert models
    for file in models:
        imports = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert "distributed" not in "".join(imports), file


# What takes a tenth of a second or more to import, and who can do without it: a process that plans
# leaves it to the fork server, and a rank of most strategies needs no other optimizers.
SPARED = {
    "paceline.run.flow": ("paceline.train.worker", "torch.distributed.tensor", "sympy", "triton"),
    "paceline.strategies.pipeline.build": ("torch.distributed.optim",),
}


@pytest.mark.parametrize("module", SPARED)
def test_spares_what_takes_long_to_import(module: str) -> None:
    code = f"import sys, {module}; print(*set(sys.modules) & {set(SPARED[module])})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
