"""What is probed, and what is never written down."""

from pathlib import Path

import pytest

from paceline.machine.facts import allowed_variables, hardware_fingerprint, probe, probe_git
from paceline.machine.gpus import visible_indices


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    env = probe()
    assert env.cores >= 1 and env.memory_bytes > 2**28
    assert env.torch.startswith("2.") and "pydantic" in env.packages
    assert env.variables["NCCL_DEBUG"] == "INFO"
    assert hardware_fingerprint(env) == hardware_fingerprint(env)


def test_secrets_stay_out() -> None:
    given = {
        "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_SECRET_KEY": "x",
        "TORCH_API_TOKEN": "x", "HOME": "/root", "NCCL_ALGO": "Ring",
    }  # fmt: skip
    assert allowed_variables(given) == {"NCCL_ALGO": "Ring"}


def test_no_checkout_is_said(tmp_path: Path) -> None:
    assert probe_git(tmp_path) is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-b", [1]),
        ("1,-1,0", [1]),  # CUDA stops at the first entry that names no device
        ("7", []),
    ],
)
def test_visible_devices_as_cuda_reads_them(setting: str | None, expected: list[int]) -> None:
    assert visible_indices(setting, ["GPU-aa", "GPU-bb", "GPU-cc"]) == expected
