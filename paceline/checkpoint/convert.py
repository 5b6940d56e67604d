"""From a checkpoint to a folder for other tools: model.safetensors and config.json.

Of a model of transformers that folder is the Hugging Face layout, written and read back by
transformers itself. It gets its name only when every tensor was read back and is the same, bit for
bit. A user's own workload is not imported: names and tensors are all that is needed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.folder import BEST, LATEST, CheckpointFolder, step_name
from paceline.checkpoint.pieces import EMA, moment_name
from paceline.checkpoint.survey import checkpoints_of, list_steps, no_checkpoints, require_sound
from paceline.checkpoint.tensors import TensorFiles, whole_pieces, write_whole
from paceline.config.plain import check_plain, read_plain
from paceline.config.schema import run_schema
from paceline.errors import ConfigError, RestoreError, SaveError
from paceline.records import Manifest
from paceline.records.base import Part, load_map
from paceline.records.files import write_atomic
from paceline.records.folders import appearing, require_unused
from paceline.records.rundir import RunDir, slug
from paceline.workloads.base import find_workload
from paceline.workloads.hf.pretrained import load_layout, save_layout
from paceline.workloads.meta import on_meta

Say = Callable[[str], None]


class Converted(Part):
    """What was written, and how many of its tensors were read back and are equal."""

    step: int
    out: str
    kind: str
    files: dict[str, int]
    num_tensors: int


def convert(run: RunDir, which: str, out: Path | None, say: Say, ema: bool = False) -> Converted:
    """Write one checkpoint as `out`; `which` is latest, best or a step. `ema`: write the average of
    the weights instead."""
    tree = read_plain(run.config)
    folder = checkpoints_of(run, tree)
    step = choose_step(folder, which)
    target = (out or run.root / "converted" / step_name(step)).resolve()
    require_unused(target)
    model = _transformers_model(run, tree, say)
    manifest = require_sound(folder, step, say)
    if ema:
        manifest = _require_averages(manifest)
    source = TensorFiles(folder.path(step), manifest)
    with appearing(target) as temporary:
        if model is None:
            write_whole(source, "model", temporary / "model.safetensors")
            body = {"model_type": f"paceline-{_workload_name(tree)}", "model": tree.get("model")}
            write_atomic(temporary / "config.json", json.dumps(body, indent=2) + "\n")
            found = load_file(temporary / "model.safetensors")
        else:
            pieces = whole_pieces(source, "model")
            save_layout(model, {piece.name: piece.value for piece in pieces}, temporary)
            found = load_layout(type(model), temporary)
        num_tensors = require_equal(source, found, getattr(model, "all_tied_weights_keys", {}))
    return Converted(
        step=step,
        out=str(target),
        kind=f"paceline-{_workload_name(tree)}" if model is None else type(model).__name__,
        files={path.name: path.stat().st_size for path in sorted(target.iterdir())},
        num_tensors=num_tensors,
    )


def with_averages(manifest: Manifest) -> Manifest | None:
    """Let each weight be read where its average is; what is not trained has none, and stays. None
    where the checkpoint has no averages."""
    averages = {
        name: manifest.optimizer[moment_name(name, EMA)]
        for name in manifest.model
        if moment_name(name, EMA) in manifest.optimizer
    }
    return manifest.model_copy(update={"model": manifest.model | averages}) if averages else None


def _require_averages(manifest: Manifest) -> Manifest:
    averaged = with_averages(manifest)
    if averaged is None:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} has no average of the weights\n"
            "hint: optim.ema=0.999 keeps one; without --ema the weights themselves are written"
        )
    return averaged


def choose_step(folder: CheckpointFolder, which: str) -> int:
    """Return the newest step, the best, or the named one; whether it is sound is checked later."""
    steps = list_steps(folder)
    if not steps:
        raise RestoreError(no_checkpoints(folder))
    if which == LATEST:
        return steps[0]  # what a resume tries first, wherever the pointer points
    if which == BEST:
        best = folder.pointer(BEST)
        if best is None:
            raise RestoreError(
                f"no checkpoint in {folder.root} is marked as the best\n"
                "hint: train.eval_every gives a run the validation loss that decides it"
            )
        if best not in steps:
            raise RestoreError(f"best names {step_name(best)}, which is not in {folder.root}")
        return best
    number = which.removeprefix("step_")
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise ConfigError(f"{which!r} is not a step\nhint: {LATEST}, {BEST}, or a number")
    if int(number) not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"there is no checkpoint of step {number}\nhint: there are {there}")
    return int(number)


def require_equal(source: TensorFiles, found: dict[str, Tensor], tied: dict[str, str]) -> int:
    """Compare bit for bit, so that NaN is equal to itself; `tied` says whose value a name has."""
    names = source.shapes("model")
    spare = [name for name in found if name not in names and tied.get(name) not in names]
    wrong = [name for name in names if name not in found]
    for name in found.keys() - set(spare):
        kept = name if name in names else tied[name]
        rows = source.rows("model", kept, 0, (*names[kept], 1)[0])
        if not _same_bits(found[name], rows):
            wrong.append(name)
    if wrong or spare:
        raise SaveError(
            f"what was written is not what the checkpoint has: {sorted((*wrong, *spare))[:8]}"
        )
    return len(found)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*raw)


def _workload_name(tree: dict[str, Any]) -> str:
    """Return `lm`, or the class of `my_job.py:MyWorkload`."""
    name = tree.get("workload")
    if not isinstance(name, str):
        raise ConfigError("run.yaml must set workload to a plain name")
    return slug(name.rpartition(":")[2])


def _transformers_model(run: RunDir, tree: dict[str, Any], say: Say) -> Any:
    """Return the run's model without values, if it is one of transformers; else None."""
    name = tree.get("workload")
    if not isinstance(name, str) or ".py:" in name:
        return None  # a file that a run names is not imported
    try:
        kind = find_workload(name, typed=False)
    except ConfigError:
        say(f"workload {name} is not installed here: config.json gets its settings as they are")
        return None
    if not kind.from_transformers:
        return None
    # How ranks shared the work, and where they ran, is not part of the model.
    rest = {key: value for key, value in tree.items() if key not in ("strategy", "launch")}
    config = check_plain(rest, run_schema(kind.Model, kind.Data, loss=kind.Loss), str(run.config))
    workload = kind()
    workload.prepared = _prepared(run)
    with on_meta():
        return workload.build_model(config)


def _prepared(run: RunDir) -> dict[str, Any]:
    """Read what the ranks were given: where the files of the model were found."""
    return load_map(run.data) if run.data.exists() else {}
