"""The workload seam: what a job must bring to be trained. Built-in ones use nothing more.

class MyWorkload(Workload):
    def build_model(self, config): ...               an nn.Module
    def build_data(self, config, split): ...         a Dataset; None where there is no such split
    def collate(self, samples): ...                  a batch, where samples differ in size
    def loss(self, model, batch): ...                (sum of the losses, how many were summed)
    def evaluate(self, model, batch): ...            if there is more to measure than the loss
    def metrics(self, found): ...                    from that to numbers, once for all samples
    def generate(self, model, request): ...          if it writes text: paceline generate
    def export(self, request): ...                   for other programs: paceline export
    def on_step(self, step, record): ...             a hook; so are on_eval and on_checkpoint

paceline train my_job.py:MyWorkload train.steps=50
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.config.schema import DataConfig
from paceline.config.section import Section
from paceline.data.base import Dataset, Stream
from paceline.errors import ConfigError, DataError
from paceline.metrics import LOSS
from paceline.records import Finding
from paceline.workloads.given import find_given, is_given
from paceline.workloads.job_file import remember_typed
from paceline.workloads.required import class_problems, explain_import
from paceline.workloads.returns import read_loss

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.workloads.exporting import Exported, ExportRequest
    from paceline.workloads.generation import Request

Split = Literal["train", "val"]
Waiting = Callable[[], AbstractContextManager[None]]
# Ours; other packages register theirs as entry points of GROUP.
REGISTRY = {
    "lm": "paceline.workloads.lm.workload:LanguageModel",
    "causal_lm": "paceline.workloads.causal_lm.workload:CausalLM",
    "mae": "paceline.workloads.mae.workload:MaskedAutoencoder",
    "speech_clip": "paceline.workloads.speech_clip.workload:SpeechText",
    "asr": "paceline.workloads.asr.workload:SpeechRecognition",
    "uneven": "paceline.workloads.uneven:Uneven",
}
GROUP = "paceline.workloads"


def prepared_path(prepared: Mapping[str, Any], name: str) -> Path:
    """Return a path from the result of `prepare`, as read from data.json."""
    place = prepared.get(name)
    if not isinstance(place, str):
        raise DataError(
            f"data.json of the run has no path in {name!r}: {place!r}\n"
            "hint: it is written anew by a run that is started or resumed"
        )
    return Path(place)


class Workload:
    """Base of every workload. Override what differs; the three methods that raise are required."""

    Model: ClassVar[type[Section]] = Section
    Data: ClassVar[type[DataConfig]] = DataConfig
    Loss: ClassVar[type[Section]] = Section
    unit: ClassVar[str] = "samples"
    # True: the model is built on meta, and `init_weights` fills what of it this rank holds.
    meta_init: ClassVar[bool] = False
    # True: `build_model` returns a model of transformers; checkpoints convert to its layout.
    from_transformers: ClassVar[bool] = False
    # What `attention.impl` may be beside the kernels of torch's SDPA.
    own_attention: ClassVar[frozenset[str]] = frozenset()
    own_kernels: ClassVar[str] = ""  # which of its layers `train.kernels` is for, in words
    # How the model attends; FLOPs count half of causal attention.
    attention: ClassVar[Literal["causal", "full", "none", "unknown"]] = "unknown"
    # Why a pipeline cannot run it; empty: it may.
    no_pipeline: ClassVar[str] = ""
    # Which ranks call `on_step`, `on_eval` and `on_checkpoint`.
    hook_ranks: ClassVar[Literal["first", "all"]] = "first"
    knows_base: ClassVar[bool] = False  # `prepare` returns "base_hash", of its first weights
    # Modules that the fork server imports for its ranks because they load slowly. Never one that
    # touches GPUs as it is imported: ranks forked after that could not use them.
    preloads: ClassVar[tuple[str, ...]] = ()
    # What `prepare` returned, on every rank.
    prepared: Mapping[str, Any] = MappingProxyType({})
    # `with self.waiting_for_ranks():` around the workload's own collectives, in `loss` or in the
    # backward pass, so that they do not count as this rank's work. Set by the engine.
    waiting_for_ranks: Waiting = nullcontext

    def build_model(self, config: Any) -> nn.Module:
        """Build the model on torch's default device. Also called with the meta device, to measure
        its size."""
        raise ConfigError(f"{type(self).__name__} must define build_model(self, config)")

    def init_weights(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Fill one module's own parameters and buffers, in place. Only where `meta_init`. Random
        numbers are torch's, seeded by the module's name: any rank may fill any module."""
        raise ConfigError(f"{type(self).__name__} has meta_init: define init_weights")

    def head_dim(self, config: Any) -> int | None:
        """Return the width of an attention head; None if there is none, or it is not known."""
        return None

    def attends_plainly(self, config: Any) -> bool:
        """Say whether all its attention is by SDPA, causal, without a mask and without dropout."""
        return False

    def build_data(self, config: Any, split: Split) -> Dataset | Stream | None:
        """Return the samples of a split, by index; None if this workload has no such split.
        Training data may be a stream: an iterable, or an object with `shards` and `open(shard)`."""
        raise ConfigError(f"{type(self).__name__} must define build_data(self, config, split)")

    def sketch_batch(self, config: Any) -> Any:
        """Return a microbatch of zeros, to estimate activations by; None: not known."""

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of these samples, for instance by `paceline.data.pad`. The default is the
        data set's own `batch(indices)` or `collate_fn(samples)`, else torch's `default_collate`."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """Return the loss *summed* over the batch's units, and the number of units. A third value
        may be a dict of further sums, reported as train/NAME: a number or tensor, which is divided
        by the same units, or a pair (sum, count)."""
        raise ConfigError(f"{type(self).__name__} must define loss(self, model, batch)")

    def build_optimizer(self, model: nn.Module, config: Any) -> Optimizer | None:
        """Return an optimizer of all trained parameters, in place of `optim.name`. `model` is this
        rank's: it may have only some layers, or pieces of weights (DTensor). The schedule
        multiplies each group's rate."""
        return None

    def learning_rate(self, step: int, config: Any) -> float | None:
        """Return the learning rate of step 1, 2, ...; None: that of `optim.schedule`."""
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return what is measured on a batch of validation data, by name: (sum, count), or
        `paceline.Items` with one value per sample. By default everything that `loss` returns. The
        model is in eval mode, without gradients. Ranks may need each other inside a forward pass,
        so a rank that has run out of samples evaluates one of another rank's, and the result is
        dropped: return everything, and keep nothing in `self`."""
        loss_sum, units, extras = read_loss(self, self.loss(model, batch))
        return {LOSS: (loss_sum, units), **extras}

    def metrics(self, found: Mapping[str, Any]) -> Mapping[str, float]:
        """Return further results of an evaluation, by name. `found` has what `evaluate` returned on
        all ranks: for a pair the mean; for Items the values of all samples, each once and in
        order. Called on rank 0 only, so it must not call a collective."""
        return {}

    def shown(self, found: Mapping[str, Any], config: Any) -> Sequence[tuple[str, str]]:
        """Return examples for report and log, from what `metrics` is given: (reference, output)."""
        return ()

    def generate(self, model: nn.Module, request: Request) -> list[list[int]]:
        """Continue prompts, which are ids, and return the new ids of each. The model is in eval
        mode, without gradients."""
        raise no_text(self)

    def export(self, request: ExportRequest) -> Exported:
        """Return the model in the form of another library, with the trained model's outputs for
        real samples: see workloads/exporting.py."""
        from paceline.workloads.exporting import no_export

        raise no_export(type(self).__name__)

    def on_step(self, step: int, record: Mapping[str, Any]) -> None:
        """Called for each step with its row of training.csv, when the row is complete: up to
        `train.log_every` steps later, so that nothing waits for the device."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation, with its results by name, such as val/loss."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called for each checkpoint once it is complete and on disk."""

    def units_per_sample(self, config: Any) -> int | None:
        """Return the units in each sample; None if they vary, and `units` counts every batch."""
        return 1

    def units(self, batch: Any) -> float:
        """Return the units in one batch; for a weighted loss, the sum of the weights. Needed only
        if `units_per_sample` is None."""
        raise ConfigError(f"{type(self).__name__}.units_per_sample is None: define units(batch)")

    def flops(self, config: Any) -> float | None:
        """Return the forward and backward FLOPs per sample; None: count them on the first batch."""
        return None

    def positions_per_sample(self, config: Any) -> int | None:
        """Return how many positions of a sample (tokens, with padding) a layer processes; None if
        they vary, or are not known."""
        return self.units_per_sample(config) if self.unit == "tokens" else None

    def block_positions(self, config: Any) -> Sequence[int]:
        """Return how many positions of a sample (tokens, patches) go through each block, if that
        differs between blocks: pipelines are balanced by it."""
        return ()

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Prepare data once, before ranks start. The result, if there is one, reaches every rank as
        `self.prepared`, through data.json; its numbers are reported."""
        return {}

    def problems(self, config: Any) -> Sequence[Finding]:
        """Return the problems of a config for this workload, as far as known before launch."""
        return ()


def no_text(workload: Workload) -> ConfigError:
    """Return the refusal of a workload that has no `generate`."""
    return ConfigError(
        f"{type(workload).__name__} generates no text\n"
        "hint: lm and causal_lm do, and so does a workload with generate(self, model, request)"
    )


def own_collate(workload: Workload) -> Callable[[list[Any]], Any] | None:
    """Return the workload's rule to make a batch, where it has one."""
    return None if type(workload).collate is Workload.collate else workload.collate


def find_workload(name: str, typed: bool) -> type[Workload]:
    """Return the class that a name stands for: a registered one, FILE.py:Class if the user typed
    it, or one that this process was given."""
    if is_given(name):
        return _require_workload(find_given(name), name)
    if ".py:" in name:
        if not typed:
            raise ConfigError(
                f"workload: {name} stands in a YAML file; a file may not choose code to run\n"
                f"hint: type it: paceline train {name} ..., or workload={name}"
            )
        remember_typed(name)
        return _from_file(name)
    if name in REGISTRY:
        module, _, class_name = REGISTRY[name].partition(":")
        return _require_workload(getattr(importlib.import_module(module), class_name), name)
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = sorted({*REGISTRY, *installed})
        raise ConfigError(
            f"there is no workload '{name}'\n"
            f"hint: the installed ones are {', '.join(known)}; yours is FILE.py:Class"
        )
    return _require_workload(installed[name].load(), name)


def load_trusted(name: str) -> type[Workload]:
    """Return the class that a name stands for which has been typed, or found trusted, already."""
    return _from_file(name) if ".py:" in name else find_workload(name, typed=False)


def _from_file(name: str) -> type[Workload]:
    file, _, class_name = name.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"{file} does not exist\nhint: give the path of your workload's file")
    module_name = f"paceline_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pickling its classes to loader workers needs the entry
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(explain_import(file, error)) from error
    if not hasattr(module, class_name):
        found = [key for key, value in vars(module).items() if _is_workload(value)]
        raise ConfigError(
            f"{file} has no class {class_name}\nhint: its workloads: {', '.join(found) or 'none'}"
        )
    return _require_workload(getattr(module, class_name), name)


def _is_workload(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Workload) and value is not Workload


def _require_workload(value: object, name: str) -> type[Workload]:
    if not _is_workload(value):
        raise ConfigError(
            f"{name} is not a workload\nhint: class {name.rsplit(':', 1)[-1]}(paceline.Workload)"
        )
    assert isinstance(value, type)
    if problems := list(class_problems(value, Workload, name)):
        raise ConfigError(problems)
    return value
