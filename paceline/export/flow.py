"""From a run directory to a folder that other programs load.

    report = export(run, ExportOptions("onnx"), say, approve)

    trained     run/trained.py      the best checkpoint, or the one that is named, of any strategy
    asked       this file           real samples of the run's own data
    handed out  workload.export     the model as its library knows it (workloads/exporting.py)
    written     formats.py          written, loaded again by that library, and compared
    told        card.py             README.md with the run's figures; manifest.json with hashes

The folder has its name only when all of this has been done.
"""

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.data.collate import collate
from paceline.errors import ConfigError, DataError
from paceline.export.card import write_card
from paceline.export.formats import DTYPES, FORMATS, Proof
from paceline.export.records import MANIFEST, ExportManifest, ExportReport, FileHash
from paceline.job import Job
from paceline.records import Result
from paceline.records.base import load_map
from paceline.records.folders import appearing, require_unused
from paceline.records.rundir import RunDir
from paceline.records.words import count
from paceline.run.trained import Say, Trained, Which, load_trained, open_job
from paceline.train.feed import build_split
from paceline.workloads.base import Split, Workload, own_collate
from paceline.workloads.exporting import Exported, ExportRequest, no_export
from paceline.workloads.job_file import Approve

NUM_SAMPLES = 2  # enough that they differ in length
LIBRARIES = ("paceline", "torch", "transformers", "peft", "onnx", "onnxruntime", "safetensors")
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class ExportOptions:
    """What is to be written, and where; `out` None: exported/FORMAT in the run directory."""

    format: str = "safetensors"
    merge: bool = False
    which: Which = Which()
    dtype: str = "float32"
    out: Path | None = None
    overwrite: bool = False


def export(
    run: RunDir, asked: ExportOptions, say: Say, approve: Approve | None = None
) -> ExportReport:
    """Write the model of a run for other programs, and prove that they compute the same."""
    _require_known(asked)
    target = (asked.out or run.root / "exported" / asked.format).expanduser().resolve()
    _require_room(target, asked.overwrite)
    job = open_job(run, approve)
    if type(job.workload).export is Workload.export:
        raise no_export(type(job.workload).__name__)  # before weights are read
    trained = load_trained(run, job, asked.which, torch.device("cpu"), say)
    say(f"{trained.says}, as {asked.format} in {asked.dtype}")
    batch, inputs = real_batch(job)
    request = ExportRequest(trained.model, job.config, batch, asked.merge)
    exported = job.workload.export(request)
    with appearing(target, asked.overwrite) as folder:
        proof = FORMATS[asked.format].write(exported, folder, asked.dtype)
        exported.write_beside(folder)
        manifest = _manifest(run, job, asked, trained, exported, (proof, inputs))
        write_card(folder, target.name, run, manifest, exported)
        hashes = hash_files(folder)
        manifest = manifest.model_copy(update={"files": hashes})
        manifest.save(folder / MANIFEST)
    return ExportReport(
        out=str(target),
        format=asked.format,
        dtype=asked.dtype,
        step=trained.step,
        says=trained.says,
        num_bytes=sum(each.num_bytes for each in hashes.values()),
        num_files=len(hashes) + 1,
        num_tensors=proof.num_tensors,
        inputs=inputs,
        compared=proof.compared,
        remarks=list(exported.remarks),
    )


def _require_known(asked: ExportOptions) -> None:
    problems = []
    for flag, value, known in (
        ("--format", asked.format, FORMATS),
        ("--dtype", asked.dtype, DTYPES),
    ):
        if value not in known:
            problems.append(f"{flag} {value} is not one of {', '.join(known)}")
    if problems:
        raise ConfigError(problems)


def _require_room(target: Path, overwrite: bool) -> None:
    """Refuse a folder that is there; with --overwrite only one that no export has written."""
    if not overwrite:
        require_unused(target, "--overwrite replaces what an export wrote; --output names another")
        return
    is_export = (target / MANIFEST).is_file() and (
        load_map(target / MANIFEST).get("kind") == "paceline export"
    )
    if not is_export:
        require_unused(target, "no export wrote it, so --overwrite does not remove it either")


def real_batch(job: Job) -> tuple[Any, str]:
    """Return a few samples of the run's own data, those of validation if it has any, and say which
    they are."""
    problems = []
    splits: tuple[Split, ...] = ("val", "train")
    for split in splits:
        try:
            data = build_split(job, split)
            if data is None or not hasattr(data, "__getitem__"):
                continue
            size = min(NUM_SAMPLES, len(data))
            batch = collate(data, np.arange(size), own_collate(job.workload))
            return batch, f"{count(size, 'sample')} of the {split} split"
        except DataError as error:
            problems.append(str(error))
    why = "\n".join(problems) or "the run's data is a stream, which has no samples by number"
    raise DataError(
        f"an export is compared on real inputs, and the run's data cannot be read: {why}\n"
        "hint: put the data back; paceline checkpoints convert writes tensors that nobody compared"
    )


def _manifest(
    run: RunDir,
    job: Job,
    asked: ExportOptions,
    trained: Trained,
    exported: Exported,
    proven: tuple[Proof, str],
) -> ExportManifest:
    proof, inputs = proven
    result = Result.load(run.result) if run.result.is_file() else None
    return ExportManifest(
        format=asked.format,
        dtype=asked.dtype,
        is_merged=asked.merge,
        workload=job.config.workload.rpartition(":")[2],
        run=job.config.name,
        step=trained.step,
        is_best=trained.is_best,
        is_average=trained.is_average,
        inputs=inputs,
        compared=proof.compared,
        num_tensors=proof.num_tensors,
        about=dict(exported.about),
        versions=_versions(),
        fingerprints={} if result is None else result.fingerprints.model_dump(),
        files={},
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hash_files(folder: Path) -> dict[str, FileHash]:
    """Return the SHA-256 of every file, by its path in the folder."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        name = path.relative_to(folder).as_posix()
        found[name] = FileHash(num_bytes=path.stat().st_size, sha256=digest.hexdigest())
    return found
