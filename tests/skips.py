"""Which tests may be skipped: those whose thing is really not here, for a reason on this list.

CI has installed some things and says which, in PACELINE_REQUIRED: then their absence is no excuse.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


class Excuse(NamedTuple):
    reason: str  # a pattern of what the skip says
    is_true: Callable[[], bool]
    thing: str = ""  # its name in PACELINE_REQUIRED


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def lacks_program(*names: str) -> Callable[[], bool]:
    return lambda: not any(shutil.which(name) for name in names)


def lacks_module(name: str) -> Callable[[], bool]:
    return lambda: find_spec(name) is None


def lacks_flash3() -> bool:
    from paceline.attention.flash3 import find_flash3

    return find_flash3() is None


def slurm_cannot_start() -> bool:
    from tests.schedulers.slurm import why_not

    return why_not() is not None


def ssh_hosts_cannot_start() -> bool:
    from tests.schedulers.sshd import why_not

    return why_not() is not None


def namespaces_cannot_be_made() -> bool:
    from tests.schedulers.test_strangers import why_not

    return why_not() is not None


EXCUSES = [
    Excuse(r"needs a CUDA device", lambda: not has_gpu(), "gpu"),
    Excuse(r"there is a GPU here", lambda: os.path.exists("/dev/nvidia0")),
    Excuse(r"deepspeed is not installed", lacks_module("deepspeed"), "deepspeed"),
    Excuse(r"could not import 'transformers'", lacks_module("transformers"), "transformers"),
    Excuse(r"could not import 'torchmetrics'", lacks_module("torchmetrics"), "torchmetrics"),
    Excuse(r"torchao is not installed", lacks_module("torchao"), "torchao"),
    Excuse(r"FlashAttention 3 is not installed", lacks_flash3, "flash3"),
    Excuse(r"triton is not installed", lacks_module("triton"), "triton"),
    Excuse(r"mpirun is not installed", lacks_program("mpirun"), "mpi"),
    Excuse(r"needs chromium", lacks_program("chromium", "chromium-browser", "chrome"), "chromium"),
    Excuse(r"SLURM: not installed", slurm_cannot_start, "slurm"),
    Excuse(r"SLURM: (needs root|no namespaces)", slurm_cannot_start),
    Excuse(r"sshd: not installed", ssh_hosts_cannot_start, "sshd"),
    Excuse(r"sshd: (needs root|no namespaces)", ssh_hosts_cannot_start),
    Excuse(r"namespaces: (not installed|needs root|no namespaces)", namespaces_cannot_be_made),
    Excuse(r"root may write anywhere", lambda: os.geteuid() == 0),
    Excuse(r"only root can mount", lambda: os.geteuid() != 0),
    Excuse(r"SIGHUP is ignored here", lambda: signal.getsignal(signal.SIGHUP) is signal.SIG_IGN),
    Excuse(r"file systems cannot be mounted here", lambda: True),
]


needs_gpu = pytest.mark.skipif(
    "not __import__('torch').cuda.is_available()", reason="needs a CUDA device"
)
needs_mpi = pytest.mark.skipif(lacks_program("mpirun")(), reason="mpirun is not installed")
needs_deepspeed = pytest.mark.skipif(
    lacks_module("deepspeed")(), reason="deepspeed is not installed: make launchers"
)

needs_torchao = pytest.mark.skipif(lacks_module("torchao")(), reason="torchao is not installed")
needs_flash3 = pytest.mark.skipif(lacks_flash3(), reason="FlashAttention 3 is not installed")
needs_triton = pytest.mark.skipif(lacks_module("triton")(), reason="triton is not installed")


def why_refused(reason: str) -> str:
    """Why a test must not be skipped for this; empty: it may."""
    excuses = [excuse for excuse in EXCUSES if re.search(excuse.reason, reason)]
    if not excuses:
        return "this reason is not on the list of tests/skips.py"
    required = os.environ.get("PACELINE_REQUIRED", "").split()
    if excuses[0].thing in required:
        return f"{excuses[0].thing} must be here: PACELINE_REQUIRED={' '.join(required)}"
    return "" if excuses[0].is_true() else "it is here"


def require_reason(report: Report) -> Report:
    """A skip that is not excused is a failure."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if why := why_refused(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped without an excuse: {reason}\n{why}"
    return report
