"""What one rank does for `paceline check`: say where it is, test and time the collectives with the
others, time its own device. Leaves checkup.json; rank 0 also leaves group.json."""

import logging
import os
import platform
import socket
import time

import torch
import torch.distributed as dist

from paceline.check.bandwidth import measure_collectives
from paceline.check.collectives import verify_collectives
from paceline.check.links import measure_clock_offsets, measure_pairs
from paceline.check.lint import lint, probe_situation
from paceline.check.rates import measure_rates
from paceline.check.records import GroupCheckup, RankCheckup, checkup_path, group_path
from paceline.check.roll_call import find_missing_ranks
from paceline.errors import ClusterError, Outcome
from paceline.launch.base import RankContext, Task
from paceline.machine.facts import probe_network_gb_per_s
from paceline.machine.group import claim_device, join_group
from paceline.machine.launchers import is_local
from paceline.machine.topology import RankId
from paceline.records import Env, Finding, LaunchPlan, RankVerdict
from paceline.records.rundir import RunDir

LOG = logging.getLogger("paceline")
BARRIER_S = 30.0
LAUNCH_ENV = "launch.env"


def examine_rank(context: RankContext) -> None:
    """The task of `paceline check`."""
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
        rank=place.rank, host=found.host, outcome=Outcome.OK, step=0, ended_at=time.time()
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
    """This rank's, without what Paceline itself has put there."""
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
