"""What a workload's methods may return, and the errors for anything else, or where they raise.

`loss` and `evaluate` give sums, which are divided once all ranks have added theirs. A sum that
stands alone is divided by what the loss is divided by; a pair brings its own count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, DataError, users_line
from paceline.metrics import LOSS, NAME, Items
from paceline.records import Finding

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.workloads.base import Workload

Number = Any  # a Python number, or a tensor with one element
Pair = tuple[Number, Number]  # a sum, and how many were summed


def read_model(workload: Workload, returned: object) -> nn.Module:
    """Return what `build_model` gave, which is a module."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    name = f"{type(workload).__name__}.build_model"
    if isinstance(returned, nn.Module):
        if lazy := [key for key, parameter in returned.named_parameters() if is_lazy(parameter)]:
            raise ConfigError(
                f"{name} returned a model whose {lazy[0]} has no shape yet: it is built before any"
                " batch is there\nhint: nn.Linear(8, 16) in place of nn.LazyLinear(16), or call"
                " the model once in build_model"
            )
        return returned
    raise ConfigError(
        f"{name} must return a torch.nn.Module; it returned"
        f" {_describe(returned)}\n"
        "hint: end it with `return model`, where model = MyModel(...) is called"
    )


def model_failed(workload: Workload, error: Exception) -> ConfigError:
    """Return what is said where `build_model` raised, with the user's line."""
    return ConfigError(_failed(workload, "build_model", error))


def sketch_failed(workload: Workload, error: Exception) -> ConfigError:
    """Return what is said where the loss of `sketch_batch` raised, with the user's line."""
    return ConfigError(
        f"{_failed(workload, 'loss', error)}\n"
        "train.memory_budget asks it, without data, what a step keeps: of the batch that"
        " sketch_batch returns, whose tensors have shapes and no values\n"
        "hint: define sketch_batch(self, config), a microbatch of zeros as your data gives it; or"
        " set train.activation_checkpointing in the budget's place"
    )


def data_failed(workload: Workload, split: str, error: Exception) -> DataError:
    """Return what is said where `build_data` raised, with the user's line."""
    return DataError(_failed(workload, f"build_data(config, {split!r})", error))


def prepare_failed(workload: Workload, error: Exception) -> DataError:
    """Return what is said where `prepare` raised, with the user's line."""
    return DataError(_failed(workload, "prepare", error))


def no_loader(workload: Workload, split: str) -> DataError:
    """Return what is said where `build_data` gave batches in place of samples."""
    return DataError(
        f"{type(workload).__name__}.build_data(config, {split!r}) returned a DataLoader\n"
        "hint: return its data set: Paceline makes the batches (train.micro_batch_size), shuffles"
        " and loads them (data.num_workers); a collate_fn is collate(self, samples)"
    )


def no_training_data(workload: Workload) -> DataError:
    """Return what is said where `build_data` has nothing to train on."""
    return DataError(
        f"{type(workload).__name__}.build_data(config, 'train') returned None: there is nothing to"
        " train on\n"
        'hint: return a data set, with __len__ and __getitem__, where split is "train"; None is for'
        ' "val"'
    )


def _failed(workload: Workload, call: str, error: Exception) -> str:
    place = users_line(error)
    at = f" at {place}" if place else ""
    return f"{type(workload).__name__}.{call} failed{at}: {type(error).__name__}: {error}"


def read_loss(workload: Workload, returned: object) -> tuple[Tensor, int | Tensor, dict[str, Pair]]:
    """Return the summed loss, its units, and further sums by name, each with its count."""
    name = type(workload).__name__
    if not _is_loss(returned):
        raise ConfigError(
            f"{name}.loss must return two things: the loss summed over the batch, a tensor without"
            " dimensions, and how many were summed; a third may be a dict of further sums; it"
            f" returned {_describe(returned)}\n"
            'hint: return cross_entropy(..., reduction="sum"), len(targets)'
        )
    assert isinstance(returned, tuple)
    loss, units, *more = returned
    extras = more[0] if more else {}
    if problems := [*_bad_names(extras, {LOSS}), *_bad_sums(extras)]:
        raise ConfigError([f"{name}.loss: {problem}" for problem in problems])
    paired = {key: value if _is_pair(value) else (value, units) for key, value in extras.items()}
    return loss, units, paired


def read_measured(workload: Workload, returned: object) -> dict[str, Pair | Items]:
    """Return what `evaluate` found, by name: pairs of sum and count, or Items."""
    name = type(workload).__name__
    if not isinstance(returned, Mapping):
        raise ConfigError(
            f"{name}.evaluate must return a dict, by name (sum, count) or paceline.Items; it"
            f" returned {_describe(returned)}\n"
            'hint: return {"accuracy": paceline.metrics.accuracy(logits, labels)}'
        )
    wrong = [k for k, v in returned.items() if not _is_pair(v) and not isinstance(v, Items)]
    problems = [
        *_bad_names(returned, set()),
        *(f"{k!r} is {_describe(returned[k])}, not (sum, count) or paceline.Items" for k in wrong),
    ]
    if problems:
        raise ConfigError([f"{name}.evaluate: {problem}" for problem in problems])
    return dict(returned)


def read_prepared(workload: Workload, returned: object) -> dict[str, Any]:
    """Return what `prepare` found, as data.json can hold it; one that returns nothing has found
    nothing that ranks must know."""
    name = f"{type(workload).__name__}.prepare"
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{name} must return a dict, or None; it returned {_describe(returned)}")
    problems = [
        f"{name}: {key!r} is {_describe(value)}, which JSON cannot hold, and ranks get it as such\n"
        "hint: a text, a number, or lists and dicts of them; a path as str(path)"
        for key, value in returned.items()
        if not isinstance(key, str) or not _is_plain(value)
    ]
    if problems:
        raise ConfigError(problems)
    return dict(returned)


def require_answers(workload: Workload, config: Any) -> None:
    """Refuse answers of a user's own methods that are of no use, all at once: what the methods of
    `ANSWERS` return of this config."""
    kind = type(workload)
    problems = []
    for method, (is_meant, wanted) in ANSWERS.items():
        if getattr(kind, method).__module__.startswith("paceline."):
            continue
        returned = getattr(workload, method)(config)
        if not is_meant(returned):
            problems.append(
                f"{kind.__name__}.{method} must return {wanted}; it returned {_describe(returned)}"
            )
    if problems:
        raise ConfigError(problems)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _is_amount(value: Any) -> bool:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return value is None or (is_real and 0 < value < math.inf)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_amount(each) for each in value)


COUNT = "an int of 1 or more, or None where it {}"
# What methods return that are asked before anything starts, and how that is said.
ANSWERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "units_per_sample": (_is_count, COUNT.format("varies, and units(self, batch) counts")),
    "positions_per_sample": (_is_count, COUNT.format("varies")),
    "head_dim": (_is_count, COUNT.format("is not known")),
    "flops": (_is_amount, "a number above 0, or None: they are then counted on the first batch"),
    "block_positions": (_are_counts, "a list with a number for each block, or an empty one"),
}


def read_problems(workload: Workload, returned: object) -> list[Finding]:
    """Return what `problems` found."""
    name = f"{type(workload).__name__}.problems"
    hint = (
        '\nhint: paceline.records.Finding(severity="error", where="model.dim", what="is odd",'
        ' hint="make it even") for each; () where there is none'
    )
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise ConfigError(
            f"{name} must return a list of findings; it returned {_describe(returned)}{hint}"
        )
    found = list(returned)
    if odd := [each for each in found if not isinstance(each, Finding)]:
        raise ConfigError(
            f"{name} must return a list of findings; it has {_describe(odd[0])} in it{hint}"
        )
    return found


def require_sound(workload: Workload, config: Any) -> None:
    """Refuse a config in which this workload finds errors, without a plan."""
    require_answers(workload, config)
    found = read_problems(workload, workload.problems(config))
    if problems := [str(each) for each in found if each.severity == "error"]:
        raise ConfigError(problems)


def read_numbers(workload: Workload, returned: object) -> dict[str, float]:
    """Return the numbers that `metrics` gave, by name."""
    name = f"{type(workload).__name__}.metrics"
    if not isinstance(returned, Mapping):
        raise ConfigError(
            f"{name} must return a dict of numbers by name; it returned {_describe(returned)}"
        )
    wrong = [key for key, value in returned.items() if not _is_number(value)]
    problems = [
        *_bad_names(returned, set()),
        *(f"{key!r} is {_describe(returned[key])}, not a number" for key in wrong),
    ]
    if problems:
        raise ConfigError([f"{name}: {problem}" for problem in problems])
    return {key: float(value) for key, value in returned.items()}


def read_shown(workload: Workload, returned: object) -> list[tuple[str, str]]:
    """Return the examples that `shown` gave: pairs of texts."""
    is_list = isinstance(returned, Iterable) and not isinstance(returned, str | Mapping)
    rows: list[Any] = list(returned) if is_list else [returned]  # type: ignore[call-overload]
    odd = [row for row in rows if not _is_pair_of(row, lambda text: isinstance(text, str))]
    if odd:
        raise ConfigError(
            f"{type(workload).__name__}.shown must return a list of pairs of texts, (reference,"
            f" output); it has {_describe(odd[0])} in it"
        )
    return [(said, written) for said, written in rows]


def add_pairs(totals: dict[str, Pair], more: Mapping[str, Pair]) -> None:
    """Add the sums of another microbatch, in place."""
    for name, (value, count) in more.items():
        before = totals.get(name, (0, 0))
        totals[name] = (before[0] + value, before[1] + count)


def join_measured(parts: Sequence[Mapping[str, Pair | Items]]) -> dict[str, Pair | Items]:
    """Put together what `evaluate` found on the microbatches of one batch, in their order."""
    sums: dict[str, Pair] = {}
    items: dict[str, list[Any]] = {}
    for part in parts:
        add_pairs(sums, {k: v for k, v in part.items() if not isinstance(v, Items)})
        for name, value in part.items():
            if isinstance(value, Items):
                items.setdefault(name, []).append(value.values)
    return {**sums, **{name: Items(join_rows(values)) for name, values in items.items()}}


def join_rows(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts: one tensor where all are tensors with rows of one shape, else a
    list."""
    shapes = {tuple(part.shape[1:]) if hasattr(part, "numel") else None for part in parts}
    if len(shapes) != 1 or None in shapes:
        return [row for part in parts for row in part]
    import torch

    return torch.cat(list(parts))


def without_graph(returned: Any) -> Any:
    """Cut what stands beside the loss off from the graph, before a wrapper sees it: no gradient
    comes from there, and nothing of the forward pass is to be kept for it."""
    if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[2], dict):
        return returned
    extras = {
        name: tuple(map(_detached, value)) if isinstance(value, tuple) else _detached(value)
        for name, value in returned[2].items()
    }
    return (*returned[:2], extras)


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _is_loss(returned: object) -> bool:
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        return False
    loss, units, *more = returned
    is_scalar = hasattr(loss, "backward") and loss.dim() == 0
    return is_scalar and _is_number(units) and all(isinstance(x, dict) for x in more)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_number(value: Any) -> bool:
    """Numbers of numpy, as other libraries' metrics return them, are Real too."""
    return value.numel() == 1 if hasattr(value, "numel") else isinstance(value, Real)


def _is_pair(value: Any) -> bool:
    return _is_pair_of(value, _is_number)


def _is_pair_of(value: Any, is_meant: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_meant, value))


def _bad_names(found: Mapping[Any, Any], taken: set[str]) -> Iterator[str]:
    for name in found:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            yield f"{name!r} is not a name for a column\nhint: letters, digits, _ . @ - and /"
        elif name in taken:
            yield f"{name!r} is the loss itself: call what stands beside it otherwise"


def _bad_sums(extras: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in extras.items():
        if not _is_number(value) and not _is_pair(value):
            yield f"{name!r} is {_describe(value)}, not a sum or (sum, count)"


def _describe(value: Any) -> str:
    """Describe a value, `a tuple of (a tensor of shape [8], 8)`: enough to see what is wrong with
    it."""
    if hasattr(value, "numel"):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(_describe(item) for item in value)})"
    if isinstance(value, str):
        return f"the text {value!r:.40}"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "None" if value is None else f"a {type(value).__name__}"
