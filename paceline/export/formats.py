"""The formats of an export: each writes a model, loads it again and compares its outputs.

    FORMATS["onnx"].write(exported, folder, dtype)  ->  comparisons, and how many tensors are equal

safetensors and pytorch are the same but for the file of weights; onnx is the computation too.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.data.extras import require_extra
from paceline.errors import ConfigError, SaveError
from paceline.export.records import Comparison
from paceline.workloads.exporting import Exported, Graph, Outputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The largest difference over the largest value that is let out. Weights as they are give the same
# numbers but for the order of sums; rounded ones differ by what 10 or 7 bits leave, layer by layer.
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
GRAPH_LIMIT = 1e-3  # other kernels, other orders of sums
LARGE_BYTES = 1 << 30  # a file of protobuf holds 2 GiB; larger weights go into a file beside it


class Proof(NamedTuple):
    compared: list[Comparison]
    num_tensors: int


class Format(Protocol):
    def write(self, exported: Exported, folder: Path, dtype: str) -> Proof:
        """Write the model, load it again and compare; raise SaveError where it is another."""


class WeightsFormat:
    """Files of named tensors, for the library that has the model's code."""

    def __init__(self, pickled: bool) -> None:
        self.pickled = pickled

    def write(self, exported: Exported, folder: Path, dtype: str) -> Proof:
        kept = dict[str, Mapping[str, Tensor]]()
        for name, part in exported.parts.items():
            (folder / name).mkdir(exist_ok=True)
            part.model.to(DTYPES[dtype])
            part.save(folder / name, self.pickled)
            kept[name] = part.tensors(part.model)
        loaded = {
            name: part.load(folder / name, self.pickled) for name, part in exported.parts.items()
        }
        num_tensors = sum(
            _require_same(kept[name], part.tensors(loaded[name]))
            for name, part in exported.parts.items()
        )
        found = exported.replay(loaded)
        by = f"{exported.library} {version(exported.library)}"
        return Proof(compare(exported.wanted, found, by, LIMITS[dtype]), num_tensors)


class OnnxFormat:
    """One file for each graph of the workload; onnxruntime says whether they compute the same."""

    dtypes: ClassVar = ("float32",)

    def write(self, exported: Exported, folder: Path, dtype: str) -> Proof:
        if dtype not in self.dtypes:
            raise ConfigError(f"--dtype {dtype} is not written as onnx\nhint: --dtype float32")
        models = exported.models
        by = f"torch {version('torch')}"
        # Graphs are made of the library's models: those must say what the trained one says.
        found = compare(exported.wanted, exported.replay(models), by, LIMITS[dtype])
        for name, part in exported.parts.items():
            part.save_config(folder / name)
        for graph in exported.graphs(models):
            found += _write_graph(graph, folder)
        return Proof(found, 0)


FORMATS: dict[str, Format] = {
    "safetensors": WeightsFormat(pickled=False),
    "pytorch": WeightsFormat(pickled=True),
    "onnx": OnnxFormat(),
}


def compare(wanted: Outputs, found: Outputs, by: str, limit: float) -> list[Comparison]:
    """Compare output by output; raise SaveError where one differs by more than `limit`."""
    rows = []
    for name, ours in wanted.items():
        theirs = found[name]
        if theirs.shape != ours.shape:
            raise SaveError(f"{by} gives {name} the shape {theirs.shape}, not {ours.shape}")
        ours, theirs = ours.double(), theirs.double()
        largest = float(ours.abs().max()) or 1.0
        error = float((theirs - ours).abs().max()) / largest
        if not error <= limit:  # NaN is not
            raise SaveError(
                f"{by} computes another {name}: it differs by {error:.2g} of the largest value, and"
                f" {limit:g} is allowed\nhint: --dtype float32 keeps the weights as they are"
            )
        rows.append(
            Comparison(output=name, shape=list(ours.shape), by=by, error=error, limit=limit)
        )
    return rows


def _require_same(kept: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    """Require every tensor as it was written, bit for bit but for its type; return how many."""
    wrong = sorted(kept.keys() ^ found.keys())
    for name in kept.keys() & found.keys():
        if not torch.equal(kept[name].to(found[name].dtype), found[name]):
            wrong.append(name)
    if wrong:
        raise SaveError(f"what was read back is not what was written: {wrong[:8]}")
    return len(found)


class Calls(nn.Module):
    """A function of a model as a module: what torch's exporter takes."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.model, self.function = graph.model, graph.function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.model, *inputs)


def _write_graph(graph: Graph, folder: Path) -> list[Comparison]:
    """Export one graph, and ask onnxruntime about its inputs: all of them, and the first alone, as
    another length of its batch."""
    path, module = folder / graph.file, Calls(graph).eval()
    names, tensors = list(graph.inputs), tuple(graph.inputs.values())
    require_extra("onnxscript", "export")
    with _silence(), torch.no_grad():
        program = torch.onnx.export(
            module,
            tensors,
            dynamo=True,
            input_names=names,
            output_names=list(graph.outputs),
            dynamic_shapes=(tuple(_dims(graph, name) for name in names),),  # of *inputs
            verbose=False,
        )
        assert program is not None, "dynamo gives a program"
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        program.save(path, external_data=num_bytes > LARGE_BYTES)
    session = _open(path)
    found = []
    for rows in (slice(None), slice(0, 1)):
        inputs = [tensor[rows] for tensor in tensors]
        with torch.no_grad():
            wanted = dict(zip(graph.outputs, module(*inputs), strict=True))
        feed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        answers = map(torch.from_numpy, session.run(list(graph.outputs), feed))
        by = f"onnxruntime {version('onnxruntime')}"
        found += compare(wanted, dict(zip(graph.outputs, answers, strict=True)), by, GRAPH_LIMIT)
    named = [row.model_copy(update={"output": f"{graph.file}: {row.output}"}) for row in found]
    return named[: len(graph.outputs)]


def _dims(graph: Graph, name: str) -> dict[int, Any]:
    return {axis: torch.export.Dim(word) for axis, word in graph.axes.get(name, {}).items()}


def _open(path: Path) -> Any:
    """Load the file as a user would; the checker of onnx has looked at it before."""
    runtime = require_extra("onnxruntime", "export")
    require_extra("onnx.checker", "export").check_model(str(path))
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@contextmanager
def _silence() -> Iterator[None]:
    """While inside, the exporter keeps its remarks to itself; what it cannot do, it raises."""
    talk = logging.getLogger("torch.onnx")
    level = talk.level
    talk.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        talk.setLevel(level)
