"""fp8 on paper: which layers take it and why the others do not, and whether it is worth it.

fp8 products run at less than twice the rate of bf16, and three times a step every layer has to find
scales and cast: that grows with a side of its matrix, the product with both. So large layers gain
and small ones lose. The rates are those of an H200 (benchmarks/results/gpu_fp8_h200.txt); what
matters is their ratio."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from paceline.config.schema import RunConfig
from paceline.plan.policy import capability_of
from paceline.records import Env, Finding, Fp8Plan, Plan
from paceline.records.words import few
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape, ParameterShape
from paceline.workloads.base import Workload

FIRST_FP8 = (8, 9)  # compute capability of Ada
FIRST_ROWWISE = (9, 0)
MULTIPLE = 16  # of both sides of a matrix, asked by the tensor cores
# FLOP/s of large products, and the side of a matrix that costs half of it.
BF16_RATE, FP8_RATE = (740e12, 70), (1500e12, 100)
# By our kernel (kernels/fp8.py), and as torch.compile casts.
CAST_BYTES_PER_S = {"triton": 3.7e12, "torch": 1.8e12}
PRODUCTS_SHARE = 0.74  # of a step in bf16 that is spent in products of layers
# Bytes of traffic for each number of an input or a gradient, and of a weight: find the scale, cast,
# and cast once more the other way round, for products that read along the other side.
CAST_BYTES = {"tensorwise": (6, 10), "rowwise": (7, 12), "rowwise_gw_hp": (4, 12)}
WORTH_IT = 1.02  # below it a gain is noise
UNKNOWN_TOKENS = 16384


def plan_fp8(
    config: RunConfig, plan: Plan, workload: Workload, model: ModelShape, strategy: Strategy
) -> Fp8Plan:
    """Decide for every matrix of the model."""
    asked, recipe = config.precision, config.precision.fp8_recipe
    rate = CAST_BYTES_PER_S["triton" if _has_kernel(recipe, plan, workload) else "torch"]
    known = count_rows(config, plan, workload)
    kept: dict[str, str] = {}
    layers: list[ParameterShape] = []
    before = after = 0.0
    for parameter in model.parameters:
        if not parameter.is_matrix or len(parameter.shape) != 2:
            continue
        # The last unit is no block, and its matrices stay in bf16: any block's number will do.
        tokens = known[min(parameter.unit, len(known) - 1)] if known else UNKNOWN_TOKENS
        bf16_s, fp8_s = product_seconds(parameter, tokens, recipe, rate)
        reason = _keeps_bf16(parameter, bf16_s, fp8_s, asked.fp8_layers)
        before += bf16_s
        after += bf16_s if reason else fp8_s
        if reason:
            kept[parameter.name] = reason
        else:
            layers.append(parameter)
    gathers, gathers_because = _choose_gather(config, plan, strategy, layers, model)
    return Fp8Plan(
        recipe=recipe,
        gathers_fp8=gathers,
        gathers_because=gathers_because,
        is_emulated=not plan.on_gpu,
        layers=[layer.name.removesuffix(".weight") for layer in layers],
        kept=kept,
        gain=1 / (1 - PRODUCTS_SHARE * (1 - after / before)) if before else 1.0,
    )


def _has_kernel(recipe: str, plan: Plan, workload: Workload) -> bool:
    """Say whether layers are computed by kernels/fp8.py, else by torchao: so are those of native
    sparse attention."""
    is_ours = bool(workload.own_kernels) and plan.kernels.value == "triton"
    return is_ours and recipe == "tensorwise" and plan.attention.value != "nsa"


def _choose_gather(
    config: RunConfig,
    plan: Plan,
    strategy: Strategy,
    layers: list[ParameterShape],
    model: ModelShape,
) -> tuple[bool, str]:
    """Return whether weights travel in fp8, and why."""
    asked, ranks = config.precision.fp8_all_gather, _ranks_of_a_weight(plan)
    if why_not := _why_not_gathered(config, strategy, layers, model, ranks):
        return False, why_not
    if asked == "auto":
        return False, "in fp8 it was not measured to be faster between GPUs, nor to learn the same"
    return asked == "on", "as asked"


def _ranks_of_a_weight(plan: Plan) -> int:
    return list(plan.mesh.values())[-1]


def _why_not_gathered(
    config: RunConfig,
    strategy: Strategy,
    layers: list[ParameterShape],
    model: ModelShape,
    ranks: int,
) -> str:
    """Return why weights cannot travel in fp8; empty: they can."""
    if not strategy.shards(config):
        return f"{strategy.name} gathers no weights"
    if config.precision.fp8_recipe != "tensorwise":
        return f"in {config.precision.fp8_recipe} each row has a scale of its own"
    if strategy.updates_on_host(config):
        return "weights that lie on the host have no common scale there"
    if tied := next((layer for layer in layers if layer.is_tied), None):
        return f"{tied.name} belongs to several layers, and torchao would part them"
    if odd := next((layer for layer in layers if layer.shape[0] % ranks), None):
        # torchao sends each piece as it is, and FSDP expects pieces of one size.
        return f"{ranks} ranks cannot share the {odd.shape[0]} rows of {odd.name} evenly"
    names = {layer.name for layer in layers}
    mixed = {p.unit for p in model.parameters if p.name not in names}
    if any(layer.unit not in mixed for layer in layers):
        return "a block has nothing else, and numbers of fp8 alone are not what gloo sends"
    return ""


def _say_gather(asked: str, fp8: Fp8Plan, is_gathered: bool) -> Iterator[Finding]:
    if asked == "on" and not fp8.gathers_fp8:
        yield Finding.warning(
            "precision.fp8_all_gather", f"is set but has no effect: {fp8.gathers_because}"
        )
    elif is_gathered:
        how = "fp8" if fp8.gathers_fp8 else "bf16"
        yield Finding.note(
            "precision.fp8_all_gather", f"weights are gathered in {how}: {fp8.gathers_because}"
        )


def count_rows(config: RunConfig, plan: Plan, workload: Workload) -> list[int]:
    """Return the rows of a layer's input in a microbatch: of each block where they differ, else one
    number; empty: not known before there is a batch."""
    alike = workload.positions_per_sample(config)
    each = workload.block_positions(config) or ([alike] if alike else [])
    return [plan.batch.micro * positions for positions in each]


def product_seconds(
    parameter: ParameterShape, tokens: int, recipe: str, cast_rate: float
) -> tuple[float, float]:
    """Estimate a layer's three products of a step in bf16, and in fp8 with the casts around
    them."""
    rows, columns = parameter.shape
    flops, side = 6 * tokens * rows * columns, min(rows, columns)
    bf16, fp8 = (peak * side / (side + lost) for peak, lost in (BF16_RATE, FP8_RATE))
    each, of_weight = CAST_BYTES[recipe]
    cast = tokens * (rows + columns) * each + rows * columns * of_weight
    is_half = recipe == "rowwise_gw_hp"  # one of the three products stays in bf16
    fast = flops * (2 / 3 if is_half else 1)
    return flops / bf16, fast / fp8 + (flops - fast) / bf16 + cast / cast_rate


def _keeps_bf16(parameter: ParameterShape, bf16_s: float, fp8_s: float, asked: str) -> str:
    rows, columns = parameter.shape
    if not parameter.is_hidden:
        return "stands outside of the blocks: logits and tables need bf16's digits"
    if not parameter.is_linear:
        return "belongs to no nn.Linear that is called: torchao replaces those alone"
    if not parameter.is_trainable:
        return "frozen: only layers that learn are replaced"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"{rows} x {columns}: both sides must be multiples of {MULTIPLE}"
    if asked == "auto" and fp8_s * WORTH_IT > bf16_s:
        return f"{rows} x {columns} is small: casts cost more than fp8 saves"
    return ""


def check_fp8(
    config: RunConfig, env: Env, plan: Plan, workload: Workload, strategy: Strategy
) -> Iterator[Finding]:
    """Yield why fp8 cannot be used here, or what it will bring."""
    if plan.fp8 is None:
        return
    yield from _impossible(env, plan, strategy)
    recipe = plan.fp8.recipe
    takes_any_rows = recipe == "rowwise_gw_hp" or _has_kernel(recipe, plan, workload)
    if plan.on_gpu and plan.fp8.layers and not takes_any_rows:
        yield from _check_rows(count_rows(config, plan, workload), workload.unit)
    if not plan.fp8.layers:
        is_open = config.precision.fp8_layers == "auto"
        small = "; precision.fp8_layers=all takes small ones too" if is_open else ""
        yield Finding.error(
            "precision.mode",
            f"no layer can take fp8: {_reasons(plan.fp8)}",
            hint=f"set precision.mode=bf16{small}",
        )
        return
    kept = f"; in bf16 stay: {_reasons(plan.fp8)}" if plan.fp8.kept else ""
    gain = plan.fp8.gain
    yield Finding.note(
        "precision.mode", f"{len(plan.fp8.layers)} matrices in fp8, {plan.fp8.recipe}{kept}"
    )
    is_gathered = strategy.shards(config) and _ranks_of_a_weight(plan) > 1
    yield from _say_gather(config.precision.fp8_all_gather, plan.fp8, is_gathered)
    if plan.fp8.is_emulated:
        yield Finding.note(
            "precision.mode", "a CPU has no fp8: its rounding is computed, and the products in fp32"
        )
    elif gain < WORTH_IT:
        yield Finding.warning(
            "precision.mode",
            f"fp8 is not worth it here: a step is estimated at {gain:.2f}x the speed of bf16",
            hint="set precision.mode=bf16; layers of 2048 and more gain, and long microbatches",
        )
    else:
        yield Finding.note(
            "precision.fp8_recipe", f"a step is estimated at {gain:.2f}x the speed of bf16"
        )


def _check_rows(known: Sequence[int], unit: str) -> Iterator[Finding]:
    """Yield that gradients of weights cannot be summed in fp8, or what must hold so that they
    can."""
    rule = f"in fp8 gradients of weights sum over multiples of {MULTIPLE}"
    odd = next((rows for rows in known if rows % MULTIPLE), None)
    if odd is not None:
        noun, sizes = ("tokens", "data.seq_len or ") if unit == "tokens" else ("rows", "")
        yield Finding.error(
            "precision.mode",
            f"{odd} {noun} in a microbatch: {rule}",
            hint=f"set {sizes}train.micro_batch_size to a multiple of {MULTIPLE}, or"
            " precision.fp8_recipe=rowwise_gw_hp",
        )
    if not known:
        yield Finding.warning(
            "precision.mode",
            f"how many rows a microbatch has is not known before it is there: {rule}, and a"
            " rank fails at the first that has others",
            hint=f"pad each to a multiple of {MULTIPLE} (tokens, frames or patches of all its"
            " samples together), or set precision.fp8_recipe=rowwise_gw_hp",
        )


def _impossible(env: Env, plan: Plan, strategy: Strategy) -> Iterator[Finding]:
    assert plan.fp8 is not None
    if find_spec("torchao") is None:
        yield Finding.error(
            "precision.mode",
            "fp8 needs torchao, which is not installed",
            hint="pip install 'paceline[fp8]'",
            cause="cluster",
        )
    if strategy.no_fp8:
        yield Finding.error(
            "precision.mode",
            f"fp8 cannot be used with {strategy.name}: {strategy.no_fp8}",
            hint="set precision.mode=bf16, or strategy.name=ddp, zero2 or zero3",
        )
    capability = capability_of(env) if plan.on_gpu else None
    first = FIRST_FP8 if plan.fp8.recipe == "tensorwise" else FIRST_ROWWISE
    if capability is not None and capability < first:
        has, needs = (".".join(map(str, pair)) for pair in (capability, first))
        yield Finding.error(
            "precision.mode",
            f"fp8 by {plan.fp8.recipe} scales needs compute capability {needs}, and this is {has}",
            hint="set precision.mode=bf16",
            cause="cluster",
        )


def _reasons(plan: Fp8Plan) -> str:
    """Return the matrices that stay bf16, by their reasons."""
    by_reason = defaultdict(list)
    for name, reason in plan.kept.items():
        by_reason[reason].append(name)
    return "; ".join(f"{few(names)} ({reason})" for reason, names in by_reason.items())
