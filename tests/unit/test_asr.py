"""Speech recognition in one process: features, spelling, losses, scores, adapters, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.data.logmel import LogMel
from paceline.data.spoken import IGNORED, Masks, mask_spans
from paceline.errors import ConfigError, DataError
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from tests.asr import LORA, RECIPE, save_whisper, tiny, tiny_ctc
from tests.harness import machine

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
jiwer = pytest.importorskip("jiwer")
slow = pytest.mark.slow


def noise(seconds: float, seed: int = 0) -> torch.Tensor:
    draws = np.random.default_rng(seed)
    shape = np.sin(np.arange(int(seconds * 16000)) / 2000)
    return torch.from_numpy((0.1 * shape * draws.standard_normal(len(shape))).astype(np.float32))


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_are_those_of_the_extractor(num_mels: int) -> None:
    theirs = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    waves = [noise(seconds) for seconds in (0.01, 3.3, 29.99, 30.0)]
    expected = theirs([wave.numpy() for wave in waves], sampling_rate=16000, return_tensors="pt")
    extract = LogMel(num_mels, 480_000)
    for wave, features in zip(waves, expected.input_features, strict=True):
        assert (extract(wave[None])[0] - features).abs().max() < 1e-5
    together = extract(torch.nn.utils.rnn.pad_sequence(waves, batch_first=True))
    assert (together - expected.input_features).abs().max() < 1e-5


@slow
def test_masks_depend_on_the_position_alone_wherever_features_are_made() -> None:
    job = prepared(tiny("data.spec_time_masks=2", "data.spec_mel_masks=2", "data.spec_mel_width=4"))
    data: Any = job.workload.build_data(job.config, "train")
    here = data.at(0, 7)["features"]
    assert torch.equal(here, data.at(0, 7)["features"])
    assert not torch.equal(here, data.at(0, 8)["features"])
    assert (here == 0).sum() > (data[0]["features"] == 0).sum(), "nothing is masked"
    on_device = prepared(tiny("data.features=device", "data.spec_time_masks=2",
                              "data.spec_mel_masks=2", "data.spec_mel_width=4"))  # fmt: skip
    other: Any = on_device.workload.build_data(on_device.config, "train")
    model: Any = on_device.workload.build_model(on_device.config)
    batch = other.collate_fn([other.at(0, 7), other.at(1, 3)])
    assert torch.allclose(model.rules.features(batch)[0], here, atol=1e-6)


def test_a_mask_covers_its_spans() -> None:
    features = torch.ones(1, 4, 6)
    mask_spans(features, torch.tensor([[[1, 3], [0, 2]]]), num_times=1)
    assert features[0, 3].tolist() == [1, 0, 0, 1, 1, 1] and features[0, :2].sum() == 0
    spans = Masks(num_times=3, max_frames=50).draw(seed=1, position=2, num_frames=9, num_bins=1)
    assert spans.min() >= 0 and spans.max() <= 9


def test_words_are_spelled_with_language_and_task() -> None:
    from paceline.workloads.asr.texts import find_speller

    speller: Any = find_speller("whisper", None, "Spanish", "translate")
    inputs, targets = speller.lesson("año")
    marks = speller.library.convert_ids_to_tokens(inputs[:4])
    assert marks == ["<|startoftranscript|>", "<|es|>", "<|translate|>", "<|notimestamps|>"]
    assert targets[:3] == [IGNORED] * 3 and targets[3:] == [*inputs[4:], speller.end_id]
    assert speller.text([*targets[3:], 300]) == "año"
    letters: Any = find_speller("wav2vec2", None, "english", "transcribe")
    _, ids = letters.lesson("the gate")
    assert letters.text([i for i in ids for _ in (0, 1)] + [letters.blank_id]) == "THE GATE"
    with pytest.raises(ConfigError, match="spanisch is not a language.*\n.*spanish"):
        find_speller("whisper", None, "spanisch", "transcribe")


def test_error_rates_are_those_of_jiwer() -> None:
    from paceline.workloads.asr.scores import error_rates, find_normaliser
    from paceline.workloads.asr.texts import find_speller

    normalise = find_normaliser(find_speller("whisper", None, "english", "transcribe"))
    said = ["Mr. Fox found seven red apples!", "the garden gate", "Hmm"]
    written = ["mister fox found 7 apples", "a garden gates", "what"]
    pairs = [(normalise(a), normalise(b)) for a, b in zip(said, written, strict=True)]
    assert pairs[0][0] == "mister fox found 7 red apples" and pairs[2][0] == ""
    found = error_rates(pairs)
    firsts = [[pair[side] for pair in pairs[:2]] for side in (0, 1)]
    assert found == {"wer": jiwer.wer(*firsts), "cer": jiwer.cer(*firsts)}
    assert found["wer"] == 3 / 9  # red is left out, the is a, gate is gates


def test_a_teacher_is_heard_where_there_is_a_target() -> None:
    from paceline.workloads.asr.losses import distilled

    student, teacher = torch.randn(2, 3, 5, generator=torch.manual_seed(0)), torch.randn(2, 3, 5)
    targets = torch.tensor([[IGNORED, 1, 2], [3, IGNORED, IGNORED]])
    kept = targets != IGNORED
    one, two = ((x / 3).log_softmax(-1)[kept] for x in (student, teacher))
    expected = 9 * F.kl_div(one, two, reduction="sum", log_target=True)
    torch.testing.assert_close(distilled(student, teacher, targets, 3.0), expected)
    assert distilled(student, student, targets, 2.0) == 0


def prepared(settings: list[str]) -> Job:
    job = load_job(RECIPE, settings)
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    return job


def problems(*settings: str) -> str:
    job = load_job(RECIPE, tiny(*settings))
    return "\n".join(map(str, make_plan(job, machine()).problems()))


@slow
def test_weights_are_loaded_and_adapters_begin_where_others_ended(tmp_path: Path) -> None:
    from paceline.workloads.asr.lora import adapter_tensors, merge_adapters

    folder = save_whisper(tmp_path / "base")
    own = ["~model.hf_config", f"model.hf={folder}", "model.lora_rank=2"]
    job = prepared(tiny(*own))
    model: Any = job.workload.build_model(job.config)
    plain = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    base = dict(plain.named_parameters())["model.encoder.layers.0.fc1.weight"]
    assert torch.equal(model.get_parameter("model.encoder.layers.0.fc1.weight"), base)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    tensors = {f"base_model.model.{k}": v.clone() for k, v in adapter_tensors(model).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, job.workload.prepared["base_hash"])
    again = prepared(tiny(*own, f"model.adapter={adapter}"))
    found: Any = again.workload.build_model(again.config)
    inputs = {
        "input_features": torch.randn(1, 20, 500),
        "decoder_input_ids": torch.ones(1, 3).long(),
    }
    expected = model.eval()(**inputs).logits
    torch.testing.assert_close(found.eval()(**inputs).logits, expected)
    merge_adapters(found)
    assert found.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(found(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    other = save_whisper(tmp_path / "other", d_model=32)
    changed = ["~model.hf_config", f"model.hf={other}", "model.lora_rank=2"]
    with pytest.raises(DataError, match=f"{adapter} was trained on another base model"):
        prepared(tiny(*changed, f"model.adapter={adapter}"))
    with pytest.raises(DataError, match=r"not of this model.*lora_A"):
        prepared(tiny(*own, "model.lora_rank=3", f"model.adapter={adapter}"))


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], base: str) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_hash": base}))
    return folder


@slow
def test_a_base_of_four_bits_has_the_planned_size_and_trains_adapters() -> None:
    pytest.importorskip("bitsandbytes")
    from paceline.workloads.asr.lora import merge_adapters

    four = [*LORA, "model.base=nf4", "checkpoint.weights=trained"]
    job = prepared(tiny(*four))
    model: Any = job.workload.build_model(job.config)
    plan = make_plan(job, machine())
    assert not plan.problems()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held == plan.state_bytes.parameters
    data: Any = job.workload.build_data(job.config, "train")
    loss, *_ = job.workload.loss(model, data.collate_fn([data[0], data[1]]))
    loss.backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in name for name in grads)
    inputs = {
        "input_features": torch.randn(1, 20, 500),
        "decoder_input_ids": torch.ones(1, 3).long(),
    }
    expected = model.eval()(**inputs).logits
    merge_adapters(model)
    assert {str(weight.dtype) for weight in model.state_dict().values()} == {"torch.float32"}
    assert "model.encoder.layers.0.fc1.weight" in dict(model.named_parameters())
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-3, atol=1e-4)
    assert "cannot: what bitsandbytes packs" in problems(*four, "strategy.name=zero3")
    assert "packed again from its files" in problems(*LORA, "model.base=nf4")


@slow
def test_an_evaluation_leaves_a_base_of_four_bits_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bitsandbytes would pack it anew where it takes the CPU for one with AVX512-BF16: for good,
    without gradients, and only where rows come in 32s, as here."""
    packing = pytest.importorskip("bitsandbytes.nn.modules")
    from paceline.workloads.asr.lora import merge_adapters

    monkeypatch.setattr(packing, "has_avx512bf16", lambda: True)
    wide = [f"model.hf_config.{side}_ffn_dim=64" for side in ("encoder", "decoder")]
    four = [*LORA, "model.base=nf4", "checkpoint.weights=trained", "model.hf_config.d_model=64"]
    job = prepared(tiny(*four, *wide))
    model: Any = job.workload.build_model(job.config)
    data: Any = job.workload.build_data(job.config, "train")
    batch = data.collate_fn([data[0], data[1]])
    before = learned(job, model, batch)
    inputs = {
        "input_features": torch.randn(1, 20, 500),
        "decoder_input_ids": torch.ones(1, 3).long(),
    }
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
    after = learned(job, model, batch)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    merge_adapters(model)
    torch.testing.assert_close(model.eval()(**inputs).logits, expected, rtol=1e-3, atol=1e-4)


def learned(job: Job, model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The loss of a batch and its gradients, by name."""
    model.train().zero_grad()
    loss, *_ = job.workload.loss(model, batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@slow
def test_what_cannot_be_is_refused_with_its_name(tmp_path: Path) -> None:
    base = save_whisper(tmp_path / "base")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text((base / "config.json").read_text())
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    wide = save_whisper(tmp_path / "wide", vocab_size=400)
    assert "a pickle and can run code" in problems(
        "~model.hf_config", f"model.hf={tmp_path}/pickled"
    )
    assert f"{wide} has 400 tokens, and the model that learns has 384" in problems(
        f"model.teacher={wide}"
    )
    assert "model.base: bf16, and there are no adapters" in problems("model.base=bf16")
    assert "precision.mode is fp32" in problems(*LORA, "model.base=bf16", "precision.mode=fp32")
    assert "300, and the tokenizer has 364 tokens" in problems("model.hf_config.vocab_size=300")
    assert "data.spec_mel_masks" in problems("model.hf_config.apply_spec_augment=true")
    with pytest.raises(ConfigError, match="no linear layer called q_project\n.*q_proj"):
        problems(*LORA, "model.lora_targets=[q_project]")


@slow
def test_a_teacher_takes_part_in_the_loss(tmp_path: Path) -> None:
    teacher = save_whisper(tmp_path / "teacher")
    job = prepared(tiny(f"model.teacher={teacher}", "loss.distill_weight=0.25"))
    model: Any = job.workload.build_model(job.config)
    data: Any = job.workload.build_data(job.config, "train")
    batch = data.collate_fn([data[0], data[1]])
    loss, units, parts = job.workload.loss(model, batch)
    torch.testing.assert_close(loss, 0.25 * parts["taught"] + 0.75 * parts["spoken"])
    assert parts["taught"] > 0 and units == (batch["targets"] != IGNORED).sum()
    loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("teacher."))


def test_seconds_of_a_batch_are_its_length() -> None:
    data = load_job(RECIPE, tiny_ctc("data.max_batch_seconds=12")).config.data
    assert (data.batch_by, data.batch_length, data.num_buckets) == ("length", 12.0, 16)
