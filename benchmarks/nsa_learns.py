"""Does native sparse attention learn? Text at 2k tokens against dense, a needle at 8k, and copying.

    python benchmarks/nsa_learns.py text [--steps 1600] [--seq-len 2048] [--rates 5e-4,1e-3]
    python benchmarks/nsa_learns.py needle --sizes 32,16,64,16,64 --steps 3000 --rate 1e-3
    python benchmarks/nsa_learns.py copy --sizes 8,4,16,8,64 --steps 200 --rate 3e-3 --batch 16

text     a byte-level lm on Python's own sources and those of what is installed, once with nsa and
         once dense: same data in the same order, same steps, same weights where they have the same
         name; no byte twice in 1,600 steps. Each trains at every rate of --rates, for what suits
         one may not suit the other, and what is compared is the better loss on files that neither
         has seen: nsa at most 1 % above. --seed draws other weights and another order.
needle   one token of 64 kinds is hidden in noise in the first half; at places in the second half,
         farther away than the windows of all layers together reach, the model is asked for it. It
         learns that on short rows first, half of the steps at a sixteenth of the length: among
         8,192 tokens a needle is too faint to be found by chance. What counts is the whole length.
copy     rows whose second half repeats the first, of random tokens: after how many steps the loss
         of the second half is under 1, with nsa and dense. Two layers of 64; minutes on a CPU.
"""

import argparse
import random
import sysconfig
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.attention.nsa import Settings
from paceline.attention.sizes import Sizes
from paceline.strategies.weights import fill_weights
from paceline.workloads.lm.model import LM
from paceline.workloads.lm.nsa import Sparse, SparseLM
from paceline.workloads.lm.workload import LMModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOISE, KINDS, ASK = 128, 64, 300  # tokens below NOISE are noise; KINDS from there on are needles
SHORTER = (16, 8, 4, 2, 1)  # the needle's rows, one after the other
EVERY = 50
CORPUS_BYTES = 64_000_000


def build(config: LMModel, seq_len: int, sizes: Sizes | None, seed: int = 0) -> LM:
    """Return a model with sparse attention, or with dense. Weights follow from seed and name."""
    with torch.device("meta"):
        if sizes is None:
            model = LM(config, seq_len)
        else:
            model = SparseLM(config, seq_len, Sparse(Settings(sizes), "mlp", stats=True))
    fill_weights(model, model.init_module, seed, DEVICE)
    return model


def rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1.0, (step + 1) / 40) * max(0.05, 1 - step / steps)


def train(model: LM, losses: Iterator[Tensor], steps: int, peak: float, name: str) -> list[Tensor]:
    """Take steps on what `losses` yields, and say how it goes. Returns the losses."""
    seen = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss = next(losses)
        seen.append(loss.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            spent = time.perf_counter() - began
            print(f"{name} step {step + 1}: loss {loss.item():.4f}, {spent:.1f} s", flush=True)
    return seen


def corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes of installed Python sources, for training and for validation."""
    paths = sysconfig.get_paths()
    files = {path for root in ("stdlib", "purelib") for path in Path(paths[root]).rglob("*.py")}
    order = sorted(files)
    random.Random(0).shuffle(order)
    texts = [path.read_bytes() for path in order if path.is_file()]
    whole = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)[:CORPUS_BYTES]
    print(f"text: {len(whole) / 1e6:.0f} MB of sources", flush=True)
    return whole[len(whole) // 20 :].long(), whole[: len(whole) // 20].long()


def on_text(asked: argparse.Namespace, sizes: Sizes) -> None:
    steps, seq_len, batch = asked.steps, asked.seq_len or 2048, asked.batch
    data, val = (x.to(DEVICE) for x in corpus())
    config = LMModel(vocab_size=320, dim=512, num_layers=6, num_heads=8, num_kv_heads=2)
    found: dict[str, float] = {}
    arms = [("dense", None), ("nsa", sizes)]
    for name, of in [arm for arm in arms if asked.only in ("", arm[0])]:
        for peak in map(float, asked.rates.split(",")):
            model = build(config, seq_len, of, asked.seed)
            losses = on_rows(model, data, seq_len, batch, asked.seed)
            train(model, losses, steps, peak, f"text, {name}, rate {peak:g}")
            loss = judge_text(model, val, seq_len, batch)
            found[name] = min(loss, found.get(name, loss))
            print(
                f"text, {name}, rate {peak:g}: validation loss {loss:.4f} nats a byte", flush=True
            )
    if len(found) < 2:
        return
    apart = found["nsa"] / found["dense"] - 1
    verdict = "within 1 %" if apart <= 0.01 else "NOT within 1 %"
    print(f"text: nsa is {apart:+.2%} from dense after {steps} steps, each at its rate: {verdict}")


def on_rows(model: LM, data: Tensor, seq_len: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the losses of batches of rows, in an order that the seed draws."""
    draw = torch.Generator().manual_seed(1 + seed)
    rows = torch.randperm(len(data) // seq_len - 1, generator=draw) * seq_len
    for starts in cycle(rows.split(batch)):
        yield loss_of(model, data, starts, seq_len)


@torch.no_grad()
def judge_text(model: LM, val: Tensor, seq_len: int, batch: int) -> float:
    """Return the mean loss on the first rows of a text."""
    model.eval()
    starts = torch.arange(0, len(val) - seq_len - 1, seq_len)[: 8 * batch]
    parts = [loss_of(model, val, part, seq_len).item() for part in starts.split(batch)]
    return sum(parts) / len(parts)


def loss_of(model: LM, data: Tensor, starts: Tensor, seq_len: int) -> Tensor:
    """Return the mean loss of rows of the text that begin at `starts`."""
    at = starts.to(DEVICE)[:, None] + torch.arange(seq_len + 1, device=DEVICE)
    rows = data[at]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()


def hide(batch: int, seq_len: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise with a needle in each row (B, T), where it is asked for (A), and which it is."""
    tokens = torch.randint(NOISE, (batch, seq_len), generator=draw)
    answer = torch.randint(KINDS, (batch,), generator=draw)
    place = torch.randint(seq_len // 2, (batch,), generator=draw)
    tokens[torch.arange(batch), place] = NOISE + answer
    asked = torch.arange(seq_len * 7 // 8, seq_len, seq_len // 256)
    tokens[:, asked] = ASK
    return tokens.to(DEVICE), asked.to(DEVICE), answer.to(DEVICE)


def on_needle(steps: int, seq_len: int, batch: int, sizes: Sizes, peak: float) -> None:
    config = LMModel(vocab_size=320, dim=256, num_layers=2, num_heads=4, num_kv_heads=1)
    reach, apart = config.num_layers * (sizes.w - 1), seq_len * 3 // 8
    assert reach < apart, "windows must not reach the needle"
    print(f"needle: at least {apart} tokens away; all windows together reach {reach}")
    model = build(config, seq_len, sizes)
    draw = torch.Generator().manual_seed(2)

    def answers(length: int) -> tuple[Tensor, Tensor]:
        tokens, asked, answer = hide(batch * seq_len // length, length, draw)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(tokens)[:, asked, NOISE : NOISE + KINDS].float()
        return logits, answer[:, None].expand(-1, len(asked))

    def losses() -> Iterator[Tensor]:
        half = steps // 2
        for step in range(steps):
            stage = max(0, 1 + (step - half) * (len(SHORTER) - 1) // (steps - half))
            logits, answer = answers(seq_len // SHORTER[stage])
            yield F.cross_entropy(logits.flatten(0, 1), answer.flatten())

    train(model, losses(), steps, peak, "needle")
    with torch.no_grad():
        pairs = [answers(seq_len) for _ in range(16)]
    right = [(x.argmax(-1) == y).float().mean().item() for x, y in pairs]
    share = sum(right) / len(right)
    verdict = "solved" if share > 0.99 else "NOT solved"
    chance = f"{KINDS} kinds, chance {1 / KINDS:.1%}"
    print(f"needle at {seq_len}: {share:.1%} right ({chance}): {verdict}")


def on_copy(steps: int, seq_len: int, batch: int, sizes: Sizes, peak: float) -> None:
    config = LMModel(vocab_size=64, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128)
    half = seq_len // 2
    for name, of in (("dense", None), ("nsa", sizes)):
        model = build(config, seq_len, of)

        def losses(model: LM = model) -> Iterator[Tensor]:
            draw = torch.Generator().manual_seed(1)
            while True:
                once = torch.randint(64, (batch, half + 1), generator=draw).to(DEVICE)
                rows = torch.cat([once, once], dim=1)[:, : seq_len + 1]
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                    logits = model(rows[:, :-1])[:, half + 8 :].float()
                yield F.cross_entropy(logits.flatten(0, 1), rows[:, half + 9 :].flatten())

        seen = torch.stack(train(model, losses(), steps, peak, f"copy, {name}"))
        under = (seen < 1).nonzero().flatten().tolist()
        print(
            f"copy, {name}: a loss under 1 after {under[0] + 1 if under else 'no number of'} steps"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("text", "needle", "copy"))
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--rates", default="5e-4,1e-3", help="of text")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("dense", "nsa"), default="")
    parser.add_argument("--sizes", default="32,16,64,16,512", help="l,d,l_sel,n_sel,w")
    asked = parser.parse_args()
    sizes = Sizes(*map(int, asked.sizes.split(",")))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, sizes {sizes}", flush=True)
    torch.set_float32_matmul_precision("high")
    if asked.part == "text":
        on_text(asked, sizes)
    elif asked.part == "copy":
        on_copy(asked.steps, asked.seq_len or 256, asked.batch, sizes, asked.rate)
    else:
        on_needle(asked.steps, asked.seq_len or 8192, asked.batch, sizes, asked.rate)


if __name__ == "__main__":
    main()
