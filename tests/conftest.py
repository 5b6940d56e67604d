"""Fixtures for all tests: one thread a process, no cache or state shared with the user's."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines report AMX and trap on it, which kills bf16 on the CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Read when Triton is imported: without a GPU its kernels are interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import atexit
import json
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.skips import require_reason

hypothesis.settings.register_profile("shared", deadline=None)  # other tests run beside them
hypothesis.settings.load_profile("shared")

# What tests type is no code that the user has typed, and what this machine has measured is nothing
# that tests may depend on.
for kind in ("STATE", "CACHE"):
    os.environ[f"XDG_{kind}_HOME"] = tempfile.mkdtemp(prefix=f"paceline-{kind.lower()}-")
    atexit.register(shutil.rmtree, os.environ[f"XDG_{kind}_HOME"], ignore_errors=True)

SLOWEST = (
    "test_docs.py", "test_keep_", "test_deepspeed.py", "test_launchers.py", "test_soak.py",
    "test_pipeline.py", "test_verify_pipeline.py",
)  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog; " * 40


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 40 small text documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"document {number}\n{TEXT}")
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides that make lm_tiny a matter of milliseconds, on synthetic tokens."""
    return [
        "data.source=synthetic",
        "data.synthetic_samples=512",
        "data.seq_len=16",
        f"data.cache_dir={tmp_path / 'cache'}",
        "model.dim=32",
        "model.num_layers=2",
        "train.eval_every=off",
        "train.eval_samples=all",
        "launch.device=cpu",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write failed tests and what they said there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side (`pytest -n 2 --dist loadgroup`) a file's tests share its fixtures, and all that
    start schedulers share those; long files begin first, so that none is left alone at the end."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "schedulers" if "schedulers" in item.path.parts else item.path.name
            item.add_marker(pytest.mark.xdist_group(group))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.path.name.startswith(SLOWEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    return require_reason((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, Any]:
    return require_reason((yield))


FAILURES: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILURES[report.nodeid.partition("@")[0]] = report.longreprtext


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--failures")
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        path.write_text(json.dumps(FAILURES))
