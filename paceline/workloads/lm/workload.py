"""The language-model workload: next-token prediction on text or on synthetic tokens.

torch is imported where it is used, so that `paceline recipes` can read the schema without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.attention.crossover import Shape
from paceline.attention.sizes import Sizes
from paceline.config.section import Positive, Section
from paceline.data.base import Dataset, TextData
from paceline.errors import ConfigError, DataError
from paceline.metrics import LOSS, bits_per_byte, perplexity
from paceline.records import Finding
from paceline.records.words import size
from paceline.workloads.base import Split, Workload, prepared_path

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.data.shards import Manifest
    from paceline.data.tokenizer import Tokenizer
    from paceline.workloads.exporting import Exported, ExportRequest
    from paceline.workloads.generation import Request


AUTO_CHUNK = 4096  # tokens: enough rows for products at their full rate
LARGE_LOGITS = 4 * 2**30
LOGIT_BYTES = 2  # of a logit in bf16


class LMModel(Section):
    vocab_size: Positive = Field(320, description="Rows of the embedding; bytes need 257.")
    dim: Positive = Field(128, description="Width of the residual stream.")
    num_layers: Annotated[int, Field(ge=1, le=1000)] = Field(4, description="Transformer blocks.")
    num_heads: Positive = Field(4, description="Query heads.")
    num_kv_heads: Positive = Field(4, description="Key and value heads; divides num_heads.")
    ffn_dim: Literal["auto"] | Positive = Field(
        "auto", description="Width inside SwiGLU. auto: 8/3 dim, rounded up to 64."
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(10000.0, description="Base of RoPE.")
    tied: bool = Field(False, description="The output head is the embedding, transposed.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim {self.dim} over num_heads {self.num_heads} must be an even whole number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Width inside SwiGLU, in channels."""
        if self.ffn_dim != "auto":
            return self.ffn_dim
        return -(-8 * self.dim // 3 // 64) * 64


class LMLoss(Section):
    chunk: Literal["auto", "off"] | Positive = Field(
        "auto",
        description="Tokens whose logits exist at a time; no product is computed twice. auto: all,"
        " or 4096 where a microbatch's logits would take 4 GiB or more. off: all.",
    )


class LanguageModel(Workload):
    Model = LMModel
    Loss = LMLoss
    own_kernels = "RoPE, SwiGLU and weight gradients"
    Data = TextData
    unit = "tokens"
    attention = "causal"
    meta_init = True
    own_attention = frozenset({"eager", "flex", "nsa"})

    def build_model(self, config: Any) -> nn.Module:
        from paceline.workloads.lm.model import LM

        kernels = "triton" if config.train.kernels == "triton" else "torch"
        chunk = self.loss_chunk(config)
        if config.attention.impl == "nsa":
            from paceline.workloads.lm.nsa import Sparse, SparseLM

            sparse = Sparse.of(config)
            return SparseLM(config.model, config.data.seq_len, sparse, kernels=kernels, chunk=chunk)
        return LM(config.model, config.data.seq_len, config.attention.impl, kernels, chunk)

    def init_weights(self, model: nn.Module, name: str, module: nn.Module) -> None:
        model.init_module(name, module)  # type: ignore[operator]

    def head_dim(self, config: Any) -> int:
        return int(config.model.head_dim)

    def attends_plainly(self, config: Any) -> bool:
        cls, own = type(self), LanguageModel  # what else is built from, or fed, nobody knows here
        is_own = cls.build_model is own.build_model and cls.loss is own.loss
        return is_own and not getattr(config.data, "keeps_apart", False)

    def sketch_batch(self, config: Any) -> Any:
        import torch

        rows = config.train.micro_batch_size, config.data.seq_len + 1
        return {"tokens": torch.zeros(rows, dtype=torch.int64)}

    def build_data(self, config: Any, split: Split) -> Dataset | None:
        from paceline.data.synthetic import SyntheticTokens
        from paceline.data.text import open_tokens

        if config.data.source == "synthetic":
            if split == "val":
                return None
            return SyntheticTokens(
                config.data.synthetic_samples,
                config.data.seq_len,
                config.model.vocab_size,
                config.train.seed,
            )
        return open_tokens(prepared_path(self.prepared, "shards"), config.data, split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, ...]:
        from paceline.data.packing import split_rows

        rows = split_rows(batch)
        apart = () if rows.positions_BT is None else (rows.positions_BT,)
        loss = model(rows.inputs_BT, rows.targets_BT, *apart)
        told = getattr(model, "told", None)  # of sparse attention's gates and choices
        return (loss, rows.num_targets) if told is None else (loss, rows.num_targets, told())

    def metrics(self, found: Mapping[str, Any]) -> dict[str, float]:
        if LOSS not in found:  # a subclass may evaluate something else
            return {}
        numbers = {"perplexity": perplexity(found[LOSS])}
        length = self.prepared.get("bytes_per_token")
        if isinstance(length, int | float) and length > 0:
            numbers["bits_per_byte"] = bits_per_byte(found[LOSS], length)
        return numbers

    def units_per_sample(self, config: Any) -> int | None:
        return None if config.data.is_uneven else int(config.data.seq_len)

    def positions_per_sample(self, config: Any) -> int:
        return int(config.data.seq_len)  # rows are padded where a text is shorter

    def units(self, batch: dict[str, Tensor]) -> int:
        from paceline.data.packing import count_targets

        return count_targets(batch)

    def generate(self, model: nn.Module, request: Request) -> list[list[int]]:
        from paceline.workloads.lm.model import generate

        return generate(model, request)  # type: ignore[arg-type]

    def export(self, request: ExportRequest) -> Exported:
        import torch

        from paceline.workloads.hf.causal import first_tokens, hand_out
        from paceline.workloads.lm.export import as_llama

        ids_BT = first_tokens(request)
        with torch.no_grad():
            wanted_BTV = request.model(ids_BT)
        return hand_out(as_llama(request.model), ids_BT, wanted_BTV, self.prepared)  # type: ignore[arg-type]

    def flops(self, config: Any) -> float:
        from paceline.workloads.lm.model import flops_per_token

        seq_len: int = config.data.seq_len
        if config.attention.impl == "nsa":
            from paceline.workloads.lm.nsa import sparse_flops_per_token

            return sparse_flops_per_token(config.model, seq_len, config.attention.nsa) * seq_len
        return flops_per_token(config.model, seq_len) * seq_len

    def sparse_counted(self, config: Any) -> str:
        """Return how native sparse attention is counted in `flops`, in words behind a comma."""
        from paceline.workloads.lm.model import flops_per_token

        sizes, seq_len = Sizes.of(config.attention.nsa), config.data.seq_len
        keys = " + ".join(f"{number:.0f}" for number in sizes.seen(seq_len))
        dense = flops_per_token(config.model, seq_len) * seq_len
        return (
            f", attention as computed: a query sees {keys} keys (compressed, selected, window) on"
            f" average; with dense attention it would be {dense:.4g}"
        )

    def sparse_shape(self, config: Any) -> tuple[int, Shape]:
        """Return the tokens of a sequence and the shape of its attention: short ones are attended
        to densely where that is faster."""
        model = config.model
        sizes = Sizes.of(config.attention.nsa)
        shape = Shape(model.num_heads, model.num_kv_heads, model.head_dim, sizes)
        return config.data.seq_len, shape

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        from paceline.data.text import find_prepared, prepare_tokens, require_same_tokenizer
        from paceline.data.tokenizer import BYTES

        if config.data.source == "synthetic":
            return {}
        asked = self.tokenizer(config)
        shards, manifest = prepare_tokens(config.data, say, asked or BYTES)
        if asked is not None and find_prepared(config.data) is not None:
            require_same_tokenizer(manifest, shards, asked)
        problem = check_vocabulary(
            manifest.tokenizer, manifest.vocab_size, *self.vocabulary(config)
        )
        if problem is not None:
            raise ConfigError(str(problem))
        return describe_shards(shards, manifest)

    def tokenizer(self, config: Any) -> Tokenizer | None:
        """Return the tokenizer that is asked for; None where prepared shards decide."""
        from paceline.data.text import find_prepared
        from paceline.data.tokenizer import find_tokenizer

        asked = config.data.tokenizer
        if asked == "auto" and find_prepared(config.data) is not None:
            return None
        return find_tokenizer(asked)

    def vocabulary(self, config: Any) -> tuple[int, str]:
        """Return how many kinds of tokens the model has, and the key that says so."""
        return config.model.vocab_size, "model.vocab_size"

    def problems(self, config: Any) -> Sequence[Finding]:
        return (
            *check_data(config),
            *self._chunk_problems(config),
            *self.tokenizer_problems(config),
        )

    def loss_chunk(self, config: Any) -> int:
        """Return how many tokens' logits exist at a time; 0: those of all."""
        return choose_chunk(config, self.vocabulary(config)[0])

    def _chunk_problems(self, config: Any) -> Iterator[Finding]:
        yield from check_chunk(config, self.vocabulary(config)[0])

    def tokenizer_problems(self, config: Any) -> Sequence[Finding]:
        """Look at a tokenizer that lies here; one of the hub is looked at when it is here."""
        from paceline.data.shards import MANIFEST, Manifest
        from paceline.data.text import find_prepared
        from paceline.data.tokenizer import is_local

        data, prepared = config.data, find_prepared(config.data)
        if data.source == "synthetic" or not is_local(data.tokenizer):
            return ()
        try:
            found = self.tokenizer(config)
            if found is None:
                assert prepared is not None, "shards decide"
                manifest = Manifest.load(prepared / MANIFEST)
                name, size = manifest.tokenizer, manifest.vocab_size
            else:
                name, size = found.name, found.vocab_size
        except DataError as error:
            what, _, hint = str(error).partition("\nhint: ")
            return (Finding.error("data.tokenizer", what, hint, cause="data"),)
        problem = check_vocabulary(name, size, *self.vocabulary(config))
        return () if problem is None else (problem,)


def describe_shards(shards: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what goes into data.json: where tokens are, and what they were made of."""
    length = 1.0 if manifest.is_bytes else manifest.bytes_per_token("val")
    kind = "unigram_entropy" if manifest.is_bytes else "token_unigram_entropy"
    return {
        "shards": str(shards),
        kind: manifest.unigram_entropy,
        "source": manifest.source,
        "tokenizer": str(manifest.tokenizer_file(shards) or "bytes"),
        "tokenizer_sha256": manifest.tokenizer_sha256,
        **({"revision": manifest.revision} if manifest.revision else {}),
        **({"bytes_per_token": length} if length else {}),
    }


def check_vocabulary(name: str, size: int, num_rows: int, where: str) -> Finding | None:
    """Check that the model has a row for each token of the tokenizer."""
    if num_rows >= size:
        return None
    what = "byte tokens, which need" if name == "bytes" else f"the ids of {name}, which need"
    return Finding.error(
        where,
        f"{num_rows} rows cannot hold {what} {size}",
        hint=f"set {where}={size} or more, or choose another data.tokenizer",
    )


def choose_chunk(config: Any, vocab_size: int) -> int:
    """Return how many tokens' logits exist at a time; 0: those of all. A section that another
    workload has made of this one may have no such key."""
    asked = getattr(config.loss, "chunk", "off")
    if asked == "off" or config.precision.mode == "fp16":
        return 0
    if asked == "auto":
        return AUTO_CHUNK if _logits_bytes(config, vocab_size) >= LARGE_LOGITS else 0
    return int(asked)


def _logits_bytes(config: Any, vocab_size: int) -> int:
    tokens = config.train.micro_batch_size * config.data.seq_len
    return int(tokens * vocab_size * LOGIT_BYTES)


def check_chunk(config: Any, vocab_size: int) -> Iterator[Finding]:
    """Yield why the loss is computed in chunks, or cannot be."""
    asked, chunk = getattr(config.loss, "chunk", "off"), choose_chunk(config, vocab_size)
    if asked not in ("auto", "off") and config.precision.mode == "fp16":
        yield Finding.error(
            "loss.chunk",
            "the gradient of a chunk's logits is taken before fp16's loss scale is known, and"
            " small ones would become 0",
            hint="set loss.chunk=off, or precision.mode=bf16 where the GPU has it",
        )
    elif asked == "auto" and chunk:
        logits = size(_logits_bytes(config, vocab_size))
        yield Finding.note(
            "loss.chunk",
            f"the logits of a microbatch would take {logits}, and their gradient as much: the"
            f" loss is computed {chunk} tokens at a time",
        )


def check_data(config: Any) -> Iterator[Finding]:
    """Yield keys for documents that cannot be met, or have no effect."""
    data, impl = config.data, config.attention.impl
    if data.keeps_apart and impl in ("flash", "flash3"):
        yield Finding.error(
            "attention.impl",
            f"{impl} was asked for, and its kernel takes no data.document_mask",
            hint="set attention.impl=sdpa, or flex on GPUs",
        )
    fixed = type(data).model_fields
    idle = {"tokenizer", "pack", "document_mask"} if data.source == "synthetic" else set()
    because = {key: "data.source is synthetic" for key in idle}
    if data.pack == "padded" and not idle:
        because["document_mask"] = "a padded sample holds one document"
    for key, why in because.items():
        if getattr(data, key) != fixed[key].default:
            yield Finding.warning(f"data.{key}", f"is set but has no effect: {why}")
