"""The language model of lm_tiny, at a pace: run as `soaking/job.py:Paced` by scripts/soak.

A step takes at least SOAK_PACE_S, so a run of N steps is under way for N times that long on any
machine; without that variable it goes as fast as it can. What is computed is the same. A file in
SOAK_TROUBLE makes one rank hang or raise, once.
"""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.workloads.lm.workload import LanguageModel

PACE_S = float(os.environ.get("SOAK_PACE_S", "0"))
TROUBLE = os.environ.get("SOAK_TROUBLE", "")


class Paced(LanguageModel):
    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
        if model.training:
            time.sleep(PACE_S)
            if TROUBLE:
                make_trouble(Path(TROUBLE), os.environ["RANK"])
        return super().loss(model, batch)


def make_trouble(folder: Path, rank: str) -> None:
    """Hang or raise if a file says so. The file goes first: the next attempt is in peace."""
    hang, error = folder / f"hang{rank}", folder / f"error{rank}"
    if hang.exists():
        hang.unlink()
        time.sleep(1000)
    if error.exists():
        text = error.read_text()
        error.unlink()
        raise RuntimeError(text)
