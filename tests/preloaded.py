"""Imported by the servers that programs and ranks of tests are forked from: all that they would
import for themselves, each again. torch's compiler alone, which even an eager step touches, takes
a rank 1.5 s."""

import importlib
import pkgutil
import signal
import sys
from contextlib import suppress

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.nn.attention.flex_attention
import torch.profiler
import torch.utils.flop_counter  # noqa: F401

import paceline
from paceline.errors import PacelineError
from paceline.workloads.hf.model import require_extra
from paceline.workloads.hf.preloaded import has_gpu


def import_all() -> None:
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            _import(module.name)


def _import(name: str) -> None:
    """What changes its importer's signals is meant for the fork server, which shall import it."""
    before = _handlers()
    importlib.import_module(name)
    if before != _handlers():
        del sys.modules[name]
        for number, handler in before.items():
            signal.signal(number, handler)


def _handlers() -> dict[signal.Signals, object]:
    settable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    numbers = [number for number in settable if isinstance(number, signal.Signals)]
    return {number: signal.getsignal(number) for number in numbers}


import_all()
if not has_gpu():
    with suppress(PacelineError):
        for model in ("whisper", "vit_mae", "wav2vec2", "llama", "bert"):
            require_extra(f"transformers.models.{model}.modeling_{model}")
