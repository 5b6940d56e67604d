"""Tokens per second with the cache of keys and values, against computing all again for each token.

    python benchmarks/generate.py [--rounds 3] [--tokens 256] [--device cpu]

One model (26 M parameters on a CPU: 8 layers of width 512), one prompt of 32 tokens, the likeliest
token each time. Both ways take turns in one process, so that they meet the same neighbours; both
must write the same tokens. Goal: 5 times as many tokens per second for 256 new tokens.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time

import torch

from paceline.strategies.weights import fill_weights
from paceline.workloads.generation import Codec, Request, Sampling
from paceline.workloads.lm.model import LM, generate
from paceline.workloads.lm.workload import LMModel

GOAL, PROMPT = 5.0, 32
ANY = Codec(list, str, frozenset(), 320, "numbers")  # type: ignore[arg-type]


def build(num_tokens: int, device: torch.device) -> LM:
    config = LMModel(vocab_size=320, dim=512, num_layers=8, num_heads=8, num_kv_heads=8)
    with torch.device("meta"):
        model = LM(config, PROMPT + num_tokens)
    fill_weights(model, model.init_module, 0, device)
    return model.eval()


def run(model: LM, num_tokens: int, use_cache: bool) -> tuple[float, list[int]]:
    """Tokens per second, and the tokens."""
    sampling = Sampling(max_new_tokens=num_tokens, temperature=0)
    request = Request([list(range(PROMPT))], sampling, ANY, use_cache=use_cache)
    started_at = time.perf_counter()
    [row] = generate(model, request)
    return num_tokens / (time.perf_counter() - started_at), row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    model = build(asked.tokens, torch.device(asked.device))
    run(model, 8, True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    texts = []
    for _ in range(asked.rounds):
        for use_cache in (True, False):
            rate, row = run(model, asked.tokens, use_cache)
            rates[use_cache].append(rate)
            texts.append(row)
    is_same = all(row == texts[0] for row in texts)
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU, 1 thread"
    print(f"{asked.rounds} rounds of {asked.tokens} tokens, {where}, load {os.getloadavg()[0]:.1f}")
    for use_cache, name in ((True, "with the cache"), (False, "without")):
        found = rates[use_cache]
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name:16} {statistics.median(found):8.1f} tokens/s ({spread})")
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    ratio = statistics.median(ratios)
    verdict = "PASS" if ratio >= GOAL and is_same else "MISS"
    same = "yes" if is_same else "NO"
    print(f"ratio {ratio:.1f} (goal {GOAL:g}), the same tokens: {same}: {verdict}")


if __name__ == "__main__":
    main()
