"""Export of recognisers and of speech-text encoders, and `paceline transcribe` of what it wrote."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import ConfigError, DataError
from paceline.export.flow import ExportOptions, export
from paceline.transcribe.model import Wanted, open_listener
from tests.cli.program import Ran
from tests.cli.test_export import hashes_hold, paceline, quiet  # noqa: F401  (a fixture)
from tests.exports import LETTERS, LORA, WHISPER, make_speech
from tests.speech_clip import RECIPE, corpus, tiny

library = pytest.importorskip("transformers")
soundfile = pytest.importorskip("soundfile")
pytestmark = pytest.mark.slow


def recogniser(folder: Path, *more: str, kind: list[str] = WHISPER) -> Any:
    overrides = ["~model.hf_config", *kind, f"data.root_dir={corpus()}", *more]
    return make_speech(folder, "whisper_tiny_made", overrides, "asr")[0]


def some_audio(folder: Path) -> Path:
    """11 s, so three pieces of what the small Whisper hears."""
    waves = [soundfile.read(path)[0] for path in sorted(corpus().rglob("*.flac"))[:6]]
    path = folder / "long.wav"
    soundfile.write(path, np.concatenate(waves)[: 11 * 16000], 16000)
    return path


def test_whisper_is_handed_out_whole(
    paceline: Callable[..., Ran],  # noqa: F811
    tmp_path: Path,
) -> None:
    run = recogniser(tmp_path / "run")
    ran = paceline("export", run.root, "--merge", "--output", "model")
    assert ran.code == 0 and "--merge changed nothing" in ran.err, ran.err
    folder = tmp_path / "model"
    assert hashes_hold(folder)
    processor = library.AutoProcessor.from_pretrained(folder)
    assert processor.feature_extractor.feature_size == 128
    model = library.AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    heard = processor(np.zeros(16000, np.float32), sampling_rate=16000, return_tensors="pt")
    assert heard.input_features.shape == (1, 128, 400)
    model.generate(heard.input_features, language="en", task="transcribe", max_new_tokens=4)
    recognise = library.pipeline("automatic-speech-recognition", str(folder))
    assert set(recognise({"raw": np.zeros(16000), "sampling_rate": 16000})) == {"text"}
    audio = some_audio(tmp_path)
    ran = paceline("transcribe", "model", audio, "gone.wav", "--json")
    assert ran.code == 4 and "gone.wav: No such file" in ran.err
    long, gone = json.loads(ran.out)
    assert long["duration_s"] == 11.0 and gone["error"]
    ran = paceline("transcribe", "model", "--wer", corpus() / "manifest.tsv", "--split", "dev*")
    assert ran.code == 0 and ran.out.startswith("WER "), ran.err
    (folder / "config.json").write_text("{}")
    ran = paceline("transcribe", "model", audio)
    assert ran.code == 4 and "config.json changed or gone" in ran.err


def test_adapters_are_merged_or_stand_on_their_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    whole = recogniser(tmp_path / "whole")
    base = tmp_path / "base"
    export(whole, ExportOptions(out=base), quiet)
    run = recogniser(tmp_path / "run", f"model.hf={base}", *LORA, kind=WHISPER[1:])
    merged = export(run, ExportOptions(merge=True, out=tmp_path / "merged"), quiet)
    assert merged.compared[0].error < 1e-5
    plain = library.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in plain.named_parameters())
    export(run, ExportOptions(out=tmp_path / "adapter"), quiet)
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    first = library.AutoModelForSpeechSeq2Seq.from_pretrained(base)
    ids, features = torch.tensor([[1, 2, 3]]), torch.randn(1, 128, 400)
    with torch.no_grad():
        before = first(features, decoder_input_ids=ids).logits
        wanted = plain(features, decoder_input_ids=ids).logits
        both = peft.PeftModel.from_pretrained(first, tmp_path / "adapter")
        assert torch.allclose(both(features, decoder_input_ids=ids).logits, wanted, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-3), "the adapters do something"
    with pytest.raises(ConfigError, match="has no adapters"):
        export(run, ExportOptions(format="onnx", out=tmp_path / "onnx"), quiet)
    open_listener(str(tmp_path / "adapter"), Wanted())
    packed = [f"model.hf={base}", *LORA, "model.base=nf4"]
    report = export(recogniser(tmp_path / "q", *packed, kind=WHISPER[1:]), ExportOptions(), quiet)
    assert report.compared[0].error < 1e-5, "on the base in 4 bits, as trained"
    # The same adapters on another base: who swapped it gets an error, not another model.
    state = first.state_dict()
    library.WhisperForConditionalGeneration(plain.config).save_pretrained(base)
    assert state
    (base / "manifest.json").unlink()
    with pytest.raises(DataError, match="trained on another base"):
        open_listener(str(tmp_path / "adapter"), Wanted())
    with pytest.raises(DataError, match="is not the model that the adapters were trained on"):
        export(run, ExportOptions(out=tmp_path / "again"), quiet)


def test_adapters_on_random_weights_need_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run = recogniser(tmp_path / "run", *LORA)
    with pytest.raises(ConfigError, match="--merge writes both together"):
        export(run, ExportOptions(), quiet)
    assert export(run, ExportOptions(merge=True), quiet).compared[0].error < 1e-5
    # Trained weights alone: the base is drawn again by its seed, and is the same.
    part = recogniser(tmp_path / "part", *LORA, "checkpoint.weights=trained")
    export(part, ExportOptions(merge=True), quiet)
    both = [load_file(each.root / "exported/safetensors/model.safetensors") for each in (run, part)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_letters(paceline: Callable[..., Ran], tmp_path: Path) -> None:  # noqa: F811
    run = recogniser(tmp_path / "run", kind=LETTERS)
    export(run, ExportOptions(out=tmp_path / "model"), quiet)
    library.AutoModelForCTC.from_pretrained(tmp_path / "model")
    ran = paceline("transcribe", "model", some_audio(tmp_path), "--device", "cpu")
    assert ran.code == 0 and ran.out.startswith("[00:00.00 -> "), ran.err


def test_two_encoders_and_what_joins_them(tmp_path: Path) -> None:
    from paceline.workloads.speech_clip.export import load_speech_clip

    run, _ = make_speech(tmp_path / "run", RECIPE, tiny("model.projection_dim=6"), "speech_clip")
    report = export(run, ExportOptions(out=tmp_path / "model"), quiet)
    assert [row.output for row in report.compared] == ["speech", "text"]
    model = load_speech_clip(tmp_path / "model")
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "model" / "text")
    assert tokenizer("aé").input_ids == [257, 97, 0xC3, 0xA9, 256]
    assert tokenizer.decode([97, 0xC3, 0xA9]) == "aé"
    heard = library.AutoFeatureExtractor.from_pretrained(tmp_path / "model" / "speech")
    wave = heard(np.random.randn(16000), sampling_rate=16000, return_tensors="pt")
    vector = model.embed_speech(wave.input_values, wave.attention_mask)
    assert vector.shape == (1, 6) and float(vector.norm()) == pytest.approx(1, abs=1e-4)


def test_a_pickle_and_strangers_are_refused(
    paceline: Callable[..., Ran],  # noqa: F811
    tmp_path: Path,
) -> None:
    run = recogniser(tmp_path / "run")
    export(run, ExportOptions(format="pytorch", out=tmp_path / "bin"), quiet)
    audio = some_audio(tmp_path)
    ran = paceline("transcribe", "bin", audio)
    assert ran.code == 4 and "only pytorch_model.bin, which is a pickle" in ran.err
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps({}))
    ran = paceline("transcribe", "adapter", audio)
    assert ran.code == 4 and "a pickle, which can run code, is not read" in ran.err
    ran = paceline("transcribe", run.root, audio)
    assert ran.code == 4 and "is a run" in ran.err
    ran = paceline("transcribe", "./gone", audio)
    assert ran.code == 4 and "./gone is not a folder" in ran.err
    ran = paceline("transcribe", "bin", audio, "--wer", "x.tsv")
    assert ran.code == 2
    export(run, ExportOptions(out=tmp_path / "model"), quiet)
    ran = paceline("transcribe", "model", audio, "--language", "klingon")
    assert ran.code == 2 and "--language klingon is not a language of Whisper" in ran.err
    ran = paceline("transcribe", "model", audio, "--times", "on")
    assert ran.code == 2 and "have no times" in ran.err


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [WHISPER, LETTERS], ids=["whisper", "letters"])
def test_graphs_write_what_weights_write(tmp_path: Path, kind: list[str]) -> None:
    pytest.importorskip("onnxruntime")
    from paceline.transcribe.flow import transcribe

    run = recogniser(tmp_path / "run", kind=kind)
    export(run, ExportOptions(out=tmp_path / "model"), quiet)
    report = export(run, ExportOptions(format="onnx", out=tmp_path / "onnx"), quiet)
    assert any("onnxruntime" in row.by for row in report.compared)
    audio = some_audio(tmp_path)
    by_weights, by_graphs = (
        next(transcribe(open_listener(str(tmp_path / name), Wanted())[0], [audio], 2))
        for name in ("model", "onnx")
    )
    assert by_weights == by_graphs and len(by_weights.text) > 3


@pytest.mark.nightly
def test_graphs_of_two_encoders(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run, _ = make_speech(tmp_path / "run", RECIPE, tiny(), "speech_clip")
    report = export(run, ExportOptions(format="onnx", out=tmp_path / "onnx"), quiet)
    by_runtime = [row.output for row in report.compared if "onnxruntime" in row.by]
    assert by_runtime == ["speech.onnx: speech_vectors", "text.onnx: text_vectors"]
    assert hashes_hold(tmp_path / "onnx")


def write_timed_whisper(folder: Path) -> None:
    """A Whisper of random weights whose tokens have times, as those of the hub do."""
    from paceline.data.logmel import RATE
    from paceline.workloads.asr.export import _asked_ids
    from paceline.workloads.asr.texts import find_speller

    speller: Any = find_speller("whisper", None, "english", "transcribe")
    tokenizer = speller.library
    tokenizer.add_tokens([f"<|{n * 0.02:.2f}|>" for n in range(1501)], special_tokens=True)
    config = library.WhisperConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_target_positions=24, decoder_start_token_id=speller.prompt[0],
        pad_token_id=speller.end_id, bos_token_id=speller.end_id, eos_token_id=speller.end_id,
    )  # fmt: skip
    torch.manual_seed(3)
    model = library.WhisperForConditionalGeneration(config)
    model.generation_config = library.GenerationConfig(**_asked_ids(config, speller))
    model.save_pretrained(folder)
    extractor = library.WhisperFeatureExtractor(feature_size=80, sampling_rate=RATE)
    library.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    find_speller.cache_clear()


@pytest.mark.nightly
def test_whisper_with_times_goes_over_a_long_recording(tmp_path: Path) -> None:
    from paceline.transcribe.flow import transcribe
    from paceline.transcribe.listeners import TimedWhisper, WindowedWhisper

    write_timed_whisper(tmp_path / "model")
    noise = np.random.default_rng(0).normal(size=40 * 16000).astype(np.float32) * 0.1
    soundfile.write(tmp_path / "long.wav", noise, 16000)
    soundfile.write(tmp_path / "short.wav", noise[:32000], 16000)
    listener, _ = open_listener(str(tmp_path / "model"), Wanted(language="en", device="cpu"))
    assert isinstance(listener, TimedWhisper)
    files = [tmp_path / "long.wav", tmp_path / "short.wav"]
    long, short = transcribe(listener, files, 8)
    times = [moment for said in long.segments for moment in (said.start_s, said.end_s)]
    assert times == sorted(times) and times[-1] > 30, "both windows were heard"
    assert all(said.end_s <= 2.0 for said in short.segments) and "<|" not in long.text
    assert len({said.start_s for said in long.segments}) == len(long.segments)
    other, _ = open_listener(str(tmp_path / "model"), Wanted(times="off", device="cpu"))
    assert isinstance(other, WindowedWhisper)


@pytest.mark.nightly
def test_an_export_that_is_killed_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    import signal
    import sys
    import time

    from tests import warm
    from tests.cli.program import environment
    from tests.exports import make

    run, _ = make(tmp_path / "run")
    out = tmp_path / "model"
    argv = [sys.executable, "-m", "paceline", "export", str(run.root), "--output", str(out)]
    process = warm.start(argv, cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 120
    while not (begun := list(tmp_path.glob(".tmp-model-*"))) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert begun and not out.exists()
    assert export(run, ExportOptions(out=out), quiet).num_tensors > 0 and hashes_hold(out)
