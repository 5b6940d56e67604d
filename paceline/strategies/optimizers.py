"""The optimizers as data: what each reads, what it keeps, and where it cannot be used.

`KINDS` is the list; `optim.build_optimizer` builds what stands here. Nothing here loads torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec
from math import prod
from typing import Any, Generic, Protocol, TypeVar

from paceline.config.schema import RunConfig
from paceline.config.training import OptimConfig
from paceline.records import Choice, Finding
from paceline.records.words import count, few
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape, ParameterShape, sum_bytes
from paceline.workloads.base import Workload

Shape = tuple[int, ...]
COUNT_BYTES = 4  # a count of steps is one fp32 number
NUM_NEAR = 3
MUON_MOMENTUM = 0.95  # https://kellerjordan.github.io/posts/muon
ADAM_EPS = 1e-8
EIGHT_BIT_BLOCK = 256  # numbers that share a scale
EIGHT_BIT_MIN = 4096  # as bitsandbytes and torchao: fewer numbers are not worth the error
CODES, SCALES = "_codes", "_scales"  # ends of names


class Shaped(Protocol):
    """A parameter, or what stands for one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def is_hidden(self) -> bool: ...


P = TypeVar("P", bound=Shaped)


@dataclass(frozen=True)
class Kind:
    """An optimizer. `place` is its class, as MODULE:NAME, which is built with `settings` beside its
    groups; `reads` are the keys of `optim` that not every optimizer reads. `keeps` is its state of
    one parameter: the shape of each tensor by its name. `needs_whole` says why it cannot update
    some rows of a matrix by themselves; empty: it takes each number by itself; `gathers`: it
    gathers the others where matrices are sharded by rows. `is_fused`: torch has one kernel for the
    whole update, which can veto it on the device."""

    place: str
    reads: tuple[str, ...]
    settings: Callable[[OptimConfig], dict[str, Any]]
    keeps: Callable[[Shaped, OptimConfig], dict[str, Shape]]
    needs_whole: str = ""
    gathers: bool = False
    is_fused: bool = False
    needs: str = ""  # a library of the extra fp8
    compiles: bool = False  # its update is compiled, whatever train.compile says


def _adam(optim: OptimConfig) -> dict[str, Any]:
    eps = ADAM_EPS if optim.eps == "auto" else optim.eps
    return {"betas": (optim.beta1, optim.beta2), "eps": eps}


def _two_moments(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    return {"step": (), "exp_avg": (*parameter.shape,), "exp_avg_sq": (*parameter.shape,)}


def takes_8_bits(shape: Sequence[int]) -> bool:
    """Say whether moments of this shape are kept in 8 bits: many numbers, in whole blocks of a row,
    so that rows can be cut over ranks."""
    width = prod(shape[1:])
    return len(shape) > 1 and width % EIGHT_BIT_BLOCK == 0 and prod(shape) >= EIGHT_BIT_MIN


def _moments_in_8_bits(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    if not takes_8_bits(parameter.shape):
        return _two_moments(parameter, optim)
    rows, width = parameter.shape[0], prod(parameter.shape[1:])
    kept: dict[str, Shape] = {"step": ()}
    for name in ("exp_avg", "exp_avg_sq"):
        kept[f"{name}{CODES}"] = (*parameter.shape,)
        kept[f"{name}{SCALES}"] = (rows, width // EIGHT_BIT_BLOCK)
    return kept


def _sgd_momentum(optim: OptimConfig) -> float:
    return 0.0 if optim.momentum == "auto" else optim.momentum


def _sgd_buffer(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    return {"momentum_buffer": (*parameter.shape,)} if _sgd_momentum(optim) else {}


def _factors(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    """Return the means of a matrix's rows and columns; a vector has a variance for each number."""
    if len(parameter.shape) < 2:
        return {"step": (), "variance": (*parameter.shape,)}
    *before, rows, columns = parameter.shape
    return {"step": (), "row_var": (*before, rows, 1), "col_var": (*before, 1, columns)}


def _muon(optim: OptimConfig) -> dict[str, Any]:
    momentum = MUON_MOMENTUM if optim.momentum == "auto" else optim.momentum
    return _adam(optim) | {"momentum": momentum}


def _muon_keeps(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    if parameter.is_hidden:
        return {"momentum_buffer": (*parameter.shape,)}
    return _two_moments(parameter, optim)


KINDS: Mapping[str, Kind] = {
    "adamw": Kind(
        "torch.optim:AdamW", ("beta1", "beta2", "eps"), _adam, _two_moments, is_fused=True
    ),
    "adamw8bit": Kind(
        "paceline.strategies.eight_bit:AdamW8bit",
        ("beta1", "beta2", "eps"),
        _adam,
        _moments_in_8_bits,
        needs="torchao",
        compiles=True,
    ),
    "adam": Kind("torch.optim:Adam", ("beta1", "beta2", "eps"), _adam, _two_moments, is_fused=True),
    "sgd": Kind(
        "torch.optim:SGD",
        ("momentum",),
        lambda optim: {"momentum": _sgd_momentum(optim)},
        _sgd_buffer,
        is_fused=True,
    ),
    "lion": Kind(
        "paceline.strategies.update_rules:Lion",
        ("beta1", "beta2"),
        lambda optim: {"betas": (optim.beta1, optim.beta2)},
        lambda parameter, optim: {"exp_avg": (*parameter.shape,)},
    ),
    "adafactor": Kind(
        "torch.optim:Adafactor",
        ("eps",),
        lambda optim: {"eps": (None if optim.eps == "auto" else optim.eps, 1e-3)},
        _factors,
        needs_whole="divides by means over whole rows and columns of a matrix",
    ),
    "muon": Kind(
        "paceline.strategies.update_rules:MuonAndAdamW",
        ("beta1", "beta2", "eps", "momentum"),
        _muon,
        _muon_keeps,
        needs_whole="orthogonalises whole matrices",
        gathers=True,
    ),
}


def state_shapes(parameter: Shaped, optim: OptimConfig) -> dict[str, Shape]:
    """Return what the optimizer keeps for a parameter: the shape of each tensor by its name."""
    return KINDS[optim.name].keeps(parameter, optim)


def optimizer_bytes(config: RunConfig, parameters: Iterable[ParameterShape]) -> int:
    """Return the bytes of the state that the optimizer keeps for these, counts of steps included;
    they may be pieces of parameters."""
    return sum(
        _slot_bytes(slot, shape, parameter.itemsize)
        for parameter in parameters
        for slot, shape in state_shapes(parameter, config.optim).items()
    )


def _slot_bytes(slot: str, shape: Shape, itemsize: int) -> int:
    if slot == "step":
        return COUNT_BYTES
    in_fp32 = 4 if slot.endswith(SCALES) else itemsize
    return prod(shape) * (1 if slot.endswith(CODES) else in_fp32)


def ema_bytes(config: RunConfig, parameters: Iterable[ParameterShape]) -> int:
    """Return the bytes of the average of these weights, where one is kept."""
    return 0 if config.optim.ema == "off" else sum_bytes(parameters)


@dataclass(frozen=True)
class Group(Generic[P]):
    """Parameters that the optimizer treats alike."""

    members: list[P]
    lr_scale: float
    weight_decay: float
    is_hidden: bool


def split_groups(parameters: Iterable[P], optim: OptimConfig) -> list[Group[P]]:
    """Split parameters into the optimizer's groups: by the first of `optim.groups` that names
    them, and each of those, and the rest, into matrices and all else, which is not decayed unless
    its group says so: that shrinks norms and biases for nothing. zero1 deals state out group by
    group, DeepSpeed flattens each; both on paper too, so the order is part of it."""
    found: dict[tuple[int, bool, bool], list[P]] = defaultdict(list)
    for parameter in parameters:
        is_hidden = optim.name == "muon" and parameter.is_hidden
        is_vector = len(parameter.shape) < 2
        found[find_rule(parameter.name, optim), not is_hidden, is_vector].append(parameter)
    groups = []
    for (rule, is_other, is_vector), members in sorted(found.items(), key=lambda item: item[0]):
        scale, decay = 1.0, "auto" if rule == len(optim.groups) else optim.groups[rule].weight_decay
        if rule < len(optim.groups):
            scale = optim.groups[rule].lr_scale
        if decay == "auto":
            decay = 0.0 if is_vector else optim.weight_decay
        assert not isinstance(decay, str)
        groups.append(Group(members, scale, decay, not is_other))
    return groups


def find_rule(name: str, optim: OptimConfig) -> int:
    """Return the number of the first of `optim.groups` that a name fits; their count if none
    does."""
    fitting = (n for n, group in enumerate(optim.groups) if fnmatchcase(name, group.match))
    return next(fitting, len(optim.groups))


def is_frozen(name: str, optim: OptimConfig) -> bool:
    rule = find_rule(name, optim)
    return rule < len(optim.groups) and optim.groups[rule].frozen


def builds_own(workload: Workload) -> bool:
    """Say whether the workload builds its optimizer itself."""
    return type(workload).build_optimizer is not Workload.build_optimizer


def choose_optimizer(config: RunConfig, workload: Workload) -> Choice[str]:
    asked = config.optim.name
    if not builds_own(workload):
        return Choice.as_asked(asked, matters=asked != "adamw")
    own = f"{type(workload).__name__}.build_optimizer"
    return Choice(requested=asked, value=own, because="the workload builds its own")


def choose_fused(config: RunConfig, strategy: Strategy, workload: Workload) -> Choice[bool]:
    optim, asked = config.optim, config.optim.fused
    because = ""
    if builds_own(workload):
        because = "the workload builds its own optimizer"
    elif not KINDS[optim.name].is_fused:
        because = f"there is no fused kernel for {optim.name}"
    elif optim.name == "sgd" and strategy.shards(config):
        because = "torch's fused SGD does not know sharded tensors"
    elif optim.name == "sgd" and _sgd_momentum(optim):
        because = "torch's fused SGD leaves its momentum undefined if update 1 is vetoed"
    if because:
        # Whether the workload's own is fused is its own business, and nothing to audit.
        matters = not builds_own(workload)
        return Choice(requested=asked, value=False, because=because, matters=matters)
    if asked == "auto":
        return Choice(requested=asked, value=True, because="one kernel for all parameters")
    return Choice(requested=asked, value=asked == "on", because="as asked")


def has_kernel(config: RunConfig, strategy: Strategy, workload: Workload) -> bool:
    """Say whether our own kernel can update the weights: it is a fused AdamW for a GPU."""
    is_fused = choose_fused(config, strategy, workload).value
    return config.optim.name == "adamw" and is_fused and not strategy.updates_on_host(config)


def check_optimizer(
    config: RunConfig, strategy: Strategy, workload: Workload, model: ModelShape
) -> Iterator[Finding]:
    """Yield what stands against this optimizer, its groups and its average here."""
    yield from _check_groups(config.optim, model)
    if not callable(workload.learning_rate):
        yield Finding.error(
            f"{type(workload).__name__}.learning_rate",
            "is not a method, and Paceline asks it for the rate of each step",
            hint="give it another name; optim.lr is the learning rate",
        )
    if builds_own(workload):
        yield from _check_own(config, strategy, workload)
    else:
        yield from _check_kind(config, strategy, model)
    if config.optim.ema != "off" and strategy.updates_itself:
        yield Finding.error(
            "optim.ema",
            f"{strategy.name} keeps and updates the weights itself, in pieces of its own, and"
            " no average of them is kept",
            hint="set optim.ema=off, or strategy.name=zero2 or zero3",
        )


def _check_kind(config: RunConfig, strategy: Strategy, model: ModelShape) -> Iterator[Finding]:
    optim = config.optim
    kind = KINDS[optim.name]
    is_cut = strategy.updates_itself or (strategy.shards(config) and not kind.gathers)
    if kind.needs_whole and is_cut:
        yield Finding.error(
            "optim.name",
            f"{optim.name} {kind.needs_whole}, and with {strategy.name} each rank updates a"
            " part of every matrix",
            hint="set strategy.name=zero1, which deals out whole matrices, or ddp; or"
            " optim.name=adamw or lion",
        )
    if kind.needs and strategy.updates_itself:
        yield Finding.error(
            "optim.name",
            f"{optim.name} keeps blocks of rows, and {strategy.name} flattens its weights",
            hint="set strategy.name=zero2 or zero3, or optim.name=adamw",
        )
    if kind.needs and find_spec(kind.needs) is None:
        yield Finding.error(
            "optim.name",
            f"{optim.name} needs {kind.needs}, which is not installed",
            hint="pip install 'paceline[fp8]'",
            cause="cluster",
        )
    if optim.name == "adamw8bit":
        yield _tell_8_bits(model)
    if optim.name == "muon" and not any(p.is_hidden for p in model.trainable):
        yield Finding.error(
            "optim.name",
            "muon updates the matrices of a model's blocks, and this model has none to train",
            hint="put its repeated layers into an nn.ModuleList, or set optim.name=adamw",
        )


def _tell_8_bits(model: ModelShape) -> Finding:
    """Say of how many weights the moments are in 8 bits, and which matrices have others."""
    low = [p for p in model.trainable if takes_8_bits(p.shape)]
    others = [p.name for p in model.trainable if len(p.shape) > 1 and p not in low]
    why = f"; not of {few(others)} (few numbers, or rows of no multiple of {EIGHT_BIT_BLOCK})"
    share = sum(p.numel for p in low) / sum(p.numel for p in model.trainable)
    what = f"adamw8bit keeps moments of {share:.1%} of all trained numbers in 8 bits"
    what += why if others else ""
    return Finding(severity="note" if low else "warning", where="optim.name", what=what)


def _check_own(config: RunConfig, strategy: Strategy, workload: Workload) -> Iterator[Finding]:
    where = f"{type(workload).__name__}.build_optimizer"
    if strategy.no_own_optimizer:
        yield Finding.error(
            where,
            f"cannot be used with {strategy.name}: {strategy.no_own_optimizer}",
            hint="set strategy.name=ddp, zero2, zero3 or pipeline; or take the method out, and"
            f" choose one of {', '.join(KINDS)} by optim.name",
        )
    if any(group.lr_scale != 1 or group.weight_decay != "auto" for group in config.optim.groups):
        yield Finding.warning(
            "optim.groups",
            "lr_scale and weight_decay have no effect: the workload builds its own optimizer",
        )
    yield Finding.note(
        where,
        "how much it keeps is not known before its first step: the plan counts what"
        f" {config.optim.name} would",
    )


def _check_groups(optim: OptimConfig, model: ModelShape) -> Iterator[Finding]:
    names = [p.name for p in model.parameters]
    rules = [find_rule(name, optim) for name in names]
    for number, group in enumerate(optim.groups):
        where = f"optim.groups[{number}]"
        if not any(fnmatchcase(name, group.match) for name in names):
            near = get_close_matches(group.match, names, n=NUM_NEAR, cutoff=0.0)
            yield Finding.error(
                where,
                f"{group.match!r} matches none of the {count(len(names), 'parameter')}",
                hint=f"similar names: {', '.join(near)}",
            )
        elif number not in rules:
            yield Finding.warning(
                where,
                f"has no effect: earlier groups match all that {group.match!r} does",
                hint="put it before them: the first match counts",
            )
        if group.frozen and (group.lr_scale != 1 or group.weight_decay != "auto"):
            yield Finding.warning(
                where, "lr_scale and weight_decay have no effect on frozen parameters"
            )
