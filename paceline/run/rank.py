"""The task of `paceline train`: what each rank of a run does."""

import logging
import os

import torch

from paceline.job import reload_job
from paceline.launch.base import RankContext, Task
from paceline.records import Plan

LOG = logging.getLogger("paceline")


def train_rank(context: RankContext, packed: bytes = b"") -> None:
    """Train as one rank, by the decisions that lie in the run directory. `packed` is the workload's
    class, where the process that started this rank was given one."""
    from paceline.train.worker import RankRun  # a second that a supervisor need not wait for

    plan, place = Plan.load(context.run.plan), context.place
    torch.set_num_threads(plan.threads.value)
    job = reload_job(context.run, context.workload, packed)
    LOG.info("rank %d of %d: process %d", place.rank, place.world_size, os.getpid())
    rank = RankRun(job, plan, context.run, place, context.store, requests=context.requests)
    rank.tell = context.tell
    verdict = rank.execute()
    LOG.info("%s after step %d", verdict.outcome, verdict.step)


TRAIN = Task("train", train_rank, "paceline.run", polls_requests=True, is_restartable=True)
