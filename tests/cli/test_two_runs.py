"""Two runs in one process, as in a sweep: each has its own environment, signals stay as before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import environment
from tests.jobs import write_line_job

PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
from paceline.run.flow import run_job
from paceline.job import load_job

class Talk:
    def say(self, text): pass
    def training(self, run, plan): return lambda row: None
    def trained(self): pass

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]

def train(name, value):
    job = load_job("job.py:Job", ["train.steps=2", "train.micro_batch_size=4", "launch.nproc=2",
                                  "launch.device=cpu", f"launch.env.OURS={value}"])
    return run_job(job, Path(name), Talk()).outcome

if __name__ == "__main__":
    mine = lambda number, frame: None
    signal.signal(signal.SIGTERM, mine)
    before = [signal.getsignal(number) for number in NUMBERS]
    os.environ["THEIRS"] = "first"
    outcomes = [train("one", "1")]
    os.environ["THEIRS"] = "second"
    os.environ["OMP_NUM_THREADS"] = "3"
    outcomes.append(train("two", "2"))
    after = [signal.getsignal(number) for number in NUMBERS]
    started_at = time.monotonic()
    outcomes.append(train("three", "3"))
    warm_s = time.monotonic() - started_at
    print(json.dumps({"outcomes": outcomes, "same": before == after, "warm_s": warm_s,
                      "threads": threading.active_count()}))
"""
SEE = (
    "print('saw', [os.environ.get(name) for name in ('OURS', 'THEIRS', 'OMP_NUM_THREADS')],"
    " torch.get_num_threads())"
)


@pytest.mark.nightly
def test_run_2_has_the_environment_of_run_2_and_signals_are_as_before(tmp_path: Path) -> None:
    write_line_job(tmp_path, SEE)
    (tmp_path / "sweep.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "sweep.py"], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["outcomes"] == ["ok"] * 3 and told["same"] and told["threads"] == 1
    seen = [(tmp_path / name / "ranks/rank1/log.txt").read_text() for name in ("one", "two")]
    assert "saw ['1', 'first', '1'] 1" in seen[0]
    assert "saw ['2', 'second', '3'] 3" in seen[1]
