"""Speech recognition on several ranks: adapters over frozen weights, and words that are scored."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import DataError
from paceline.job import load_job
from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.texts import read_samples
from paceline.strategies.clock import HostClock
from paceline.train.worker import RankRun
from tests.asr import LORA, LOUD, RECIPE, tiny, tiny_ctc
from tests.harness import (
    RankEnds,
    alone,
    build_engine,
    machine,
    prepare_run,
    run_each,
    run_here,
    start_ranks,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")
nightly = pytest.mark.nightly
pytestmark = pytest.mark.slow

STEPS = 3
SGD = [
    "optim.name=sgd", "optim.lr=0.02", "optim.weight_decay=0.01", "optim.schedule.warmup_steps=0",
    f"train.steps={STEPS}", "train.global_batch_size=8", "train.log_every=1",
    f"train.eval_every={STEPS}", "checkpoint.every=off",
]  # fmt: skip
ONE, TWO = ["train.micro_batch_size=8"], ["train.micro_batch_size=4", "launch.nproc=2"]
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
BASES: dict[str, list[str]] = {"fp32": [], "bf16": ["model.base=bf16", "precision.mode=bf16"]}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    settings = tiny(*SGD, *LORA, *ONE, LOUD, "strategy.name=ddp")
    return run_here(tmp_path_factory.mktemp("reference") / "run", RECIPE, settings)


@pytest.mark.parametrize(
    "rows", [["zero3"], pytest.param(["ddp", "zero1", "zero2"], marks=nightly)]
)
def test_adapters_on_two_ranks_equal_one(
    rows: list[str], reference: RankEnds, tmp_path: Path
) -> None:
    cases = {row: tiny(*SGD, *LORA, *TWO, LOUD, f"strategy.name={row}") for row in rows}
    for row, ends in run_each(tmp_path, RECIPE, cases).items():
        assert_same(reference, ends, row)


@nightly
def test_the_whole_model_and_ctc_on_two_ranks_equal_one(tmp_path: Path) -> None:
    for kind, settings in {"whisper": tiny, "ctc": tiny_ctc}.items():
        one = run_here(tmp_path / kind / "one", RECIPE, settings(*SGD, *ONE))
        cases = {row: settings(*SGD, *TWO, f"strategy.name={row}") for row in ("ddp", "zero3")}
        for row, ends in run_each(tmp_path / kind, RECIPE, cases).items():
            assert_same(one, ends, f"{kind}, {row}")


def assert_same(reference: RankEnds, ends: RankEnds, name: str) -> None:
    losses = [(a.loss, b.loss) for a, b in zip(reference.rows, ends.rows, strict=True)]
    assert len(losses) == STEPS and len({round(expected, 4) for expected, _ in losses}) == STEPS
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5), name
    assert ends.rows[0].grad_norm == pytest.approx(reference.rows[0].grad_norm, rel=1e-4), name
    first = reference.states[0].weights
    for state in ends.states:
        for key, weight in first.items():
            torch.testing.assert_close(
                state.weights[key], weight, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
            )
    measured, expected_numbers = (validated(each.run) for each in (ends, reference))
    assert "val/wer" in measured and "val/cer" in measured
    assert measured == pytest.approx(expected_numbers, rel=1e-4), name
    texts = [[(s.prompt, s.text) for s in read_samples(x.run.texts)] for x in (ends, reference)]
    if "lora" in "".join(first):
        assert len({text for _, text in texts[0]}) > 1, "all of it is the same"
    assert len(texts[0]) == 5 and texts[0] == texts[1], name


def validated(run: RunDir) -> dict[str, float]:
    with run.training.open() as file:
        *_, last = csv.DictReader(file)
    return {name: float(value) for name, value in last.items() if name.startswith("val")}


@nightly
def test_bf16_is_nearly_the_same_where_the_base_is_too(reference: RankEnds, tmp_path: Path) -> None:
    bf16 = ["precision.mode=bf16", "model.base=bf16"]
    cases = {
        row: tiny(*SGD, *LORA, *TWO, LOUD, *bf16, f"strategy.name={row}")
        for row in ("ddp", "zero3")
    }
    for row, ends in run_each(tmp_path, RECIPE, cases).items():
        for expected, found in zip(reference.rows, ends.rows, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=2e-2), row
        types = {str(w.dtype) for w in ends.states[0].weights.values()}
        assert types == {"torch.float32", "torch.bfloat16"}, row
        assert "val/wer" in validated(ends.run), row


def _hold(runs: list[tuple[RunDir, list[str]]], group: RunDir, place: RankId) -> None:
    for run, settings in runs:
        engine, batches = build_engine(run, RECIPE, settings)
        for _ in range(2):
            engine.forward_backward(batches, 0.01, HostClock())
            held = engine.held()
            engine.step(0.01, HostClock())
        run.rank(place.rank).mkdir(parents=True, exist_ok=True)
        torch.save(held, run.rank(place.rank) / "held.pt")


@pytest.mark.parametrize(
    "rows",
    [
        [("ddp", "fp32"), ("zero3", "bf16")],
        pytest.param([(row, base) for row in STRATEGIES for base in BASES], marks=nightly),
    ],
    ids=["some", "all"],
)
def test_adapters_alone_have_gradients_and_state(
    rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Bytes as planned, on each strategy; a base in bf16 counts half."""
    adamw = ["optim.name=adamw", "train.global_batch_size=8", "train.steps=9", *TWO, *LORA]
    runs: dict[str, Any] = {}
    for row, base in rows:
        settings = tiny(*adamw, *BASES[base], f"strategy.name={row}")
        _, plan, run = prepare_run(tmp_path / f"{row}-{base}", RECIPE, settings)
        runs[f"{row}, {base}"] = plan, run, settings
    start_ranks(RunDir(tmp_path), 2, partial(_hold, [(run, s) for _, run, s in runs.values()]))
    for name, (plan, run, _) in runs.items():
        held = [torch.load(run.rank(rank) / "held.pt", weights_only=False) for rank in (0, 1)]
        most = max(held, key=lambda found: found.optimizer)
        asked = plan.state_bytes
        found = (most.parameters, most.gradients, most.optimizer)
        assert found == (asked.parameters, asked.gradients, asked.optimizer), name
        assert asked.gradients < asked.parameters / 4, f"{name}: the base has gradients"


def test_a_checkpoint_of_adapters_resumes_on_its_own_base_only(
    reference: RankEnds, tmp_path: Path
) -> None:
    settings = tiny(*SGD, *LORA, *ONE, LOUD, "checkpoint.weights=trained")
    cut = run_here(
        tmp_path / "run", RECIPE,
        [*settings, "train.steps=2", "train.eval_every=off", "optim.schedule.total_steps=3"],
    )  # fmt: skip
    names = {piece.name for piece in cut.states[0].pieces if piece.section == "model"}
    assert names and all("lora_" in name for name in names)
    archive_left_over(cut.run)
    begin_attempt(cut.run, resume=True)
    job = load_job(RECIPE, settings)
    job.workload.prepared = json.loads(cut.run.data.read_text())
    plan = make_plan(job, machine())
    with alone():
        RankRun(job, plan, cut.run, RankId(0, 0, 1)).execute()
        rows = [row.loss for row in RankEnds(cut.run, [], []).rows]
        assert rows == [row.loss for row in reference.rows]
    archive_left_over(cut.run)
    begin_attempt(cut.run, resume=True)
    job.workload.prepared |= {"base_hash": "another"}
    with alone(), pytest.raises(DataError, match="base model random-.*this one is another"):
        RankRun(job, plan, cut.run, RankId(0, 0, 1)).execute()


def test_out_of_memory_names_the_utterance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.workloads.asr.workload import SpeechRecognition

    plain = SpeechRecognition.loss

    def full(self: Any, model: Any, batch: Any) -> Any:
        if model.training and not batch["waveforms"].is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return plain(self, model, batch)

    monkeypatch.setattr(SpeechRecognition, "loss", full)
    with pytest.raises(Exception, match=r"out of memory on sample \d+, train.*\.flac \(\d"):
        run_here(tmp_path / "run", RECIPE, tiny_ctc(*SGD, *ONE))


@nightly
@pytest.mark.parametrize(
    "more",
    ["train.activation_checkpointing=full", "data.features=device", "data.num_workers=1"],
)
def test_the_same_is_computed_in_other_ways(more: str, reference: RankEnds, tmp_path: Path) -> None:
    ends = run_here(tmp_path / "run", RECIPE, tiny(*SGD, *LORA, *ONE, LOUD, more))
    assert_same(reference, ends, more)
