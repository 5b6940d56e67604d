"""Texts that the model writes at evaluations, appended to samples.jsonl: continuations of
`train.sample_prompts`, and what the workload shows of its validation data.

All ranks take part: where weights are sharded each is needed for every token, and elsewhere it
costs the others nothing but the wait. Rank 0's logits decide, so that all stop together.
"""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.job import Job
from paceline.metrics import Items
from paceline.records.disk import Appender
from paceline.records.phases import Phase
from paceline.records.rundir import RunDir
from paceline.records.texts import Sample
from paceline.strategies.base import Engine
from paceline.strategies.clock import Clock
from paceline.train.evaluation import Evaluation
from paceline.workloads.generation import Request, Sampling, codec_of

LOG = logging.getLogger("paceline")
# Kernels that take a mask are needed too, whatever `attention.impl` has left.
KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


def build_samples(
    job: Job, engine: Engine, clock: Clock, run: RunDir, evaluation: Evaluation
) -> tuple[Callable[[int], None], ...]:
    """Return what writes texts after a step's evaluation."""
    shown = Shown(evaluation, run).write
    if not job.config.train.sample_prompts:
        return (shown,)
    return Samples(job, engine, clock, run).write, shown


class Shown:
    """Writes down what the workload shows of an evaluation, on rank 0, which has heard all."""

    def __init__(self, evaluation: Evaluation, run: RunDir) -> None:
        self.evaluation, self.file = evaluation, Appender(run.texts, run.lost)

    def write(self, step: int) -> None:
        for said, written in self.evaluation.shown:
            sample = Sample(step=step, prompt=said, text=written, heard=True)
            self.file.append(sample.model_dump_json().encode() + b"\n")
            LOG.info("step %d: said %r, written %r", step, said, written)
        if self.evaluation.shown:
            self.file.flush()


class Samples:
    """Continues the prompts with the weights as they are; rank 0 writes the texts down."""

    def __init__(self, job: Job, engine: Engine, clock: Clock, run: RunDir) -> None:
        train = job.config.train
        self.prompts, self.engine, self.clock = train.sample_prompts, engine, clock
        self.codec = codec_of(job.workload.prepared)
        sampling = Sampling(max_new_tokens=train.sample_tokens, seed=train.seed)
        ids = [self.codec.prompt(prompt) for prompt in self.prompts]
        self.request = Request(ids, sampling, self.codec, agree=_agree)
        self.request.room(getattr(job.config.data, "seq_len", None))  # now, not hours later
        self.file = Appender(run.texts, run.lost)

    def write(self, step: int) -> None:
        """Write the texts of one evaluation. A collective."""
        self.clock.enter(Phase.EVAL)
        # Nothing is compiled for a few tokens: every length would be another graph.
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(KERNELS):
            found = self.engine.measure(self.request)
        texts = found["texts"]
        assert isinstance(texts, Items), "a request is answered by rows of ids"
        if dist.get_rank() == 0:
            for prompt, row in zip(self.prompts, texts.values, strict=True):
                sample = Sample(step=step, prompt=prompt, text=self.codec.decode(row))
                self.file.append(sample.model_dump_json().encode() + b"\n")
            self.file.flush()


def _agree(logits_BV: Tensor) -> Tensor:
    """Return rank 0's logits, on every rank."""
    if dist.get_world_size() > 1:
        logits_BV = logits_BV.float().contiguous()
        dist.broadcast(logits_BV, src=0)
    return logits_BV
