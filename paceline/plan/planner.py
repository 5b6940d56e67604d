"""Config and env in, plan out: every choice with its reason, every problem at once.

Needs no GPU and no process group: `paceline plan lm_1b launch.nproc=64` runs on a laptop.
"""

import traceback
from pathlib import Path

import torch

from paceline.cluster.rendezvous import Topology
from paceline.config.schema import RunConfig
from paceline.errors import ConfigError, PacelineError
from paceline.job import Job
from paceline.plan.constraints import check
from paceline.plan.crew import check_crew, choose_crew, choose_threads, count_ranks
from paceline.plan.peaks import peak_flops
from paceline.records import BatchSplit, Choice, Crew, Env, Finding, ModelSize, Plan
from paceline.strategies import find_strategy
from paceline.workloads.base import Workload

MAX_LOADER_WORKERS = 4
BF16_CAPABILITY = (8, 0)


def make_plan(job: Job, env: Env, topology: Topology | None = None) -> Plan:
    """Decide everything that can be decided before a device is held. Problems are findings."""
    config, workload = job.config, job.workload
    topology = topology or Topology()
    crew = choose_crew(config.launch, env, topology)
    device, world = crew.device, crew.world_size
    batch, batch_problems = split_batch(config, dp=world)
    strategy = _choose_strategy(config, world)
    precision = choose_precision(config, env, device)
    workers = _choose_workers(config, env, crew)
    model = measure_model(workload, config)
    plan = Plan(
        name=config.name,
        workload=config.workload,
        unit=workload.unit,
        world_size=world,
        mesh={"dp": world},
        batch=batch,
        units_per_sample=workload.units_per_sample(config),
        steps=config.train.steps,
        crew=crew,
        device=device,
        backend=crew.backend,
        strategy=strategy,
        precision=precision,
        compile=Choice(
            requested=config.train.compile, value=config.train.compile, because="as asked"
        ),
        fused_optimizer=_choose_fused(config),
        threads=choose_threads(config.launch, env, crew, workers.value),
        loader_workers=workers,
        model=model,
        state_bytes=find_strategy(strategy.value).estimate(model, config, world),
        flops_per_sample=_choose_flops(workload, config),
        peak_flops=peak_flops(
            env.gpus[0].name if device.value == "cuda" and env.gpus else None, precision.value
        ),
        findings=[],
    )
    findings = [
        *check_crew(config.launch, env, crew, topology),
        *batch_problems,
        *workload.problems(config),
        *check(config, env, plan),
    ]
    return plan.model_copy(update={"findings": findings})


def choose_precision(config: RunConfig, env: Env, device: Choice) -> Choice:
    asked = config.precision.mode
    if asked != "auto":
        return Choice(requested=asked, value=asked, because="as asked")
    if device.value == "cpu":
        return Choice(requested=asked, value="fp32", because="every CPU computes it")
    if not env.gpus:
        return Choice(requested=asked, value="bf16", because="cuda was asked; no GPU to look at")
    capability = min(_capability(gpu.compute_capability) for gpu in env.gpus)
    text = ".".join(str(part) for part in capability)
    if capability >= BF16_CAPABILITY:
        return Choice(requested=asked, value="bf16", because=f"compute capability {text}")
    return Choice(
        requested=asked, value="fp32", because=f"compute capability {text} has no fast bf16"
    )


def split_batch(config: RunConfig, dp: int) -> tuple[BatchSplit, list[Finding]]:
    """global = micro x accumulation x dp; what does not divide is a problem with a way out."""
    train = config.train
    micro, asked = train.micro_batch_size, train.global_batch_size
    accum = 1 if train.grad_accum == "auto" else train.grad_accum
    problems = []
    if asked != "auto":
        accum, problem = _accumulation(config, asked, dp)
        problems = [problem] if problem else []
    split = BatchSplit(micro=micro, grad_accum=accum, dp=dp, global_size=micro * accum * dp)
    return split, problems


def measure_model(workload: Workload, config: RunConfig) -> ModelSize:
    """Parameters of the model, built on meta: no memory, any size. Tied ones count once."""
    try:
        with torch.device("meta"):
            model = workload.build_model(config)
    except PacelineError:
        raise
    except Exception:
        # It reads a value while it is built, which meta tensors do not have: build it for real.
        model = _build_for_real(workload, config)
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(workload).__name__}.build_model gave nothing to train")
    return ModelSize(
        num_trainable=sum(p.numel() for p in trainable),
        num_frozen=sum(p.numel() for p in frozen),
        trainable_bytes=sum(p.numel() * p.element_size() for p in trainable),
        frozen_bytes=sum(p.numel() * p.element_size() for p in frozen),
    )


def _build_for_real(workload: Workload, config: RunConfig) -> torch.nn.Module:
    try:
        return workload.build_model(config)
    except Exception as error:
        name = f"{type(workload).__name__}.build_model"
        line = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(line.filename).name}:{line.lineno}"
        raise ConfigError(f"{name} failed at {place}: {type(error).__name__}: {error}") from error


def _accumulation(config: RunConfig, asked: int, dp: int) -> tuple[int, Finding | None]:
    """Forward passes per step that make up a global batch, or the problem with it."""
    micro, wanted = config.train.micro_batch_size, config.train.grad_accum
    where = "train.global_batch_size"
    if asked < dp:
        return 1, Finding(
            severity="error",
            where=where,
            what=f"{asked} samples cannot be shared by {dp} ranks: some would have none",
            hint=f"set it to a multiple of {dp}, or launch.nproc to {asked} or fewer",
        )
    if asked % (micro * dp):
        nearest = max(1, round(asked / (micro * dp))) * micro * dp
        return 1, Finding(
            severity="error",
            where=where,
            what=f"{asked} is not a multiple of micro_batch_size {micro} x {dp} ranks",
            hint=f"set it to {nearest}, or change train.micro_batch_size",
        )
    accum = asked // (micro * dp)
    if wanted not in ("auto", accum):
        return accum, Finding(
            severity="error",
            where="train.grad_accum",
            what=f"{wanted} contradicts {where}={asked}, which needs {accum} ({asked} ="
            f" {micro} x {accum} x {dp})",
            hint="leave train.grad_accum at auto, or drop train.global_batch_size",
        )
    return accum, None


def _choose_strategy(config: RunConfig, world: int) -> Choice:
    asked = config.strategy.name
    if asked == "ddp" and world == 1:
        return Choice(requested=asked, value="single", because="one rank has nobody to reduce with")
    return Choice(requested=asked, value=asked, because="as asked")


def _choose_fused(config: RunConfig) -> Choice:
    asked = config.optim.fused
    if config.optim.name == "sgd" and config.optim.momentum:
        because = "torch's fused SGD leaves its momentum undefined if update 1 is vetoed"
        return Choice(requested=asked, value=False, because=because)
    if asked == "auto":
        return Choice(requested=asked, value=True, because="one kernel for all parameters")
    return Choice(requested=asked, value=asked == "on", because="as asked")


def _choose_workers(config: RunConfig, env: Env, crew: Crew) -> Choice:
    asked = config.data.num_workers
    if asked != "auto":
        return Choice(requested=asked, value=asked, because="as asked")
    # A GPU rank needs one core to launch kernels; a CPU rank computes on its cores.
    share, on_gpu = env.cores // crew.per_node, crew.device.value == "cuda"
    value = min(MAX_LOADER_WORKERS, share - 1 if on_gpu else share // 4)
    why = f"{env.cores} cores over {count_ranks(crew.per_node)}"
    return Choice(requested=asked, value=max(0, value), because=why)


def _choose_flops(workload: Workload, config: RunConfig) -> Choice:
    counted = workload.flops(config)
    if counted is None:
        because = "counted on the first batch by torch.utils.flop_counter"
        return Choice(requested="auto", value=None, because=because)
    because = "counted by the workload: forward and backward, causal attention counted half"
    return Choice(requested="auto", value=counted, because=because)


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
