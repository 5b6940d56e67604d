"""How many ranks, on which devices, started by whom: shared by `train` and `check`.

In a process that a launcher started, the launcher has decided; alone, the settings decide.
"""

from collections.abc import Iterator

from paceline.config.schema import LaunchConfig
from paceline.config.typed_only import iter_typed_only
from paceline.errors import ConfigError
from paceline.machine.hosts import read_hostfile
from paceline.machine.launchers import (
    DEFAULT,
    LAUNCHERS,
    HostfileConfig,
    any_wide_launcher,
    is_allocated,
    is_local,
    wide_launchers,
)
from paceline.machine.topology import Topology
from paceline.records import Backend, Choice, Crew, Device, Env, Finding, words
from paceline.records.decided import MAX_RANKS

READ_AT_START = {
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_PLACES",
    "OMP_PROC_BIND", "PYTHONHASHSEED", "PYTHONPATH", "TORCH_LOGS",
}  # fmt: skip

# What a rank of a small model holds that no other process shares: 35 to 36 MiB (USS) measured on
# CPUs with torch 2.13, 6 to 64 ranks from one fork server; of 64 each took 39 MiB of MemAvailable.
# Its RSS, 303 MiB, counts the fork server's pages for every rank again. At least so much: ranks of
# other launchers, which share less, and ranks on GPUs hold more.
RANK_BYTES = 36 << 20
OVERCOMMIT = "; launch.overcommit=true starts all the same, and plans for a larger machine"


def choose_crew(launch: LaunchConfig, env: Env, topology: Topology) -> Crew:
    device = choose_device(launch, env)
    indices = device_indices(launch, device)
    if topology.is_alone:
        per_node = _ranks_per_node(launch, env, device)
        num_nodes = _count_nodes(launch, env)
        world_size = per_node * num_nodes
    else:
        per_node, num_nodes = topology.local_world_size, topology.num_nodes
        world_size = topology.world_size
    if world_size > MAX_RANKS:
        raise ConfigError(
            f"launch.nproc={per_node} with launch.nnodes={num_nodes} are {world_size} ranks;"
            f" {MAX_RANKS} are the most that are planned\n"
            "hint: launch.nproc counts the ranks of one machine, launch.nnodes the machines"
        )
    return Crew(
        launcher=_choose_launcher(launch, topology),
        world_size=world_size,
        num_nodes=num_nodes,
        per_node=per_node,
        device=device,
        backend=_choose_backend(launch, device, shares_gpus(launch)),
        device_indices=indices,
    )


def choose_device(launch: LaunchConfig, env: Env) -> Choice[Device]:
    asked = launch.device
    if asked != "auto":
        return Choice.as_asked(asked)
    if env.gpus and (env.cuda or env.hip):
        return Choice(requested=asked, value="cuda", because=f"{len(env.gpus)} GPUs are visible")
    why = "no GPU is visible" if not env.gpus else "this torch is built without CUDA and ROCm"
    return Choice(requested=asked, value="cpu", because=why)


def choose_threads(launch: LaunchConfig, env: Env, crew: Crew, workers: int) -> Choice[int]:
    asked = (env.variables | launch.env).get("OMP_NUM_THREADS", "auto")
    if asked.isdigit() and int(asked) > 0:
        return Choice(requested=asked, value=int(asked), because="OMP_NUM_THREADS is set")
    # Loaders of a CPU rank work on its own cores; threads that spin beside them slow both.
    on_cpu = not crew.on_gpu
    share = env.cores // crew.per_node
    value = max(1, share - workers if on_cpu else share)
    loading = f" less {workers} for loading" if workers and on_cpu else ""
    why = f"{env.cores} cores over {count_ranks(crew.per_node)}{loading}"
    return Choice(requested=asked, value=value, because=why)


def visible_devices(launch: LaunchConfig) -> list[int]:
    """Return the GPUs of `launch.devices`, each once, in the order they are named."""
    return [] if launch.devices == "auto" else list(dict.fromkeys(launch.devices))


def device_indices(launch: LaunchConfig, device: Choice[Device]) -> list[int]:
    """Return for each local rank its place among `visible_devices`: [0, 4, 4] is 0, 1, 1."""
    if launch.devices == "auto" or device.value == "cpu":
        return []
    visible = visible_devices(launch)
    return [visible.index(number) for number in launch.devices]


def shares_gpus(launch: LaunchConfig) -> bool:
    return launch.devices != "auto" and len(set(launch.devices)) < len(launch.devices)


def check_crew(launch: LaunchConfig, env: Env, crew: Crew, topology: Topology) -> Iterator[Finding]:
    """Yield what is wrong with these ranks here."""
    yield from _thread_problems(launch, env, crew)
    yield from _late_variables(launch, crew)
    for typed in iter_typed_only({"launch": launch.model_dump()}):
        what = f"taken because it was typed: {typed.why}"
        yield Finding.note(typed.key, what)
    if topology.is_alone:
        yield from _start_problems(launch, env, crew)
    else:
        yield from _joined_problems(launch, crew, topology)
    if crew.on_gpu:
        # A launcher that started us may have given each rank one GPU of its own.
        sees_one_each = not topology.is_alone and len(env.gpus) == 1
        yield from _gpu_problems(launch, env, crew, sees_one_each)
    elif crew.backend.value == "nccl":
        yield Finding.error(
            "launch.backend",
            "nccl moves data between GPUs, and the ranks are on CPU",
            hint="set launch.backend=gloo",
            cause="cluster",
        )
    elif crew.per_node > env.cores:
        yield Finding.warning(
            "launch.nproc",
            f"{crew.per_node} ranks share {env.cores} cores and will wait for each other",
            cause="cluster",
        )


def _late_variables(launch: LaunchConfig, crew: Crew) -> Iterator[Finding]:
    """Warn of variables that come too late: local ranks are forked from a process that has
    loaded python and torch already."""
    for name in sorted(READ_AT_START & set(launch.env)):
        if is_local(crew.launcher.value):
            yield Finding.warning(
                f"launch.env.{name}",
                "has no effect: python or torch reads it at start, before ranks are forked",
                hint=f"export {name} before you start paceline, or set"
                f" launch.launcher={wide_launchers()[0]}",
            )


def _thread_problems(launch: LaunchConfig, env: Env, crew: Crew) -> Iterator[Finding]:
    asked = (env.variables | launch.env).get("OMP_NUM_THREADS")
    if asked is not None and not (asked.isdigit() and int(asked) > 0):
        yield Finding.error(
            "OMP_NUM_THREADS",
            f"{asked!r} is not a number of threads",
            hint=f"unset it, or set it to {max(1, env.cores // crew.per_node)}",
        )


def _start_problems(launch: LaunchConfig, env: Env, crew: Crew) -> Iterator[Finding]:
    if is_local(crew.launcher.value) and crew.num_nodes > 1:
        yield Finding.error(
            "launch.nnodes",
            f"{crew.launcher.value} starts ranks on this machine only, and"
            f" {crew.num_nodes} machines were asked for",
            hint=f"set launch.launcher={any_wide_launcher()}",
        )
    if launch.devices != "auto" and launch.nproc not in ("auto", len(launch.devices)):
        yield Finding.error(
            "launch.devices",
            f"names {len(launch.devices)} devices for {launch.nproc} ranks",
            hint="leave launch.nproc at auto, or name one device for each rank",
        )
    yield from _crowd_problems(launch, env, crew)
    if is_local(crew.launcher.value):
        yield from _unused_nodes(env)


def _crowd_problems(launch: LaunchConfig, env: Env, crew: Crew) -> Iterator[Finding]:
    """Refuse more processes than the machine's memory holds, whatever they train. Where that is
    not known nothing is said."""
    if not 0 < env.memory_bytes < crew.per_node * RANK_BYTES:
        return
    is_refused = is_refused_here(launch, crew)
    most = max(1, env.memory_bytes // RANK_BYTES)
    yield Finding(
        severity="error" if is_refused else "warning",
        where="launch.nproc",
        what=f"{count_ranks(crew.per_node)} on one machine would hold"
        f" {words.size(crew.per_node * RANK_BYTES)} before they have a model,"
        f" {words.size(RANK_BYTES)} each, and this one has {words.size(env.memory_bytes)}",
        hint=f"set launch.nproc to {most} or fewer{OVERCOMMIT if is_refused else ''}",
        cause="cluster",
    )


def is_refused_here(launch: LaunchConfig, crew: Crew) -> bool:
    """Tell whether what does not fit into memory is refused, and not only warned of: a login node
    says nothing of the machines that a scheduler will give."""
    return not is_allocated(crew.launcher.value) and not launch.overcommit


def _unused_nodes(env: Env) -> Iterator[Finding]:
    """Note that ranks which start here leave the other nodes of an allocation idle."""
    for name, facts in LAUNCHERS.items():
        num_nodes = facts.allocated_nodes(env.variables)
        if facts.allocation is not None and num_nodes > 1:
            yield Finding.note(
                "launch.launcher",
                f"this {facts.allocation.name} has {num_nodes} nodes, and ranks start on this one",
                hint=f"set launch.launcher={name} to use all of them",
            )


def _joined_problems(launch: LaunchConfig, crew: Crew, topology: Topology) -> Iterator[Finding]:
    """Yield settings that contradict the launcher which has already started this process."""
    started = f"{topology.launcher} has started {count_ranks(topology.local_world_size)} here"
    if launch.nproc not in ("auto", topology.local_world_size):
        yield _no_effect("launch.nproc", started)
    if launch.nnodes not in ("auto", topology.num_nodes):
        yield _no_effect("launch.nnodes", f"{topology.launcher} runs on {topology.num_nodes}")
    if launch.devices != "auto" and len(launch.devices) < topology.local_world_size:
        yield Finding.error(
            "launch.devices",
            f"names {len(launch.devices)} devices, and {started}",
            hint="name one device for each rank of a machine",
        )
    if launch.launcher not in ("auto", topology.launcher):
        yield Finding.error(
            "launch.launcher",
            f"{launch.launcher} was asked for, and this process is rank {topology.rank} of"
            f" {topology.world_size} that {topology.launcher} started; ranks do not start ranks",
            hint=f"leave launch.launcher at auto, or run it without {topology.launcher}",
        )


def _no_effect(where: str, because: str) -> Finding:
    return Finding.warning(where, f"has no effect: {because}")


def _gpu_problems(
    launch: LaunchConfig, env: Env, crew: Crew, sees_one_each: bool
) -> Iterator[Finding]:
    num_gpus = len(env.gpus) if env.cuda or env.hip else 0
    # A login node, or the head of a job, need not have the GPUs that the ranks will have.
    facts = LAUNCHERS.get(crew.launcher.value)
    is_elsewhere = crew.num_nodes > 1 or (facts is not None and facts.allocation is not None)
    is_here = num_gpus > 0 or not is_elsewhere
    severity = "error" if is_here else "warning"
    if not num_gpus:
        why = "this torch is built without CUDA and ROCm" if env.gpus else "no GPU is visible here"
        yield Finding(
            severity=severity,
            where="launch.device",
            what=f"cuda was asked for, and {why}",
            hint="set launch.device=cpu, or auto; `paceline check` looks at the machine",
            cause="cluster",
        )
        return
    absent = [number for number in visible_devices(launch) if number >= num_gpus]
    if absent:
        yield Finding(
            severity=severity,
            where="launch.devices",
            what=f"names GPU {absent[0]}, and {num_gpus} are usable here",
            hint=f"use 0 to {num_gpus - 1}",
            cause="cluster",
        )
    elif launch.devices == "auto" and num_gpus < crew.per_node and not sees_one_each:
        yield Finding(
            severity=severity,
            where="launch.nproc",
            what=f"each rank wants a GPU: {crew.per_node} asked for, {num_gpus} usable here",
            hint=f"set launch.nproc={num_gpus}",
            cause="cluster",
        )
    if shares_gpus(launch) and crew.backend.value == "nccl":
        yield Finding.error(
            "launch.backend",
            "nccl refuses two ranks on one GPU, and launch.devices names one twice",
            hint="set launch.backend=gloo, or leave it at auto",
            cause="cluster",
        )


def _choose_launcher(launch: LaunchConfig, topology: Topology) -> Choice[str]:
    asked = launch.launcher
    if not topology.is_alone:
        why = f"it started this process as rank {topology.rank} of {topology.world_size}"
        return Choice(requested=asked, value=topology.launcher, because=why)
    if asked == "auto":
        return Choice(requested=asked, value=DEFAULT, because="no launcher started this process")
    return Choice.as_asked(asked)


def _ranks_per_node(launch: LaunchConfig, env: Env, device: Choice[Device]) -> int:
    if launch.nproc != "auto":
        return launch.nproc
    if launch.devices != "auto" and device.value == "cuda":
        return len(launch.devices)
    if (hostfile := HostfileConfig.of(launch).hostfile) != "none":
        return max(1, min(host.slots for host in read_hostfile(hostfile)))
    return max(1, len(env.gpus)) if device.value == "cuda" else 1


def _count_nodes(launch: LaunchConfig, env: Env) -> int:
    if launch.nnodes != "auto":
        return launch.nnodes
    if (hostfile := HostfileConfig.of(launch).hostfile) != "none":
        return len(read_hostfile(hostfile))
    facts = LAUNCHERS.get(launch.launcher)
    return facts.allocated_nodes(env.variables) if facts else 1


def _choose_backend(
    launch: LaunchConfig, device: Choice[Device], is_shared: bool
) -> Choice[Backend]:
    asked = launch.backend
    if asked != "auto":
        return Choice.as_asked(asked)
    if device.value == "cpu":
        return Choice(requested=asked, value="gloo", because="the ranks are on CPU")
    if is_shared:
        return Choice(requested=asked, value="gloo", because="nccl refuses two ranks on one GPU")
    return Choice(requested=asked, value="nccl", because="each rank has a GPU of its own")


def count_ranks(count: int) -> str:
    """Return `1 rank`, `2 ranks`."""
    return words.count(count, "rank")
