"""Imported by the fork server where the ranks' model is one of transformers, which takes a process
four seconds to import: so it does it once, and not each rank of each attempt.

Not beside a GPU: torchao, which transformers imports where it is installed, asks for the GPUs as it
is imported, and ranks forked from a process that has asked cannot use one.
"""

from contextlib import suppress
from pathlib import Path

from paceline.errors import PacelineError
from paceline.workloads.hf.model import require_extra

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of CUDA, of ROCm, of Windows' Linux


def has_gpu() -> bool:
    """Say whether there may be a GPU here, without asking its driver."""
    return any(Path(file).exists() for file in GPU_FILES)


if not has_gpu():
    with suppress(PacelineError):  # it is not installed: the plan says so
        require_extra("transformers.modeling_utils")
        require_extra("transformers.models.auto.modeling_auto")
