"""Ranks on this machine, forked from a server that has torch loaded already."""

import multiprocessing
import os
import tempfile
import uuid
from functools import partial
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir

from paceline.launch.attempts import Start, run_attempts
from paceline.launch.base import LaunchEnd, Order, draw_plan
from paceline.launch.rank import TASKS, RankTicket, Task
from paceline.launch.supervisor import PRELOADED, Supervisor
from paceline.machine.fabric import make_node_caches
from paceline.machine.group import Meeting, Place, serve_store
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir

MAX_TEMPORARY = 60  # letters of TMPDIR; with the rest a socket's path may have 107
LOOPBACK = "127.0.0.1"


class LocalLauncher:
    def plan(self, order: Order) -> LaunchPlan:
        return draw_plan(order, argv=[], hosts=[order.env.host] * order.crew.num_nodes)

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        return run_local(launch, run, TASKS[launch.task])


def warm_up() -> None:
    """Let the server that ranks are forked from load torch, while we still plan."""
    temporary_folder()
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def run_local(launch: LaunchPlan, run: RunDir, task: Task) -> LaunchEnd:
    """Any task on the ranks of a plan."""
    return run_attempts(launch, run, partial(_start_all, launch, run, task))


def _start_all(launch: LaunchPlan, run: RunDir, task: Task, this: Start) -> LaunchEnd:
    """The store is ours and each attempt's own: a free port, and no rank's death ends the place
    where ranks meet."""
    store = serve_store()
    meeting = Meeting(LOOPBACK, store.port, uuid.uuid4().hex)
    world = launch.crew.world_size
    tickets = [
        build_ticket(launch, run, Place(rank, rank, world), meeting, task) for rank in range(world)
    ]
    return Supervisor(run, tickets, this.limits).run(this.notes)


def build_ticket(
    launch: LaunchPlan, run: RunDir, place: Place, meeting: Meeting, task: Task
) -> RankTicket:
    """The environment of this run, here and now: the fork server has that of its first one."""
    told = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(launch.crew.per_node),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        # For a library that joins by these variables: somebody serves the store already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return RankTicket(
        run_dir=str(run.root),
        working_dir=os.getcwd(),
        environment=make_node_caches(dict(os.environ) | launch.env, place.local_rank) | told,
        place=place,
        meeting=meeting,
        supervisor_pid=os.getpid(),
        temporary=temporary_folder(),
        task=task,
    )


def temporary_folder() -> str:
    """Where the fork server has its socket. A long TMPDIR is left aside: none could be there."""
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > MAX_TEMPORARY:
        tempfile.tempdir = "/tmp"
    try:
        return get_temp_dir()
    finally:
        tempfile.tempdir = before
