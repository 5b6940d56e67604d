"""Documents in a sample: no token of another changes an output, no loss crosses an end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data.base import TextData
from paceline.data.packing import (
    PackedTokens,
    PaddedDocuments,
    count_targets,
    positions_of,
    split_rows,
)
from paceline.data.synthetic import IGNORED
from paceline.errors import ConfigError
from paceline.run.flow import require_feasible
from paceline.workloads.causal_lm.model import KEEPS_DOCUMENTS_APART, build_causal_lm, loss_sum
from paceline.workloads.hf.pretrained import load_config
from paceline.workloads.lm import attend
from paceline.workloads.lm.model import LM
from paceline.workloads.lm.workload import LanguageModel, LMModel
from tests.machines import plan

END = 9
# Three documents, the last of which goes on behind the row.
ROW = [1, 2, 3, END, 4, END, 5, 6, 7, 8, 1, 2]
STARTS = (0, 4, 6)


def packed(seq_len: int, end_id: int | None, rows: int = 1) -> PackedTokens:
    return PackedTokens([np.array(ROW * rows, dtype=np.uint16)], seq_len, "name", end_id)


def test_positions_restart_and_ends_are_not_crossed() -> None:
    batch = packed(11, END).batch([0])
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]]
    rows = split_rows(batch)
    assert rows.inputs_BT.tolist() == [ROW[:-1]]
    # The end is predicted from its own document; 4 and 5 follow an end, and have no loss.
    expected = [2, 3, END, IGNORED, END, IGNORED, 6, 7, 8, 1, 2]
    assert rows.targets_BT.tolist() == [expected]
    assert int(rows.num_targets) == count_targets(batch) == 9


def test_without_the_mask_every_token_is_a_target() -> None:
    batch = packed(11, None).batch([0])
    rows = split_rows(batch)
    assert set(batch) == {"tokens"} and rows.positions_BT is None
    assert rows.targets_BT.tolist() == [ROW[1:]] and rows.num_targets == count_targets(batch) == 11


def test_a_row_that_begins_inside_a_document_counts_from_there() -> None:
    tokens = np.array([[3, END, 1, END, END, 2]], dtype=np.int32)
    assert positions_of(tokens, END).tolist() == [[0, 1, 0, 1, 0, 0]]


def test_padded_samples_are_documents_and_every_target_comes_once() -> None:
    documents = [[1, 2, 3], [4], [], [5, 6, 7, 8, 1, 2, 3, 4]]
    flat = [token for document in documents for token in [*document, END]]
    data = PaddedDocuments([np.array(flat, dtype=np.uint16)], 4, "name", END)
    batch = data.batch(np.arange(len(data)))
    rows = split_rows(batch)
    # The empty one has no target; the long one is cut after 4 targets.
    assert batch["lengths"].tolist() == [4, 2, 5, 5]
    assert rows.inputs_BT[:, 0].tolist() == [1, 4, 5, 1]
    found = [[t for t in row if t != IGNORED] for row in rows.targets_BT.tolist()]
    assert found == [[2, 3, END], [END], [6, 7, 8, 1], [2, 3, 4, END]]
    assert int(rows.num_targets) == count_targets(batch) == 12
    assert data[2]["tokens"].tolist() == [5, 6, 7, 8, 1]


def test_padded_samples_of_several_shards() -> None:
    parts = [np.array([1, END, 2, END], dtype=np.uint16), np.array([3, 4, END], dtype=np.uint16)]
    data = PaddedDocuments(parts, 4, "name", END)
    assert data.batch([2, 0])["tokens"].tolist() == [[3, 4, END, END, END], [1, END, END, END, END]]


def lm(impl: str, kv_heads: int = 2) -> LM:
    torch.manual_seed(0)
    model = LM(LMModel(vocab_size=10, dim=32, num_layers=2, num_kv_heads=kv_heads), 16, impl)
    for name, module in model.named_modules():
        model.init_module(name, module)
    return model


def logits_of_lm(model: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
    return model(tokens, None, positions)


def logits_of_hf(model: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
    apart = {} if positions is None else {"position_ids": positions}
    return model(input_ids=tokens, use_cache=False, **apart).logits


def assert_apart(model: Any, logits: Any) -> None:
    """A packed document has the logits that it has alone, and no other document's token changes
    them; a token of its own does."""
    tokens = torch.tensor([ROW, [*ROW[4:], 1, 2, 3, END]])
    positions = torch.from_numpy(positions_of(tokens.numpy().astype(np.int32), END)).long()
    with torch.no_grad():
        together = logits(model, tokens, positions)
        for row in range(2):
            starts = np.flatnonzero(positions[row] == 0)
            for first, last in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
                alone = logits(model, tokens[row : row + 1, first:last], None)
                torch.testing.assert_close(together[row : row + 1, first:last], alone)
        changed = tokens.clone()
        changed[:, 4] = 6
        after = logits(model, changed, positions)
    same = torch.arange(tokens.shape[1]) // 2 != 2  # row 0: the document of tokens 4 and 5
    torch.testing.assert_close(after[0, same], together[0, same])
    assert not torch.allclose(after[0, 4:6], together[0, 4:6], atol=1e-4)


@pytest.mark.parametrize("impl", ["sdpa", "math", "eager", "efficient"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_documents_are_as_if_alone(impl: str, kv_heads: int) -> None:
    assert_apart(lm(impl, kv_heads), logits_of_lm)


def test_flex_keeps_documents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask, without the compiler: a kernel on GPUs is tests/gpu's."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(attend, "_compiled_flex", lambda: flex_attention.flex_attention)
    assert_apart(lm("flex", kv_heads=4), logits_of_lm)


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "sliding_window": 3,
}  # fmt: skip
OTHER = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64},
    "mixtral": SMALL | {"num_local_experts": 2},
}


def hf_model(name: str, impl: str) -> Any:
    from paceline.workloads.hf.model import known_keys
    from paceline.workloads.hf.pretrained import config_class

    keys = known_keys(config_class(name, {}))
    given = {key: value for key, value in OTHER.get(name, SMALL).items() if key in keys}
    torch.manual_seed(0)
    return build_causal_lm(load_config(name, given, None), impl).eval()


@pytest.mark.parametrize("name", KEEPS_DOCUMENTS_APART)
def test_models_of_transformers_keep_documents_apart(name: str) -> None:
    for impl in ("eager",) if name == "gemma2" else ("sdpa", "eager"):
        assert_apart(hf_model(name, impl), logits_of_hf)


@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_others_do_not_and_are_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_apart(hf_model(name, "eager"), logits_of_hf)
    with pytest.raises(ConfigError, match=f"{name} is not known to keep packed documents apart"):
        asked = [f"model.hf={name}", "data.source=stdlib", "data.document_mask=true"]
        require_feasible(plan(*asked, source="causal_lm"))


@pytest.mark.parametrize("keys", [{"document_mask": True}, {"pack": "padded"}])
def test_losses_are_those_of_documents_alone(keys: dict[str, Any]) -> None:
    """Packed or padded, in both workloads: the sum over documents, each by itself."""
    model, parts = lm("sdpa"), [np.array(ROW[:-1] + [END], dtype=np.uint16)]
    settings = TextData.model_validate({"source": "x", "seq_len": 11} | keys)
    data: Any = PaddedDocuments(parts, 11, "name", END)
    if settings.keeps_apart:
        data = PackedTokens(parts, 11, "name", END)
    batch = data.batch(np.arange(len(data)))
    alone = torch.zeros(())
    for first, last in zip(STARTS, [*STARTS[1:], 12], strict=True):
        row = torch.tensor([[*ROW[:-1], END][first:last]])
        alone += LanguageModel().loss(model, {"tokens": row})[0].detach()
    loss, units = LanguageModel().loss(model, batch)
    assert int(units) == LanguageModel().units(batch) == 9
    torch.testing.assert_close(loss.detach(), alone)


def test_causal_lm_hands_the_positions_on() -> None:
    model, batch = hf_model("llama", "sdpa"), packed(11, END).batch([0])
    apart = loss_sum(model, split_rows(batch))
    mixed = loss_sum(model, split_rows(batch)._replace(positions_BT=None))
    assert abs(apart.item() - mixed.item()) > 1e-3


def test_a_kernel_without_masks_is_refused(tmp_path: Path) -> None:
    asked = ["attention.impl=flash", "data.document_mask=true", "launch.device=cpu"]
    with pytest.raises(ConfigError, match="takes no data.document_mask"):
        require_feasible(plan(*asked))


@pytest.mark.parametrize(
    "asked, key",
    [
        (["data.source=synthetic", "data.document_mask=true"], "data.document_mask"),
        (["data.source=synthetic", "data.tokenizer=bytes"], "data.tokenizer"),
        (["data.pack=padded", "data.document_mask=true"], "data.document_mask"),
    ],
)
def test_keys_without_effect_are_named(asked: list[str], key: str) -> None:
    found = plan(*asked).findings
    assert [f.where for f in found if "no effect" in f.what] == [key]
