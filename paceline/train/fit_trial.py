"""A training step to find out whether it fits into memory."""

import gc
from typing import Any

import numpy as np
import torch

from paceline.data.collate import collate
from paceline.data.cursor import Indices
from paceline.data.loader import to_device
from paceline.job import Job
from paceline.plan.policy import effective_config
from paceline.records import Plan
from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from paceline.strategies.clock import build_clock
from paceline.train.torch_settings import apply_policy
from paceline.train.verdict import is_out_of_memory
from paceline.workloads.base import own_collate


class FitTrial:
    """Takes steps with the first of `order`, as many samples as it is asked about."""

    def __init__(
        self, job: Job, plan: Plan, device: torch.device, data: Any, order: Indices
    ) -> None:
        self.job, self.device, self.data, self.order = job, device, data, order
        torch.set_num_threads(plan.threads.value)
        apply_policy(plan)
        config = effective_config(job.config, plan.attention.value, plan.kernels.value)
        parts = EngineParts(config, plan, job.workload, device)
        self.engine = find_strategy(plan.strategy.value).build(parts)
        self.clock = build_clock(device)

    def fits(self, num_samples: int) -> bool:
        """Tell whether a step with so many samples fits: forward, backward and update."""
        try:
            self._step(num_samples)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_full = True
        else:
            is_full = False
        if is_full:  # here, for while the error is held all tensors of its frames are too
            self._forget()
        return not is_full

    def name(self, place: int) -> str:
        own, index = getattr(self.data, "name", None), int(self.order[place])
        return f"sample {index}" + (f", {own(index)}" if callable(own) else "")

    def _step(self, num_samples: int) -> None:
        ids = np.resize(self.order, num_samples)  # over and over, where there are fewer
        batch = collate(self.data, ids, own_collate(self.job.workload))
        self.clock.begin(1)
        self.engine.forward_backward([to_device(batch, self.device)], 1e-6, self.clock)
        self.engine.step(0.0, self.clock)

    def _forget(self) -> None:
        for parameter in self.engine.module.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
