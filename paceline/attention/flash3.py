"""FlashAttention 3, made for Hopper's chips, as the kernel behind torch's SDPA.

It comes as the package of its authors, or inside the wheels of xformers up to 0.0.34. torch knows
how to call it, and uses it as SDPA's flash kernel once it is told to.
"""

import importlib
import os
import platform
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.records.files import cache_folder, fingerprint

CHIP = (9, 0)  # the compute capability that it is for
TIMEOUT_S = 60.0
KERNEL = "FlashAttnFwdSm90"  # part of its name on the device
OWN, OF_XFORMERS = "flash_attn_interface", "flash_attn_3/_C.so"
INSTALL = (
    "install flash_attn_3, from its authors' wheels, or xformers==0.0.34 without what it pins"
    " (pip install --no-deps); or set attention.impl=sdpa"
)


class Kernels(NamedTuple):
    """Where the kernels are: a module to import, or else a library to load."""

    module: str
    file: Path


def find_flash3() -> Kernels | None:
    """Return where the kernels are; None where none are installed. Imports nothing."""
    own = find_spec(OWN)
    if own is not None and own.origin is not None:
        return Kernels(OWN, Path(own.origin))
    package = find_spec("xformers")
    places = package.submodule_search_locations if package is not None else None
    files = [Path(place) / OF_XFORMERS for place in places or ()]
    # As a library: the package itself takes seconds to import, and warns of all else that it lacks.
    return next((Kernels("", file) for file in files if file.is_file()), None)


@cache
def why_not_loaded(kernels: Kernels, torch_version: str) -> str | None:
    """Return why the kernels cannot be loaded, tried in a process of its own: a wheel for another
    torch or CUDA must not end a run that never asked for it. None: they can, which is kept in the
    user's cache folder."""
    kept = _kept_path(kernels, torch_version)
    if kept.is_file():
        return None
    command = [sys.executable, "-c", f"from {__name__} import use_flash3; use_flash3(True)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not within {TIMEOUT_S:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended by {done.returncode}"])[-1]
    with suppress(OSError):  # it is tried again, where nothing can be kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
    return None


def _kept_path(kernels: Kernels, torch_version: str) -> Path:
    """Return the file that says that this library loads beside this torch, on this host and with
    these folders of libraries."""
    around = (platform.node(), os.environ.get("LD_LIBRARY_PATH", ""), torch_version)
    changed_at = str(kernels.file.stat().st_mtime)
    return cache_folder("flash3") / fingerprint(*around, str(kernels.file), changed_at)


def use_flash3(wanted: bool) -> None:
    """Let SDPA's flash kernel be FlashAttention 3, or torch's own again."""
    import torch
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        if wanted:
            raise ConfigError("attention.impl=flash3 needs torch 2.11 or later")
        return
    if not wanted:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        return
    kernels = find_flash3()
    if kernels is None:
        raise ConfigError(f"attention.impl=flash3: it is not installed here\nhint: {INSTALL}")
    if not kernels.module:
        load: Any = torch.ops.load_library
        load(kernels.file)
    register = importlib.import_module("torch.nn.attention._fa3").register_flash_attention_fa3
    # It imports a module, and then asks torch for the operations: those of a library are there.
    by_module = partial(register, kernels.module or "torch")
    attention.register_flash_attention_impl("FA3", register_fn=by_module)
    with warnings.catch_warnings():  # replacing a kernel is exactly what is wanted
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        attention.activate_flash_attention_impl("FA3")
