"""Adapters alone as files that peft loads onto their base, which stays where it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.extras import require_extra
from paceline.records.base import load_map
from paceline.records.files import write_atomic
from paceline.workloads.asr.lora import (
    ADAPTER,
    ADAPTER_CONFIG,
    BASE_HASH,
    EXTRA,
    NAME,
    adapter_tensors,
    pack_base,
)
from paceline.workloads.hf.pretrained import quiet

PREFIX = "base_model.model."  # as peft calls what it wraps
PICKLE = "adapter_model.bin"


class AdapterPart:
    """A model of transformers with the layers of peft. `base` is the folder below them. Those that
    were trained on it in 4 bits (`is_packed`) are compared on that."""

    def __init__(self, model: Any, base: Path, base_hash: str, is_packed: bool) -> None:
        self.model: Any = model
        self.base, self.base_hash, self.is_packed = base, base_hash, is_packed
        # Beside adapters a head may be trained: CTC's has no base that knows its letters.
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        heads = {name.rpartition(".")[0] for name in trained if "lora_" not in name}
        self.heads = sorted(heads)

    def tensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        own = adapter_tensors(model)
        found = {PREFIX + key.removeprefix(PREFIX): value for key, value in own.items()}
        if model is self.model:  # peft knows of the heads only once it has loaded them
            for head in self.heads:
                for leaf, value in model.get_submodule(head).state_dict().items():
                    found[f"{PREFIX}{head}.{leaf}"] = value
        return {key: value.contiguous() for key, value in found.items()}

    def save(self, folder: Path, pickled: bool) -> None:
        self.save_config(folder)
        if pickled:
            torch.save(self.tensors(self.model), folder / PICKLE)
        else:
            library = require_extra("safetensors.torch", "hf")
            library.save_file(self.tensors(self.model), folder / ADAPTER, {"format": "pt"})

    def save_config(self, folder: Path) -> None:
        """Write peft's config, with the base that the adapters are of."""
        asked = self.model.peft_config[NAME]
        asked.base_model_name_or_path = str(self.base)
        asked.modules_to_save = self.heads or None
        asked.inference_mode = True
        asked.save_pretrained(folder)
        body = load_map(folder / ADAPTER_CONFIG) | {BASE_HASH: self.base_hash}
        write_atomic(folder / ADAPTER_CONFIG, json.dumps(body, indent=2) + "\n")

    def load(self, folder: Path, pickled: bool) -> nn.Module:
        """Let peft put the adapters onto the base, as it was before training."""
        with quiet():
            base = type(self.model).from_pretrained(
                self.base,
                config=self.model.config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
            )
            if self.is_packed:
                pack_base(base)
            found: nn.Module = require_extra("peft", EXTRA).PeftModel.from_pretrained(base, folder)
        return found.float().eval()
