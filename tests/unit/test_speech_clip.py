"""Speech-text contrastive training: the model's masks, its data, its loss and its recall."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data.audio import Cut, SpeechClips
from paceline.data.collate import collate
from paceline.data.manifest import read_manifest
from paceline.data.speech_pairs import Pieces, SpeechPairs
from paceline.data.spelling import Spelling, find_spelling
from paceline.data.tokenizer import BYTES, Tokenizer
from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.train.first_batch import run_on_meta
from paceline.workloads.speech_clip.model import SpeechClip, fewest_samples, num_frames
from paceline.workloads.speech_clip.negatives import loss_of, retrieval
from paceline.workloads.speech_clip.wide_conv import WideConv, quicken
from tests.speech_clip import RECIPE, corpus, tiny

pytest.importorskip("transformers")
from transformers import Wav2Vec2Config, Wav2Vec2Model  # noqa: E402


@pytest.fixture(scope="module")
def model() -> SpeechClip:
    job = load_job(RECIPE, tiny())
    torch.manual_seed(0)
    built = job.workload.build_model(job.config)
    assert isinstance(built, SpeechClip)
    return built.eval()


def waves(*lengths: int) -> dict[str, Tensor]:
    """One batch of noise, padded to the longest."""
    torch.manual_seed(1)
    sounds = [torch.randn(length) for length in lengths]
    tokens, num_tokens = Spelling(BYTES, 96).rows(["a gate", "the old captain", "b"][: len(sounds)])
    return {
        "waveforms": torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True),
        "num_samples": torch.tensor(lengths),
        "tokens": tokens,
        "num_tokens": num_tokens,
    }


# The model


def test_what_is_padding_changes_nothing(model: SpeechClip) -> None:
    batch = waves(16000, 7000, 660)
    speech, text = model(batch)
    for row in range(3):
        size, tokens = batch["num_samples"][row], batch["num_tokens"][row]
        alone = {
            "waveforms": batch["waveforms"][row : row + 1, :size],
            "num_samples": size[None],
            "tokens": batch["tokens"][row : row + 1, :tokens],
            "num_tokens": tokens[None],
        }
        one_speech, one_text = model(alone)
        torch.testing.assert_close(one_speech[0], speech[row], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one_text[0], text[row], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(speech[0], speech[1], atol=1e-3), "rows are told apart"


def test_shapes_alone_tell_the_flops() -> None:
    """No answer of the device is asked for in a pass: on meta tensors there is none."""
    job = load_job(RECIPE, tiny())
    sizes = [run_on_meta(job, waves(*[length] * 2))[0] for length in (4000, 8000)]
    assert 1.6 < sizes[1] / sizes[0] < 2.2, "twice as long, not quite twice: words are the same"


def test_frames_are_masked_as_the_encoder_does_it(model: SpeechClip) -> None:
    is_real = torch.arange(9000) < torch.tensor([[9000], [5000], [700]])
    size = num_frames(model.speech.config, 9000)
    theirs = type(model.speech)._get_feature_vector_attention_mask  # type: ignore[union-attr,operator]
    ours = model.speech._get_feature_vector_attention_mask  # type: ignore[union-attr,operator]
    assert torch.equal(ours(size, is_real), theirs(model.speech, size, is_real))


@pytest.mark.parametrize(("width", "padding"), [(5, 2), (4, 2), (6, 0)])
def test_a_wide_convolution_is_what_torch_computes(width: int, padding: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 9).double(), torch.randn(6, 2, width).double()
    both = [(x.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    made = [
        WideConv.apply(*both[0], 3, padding),
        torch.nn.functional.conv1d(*both[1], padding=padding, groups=3),
    ]
    torch.testing.assert_close(made[0], made[1])
    for out in made:
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_quick_encoder_has_the_same_names_and_numbers() -> None:
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,), conv_kernel=(20,), conv_stride=(10,), num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Wav2Vec2Model(config).eval()
    names, heard = list(plain.state_dict()), plain(torch.zeros(1, 400) + 0.1)
    quick = quicken(plain)
    assert type(quick.encoder.pos_conv_embed.conv).__name__ == "WideConv1d"
    assert list(quick.state_dict()) == names
    again = quick(torch.zeros(1, 400) + 0.1)
    torch.testing.assert_close(again.last_hidden_state, heard.last_hidden_state)


def test_frames_are_counted_as_the_encoder_makes_them(model: SpeechClip) -> None:
    config, fewest = model.speech.config, fewest_samples(model.speech.config)
    for size in (fewest, fewest + 319, 4321):
        made = model.speech.feature_extractor(torch.randn(1, size)).shape[-1]  # type: ignore[operator]
        assert made == num_frames(config, size)
    assert num_frames(config, fewest) == 1 and num_frames(config, fewest - 1) == 0


def test_the_text_encoder_is_frozen_counted_so_and_never_drops_out(model: SpeechClip) -> None:
    model.train()
    assert not model.text.training and model.speech.training
    model.eval()
    plan = make_plan(load_job(RECIPE, tiny("launch.nproc=2")), probe())
    frozen = sum(p.numel() for p in model.text.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert (plan.model.num_frozen, plan.model.num_trainable) == (frozen, whole - frozen)
    more = make_plan(load_job(RECIPE, tiny("model.freeze_features=true")), probe())
    convolutions = sum(p.numel() for p in model.speech.feature_extractor.parameters())  # type: ignore[union-attr]
    assert more.model.num_frozen == frozen + convolutions > frozen


def test_the_scale_is_clamped(model: SpeechClip) -> None:
    assert float(model.scale.detach()) == pytest.approx(1 / 0.07)
    kept = model.log_scale.detach().clone()
    with torch.no_grad():
        model.log_scale.fill_(9.0)
        assert float(model.scale) == 100
        model.log_scale.copy_(kept)


# The loss


def vectors(number: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(number, 6), dim=1)


def test_the_loss_is_the_symmetric_sum(model: SpeechClip) -> None:
    speech, text = vectors(3), vectors(3, 1)
    loss, num_right = loss_of(model, speech, text)
    logits = (speech @ text.T / 0.07).tolist()
    expected = 0.0
    for n in range(3):
        for row in (logits[n], [logits[m][n] for m in range(3)]):
            expected += (math.log(sum(map(math.exp, row))) - row[n]) / 2
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert int(num_right) == sum(max(row) == row[n] for n, row in enumerate(logits))


def test_recall_both_ways_and_of_a_model_that_says_one_thing() -> None:
    speech = torch.eye(8)
    text = speech.clone()
    text[0], text[1] = speech[1], speech[0]
    found = retrieval(speech, text, 10.0)
    assert found["speech_to_text/recall@1"] == found["text_to_speech/recall@1"] == 6 / 8
    one_way = retrieval(speech, torch.eye(8)[[0] * 7 + [7]], 10.0)
    # The first among seven equals, six of which nothing is near (eight equals), the last alone.
    expected = (1 / 7 + 6 * 1 / 8 + 1) / 8
    assert one_way["speech_to_text/recall@1"] == pytest.approx(expected)
    same = retrieval(vectors(1).expand(10, 6), vectors(1).expand(10, 6), 10.0)
    assert same["recall@1"] == pytest.approx(1 / 10) and same["recall@5"] == pytest.approx(5 / 10)
    assert same["loss"] == pytest.approx(math.log(10))


# The data


@pytest.fixture(scope="module")
def clips() -> SpeechClips:
    rows = read_manifest(corpus() / "manifest.tsv", 16000, ["train*"])
    return SpeechClips(corpus(), rows, 16000)


def pairs(clips: SpeechClips, pieces: Pieces) -> SpeechPairs:
    return SpeechPairs(clips, Spelling(BYTES, 96), pieces, seed=3)


def test_what_is_cut_depends_on_seed_and_position_alone(clips: SpeechClips) -> None:
    data = pairs(clips, Pieces(Cut(0.5, 1.0)))
    whole = collate(data, np.array([4, 9, 2]), None, place=100)
    longest = int(whole["num_samples"].max())
    assert longest <= whole["waveforms"].shape[1] <= 16000
    assert whole["waveforms"].shape[1] % 1600 == 0, "few lengths: cuDNN looks anew for each"
    assert not whole["waveforms"][:, longest:].any()
    one = collate(data, np.array([9]), None, place=101)
    size = int(one["num_samples"][0])
    assert size == whole["num_samples"][1]
    assert torch.equal(one["waveforms"][0, :size], whole["waveforms"][1, :size])
    elsewhere = collate(data, np.array([9]), None, place=102)
    assert not torch.equal(elsewhere["tokens"], one["tokens"]) or elsewhere["num_samples"] != size
    other = SpeechPairs(clips, Spelling(BYTES, 96), Pieces(Cut(0.5, 1.0)), seed=4)
    assert not torch.equal(other.at(9, 101).waveform, data.at(9, 101).waveform)
    assert not hasattr(data, "lengths"), "each length is drawn anew"
    wave = data.at(9, 101).waveform
    assert abs(float(wave.mean())) < 1e-5 and float(wave.var(correction=0)) == pytest.approx(
        1, 1e-2
    )


def test_lengths_are_what_is_cut_where_batches_go_by_them(clips: SpeechClips) -> None:
    for pieces in (Pieces(Cut(0.5, 1.0), by_length=True), Pieces(Cut(0.7, 0.7)), Pieces()):
        data = pairs(clips, pieces)
        for index in range(len(data)):
            found = {len(data.at(index, place).waveform) for place in (0, 7, 900)}
            assert found == {round(data.lengths[index] * 16000)}
    spread = pairs(clips, Pieces(Cut(0.5, 1.0), by_length=True)).lengths
    assert spread.min() >= 0.5 and spread.max() <= 1.0 and len(set(spread)) > 15
    starts = pairs(clips, Pieces(Cut(0.5, 1.0), by_length=True))
    assert not torch.equal(starts.at(3, 1).waveform, starts.at(3, 2).waveform)


def test_validation_takes_the_beginning(clips: SpeechClips) -> None:
    data = pairs(clips, Pieces(head_s=0.5))
    first, rows = data[0], clips.utterances
    assert len(first.waveform) == 8000 and rows[0].transcript.startswith(first.transcript)
    assert len(first.transcript) == len(rows[0].transcript) * 8000 // rows[0].num_samples


def test_texts_begin_with_one_token_and_keep_their_end() -> None:
    tokens, lengths = Spelling(BYTES, 5).rows(["ab", "", "abcdefgh"])
    assert tokens.tolist() == [[257, 97, 98, 256, 0], [257, 256, 0, 0, 0], [257, 97, 98, 99, 256]]
    assert lengths.tolist() == [4, 2, 5] and Spelling(BYTES, 5).num_ids == 258
    assert find_spelling("bytes", 8).tokenizer is BYTES


def test_a_tokenizer_without_a_first_token_is_refused(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    plain = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "plain.json"))
    with pytest.raises(DataError, match="puts no token before a text"):
        find_spelling(str(tmp_path / "plain.json"), 8)
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    plain.save(str(tmp_path / "bert.json"))
    spelling = find_spelling(str(tmp_path / "bert.json"), 4)
    assert isinstance(spelling.tokenizer, Tokenizer)
    assert spelling.rows(["a b a b"])[0].tolist() == [[1, 3, 4, 2]]


# The config


BAD: dict[str, list[str]] = {
    "model.speech_config.hidden_sizes": ["model.speech_config.hidden_sizes=3"],
    "layerdrop": ["model.speech_config.layerdrop=0.1"],
    "text_config.vocab_size": ["model.text_config.vocab_size=100"],
    "cannot be a pipeline: a pipeline cuts": ["strategy.name=pipeline", "launch.nproc=2"],
    "a frame of the speech encoder needs": ["data.fixed_slice_s=0.01"],
}


@pytest.mark.parametrize("said", BAD)
def test_what_cannot_work_is_found_while_planning(said: str) -> None:
    plan = make_plan(load_job(RECIPE, tiny(*BAD[said])), probe())
    errors = [str(finding) for finding in plan.findings if finding.severity == "error"]
    assert any(said in text for text in errors), errors


def test_a_cut_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut_min_s 4 is more than cut_max_s 3"):
        load_job(RECIPE, tiny("data.cut_min_s=4"))


def test_what_cannot_be_used_of_a_corpus_is_said_and_left_out(tmp_path: Path) -> None:
    lines = (corpus() / "manifest.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    first = next(row for row in rows if row[0].startswith("train"))
    second = next(row for row in rows if row[0].startswith("train") and row is not first)
    first[3] = ""
    second[1:3] = ["100", "0.006250"]
    (tmp_path / "m.tsv").write_text("\n".join([lines[0], *("\t".join(row) for row in rows)]))
    job = load_job(RECIPE, tiny(f"data.manifest_path={tmp_path / 'm.tsv'}"))
    said: list[str] = []
    prepared = job.workload.prepare(job.config, said.append)
    assert prepared["train_utterances"] == 20 and prepared["val_utterances"] == 5
    assert "what it says of words is chance" in said[0]
    assert "left out: 1 shorter than a frame, 1 without a transcript" in said[1]


# Weights


@pytest.fixture(scope="module")
def saved(model: SpeechClip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both encoders as larger models hold them, under other names, and their config.json."""
    from transformers import BertForMaskedLM, Wav2Vec2ForCTC

    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(8)
    Wav2Vec2ForCTC(model.speech.config).save_pretrained(root / "speech")
    BertForMaskedLM(model.text.config).save_pretrained(root / "text")
    return root


def with_weights(saved: Path, *more: str) -> list[str]:
    folders = [f"model.speech={saved / 'speech'}", f"model.text={saved / 'text'}"]
    return [*tiny("model.speech_config={}", "model.text_config={}"), *folders, *more]


def test_weights_of_folders_are_where_training_begins(saved: Path) -> None:
    from safetensors.torch import load_file

    job = load_job(RECIPE, with_weights(saved))
    said: list[str] = []
    job.workload.prepared = job.workload.prepare(job.config, said.append)
    assert sum("are loaded from" in text for text in said) == 2
    built: Any = job.workload.build_model(job.config)
    for name, prefix in (("speech", "wav2vec2."), ("text", "bert.")):
        files = load_file(saved / name / "model.safetensors")
        own = getattr(built, name).state_dict()
        shared = {key for key in own if prefix + key in files}
        assert len(shared) > 20 and {key for key in own if not key.startswith("pooler")} == shared
        for key in shared:
            assert torch.equal(own[key], files[prefix + key]), key
    assert not any(p.requires_grad for p in built.speech.feature_extractor.parameters())
    assert any(p.requires_grad for p in built.speech.encoder.parameters())
    assert not built.text.training


def test_weights_that_do_not_fit_are_refused(saved: Path) -> None:
    job = load_job(RECIPE, with_weights(saved, "model.speech_config.num_hidden_layers=2"))
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    with pytest.raises(DataError, match="do not fit Wav2Vec2Model: .* missing"):
        job.workload.build_model(job.config)


def test_a_warm_start_takes_what_was_trained_and_no_other_model(
    model: SpeechClip, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["project_speech.bias"] += 1
    save_file(state, tmp_path / "model.safetensors")
    job = load_job(RECIPE, tiny(f"model.warm_start={tmp_path}"))
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    torch.manual_seed(0)  # the text encoder's weights are those of the seed
    begun = job.workload.build_model(job.config)
    assert torch.equal(begun.state_dict()["project_speech.bias"], state["project_speech.bias"])
    torch.manual_seed(1)
    with pytest.raises(DataError, match="of the text encoder are not the same"):
        job.workload.build_model(job.config)
    save_file({"log_scale": state["log_scale"]}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="is of another model: .* tensors are missing"):
        job.workload.build_model(job.config)
    other = load_job(RECIPE, tiny(f"model.warm_start={tmp_path / 'nowhere'}"))
    with pytest.raises(DataError, match="has no model.safetensors"):
        other.workload.prepare(other.config, lambda text: None)
