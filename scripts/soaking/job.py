"""The language model of lm_tiny, at a pace: run as `soaking/job.py:Paced` by scripts/soak.

A step takes at least SOAK_PACE_S, so a run of N steps is under way for N times that long on any
machine; without that variable it goes as fast as it can. What is computed is the same.
"""

import os
import time
from typing import Any

from torch import Tensor, nn

from paceline.workloads.lm.workload import LanguageModel

PACE_S = float(os.environ.get("SOAK_PACE_S", "0"))


class Paced(LanguageModel):
    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
        if model.training:
            time.sleep(PACE_S)
        return super().loss(model, batch)
