"""Loads the trained model of a run directory into memory.

    job = open_job(run, approve)                        its config, and the workload that may run
    trained = load_trained(run, job, Which(), device, say)

    RUN_DIR    its best checkpoint, else the newest; the average of the weights where it is kept

Checkpoints of any strategy and any number of ranks are read: names and rows are the model's own.
The workload of a run runs if it may be resumed here: its file was typed on this machine, or
`approve` says yes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.checkpoint.convert import choose_step, with_averages
from paceline.checkpoint.folder import BEST, LATEST, CheckpointFolder
from paceline.checkpoint.survey import require_sound
from paceline.checkpoint.tensors import TensorFiles
from paceline.errors import ConfigError, RestoreError
from paceline.job import Job, reload_job
from paceline.plan.policy import effective_config
from paceline.records import LaunchPlan, Plan
from paceline.records.rundir import RunDir
from paceline.strategies.optim import freeze
from paceline.strategies.stored import load_module
from paceline.strategies.weights import fill_weights
from paceline.workloads.job_file import Approve, require_trusted
from paceline.workloads.meta import on_meta

Say = Callable[[str], None]


@dataclass(frozen=True)
class Which:
    """Which weights are read: "auto" is the best checkpoint, else the newest; `ema` takes the
    average of the weights where the checkpoint has one."""

    step: str = "auto"
    ema: bool = True


@dataclass(frozen=True)
class Trained:
    """A model in eval mode, and the step it was kept at."""

    model: nn.Module
    step: int
    is_best: bool
    is_average: bool

    @property
    def says(self) -> str:
        kind = "the average of the weights" if self.is_average else "the weights"
        return f"{kind} of step {self.step}{' (the best)' if self.is_best else ''}"


def choose_device(asked: str) -> torch.device:
    """Return the device that --device names; auto is the GPU where there is one."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, and torch sees no GPU")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(usual if asked == "auto" else asked)


def open_job(run: RunDir, approve: Approve | None = None) -> Job:
    """Load the job of a run; a file that was never typed here is not run."""
    launch = LaunchPlan.load(run.launch)
    require_trusted(launch.workload, run.root, approve)
    return reload_job(run, launch.workload)


def load_trained(run: RunDir, job: Job, which: Which, device: torch.device, say: Say) -> Trained:
    """Build the run's model and fill it from one checkpoint, every byte of which is checked."""
    folder = CheckpointFolder.of_run(run, job.config.checkpoint)
    step, is_best = _choose(folder, which.step)
    manifest = require_sound(folder, step, say)
    averaged = with_averages(manifest) if which.ema else None
    source = TensorFiles(folder.path(step), averaged or manifest)
    plan = Plan.load(run.plan)
    _require_base(job, plan, device)
    model = _build(job, plan, device)
    with torch.no_grad():
        load_module(source, model)
    if source.damages:
        raise RestoreError(source.damages)
    return Trained(model.eval(), step, is_best, averaged is not None)


def _choose(folder: CheckpointFolder, asked: str) -> tuple[int, bool]:
    if asked != "auto":
        return choose_step(folder, asked), False
    best = folder.pointer(BEST)
    is_there = best is not None and best in folder.steps()
    return choose_step(folder, BEST if is_there else LATEST), is_there


def _require_base(job: Job, plan: Plan, device: torch.device) -> None:
    """Refuse a checkpoint without the weights below what was trained, where those were random
    numbers of another device: here the same seed gives others."""
    is_drawn = job.workload.prepared.get("hf_weights") != "load"
    drawn_on = plan.device.value
    if job.config.checkpoint.weights == "trained" and is_drawn and drawn_on != device.type:
        raise ConfigError(
            "the checkpoint has trained weights alone (checkpoint.weights=trained), and those below"
            f" them were drawn on {drawn_on}, not on {device.type}\n"
            "hint: train with checkpoint.weights=all, or from a model's folder"
        )


def _build(job: Job, plan: Plan, device: torch.device) -> nn.Module:
    """Build the model as training did; the checkpoint's values come later. Where it has all of
    them, a model that is built on meta gets memory alone, and what a module computes for itself,
    such as a table of positions."""
    # Other kernels of the same attention give the same result; nsa has weights of its own.
    impl = "nsa" if plan.attention.value == "nsa" else "sdpa"
    workload, config = job.workload, effective_config(job.config, impl)
    seed, is_whole = config.train.seed, config.checkpoint.weights == "all"
    if not workload.meta_init:
        torch.manual_seed(seed)
        with device:
            model = workload.build_model(config)
        freeze(model, config.optim)
        return model
    if is_whole:  # the weights that the run began with need not be there any more
        workload.prepared = {**workload.prepared, "hf_weights": "random"}
    with on_meta():
        model = workload.build_model(config)
    freeze(model, config.optim)

    def compute(name: str, module: nn.Module) -> None:
        if module._non_persistent_buffers_set or not is_whole:
            workload.init_weights(model, name, module)

    fill_weights(model, compute, seed, device)
    return model
