"""README.md of an export: what the model is, how it is loaded, and the figures of its run."""

import json
import time
from pathlib import Path

from paceline.export.records import ExportManifest
from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.records.words import count, number, plain, table, visible
from paceline.report.story import Story, asked, headline, read_story
from paceline.workloads.exporting import Exported

CARD = "README.md"


def write_card(
    folder: Path, name: str, run: RunDir, manifest: ExportManifest, exported: Exported
) -> None:
    """Write the card of a folder that will be called `name`."""
    story = read_story(run)
    blocks = [
        _front(manifest, exported),
        f"# {plain(story.name)}",
        _what(story, manifest),
        "## Use",
        _usage(folder, name, manifest, exported),
        *(f"- {plain(remark)}" for remark in exported.remarks),
        f"## Figures of step {manifest.step}",
        _of_step(story, manifest.step),
        "## Figures of the run",
        table(
            ("figure", "value", ""),
            [(each.label, each.text, each.beside) for each in headline(story)],
        ),
        "## Compared",
        f"The trained model and what was loaded again were asked about {manifest.inputs}.",
        table(
            ("output", "shape", "by", "largest difference", "allowed"),
            [
                (row.output, str(row.shape), row.by, f"{row.error:.1e}", f"{row.limit:.0e}")
                for row in manifest.compared
            ],
        ),
        "## Versions",
        table(("", ""), list(manifest.versions.items())),
        "## Config of the run",
        f"```yaml\n{visible(story.config).replace('```', '')}```",
    ]
    text = "\n\n".join(block for block in blocks if block) + "\n"
    write_atomic(folder / CARD, visible(text))


def _front(manifest: ExportManifest, exported: Exported) -> str:
    """Return what Hugging Face's hub reads of a card. JSON is YAML."""
    facts = {
        "library_name": "onnx" if manifest.format == "onnx" else exported.library,
        "pipeline_tag": exported.task,
        "tags": ["paceline", manifest.workload],
        "base_model": exported.about.get("base_model"),
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in facts.items() if value is not None]
    return "\n".join(["---", *lines, "---"])


def _what(story: Story, manifest: ExportManifest) -> str:
    weights = "the average of the weights" if manifest.is_average else "the weights"
    best = ", the best of the run" if manifest.is_best else ""
    parts = [
        f"A model of the workload `{manifest.workload}`, {weights} of step {manifest.step}{best},"
        f" as {manifest.format} in {manifest.dtype}"
        f"{', adapters merged' if manifest.is_merged else ''}."
    ]
    if story.result is not None:
        day = time.strftime("%Y-%m-%d", time.gmtime(story.result.started_at))
        parts.append(
            f"Trained on {day} with Paceline: {plain(story.result.strategy)} on"
            f" {count(story.result.world_size, 'rank')} in {plain(story.result.precision)}."
        )
    if words := asked(story):
        parts.append(f"Asked for: `paceline train {plain(words)}`.")
    return " ".join(parts)


def _usage(folder: Path, name: str, manifest: ExportManifest, exported: Exported) -> str:
    if manifest.format == "onnx":
        files = sorted(path.name for path in folder.glob("*.onnx"))
        lines = ["import onnxruntime", ""]
        lines += [f'session = onnxruntime.InferenceSession("{name}/{file}")' for file in files]
        return "```python\n" + "\n".join(lines) + "\n```\n\nInputs and outputs have names."
    return f"```python\n{exported.usage.replace('FOLDER', name)}```"


def _of_step(story: Story, step: int) -> str:
    """Return the numbers of the last row up to a step that has them: the loss of the step itself,
    metrics of the evaluation at it."""
    found: dict[str, tuple[float, int]] = {}
    for row in story.training:
        if row.step > step:
            break
        numbers = {"loss": row.loss, "val/loss": row.val_loss, **row.metrics}
        found |= {name: (value, row.step) for name, value in numbers.items() if value is not None}
    if not found:
        return "No steps were recorded."
    rows = [(name, number(value), f"step {at}") for name, (value, at) in sorted(found.items())]
    return table(("figure", "value", "of"), rows)
