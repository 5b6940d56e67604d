"""A key that exists is read: a recipe of each workload is planned, launched on paper and run for 2
steps while a proxy notes each key that anything looks at."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.describe import iter_keys
from paceline.config.load import recipe_names
from paceline.config.section import Section
from paceline.health import judge
from paceline.job import load_job
from paceline.launch import find_launcher
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.run.flow import order_for
from tests import asr
from tests.harness import run_here
from tests.judged import make_all
from tests.speech_clip import tiny
from tests.speech_signals import CORPUS

# The recipe at a size that a test can afford. The keys are the recipe's own.
SMALL = [
    "train.steps=2", "train.micro_batch_size=4", "train.compile=off", "launch.device=cpu",
    "optim.schedule.warmup_steps=1",
]  # fmt: skip
SYNTHETIC = "data.synthetic_samples=64"
SMALL_MODEL = {
    "lm": [
        SYNTHETIC, "model.dim=32", "model.num_layers=1", "model.num_heads=2",
        "model.num_kv_heads=2",
        "model.vocab_size=320", "data.seq_len=16",
    ],
    "mae": [
        SYNTHETIC, "model.hf_config.hidden_size=16", "model.hf_config.num_hidden_layers=1",
        "model.hf_config.num_attention_heads=2", "model.hf_config.intermediate_size=16",
        "model.hf_config.image_size=16", "model.hf_config.patch_size=4",
        "model.hf_config.decoder_hidden_size=16", "model.hf_config.decoder_num_hidden_layers=1",
        "model.hf_config.decoder_num_attention_heads=2",
        "model.hf_config.decoder_intermediate_size=16", "train.grad_accum=1",
    ],
    "causal_lm": [
        SYNTHETIC, "model.hf_config.hidden_size=16", "model.hf_config.num_hidden_layers=1",
        "model.hf_config.num_attention_heads=2", "model.hf_config.num_key_value_heads=2",
        "model.hf_config.intermediate_size=16", "model.hf_config.vocab_size=320",
        "data.seq_len=16",
    ],
}  # fmt: skip
READS_TEXT = ("lm", "causal_lm")
SAMPLED = ["train.eval_every=2", "train.eval_samples=2", "train.sample_prompts=[a]"]
# Keys that another choice brings into play: one run for each.
VARIANTS = [
    [],
    [
        "train.eval_every=2", "train.eval_samples=8", "data.num_workers=1", "optim.ema=0.9",
        "train.eval_ema=true", "optim.schedule.name=wsd",
    ],
    ["optim.name=sgd", "optim.momentum=0.9"],
]  # fmt: skip
# Keys that one strategy or one precision looks at, already in the plan: planned, and not run.
PLANNED = [
    ["strategy.name=zero3_hybrid", "strategy.shard_size=2", "launch.nproc=4"],
    ["strategy.comm_hook=powersgd", "launch.nproc=2"],
    ["strategy.name=pipeline", "launch.nproc=2", "strategy.schedule=dualpipe"],
    ["precision.mode=fp16"],
    ["precision.mode=fp8", "precision.fp8_layers=all", "strategy.name=zero3", "launch.nproc=2"],
    ["attention.impl=nsa"],
    ["model.dim=32768", "model.num_layers=64"],  # fits nowhere: launch.overcommit is asked
]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """(section class, field) of every read that is not pydantic's own."""
    seen: set[tuple[str, str]] = set()
    plain = Section.__getattribute__

    def noting(self: Section, name: str) -> Any:
        # The table of settings without effect looks at keys in order to say that nobody does.
        reader = sys._getframe(1).f_code.co_name
        is_key = not name.startswith("_") and name in type(self).model_fields
        if is_key and reader not in ("check_idle_settings", "_rules"):
            seen.add((type(self).__name__, name))
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", noting)
    yield seen


class Extra(Section):
    """Stands for a key that somebody added and forgot to use."""

    unused: int = 0


def test_the_proxy_sees_reads_and_only_reads(reads: set[tuple[str, str]]) -> None:
    section = Extra()
    section.model_dump()
    assert not reads
    assert section.unused == 0
    assert reads == {("Extra", "unused")}


@pytest.mark.slow
def test_every_key_is_read(reads: set[tuple[str, str]], tmp_path: Path, corpus: Path) -> None:
    text = [
        f"data.cache_dir={tmp_path / 'cache'}",
        f"data.source={corpus}",
        "data.val_fraction=0.3",
        "data.tokenizer=bytes",
    ]
    schemas: set[type[Section]] = set()
    seen: set[str] = set()
    env = probe()
    for name in recipe_names():
        workload = load_job(name, []).config.workload
        if workload in seen:  # another recipe of the same keys
            continue
        seen.add(workload)
        speech = {"speech_clip": tiny, "asr": asr.tiny}
        own = speech[workload]() if workload in speech else SMALL_MODEL[workload]
        small = [*SMALL, *own, "train.epochs=off"]
        small += ["model.hf=llama"] if name == "causal_lm" else []  # its own has other keys
        common = VARIANTS if workload == "lm" else VARIANTS[:2]  # the third's keys are everybody's
        variants = [[*text, *v] for v in common] if workload in READS_TEXT else common
        if workload == "lm":
            variants = [*variants, [*text, *SAMPLED]]
        if workload == "asr":
            variants = [*variants, *_speech_keys(tmp_path)]
        if workload == "mae":
            variants = [*variants, _image_keys(tmp_path)]
        synthetic = [["data.source=synthetic"]] if workload in READS_TEXT else []
        for number, variant in enumerate([*variants, *synthetic]):
            overrides = [*small, *variant]
            run_here(tmp_path / f"{name}-{number}", name, overrides)
            # Built, not run: compiling takes a minute and reads no further key.
            job = load_job(name, [*overrides, "launch.nproc=2", "train.compile=default"])
            plan = make_plan(job, env)
            find_launcher(plan.crew.launcher.value).plan(order_for(job, env, plan))
            _build_ddp(job, plan, tmp_path)
            RunDir.create(job.config.name, tmp_path / f"{name}-{number}-name")
            schemas.add(type(job.config))
    for settings in PLANNED:
        make_plan(load_job("lm_tiny", ["launch.device=cpu", *settings]), env)
    _draw_launches(tmp_path)
    judge(make_all(load_job("lm_tiny", []).config.observe.rules))  # as the watcher of a run does
    unread = {
        key.path
        for schema in schemas
        for key in iter_keys(schema)
        if _owner(schema, key.path) not in reads
    }
    assert sorted(unread) == [], "keys that nothing reads: take them out, or use them"


def _speech_keys(tmp_path: Path) -> Iterator[list[str]]:
    """Speech that is not prepared yet, and a teacher."""
    yield ["data.root_dir=", f"data.source={CORPUS}", f"data.cache_dir={tmp_path}",
           "data.val_splits=[none]"]  # fmt: skip
    yield [f"model.teacher={asr.save_whisper(tmp_path / 'teacher')}"]


def _image_keys(tmp_path: Path) -> list[str]:
    """A folder of images, and keys that only those look at."""
    import numpy as np
    from PIL import Image

    (tmp_path / "images").mkdir()
    for number in range(24):
        pixels = np.full((20, 20), number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    return [
        f"data.path_train={tmp_path / 'images'}", f"data.cache_dir={tmp_path}",
        "data.val_fraction=0.3", "train.eval_every=2", "train.eval_samples=2",
    ]  # fmt: skip


def _draw_launches(tmp_path: Path) -> None:
    """Keys that only another launcher looks at."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    env = probe()
    for by in ("torchrun", "slurm"):
        asked = [f"launch.launcher={by}", f"launch.hostfile={hostfile}", "launch.device=cpu"]
        job = load_job("lm_tiny", asked)
        find_launcher(by).plan(order_for(job, env, make_plan(job, env)))
    # Keys of a strategy that may not be installed: its config is generated without it.
    make_plan(load_job("lm_tiny", ["strategy.name=deepspeed", "launch.device=cpu"]), env)


def _owner(schema: type[Section], path: str) -> tuple[str, str]:
    """The class and field that a dotted path ends in."""
    *parents, leaf = path.split(".")
    section: Any = schema
    for part in parents:
        section = section.model_fields[part].annotation
    return section.__name__, leaf


def _build_ddp(job: Any, plan: Any, tmp_path: Path) -> None:
    """What a rank of two would build; one process stands in for both."""
    import torch
    import torch.distributed as dist

    from paceline.strategies import find_strategy
    from paceline.strategies.base import EngineParts

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
        find_strategy("ddp").build(parts)
    finally:
        dist.destroy_process_group()
