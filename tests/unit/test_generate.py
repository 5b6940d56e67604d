"""Text from a model: the cache changes nothing, a prompt is continued alike whatever stands beside
it, tokens are drawn with the shares that were asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError, DataError
from paceline.strategies.weights import fill_weights
from paceline.workloads.generation import (
    Codec,
    Request,
    Sampling,
    Stream,
    bytes_codec,
    choose,
    codec_of,
    open_codec,
)
from paceline.workloads.lm.attend import Past
from paceline.workloads.lm.model import LM, generate
from paceline.workloads.lm.workload import LMModel

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
NEVER = Codec(list, str, frozenset(), 64, "numbers")  # type: ignore[arg-type]


def build(seq_len: int = 32, impl: str = "sdpa", **more: Any) -> LM:
    config = LMModel(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, **more)
    with torch.device("meta"):
        model = LM(config, seq_len, impl)
    fill_weights(model, model.init_module, 0, torch.device("cpu"))
    for weight in model.parameters():  # larger: first weights make all tokens alike
        weight.data *= 3 if weight.dim() > 1 else 1
    return model.eval()


def ask(prompts: list[list[int]] = PROMPTS, codec: Codec = NEVER, **more: Any) -> Request:
    use_cache, told = more.pop("use_cache", True), more.pop("told", lambda tokens: None)
    sampling = Sampling(**{"max_new_tokens": 12, "seed": 3} | more)
    return Request(prompts, sampling, codec, told, use_cache=use_cache)


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_cache_gives_the_logits_of_a_whole_pass(impl: str, tied: bool) -> None:
    model = build(impl=impl, tied=tied)
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        past = Past(2, torch.zeros(2, dtype=torch.long), 20)
        found = [model(tokens[:, :7], past=past)]  # a prompt, then one token at a time, then three
        found += [model(tokens[:, n : n + 1], past=past) for n in range(7, 17)]
        found.append(model(tokens[:, 17:], past=past))
    wanted = torch.cat([whole[:, 6:17], whole[:, 19:]], dim=1)
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_unequal_length_have_their_own_positions() -> None:
    model = build()
    pads = torch.tensor([7 - len(ids) for ids in PROMPTS])
    rows = torch.tensor([[0] * (7 - len(ids)) + ids for ids in PROMPTS])
    with torch.no_grad():
        past = Past(2, pads, 8)
        found = [model(rows, past=past), model(torch.tensor([[20], [21], [22]]), past=past)]
        for row, ids in enumerate(PROMPTS):
            alone = model(torch.tensor([[*ids, 20 + row]]))[0]
            torch.testing.assert_close(found[0][row, 0], alone[-2], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[1][row, 0], alone[-1], rtol=1e-5, atol=1e-5)


def test_positions_count_from_the_first_token_of_a_row() -> None:
    # RoPE knows differences only; but the same angles round alike, and a row is as it is alone.
    past = Past(1, torch.tensor([0, 2]), 5)
    assert past.begin(4).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert past.begin(1).tolist() == [[4], [2]]
    assert past.mask is not None and past.mask[:, 0].tolist() == [
        [[True] * 5], [[False, False, True, True, True]],
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_with_and_without_the_cache(temperature: float) -> None:
    model = build()
    cached = generate(model, ask(temperature=temperature))
    assert cached == generate(model, ask(temperature=temperature, use_cache=False))
    assert [len(row) for row in cached] == [12] * 3
    assert len({tuple(row) for row in cached}) == 3 and len(set(cached[0])) > 2


def test_a_prompt_is_continued_alike_whatever_stands_beside_it() -> None:
    model = build()
    together = generate(model, ask(temperature=1.0))
    assert generate(model, ask(PROMPTS[:1], temperature=1.0)) == together[:1]
    assert generate(model, ask(temperature=1.0, seed=4)) != together


def test_the_likeliest_token_is_that_of_the_plain_model() -> None:
    model, ids = build(), list(PROMPTS[1])
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, ask([PROMPTS[1]], temperature=0, max_new_tokens=6)) == [ids[2:]]


def test_rows_end_at_the_mark_and_the_others_go_on() -> None:
    model, heard = build(), list[Any]()
    free = generate(model, ask(temperature=0))
    mark = free[1][4]
    codec = Codec(list, str, frozenset({mark}), 64)  # type: ignore[arg-type]
    found = generate(model, ask(temperature=0, codec=codec, told=heard.append))
    for row, whole in zip(found, free, strict=True):
        assert row == (whole[: whole.index(mark)] if mark in whole else whole)
    columns = [[tokens[row] for tokens in heard] for row in range(3)]
    assert [[t for t in column if t is not None] for column in columns] == found
    all_end = Codec(list, str, frozenset(range(64)), 64)  # type: ignore[arg-type]
    assert generate(model, ask(codec=all_end)) == [[], [], []]


def test_ids_without_a_meaning_are_never_drawn() -> None:
    few = Codec(list, str, frozenset(), 20)  # type: ignore[arg-type]
    found = generate(build(), ask(codec=few, temperature=5.0))
    assert max(max(row) for row in found) < 20


def test_the_context_is_the_limit() -> None:
    model = build(seq_len=10)
    # 7 tokens of the longest prompt leave 3 places; the last token that is drawn needs none.
    assert [len(row) for row in generate(model, ask())] == [4, 4, 4]
    with pytest.raises(ConfigError, match="a prompt has 11 tokens, and the model sees 10"):
        generate(model, ask([[1] * 11]))
    with pytest.raises(ConfigError, match="the token 64 of numbers, and the model has 64 tokens"):
        generate(model, ask([[64]]))


def drawn(logits: Tensor, sampling: Sampling, num: int = 2000) -> Tensor:
    """How often each id comes, over draws that cover [0, 1) evenly."""
    draws = (torch.arange(num) + 0.5) / num
    return choose(logits.expand(num, -1), sampling, draws).bincount(minlength=len(logits)) / num


def test_tokens_come_with_their_shares() -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 0.7, 1.1])
    for temperature in (0.5, 1.0, 2.0):
        wanted = (logits / temperature).softmax(dim=0)
        found = drawn(logits, Sampling(temperature=temperature))
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)
    assert drawn(logits, Sampling(temperature=0)).tolist() == [0, 1, 0, 0, 0]
    for top_p in (1e-9, 0.0, float("nan")):  # the likeliest is always left
        assert drawn(logits, Sampling(temperature=1.0, top_p=top_p)).tolist() == [0, 1, 0, 0, 0]
    assert generate(build(), ask(seed=1 << 70)) == generate(build(), ask(seed=1 << 70))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.7), (4, 0.8), (1, 0.5), (99, 1.0)])
def test_what_is_left_to_choose_from_is_as_in_transformers(top_k: int | None, top_p: float) -> None:
    library = pytest.importorskip("transformers")
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    scores = logits[None] / 0.9
    if top_k is not None:
        scores = library.TopKLogitsWarper(top_k)(None, scores)
    scores = library.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    found = drawn(logits, Sampling(temperature=0.9, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, scores[0].softmax(dim=0), atol=1e-3, rtol=0)


def test_a_stream_holds_back_half_a_character() -> None:
    stream, text = Stream(bytes_codec()), "aß€🙂z"
    given = [stream.add(byte) for byte in text.encode()]
    assert given == ["a", "", "ß", "", "", "€", "", "", "", "🙂", "z"]
    assert stream.add(0xC3) == "" and stream.add(None) == "\ufffd"  # what never became one


def test_text_is_bytes_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    codec = codec_of({"shards": str(tmp_path)})
    assert codec.encode("aß") == [97, 195, 159] and codec.decode([97, 300, 256]) == "a"
    assert codec.prompt("") == [256] and codec_of({}).name == "bytes"


def test_a_tokenizer_beside_the_shards_is_used(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "the": 1, "fox": 2, "[UNK]": 3}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "manifest.json").write_text(json.dumps({"end_id": 0}))
    codec = codec_of({"shards": str(tmp_path)})
    assert codec.encode("the fox") == [1, 2] and codec.decode([1, 2]) == "the fox"
    assert (codec.end_ids, codec.num_ids, codec.prompt("")) == (frozenset({0}), 4, [0])
    made.enable_truncation(2)  # as files of other models have it
    made.enable_padding(length=5)
    made.post_processor = library.processors.TemplateProcessing("$A <end>", None, [("<end>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    codec = codec_of({"shards": str(tmp_path)})
    assert codec.encode("the fox fox") == [1, 2, 2, 0] and codec.prompt("the fox fox") == [1, 2, 2]
    (tmp_path / "manifest.json").write_text(json.dumps({"end_id": 4}))  # one beside the vocabulary
    assert codec_of({"shards": str(tmp_path)}).num_ids == 5
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer"):
        open_codec(tmp_path)


def llama() -> Any:
    from transformers import LlamaConfig

    from paceline.workloads.causal_lm.model import build_causal_lm

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=64, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    return build_causal_lm(config, "sdpa").eval()


def test_models_of_transformers_generate_by_themselves() -> None:
    pytest.importorskip("transformers")
    from paceline.workloads.causal_lm.model import generate as of_transformers

    model = llama()
    before = model.generation_config
    cached = of_transformers(model, ask(temperature=1.0))
    assert cached == of_transformers(model, ask(temperature=1.0, use_cache=False))
    assert of_transformers(model, ask(PROMPTS[:1], temperature=1.0)) == cached[:1]
    assert model.generation_config is before
    greedy = of_transformers(model, ask(PROMPTS[:1], temperature=0, max_new_tokens=8))
    theirs = model.generate(
        torch.tensor(PROMPTS[:1]), attention_mask=torch.ones(1, 7, dtype=torch.long),
        max_new_tokens=8, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert greedy == [theirs[0, 7:].tolist()]
    mark = cached[0][3]
    ends = Codec(list, str, frozenset({mark}), 64)  # type: ignore[arg-type]
    found = of_transformers(model, ask(temperature=1.0, codec=ends))
    for row, whole in zip(found, cached, strict=True):
        assert row == (whole[: whole.index(mark)] if mark in whole else whole)
    with pytest.raises(ConfigError, match="the model sees 32"):
        of_transformers(model, ask([[1] * 33]))


def test_other_workloads_say_that_they_generate_nothing() -> None:
    from paceline.workloads.mae.workload import MaskedAutoencoder

    with pytest.raises(ConfigError, match="MaskedAutoencoder generates no text"):
        MaskedAutoencoder().generate(torch.nn.Linear(1, 1), ask())
