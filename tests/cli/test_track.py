"""Trackers, each asked by its own reader what it was sent."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.archive import begin_attempt
from paceline.records import Result
from paceline.records.rundir import RunDir
from tests import warm
from tests.cli.program import environment, paceline
from tests.reported import write_run

CONFIG = """
name: fixture
train: {steps: 20, log_every: 5}
model: {width: 3, api_key: hidden-word}
data: {root: "s3://me:hidden-word@host/x"}
launch: {env: {NCCL_DEBUG: INFO, MY_SERVICE: hidden-word}}
"""


def send(name: str, folder: Path, **env: str) -> RunDir:
    """Send a run of 20 steps that has ended well, by the process that a live run has."""
    run = write_run(folder / "run")
    run.config.write_text(CONFIG)
    begin_attempt(run, resume=False)
    process = warm.start(
        [sys.executable, "-m", "paceline.track", name, str(run.root)], cwd=folder,
        env=environment(**env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    out, _ = process.communicate("ok\n", timeout=100)
    assert process.returncode == 0, out
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert everything.count(b"hidden-word") == CONFIG.count("hidden-word"), "only in run.yaml"
    return run


@pytest.mark.slow
def test_tensorboard_reads_a_run_and_a_tracker_without_network_is_a_note(
    tmp_path: Path, tiny: list[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran = paceline(
        "train", "lm_tiny", *tiny, "train.steps=6", "train.log_every=2",
        "observe.trackers=[tensorboard,wandb]", "--out", "run", cwd=tmp_path,
        WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9", HOME=str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    result = Result.load(tmp_path / "run" / "result.json")
    notes = [note for note in result.notes if "tracker" in note]
    assert len(notes) == 1 and notes[0].startswith("tracker wandb failed"), notes
    assert ran.err.count("warning: tracker wandb failed") == 1
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert {"optim/lr", "speed/tokens_per_s"} <= set(found.Tags()["scalars"])


@pytest.mark.slow
def test_mlflow_reads_its_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send("mlflow", tmp_path, MLFLOW_EXPERIMENT_NAME="mine")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{tmp_path / 'mlruns'}")
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["outcome"] == "ok"
    assert run.data.params["train.steps"] == "20" and run.data.params["model.width"] == "3"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(s, pytest.approx(5 / s)) for s in range(1, 21)]
    (val,) = client.get_metric_history(run.info.run_id, "val/loss")
    assert (val.step, val.value) == (20, 2.0)


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(tmp_path: Path) -> None:
    run = send("wandb", tmp_path, WANDB_MODE="offline")
    (file,) = (run.root / "wandb").glob("offline-run-*/run-*.wandb")
    config, losses = dict[str, str](), dict[int, float]()
    for record in iter_records(file.read_bytes()):
        if record.HasField("run"):
            config |= {item.key: item.value_json for item in record.run.config.update}
        elif record.HasField("history"):
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            losses[int(row["_step"])] = float(row["train/loss"])
    assert config["train.steps"] == "20" and config["launch.env.NCCL_DEBUG"] == '"INFO"'
    assert losses == {step: pytest.approx(5 / step) for step in range(1, 21)}
    assert not [path for path in file.parent.rglob("*") if path.name == "requirements.txt"]


def iter_records(raw: bytes):  # type: ignore[no-untyped-def]
    """Yield the records of W&B's file: LevelDB's log format behind a header of 7 bytes, in blocks
    of 32 KiB; each part has checksum, length and type (1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, whole = 7, b""
    while place + 7 <= len(raw):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(raw[place + 4 : place + 6], "little"), raw[place + 6]
        part = raw[place + 7 : place + 7 + length]
        place += 7 + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
