"""Ranks on this machine, forked from a server that has torch loaded already."""

import os
import uuid
from functools import partial

from paceline.launch.attempts import Start, run_attempts
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.ending import Ending, LaunchEnd
from paceline.launch.rank import RankSpec
from paceline.launch.supervisor import Supervisor
from paceline.machine.fabric import make_node_caches
from paceline.machine.fork_server import temporary_folder
from paceline.machine.group import StoreAddress, serve_store
from paceline.machine.topology import RankId
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir

LOOPBACK = "127.0.0.1"


class LocalLauncher:
    def require_ready(self, order: LaunchOrder) -> None:
        pass  # whatever this machine lacks, the planner has found

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        return draw_plan(order, argv=[], hosts=[order.env.host] * order.crew.num_nodes)

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_attempts(launch, run, partial(_start_all, launch, run, task))


def _start_all(launch: LaunchPlan, run: RunDir, task: Task, this: Start) -> LaunchEnd:
    """Run one attempt. It has a store of its own, in this process: on a free port, and no rank's
    death ends the place where ranks meet."""
    server = serve_store()
    store = StoreAddress(LOOPBACK, server.port, uuid.uuid4().hex)
    world = launch.crew.world_size
    specs = [
        build_spec(launch, run, RankId(rank, rank, world), store, task) for rank in range(world)
    ]
    return Supervisor(run, specs, this.limits).run(this.signals)


def build_spec(
    launch: LaunchPlan, run: RunDir, place: RankId, store: StoreAddress, task: Task
) -> RankSpec:
    """Return what a rank needs to start. Its environment is that of this run, here and now: the
    fork server has the one of its first run."""
    identity = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(launch.crew.per_node),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # For a library that joins by these variables: somebody serves the store already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return RankSpec(
        run_dir=str(run.root),
        working_dir=os.getcwd(),
        environment=make_node_caches(dict(os.environ) | launch.env, place.local_rank) | identity,
        place=place,
        store=store,
        supervisor_pid=os.getpid(),
        temporary=temporary_folder(),
        task=task,
        workload=launch.workload,
    )
