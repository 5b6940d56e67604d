"""Does contrastive speech training learn? Retrieval on sentences that were held out.

    OMP_NUM_THREADS=1 python benchmarks/speech_retrieval.py --corpus DIR [--steps N] [--out DIR]

DIR is what `scripts/make_speech_corpus --out DIR --utterances 2400 --speakers 12` has made. It is
prepared (8 kHz, trimmed), and a small wav2vec2 is trained on it from random weights, on CPU, by the
workload speech_clip: a text encoder with random weights that stays as it is, words as tokens. The
figure is recall@1 over all of dev-clean, whose sentences and whose speaker are in no other split;
chance is one in its number of utterances. Goal: at least 10 times chance, both ways.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATE = 8000
# 40 ms to a frame: a layer that hears sound as a bank of filters does, and two that sum it up.
MODEL = [
    "model.speech_config={hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 4,"
    " intermediate_size: 256, conv_dim: [64, 128, 128], conv_kernel: [80, 8, 4],"
    " conv_stride: [40, 4, 2],"
    " num_conv_pos_embeddings: 16, num_conv_pos_embedding_groups: 8, feat_extract_norm: layer,"
    " do_stable_layer_norm: true, hidden_dropout: 0.0, attention_dropout: 0.0,"
    " feat_proj_dropout: 0.0, activation_dropout: 0.0}",
    # Wide enough weights that its first token hears of all the words.
    "model.text_config={hidden_size: 128, num_hidden_layers: 1, num_attention_heads: 8,"
    " intermediate_size: 128, max_position_embeddings: 64, vocab_size: 256,"
    " initializer_range: 0.14}",
    "model.projection_dim=128", "model.dropout=0.0",
]  # fmt: skip
TRAINING = [
    "data.cut_max_s=off", f"data.sample_rate={RATE}", "data.eval_cut_s=off", "data.buckets=8",
    "train.micro_batch_size=32", "optim.lr=2e-3", "optim.beta1=0.9",
    "optim.schedule.warmup_steps=30", "train.log_every=10", "precision.mode=fp32",
    "strategy.name=ddp", "launch.device=cpu",
    "checkpoint.every=off", "checkpoint.at_end=false",
]  # fmt: skip


def main() -> int:
    asked = parse()
    with tempfile.TemporaryDirectory() as scratch:
        out = asked.out or Path(scratch)
        started = time.monotonic()
        root = prepare(asked.corpus, out / "speech_8k")
        words = save_words(root, out / "words.json")
        print(f"prepared in {time.monotonic() - started:.0f} s, {words} words")
        started = time.monotonic()
        run = train(asked, root, out)
        return tell(run, root, time.monotonic() - started)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--out", type=Path, help="keep what is made here")
    parser.add_argument("overrides", nargs="*", help="keys of the run, as train.seed=1")
    return parser.parse_args()


def prepare(corpus: Path, root: Path) -> Path:
    command = [sys.executable, "-m", "paceline", "prepare", "speech", "--input-root", str(corpus)]
    more = ["--output-root", str(root), "--target-sr", str(RATE), "--trim"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return root


def save_words(root: Path, path: Path) -> int:
    """Write a tokenizer of the words in the training split, [CLS] before and [SEP] after a text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    from paceline.data.manifest import read_manifest

    rows = read_manifest(root / "manifest.tsv", RATE, ["train*"])
    words = sorted({word for row in rows for word in row.transcript.lower().split()})
    ids = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    made.save(str(path))
    return len(words)


def train(asked: argparse.Namespace, root: Path, out: Path) -> Path:
    run = out / f"run-{int(time.time())}"
    keys = [f"data.root_dir={root}", f"data.tokenizer={out / 'words.json'}"]
    steps = [f"train.steps={asked.steps}", f"train.eval_every={max(1, asked.steps // 6)}"]
    command = [sys.executable, "-m", "paceline", "train", "limit_longest_1-3_stage1_bf16"]
    subprocess.run(
        [*command, *MODEL, *TRAINING, *keys, *steps, *asked.overrides, "--out", str(run)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return run


def tell(run: Path, root: Path, wall_s: float) -> int:
    import csv

    prepared = json.loads((run / "data.json").read_text())
    chance = 1 / prepared["val_utterances"]
    with (run / "training.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/recall@1"]]
    ways = ("speech_to_text", "text_to_speech")
    print(f"{prepared['train_utterances']} utterances to train on, {round(1 / chance)} held out")
    print("step   val/loss  " + "  ".join(f"{way}@1  @5    " for way in ways))
    for row in rows:
        recalls = [f"{float(row[f'val/{way}/recall@{k}']):6.1%}" for way in ways for k in (1, 5)]
        print(f"{row['step']:>5}  {float(row['val_loss']):8.3f}  {'      '.join(recalls)}")
    times = [float(rows[-1][f"val/{way}/recall@1"]) / chance for way in ways]
    print(f"recall@1 is {times[0]:.1f} and {times[1]:.1f} times chance ({chance:.2%}) after")
    print(f"{rows[-1]['step']} steps, {wall_s:.0f} s from start to end, on CPU")
    is_good = min(times) >= 10
    print("goal: 10 times chance both ways: " + ("met" if is_good else "not met"))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
