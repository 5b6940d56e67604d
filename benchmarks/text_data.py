"""Text and token shards against the bare libraries, in turns on one machine: ratios of speeds.

    python benchmarks/text_data.py > benchmarks/results/text_data.txt

- Tokenising: what `paceline prepare text` does, from JSONL rows to shards on disk, against a batch
  call of `tokenizers` over the same texts in memory, which keeps nothing; both on all cores.
- Loading: our samples in the order of a run against a loop that cuts random rows out of one memmap,
  and against `datasets` streaming the same ids from parquet, and text that is tokenised on the way.

Each figure is the median of the ratios of neighbouring turns, with their range. Tokenising keeps
all cores busy in both, so it is compared by CPU time too, which others on the machine disturb less.
"""

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from paceline.data.base import Dataset, TextData
from paceline.data.buckets import open_picks
from paceline.data.shards import MANIFEST
from paceline.data.text import build_tokens, find_source, open_tokens
from paceline.data.tokenizer import Tokenizer, parse_definition
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.prepare.text import train_bpe
from paceline.train.feed import TrainData, open_source

CORES = len(os.sched_getaffinity(0))
ROUNDS, LOADED = 5, 400
SEQ_LEN, BATCH = 1024, 8
ROW_LETTERS = 3000  # as a page of FineWeb-Edu


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = read_texts()
        tokenizer = train_bpe(iter(texts), 8192)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        size = sum(len(text.encode()) for text in texts) / 1e6
        print(f"{CORES} cores, load {os.getloadavg()[0]:.2f}; {len(texts)} rows, {size:.1f} MB")
        tokenising(texts, rows, tokenizer, folder)
        loading(rows, tokenizer, folder)
        print(f"load at the end {os.getloadavg()[0]:.2f}")


def read_texts() -> list[str]:
    """Python's own sources, as rows of a few thousand letters."""
    source = find_source(TextData(source="stdlib", max_files=800))
    whole = "".join(file.path.read_text(errors="replace") for file in source.files)
    return [whole[n : n + ROW_LETTERS] for n in range(0, len(whole), ROW_LETTERS)]


def in_turns(name: str, runs: dict[str, Callable[[], float]], goals: dict[str, str]) -> None:
    """Run each once to warm up, then all in turns; each returns tokens/s, and the first is ours."""
    found: dict[str, list[float]] = {key: [] for key in runs}
    burnt: dict[str, list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for key, run in runs.items():
            before = cpu_s()
            found[key].append(run())
            burnt[key].append(cpu_s() - before)
    ours = next(iter(runs))
    print(f"\n{name}, {ROUNDS} turns")
    for key, speeds in found.items():
        print(f"  {key:<44} {statistics.median(speeds) / 1e6:8.3f} M tokens/s")
    for key, goal in goals.items():
        ratios = [a / b for a, b in zip(found[ours], found[key], strict=True)]
        print(f"  ours / {key:<37} {in_words(ratios)}; goal {goal}")
    for key in goals if name == "tokenising" else ():
        ratios = [b / a for a, b in zip(burnt[ours], burnt[key], strict=True)]
        print(f"  the same by CPU time, {key:<22} {in_words(ratios)}")


def in_words(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


def tokenising(texts: list[str], rows: Path, tokenizer: Tokenizer, folder: Path) -> None:
    library = parse_definition(tokenizer.definition, "bench")
    num_tokens = sum(len(item.ids) + 1 for item in library.encode_batch(texts))
    homes = iter(range(10_000))

    def ours() -> float:
        data = TextData(source=str(rows))
        begun = time.perf_counter()
        home = folder / f"shards{next(homes)}"
        build_tokens(home, data, find_source(data), tokenizer, lambda text: None)
        assert (home / MANIFEST).is_file()
        return num_tokens / (time.perf_counter() - begun)

    def bare(call: str, keeps: bool) -> float:
        begun = time.perf_counter()
        found = getattr(library, call)(texts)
        if keeps:
            np.concatenate([np.array(item.ids, dtype=np.uint16) for item in found])
        return num_tokens / (time.perf_counter() - begun)

    runs = {
        "ours, JSONL to shards": ours,
        "encode_batch": partial(bare, "encode_batch", False),
        "encode_batch_fast": partial(bare, "encode_batch_fast", False),
        "encode_batch_fast, ids to numpy": partial(bare, "encode_batch_fast", True),
    }
    others = dict.fromkeys(list(runs)[2:], "none")
    in_turns("tokenising", runs, {"encode_batch": "0.9", **others})


def loading(rows: Path, tokenizer: Tokenizer, folder: Path) -> None:
    data = TextData(source=str(rows), seq_len=SEQ_LEN, val_fraction=0.0)
    home = folder / "loaded"
    build_tokens(home, data, find_source(data), tokenizer, lambda text: None)
    opened = open_tokens(home, data, "train")
    assert opened is not None
    tokens = np.concatenate(opened.parts)
    (folder / "bare.bin").write_bytes(tokens.tobytes())
    write_parquet(folder / "ids.parquet", {"ids": np.array_split(tokens, len(tokens) // 700)})
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    write_parquet(folder / "text.parquet", {"text": texts})
    runs: dict[str, Callable[[], float]] = {
        "ours": partial(load_ours, opened),
        "memmap loop": partial(load_memmap, folder / "bare.bin"),
        "datasets streaming, ids": partial(load_ids, folder / "ids.parquet"),
        "datasets streaming, text": partial(load_text, folder / "text.parquet", tokenizer),
    }
    goals = {"memmap loop": "0.95", "datasets streaming, ids": "2", "datasets streaming, text": "2"}
    in_turns(f"loading batches of {BATCH} x {SEQ_LEN}", runs, goals)


def write_parquet(path: Path, columns: dict[str, object]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)


def load_ours(opened: Dataset) -> float:
    """Microbatches of a run on one rank, without loader processes, as in the other loops."""
    words = [f"train.micro_batch_size={BATCH}", f"data.seq_len={SEQ_LEN}", "launch.device=cpu"]
    job = load_job("lm_tiny", words)
    plan = make_plan(job, probe())
    picks = open_picks(job.config, plan.batch, opened)
    source = open_source(job, plan, TrainData(opened, picks), rank=0)
    begun = time.perf_counter()
    for number in range(LOADED):
        assert source[number].batch["tokens"].shape == (BATCH, SEQ_LEN + 1)
    return LOADED * BATCH * SEQ_LEN / (time.perf_counter() - begun)


def load_memmap(path: Path) -> float:
    """What a short script does: random places, one tensor per row, stacked."""
    generator = np.random.default_rng(0)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    begun = time.perf_counter()
    for _ in range(LOADED):
        places = generator.integers(len(tokens) - SEQ_LEN - 1, size=BATCH)
        rows = [torch.from_numpy(tokens[p : p + SEQ_LEN + 1].astype(np.int32)) for p in places]
        assert torch.stack(rows).shape == (BATCH, SEQ_LEN + 1)
    return LOADED * BATCH * SEQ_LEN / (time.perf_counter() - begun)


def load_ids(path: Path) -> float:
    import datasets

    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return pack(row["ids"] for row in rows)


def load_text(path: Path, tokenizer: Tokenizer) -> float:
    import datasets

    library = parse_definition(tokenizer.definition, "bench")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    encode = lambda batch: {"ids": [e.ids for e in library.encode_batch(batch["text"])]}  # noqa: E731
    return pack(row["ids"] for row in rows.map(encode, batched=True, remove_columns=["text"]))


def pack(documents: object) -> float:
    """Pack a stream of ids into batches; as many as it has, up to LOADED."""
    needed, held, num_batches = BATCH * SEQ_LEN, list[int](), 0
    begun = time.perf_counter()
    for ids in documents:  # type: ignore[attr-defined]
        held += ids
        while len(held) > needed and num_batches < LOADED:
            rows = [held[n * SEQ_LEN : (n + 1) * SEQ_LEN + 1] for n in range(BATCH)]
            assert torch.tensor(rows, dtype=torch.int32).shape == (BATCH, SEQ_LEN + 1)
            held, num_batches = held[needed:], num_batches + 1
        if num_batches >= LOADED:
            break
    return num_batches * needed / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
