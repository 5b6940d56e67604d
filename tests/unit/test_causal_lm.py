"""Models of transformers: shifted once, filled as transformers fills them, loaded by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.packing import split_rows
from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.run.flow import require_feasible
from paceline.strategies.precision import compute_context
from paceline.strategies.weights import fill_weights
from paceline.workloads.causal_lm.model import (
    ONLY_A_HEAD,
    build_causal_lm,
    flops_per_token,
    loss_sum,
)
from paceline.workloads.causal_lm.workload import CausalLM
from paceline.workloads.hf import pretrained
from paceline.workloads.hf.model import init_module
from paceline.workloads.hf.pretrained import check_weights, choose_weights, load_config, load_module
from tests.machines import plan
from tests.unit.test_documents import hf_model

pytest.importorskip("transformers")

CPU = torch.device("cpu")
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
MODELS = {
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
}


def overrides(given: dict[str, Any]) -> list[str]:
    """One override a key, on top of the recipe's keys of TinyLlama."""
    return [f"model.hf_config.{key}={json.dumps(value)}" for key, value in given.items()]


def config_of(name: str) -> Any:
    kind, given = MODELS[name]
    return load_config(kind, given, None)


def build(config: Any, fill: Any = init_module, impl: str = "sdpa") -> Any:
    with torch.device("meta"):
        model = build_causal_lm(config, impl)
    fill_weights(model, lambda n, m: fill(model, n, m), 0, CPU)
    return model.eval()  # without dropout, which GPT-2 has


def save(folder: Path, name: str = "llama", **more: Any) -> Any:
    """A model of transformers' own making, with its weights in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(name))
    model.save_pretrained(folder, **more)
    return model.eval()


def load(folder: Path, given: dict[str, Any] | None = None) -> Any:
    config = load_config(str(folder), given or {}, folder)
    with torch.device("meta"):
        check_weights(build_causal_lm(config, "sdpa"), folder)
    return build(config, lambda model, n, m: load_module(model, n, m, folder))


def tokens(rows: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(320, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_labels_are_shifted_once(name: str) -> None:
    """transformers shifts labels itself: given whole rows, it must find our loss; given targets
    that are shifted already, another one."""
    model, rows = build(config_of(name)), tokens()
    with torch.no_grad():
        ours = loss_sum(model, split_rows({"tokens": rows})).item() / (2 * 16)
        theirs = model(input_ids=rows, labels=rows).loss.item()
        twice = model(input_ids=rows[:, :-1], labels=rows[:, 1:]).loss.item()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(ours - twice) > 1e-4


@pytest.mark.parametrize("name", ONLY_A_HEAD)
def test_a_loss_in_chunks_is_the_same(name: str) -> None:
    """Loss and every gradient, also in bf16 as under autocast: the hidden states and the head give
    the logits of the whole model."""
    model, rows = hf_model(name, "eager"), split_rows({"tokens": tokens() % 64})
    for mode in ("fp32", "bf16"):
        found = []
        for chunk in (0, 5):
            model.zero_grad()
            model.loss_chunk = chunk
            with compute_context(mode, CPU):
                loss = loss_sum(model, rows)
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append((loss, {n: g.clone() for n, g in gradients.items()}))
        (whole, expected), (cut, given) = found
        close = {"rtol": 1e-4, "atol": 1e-5} if mode == "fp32" else {"rtol": 0.02, "atol": 0.03}
        torch.testing.assert_close(cut, whole, **close)
        assert given.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(given[key], gradient, msg=f"{mode}: {key}", **close)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_loss_in_chunks_is_refused_where_logits_are_more_than_the_head(name: str) -> None:
    asked = [f"model.hf={name}", "data.source=synthetic", "attention.impl=eager"]
    asked += [*overrides({"num_hidden_layers": 1}), "launch.overcommit=true"]
    (problem,) = plan(*asked, "loss.chunk=8", source="causal_lm").problems()
    assert problem.where == "loss.chunk" and f"the logits of {name}" in problem.what
    assert not plan(*asked, source="causal_lm").problems(), "auto is off"


def test_large_vocabularies_are_cut_by_default() -> None:
    """Llama 3's 128k tokens at 8192, as one of `lm` would be."""
    keys = {"vocab_size": 128256, "max_position_embeddings": 8192}
    large = ["data.seq_len=8192", "data.source=synthetic", "train.micro_batch_size=4"]
    job = load_job("tinyllama_fsdp", [*overrides(keys), *large])
    assert job.workload.loss_chunk(job.config) == 4096
    with torch.device("meta"):
        assert job.workload.build_model(job.config).loss_chunk == 4096
    off = load_job("tinyllama_fsdp", [*overrides(keys), *large, "loss.chunk=off"])
    assert off.workload.loss_chunk(off.config) == 0


def test_the_workload_counts_its_targets() -> None:
    loss, count = CausalLM().loss(build(config_of("llama")), {"tokens": tokens()})
    assert count == 2 * 16 and loss.item() / count == pytest.approx(5.77, rel=0.02)  # log 320


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_are_those_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(config_of(name))
    ours = build(config_of(name))
    expected = dict(reference.named_parameters())
    assert set(expected) == {key for key, _ in ours.named_parameters()}
    for key, weight in ours.named_parameters():
        wanted = expected[key]
        assert torch.isfinite(weight).all(), key
        if weight.dim() == 1:
            assert torch.equal(weight, wanted), key
        else:
            margin = 12 / (2 * weight.numel()) ** 0.5
            assert weight.std().item() == pytest.approx(wanted.std().item(), rel=margin), key
    buffers = dict(reference.named_buffers())
    assert set(buffers) == {key for key, _ in ours.named_buffers()}
    for key, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


def test_gpt2_shrinks_its_branches() -> None:
    """A rule of the module around the projection: 0.02 / sqrt(2 x 8 layers) is a quarter."""
    model = build(load_config("gpt2", GPT2 | {"n_layer": 8}, None))
    block = model.transformer.h[0]
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_rules_that_reach_into_other_modules_are_refused() -> None:
    """Mamba divides a child's weight where it stands: nothing of it would be right."""
    config = load_config("mamba", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64,
                                   "rescale_prenorm_residual": True}, None)  # fmt: skip
    with pytest.raises(ConfigError, match="model.weights=load"):
        build(config, impl="eager")


def test_a_tied_head_stays_tied() -> None:
    model = build(config_of("llama, tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
def test_weights_are_loaded(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = save(tmp_path, name, **options)
    assert (tmp_path / pretrained.INDEX).is_file() == bool(options)
    ours = load(tmp_path)
    for key, weight in reference.state_dict().items():
        assert torch.equal(ours.state_dict()[key], weight), key
    with torch.no_grad():
        assert torch.equal(ours(tokens()).logits, reference(tokens()).logits)


def test_loaded_weights_become_fp32(tmp_path: Path) -> None:
    reference = save(tmp_path).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    assert torch.equal(ours.lm_head.weight, reference.lm_head.weight.float())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"num_hidden_layers": 3}, "9 missing: model.layers.2"),
        ({"num_hidden_layers": 1}, "9 not in the model: model.layers.1"),
        ({"vocab_size": 400}, r"of another shape: model.embed_tokens.weight \[320, 32\] for"),
    ],
)
def test_weights_that_do_not_fit_are_named(given: Any, what: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(DataError, match=what):
        load(tmp_path, given)


def test_the_plan_says_so_too(tmp_path: Path) -> None:
    """A recipe's own keys go over those of the folder: TinyLlama's do not fit."""
    save(tmp_path)
    job = load_job("tinyllama_fsdp", [f"model.hf={tmp_path}", "launch.device=cpu"])
    (problem,) = job.workload.problems(job.config)
    assert "do not fit LlamaForCausalLM" in problem.what and "~model.hf_config" in problem.hint
    assert problem.cause == "data"
    fitting = load_job("causal_lm", [f"model.hf={tmp_path}", "data.seq_len=16"])
    assert not fitting.workload.problems(fitting.config)


def test_old_files_hold_buffers_that_are_computed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    file = tmp_path / pretrained.SINGLE
    state = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(state, file)
    assert load(tmp_path).model.rotary_emb.inv_freq.abs().sum() > 0


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / pretrained.SINGLE).write_bytes(b"not safetensors")
    with pytest.raises(DataError, match="cannot read .*model.safetensors"):
        load(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    assert choose_weights("auto", str(tmp_path), tmp_path) == (tmp_path, "random")
    with pytest.raises(DataError, match="has none"):
        choose_weights("load", str(tmp_path), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for asked in ("auto", "load"):
        with pytest.raises(DataError, match="pytorch_model.bin, which is a pickle"):
            choose_weights(asked, str(tmp_path), tmp_path)
    assert choose_weights("random", str(tmp_path), tmp_path) == (tmp_path, "random")


def test_an_unreachable_hub_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DataError, match="no route to host") as caught:
        plan("model.hf=nobody/nothing", source="tinyllama_fsdp")
    assert "give its folder" in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "nonesuch", "a/b/c"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(DataError, match=name):
        plan(f"model.hf={name}", source="tinyllama_fsdp")


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "x"}}')
    with pytest.raises(ConfigError, match="never run"):
        plan(f"model.hf={tmp_path}", source="tinyllama_fsdp")


@pytest.mark.parametrize(
    ("changes", "where", "hint"),
    [
        (["model.hf_config.hiden_size=64"], "model.hf_config.hiden_size", "hidden_size"),
        (["model.weights=load"], "model.weights", "model.hf"),
        (["data.seq_len=4096"], "data.seq_len", "2048 or less"),
        (["data.source=stdlib", "model.hf_config.vocab_size=64"], "model.hf_config.vocab_size",
         "257 or more"),
    ],
)  # fmt: skip
def test_problems_are_refused_before_launch(changes: list[str], where: str, hint: str) -> None:
    problems = plan(*changes, source="tinyllama_fsdp").problems()
    assert [problem.where for problem in problems] == [where]
    assert hint in problems[0].hint


def test_what_sees_the_future_is_refused() -> None:
    job = load_job("tinyllama_fsdp", ["model.hf=bert", "~model.hf_config", "data.seq_len=16"])
    assert any("causal" in problem.what for problem in job.workload.problems(job.config))


def test_tinyllama_has_its_size() -> None:
    made = plan(source="tinyllama_fsdp")
    assert made.model.num_trainable == 1_100_048_384
    require_feasible(made)


@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_with_torch(name: str) -> None:
    config, T = config_of(name), 32
    model = build(config)
    # The counter sees attention only where it is spelt out as products, over the full square.
    whole = flops_per_token(config, T, causal=False)
    for model.loss_chunk in (0, 5):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss_sum(model, split_rows({"tokens": tokens(1, T + 1)})).backward()
        assert whole is not None and whole * T == counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("mixtral", LLAMA | {"num_local_experts": 4}),
        ("mistral", LLAMA | {"sliding_window": 8}),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}),
    ],
)
def test_flops_of_other_architectures_are_left_to_the_counter(kind: str, given: Any) -> None:
    assert flops_per_token(load_config(kind, given, None), 32) is None
