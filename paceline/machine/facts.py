"""env.json: what this machine is and has, as probed. Never a constant, never a secret.

Probing does not create a CUDA context: the processes that fork ranks must stay clean of one.
"""

import os
import platform
import socket
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import psutil

from paceline.config.schema import SECRET_NAME
from paceline.machine.gpus import Nvml, rocm_gpus
from paceline.records import Env, Git
from paceline.records.files import fingerprint

# Variables that change how a run behaves. Anything else, and so every secret, stays out.
ALLOWED_PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "OMP_", "MKL_", "GLOO_", "SLURM_JOB_")
ALLOWED_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
        "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONHASHSEED",
    }
)  # fmt: skip


def probe() -> Env:
    """Look at this machine. It takes well under a second, and no GPU."""
    import torch

    nvml = Nvml.open()
    return Env(
        host=socket.gethostname(),
        os=platform.platform(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_limit(),
        gpus=[handle.describe() for handle in nvml.handles] if nvml else rocm_gpus(),
        links=nvml.links() if nvml else [],
        driver=nvml.driver if nvml else None,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl_version() if torch.version.cuda else None,
        packages={dist.name: dist.version for dist in distributions() if dist.name},
        interfaces=sorted(psutil.net_if_addrs()),
        infiniband=_infiniband(),
        hip=torch.version.hip,
        git=probe_git(Path.cwd()),
        variables=allowed_variables(dict(os.environ)),
    )


def hardware_fingerprint(env: Env) -> str:
    """Return a text that changes when a figure measured here would no longer compare."""
    gpus = [f"{gpu.name}/{gpu.memory_bytes}" for gpu in env.gpus]
    links = [f"{link.a}-{link.b}:{link.kind}x{link.nvlinks}" for link in env.links]
    return fingerprint(env.host, env.cpu, str(env.cores), str(env.driver), *gpus, *links)


def allowed_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the part of an environment that may be written down."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES))
        and not SECRET_NAME.search(name)
    }


def probe_git(folder: Path) -> Git | None:
    """Return commit, branch and whether files differ; None outside a checkout or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    status = _git(folder, "status", "--porcelain")
    if commit is None or branch is None or status is None:
        return None
    return Git(commit=commit, branch=branch, dirty=bool(status))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _infiniband() -> list[str]:
    folder = Path("/sys/class/infiniband")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def probe_network_gb_per_s() -> float | None:
    """Return the fastest link out of this machine by its own statement: InfiniBand, else
    Ethernet."""
    rates = [_number(path, 0.125) for path in Path("/sys/class/infiniband").glob("*/ports/*/rate")]
    if not any(rates):
        plain = [path for path in Path("/sys/class/net").glob("*/speed") if _is_wire(path.parent)]
        rates = [_number(path, 0.125e-3) for path in plain]
    return max((rate for rate in rates if rate > 0), default=None)


def _is_wire(interface: Path) -> bool:
    """Tell whether it is a card: the stated speed of a bridge or tunnel means nothing."""
    return (interface / "device").exists()


def _number(path: Path, scale: float) -> float:
    """Return the number that a file of the kernel begins with; 0 where it does not say."""
    try:
        return max(0.0, float(path.read_text().split()[0]) * scale)
    except (OSError, ValueError, IndexError):
        return 0.0


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_limit() -> int:
    """Return the bytes of memory this process may use: the container's limit where there is one."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _nccl_version() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in version)
