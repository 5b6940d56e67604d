"""Starting ranks: `base` is the seam, one file a launcher, `rank` what each process does first."""

from importlib import import_module

from paceline.launch.base import Launcher

REGISTRY = {"local": "paceline.launch.local:LocalLauncher"}


def find_launcher(name: str) -> Launcher:
    module, _, attribute = REGISTRY["local" if name == "auto" else name].partition(":")
    launcher: Launcher = getattr(import_module(module), attribute)()
    return launcher
