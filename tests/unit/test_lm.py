"""The language model: FLOPs as torch counts them, attention that looks back only."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.strategies.weights import fill_weights
from paceline.workloads.lm.model import LM, flops_per_token
from paceline.workloads.lm.workload import LanguageModel, LMModel

SHAPES = {
    "plain": LMModel(dim=64, num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=320),
    "grouped, tied": LMModel(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, tied=True),
}
T = 32


def build(shape: LMModel) -> LM:
    with torch.device("meta"):
        model = LM(shape, T)
    fill_weights(model, model.init_module, 0, torch.device("cpu"))
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_flops_agree_with_torch(name: str) -> None:
    shape = SHAPES[name]
    model, tokens = build(shape), torch.randint(320, (1, T))
    # torch counts attention only where it is spelt out as products, over the full square.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(tokens)
        forward = counter.get_total_flops()
        logits.sum().backward()
    whole = flops_per_token(shape, T, causal=False) * T
    assert whole / 3 == forward
    assert whole == counter.get_total_flops()


def test_causal_attention_counts_half() -> None:
    shape = SHAPES["plain"]
    whole, half = (flops_per_token(shape, T, causal=causal) for causal in (False, True))
    assert whole - half == 6 * shape.num_layers * shape.dim * T


@pytest.mark.parametrize("name", SHAPES)
def test_the_future_is_not_seen(name: str) -> None:
    model, tokens = build(SHAPES[name]), torch.randint(320, (1, T))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 320
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_positions_matter() -> None:
    model = build(SHAPES["plain"])
    same = torch.full((1, T), 5)
    other = same.clone()
    other[0, 3] = 9
    logits = model(other)
    assert not torch.allclose(logits[0, 10], logits[0, 25], atol=1e-6)


def test_init_fills_everything() -> None:
    model = build(SHAPES["grouped, tied"])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.isfinite(tensor).all() and tensor.abs().sum() > 0, name
    logits = model(torch.randint(320, (4, T)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(320, (4 * T,)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(320.0)).item(), rel=0.1)


def test_a_tied_head_is_the_embedding_through_training() -> None:
    tied = build(SHAPES["grouped, tied"])
    untied = build(SHAPES["plain"])
    assert "tail.head.weight" in dict(untied.named_parameters())
    assert "tail.head.weight" not in dict(tied.named_parameters())
    tokens = torch.randint(320, (2, T))
    before = tied(tokens)
    with torch.no_grad():
        tied.embedding.weight.mul_(2)
    # Twice the rows of the head and of the embedding: the logits change by more than the input's.
    assert not torch.allclose(before, tied(tokens))


def test_targets_are_shifted_once() -> None:
    """A model that always predicts its own input + 1 has no loss on counting tokens."""

    def oracle(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(tokens + 1, 320).float() * 100
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )

    counting = torch.arange(T + 1).unsqueeze(0)
    loss, count = LanguageModel().loss(oracle, {"tokens": counting})  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(0.0, abs=1e-4) and count == T


@pytest.mark.slow
def test_a_sketch_does_not_load_the_compiler() -> None:
    """torch would draw its numbers by way of torch._dynamo, and every supervisor makes a sketch."""
    program = (
        "import sys; from paceline.job import load_job;"
        "from paceline.plan.planner import sketch_model;"
        "job = load_job('lm_tiny', []); sketch_model(job.workload, job.config);"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
