"""Files of other trainers, as `paceline import` reads and `paceline diagnose` then judges them:
logs, metrics, states of a Trainer, dumps of a flight recorder (JSON and pickle), chrome traces."""

import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

from fuzzing.asked import paceline
from fuzzing.ground import Case, Content, Ground
from fuzzing.kept import change_file, flight_dump, read_run
from fuzzing.mutate import VALUES, as_bytes, change_bytes, change_text, change_tree, odd, to_json
from paceline.errors import DataError
from paceline.records import Env
from paceline.records.tables import read_steps, read_training

FILES = Path(__file__).parents[2] / "tests" / "data" / "foreign"
NUMBERS = (b"0", b"1", b"7", b"300", b"99999", b"2147483648", b"9" * 19, b"9" * 400, b"-1", b"nan")
BARS = (
    "Epoch 1:  50%|#####     | 50/100 [00:05<00:05,  9.80it/s, v_num=0, train_loss=0.123]\r"
    "Epoch 1/1  ━━━━━━━━ 64/100 0:00:00 • 0:00:00 50.00it/s v_num: 0.000 train_loss: 0.003\n"
)
FAULTS = (
    "2026-11-16 14:20:51,390 step 5/90 | loss 4.2 | lr 2e-4 | grad_norm 1.5 | toks/s 52,341\n"
    "TimingRank step=5 rank=1 loss=4.2 data_wait=0.41 fwd=12.1 bwd=20.3 step=3.1 iter=36.02\n"
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=35, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    "[rank2]: Signal 9 (SIGKILL) received by PID 4711\n"
)
STATE = {
    "global_step": 20,
    "log_history": [
        {"step": 10, "loss": 2.5, "grad_norm": 1.1, "learning_rate": 5e-5, "epoch": 0.1},
        {"step": 20, "loss": 2.25, "grad_norm": 0.9, "learning_rate": 4e-5, "epoch": 0.2},
        {"step": 20, "eval_loss": 2.4, "eval_runtime": 1.5, "epoch": 0.2},
    ],
}
# What a case imports: a file alone, or those of one run together.
GROUPS = (
    ("torchrun.log",), ("deepspeed.log",), ("hf_trainer.log",), ("bars.log",), ("faults.out",),
    ("metrics.csv",), ("plain.csv",), ("trainer_state.json",), ("trace.json",), ("trace.json.gz",),
    ("nccl_trace_rank_0", "nccl_trace_rank_1"), ("dump_rank0.json", "dump_rank1.json"),
    ("0/stderr.log", "1/stderr.log"), ("hf_trainer.log", "trace.json", "dump_rank0.json"),
)  # fmt: skip


class ForeignFiles:
    """What another trainer has left: imported, and what came of it diagnosed and watched."""

    name, refusals = "foreign", frozenset({1, 2, 4})  # 1: diagnose found an error in the run

    def __init__(self, root: Path, env: Env) -> None:
        self.ground = Ground(root, made=("out",))
        self.ground.add_folder(FILES)
        rows = [f"{step},{4 - step / 9:.3f},2e-4,900" for step in range(1, 9)]
        texts = {"bars.log": BARS, "faults.out": FAULTS, "plain.csv": "\n".join(rows) + "\n"}
        texts |= {f"{rank}/stderr.log": FAULTS.replace("4.2", str(rank)) for rank in (0, 1)}
        trees = {"trainer_state.json": STATE, "trace.json": _trace()}
        trees |= {f"dump_rank{rank}.json": flight_dump(rank) for rank in (0, 1)}
        for name, text in texts.items():
            self.ground.add(name, text.encode())
        for name, tree in trees.items():
            self.ground.add(name, json.dumps(tree).encode())
        on_host = [event for event in _trace()["traceEvents"] if event["cat"] != "kernel"]
        self.ground.add("trace.json.gz", gzip.compress(json.dumps(on_host).encode(), mtime=0))
        self.ground.add("nccl_trace_rank_1", pickle.dumps(flight_dump(1), protocol=2))

    def make(self, rng: random.Random) -> Case:
        names = rng.choice(GROUPS)
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice(names)
            self.ground.change(name, change_foreign(name, self.ground.valid[name], rng))
        out = self.ground.root / "out"
        words = ("import", *(str(self.ground.root / name) for name in names), "--out", str(out))
        return Case(("paceline", *words), lambda: self._import(words, out))

    def _import(self, words: tuple[str, ...], out: Path) -> None:
        try:
            paceline(*words)
        except SystemExit as left:
            if left.code:
                raise
        try:
            read_training(out / "training.csv")
            _ = [read_steps(steps) for steps in out.glob("ranks/*/steps.csv")]
        except DataError as error:
            raise AssertionError("a table that was written cannot be read") from error
        read_run(out)
        paceline("diagnose", str(out))


def change_foreign(name: str, raw: bytes, rng: random.Random) -> Content:
    """Change a file by what it is; what is packed or pickled mostly before it is packed again."""
    how = rng.random()
    if how < 0.15:
        return change_file("", raw, rng)
    if name.endswith(".gz"):
        return gzip.compress(_change_json(gzip.decompress(raw), rng), compresslevel=1)
    if name.startswith("nccl_trace"):
        return _pickled(pickle.loads(raw), rng)
    if name.endswith(".json"):
        return _change_json(raw, rng)
    return change_file(name, raw, rng) if name.endswith(".csv") else _change_log(raw, rng)


def _change_json(raw: bytes, rng: random.Random) -> bytes:
    return to_json(_changed(json.loads(raw), rng)) if rng.random() < 0.9 else change_text(raw, rng)


def _pickled(tree: Any, rng: random.Random) -> bytes:
    """Pickle a changed tree, or one that holds what JSON cannot: itself, bytes, odd keys."""
    how = rng.random()
    if how < 0.6:
        tree = _changed(tree, rng)
    elif how < 0.7:
        tree["entries"].append(rng.choice((tree, tree["entries"])))
    elif how < 0.85:
        inside = rng.choice((tree, tree["entries"][0]))
        inside[rng.choice(((1, 2), 7, None, b"\xff", 1.5, True, "\ud800"))] = b"\xff"
    else:
        return change_bytes(pickle.dumps(tree, protocol=2), rng)
    return pickle.dumps(tree, protocol=rng.choice((0, 2, 4)))


def _changed(tree: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = change_tree(tree, rng)
    return tree


def _change_log(raw: bytes, rng: random.Random) -> bytes:
    """Change the numbers of a log's lines: steps, ranks, times; or a line, or bytes."""
    if rng.random() < 0.4:
        return change_text(raw, rng)
    lines = raw.split(b"\n")
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(lines))
        pieces = _cut_numbers(lines[at])
        places = [place for place, piece in enumerate(pieces) if piece.isdigit()]
        if places:
            value = rng.choice((*NUMBERS, as_bytes(odd(rng)), as_bytes(rng.choice(VALUES))))
            pieces[rng.choice(places)] = value
            lines[at] = b"".join(pieces)
    return b"\n".join(lines)


def _cut_numbers(line: bytes) -> list[bytes]:
    """Cut a line into runs of digits and what stands between them."""
    pieces: list[bytes] = []
    for number in line:
        sign = bytes([number])
        if pieces and pieces[-1].isdigit() == sign.isdigit():
            pieces[-1] += sign
        else:
            pieces.append(sign)
    return pieces


def _trace() -> dict[str, Any]:
    """A trace of one step: compute, communication that it hides in part, and a late launch."""
    spans = [
        ("ProfilerStep#20", "user_annotation", 0, 1000, 1, 0),
        ("void cutlass_gemm<float>", "kernel", 0, 300, 7, 1),
        ("ncclDevKernel_AllReduce_Sum", "kernel", 200, 300, 9, 2),
        ("void at::native::vectorized_elementwise_kernel<4>", "kernel", 600, 200, 7, 3),
        ("cudaLaunchKernel", "cuda_runtime", 0, 5, 2, 1),
        ("cudaLaunchKernel", "cuda_runtime", 580, 5, 2, 3),
        ("aten::addmm", "cpu_op", 10, 80, 1, 0),
    ]
    events = [
        {"ph": "X", "name": name, "cat": kind, "ts": at, "dur": length, "pid": 0, "tid": lane,
         "args": {"correlation": number}}
        for name, kind, at, length, lane, number in spans
    ]  # fmt: skip
    return {"traceEvents": events, "distributedInfo": {"rank": 3, "world_size": 8}}
