"""Who am I among the ranks: each launcher's variables, in order, and every kind of junk."""

import pytest

from paceline.errors import ConfigError
from paceline.machine import Topology, resolve_topology
from paceline.machine.topology import expand_nodes

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "4242",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
# As read from the tasks of a real `srun -N2 --ntasks-per-node=2` (SLURM 22.05).
SLURM = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
# The batch script of the same job, before any srun: rank 0's numbers around one lone process.
BATCH = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SALLOC = {name: value for name, value in BATCH.items() if "ID" not in name or "JOB" in name}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "99090433", "PMIX_RANK": "1",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
    "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_nothing_is_alone() -> None:
    assert resolve_topology({}) == Topology() and resolve_topology({}).is_alone


def test_torchrun() -> None:
    found = resolve_topology(TORCHRUN)
    assert (found.launcher, found.rank, found.world_size) == ("torchrun", 3, 4)
    assert (found.local_rank, found.local_world_size, found.num_nodes) == (1, 2, 2)
    assert (found.master_addr, found.master_port, found.agent_store) == ("n1", 4242, True)


def test_deepspeed_sets_rank_too() -> None:
    found = resolve_topology(DEEPSPEED)
    assert (found.launcher, found.rank, found.local_world_size) == ("deepspeed", 1, 2)
    assert not found.agent_store


def test_slurm_meets_on_the_first_node_of_the_step() -> None:
    found = resolve_topology(SLURM)
    assert (found.launcher, found.rank, found.world_size) == ("slurm", 3, 4)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
    assert found.master_addr == "n1"
    assert 10_000 <= found.master_port < 30_000
    assert found.master_port == resolve_topology(SLURM | {"SLURM_PROCID": "0"}).master_port
    assert found.master_port != resolve_topology(SLURM | {"SLURM_STEP_ID": "1"}).master_port
    assert found.master_port != resolve_topology(SLURM | {"SLURM_RESTART_COUNT": "1"}).master_port


def test_a_stranger_who_knows_the_job_does_not_know_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = set()
    for user in range(8):
        monkeypatch.setenv("PACELINE_SECRET", f"the secret of user {user}")
        ports.add(resolve_topology(SLURM).master_port)
    assert len(ports) > 4


@pytest.mark.parametrize("loopback", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_slurm_never_meets_on_loopback_with_several_nodes(loopback: str) -> None:
    assert resolve_topology(SLURM | {"MASTER_ADDR": loopback}).master_addr == "n1"
    assert resolve_topology(SLURM | {"MASTER_ADDR": "10.0.0.9"}).master_addr == "10.0.0.9"


def test_slurm_on_one_node_meets_on_loopback() -> None:
    one = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1"}
    one |= {"SLURM_STEP_TASKS_PER_NODE": "4"}
    found = resolve_topology(one)
    assert (found.master_addr, found.local_world_size, found.num_nodes) == ("127.0.0.1", 4, 1)


def test_uneven_nodes() -> None:
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert resolve_topology(uneven).local_world_size == 1


@pytest.mark.parametrize("environment", [BATCH, SALLOC])
def test_a_lone_process_inside_a_job_is_alone(environment: dict[str, str]) -> None:
    assert resolve_topology(environment).is_alone


def test_one_task_of_srun_is_alone() -> None:
    """`srun --pty bash`, and SLURM's interactive step: the job's counts, the step's one task."""
    step = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    assert resolve_topology(BATCH | step).is_alone


def test_open_mpi_without_mpi4py() -> None:
    found = resolve_topology(OPEN_MPI)
    assert (found.launcher, found.rank, found.world_size) == ("mpi", 1, 2)
    assert (found.master_addr, found.num_nodes) == ("127.0.0.1", 1)
    other = resolve_topology(OPEN_MPI | {"PMIX_NAMESPACE": "1"})
    assert found.master_port != other.master_port, "two mpiruns on a host do not meet"


@pytest.mark.parametrize(
    "names",
    [
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
         "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ],
)  # fmt: skip
def test_mpich_and_its_kin(names: tuple[str, ...]) -> None:
    told = dict(zip(names, ("5", "8", "1", "4"), strict=True))
    found = resolve_topology(told | {"MASTER_ADDR": "a"})
    assert (found.launcher, found.rank, found.world_size) == ("mpi", 5, 8)
    assert (found.local_rank, found.local_world_size) == (1, 4)


def test_mpi_on_several_nodes_must_be_told_where_to_meet() -> None:
    wide = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        resolve_topology(wide)
    assert resolve_topology(wide | {"MASTER_ADDR": "a"}).master_addr == "a"
    in_slurm = resolve_topology(wide | {"SLURM_JOB_NODELIST": "n[3-4]"})
    assert in_slurm.master_addr == "n3"


def test_mpirun_inside_slurm_is_mpi_whatever_slurm_counts() -> None:
    """mpirun starts a daemon a node with srun; its ranks inherit the daemon's SLURM_PROCID."""
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    found = resolve_topology(daemon | OPEN_MPI)
    assert (found.launcher, found.rank, found.world_size) == ("mpi", 1, 2)


def test_the_innermost_launcher_wins() -> None:
    assert resolve_topology(OPEN_MPI | SLURM | TORCHRUN).launcher == "torchrun"
    assert resolve_topology({"PMI_RANK": "3", "PMI_SIZE": "4"} | SLURM).launcher == "slurm"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (TORCHRUN | {"RANK": "abc"}, "RANK='abc' is not a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is not one of 4 ranks"),
        (TORCHRUN | {"LOCAL_RANK": "9"}, "local rank 9 is not one of 2 ranks"),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, "a world of 0 ranks"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"RANK": "0"}, "WORLD_SIZE is not set; LOCAL_RANK is not set"),
        ({"LOCAL_RANK": "9"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "9"}, "MASTER_ADDR is not set"),
        (SLURM | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE='' is not a whole"),
    ],
)
def test_junk_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_topology(environment)
    assert says in str(refusal.value) and refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a-[1-2].site,b", ["a-1.site", "a-2.site", "b"]),
        ("", []),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names
