"""`paceline train` as users run it: the record it leaves, and how it ends when things go wrong."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.program import Ran, paceline, start
from tests.jobs import LINE, write_line_job

TRAINING = [
    "step", "loss", "lr", "grad_norm", "step_s", "samples_per_s", "tokens_per_s", "skipped",
    "overflowed", "warmup", "val_loss", "val/perplexity", "val/bits_per_byte",
]  # fmt: skip
RESULT = {
    "schema", "run_dir", "outcome", "exit_code", "steps", "final_loss", "step_s", "samples_per_s",
    "tokens_per_s", "tflops_per_rank", "mfu", "peak_active_bytes", "peak_reserved_bytes",
    "world_size", "strategy", "precision", "fingerprints",
}  # fmt: skip
SECRETS = {"HF_TOKEN": "hf_planted_value", "AWS_SECRET_ACCESS_KEY": "aws_planted_value"}

PRINT = 'print("a line of the user\'s", flush=True)'
ON_RANK_1 = "if os.environ['RANK'] == '1': "


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """One run of 2 ranks on real text, with secrets in its environment."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"document {number} " * 200)
    ran = paceline(
        "train", "lm_tiny", "train.steps=12", "launch.nproc=2", "data.source=text",
        "data.cache_dir=cache", "model.dim=32", "data.seq_len=32", "data.val_fraction=0.3",
        "launch.device=cpu", "optim.schedule.warmup_steps=2", "--json", cwd=folder, **SECRETS,
    )  # fmt: skip
    return ran, folder


def test_logs_hold_no_noise_of_the_profiler(finished: tuple[Ran, Path]) -> None:
    """The audit profiles a step, and kineto announces that on stderr."""
    logs = list((finished[1] / "runs" / "latest").glob("**/*.log"))
    assert logs
    for log in logs:
        assert "profiler_st" not in log.read_text(), log


def test_stdout_is_the_result_and_nothing_else(finished: tuple[Ran, Path]) -> None:
    ran, folder = finished
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert RESULT <= set(result)
    assert (result["outcome"], result["exit_code"], result["steps"]) == ("ok", 0, 12)
    assert (result["world_size"], result["strategy"], result["precision"]) == (2, "ddp", "fp32")
    assert result == json.loads((folder / "runs" / "latest" / "result.json").read_text())
    assert "report: runs/lm_tiny-" in ran.err
    assert re.search(r"tokens/s, step p50 .* ms \(training.csv, steps \d+ to 12\)", ran.err)


def test_the_run_directory_is_whole(finished: tuple[Ran, Path]) -> None:
    run = finished[1] / "runs" / "latest"
    names = (
        "run.yaml env.json plan.json launch.json launcher.log train.log result.json summary.md"
        " report.html training.csv telemetry.csv heartbeat_rank0.jsonl heartbeat_rank1.jsonl"
        " ranks/rank0/steps.csv ranks/rank1/steps.csv ranks/rank0/log.txt ranks/rank1/log.txt"
    )
    for name in names.split():
        assert (run / name).stat().st_size > 0, name
    with (run / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == TRAINING
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [row["warmup"] for row in rows] == ["1"] * 5 + ["0"] * 7
    assert float(rows[0]["lr"]) == pytest.approx(0.0015)  # 3e-3 over 2 warm-up steps
    assert rows[-1]["val_loss"]


def test_every_second_of_a_step_is_accounted_for(finished: tuple[Ran, Path]) -> None:
    for rank in (0, 1):
        with (finished[1] / "runs/latest/ranks" / f"rank{rank}" / "steps.csv").open() as file:
            for row in csv.DictReader(file):
                seconds = {k: float(v) for k, v in row.items() if k.endswith("_s")}
                times = {k: v for k, v in seconds.items() if not k.endswith("_blocked_s")}
                wall, rest = times.pop("wall_s"), times.pop("unaccounted_s")
                # What samples took, in loader processes: beside the step.
                assert times.pop("read_s") > 0 and times.pop("joined_s") >= 0
                assert sum(times.values()) + rest == pytest.approx(wall, abs=1e-6)
                assert times["forward_s"] > 0 and times["backward_s"] > 0
                # Waiting in collectives is a part of its phase.
                assert 0 <= seconds["backward_blocked_s"] <= times["backward_s"]


def test_every_line_of_the_log_carries_its_rank(finished: tuple[Ran, Path]) -> None:
    lines = (finished[1] / "runs/latest/train.log").read_text().splitlines()
    assert all(re.match(r"\[rank [01]\] ", line) for line in lines)
    assert any("step 10/12 loss" in line for line in lines)


def test_heartbeats_tell_step_and_phase(finished: tuple[Ran, Path]) -> None:
    lines = (finished[1] / "runs/latest/heartbeat_rank1.jsonl").read_text().splitlines()
    beats = [json.loads(line) for line in lines]
    assert {"time", "rank", "step", "phase"} <= set(beats[0])
    assert beats[0]["rank"] == 1 and len(beats) >= 2


def test_no_secret_is_written_anywhere(finished: tuple[Ran, Path]) -> None:
    ran, folder = finished
    texts = [ran.out, ran.err]
    texts += [p.read_bytes().decode(errors="replace") for p in folder.rglob("*") if p.is_file()]
    for value in SECRETS.values():
        assert not any(value in text for text in texts)


def test_the_second_run_into_a_directory_is_refused(finished: tuple[Ran, Path]) -> None:
    folder = finished[1]
    before = (folder / "runs/latest/result.json").read_text()
    ran = paceline("train", "lm_tiny", "data.source=synthetic", "--out", "runs/latest", cwd=folder)
    assert ran.code == 2 and "never writes over another" in ran.err
    assert (folder / "runs/latest/result.json").read_text() == before


def train_job(folder: Path, trouble: str, *more: str) -> tuple[Ran, dict[str, object]]:
    ran = paceline(
        "train", write_line_job(folder, trouble), "train.steps=4", "launch.nproc=2", *more,
        "train.micro_batch_size=4", "launch.device=cpu", "--out", "run", "--json", cwd=folder,
    )  # fmt: skip
    return ran, json.loads(ran.out)


def test_what_a_user_prints_is_in_the_log(tmp_path: Path) -> None:
    ran, result = train_job(tmp_path, PRINT)
    assert ran.code == 0, ran.err
    assert "[rank 1] a line of the user's" in (tmp_path / "run/train.log").read_text()
    assert "a line of the user's" not in ran.err + ran.out
    assert result["name"] == "Job"


def test_a_users_error_names_the_rank_and_shows_the_line(tmp_path: Path) -> None:
    ran, result = train_job(tmp_path, f"{ON_RANK_1} raise ValueError('my own bug')")
    assert ran.code == 5 and result["outcome"] == "crashed"
    assert "rank 1 on" in ran.err and "ValueError: my own bug" in ran.err
    assert "job.py" in ran.err, "the traceback's end is shown"
    assert "my own bug" in (tmp_path / "run/report.html").read_text()


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    ran, result = train_job(tmp_path, f"{ON_RANK_1} os.kill(os.getpid(), 9)")
    assert ran.code == 5
    failure = result["failure"]
    assert isinstance(failure, dict)
    assert failure["rank"] == 1 and failure["message"].startswith("killed by SIGKILL")


def test_leaving_early_with_zero_is_a_failure(tmp_path: Path) -> None:
    ran, result = train_job(tmp_path, f"{ON_RANK_1} os._exit(0)")
    assert ran.code == 5 and result["outcome"] == "crashed"
    assert "rank 1" in ran.err and "left early with exit code 0" in ran.err


def test_a_loss_that_is_not_a_number_is_exit_7(tmp_path: Path) -> None:
    ran, result = train_job(tmp_path, "return model(batch).sum() * float('nan'), len(batch)")
    assert ran.code == 7 and result["outcome"] == "nan" and result["bad_step"] == 1
    assert len(result["bad_sample_ids"]) == 8  # type: ignore[arg-type]


def test_out_of_memory_is_exit_10(tmp_path: Path) -> None:
    ran, _ = train_job(tmp_path, "raise MemoryError('no more')")
    assert ran.code == 10


def test_too_little_data_is_exit_4(tmp_path: Path) -> None:
    ran, _ = train_job(tmp_path, "pass", "train.grad_accum=100")
    assert ran.code == 4 and "64 samples, and one step takes 800" in ran.err


def test_data_that_is_not_there_is_exit_4(tmp_path: Path) -> None:
    name = write_line_job(tmp_path, "pass")
    text = (tmp_path / "job.py").read_text()
    (tmp_path / "job.py").write_text(text.replace("return Data() if", "open('gone') if"))
    ran = paceline("train", name, "launch.device=cpu", "train.steps=2", cwd=tmp_path)
    assert ran.code == 4 and "FileNotFoundError" in ran.err and "job.py:13 in build_data" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n", "job.py:1 cannot be imported: SyntaxError"),
        ("import not_there\n", "job.py:1 cannot be imported: ModuleNotFoundError"),
        ("x = 1\n", "job.py has no class Job"),
        ("class Job: pass\n", "is not a workload"),
    ],
)
def test_a_broken_file_is_one_message(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(text)
    ran = paceline("train", "job.py:Job", cwd=tmp_path)
    assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err
    assert not (tmp_path / "runs").exists()


def test_a_bad_return_of_loss_is_explained(tmp_path: Path) -> None:
    ran, _ = train_job(tmp_path, "return model(batch).mean()")
    assert ran.code == 2 and "Job.loss must return two things" in ran.err
    assert "Traceback" not in ran.err, "a refusal says all there is to know"


def test_moving_the_job_during_the_run_does_not_lose_it(tmp_path: Path) -> None:
    trouble = "os.environ['RANK'] == '0' and os.path.exists('job.py') and os.remove('job.py')"
    ran, result = train_job(tmp_path, trouble)
    assert ran.code == 0 and result["outcome"] == "ok", ran.err


@pytest.mark.nightly  # torch waits 10 s for loaders that do not leave
def test_a_loader_that_hangs_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    job = LINE.replace("{trouble}", "pass").replace(
        "def __getitem__(self, index): return",
        "def __getitem__(self, index):\n        open('pid', 'w').write(str(os.getpid()))\n"
        "        time.sleep(1000)\n        return",
    )
    (tmp_path / "job.py").write_text(job)
    ran = paceline(
        "train", "job.py:Job", "train.steps=3", "launch.nproc=1", "data.num_workers=1",
        "data.timeout_s=2.0", "launch.device=cpu", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 4 and "gave nothing for 2 s over samples" in ran.err
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive([pid]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive([pid]) == []


def wait_for_step(run: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        beat = run / "heartbeat_rank1.jsonl"
        if beat.is_file() and any(json.loads(x)["step"] > 0 for x in beat.read_text().splitlines()):
            return
        time.sleep(0.05)
    pytest.fail(f"no step in 60 s: {process.communicate(timeout=10)}")


def rank_pids(run: Path) -> list[int]:
    text = (run / "train.log").read_text()
    return [int(pid) for pid in re.findall(r"rank \d of \d: process (\d+)", text)]


def start_endless(folder: Path) -> subprocess.Popen[str]:
    return start(
        "train", write_line_job(folder, "time.sleep(0.05)"), "train.steps=100000", "launch.nproc=2",
        "train.micro_batch_size=4", "launch.device=cpu", "observe.heartbeat_s=0.1", "--out", "run",
        cwd=folder,
    )  # fmt: skip


def alive(pids: list[int]) -> list[int]:
    found = [pid for pid in pids if psutil.pid_exists(pid)]
    return [pid for pid in found if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("times", [1, 4])
def test_ctrl_c_ends_ranks_and_leaves_a_report(tmp_path: Path, times: int) -> None:
    process = start_endless(tmp_path)
    wait_for_step(tmp_path / "run", process)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        time.sleep(0.25)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["outcome"] == "interrupted"
    assert (tmp_path / "run/report.html").is_file() and "Traceback" not in err
    pids = rank_pids(tmp_path / "run")
    assert len(pids) == 2 and alive(pids) == []


def test_ranks_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    wait_for_step(tmp_path / "run", process)
    pids = rank_pids(tmp_path / "run")
    assert len(alive(pids)) == 2
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pids) == []


def test_a_live_run_keeps_a_second_one_out(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    try:
        wait_for_step(tmp_path / "run", process)
        second = paceline("train", "lm_tiny", "data.source=synthetic", "--out", "run", cwd=tmp_path)
        assert second.code == 2 and f"live run (process {process.pid})" in second.err
        assert process.poll() is None, "the first one was disturbed"
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
