"""Faults F1 to F19 of the matrix that concern launching, on the real program. Whatever happens, no
process, no listening port and no temporary file is left."""

import json
import os
import shutil
import signal
import socket
import time
from typing import Any

import pytest

from tests.cli.bench import SMALL, TORCHRUN, Bench, finish, ranked, wait_until
from tests.cli.program import free_port
from tests.jobs import LINE

# The first call counts FLOPs, before step 1.
ON_RANK_1 = "if os.environ['RANK'] == '1' and self.calls > 2 and torch.is_grad_enabled(): "
pytestmark = pytest.mark.slow


# F1 to F8: before any rank trains


def test_f1_a_taken_port_is_named_with_its_owner(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        ran = bench.train("pass", **ranked(0, 2, port))
    assert ran.code == 3 and "Traceback" not in ran.err
    assert f"port {port}" in ran.err and f"process {os.getpid()}" in ran.err


def test_f1_our_own_launch_never_asks_for_a_fixed_port(bench: Bench) -> None:
    try:
        holder = socket.create_server(("127.0.0.1", 29500))
    except OSError:
        holder = socket.socket()  # somebody else holds it, which serves as well
    with holder:
        assert bench.train("pass", "launch.nproc=2").code == 0


def test_f2_a_lock_file_without_its_lock_is_no_obstacle(bench: Bench) -> None:
    (bench.folder / "run").mkdir()
    (bench.folder / "run/.lock").write_text(f"{os.getpid()}\n")  # a live process, another's pid
    assert bench.train("pass").code == 0


def test_f3_of_two_launches_into_one_directory_one_is_refused(bench: Bench) -> None:
    words = ["train", bench.job("time.sleep(0.2)"), *SMALL, "--out", "run"]
    both = [bench.start(*words), bench.start(*words)]
    ends = sorted((finish(process) for process in both), key=lambda ran: ran.code)
    assert [ran.code for ran in ends] == [0, 2]
    assert "live run" in ends[1].err or "never writes over another" in ends[1].err
    assert bench.result()["outcome"] == "ok"


def test_f4_missing_ranks_are_listed(bench: Bench) -> None:
    started_at = time.monotonic()
    ran = bench.train("pass", "launch.start_s=2", **ranked(0, 3, free_port()))
    assert ran.code == 5 and "2 of 3 ranks never came: 1, 2" in ran.err
    assert time.monotonic() - started_at < 20


def test_f5_an_address_that_does_not_resolve(bench: Bench) -> None:
    started_at = time.monotonic()
    ran = bench.train("pass", **ranked(1, 2, free_port(), addr="no-such-host.invalid"))
    assert ran.code == 3 and "MASTER_ADDR=no-such-host.invalid does not resolve" in ran.err
    assert time.monotonic() - started_at < 10


def test_f6_a_broken_file_is_one_message_however_many_ranks(bench: Bench) -> None:
    (bench.folder / "job.py").write_text("def broken(:\n")
    ran = finish(bench.start("train", "job.py:Job", *SMALL, before=TORCHRUN))
    assert ran.code != 0
    assert ran.err.count("cannot be imported: SyntaxError") == 1


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='abc' is not a whole"),
        (ranked(0, 2, "1") | {"LOCAL_RANK": "9"}, "local rank 9 is not one of 2"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"OMP_NUM_THREADS": "0"}, "'0' is not a number of threads"),
        ({"SLURM_PROCID": "x", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID='x'"),
    ],
)
def test_f7_junk_in_the_environment_is_refused(
    env: dict[str, str], says: str, bench: Bench
) -> None:
    ran = bench.train("pass", **env)
    assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err
    assert not (bench.folder / "run").exists()


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
@pytest.mark.parametrize("asked", ["launch.backend=nccl", "launch.device=cuda"])
def test_f8_what_is_not_here_is_refused_not_replaced(asked: str, bench: Bench) -> None:
    ran = bench.train("pass", asked)
    assert ran.code == 3
    assert "on CPU" in ran.err or "no GPU is visible here" in ran.err


# F12 to F15: ranks that die


def test_f12_the_users_error_comes_first_and_the_echo_is_folded(bench: Bench) -> None:
    ran = bench.train(f"{ON_RANK_1} raise ValueError('my own bug')", "launch.nproc=2")
    assert ran.code == 5
    assert bench.result()["failure"]["rank"] == 1
    assert "ValueError: my own bug (job.py:" in ran.err


def test_f13_leaving_early_with_zero_is_a_failure(bench: Bench) -> None:
    ran = bench.train(f"{ON_RANK_1} os._exit(0)", "launch.nproc=2")
    assert ran.code == 5 and "left early with exit code 0" in ran.err


def test_f14_an_allocation_that_fails_is_out_of_resources(bench: Bench) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33)); torch.empty(1 << 40)"
    ran = bench.train(limit, "launch.nproc=1")
    assert ran.code == 10 and "micro_batch_size" in ran.err


@pytest.mark.parametrize("doing", ["subprocess.Popen(['sleep', '60'])", "HOLD_THE_GIL"])
def test_f15_ranks_die_with_a_killed_supervisor_within_a_second(doing: str, bench: Bench) -> None:
    hold = "open('run/training.csv', 'a').write('\\n\\n'); ctypes.PyDLL(None).sleep(99)"
    words = ["train", bench.job(doing.replace("HOLD_THE_GIL", hold) + "; time.sleep(0.1)"), *SMALL]
    process = bench.start(*words, "train.steps=9999", "launch.nproc=2", "--out", "run")
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    process.kill()
    finish(process)
    wait_until(lambda: not bench.processes(), 1, "all gone, and what they started")
    if doing == "HOLD_THE_GIL":  # killed by the kernel, with no chance to clear the socket away
        shutil.rmtree(bench.temporary)


def test_f15_ranks_die_with_a_killed_torchrun(bench: Bench) -> None:
    words = ["train", bench.job("time.sleep(0.1)"), *SMALL, "train.steps=9999", "--out", "run"]
    process = bench.start(*words, before=TORCHRUN)
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    process.kill()
    finish(process)
    wait_until(lambda: not bench.processes(), 5, "all gone")


# F18, F19 and their kin: ranks that hang


def test_f18_a_stopped_rank_is_named_and_killed(bench: Bench) -> None:
    trouble = f"{ON_RANK_1} os.kill(os.getpid(), 19)"
    ran = bench.train(trouble, "launch.nproc=2", "launch.progress_s=2", "launch.grace_s=2")
    assert ran.code == 6, ran.err
    failure = bench.result()["failure"]
    assert failure["rank"] == 1 and "stopped by a signal" in failure["message"]


def test_f19_a_sleeping_rank_is_named_with_its_line(bench: Bench) -> None:
    trouble = f"{ON_RANK_1} time.sleep(1000)"
    ran = bench.train(trouble, "launch.nproc=2", "launch.progress_s=2", "launch.grace_s=2")
    assert ran.code == 6, ran.err
    failure = bench.result()["failure"]
    assert failure["rank"] == 1 and "no progress for 2 s" in failure["message"]
    assert "job.py:" in failure["message"] and "it is behind rank 0" in failure["message"]
    for rank in (0, 1):
        assert (
            "most recent call first"
            in (bench.folder / f"run/ranks/rank{rank}/stacks.txt").read_text()
        )


def test_a_rank_stuck_in_c_code_answers_too(bench: Bench) -> None:
    trouble = f"{ON_RANK_1} ctypes.PyDLL(None).sleep(1000)"  # holds the GIL
    ran = bench.train(trouble, "launch.nproc=2", "launch.progress_s=4", "launch.grace_s=2")
    assert ran.code == 6, ran.err
    failure = bench.result()["failure"]
    assert failure["rank"] == 1 and "job.py:" in failure["message"]


def test_the_start_deadline(bench: Bench) -> None:
    (bench.folder / "job.py").write_text(
        LINE.replace("{trouble}", "pass").replace(
            "def build_data(self, config, split): return",
            "def build_data(self, config, split):\n        time.sleep(1000)\n        return",
        )
    )
    words = ["train", "job.py:Job", *SMALL, "launch.start_s=3", "--out", "run"]
    ran = finish(bench.start(*words))
    assert ran.code == 6 and "had not begun on every rank after 3 s" in ran.err
    assert "build_data" in ran.err


def test_the_total_deadline_kills_who_ignores_term(bench: Bench) -> None:
    ignore = "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(0.05)"
    ran = bench.train(ignore, "launch.total_s=4", "launch.grace_s=1", "train.steps=9999")
    assert ran.code == 6 and "took longer than 4 s" in ran.err


def test_the_timeout_of_collectives_reaches_the_group(bench: Bench) -> None:
    trouble = f"{ON_RANK_1} time.sleep(60)"
    started_at = time.monotonic()
    ran = bench.train(trouble, "launch.nproc=2", "launch.collective_timeout_s=2")
    assert ran.code == 6 and "a collective waited longer than 2 s" in ran.err, ran.err
    assert bench.result()["failure"]["rank"] == 1, "not the one that waited"
    assert time.monotonic() - started_at < 40


def test_a_thread_that_goes_on_does_not_keep_a_finished_rank(bench: Bench) -> None:
    thread = "import threading; threading.Thread(target=time.sleep, args=(1e6,)).start()"
    assert bench.train(thread, "launch.nproc=2", "launch.grace_s=1").code == 0


def test_a_rank_that_aborts_after_its_verdict_has_finished(bench: Bench) -> None:
    late = "import atexit, threading; self.calls == 1 and os.environ['RANK'] == '0' and"
    late += " setattr(torch.distributed, 'destroy_process_group', os.abort)"
    ran = bench.train(late, "launch.nproc=2")
    assert ran.code == 0 and bench.result()["outcome"] == "ok", ran.err


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.DistBackendError('NCCL error: unhandled system error')",
        "RuntimeError('s3 read failed: Connection reset by peer')",
    ],
)
def test_a_rank_asked_to_end_is_never_the_cause(error: str, bench: Bench) -> None:
    ran = bench.train(f"{ON_RANK_1} raise {error}", "launch.nproc=2")
    assert ran.code == 5 and bench.result()["failure"]["rank"] == 1, ran.err


def start_training(bench: Bench) -> Any:
    words = ["train", bench.job("time.sleep(0.1)"), *SMALL, "train.steps=60", "launch.nproc=2"]
    process = bench.start(*words, "--out", "run")
    log = bench.folder / "run/training.csv"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, 60, "training")
    return process


def test_a_signal_to_the_whole_group_dumps_stacks_and_the_run_goes_on(bench: Bench) -> None:
    process = start_training(bench)
    os.killpg(process.pid, signal.SIGUSR1)
    ran = finish(process)
    assert ran.code == 0, ran.err
    assert "in loss" in (bench.folder / "run/ranks/rank1/stacks.txt").read_text()


def test_term_to_the_whole_group_stops_ranks_in_order(bench: Bench) -> None:
    process = start_training(bench)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process).code == 75
    end = json.loads((bench.folder / "run/ranks/rank1/end.json").read_text())
    assert end["exit_code"] == 0 and end["asked_to_end"]


def test_check_names_a_rank_that_hangs(bench: Bench) -> None:
    words = ["check", "launch.nproc=2", "launch.device=cpu", "launch.total_s=4", "--out", "run"]
    process = bench.start(*words)
    log = bench.folder / "run/launcher.log"
    wait_until(lambda: log.is_file() and "rank 1 is process" in log.read_text(), 60, "both ranks")
    os.kill(bench.ranks()[1], signal.SIGSTOP)
    ran = finish(process)
    assert ran.code == 3 and "it took longer than 4 s" in ran.out, ran.err
    assert "rank 1" in ran.out and "stopped by a signal" in ran.out


@pytest.mark.parametrize("target", ["supervisor", "rank"])
def test_sigusr1_dumps_stacks_and_the_run_goes_on(target: str, bench: Bench) -> None:
    wait = "while not os.path.exists('go'): open(f'waits{os.getpid()}', 'w'); time.sleep(0.02)"
    process = bench.start("train", bench.job(wait), *SMALL, "launch.nproc=2", "--out", "run")
    wait_until(lambda: len(list(bench.folder.glob("waits*"))) == 2, 60, "both ranks in their loss")
    stacks = [bench.folder / f"run/ranks/rank{rank}/stacks.txt" for rank in (0, 1)]
    asked = (0, 1) if target == "supervisor" else (1,)

    os.kill(process.pid if target == "supervisor" else bench.ranks()[1], signal.SIGUSR1)
    wait_until(lambda: all("in loss" in stacks[rank].read_text() for rank in asked), 60, "stacks")
    (bench.folder / "go").touch()
    ran = finish(process)
    assert ran.code == 0, ran.err
    assert target == "supervisor" or "in loss" not in stacks[0].read_text()


# F46: names, secrets


def test_f46c_a_name_is_never_a_path_or_a_command(bench: Bench) -> None:
    name = "$(touch x); ../../etc\n<script>alert(1)</script>"
    job = bench.job("pass")
    ran = finish(bench.start("train", job, *SMALL, "launch.nproc=2", f"name='{name}'"))
    assert ran.code == 0, ran.err
    assert not (bench.folder / "x").exists()
    (made,) = [path for path in (bench.folder / "runs").iterdir() if not path.is_symlink()]
    assert "<script>alert(1)" not in (made / "report.html").read_text()


def test_f46e_secrets_stay_out_of_every_file(bench: Bench) -> None:
    secrets = {"HF_TOKEN": "hf_planted", "AWS_SECRET_ACCESS_KEY": "aws_planted"}
    ran = bench.train("raise ValueError('x')", "launch.nproc=2", **secrets)
    assert ran.code == 5
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    text = "".join(path.read_text(errors="replace") for path in files) + ran.out + ran.err
    assert not any(value in text for value in secrets.values())
    shutil.rmtree(bench.folder / "run")
    refused = bench.train("pass", "launch.env.HF_TOKEN=hf_typed")
    assert refused.code == 2 and "looks like a secret" in refused.err
