"""FlashAttention 3: found where it is installed, refused with the reason where it cannot be had."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.attention.flash3 import find_flash3, is_flash3_used, use_flash3
from paceline.errors import ConfigError
from paceline.records import Attention, Choice
from tests.machines import machine, plan

FLASH3 = "attention.impl=flash3"
HEADS = ("model.dim=128", "model.num_heads=2", "model.num_kv_heads=2")  # of 64
# What torch asks of the package: two operations of these names.
PACKAGE = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    use_flash3(False)
    sys.modules.pop("flash_attn_interface", None)


def problems(*words: str, **where: str) -> list[str]:
    made = plan(FLASH3, *words, machine=machine(1, **where))
    return [f"{f.what}; {f.hint}" for f in made.findings if f.severity == "error"]


def test_it_is_refused_where_it_is_not_installed_and_on_other_chips(package: None) -> None:
    assert problems() == []
    (told,) = problems(capability="8.0", name="NVIDIA A100")
    assert "for compute capability 9.0 alone, and this is compute capability 8.0" in told
    (told,) = problems("precision.mode=fp32")
    assert "flash3 takes bf16 or fp16" in told
    on_cpu = plan(FLASH3, machine=machine())
    assert "flash3 is a kernel for GPUs" in str([f.what for f in on_cpu.findings])


def auto(*words: str, **where: str) -> Choice[Attention]:
    return plan(*HEADS, *words, machine=machine(1, **where)).attention


def test_auto_takes_it_where_it_was_measured(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert (auto().value, auto().because) == (
        "flash3",
        "FlashAttention 3 is installed: faster and equal on an H200",
    )
    assert auto("precision.mode=fp8", "precision.fp8_layers=all").value == "flash3"
    for elsewhere in (
        auto("attention.impl=sdpa"),
        auto("precision.mode=fp32"),
        auto("model.num_heads=4"),
        auto("data.source=stdlib", "data.document_mask=true"),
        auto(capability="8.0", name="NVIDIA A100"),
        auto(capability="10.0", name="NVIDIA B200"),
    ):
        assert elsewhere.value == "sdpa"


def test_auto_leaves_kernels_that_cannot_be_loaded(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    broken = "raise ImportError('libcudart.so.12: cannot open shared object file')"
    (tmp_path / "flash_attn_interface.py").write_text(broken)
    assert auto().value == "sdpa"
    assert "cannot be loaded: ImportError: libcudart.so.12" in auto().because
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    assert auto().value == "flash3", "what failed is tried again"


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.setattr("paceline.attention.flash3.find_spec", lambda name: None)
    assert find_flash3() is None
    (told,) = problems()
    assert "it is not installed here; install flash_attn_3" in told
    with pytest.raises(ConfigError, match="not installed here"):
        use_flash3(True)


def test_the_library_of_xformers_is_loaded_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "xformers/flash_attn_3/_C.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "xformers/__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_flash3() is None, "one without the kernels"
    library.write_text("")
    loaded: dict[Path, dict[str, object]] = {}
    load = lambda path: exec(PACKAGE, loaded.setdefault(path, {}))  # noqa: E731
    monkeypatch.setattr(torch.ops, "load_library", load)
    use_flash3(True)
    assert is_flash3_used() and list(loaded) == [library]
    use_flash3(False)


def test_torch_is_told_and_told_otherwise_again(package: None) -> None:
    use_flash3(True)
    assert is_flash3_used()
    use_flash3(False)
    assert not is_flash3_used()
