"""From a run directory or a model's folder to text.

    author = open_author(path, which, say, approve)      weights in memory, and how text is spelt
    texts = write(author, prompts, sampling, told)

    RUN_DIR    as run/trained.py reads it
    MODEL      a folder of transformers: config.json, model.safetensors, tokenizer.json

Only safetensors and JSON are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.errors import ConfigError, DataError
from paceline.records import Plan
from paceline.records.base import Part, load_map
from paceline.records.rundir import RunDir
from paceline.run.trained import Say, Which, choose_device, load_trained, open_job
from paceline.strategies.precision import compute_context
from paceline.strategies.weights import fill_weights
from paceline.workloads.base import Workload, no_text
from paceline.workloads.generation import (
    Codec,
    Request,
    Sampling,
    Stream,
    codec_of,
    open_codec,
)
from paceline.workloads.job_file import Approve
from paceline.workloads.meta import on_meta

Told = Callable[[int, str], None]  # a prompt's number, and the next piece of its text


class Written(Part):
    """One prompt and what follows it. `ended`: the model has ended the document itself."""

    prompt: str
    text: str
    num_tokens: int
    ended: bool


@dataclass(frozen=True)
class Author:
    workload: Workload
    model: nn.Module
    codec: Codec
    device: torch.device
    precision: str
    says: str  # what is in memory, for people


def open_author(
    path: str, which: Which, say: Say, approve: Approve | None = None, where: str = "auto"
) -> Author:
    """Load a run's model, or one of transformers; `where` is cpu, cuda, or the GPU if any."""
    device = choose_device(where)
    place = Path(path).expanduser()
    if (place / "run.yaml").is_file() or (place / "sweep.json").is_file():
        return _open_run(RunDir.open(place), which, device, say, approve)
    if which.step != "auto":
        raise ConfigError(f"--step names a checkpoint, and {path} is not a run directory")
    is_local = place.exists() or path.startswith(("/", ".", "~")) or path.count("/") != 1
    if is_local and not (place / "config.json").is_file():
        raise DataError(
            f"{path} is neither a run directory (run.yaml) nor a model's folder (config.json)\n"
            "hint: give a run, as runs/latest, or a folder that save_pretrained has written"
        )
    return _open_model(path, device, say)


def _open_run(
    run: RunDir, which: Which, device: torch.device, say: Say, approve: Approve | None
) -> Author:
    job = open_job(run, approve)
    if type(job.workload).generate is Workload.generate:
        raise no_text(job.workload)  # before weights are read, and the prompt is shown
    trained = load_trained(run, job, which, device, say)
    plan, codec = Plan.load(run.plan), codec_of(job.workload.prepared)
    precision = plan.precision.value if device.type == "cuda" else "fp32"
    says = f"{trained.says}, text as {codec.name}, on {device.type} in {precision}"
    return Author(job.workload, trained.model, codec, device, precision, says)


def _open_model(path: str, device: torch.device, say: Say) -> Author:
    from paceline.workloads.causal_lm.model import build_causal_lm
    from paceline.workloads.causal_lm.workload import CausalLM
    from paceline.workloads.hf.pretrained import check_weights, choose_weights, find_folder
    from paceline.workloads.hf.pretrained import load_config as read_config
    from paceline.workloads.hf.pretrained import load_module as read

    folder = find_folder(path)
    if folder is None:
        raise DataError(f"{path} is an architecture without weights\nhint: give a model's folder")
    if str(load_map(folder / "config.json").get("model_type")).startswith("paceline-"):
        raise DataError(
            f"{folder} is not a model of transformers but one of ours, written for other tools\n"
            "hint: give the run directory that it was converted from"
        )
    config = read_config(path, {}, folder)
    folder, _ = choose_weights("load", path, folder)
    assert folder is not None, "weights are loaded from a folder"
    with on_meta():
        model = build_causal_lm(config, "sdpa")
    check_weights(model, folder)
    fill_weights(model, lambda name, module: read(model, name, module, folder), 0, device)
    codec = open_codec(folder)
    if codec.name == "bytes":
        say(f"{folder} has no tokenizer.json: text is bytes")
    precision = "bf16" if device.type == "cuda" else "fp32"
    says = f"{type(model).__name__} of {folder}, text as {codec.name}, on {device.type}"
    return Author(CausalLM(), model.eval(), codec, device, precision, says)


def write(
    author: Author,
    prompts: Sequence[str],
    sampling: Sampling,
    told: Told = lambda number, text: None,
    use_cache: bool = True,
) -> list[Written]:
    """Continue the prompts; `told` hears of the text as it comes."""
    codec, streams = author.codec, [Stream(author.codec) for _ in prompts]
    ended = [False] * len(prompts)

    def hear(tokens: Sequence[int | None]) -> None:
        for number, token in enumerate(tokens):
            if not ended[number]:
                ended[number] = token is None
                told(number, streams[number].add(token))

    ids = [codec.prompt(prompt) for prompt in prompts]
    request = Request(ids, sampling, codec, hear, use_cache=use_cache)
    with torch.no_grad(), compute_context(author.precision, author.device):
        rows = author.workload.generate(author.model, request)
    for number in range(len(prompts)):
        if not ended[number]:
            told(number, streams[number].add(None))
    texts = [codec.decode(row) for row in rows]
    return [
        Written(prompt=prompt, text=text, num_tokens=len(row), ended=end)
        for prompt, text, row, end in zip(prompts, texts, rows, ended, strict=True)
    ]
