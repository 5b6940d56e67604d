"""Kept: what a checkpoint says of itself, in state.json and manifest.json."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from paceline.records.base import Body, Part, Record


class StreamPlaces(Part):
    """Where each reader of a stream stands (data/streams.py:Place)."""

    places: list[tuple[int, int, int, int, Any]] = Field(
        description="Of each reader: epoch, which of its shards, samples of it, of a block that was"
        " read ahead, and the source's own state."
    )

    @property
    def how(self) -> str:
        """How it is resumed, in words."""
        if any(state is not None for *_, state in self.places):
            return "by the state of its source"
        return "by counting: samples of a shard that were taken are read again and skipped"


class DataPosition(Part):
    """Where in the data a run stands. `position` alone decides; the rest says what that means."""

    position: int = Field(description="Samples taken since the run began, over all ranks.")
    num_samples: int
    seed: int
    epoch: int
    segment: int = Field(description="Optimizer steps taken inside this epoch.")
    start_index: int = Field(description="Where in the epoch's order the last step began.")
    end_index: int = Field(description="Where it ended: the next sample's place.")
    fingerprint: str
    stream: StreamPlaces | None = Field(None, description="Of data that comes in turn only.")


class BestMetric(Part):
    """The best value so far of the metric that decides which checkpoint is the best."""

    step: int
    name: str = Field("val/loss", description="As training.csv and train.best call it.")
    value: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} at step {self.step}"


class Kept(Record):
    """state.json: all of a run's state that is not a tensor."""

    SCHEMA: ClassVar[int] = 2

    step: int
    reason: str = Field(description="every, every_s, request, best, end, preempted or interrupted.")
    saved_at: float
    data: DataPosition
    num_skips: int = Field(description="Updates vetoed so far.")
    lr: float = Field(description="The schedule is a function of the step; this was its value.")
    num_steps: int
    best: BestMetric | None
    num_worse: int = Field(0, description="Evaluations since then that were no better.")
    evaluation_is_due: bool = Field(
        False, description="The evaluation of this step was cut short and must be done again."
    )
    strategy: str
    world_size: int
    precision: str
    global_size: int = Field(description="Samples per optimizer step.")
    config_fingerprint: str
    versions: dict[str, str]
    base: str = Field(
        "", description="Of checkpoint.weights=trained: a sum of the weights that it has not."
    )

    @staticmethod
    def update_to_2(body: Body) -> Body:
        """Up to 0.6 the best was that of the validation loss."""
        best = body["best"]
        return body | {"best": best and {"step": best["step"], "value": best["val_loss"]}}


class FileSum(Part):
    """A file of tensors also has the sum of its head: that and the parts' sums cover every byte."""

    num_bytes: Annotated[int, Field(ge=0)]
    xxh3: str
    head_bytes: Annotated[int, Field(ge=0)] = 0
    head_xxh3: str = ""

    @model_validator(mode="after")
    def _head_is_part_of_it(self) -> Self:
        if self.head_bytes > self.num_bytes:
            raise ValueError(f"head_bytes {self.head_bytes} of a file of {self.num_bytes}")
        return self


class TensorRows(Part):
    """Some rows of a tensor: the file they are in, where in it, and the sum of their bytes."""

    file: str
    row: int
    num_rows: int
    offset: int
    xxh3: str


class TensorEntry(Part):
    shape: list[int]
    dtype: str
    parts: list[TensorRows]


class Manifest(Record):
    """manifest.json: every file with its sum, every tensor with its place. Written last."""

    SCHEMA: ClassVar[int] = 1

    step: int
    files: dict[str, FileSum]
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]
    seal: str = Field("", description="Sum over this record without its seal: an edit shows.")

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())
