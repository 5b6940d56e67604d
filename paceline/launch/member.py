"""One rank under somebody else's launcher: torchrun, srun, mpirun, deepspeed.

The process that the launcher starts is a supervisor of one rank, its child. So a rank that hangs,
crashes or is killed is seen and told, whatever the launcher does about it.

    paceline train RECIPE                       under a launcher: rank 0 plans, the others follow
    python -m paceline.launch.member RUN_DIR    started by a launcher of ours: the plan is there
"""

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ClusterError, PacelineError
from paceline.launch.archive import archive_rank
from paceline.launch.attempts import Start, run_attempts
from paceline.launch.base import LaunchEnd, LaunchOrder, draw_plan, rank_device, rank_gpu
from paceline.launch.local import build_spec
from paceline.launch.process import wait_for_any
from paceline.launch.rank import TASKS, save_failure
from paceline.launch.rendezvous import Rendezvous, join_rendezvous
from paceline.launch.signals import SignalLog, logged_signals
from paceline.launch.supervisor import Supervisor
from paceline.machine.topology import RankId, Topology, resolve_topology
from paceline.records import LaunchPlan, RankEnd, RankPlace
from paceline.records.rundir import RunDir

STARTER = "PACELINE_STARTER"
POLL_S = 1.0
START_S = 300.0
LAST_WORDS_S = 15.0  # how long rank 0 waits for the others to say how they ended


@dataclass(frozen=True)
class MemberLauncher:
    """Rank 0's side of a run that another launcher has started: the seam with nothing to start
    but this process's own rank."""

    rendezvous: Rendezvous
    places: list[RankPlace]

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

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        run.stop_request.unlink(missing_ok=True)  # one that was killed may have left it
        self.rendezvous.publish(run_dir=str(run.root))
        return supervise_member(run, launch, self.rendezvous)


def follow_rank0(rendezvous: Rendezvous) -> int:
    """A member that is not rank 0: wait for orders, follow them, return an exit code."""
    orders = rendezvous.wait_for_orders()
    if "exit_code" in orders:
        return int(orders["exit_code"])  # rank 0 has said why
    run = RunDir(Path(str(orders["run_dir"])))
    if not run.launch.is_file():
        rendezvous.publish_failure(rendezvous.topology.rank)
        raise ClusterError(
            f"{run.root}, which rank 0 made, is not on {socket.gethostname()}\n"
            "hint: give --out a directory on a file system that all nodes share"
        )
    end = supervise_member(run, LaunchPlan.load(run.launch), rendezvous)
    return end_code(end.ends[rendezvous.topology.rank])


def end_code(end: RankEnd) -> int:
    """A member's exit code: what a shell would say of its rank."""
    if not end.failed:
        return 0
    return end.exit_code if end.exit_code >= 0 else 128 - end.exit_code


def supervise_member(run: RunDir, launch: LaunchPlan, rendezvous: Rendezvous) -> LaunchEnd:
    """Supervise this member's own rank over all attempts. Rank 0 decides whether another follows,
    because it reads every rank's last words; the others wait for its word."""
    seat = MemberRun(run, launch, rendezvous)
    if rendezvous.topology.rank == 0:
        return run_attempts(launch, run, seat.lead, rendezvous.publish_next)
    return seat.follow()


class MemberRun:
    """One member's place in a run."""

    def __init__(self, run: RunDir, launch: LaunchPlan, rendezvous: Rendezvous) -> None:
        self.run, self.launch, self.rendezvous = run, launch, rendezvous
        # In a container the launcher may be outside: then there is no parent to see.
        self.above = [os.pidfd_open(pid) for pid in (os.getppid(), *_starter()) if pid]
        self._asked_at = time.monotonic()

    def lead(self, this: Start) -> LaunchEnd:
        """Rank 0: its own rank, and then how all have ended."""
        own = self.start(this)
        self.rendezvous.wait_for_ends(self.launch.limits.grace_s + LAST_WORDS_S)
        ends = load_ends(self.run, self.launch.crew.world_size)
        signals = [end.signal for end in ends.values() if end.signal is not None]
        # A launcher ends everybody when one rank fails: then the signal is not the cause.
        alone_to_blame = all(not end.failed or end.asked_to_end for end in ends.values())
        complete = len(ends) == self.launch.crew.world_size
        found = own.signal or (signals[0] if signals else None)
        return LaunchEnd(ends=ends, signal=found if alone_to_blame and complete else None)

    def follow(self) -> LaunchEnd:
        """Any other rank: start it as often as rank 0 says."""
        with logged_signals() as signals:
            while True:
                end = self.start(Start(self.launch.limits, signals))
                failed = self.launch.max_restarts and self.rendezvous.wait_for_next(
                    self._is_deserted
                )
                if not failed:
                    break
                archive_rank(self.run, failed, self.rendezvous.topology.rank)
        return end

    def start(self, this: Start) -> LaunchEnd:
        """This member's own rank to its end; the others are told how it went."""
        at, rendezvous = self.rendezvous.topology, self.rendezvous
        place = RankId(at.rank, at.local_rank, at.world_size)
        task = TASKS[self.launch.task]
        spec = build_spec(self.launch, self.run, place, rendezvous.rank_store, task)
        end = Supervisor(self.run, [spec], this.limits, self._is_over).run(this.signals)
        if at.rank not in end.ends:
            end.ends[at.rank] = self._never_started(this.signals)
        if end.ends[at.rank].failed:
            rendezvous.publish_failure(at.rank)
        rendezvous.publish_end()
        return end

    def _never_started(self, signals: SignalLog) -> RankEnd:
        """A signal came first. The others wait for this rank, and rank 0 for a word of it."""
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
        self.run.rank(rank).mkdir(parents=True, exist_ok=True)
        end.save(self.run.rank_end(rank))
        return end

    def _is_deserted(self) -> bool:
        """Has the launcher gone, or who started it?"""
        return bool(self.above) and wait_for_any(self.above, 0)

    def _is_over(self) -> bool:
        """Asks now and then: has another rank failed?"""
        if self._is_deserted():
            return True
        if time.monotonic() - self._asked_at < POLL_S:
            return False
        self._asked_at = time.monotonic()
        return self.rendezvous.has_failed()


def starter_variable() -> dict[str, str]:
    """Tells members which process of which host runs their launcher's command."""
    return {STARTER: f"{socket.gethostname()}:{os.getpid()}"}


def _starter() -> list[int]:
    """That process, where it is on this host: some launchers die and leave their own behind."""
    host, _, pid = os.environ.get(STARTER, "").rpartition(":")
    return [int(pid)] if host == socket.gethostname() and pid.isdigit() else []


def load_ends(run: RunDir, num_ranks: int) -> dict[int, RankEnd]:
    """How each rank's process ended; one whose supervisor was killed has left no word."""
    paths = {rank: run.rank_end(rank) for rank in range(num_ranks)}
    return {rank: RankEnd.load(path) for rank, path in paths.items() if path.is_file()}


def main(arguments: list[str]) -> int:
    """Take part in a run that is planned already: RUN_DIR is the last argument."""
    run = RunDir.open(Path(arguments[-1]))
    launch = LaunchPlan.load(run.launch)
    topology = resolve_topology()
    try:
        _require_as_planned(topology, launch)
        with join_rendezvous(topology, START_S) as rendezvous:
            if topology.rank == 0:
                rendezvous.wait_for_all(launch.limits.start_s or START_S)
            return end_code(supervise_member(run, launch, rendezvous).ends[topology.rank])
    except PacelineError as error:
        run.rank(topology.rank).mkdir(parents=True, exist_ok=True)
        save_failure(run, topology.rank, error)
        print(f"rank {topology.rank}: {error}", file=sys.stderr)
        return error.exit_code


def _require_as_planned(topology: Topology, launch: LaunchPlan) -> None:
    if topology.world_size != launch.crew.world_size:
        raise ClusterError(
            f"the plan has {launch.crew.world_size} ranks, and {launch.launcher} started"
            f" {topology.world_size}\nhint: see launcher.log; the command is in launch.json"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
