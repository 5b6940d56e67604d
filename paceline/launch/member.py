"""One rank under a launcher: torchrun, srun, mpirun or deepspeed.

The process that the launcher starts is a member of the run: the supervisor of one rank, its child.
So a rank that hangs, crashes or is killed is seen and reported, whatever the launcher does.

    paceline train RECIPE           in each process of a launcher: rank 0 plans, others follow it
    python -m paceline.run RUN_DIR  started by a launcher that we called: the plan is there already
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ClusterError, LaunchError, PacelineError
from paceline.launch.archive import archive_rank
from paceline.launch.attempts import Start, run_attempts
from paceline.launch.base import LaunchOrder, Task, draw_plan, rank_device, rank_gpu
from paceline.launch.ending import Ending, LaunchEnd
from paceline.launch.local import build_spec
from paceline.launch.process import wait_for_any
from paceline.launch.rank import save_failure
from paceline.launch.rendezvous import Rendezvous, join_rendezvous
from paceline.launch.signals import SignalLog, logged_signals
from paceline.launch.supervisor import Supervisor
from paceline.machine.process import leave_at_once
from paceline.machine.secret import SECRET, read_secret
from paceline.machine.topology import Topology, resolve_topology
from paceline.records import LaunchPlan, RankEnd, RankPlace
from paceline.records.disk import discard, save_last
from paceline.records.rundir import RunDir
from paceline.workloads.job_file import require_trusted

STARTER, TRUSTED = "PACELINE_STARTER", "PACELINE_TRUSTED"
POLL_S = 1.0
START_S = 300.0
LAST_ENDS_S = 15.0  # how long rank 0 waits for the others to publish that they have ended


@dataclass(frozen=True)
class MemberLauncher:
    """Rank 0's side of a run whose processes another launcher has started: a launcher with nothing
    to start but this process's own rank."""

    rendezvous: Rendezvous
    places: list[RankPlace]

    def require_ready(self, order: LaunchOrder) -> None:
        pass  # all ranks have come already

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        hosts = [self.places[0].host] * order.crew.world_size
        places = [
            place.model_copy(
                update={
                    "device": rank_device(order.crew, place.local_rank),
                    "gpu": rank_gpu(order.settings, place.local_rank),
                }
            )
            for place in self.places
        ]
        return draw_plan(order, argv=[], hosts=hosts).model_copy(update={"ranks": places})

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        discard(run.stop_request)  # a run that was killed may have left it
        self.rendezvous.publish_orders(run_dir=str(run.root), workload=launch.workload)
        return MemberRun(run, launch, self.rendezvous, task).lead()


def follow_rank0(rendezvous: Rendezvous, task: Task) -> int:
    """Take part as any other rank: wait for rank 0's orders, run this rank, return an exit code."""
    orders = rendezvous.wait_for_orders()
    if "exit_code" in orders:
        return int(orders["exit_code"])  # rank 0 has said why
    run, rank = RunDir(Path(str(orders["run_dir"]))), rendezvous.topology.rank
    try:
        if not run.launch.is_file():
            raise ClusterError(
                f"{run.root}, which rank 0 made, is not on {socket.gethostname()}\n"
                "hint: give --out a directory on a file system that all nodes share"
            )
        launch = LaunchPlan.load(run.launch)
        _require_same_task(launch, task)
        if launch.workload != orders["workload"]:  # rank 0 has trusted another one
            require_trusted(launch.workload, run.root)
    except PacelineError:
        rendezvous.publish_failure(rank)
        raise
    return exit_code_of(MemberRun(run, launch, rendezvous, task).follow().ends[rank])


def take_part(task: Task, arguments: Sequence[str]) -> int:
    """Take part in a run that is planned already: RUN_DIR is the last argument. This is what the
    command of a launcher runs on every rank (`Task.module`)."""
    leave_at_once()
    run = RunDir.open(Path(arguments[-1]))
    launch = LaunchPlan.load(run.launch)
    topology = resolve_topology()
    try:
        _require_same_task(launch, task)
        _require_as_planned(topology, launch)
        _require_trusted(launch, run)
        with join_rendezvous(topology, START_S, read_secret(run.secret)) as rendezvous:
            member = MemberRun(run, launch, rendezvous, task)
            if topology.rank > 0:
                return exit_code_of(member.follow().ends[topology.rank])
            rendezvous.wait_for_all(launch.limits.start_s or START_S)
            return exit_code_of(member.lead().seen.ends[topology.rank])
    except PacelineError as error:
        with suppress(OSError):  # a run directory that was deleted stays so
            run.make_rank(topology.rank)
        save_failure(run, topology.rank, error)
        print(f"rank {topology.rank}: {error}", file=sys.stderr)
        return error.exit_code


def exit_code_of(end: RankEnd) -> int:
    """Return a member's exit code, as a shell would report that of its rank."""
    if not end.failed:
        return 0
    return end.exit_code if end.exit_code >= 0 else 128 - end.exit_code


class MemberRun:
    """One member's part in a run: its own rank, over all attempts. Rank 0 decides whether another
    attempt follows, because it reads every rank's files; the others wait for what it publishes."""

    def __init__(self, run: RunDir, launch: LaunchPlan, rendezvous: Rendezvous, task: Task) -> None:
        self.run, self.launch, self.rendezvous, self.task = run, launch, rendezvous, task
        # In a container the launcher may be outside: then there is no parent to see.
        self.above = [os.pidfd_open(pid) for pid in (os.getppid(), *_starter()) if pid]
        self._asked_at = time.monotonic()

    def lead(self) -> Ending:
        """Run all attempts as rank 0."""
        publish = self.rendezvous.publish_next
        return run_attempts(self.launch, self.run, self._lead_attempt, publish)

    def follow(self) -> LaunchEnd:
        """Run all attempts as any other rank: as often as rank 0 says."""
        with logged_signals() as signals:
            while True:
                end = self._run_rank(Start(self.launch.limits, signals))
                if not self.launch.max_restarts:
                    return end
                failed = self.rendezvous.wait_for_next(self._is_deserted)
                if not failed:
                    return end
                archive_rank(self.run, failed, self.rendezvous.topology.rank)

    def _lead_attempt(self, this: Start) -> LaunchEnd:
        """Run rank 0's own rank, then read how all have ended."""
        own = self._run_rank(this)
        self.rendezvous.wait_for_ends(self.launch.limits.grace_s + LAST_ENDS_S)
        ends = load_ends(self.run, self.launch.crew.world_size)
        signals = [end.signal for end in ends.values() if end.signal is not None]
        # A launcher ends everybody when one rank fails: then the signal is not the cause.
        alone_to_blame = all(not end.failed or end.asked_to_end for end in ends.values())
        complete = len(ends) == self.launch.crew.world_size
        found = own.signal or (signals[0] if signals else None)
        stop = found if alone_to_blame and complete else None
        return LaunchEnd(ends=own.ends | ends, signal=stop, told=own.told)

    def _run_rank(self, this: Start) -> LaunchEnd:
        """Run this member's own rank once, and publish how it went."""
        topology, rendezvous = self.rendezvous.topology, self.rendezvous
        spec = build_spec(self.launch, self.run, topology, rendezvous.rank_store, self.task)
        end = Supervisor(self.run, [spec], this.limits, self._is_over).run(this.signals)
        if topology.rank not in end.ends:
            end.ends[topology.rank] = self._never_started(this.signals)
        if end.ends[topology.rank].failed:
            rendezvous.publish_failure(topology.rank)
        rendezvous.publish_end()
        return end

    def _never_started(self, signals: SignalLog) -> RankEnd:
        """Return, and leave on disk, the end of a rank before whose start a signal came: the other
        ranks wait for it, and rank 0 for its file."""
        assert signals.first is not None, "nothing else keeps a rank from being started"
        rank = self.rendezvous.topology.rank
        end = RankEnd(
            rank=rank,
            host=socket.gethostname(),
            exit_code=-signals.first,
            asked_to_end=True,
            signal=signals.first,
            failed=True,
        )
        with suppress(OSError):
            self.run.make_rank(rank)
        self.run.lost.keep(self.run.rank_end(rank), end.to_json(), save_last)
        return end

    def _is_deserted(self) -> bool:
        """True when the launcher is gone, or the process that called it."""
        return bool(self.above) and wait_for_any(self.above, 0)

    def _is_over(self) -> bool:
        """True when the run has ended elsewhere; asks the store only now and then."""
        if self._is_deserted():
            return True
        if time.monotonic() - self._asked_at < POLL_S:
            return False
        self._asked_at = time.monotonic()
        return self.rendezvous.has_failed()


def starter_variables(launch: LaunchPlan, secret: str) -> dict[str, str]:
    """Return what tells members which process of which host runs their launcher, which workload it
    has found trusted, and the run's secret: their machines need not have the user's state folder.
    What no launcher carries to other machines they read in the run directory."""
    here = f"{socket.gethostname()}:{os.getpid()}"
    return {STARTER: here, TRUSTED: launch.workload, SECRET: secret}


def _starter() -> list[int]:
    """Return the process that started the ranks, if it is on this host: some launchers die and
    leave their children behind."""
    host, _, pid = os.environ.get(STARTER, "").rpartition(":")
    return [int(pid)] if host == socket.gethostname() and pid.isdigit() else []


def load_ends(run: RunDir, num_ranks: int) -> dict[int, RankEnd]:
    """Return how each rank's process ended; one whose supervisor was killed has left no file."""
    paths = {rank: run.rank_end(rank) for rank in range(num_ranks)}
    return {rank: RankEnd.load(path) for rank, path in paths.items() if path.is_file()}


def _require_same_task(launch: LaunchPlan, task: Task) -> None:
    if launch.task != task.name:
        raise LaunchError(
            f"the ranks were planned for `{launch.task}`, and this process runs `{task.name}`\n"
            "hint: start the same command on every rank"
        )


def _require_trusted(launch: LaunchPlan, run: RunDir) -> None:
    if launch.workload != os.environ.get(TRUSTED):
        require_trusted(launch.workload, run.root)


def _require_as_planned(topology: Topology, launch: LaunchPlan) -> None:
    if topology.world_size != launch.crew.world_size:
        raise ClusterError(
            f"the plan has {launch.crew.world_size} ranks, and {launch.launcher} started"
            f" {topology.world_size}\nhint: see launcher.log; the command is in launch.json"
        )
