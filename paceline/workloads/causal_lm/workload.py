"""Any AutoModelForCausalLM of transformers, from its config or with its weights.

paceline train tinyllama_fsdp launch.nproc=8
paceline train tinyllama_fsdp model.hf=TinyLlama/TinyLlama-1.1B-Chat-v1.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from paceline.config.section import Section
from paceline.data.base import Dataset
from paceline.records import Finding
from paceline.workloads.base import Split, prepared_path
from paceline.workloads.lm.workload import LanguageModel
from paceline.workloads.meta import on_meta

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.data.tokenizer import Tokenizer
    from paceline.workloads.exporting import Exported, ExportRequest
    from paceline.workloads.generation import Request


class CausalLMModel(Section):
    """The `model` section of causal_lm; its `data` section is the language model's."""

    hf: str = Field(
        "llama",
        min_length=1,
        description="A folder, a name on the Hugging Face hub, or an architecture of transformers"
        " such as llama, which has no weights. A folder called llama is ./llama.",
    )
    hf_config: dict[str, Any] = Field(
        {}, description="Keys of the model's own config, over those that it comes with."
    )
    weights: Literal["auto", "load", "random"] = Field(
        "auto", description="auto: load where there are safetensors files, else random."
    )


class CausalLM(LanguageModel):
    """The language model's data and units, around another model."""

    Model = CausalLMModel  # type: ignore[assignment]
    own_kernels = ""
    from_transformers = True
    preloads = ("paceline.workloads.hf.preloaded",)

    def build_model(self, config: Any) -> nn.Module:
        from paceline.workloads.causal_lm.model import build_causal_lm

        chunk = self.loss_chunk(config)
        return build_causal_lm(self._hf_config(config), config.attention.impl, chunk)

    def init_weights(self, model: nn.Module, name: str, module: nn.Module) -> None:
        from paceline.workloads.hf.model import init_module
        from paceline.workloads.hf.pretrained import load_module

        if self.prepared.get("hf_weights") == "load":
            load_module(model, name, module, prepared_path(self.prepared, "hf_folder"))
        else:
            init_module(model, name, module)

    def head_dim(self, config: Any) -> int | None:  # type: ignore[override]
        from paceline.workloads.causal_lm.model import head_width

        return head_width(self._hf_config(config))

    def build_data(self, config: Any, split: Split) -> Dataset | None:
        from paceline.data.synthetic import SyntheticTokens

        data = config.data
        if data.source != "synthetic":
            return super().build_data(config, split)
        if split == "val":
            return None
        vocab_size = self._hf_config(config).vocab_size
        return SyntheticTokens(data.synthetic_samples, data.seq_len, vocab_size, config.train.seed)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        from paceline.data.packing import split_rows
        from paceline.workloads.causal_lm.model import loss_sum

        rows = split_rows(batch)
        return loss_sum(model, rows), rows.num_targets

    def generate(self, model: nn.Module, request: Request) -> list[list[int]]:
        from paceline.workloads.causal_lm.model import generate

        return generate(model, request)

    def export(self, request: ExportRequest) -> Exported:
        import torch

        from paceline.workloads.hf.causal import first_tokens, hand_out

        ids_BT = first_tokens(request)
        with torch.no_grad():
            wanted_BTV = request.model(input_ids=ids_BT, use_cache=False).logits
        return hand_out(request.model, ids_BT, wanted_BTV, self.prepared)

    def flops(self, config: Any) -> float | None:  # type: ignore[override]
        from paceline.workloads.causal_lm.model import flops_per_token

        seq_len: int = config.data.seq_len
        counted = flops_per_token(self._hf_config(config), seq_len)
        return None if counted is None else counted * seq_len

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Fetch the model's files once, and check the weights before any rank needs them."""

        from paceline.workloads.hf.pretrained import check_weights, choose_weights, find_folder

        settings = config.model
        prepared = super().prepare(config, say)
        folder, source = choose_weights(settings.weights, settings.hf, find_folder(settings.hf))
        if folder is not None and source == "load":
            with on_meta():
                check_weights(self.build_model(config), folder)
            say(f"weights are loaded from {folder}")
        place = {} if folder is None else {"hf_folder": str(folder)}
        return {**prepared, **place, "hf_weights": source}

    def problems(self, config: Any) -> Sequence[Finding]:
        from paceline.workloads.causal_lm.model import check_shape
        from paceline.workloads.hf.model import check_keys

        known, settings, data = self._hf_config(config), config.model, config.data
        return (
            *check_keys(settings.hf_config, type(known)),
            *check_shape(known, data.seq_len, data.keeps_apart),
            *super().problems(config),
            *self._weight_problems(settings),
            *self._fit_problems(config),
        )

    def tokenizer(self, config: Any) -> Tokenizer | None:
        """Return the tokenizer that is asked for. auto: that of the model's folder, if it has one;
        weights that are loaded know no other, so prepared shards must agree with it."""
        from paceline.data.text import find_prepared
        from paceline.data.tokenizer import FILES, find_tokenizer
        from paceline.workloads.hf.pretrained import find_files

        settings, data = config.model, config.data
        if data.tokenizer != "auto" or self._folder(settings.hf) is None:
            return super().tokenizer(config)
        found = find_tokenizer("auto", find_files(settings.hf, FILES))
        is_free = found.is_bytes or settings.weights == "random"
        return super().tokenizer(config) if is_free and find_prepared(data) is not None else found

    def vocabulary(self, config: Any) -> tuple[int, str]:
        return self._hf_config(config).vocab_size, "model.hf_config.vocab_size"

    def loss_chunk(self, config: Any) -> int:
        from paceline.workloads.causal_lm.model import ONLY_A_HEAD

        is_known = self._hf_config(config).model_type in ONLY_A_HEAD
        return super().loss_chunk(config) if is_known else 0

    def _chunk_problems(self, config: Any) -> Iterator[Finding]:
        from paceline.workloads.causal_lm.model import ONLY_A_HEAD

        kind = self._hf_config(config).model_type
        if kind in ONLY_A_HEAD:
            yield from super()._chunk_problems(config)
        elif config.loss.chunk not in ("auto", "off"):
            yield Finding.error(
                "loss.chunk",
                f"the logits of {kind} are not known to be those of its head alone; known are"
                f" {', '.join(ONLY_A_HEAD)}",
                hint="set loss.chunk=off",
            )

    def _weight_problems(self, settings: CausalLMModel) -> Sequence[Finding]:
        if settings.weights != "load" or self._folder(settings.hf) is not None:
            return ()
        return (
            Finding.error(
                "model.weights",
                f"load was asked for, and {settings.hf} is an architecture without weights",
                hint="give model.hf a folder or a name on the hub, or set model.weights=random",
            ),
        )

    def _fit_problems(self, config: Any) -> Sequence[Finding]:
        """Look at the weights of a folder while planning; those of the hub are looked at when they
        are here."""

        from paceline.errors import DataError
        from paceline.workloads.hf.pretrained import check_weights, choose_weights

        settings = config.model
        if settings.weights == "random" or not Path(settings.hf).expanduser().is_dir():
            return ()
        try:
            folder, source = choose_weights(
                settings.weights, settings.hf, self._folder(settings.hf)
            )
            if folder is not None and source == "load":
                with on_meta():
                    check_weights(self.build_model(config), folder)
        except DataError as error:
            what, _, hint = str(error).partition("\nhint: ")
            return (Finding.error("model.hf", what, hint, cause="data"),)
        return ()

    def _hf_config(self, config: Any) -> Any:
        from paceline.workloads.hf.pretrained import load_config

        settings = config.model
        return load_config(settings.hf, settings.hf_config, self._folder(settings.hf))

    def _folder(self, name: str) -> Path | None:
        """Return the folder of the model: on ranks it is known; it is found again wherever a plan
        is made before anything is prepared."""
        from paceline.workloads.hf.pretrained import find_folder

        if "hf_weights" in self.prepared:
            is_named = self.prepared.get("hf_folder") is not None
            return prepared_path(self.prepared, "hf_folder") if is_named else None
        return find_folder(name)
