"""What a workload returns for an export: its model in the form of the library that will load it.

    class MyWorkload(Workload):
        def export(self, request: ExportRequest) -> Exported: ...

    parts      models of a library, each with the way it is written and loaded again
    wanted     what the trained model itself says of real inputs, by name
    replay     what parts that were loaded again say of the same inputs
    graphs     the same computation as files of ONNX, each with real inputs

`paceline export` (export/flow.py) does the rest, the same for every workload: it writes, loads what
it wrote, and lets nothing out whose answers are not those of the trained model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

Outputs = Mapping[str, Tensor]
Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class ExportRequest:
    """`model` is in eval mode, on the CPU and in fp32; it is the caller's no more. `batch` has real
    samples, as the run's data makes them. `merge`: adapters become part of the weights."""

    model: nn.Module
    config: Any
    batch: Any
    merge: bool = False


class Part(Protocol):
    """A model of a library, in memory, and how it becomes files."""

    model: nn.Module

    def save(self, folder: Path, pickled: bool) -> None:
        """Write weights and config: as safetensors, or as a pickle of torch."""

    def tensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return what `save` writes of this model, or of one that `load` returned, by name."""

    def save_config(self, folder: Path) -> None:
        """Write all but the weights."""

    def load(self, folder: Path, pickled: bool) -> nn.Module:
        """Return what the library makes of a folder that `save` wrote, in fp32."""


@dataclass(frozen=True)
class Graph:
    """One file of ONNX. `function(model, *inputs)` returns a tuple in the order of `outputs`;
    `axes` names those axes of inputs that may have any length."""

    file: str
    model: nn.Module
    function: Callable[..., tuple[Tensor, ...]]
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]
    axes: Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Exported:
    """A model to hand out. The keys of `parts` are folders inside that of the export; "" is the
    folder itself. `graphs` takes their models. `write_beside` adds what the weights are used
    with, such as a tokenizer."""

    parts: Mapping[str, Part]
    wanted: Outputs
    replay: Callable[[Models], Outputs]
    graphs: Callable[[Models], Sequence[Graph]]
    write_beside: Callable[[Path], None]
    library: str
    task: str  # as Hugging Face calls it
    usage: str  # Python that loads it, for the model card
    about: Mapping[str, Any] = field(default_factory=dict)  # facts for manifest.json
    remarks: Sequence[str] = ()  # what a person should know

    @property
    def models(self) -> dict[str, nn.Module]:
        return {folder: part.model for folder, part in self.parts.items()}


def no_export(name: str) -> ConfigError:
    """Return the refusal of a workload that has no `export`."""
    return ConfigError(
        f"{name} does not say what library its model is for\n"
        "hint: write export(self, request) in the workload; paceline checkpoints convert writes"
        " the tensors of any model by their names"
    )


def first_mask(count_B: Tensor, size: int) -> Tensor:
    """Return an attention mask (B, size): 1 for the first `count` of each row."""
    return (torch.arange(size) < count_B.unsqueeze(1)).long()
