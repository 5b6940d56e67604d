"""How long a microbatch may be: `data.batch_length=auto`, found by trial before training.

    job, plan = fit_batches(decided so far, say)      in the process that plans: starts the trial
    _try_lengths(folder, workload, packed, out)       in a process of its own, alone on a device

The trial trains on batches of the longest samples, twice as many every time, until memory is full,
and then looks between the last that fitted and the first that did not. It holds all of the model's
state, as ddp does: what fits there fits where that is shared. A CPU has no end of memory that could
be tried without harm, so there the growth of a few batches says how many would fill it.
"""

import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.load import dump_config
from paceline.errors import MemoryFull
from paceline.job import Job, reload_job
from paceline.plan.planner import make_plan
from paceline.records import Env, Plan
from paceline.records.rundir import RunDir
from paceline.records.words import size

MOST = 1024  # samples of a batch: more of them gain nothing
MOST_ON_CPU = 64
SHARE = 0.9  # of what has fitted: batches differ in more than their length
HOST_SHARE = 0.5  # of the host's free memory, for the ranks on it together
KEYS = ("batch_length", "max_batch_seconds")


def is_open(job: Job) -> bool:
    """Say whether the length of a microbatch is still to be found."""
    data = job.config.data
    return data.batch_by == "length" and data.batch_length == "auto"


def fit_batches(job: Job, env: Env, prepared: dict[str, Any], say: Callable[[str], None]) -> Job:
    """Return the job with the length that fits instead of auto."""
    alone = job.with_keys(
        launch={"nproc": 1, "nnodes": 1, "launcher": "local"},
        strategy={"name": "ddp"},
        data=dict.fromkeys(_lengths(job), "off") | {"batch_by": "samples"},
        train={"steps": 1, "epochs": "off", "micro_batch_size": 1, "grad_accum": 1,
               "global_batch_size": "auto"},
    )  # fmt: skip
    alone.workload.prepared = prepared
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place))
        run.config.write_text(dump_config(alone.config), encoding="utf-8")
        run.data.write_text(json.dumps(prepared))
        make_plan(alone, env).save(run.plan)
        found = _in_own_process(run, job)
    length = found["length"]
    say(
        f"data.batch_length=auto: {length:g}, which are {found['num_samples']} of the longest"
        f" samples, {found['longest']:g} each; {found['because']}"
    )
    return job.with_keys(data=dict.fromkeys(_lengths(job), length))


def _lengths(job: Job) -> list[str]:
    """Return the keys of `data` that say how long a microbatch may be."""
    return [key for key in KEYS if hasattr(job.config.data, key)]


def _in_own_process(run: RunDir, job: Job) -> dict[str, Any]:
    """Try in a process of its own, so that none of the device's memory stays in use here."""
    answer = run.root / "fit.json"
    process = multiprocessing.get_context("spawn").Process(
        target=_try_lengths, args=(str(run.root), job.config.workload, job.packed, _num_ranks(job))
    )
    process.start()
    process.join()
    if process.exitcode or not answer.is_file():
        raise MemoryFull(
            f"data.batch_length=auto: the trial on one device ended with {process.exitcode}\n"
            "hint: set data.batch_length to a number, or data.batch_by=samples"
        )
    found: dict[str, Any] = json.loads(answer.read_text())
    if not found["num_samples"]:
        raise MemoryFull(
            f"data.batch_length=auto: not even one sample fits into memory: {found['because']}\n"
            "hint: leave out long samples, or train.activation_checkpointing=full, or a smaller"
            " model"
        )
    return found


def _num_ranks(job: Job) -> int:
    asked = job.config.launch.nproc
    return 1 if asked == "auto" else asked


def _try_lengths(place: str, workload: str, packed: bytes, num_ranks: int) -> None:
    """Find how many of the longest samples fit, and leave the answer in the folder."""
    import torch.distributed as dist

    from paceline.data.buckets import all_lengths
    from paceline.machine.group import claim_device, join_group
    from paceline.machine.topology import RankId
    from paceline.train.fit_trial import FitTrial

    run = RunDir(Path(place))
    job, plan, alone = reload_job(run, workload, packed), Plan.load(run.plan), RankId(0, 0, 1)
    device = claim_device(plan.crew.device.value, alone, plan.crew.device_indices)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    join_group(plan.backend.value, alone, device, store, 60.0)
    data: Any = job.workload.build_data(job.config, "train")
    lengths = all_lengths(data, "data.batch_length=auto")
    trial = FitTrial(job, plan, device, data, (-lengths).argsort(kind="stable"))
    if device.type == "cpu":
        num_samples, because = _by_growth(trial.fits, num_ranks)
    else:
        num_samples, because = search(trial.fits), "more did not fit on the device"
    longest = float(lengths.max())
    kept = max(1, int(num_samples * SHARE)) if num_samples else 0
    if not kept:
        because = trial.name(0)
    answer = {"num_samples": kept, "longest": longest, "length": kept * longest, "because": because}
    (run.root / "fit.json").write_text(json.dumps(answer))


def search(fits: Callable[[int], bool]) -> int:
    """Return the largest number up to MOST that fits: doubled until one does not, then halved."""
    least, most = 0, 1
    while most <= MOST and fits(most):
        least, most = most, 2 * most
    if most > MOST:
        return least
    while most - least > max(1, least // 16):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _by_growth(fits: Callable[[int], bool], num_ranks: int) -> tuple[int, str]:
    """Return how many samples would fill this rank's share of the host's memory."""
    import psutil

    fits(1)
    before = _resident()
    fits(4)
    each = max(1, (_resident() - before) // 3)
    room = psutil.virtual_memory().available * HOST_SHARE / num_ranks
    number = min(MOST_ON_CPU, max(1, int(room // each)))
    return number, f"each takes {size(each)} of the host, whose free memory ranks share"


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
