"""samples.jsonl: what the model wrote at each evaluation, a line per prompt or utterance."""

from pathlib import Path

from pydantic import ValidationError

from paceline.errors import DataError
from paceline.records.base import Part
from paceline.records.files import read_regular

MAX_BYTES = 64 << 20


class Sample(Part):
    """`text` continues a `prompt`, or, where it was `heard`, is what the model wrote for it."""

    step: int
    prompt: str
    text: str
    heard: bool = False


def read_samples(path: Path) -> list[Sample]:
    """Return the samples by step, each prompt's last word on a step: a run that was resumed may
    have written some again. A line that was cut off, or is none of ours, is left out."""
    try:
        lines = read_regular(path, MAX_BYTES).splitlines()
    except (OSError, DataError):
        return []
    found: dict[tuple[int, str], Sample] = {}
    for line in lines:
        try:
            sample = Sample.model_validate_json(line)
        except ValidationError:
            continue
        found[sample.step, sample.prompt] = sample
    return sorted(found.values(), key=lambda sample: sample.step)
