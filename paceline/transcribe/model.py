"""Opens a folder as a listener: an export of Paceline's, or any Whisper or CTC of transformers.

    listener, says = open_listener(path, Wanted(language="spanish"))

Weights are read from safetensors, or graphs from ONNX; what is only a pickle is refused. The files
of an export must be those that its manifest has hashes of.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.data.extras import require_extra
from paceline.errors import ConfigError, DataError
from paceline.export.flow import hash_files
from paceline.export.records import MANIFEST, ExportManifest
from paceline.records.base import load_map
from paceline.records.words import few
from paceline.run.trained import choose_device
from paceline.transcribe.listeners import (
    FIRST_TIME,
    Letters,
    Listener,
    TimedWhisper,
    WindowedWhisper,
    ids_by_graphs,
    ids_by_torch,
    logits_by_graph,
    logits_by_torch,
)
from paceline.workloads.asr.lora import (
    ADAPTER,
    ADAPTER_CONFIG,
    BASE_HASH,
    EXTRA,
    base_hash,
)
from paceline.workloads.asr.model import AUTO, CTC, WHISPER
from paceline.workloads.asr.texts import LetterSpeller, Speller, find_speller
from paceline.workloads.hf.pretrained import (
    INDEX,
    PICKLES,
    SINGLE,
    config_class,
    find_files,
    quiet,
    read_config,
)

FILES = ("*.json", "*.safetensors", "*.txt", "*.onnx", "*.onnx.data")
GRAPHS = ("encoder_model.onnx", "model.onnx")
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model. `language` and `task` "auto": as its folder says. `times`: auto,
    on or off; auto is on where the model's tokens have times, and Paceline did not train it."""

    language: str = "auto"
    task: str = "auto"
    times: str = "auto"
    device: str = "auto"


def open_listener(path: str, wanted: Wanted) -> tuple[Listener, str]:
    """Load a model that writes down speech; return it, and say what it is."""
    folder = _find(path)
    is_ours = _require_unchanged(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return _open_adapter(folder, wanted)
    config = _config(folder)
    speller = _speller(folder, config, wanted)
    if any((folder / name).is_file() for name in GRAPHS):
        return _open_graphs(folder, config, speller, wanted)
    _require_weights(folder)
    model = _load(folder, config)
    return _listen(model, folder, speller, wanted, is_ours)


def _find(path: str) -> Path:
    place = Path(path).expanduser()
    if (place / "run.yaml").is_file():
        raise DataError(
            f"{path} is a run, not a model's folder\n"
            f"hint: paceline export {path} --merge, then {path}/exported/safetensors"
        )
    if place.is_dir():
        return place.resolve()
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise DataError(
            f"{path} is not a folder\nhint: give one that paceline export or save_pretrained wrote"
        )
    return find_files(path, FILES)


def _require_unchanged(folder: Path) -> bool:
    """Compare an export's files with the hashes in its manifest; False where it is not one."""
    path = folder / MANIFEST
    if not path.is_file() or load_map(path).get("kind") != "paceline export":
        return False
    manifest, found = ExportManifest.load(path), hash_files(folder)
    wrong = [name for name, kept in manifest.files.items() if found.get(name) != kept]
    if wrong:
        raise DataError(
            f"{folder} is not what was exported: {few(wrong)} changed or gone\n"
            "hint: restore the files, or export again"
        )
    return True


def _config(folder: Path) -> Any:
    config = config_class(str(folder), read := read_config(folder)).from_dict(read)
    if config.model_type not in (WHISPER, *CTC):
        raise ConfigError(
            f"{folder} holds a {config.model_type}, which does not recognise speech\n"
            f"hint: give a {WHISPER}, or one of {', '.join(CTC)} with CTC"
        )
    return config


def _require_weights(folder: Path) -> None:
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    pickled = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    has = f"only {pickled[0]}, which is a pickle and can run code" if pickled else "none"
    raise DataError(
        f"weights are read from {SINGLE}; {folder} has {has}\n"
        "hint: paceline export RUN_DIR --format safetensors, or save_pretrained, writes it"
    )


def _speller(folder: Path, config: Any, wanted: Wanted) -> Speller:
    said = _generation(folder)
    language = said.get("language") if wanted.language == "auto" else wanted.language
    task = said.get("task") if wanted.task == "auto" else wanted.task
    language = str(language or "english").strip("<|>")
    if task not in (None, "transcribe", "translate"):
        raise ConfigError(f"--task {task} is neither transcribe nor translate")
    try:
        return find_speller(config.model_type, folder, language, str(task or "transcribe"))
    except ConfigError as error:
        told = str(error).replace("model.language=", "--language ")
        raise ConfigError(told) from error


def _generation(folder: Path) -> dict[str, Any]:
    return load_map(folder / GENERATION) if (folder / GENERATION).is_file() else {}


def _load(folder: Path, config: Any) -> Any:
    kind = getattr(
        require_extra("transformers", "hf"), AUTO.get(config.model_type, "AutoModelForCTC")
    )
    try:
        with quiet():
            model, info = kind.from_pretrained(
                folder,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except Exception as error:  # transformers and safetensors have many
        raise DataError(
            f"{folder} cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error
    missing = [name for name in info["missing_keys"] if not name.startswith("masked_spec_embed")]
    if missing:
        raise DataError(f"the weights in {folder} lack {few(sorted(missing))}")
    return model


def _open_adapter(folder: Path, wanted: Wanted) -> tuple[Listener, str]:
    """Load adapters onto their base, which must be the one they were trained on."""
    asked = load_map(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER).is_file():
        raise DataError(
            f"{folder} has no {ADAPTER}; a pickle, which can run code, is not read\n"
            "hint: paceline export RUN_DIR --format safetensors writes it"
        )
    base = _find(str(asked.get("base_model_name_or_path")))
    _require_weights(base)
    kept = asked.get(BASE_HASH)
    if kept is not None and base_hash(base, {}, 0) != kept:
        raise DataError(
            f"the adapters in {folder} were trained on another base than {base} holds now:"
            f" {kept}\nhint: bring that model back, or export the run with --merge"
        )
    config = _config(base)
    model = _load(base, config)
    peft = require_extra("peft", EXTRA)
    try:
        merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:  # peft has no one class for what does not fit
        why = " ".join(str(error).split())[:300]
        raise DataError(f"the adapters in {folder} do not fit {base}: {why}") from error
    speller = _speller(folder, config, wanted)
    return _listen(merged, folder, speller, wanted, is_ours=True)


def _open_graphs(
    folder: Path, config: Any, speller: Speller, wanted: Wanted
) -> tuple[Listener, str]:
    if wanted.times == "on":
        raise ConfigError("--times on needs weights\nhint: export as safetensors")
    if wanted.device == "cuda":
        raise ConfigError("--device cuda was asked for, and graphs are run on the CPU here")
    num_threads = len(os.sched_getaffinity(0))
    says = f"ONNX graphs of {folder} by onnxruntime, on cpu"
    if isinstance(speller, LetterSpeller):
        return Letters(config, speller, logits_by_graph(folder, num_threads)), says
    decode = ids_by_graphs(folder, config, speller, _generation(folder), num_threads)
    return WindowedWhisper(config, speller, decode), says


def _listen(
    model: Any, folder: Path, speller: Speller, wanted: Wanted, is_ours: bool
) -> tuple[Listener, str]:
    device = choose_device(wanted.device)
    model = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16).eval()
    says = f"{type(model).__name__} of {folder}, on {device.type}"
    if isinstance(speller, LetterSpeller):
        return Letters(model.config, speller, logits_by_torch(model)), says
    has_times = FIRST_TIME in speller.library.get_vocab()
    if wanted.times == "on" and not has_times:
        raise ConfigError("--times on: the model's tokens have no times\nhint: leave it out")
    if has_times and (wanted.times == "on" or (wanted.times == "auto" and not is_ours)):
        extractor = require_extra("transformers", "hf").WhisperFeatureExtractor
        asked = {"language": wanted.language, "task": wanted.task}
        given = {key: value for key, value in asked.items() if value != "auto"}
        return TimedWhisper(model, speller, extractor.from_pretrained(folder), given), says
    return WindowedWhisper(model.config, speller, ids_by_torch(model, speller)), says
