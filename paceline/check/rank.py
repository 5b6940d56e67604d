"""What one rank does for `paceline check`: say where it is, test and time the collectives with the
others, time its own device. Leaves checkup.json; rank 0 also leaves group.json."""

import json
import logging
import os
import platform
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.check.bandwidth import measure_collectives
from paceline.check.collectives import turn_key, verify_collectives
from paceline.check.links import measure_clock_offsets, measure_pairs
from paceline.check.lint import lint, probe_situation
from paceline.check.rates import measure_rates
from paceline.check.records import GroupCheckup, RankCheckup, checkup_path, group_path
from paceline.errors import ClusterError, Outcome
from paceline.launch.base import RankContext, Task
from paceline.machine.facts import probe_network_gb_per_s
from paceline.machine.group import claim_device, join_group
from paceline.machine.launchers import is_local
from paceline.machine.topology import RankId
from paceline.records import Env, Finding, LaunchPlan, RankVerdict
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir

LOG = logging.getLogger("paceline")
BARRIER_S = 30.0
GRACE_S = 5.0  # how much longer the others wait for rank 0's list than rank 0 waits for them
LAUNCH_ENV = "launch.env"


def examine_rank(context: RankContext) -> None:
    """Examine this rank: the task of `paceline check`."""
    run, place, launch = context.run, context.place, LaunchPlan.load(context.run.launch)
    torch.set_num_threads(launch.threads)
    crew = launch.crew
    device = claim_device(crew.device.value, place, crew.device_indices)
    found = _look_around(run, launch, place, device)
    found.save(checkup_path(run, place.rank))
    store = context.store.connect()
    missing = find_missing_ranks(store, place.rank, place.world_size, BARRIER_S)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise ClusterError(f"ranks {names} did not reach the first barrier in {BARRIER_S:g} s")
    join_group(crew.backend.value, place, device, store, launch.limits.collective_s)
    if place.world_size > 1:
        _examine_group(run, place, device)
    LOG.info("timing the device")
    dist.barrier()
    found = found.model_copy(update={"rates": measure_rates(device)})
    found.save(checkup_path(run, place.rank))
    RankVerdict(
        rank=place.rank, host=found.host, outcome=Outcome.OK, step=0, ended_at=wall_time()
    ).save(run.verdict(place.rank))


CHECK = Task("check", examine_rank, "paceline.check")


def _look_around(
    run: RunDir, launch: LaunchPlan, place: RankId, device: torch.device
) -> RankCheckup:
    crew = launch.crew
    # One voice a machine: its ranks share the environment.
    findings: list[Finding] = []
    if place.local_rank == 0:
        situation = probe_situation(crew.num_nodes, crew.per_node, run.root)
        findings = lint(_users_environment(run, launch), situation)
    name, identity = "cpu", "cpu"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, identity = properties.name, str(properties.uuid)
    return RankCheckup(
        rank=place.rank,
        local_rank=place.local_rank,
        host=socket.gethostname(),
        device=name,
        device_id=identity,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        network_gb_per_s=probe_network_gb_per_s(),
        findings=findings,
    )


def _users_environment(run: RunDir, launch: LaunchPlan) -> dict[str, str]:
    """Return the environment of this rank without what Paceline itself has put there."""
    asked = {name for name, why in launch.reasons.items() if why == LAUNCH_ENV}
    own = set(launch.env) - set(Env.load(run.env).variables) - asked
    if is_local(launch.launcher):  # the store is ours
        own |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in own}


def _examine_group(run: RunDir, place: RankId, device: torch.device) -> None:
    LOG.info("testing the collectives")
    correctness = verify_collectives(device)
    LOG.info("timing the collectives")
    speeds = measure_collectives(device)
    LOG.info("timing pairs and clocks")
    pairs, clocks = measure_pairs(device), measure_clock_offsets(device)
    if place.rank == 0:
        GroupCheckup(correctness=correctness, speeds=speeds, pairs=pairs, clocks=clocks).save(
            group_path(run)
        )


def find_missing_ranks(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Return the ranks that did not call this within `timeout_s`, the same list on all that did.

    It needs no process group: call it before `init_process_group`, which waits without naming
    anyone.
    """
    key = turn_key(store, "roll", rank)
    store.set(f"{key}/{rank}", "here")
    if rank != 0:
        if not _appears(store, f"{key}/missing", timeout_s + GRACE_S):
            return [0]
        return [int(missing) for missing in json.loads(store.get(f"{key}/missing"))]
    deadline = time.monotonic() + timeout_s
    missing = [
        peer
        for peer in range(world_size)
        if not _appears(store, f"{key}/{peer}", deadline - time.monotonic())
    ]
    store.set(f"{key}/missing", json.dumps(missing))
    return missing


def _appears(store: Store, key: str, timeout_s: float) -> bool:
    try:
        # Past the deadline a key that is there still counts; zero means "no limit" to some stores.
        store.wait([key], timedelta(seconds=max(timeout_s, 0.01)))
    except RuntimeError:  # stores differ in which subclass they raise
        return False
    return True
