"""Models as files that other programs load: by transformers, by peft, or by torch alone.

    TransformersPart(model)      save_pretrained and from_pretrained
    ModulePart(module, "head")   a module of ours: head.safetensors, by torch's load_state_dict

A pickle (`.bin`) is written where it is asked for. It is read back once, here, by torch's reader of
plain tensors (weights_only), and nowhere else: what came from others is never unpickled.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SaveError
from paceline.workloads.hf.model import require_extra
from paceline.workloads.hf.pretrained import quiet

PICKLE = "pytorch_model.bin"


class TransformersPart:
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        # Of a model that came with code of its own: what was trained here is transformers' class.
        model.config.__dict__.pop("auto_map", None)

    def save(self, folder: Path, pickled: bool) -> None:
        if not pickled:
            with quiet():
                self.model.save_pretrained(folder)
            return
        self.save_config(folder)
        torch.save(self.tensors(self.model), folder / PICKLE)

    def tensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        return model.state_dict()

    def save_config(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.dtype = self.model.dtype
        self.model.config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)

    def load(self, folder: Path, pickled: bool) -> nn.Module:
        with quiet():
            model, info = type(self.model).from_pretrained(
                folder,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=not pickled,
                weights_only=True,
                dtype=torch.float32,
            )
        if wrong := {what: names for what, names in info.items() if names}:
            raise SaveError(f"transformers does not load what was written: {wrong}")
        found: nn.Module = model.eval()
        return found


class ModulePart:
    """A module that no library knows, as one file of named tensors."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.model, self.name = module, name

    def save(self, folder: Path, pickled: bool) -> None:
        state = {key: value.contiguous() for key, value in self.tensors(self.model).items()}
        if pickled:
            torch.save(state, folder / f"{self.name}.bin")
        else:
            library = require_extra("safetensors.torch")
            library.save_file(state, folder / f"{self.name}.safetensors", {"format": "pt"})

    def tensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        return model.state_dict()

    def save_config(self, folder: Path) -> None:
        """It has none."""

    def load(self, folder: Path, pickled: bool) -> nn.Module:
        if pickled:
            state = torch.load(folder / f"{self.name}.bin", weights_only=True)
        else:
            library = require_extra("safetensors.torch")
            state = library.load_file(folder / f"{self.name}.safetensors")
        found = deepcopy(self.model).float()
        found.load_state_dict(state)
        return found.eval()
