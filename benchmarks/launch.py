"""How long from "start" to a process group of 2 ranks: Paceline against torchrun and deepspeed.

    OMP_NUM_THREADS=1 python benchmarks/launch.py [ROUNDS]

The same no-op program everywhere: join a gloo group, pass a barrier, write down the time, leave.
One round starts each contender once, in turn; a ratio is between two of the same round. Paceline
is measured as in a sweep, in one process: its first launch, which starts the fork server, and the
later ones. torch's own elastic_launch with the same fork server runs beside it.
Goals: a later launch reaches the group in at most 0.5 s, and 6x sooner than either command.
"""

import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from paceline.errors import Outcome
from paceline.launch.base import LaunchOrder, RankContext, Task
from paceline.launch.local import LocalLauncher
from paceline.machine.facts import probe
from paceline.machine.group import join_group
from paceline.machine.launchers import launch_section
from paceline.machine.topology import Topology
from paceline.plan.crew import choose_crew
from paceline.records import RankVerdict
from paceline.records.rundir import RunDir

RANKS = 2
GOAL_S, GOAL_RATIO = 0.5, 6.0

PROGRAM = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open(os.path.join(os.environ["NOOP_DIR"], "rank" + os.environ["RANK"]), "w").write(str(time.time()))
dist.destroy_process_group()
"""


def arrive(folder: Path, rank: int) -> None:
    """The no-op program's last words: when the group was there."""
    dist.barrier()
    (folder / f"rank{rank}").write_text(str(time.time()))


def noop_rank(context: RankContext) -> None:
    import torch

    join_group("gloo", context.place, torch.device("cpu"), context.store.connect(), 60)
    arrive(context.run.root, context.place.rank)
    verdict = RankVerdict(
        rank=context.place.rank, host="here", outcome=Outcome.OK, step=0, ended_at=time.time()
    )
    verdict.save(context.run.verdict(context.place.rank))


NOOP = Task("noop", noop_rank, "none")


def noop_elastic(folder: str) -> None:
    dist.init_process_group("gloo")
    arrive(Path(folder), dist.get_rank())
    dist.destroy_process_group()


def launch_paceline(folder: Path) -> None:
    settings = launch_section()(nproc=RANKS, device="cpu")
    env = probe_once()
    crew = choose_crew(settings, env, Topology())
    plan = LocalLauncher().plan(LaunchOrder(settings, crew, env, 1, NOOP, run_dir=str(folder)))
    end = LocalLauncher().run(plan, RunDir(folder), NOOP)
    assert set(end.seen.exit_codes.values()) == {0}, end


def launch_elastic(folder: Path) -> None:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = ElasticConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=RANKS, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0,
        start_method="forkserver", logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )  # fmt: skip
    elastic_launch(config, noop_elastic)(str(folder))


def launch_command(argv: list[str]) -> Callable[[Path], None]:
    def launch(folder: Path) -> None:
        program = folder / "noop.py"
        program.write_text(PROGRAM)
        env = os.environ | {"NOOP_DIR": str(folder), "DS_ACCELERATOR": "cpu"}
        done = subprocess.run([*argv, str(program)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return launch


BIN = Path(sys.executable).parent
COMMANDS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(RANKS)],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", str(RANKS), "--no_local_rank"],
}
_ENV = []


def probe_once():  # type: ignore[no-untyped-def]
    if not _ENV:
        _ENV.append(probe())
    return _ENV[0]


def time_to_group(launch: Callable[[Path], None]) -> tuple[float, float]:
    """Seconds until the last rank had its group, and until everything had ended."""
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    try:
        started_at = time.time()
        launch(folder)
        ended_at = time.time()
        arrived_at = max(float((folder / f"rank{r}").read_text()) for r in range(RANKS))
        return arrived_at - started_at, ended_at - started_at
    finally:
        shutil.rmtree(folder)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    multiprocessing.set_forkserver_preload(["paceline.launch.rank"])
    probe_once()
    contenders = {"paceline": launch_paceline, "elastic_launch": launch_elastic}
    contenders |= {
        name: launch_command(argv) for name, argv in COMMANDS.items() if Path(argv[0]).exists()
    }
    first_s, _ = time_to_group(launch_paceline)
    print(f"{rounds} rounds, {RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"paceline, first launch of a process: {first_s:.2f} s to the group")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, launch in contenders.items():
            times[name].append(time_to_group(launch))
    for name, pairs in times.items():
        to_group, to_end = ([pair[n] for pair in pairs] for n in (0, 1))
        print(
            f"{name:15} to the group: median {statistics.median(to_group):6.3f} s,"
            f" {min(to_group):.3f} to {max(to_group):.3f}; to the end: median"
            f" {statistics.median(to_end):6.3f} s"
        )
    own = [pair[0] for pair in times["paceline"]]
    verdict = "PASS" if statistics.median(own) <= GOAL_S else "MISS"
    print(f"later launches: median {statistics.median(own):.3f} s, goal {GOAL_S} s: {verdict}")
    for name in times.keys() & COMMANDS.keys():
        ratios = [other[0] / mine for other, mine in zip(times[name], own, strict=True)]
        verdict = "PASS" if statistics.median(ratios) >= GOAL_RATIO else "MISS"
        print(
            f"{name} / paceline: median {statistics.median(ratios):.1f}x,"
            f" {min(ratios):.1f}x to {max(ratios):.1f}x, goal {GOAL_RATIO:g}x: {verdict}"
        )
    for name in COMMANDS.keys() - times.keys():
        print(f"{name} / paceline: not measured, {name} is not installed")


if __name__ == "__main__":
    main()
