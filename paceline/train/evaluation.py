"""Validation: each sample once over all ranks, the mean over units, the same number everywhere."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from paceline.config.schema import RunConfig
from paceline.data.base import Dataset
from paceline.data.loader import collate, eval_ids, to_device
from paceline.records import Plan
from paceline.records.phases import Phase
from paceline.strategies.base import Engine
from paceline.strategies.clock import Clock


class Evaluation:
    """Knows when validation is due and runs it; without validation data it never is."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        data: Dataset | None,
        dp_rank: int,
        device: torch.device,
    ) -> None:
        self.every, self.num_steps = config.train.eval_every, plan.steps
        self.data, self.device = data, device
        if data is not None:
            wanted = config.train.eval_samples
            num_samples = len(data) if wanted == "all" else min(wanted, len(data))
            self.batches = eval_ids(num_samples, plan.batch.micro, plan.batch.dp, dp_rank)

    def due(self, step: int) -> bool:
        if self.data is None or self.every == "off":
            return False
        return step % self.every == 0 or step == self.num_steps

    def run(self, engine: Engine, clock: Clock, is_cut: Callable[[], bool]) -> float | None:
        """Return the mean loss per unit of the validation samples, over all ranks; None where
        `is_cut`, which all ranks ask together after each batch, said to leave it."""
        assert self.data is not None, "asked to evaluate without data"
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for ids in self.batches:
            clock.enter(Phase.EVAL)  # for each batch: a long evaluation is not a stall
            # A rank without samples still runs a forward pass: others may wait for it inside one.
            batch = collate(self.data, ids if len(ids) else np.zeros(1, dtype=np.int64))
            loss, count = engine.evaluate(to_device(batch, self.device))
            if len(ids):
                sums[0] += loss
                sums[1] += count
            if is_cut():
                return None
        dist.all_reduce(sums)
        loss_sum, units = sums.tolist()
        return float(loss_sum / units) if units else math.nan
