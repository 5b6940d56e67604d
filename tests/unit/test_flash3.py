"""FlashAttention 3: found where it is installed, refused with the reason where it cannot be had."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.attention.flash3 import find_flash3, use_flash3, why_not_loaded
from paceline.bench.pairs import plan_pair
from paceline.bench.target import load_targets
from paceline.errors import ConfigError
from paceline.records import Attention, Choice
from tests.machines import machine, plan

FLASH3 = "attention.impl=flash3"
# Heads of 64.
MEASURED = (
    "model.dim=128", "model.num_heads=2", "model.num_kv_heads=2", "data.seq_len=2048",
)  # fmt: skip
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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    why_not_loaded.cache_clear()
    yield
    use_flash3(False)
    sys.modules.pop("flash_attn_interface", None)


def is_flash3_used() -> bool:
    return bool(torch.nn.attention.current_flash_attention_impl() == "FA3")


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


def auto(*words: str, source: str = "lm_tiny", **where: str) -> Choice[Attention]:
    return plan(*MEASURED, *words, source=source, machine=machine(1, **where)).attention


def test_auto_takes_it_where_it_was_measured(package: None) -> None:
    assert (auto().value, auto().because) == (
        "flash3",
        "FlashAttention 3 is installed: faster and equal on an H200",
    )
    assert "NVIDIA H100 was not measured" in auto(name="NVIDIA H100").because
    for elsewhere in (
        auto("attention.impl=sdpa"),
        auto("precision.mode=fp32"),
        auto("precision.mode=fp8", "precision.fp8_layers=all"),
        auto("model.num_heads=4"),
        auto("data.seq_len=1024"),
        auto("train.deterministic=true"),
        auto("data.source=stdlib", "data.document_mask=true"),
        auto("launch.nnodes=2", "launch.launcher=slurm"),
        auto(capability="8.0", name="NVIDIA A100"),
        auto(capability="10.0", name="NVIDIA B200"),
    ):
        assert elsewhere.value == "sdpa"


OWN_MODEL = """
from torch import nn
from paceline.workloads.lm.workload import LanguageModel

class Mine(LanguageModel):
    def build_model(self, config): return nn.Embedding(config.model.vocab_size, 64)
"""


def test_auto_knows_nothing_of_other_models(package: None, tmp_path: Path) -> None:
    """With a data section of its own, without attention, or with one of another kind."""
    (tmp_path / "job.py").write_text(OWN_MODEL)
    assert auto(source=f"{tmp_path / 'job.py'}:Mine").value == "sdpa"
    assert auto(source="paceline/workloads/uneven.py:Uneven").value == "sdpa"


def test_kernels_that_cannot_be_loaded(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "raise ImportError('libcudart.so.12: cannot open shared object file')"
    (tmp_path / "flash_attn_interface.py").write_text(broken)
    assert auto().value == "sdpa"
    assert "cannot be loaded: ImportError: libcudart.so.12" in auto().because
    (told,) = problems()
    assert "it cannot be loaded here: ImportError: libcudart.so.12" in told
    (tmp_path / "flash_attn_interface.py").write_text(PACKAGE)
    why_not_loaded.cache_clear()
    assert auto().value == "flash3", "what failed is tried again"
    # It loads here: beside other libraries that says nothing.
    file = tmp_path / "flash_attn_interface.py"
    changed_at = file.stat().st_mtime_ns
    file.write_text(broken)
    os.utime(file, ns=(changed_at, changed_at))
    why_not_loaded.cache_clear()
    assert auto().value == "flash3", "that it loads is kept"
    why_not_loaded.cache_clear()
    monkeypatch.setenv("LD_LIBRARY_PATH", "elsewhere")
    assert auto().value == "sdpa"


def test_where_nothing_can_be_kept_it_is_found_all_the_same(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert auto().value == "flash3"


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


def test_pairs_of_bench_attend_alike_where_it_is_installed(package: None) -> None:
    for target in load_targets().values():
        made = plan_pair(target, machine(8))  # raises where the sides are not equal
        if "attention.impl" not in target.differs:
            assert len({arm.plan.attention.value for arm in made.arms}) <= 1
