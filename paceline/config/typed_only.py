"""Settings that only the command line may make: they choose code, programs, or a trusted peer.

A config file comes from anywhere, and reading one must not run anything. What is refused in a file
may still be typed; a run.yaml that this machine wrote has what was typed then (`Draft.is_ours`).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paceline.config.overrides import parse_override

Path = tuple[str, ...]

# Names of variables, and what they choose. The one list: also what a plan notes when it was typed.
VARIABLES: dict[str, str] = {
    r"PYTHON.*": "what python imports as it starts",
    r"LD_.*|DYLD_.*|.*PRELOAD.*|GCONV_PATH|GLIBC_TUNABLES|LIBPATH": "libraries that are loaded",
    r"PATH|HOME|SHELL|BASH_ENV|BASH_FUNC.*|ENV|IFS|PERL5.*|GIT_.*": "which programs run, and how",
    r"CC|CXX|CUDAHOSTCXX|NVCC.*|C(PP|XX|UDA)?FLAGS|LDFLAGS|(CUDA|ROCM)_(HOME|PATH)|HIP_PATH":
        "compilers, and what they are told",
    r"NCCL_.*PLUGIN.*|RCCL_.*PLUGIN.*|NCCL_CONF_FILE|MSCCL.*|FI_PROVIDER_PATH|UCX_MODULE.*"
    r"|RDMAV_.*|IBV_.*": "plugins of the network",
    # INTEL_LIBITTNOTIFY64 is a library that oneDNN loads with the first product in bf16.
    r".*INJECTION.*|OMP_TOOL.*|HSA_TOOLS.*|ROCP_.*|NSYS_.*|CUPTI.*|INTEL_.*|KINETO_.*":
        "tools inside of processes",
    r".*_(LIB|LIBRARY|LIBRARIES|PATH)\d*": "libraries that are loaded",  # as NCCL_CUDA_PATH is
    r"TORCH_.*EXTENSIONS.*|TORCHINDUCTOR_.*|TRITON_.*|TORCH_DEVICE_BACKEND.*|NUMBA_.*"
    r"|HF_MODULES_CACHE|OPENSSL_.*|TMPDIR|XDG_.*": "where compiled code is loaded from",
    r"PET_.*|TORCHELASTIC_.*|OMPI_.*|PMIX_.*|PRTE_.*|ORTE_.*|SLURM_.*|SRUN_.*|SBATCH_.*|PDSH_.*"
    r"|DLTS_.*|HYDRA_.*|I_MPI_.*|MV2_.*|PMI_.*": "what a launcher starts",
    r"MASTER_.*|RANK|WORLD_SIZE|LOCAL_RANK|GROUP_RANK": "whom a rank listens to",
    r"TORCH_FORCE_NO_WEIGHTS_ONLY.*": "that torch.load runs what a pickle says",
    r"PACELINE_.*": "what Paceline trusts",
}  # fmt: skip
# Options of torchrun that a file may hold: each takes one value, and none chooses what is run. Full
# names only, as argparse would take any beginning of one.
TORCHRUN_OPTIONS = frozenset(
    {
        "--monitor-interval", "--start-method", "--role", "--redirects", "-r", "--tee", "-t",
        "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
        "--numa-binding", "--signals-to-handle", "--shutdown-timeout", "--log-dir",
    }
)  # fmt: skip
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:/+][A-Za-z0-9_.,:/+-]*")


class TypedOnly(NamedTuple):
    """A setting that is only accepted on the command line, and why."""

    path: Path
    why: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


def iter_typed_only(tree: Any) -> Iterator[TypedOnly]:
    """Yield the settings of a run that choose code, wherever they were set. `tree` need not be
    valid."""
    launch = tree.get("launch") if isinstance(tree, dict) else None
    if not isinstance(launch, dict):
        return
    env = launch.get("env")
    for name, value in env.items() if isinstance(env, dict) else ():
        if chosen := _chosen_by(str(name)):
            yield TypedOnly(("launch", "env", str(name)), f"it chooses {chosen}")
        # No list knows every variable by which some library loads code; what it loads is a path.
        elif "/" in str(value):
            why = f"its value is a path, {value}, and code may be loaded from there"
            yield TypedOnly(("launch", "env", str(name)), why)
    if why := _torchrun_refusal(launch.get("torchrun_args")):
        yield TypedOnly(("launch", "torchrun_args"), why)
    if launch.get("rdzv_endpoint", "auto") != "auto":
        why = "torchrun unpickles, and so runs, what it is told there"
        yield TypedOnly(("launch", "rdzv_endpoint"), why)


def refuse_in_file(tree: Any, place: str, is_typed: Callable[[Path], bool]) -> Iterator[str]:
    """Yield a problem for each such setting in a file."""
    for found in iter_typed_only(tree):
        if not is_typed(found.path):
            yield (
                f"{found.key} in {place}: {found.why}, and a file may not choose that\n"
                f"hint: type it: {found.key}=..., if you know what it does"
            )


def refuse_words_in_file(words: list[str], place: str) -> Iterator[str]:
    """Yield the same for overrides in a file, such as a sweep's."""
    for word in words:
        try:
            override = parse_override(word)
        except ValueError:
            continue  # refused, with its reason, where it is applied
        tree: Any = override.value
        for part in reversed(override.path):
            tree = {part: tree}
        yield from refuse_in_file(tree, place, lambda path: False)
        is_file = override.path[0] == "workload" and ".py:" in override.raw
        # What a reference stands for is known only later, when nobody knows where it stood.
        is_open = override.path[0] in ("workload", "launch") and "${" in override.raw
        if is_file or is_open:
            yield (
                f"{word} in {place}: a file may not choose code to run\n"
                f"hint: type it: {override.key}=..."
            )


def _chosen_by(name: str) -> str:
    return next((what for names, what in VARIABLES.items() if re.fullmatch(names, name)), "")


def _torchrun_refusal(arguments: Any) -> str:
    """Return why torchrun is not given these by a file, or nothing. A word that is no value of an
    option would be the program that torchrun runs."""
    if not isinstance(arguments, list):
        return ""
    words = iter([str(argument) for argument in arguments])
    for word in words:
        option, sign, value = word.partition("=")
        if option.startswith("--"):
            option = option.replace("_", "-")
        if option not in TORCHRUN_OPTIONS:
            return f"{word} is not one of {', '.join(sorted(TORCHRUN_OPTIONS))}, which run nothing"
        value = value if sign else next(words, "")
        leads_out = option == "--log-dir" and (value.startswith("/") or ".." in value.split("/"))
        if not PLAIN_VALUE.fullmatch(value) or leads_out:
            return f"{option} has the value {value!r}, which is not a plain one"
    return ""
