"""Turns an exception into what a person can act on: outcome, the user's line, what to change."""

import json
import re
import resource
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from paceline.data.collate import form_of
from paceline.errors import DataError, DiskError, MemoryFull, Outcome, PacelineError, users_line
from paceline.records import RankError, RankVerdict
from paceline.records.disk import save_last
from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir
from paceline.records.words import few

Tell = Callable[[RankVerdict | Beat], None]  # a rank's way to its supervisor that needs no disk

KEPT_CALLS = 64

# How gloo and NCCL say that a collective waited longer than the group's timeout.
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|Watchdog caught collective operation timeout")


# How DDP says that it waited for gradients of these parameters: a sentence, and later numbers.
UNREDUCED = re.compile(
    r"(Expected to have finished reduction in the prior iteration[^.]*)\.[\s\S]*"
    r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)"
)

# How torch and the usual layers say that a tensor has not the shape, or the ids, that they take.
MISFIT = re.compile(
    r"shapes? cannot be multiplied|size of tensor a|Sizes of tensors must match|shape '.*' is"
    r" invalid|index out of range in self|[Ee]xpected .*(?:channels|dimension|size|shape)"
    r"|[Tt]arget .* is out of bounds"
)


def require_fitting(error: Exception, batches: Sequence[Any], samples: Sequence[str]) -> None:
    """Raise a DataError that names samples and shapes, where an error of the loss says that its
    batch does not fit."""
    if isinstance(error, PacelineError) or not MISFIT.search(str(error)):
        return
    forms = " and ".join(dict.fromkeys(form_of(batch) for batch in batches))
    raise DataError(
        f"the loss failed on {few(samples)}, in batches of {forms}:"
        f" {type(error).__name__}: {error}\n"
        "hint: compare with the shapes and ids that the model takes"
    ).with_traceback(error.__traceback__) from error


def require_memory(error: Exception, batches: Sequence[Any], samples: Sequence[str]) -> None:
    """Raise an error that names the samples, where memory was not enough for their batches."""
    if not is_out_of_memory(error):
        return
    forms = " and ".join(dict.fromkeys(form_of(batch) for batch in batches))
    what = " ".join(str(error).split())[:300]
    raise MemoryFull(
        f"out of memory on {few(samples)}, in batches of {forms}: {what}\n"
        "hint: set a smaller train.micro_batch_size and a larger train.grad_accum; leave out long"
        " samples; data.batch_by=length bounds the length of a batch"
    ).with_traceback(error.__traceback__) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain(
    error: BaseException, is_built: bool = True, module: nn.Module | None = None
) -> RankError:
    """Return the error as it goes into the rank's verdict; `is_built`: its model and optimizer
    are; `module`: that model, where it is known."""
    message = _with_names(str(error), module)
    return RankError(
        kind=type(error).__name__,
        message=message + _hint(message, is_built),
        place=users_line(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _with_names(message: str, module: nn.Module | None) -> str:
    """Name the parameters that DDP waited for, where it says only their numbers."""
    found = UNREDUCED.search(message)
    if module is None or found is None:
        return message
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    missed = few(names[int(i)] for i in found[2].split() if int(i) < len(names))
    return f"no gradient reached {missed}, and DDP waits for that of each parameter: {found[1]}"


def _hint(message: str, is_built: bool) -> str:
    """Say what to change, for errors of torch that do not say it."""
    if "\nhint: " in message:
        return ""
    if not is_built and ("can't allocate memory" in message or "out of memory" in message):
        return (
            "\nhint: the model itself does not fit: strategy.name=zero3 on more ranks or machines,"
            " or a smaller model; a smaller microbatch does not help"
        )
    hints = {
        "Expected to have finished reduction in the prior iteration": "some parameters got no"
        " gradient; use them in the loss, or take them out of the model; where only some batches"
        " reach them, set strategy.find_unused_parameters=true",
        "got mixed torch.Tensor and DTensor": "a block's weights are used without calling it; call"
        " the items of the model's ModuleLists, or use strategy.name=zero1",
        "does not have a deterministic implementation": "train.deterministic=true allows only"
        " operations that give the same bits again: replace this one, or set"
        " train.deterministic=false",
        "can't allocate memory": "set a smaller train.micro_batch_size and a larger"
        " train.grad_accum, or fewer ranks on this machine",
        "out of memory": "set a smaller train.micro_batch_size and a larger train.grad_accum",
    }
    found = [hint for text, hint in hints.items() if text in message]
    return f"\nhint: {found[0]}" if found else ""


def outcome_of(error: BaseException) -> Outcome:
    """Return how a run ends that raised this error."""
    if isinstance(error, PacelineError):
        return error.outcome
    if is_out_of_memory(error) or DiskError.is_meant(error):
        return Outcome.OUT_OF_RESOURCES
    if isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)):
        return Outcome.STALL
    if isinstance(error, KeyboardInterrupt):
        return Outcome.INTERRUPTED
    return Outcome.CRASHED


def save_collectives(run: RunDir, rank: int, error: BaseException) -> None:
    """Leave the last collectives that this rank has begun, as torch's flight recorder has them, for
    who asks afterwards where ranks stopped to agree; after other errors than those of collectives,
    and with a torch that has none, nothing."""
    if not isinstance(error, RuntimeError):
        return
    with suppress(Exception):  # the error is what counts
        recorder: Any = torch._C._distributed_c10d
        told = json.loads(recorder._dump_fr_trace_json(True, False))
        told["entries"] = told.get("entries", [])[-KEPT_CALLS:]
        run.lost.keep(run.collectives(rank), json.dumps(told))


def runs_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory has run out, of a device or of the machine."""
    return outcome_of(error) is Outcome.OUT_OF_RESOURCES and not DiskError.is_meant(error)


def save_verdict(run: RunDir, verdict: RankVerdict, tell: Tell) -> None:
    """Leave a rank's last word where others read it, in the room that its supervisor reserved; and
    tell that supervisor, for the disk may be read-only by now."""
    tell(verdict)
    run.lost.keep(run.verdict(verdict.rank), verdict.to_json(), save_last)


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return peak active and reserved bytes. A CPU has no such count: reserved is its largest
    RSS."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
