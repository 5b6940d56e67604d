"""The data seam: samples by index or as a stream, who counts the units of a batch, and the keys
for text.

No torch is imported, so that a config is read quickly.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from paceline.config.schema import DataConfig
from paceline.config.section import Positive


class Dataset(Protocol):
    """Gives samples by index. Optional members:

    `batch(indices)`        builds a whole batch at once, from a numpy array of indices
    `collate_fn(samples)`   or `collate`: makes a batch of samples, where the workload does not
    `lengths`               one number for each sample, or `length(index)`: for data.batch_by=length
                            and data.buckets, and to report how much is padding
    `name(index)`           how a person finds a sample: printed if it does not fit into memory
    `fingerprint`           changes when the data does: a checkpoint is not resumed on other data
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Shards(Protocol):
    """A stream in parts. `shards` names them; `open` returns an iterable of the samples of one. If
    that has `state_dict` and `load_state_dict`, a run is resumed with them."""

    shards: Sequence[Any]

    def open(self, shard: Any) -> Iterable[Any]: ...


# Samples that come one after another: an IterableDataset of torch or of Hugging Face, or any other
# iterable; and shards of them.
Stream = Iterable[Any] | Shards


class CountsUnits(Protocol):
    """Counts the units that the loss is a sum over, such as tokens; workloads implement it."""

    def units(self, batch: Any) -> float: ...


class TextData(DataConfig):
    """The `data` section of workloads that read text."""

    source: str = Field(
        "stdlib",
        description="synthetic, stdlib (Python's own sources), a file or folder of text, JSONL,"
        " parquet or arrow (`save_to_disk`), a folder of `paceline prepare text`, or a data set of"
        " the hub: ORG/NAME, hf://datasets/ORG/NAME@REVISION/FOLDER.",
    )
    tokenizer: str = Field(
        "auto",
        description="bytes, a tokenizer.json, a folder that holds a tokenizer, or ORG/NAME on the"
        " hub. auto: that of the prepared shards or of the model's folder, else bytes.",
    )
    seq_len: Positive = Field(256, description="Tokens per sample.")
    max_files: Literal["all"] | Positive = Field(
        "all", description="Read only this many files of the source."
    )
    text_field: str = Field(
        "text", description="The field of a JSONL row, or the column of a table, with the text."
    )
    pack: Literal["packed", "padded"] = Field(
        "packed",
        description="packed: documents follow each other, and a sample begins anywhere. padded: a"
        " sample is a document, or a piece of one that is longer, filled up to seq_len.",
    )
    document_mask: bool = Field(
        False,
        description="Tokens of a packed sample attend only to their own document; positions"
        " restart with it, and no loss crosses its end.",
    )
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02,
        description="Share of the documents kept apart for validation; unread where parquet or"
        " arrow files have a validation split of their own.",
    )
    cache_dir: str = Field(
        "~/.cache/paceline", description="Where token shards are kept between runs."
    )
    synthetic_samples: Positive = Field(
        1_000_000, description="Length of the synthetic data set, in samples."
    )

    @property
    def keeps_apart(self) -> bool:
        """Say whether samples hold several documents that do not see each other."""
        return self.document_mask and self.pack == "packed" and self.source != "synthetic"

    @property
    def is_uneven(self) -> bool:
        """Say whether samples differ in how many tokens have a loss."""
        return self.keeps_apart or (self.pack == "padded" and self.source != "synthetic")
