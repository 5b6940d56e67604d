"""Who am I among the ranks? A launcher's variables in, a `Topology` out. No torch, no mpi4py.

    from paceline.machine import resolve_topology
    topology = resolve_topology()          # topology.rank, .world_size, .master_addr, ...

The innermost launcher wins: torchrun's variables (DeepSpeed's launcher sets the same), then SLURM,
then MPI, then nobody. Values that cannot be true are refused, all of them at once.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.machine.secret import derive, shared_secret

# Below the range from which kernels hand out ports to clients.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
LOOPBACK = re.compile(r"^(localhost|127\..*|::1)$")


@dataclass(frozen=True)
class RankId:
    """Which rank a process is: the one answer to "who am I" in every stage of a run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Topology(RankId):
    """A `RankId` with what its launcher's variables say of the other ranks. A process that is
    alone may start ranks itself."""

    launcher: str = "alone"  # or a name of launchers.py, or "env": who sets torchrun's variables
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_store: bool = False  # torchrun's agent serves the store at master_addr:master_port

    @property
    def is_alone(self) -> bool:
        """Tell whether no other rank waits for it: no launcher, or one that was asked for one
        process."""
        return self.world_size == 1


def resolve_topology(environment: Mapping[str, str] | None = None) -> Topology:
    """Return this process among its peers, from the environment; `ConfigError` on junk."""
    found = _Variables(os.environ if environment is None else environment)
    for discover in (_from_ranks, _from_slurm, _from_mpi):
        topology = discover(found)
        if topology is not None:
            _require_possible(topology, found)
            return topology
    return Topology()


@dataclass
class _Variables:
    """Read whole numbers and remember everything that is wrong with them."""

    environment: Mapping[str, str]
    problems: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return any(name in self.environment for name in names)

    def text(self, *names: str) -> str | None:
        return next((self.environment[n] for n in names if self.environment.get(n)), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that is set; without a default one of them must be."""
        name = next((n for n in names if n in self.environment), None)
        if name is None:
            if default is None:
                self.problems.append(f"{names[0]} is not set")
            return default or 0
        value = self.environment[name].strip()
        if not re.fullmatch(r"\d{1,9}", value):
            self.problems.append(f"{name}={value!r} is not a whole number")
            return default or 0
        return int(value)


def _from_ranks(found: _Variables) -> Topology | None:
    """Read the variables of torchrun and DeepSpeed's launcher, or of whoever sets the same ones."""
    if not found.has("RANK", "LOCAL_RANK"):
        return None
    launcher = "env"
    if found.has("TORCHELASTIC_RUN_ID"):
        launcher = "torchrun"
    elif found.has("CROSS_RANK") and found.has("LOCAL_SIZE"):
        launcher = "deepspeed"
    world = found.number("WORLD_SIZE")
    local_world = found.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=world)
    if world > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not found.has(name):
                found.problems.append(f"{name} is not set")
    return Topology(
        launcher=launcher,
        rank=found.number("RANK"),
        world_size=world,
        local_rank=found.number("LOCAL_RANK"),
        local_world_size=local_world,
        node_rank=found.number("GROUP_RANK", "CROSS_RANK", default=0),
        num_nodes=found.number(
            "GROUP_WORLD_SIZE", "CROSS_SIZE", default=-(-world // max(1, local_world))
        ),
        master_addr=found.text("MASTER_ADDR") or "127.0.0.1",
        master_port=found.number("MASTER_PORT", default=0),
        agent_store=found.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(found: _Variables) -> Topology | None:
    """Read the variables of a task of srun. In salloc and sbatch the same variables exist around
    one lone process: only a step has an id, and only a task of one can have a rank above 0."""
    in_step = found.has("SLURM_STEP_ID", "SLURM_STEPID") or found.text("SLURM_PROCID") not in (
        None,
        "0",
    )
    if not found.has("SLURM_PROCID") or not in_step:
        return None
    # mpirun inside a job starts a daemon on each node with srun, and its ranks inherit the
    # daemon's variables: SLURM counts daemons there. srun itself never sets this one.
    if found.has("OMPI_COMM_WORLD_RANK"):
        return None
    world = found.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = found.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    node_rank = found.number("SLURM_NODEID", default=0)
    per_node = _tasks_per_node(found.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    job = [found.text(name) or "" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    restarts = found.text("SLURM_RESTART_COUNT") or "0"
    return Topology(
        launcher="slurm",
        rank=found.number("SLURM_PROCID"),
        world_size=world,
        local_rank=found.number("SLURM_LOCALID"),
        local_world_size=min(
            world, per_node[node_rank] if node_rank < len(per_node) else world // nodes
        ),
        node_rank=node_rank,
        num_nodes=nodes,
        master_addr=_slurm_master(found, nodes),
        master_port=_port(found, ".".join([*job, restarts]), world),
    )


def _slurm_master(found: _Variables, num_nodes: int) -> str:
    """Return the step's first node, unless the user named a host that all nodes can reach."""
    named = found.text("MASTER_ADDR")
    if named and not (num_nodes > 1 and LOOPBACK.match(named)):
        return named
    if num_nodes == 1:
        return "127.0.0.1"
    names = expand_nodes(found.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") or "")
    if not names:
        found.problems.append("SLURM_JOB_NODELIST is not set: no host is known to meet on")
        return ""
    return names[0]


@dataclass(frozen=True)
class _MpiFamily:
    rank: str
    size: str
    local_rank: str
    local_size: str


MPI_FAMILIES = (
    _MpiFamily(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _MpiFamily(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _MpiFamily("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel
    _MpiFamily("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
)


def _from_mpi(found: _Variables) -> Topology | None:
    family = next(
        (f for f in MPI_FAMILIES if found.has(f.rank) and found.has(f.local_rank)),
        next((f for f in MPI_FAMILIES if found.has(f.rank)), None),
    )
    if family is None:
        return None
    rank, world = found.number(family.rank), found.number(family.size)
    local_world = found.number(family.local_size, default=1 if world == 1 else None)
    nodes = -(-world // max(1, local_world))
    named = found.text("MASTER_ADDR")
    if named is None and nodes > 1:
        # Inside a SLURM job rank 0 runs on its first node; elsewhere MPI tells nobody where.
        named = next(iter(expand_nodes(found.text("SLURM_JOB_NODELIST") or "")), None)
    if named is None and nodes > 1:
        found.problems.append(
            "MASTER_ADDR is not set, and MPI does not tell on which host rank 0 runs"
        )
    return Topology(
        launcher="mpi",
        rank=rank,
        world_size=world,
        local_rank=found.number(family.local_rank, default=0 if world == 1 else None),
        local_world_size=local_world,
        node_rank=rank // max(1, local_world),
        num_nodes=nodes,
        master_addr=named or "127.0.0.1",
        master_port=_port(found, _mpi_job(found), world),
    )


def _mpi_job(found: _Variables) -> str:
    """Return something that all ranks of one mpirun share and no other mpirun on the host does."""
    name = found.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return name or f"child of {os.getppid()}"


def _port(found: _Variables, job: str, world_size: int) -> int:
    """Return MASTER_PORT, or one that every rank of this job, and hardly another job, arrives at.
    Other users know the job's number too; what the port follows from they do not."""
    if found.has("MASTER_PORT"):
        return found.number("MASTER_PORT")
    if world_size == 1:
        return 0  # nobody to meet
    drawn = derive(shared_secret(), "port", job)
    return FIRST_PORT + int.from_bytes(drawn[:8], "big") % NUM_PORTS


def _require_possible(topology: Topology, found: _Variables) -> None:
    t, problems = topology, found.problems
    if not problems:
        checks = (
            (t.world_size < 1, f"a world of {t.world_size} ranks has no rank in it"),
            (t.rank >= t.world_size, f"rank {t.rank} is not one of {t.world_size} ranks"),
            (
                t.local_rank >= t.local_world_size,
                f"local rank {t.local_rank} is not one of {t.local_world_size} ranks on this host",
            ),
            (
                t.local_world_size > t.world_size,
                f"{t.local_world_size} ranks on this host of {t.world_size} in all",
            ),
            (t.master_port > 65535, f"MASTER_PORT={t.master_port} is not a port"),
        )
        problems = [text for is_wrong, text in checks if is_wrong]
    if problems:
        raise ConfigError(
            f"the launcher's variables make no sense: {'; '.join(problems)}\n"
            "hint: start the ranks with torchrun, srun, mpirun or deepspeed, or unset RANK,"
            " LOCAL_RANK and WORLD_SIZE to let Paceline start them"
        )


def expand_nodes(text: str) -> list[str]:
    """Expand `gpu[01-03,7],login` as SLURM means it: gpu01 gpu02 gpu03 gpu7 login."""
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text):
        names += _expand(part)
    return names


def _expand(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    head, ranges, rest = match.groups()
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if not dash:
            numbers.append(first)
            continue
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return [f"{head}{number}{tail}" for number in numbers for tail in _expand(rest)]


def _tasks_per_node(text: str | None) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1."""
    counts: list[int] = []
    for piece in (text or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts
