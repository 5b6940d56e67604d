"""Ranks on this machine, forked from a server that has torch loaded already."""

import fcntl
import multiprocessing
import os
import shutil
import tempfile
import uuid
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path

from paceline.launch.attempts import Start, run_attempts
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.ending import Ending, LaunchEnd
from paceline.launch.rank import RankSpec
from paceline.launch.supervisor import PRELOADED, Supervisor
from paceline.machine.fabric import make_node_caches
from paceline.machine.group import StoreAddress, serve_store
from paceline.machine.topology import RankId
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir

MAX_TEMPORARY = 60  # letters of TMPDIR; with the rest a socket's path may have 107
LOOPBACK = "127.0.0.1"
OWNER = "paceline-owner"  # in the temporary folder of a supervisor


class LocalLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        return draw_plan(order, argv=[], hosts=[order.env.host] * order.crew.num_nodes)

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_attempts(launch, run, partial(_start_all, launch, run, task))


def warm_up() -> None:
    """Let the server that ranks are forked from load torch, while we still plan."""
    temporary_folder()
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


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


def temporary_folder() -> str:
    """Return where the fork server has its socket. A long TMPDIR is not used: a path in it would be
    too long for one."""
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > MAX_TEMPORARY:
        tempfile.tempdir = "/tmp"
    try:
        folder = Path(get_temp_dir())
    finally:
        tempfile.tempdir = before
    if not (folder / OWNER).exists():
        sweep_folders(folder.parent)
        with suppress(OSError):  # a full disk: it will not be swept
            _own(folder)
    return str(folder)


def _own(folder: Path) -> None:
    """Put a file into a folder of ours that is locked while this process lives. It gets its name
    when the lock is held: who finds it unlocked knows that its owner is dead."""
    aside = folder / f"{OWNER}.{os.getpid()}"
    handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open to our end
    fcntl.flock(handle, fcntl.LOCK_EX)
    aside.rename(folder / OWNER)


def sweep_folders(parent: Path) -> None:
    """Remove what killed supervisors have left there, and nothing else: folders of this user with
    our mark whose owner is dead. Others' programs make folders of the same kind of name."""
    for folder in parent.glob("pymp-*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
