"""Starting ranks: `base` is the seam, one file a launcher, `supervisor` owns the processes,
`rank` is what each of them does first, `member` a rank under somebody else's launcher."""

from importlib import import_module

from paceline.errors import ConfigError
from paceline.launch.base import Launcher

REGISTRY = {
    "local": "paceline.launch.local:LocalLauncher",
    "torchrun": "paceline.launch.torchrun:TorchrunLauncher",
    "slurm": "paceline.launch.slurm:SlurmLauncher",
    "mpi": "paceline.launch.mpi:MpiLauncher",
    "deepspeed": "paceline.launch.deepspeed:DeepSpeedLauncher",
}


def find_launcher(name: str) -> Launcher:
    if name not in REGISTRY:
        raise ConfigError(
            "this process is a rank among others already, started by the variables RANK and"
            " WORLD_SIZE\nhint: unset them to see how Paceline would start ranks"
        )
    module, _, attribute = REGISTRY[name].partition(":")
    launcher: Launcher = getattr(import_module(module), attribute)()
    return launcher
