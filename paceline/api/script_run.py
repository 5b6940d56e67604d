"""The run record of a script's own loop: what `attach` writes before the first step and after the
last one, by the same stages as `paceline train`. Ranks meet through the script's process group.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.config.load import dump_config
from paceline.config.schema import ObserveConfig
from paceline.config.training import OptimConfig, TrainConfig
from paceline.errors import ConfigError, Outcome, PacelineError
from paceline.job import Job, job_schema
from paceline.launch.archive import begin_attempt
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.launch.deadlines import Deadlines
from paceline.launch.ending import LaunchEnd, judge_end
from paceline.launch.member import load_ends
from paceline.machine.facts import probe
from paceline.machine.launchers import launch_section
from paceline.machine.topology import RankId, Topology, resolve_topology
from paceline.plan.planner import make_plan
from paceline.records import Choice, Env, LaunchPlan, Plan, RankEnd, Result
from paceline.records.disk import save_last
from paceline.records.files import fingerprint, write_atomic
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.run.conclude import Circumstances, conclude
from paceline.run.flow import record
from paceline.run.rank import TRAIN
from paceline.strategies.optimizers import KINDS
from paceline.track.sinks import check_installed
from paceline.train.heartbeat import Ticker
from paceline.workloads.base import Workload
from paceline.workloads.given import ATTACHED

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OURS_ONLY = (
    "attention", "compile", "compile_scope", "recompute", "fused_optimizer", "flops_per_sample",
)  # fmt: skip
OTHERS_S, POLL_S, DUMP_S = 10.0, 0.1, 2.0


@dataclass(frozen=True)
class LoopFacts:
    """What a script says about its loop when it attaches."""

    name: str
    out: Path | None
    batch_size: int  # samples per forward pass on one rank
    accumulate: int
    steps: int  # 0: not known
    log_every: int
    loader_workers: int
    start_s: float
    progress_s: float
    trackers: tuple[str, ...] = ()


class ScriptLoop(Workload):
    """Stands for the script in a plan: its model is built already."""

    def __init__(self, model: nn.Module) -> None:
        self.model = getattr(model, "module", model) if _is_wrapped(model) else model

    def build_model(self, config: Any) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model


def find_place() -> tuple[RankId, Topology]:
    """Return which rank this process is, by its process group; without one it is alone."""
    topology = resolve_topology()
    if not dist.is_initialized():
        if not topology.is_alone:
            raise ConfigError(
                f"paceline.attach was called in rank {topology.rank} of {topology.world_size},"
                " which have no process group yet\n"
                "hint: call it after torch.distributed.init_process_group"
            )
        return RankId(), topology
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != topology.world_size:  # started by the script itself, with torch.multiprocessing
        topology = Topology(rank, rank, world, "env", local_world_size=world)
    return RankId(rank, topology.local_rank, world), topology


def open_run(asked: LoopFacts, model: nn.Module, optimizer: Optimizer) -> tuple[RunDir, RankId]:
    """Return the run directory, made and filled by rank 0. All ranks call it; a refusal of rank 0
    is raised on all of them."""
    place, topology = find_place()
    made: list[Any] = [None, ""]
    if place.rank == 0:
        try:
            made = [str(_write_decisions(asked, model, optimizer, topology).root), ""]
        except PacelineError as error:
            made = [None, str(error)]
    if place.world_size > 1:
        dist.broadcast_object_list(made, src=0)
    if made[0] is None:
        raise ConfigError(made[1])
    run = RunDir(Path(made[0]))
    run.make_rank(place.rank)
    return run, place


def _write_decisions(
    asked: LoopFacts, model: nn.Module, optimizer: Optimizer, topology: Topology
) -> RunDir:
    if missing := [str(each) for each in check_installed(asked.trackers)]:
        raise ConfigError(missing)
    RunDir.require_place(asked.out)
    env = probe()
    job = Job(_config(asked, model, optimizer), ScriptLoop(model))
    # What a plan finds wrong is about a loop of ours.
    plan = _as_it_is(make_plan(job, env, topology), asked, model, optimizer)
    run = RunDir.create(asked.name, asked.out)
    write_atomic(run.config, f"# asked: paceline.attach in {asked.name}\n{dump_config(job.config)}")
    env.save(run.env)
    plan.save(run.plan)
    order = LaunchOrder(
        job.config.launch, plan.crew, env, plan.threads.value, TRAIN, ATTACHED, str(run.root)
    )
    draw_plan(order, argv=[], hosts=[env.host] * plan.crew.num_nodes).save(run.launch)
    begin_attempt(run, resume=False)
    return run


def _config(asked: LoopFacts, model: nn.Module, optimizer: Optimizer) -> Any:
    """Return run.yaml: what the script has said, and defaults that its loop does not read."""
    name = type(optimizer).__name__.lower()
    known = {"name": name} if name in KINDS else {}
    rate = optimizer.param_groups[0].get("lr")
    on_gpu = next(model.parameters()).device.type == "cuda"
    return job_schema(ScriptLoop)(
        name=asked.name,
        workload=ATTACHED,
        train=TrainConfig(
            steps=asked.steps or "auto",
            micro_batch_size=asked.batch_size,
            grad_accum=asked.accumulate,
            log_every=asked.log_every,
        ),
        optim=OptimConfig.model_validate(known | ({"lr": float(rate)} if rate else {})),
        observe=ObserveConfig.model_validate({"trackers": list(asked.trackers)}),
        launch=launch_section()(
            device="cuda" if on_gpu else "cpu", start_s=asked.start_s, progress_s=asked.progress_s
        ),
    )


def _as_it_is(plan: Plan, asked: LoopFacts, model: nn.Module, optimizer: Optimizer) -> Plan:
    """Return the plan with what the script itself has decided, as far as that can be seen."""
    weights = next(model.parameters())
    seen = "seen in the script that attached"
    own = {
        "strategy": type(model).__name__ if _is_wrapped(model) else "single",
        "precision": PRECISIONS.get(weights.dtype, "fp32"),
        "matmul": torch.get_float32_matmul_precision(),
        "optimizer": type(optimizer).__name__,
        "loader_workers": asked.loader_workers,
        "threads": torch.get_num_threads(),
    }
    if own["strategy"] == "DistributedDataParallel":
        own["strategy"] = "ddp"
    chosen = {name: Choice(requested=v, value=v, because=seen) for name, v in own.items()}
    idle = {name: getattr(plan, name).model_copy(update={"matters": False}) for name in OURS_ONLY}
    return plan.model_copy(update={**chosen, **idle, "findings": [], "steps": asked.steps})


def _is_wrapped(model: nn.Module) -> bool:
    return isinstance(getattr(model, "module", None), nn.Module)


def conclude_run(run: RunDir, notes: list[str]) -> Result:
    """Write result.json and the report from what ranks have left: rank 0 does when all have ended,
    or the rank that fails. A rank that knows more writes them again."""
    plan, env = Plan.load(run.plan), Env.load(run.env)
    ending = judge_end(run, plan.world_size, LaunchEnd(load_ends(run, plan.world_size)))
    if ending.failure is not None:  # what the script prints is kept by whoever started it
        ending = replace(ending, failure=ending.failure.model_copy(update={"log": ""}))
    script = Path(sys.argv[0]) if sys.argv else Path()
    code = script.read_bytes() if script.is_file() else b""
    known = Circumstances(
        ending=ending,
        config_fingerprint=fingerprint(run.config.read_bytes()),
        code_fingerprint=fingerprint(code),
        data_facts={},
        started_at=run.config.stat().st_mtime,
        ended_at=wall_time(),
        notes=notes,
    )
    result = conclude(run, plan, env, known)
    if not plan.steps:  # the script did not say how many there would be
        plan.model_copy(update={"steps": result.steps}).save(run.plan)
    record(run, result, say)
    return result


def say(text: str) -> None:
    """Print a message of ours on the stderr of the user's script."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, at most for `seconds`; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


class Watchdog(Ticker):
    """Ends this rank when it makes no progress, by the rules of our supervisor. It is a thread: a
    rank that is stuck in a collective lets it run, and the stack of the main thread says where."""

    def __init__(self, run: RunDir, place: RankId) -> None:
        limits = LaunchPlan.load(run.launch).limits
        super().__init__(min(1.0, limits.progress_s / 10 if limits.progress_s else 1.0), "watchdog")
        self._files, self._place = run, place
        self._deadlines = Deadlines(run, [place.rank], limits)

    def tick(self) -> None:
        missed = self._deadlines.missed()
        if missed is None or self._stop.is_set():
            return
        run, rank = self._files, self._place.rank
        _dump_main(run, rank)
        end = RankEnd(
            rank=rank,
            host=socket.gethostname(),
            exit_code=Outcome.STALL.exit_code,
            asked_to_end=True,
            stall=missed,
            failed=True,
            silent_s=self._deadlines.silent_s(rank),
        )
        run.lost.keep(run.rank_end(rank), end.to_json(), save_last)
        self._conclude()
        say(
            f"rank {rank} has got nowhere: the {missed} deadline has passed; {run.report} says"
            " where it is"
        )
        os._exit(Outcome.STALL.exit_code)

    def _conclude(self) -> None:
        """Let the first of the ranks that have ended conclude; the others wait for it, for a
        launcher ends all when one leaves."""
        run, world = self._files, self._place.world_size

        def ended() -> list[int]:
            files = {r: (run.rank_end(r), run.verdict(r)) for r in range(world)}
            return [r for r, both in files.items() if any(path.is_file() for path in both)]

        wait_for(lambda: len(ended()) == world, OTHERS_S)
        if ended()[0] == self._place.rank:
            conclude_run(run, [])
        else:
            wait_for(run.report.is_file, OTHERS_S)


def _dump_main(run: RunDir, rank: int) -> None:
    """Have the main thread's stack written, by a signal: a handler in C answers in any state."""
    path, main = run.stacks(rank), threading.main_thread().ident
    if path.is_file() and main is not None:
        before = path.stat().st_size
        signal.pthread_kill(main, signal.SIGUSR1)
        wait_for(lambda: path.stat().st_size > before, DUMP_S)
