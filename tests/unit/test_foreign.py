"""Files of other trainers, real ones kept under tests/data/foreign, become a run that is judged.

deepspeed.log is written by hand, in the formats of DeepSpeed 0.19's timer.py and engine.py."""

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest

from paceline.diagnose.flow import diagnose
from paceline.errors import DataError
from paceline.foreign.flight import find_waiting
from paceline.foreign.flow import import_run
from paceline.foreign.pickles import read_plain_pickle
from paceline.records.imported import Imported
from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps, read_training

LONG = b"9" * 5000
EVENT = b'[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "pid": [1]}, %s]'
STEPS = b'{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%s", "ts": 1, "dur": 2}'
FILES = Path(__file__).parents[1] / "data" / "foreign"


def imported(tmp_path: Path, *names: str) -> tuple[RunDir, Imported]:
    return import_run([FILES / name for name in names], tmp_path / "theirs")


def test_hf_trainer(tmp_path: Path) -> None:
    run, found = imported(tmp_path, "hf_trainer.log")
    rows = read_training(run.training)
    assert found.trainer == "hf trainer" and found.last_step == 60
    assert rows.column("step").tolist() == [10, 20, 30, 40, 50, 60], "the bar below has the step"
    assert rows.column("loss").tolist()[-1] == 4.168
    assert rows.known("val_loss").column("step").tolist() == [30, 60]


def test_lightning(tmp_path: Path) -> None:
    run, found = imported(tmp_path, "metrics.csv")
    rows = read_training(run.training)
    assert found.trainer == "lightning" and rows.column("step").tolist()[:2] == [10, 20]
    log = tmp_path / "bar.log"
    log.write_text(
        "Epoch 1:  50%|#####     | 50/100 [00:05<00:05,  9.80it/s, v_num=0, train_loss=0.123]\r"
        "Epoch 1/1  ━━━━━━━━ 64/100 0:00:00 • 0:00:00 50.00it/s v_num: 0.000 train_loss: 0.003\n"
    )
    run, found = import_run([log], tmp_path / "bar")
    rows = read_training(run.training)
    assert rows.column("step").tolist() == [150, 164] and found.trainer == "lightning"
    assert rows.column("loss").tolist() == [0.123, 0.003] and rows.column("step_s")[1] == 0.02


def test_deepspeed(tmp_path: Path) -> None:
    run, found = imported(tmp_path, "deepspeed.log")
    steps = read_steps(run.steps(0))
    assert found.trainer == "deepspeed" and found.notes, "it logs no loss"
    assert not run.training.exists()
    assert steps[0].phases_s["forward"] == pytest.approx(0.01025)
    assert steps[0].phases_s["backward"] == pytest.approx(0.0205)
    assert len(steps) == 5


def test_torchrun_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    run, found = imported(tmp_path, "torchrun.log")
    assert found.trainer == "torchrun" and found.num_ranks == 2
    (finding,) = [f for f in diagnose(run.root).findings if f.severity == "error"]
    assert (finding.kind, finding.rank) == ("crash", 1)
    assert "RuntimeError: the disk of this rank is gone" in finding.words
    rows = read_training(run.training)
    assert rows.column("step").tolist() == [5, 10, 15, 20]
    assert rows.column("tokens_per_s").tolist() == [900] * 4


LOG = {
    "out_of_memory": "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "hang": "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=35, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran"
    " for 600029 milliseconds before timing out.",
    "killed": "[rank2]: Signal 9 (SIGKILL) received by PID 4711",
}


@pytest.mark.parametrize(("kind", "rank"), [("out_of_memory", 3), ("hang", 0), ("killed", 2)])
def test_what_logs_say_of_failures(tmp_path: Path, kind: str, rank: int) -> None:
    log = tmp_path / "slurm-1.out"
    log.write_text(f"step 100 | loss 2.5 | lr 1e-4\n{LOG[kind]}\n")
    run, _ = import_run([log], tmp_path / "theirs")
    (finding,) = [f for f in diagnose(run.root).findings if f.severity == "error"]
    assert (finding.kind, finding.rank, finding.step) == (kind, rank, 100)


def test_a_log_with_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {s} loss {'nan' if s > 30 else 2.0}\n" for s in range(1, 41)))
    run, _ = import_run([log], tmp_path / "theirs")
    assert "nan_loss" in {f.kind for f in diagnose(run.root).findings}


def test_hf_trainer_writes_nan_as_a_bare_word(tmp_path: Path) -> None:
    """Which is no literal of Python; transformers 5 writes all numbers as texts."""
    log = tmp_path / "train.log"
    losses = enumerate(["2.31", "nan", "'2.2'", "-inf", "0.0"], start=1)
    log.write_text(
        "".join(
            f"{{'loss': {loss}, 'grad_norm': {'nan' if n == 5 else 1.5}, 'epoch': 0.{n}}}\n"
            f" 1%| | {n}0/90 [00:05<08:15]\n"
            for n, loss in losses
        )
    )
    run, _ = import_run([log], tmp_path / "theirs")
    rows = read_training(run.training)
    assert rows.column("step").tolist() == [10, 20, 30, 40, 50] and rows.column("loss")[2] == 2.2
    (finding,) = [f for f in diagnose(run.root).findings if f.kind == "nan_loss"]
    assert finding.step == 20 and "updates were left out" not in finding.words, "who knows?"
    assert finding.severity == "error" and "in 3 steps" in finding.words, "by its gradient at last"


def test_lines_belong_to_the_step_of_their_own_log(tmp_path: Path) -> None:
    """A line of times has no step; the log before it may have ended far ahead. With all of them a
    slow rank of DeepSpeed is named."""
    for rank in (0, 1):
        times = f"fwd: {60 + 40 * rank}.00 | bwd: 120.00 | step: 5.00"
        lines = (
            f"[Rank {rank}] step={step}, skipped=0, lr=[0.1], mom=[0.9]\n"
            f"[Rank {rank}] time (ms) | {times}\n"
            for step in range(1, 41)
        )
        (tmp_path / f"rank{rank}.log").write_text("".join(lines))
    run, found = import_run([tmp_path / "rank0.log", tmp_path / "rank1.log"], tmp_path / "theirs")
    assert [len(read_steps(run.steps(rank))) for rank in (0, 1)] == [40, 40]
    assert found.last_step == 40
    (slow,) = [f for f in diagnose(run.root).findings if f.kind == "straggler"]
    assert slow.rank == 1 and slow.evidence["part"] == "forward"


def test_a_log_without_phases_has_no_verdict_about_them(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "".join(
            f"step {s:05d}/02000 ({s / 20:.2f}%) | loss: 2.5 | dt: 120ms | tok/sec: 52,341\n"
            f"Epoch 0: 10%|# | {s}/100 [00:05<00:05,  9.80it/s, v_num=0, train_loss=2.5]\n"
            for s in range(1, 41)
        )
    )
    run, _ = import_run([log], tmp_path / "theirs")
    assert read_training(run.training).column("tokens_per_s")[0] == 52341
    assert diagnose(run.root).findings == []


def test_files_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    with pytest.raises(DataError, match="nothing was found that tells of a run"):
        import_run([tmp_path / "notes.txt"], tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
    with pytest.raises(DataError, match="does not exist"):
        import_run([tmp_path / "absent"], None)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("scalar.json", b"5"),
        ("text.json", b'"text"'),
        ("state.json", b'{"log_history": [{"step": 3, "loss": %s}]}' % (b"9" * 400)),
        ("dump.json", b'{"entries": [{"collective_seq_id": "x", "process_group": 5}]}'),
        ("table.csv", b'"' + b"a" * 200_000),
        ("table.csv", b"step,train_loss\n%s,1\n" % LONG),
        ("digits.log", b"step %s loss 3\n" % LONG),
        ("rank.log", b"[rank %s]: ValueError: x\n" % LONG),
        ("bar.log", b"%s/%s [00:00<00:00, 3it/s]\n" % (LONG, LONG)),
        ("date.log", b"9999-99-99 99:99:99 step 8 loss 2\n"),
        ("step.log", b"step 99999999999999999999 loss 3\n"),
        ("loss.csv", b"step,train_loss\n7,1e300\n"),
        ("long.log", b"9" * (1 << 20)),
        ("far.log", b"[rank99999999]: ValueError: x\n"),
        ("time.log", b"TimingRank step=2 rank=99999999 loss=1 fwd=1e308 iter=nan\n"),
        ("dump.json", b'{"rank": 99999999, "entries": []}'),
        ("nccl_trace_rank_99999999.json", b'{"entries": []}'),
        ("trace.json.gz", gzip.compress(b"[1, 2, 3, 4, 5]" * 9, mtime=0)[:10] + b"\xff" * 40),
        ("trace.json", EVENT % b'{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1e999}'),
        ("trace.json", EVENT % b'{"ph": "X", "cat": "cpu_op", "ts": %s}' % (b"9" * 400)),
        ("trace.json", EVENT % STEPS % LONG),
        ("trace.json", EVENT % STEPS % "²".encode()),
        ("nccl_trace_rank_0", pickle.dumps({"entries": [], (1, 2): 3}, 2)),
    ],
)
def test_what_nobody_wrote_costs_no_other_file(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "sound.log").write_text("step 1 loss 2.5\nstep 2 loss 2.25\n")
    run, found = import_run([tmp_path / name, tmp_path / "sound.log"], tmp_path / "theirs")
    assert found.last_step in (2, 8) and read_training(run.training).column("loss")[0] == 2.5
    assert found.num_ranks == 1, "what no run has is no rank"
    diagnose(run.root)


def test_a_pickle_that_holds_itself_or_grows_as_it_is_written_out(tmp_path: Path) -> None:
    loop: dict[str, object] = {"entries": []}
    loop["entries"] = [loop]
    bomb: object = "x"
    for _ in range(40):
        bomb = [bomb, bomb]  # 2**40 texts once it is JSON
    for plain, says in ((loop, "it holds itself"), ({"entries": bomb}, "too many parts")):
        with pytest.raises(DataError, match=says):
            read_plain_pickle(pickle.dumps(plain, 2), "dump")


def test_a_pickle_is_read_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    real = read_plain_pickle((FILES / "nccl_trace_rank_0").read_bytes(), "dump")
    assert [entry["collective_seq_id"] for entry in real["entries"]] == [1, 2, 3, 4]
    for protocol in range(2, 6):
        plain = {"entries": [{"a": (1, 2.5, None, True)}, "x" * 300], "n": -(2**70)}
        assert read_plain_pickle(pickle.dumps(plain, protocol), "dump") == plain
        with pytest.raises(DataError, match="does more than build plain values"):
            read_plain_pickle(pickle.dumps({"entries": [Evil()]}, protocol), "dump")
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(DataError):
        read_plain_pickle(pickle.dumps({"a": 1})[:-3], "dump")


def dump(last: int, open_from: int, name: str = "nccl:all_reduce") -> dict[str, object]:
    return {
        "entries": [
            {
                "process_group": ["0", "default_pg"], "collective_seq_id": n, "is_p2p": False,
                "profiling_name": name, "input_sizes": [[1000]],
                "state": "started" if n >= open_from else "completed",
            }
            for n in range(1, last + 1)
        ]
    }  # fmt: skip


def test_dumps_that_have_gaps_or_no_entries() -> None:
    ahead = {"entries": [{"collective_seq_id": 9, "state": "started"}]}
    (finding,) = find_waiting({0: dump(2, 3) | {"entries": [{"collective_seq_id": 2}]}, 1: ahead})
    assert finding.rank == 0 and "(collective 9 of group ?)" in finding.words
    assert not list(find_waiting({0: {}, 1: {"entries": 5}}))


def test_the_rank_that_never_came_to_a_collective_is_named(tmp_path: Path) -> None:
    dumps = {0: dump(42, 42), 1: dump(42, 42), 2: dump(41, 99), 3: dump(42, 42)}
    (finding,) = find_waiting(dumps)
    assert (finding.kind, finding.rank) == ("hang", 2)
    assert finding.words == (
        "rank 2 never came to nccl:all_reduce of [[1000]] (collective 42 of group 0): ranks 0, 1, 3"
        " wait there; its own last one was nccl:all_reduce of [[1000]]"
    )
    assert not list(find_waiting({0: dump(42, 99), 1: dump(42, 99)})), "all is done"
    for rank, body in dumps.items():
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(body))
    run, found = import_run([tmp_path], tmp_path / "theirs")
    assert found.num_ranks == 4
    assert [f.rank for f in diagnose(run.root).findings if f.kind == "hang"] == [2]
