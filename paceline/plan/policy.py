"""Chooses precision and attention for this hardware, each with its reason."""

from collections.abc import Iterator

from paceline.attention.crossover import find_crossover
from paceline.attention.flash3 import CHIP, INSTALL, find_flash3, why_not_loaded
from paceline.attention.sizes import Sizes
from paceline.config.schema import NSAConfig, RunConfig
from paceline.machine.datasheets import choose_arithmetic
from paceline.records import Attention, Choice, Crew, Device, Env, Finding, Matmul, Plan, Precision
from paceline.workloads.base import Workload

FAST_BF16 = (8, 0)  # compute capability of Ampere
SDPA_ON_CPU = ("sdpa", "flash", "math")
MAX_FLASH_HEAD = 256  # torch's FlashAttention-2
# Where kernels of ours, and FlashAttention 3, were measured to be faster than torch's, and equal.
MEASURED_CHIP = "H200"
# Widths of heads, and the shortest sequence: benchmarks/results/gpu_flash3_h200_lm_1b.txt.
FLASH3_HEADS, FLASH3_LENGTH = (64, 128), 2048


def choose_precision(config: RunConfig, env: Env, device: Choice[Device]) -> Choice[Precision]:
    asked = config.precision.mode
    if asked != "auto":
        return Choice.as_asked(asked)
    if device.value == "cpu":
        return Choice(requested=asked, value="fp32", because="every CPU computes it")
    capability = capability_of(env)
    if capability is None:
        return Choice(requested=asked, value="bf16", because="cuda was asked; no GPU to look at")
    value = "bf16" if capability >= FAST_BF16 else "fp16"
    return Choice(requested=asked, value=value, because=_because(capability))


def choose_attention(
    config: RunConfig, env: Env, crew: Crew, precision: str, workload: Workload
) -> Choice[Attention]:
    asked = config.attention.impl
    if asked == "nsa":
        return _route_nsa(config, env, crew.device, workload)
    if asked != "auto":
        return Choice.as_asked(asked)
    capability = capability_of(env) if crew.on_gpu else None
    value: Attention = "sdpa"
    because = "torch chooses the kernel"
    flash3 = _try_flash3(config, env, crew, precision, workload)
    if flash3 is not None:
        value, because = flash3
    elif capability is not None and capability >= FAST_BF16:
        because = _because(capability)
    elif capability is not None and "eager" in workload.own_attention:
        value, because = "eager", _because(capability)
    elif capability is not None:
        because = f"{_because(capability)}, but this workload has no eager attention"
    attends = workload.attention in ("causal", "full")
    return Choice(requested=asked, value=value, because=because, matters=attends)


def _try_flash3(
    config: RunConfig, env: Env, crew: Crew, precision: str, workload: Workload
) -> tuple[Attention, str] | None:
    """Return FlashAttention 3, or why what is installed of it cannot be used; None: it is not
    there, or was not measured for such a job."""
    if not crew.on_gpu or capability_of(env) != CHIP or not _suits_flash3(config, workload):
        return None
    kernels = find_flash3()
    if kernels is None or precision != "bf16":
        return None
    if crew.num_nodes > 1:
        return "sdpa", "whether FlashAttention 3 is installed is known of this machine alone"
    broken = why_not_loaded(kernels, env.torch)
    if broken:
        return "sdpa", f"FlashAttention 3 is installed, and cannot be loaded: {broken}"
    return "flash3", f"FlashAttention 3 is installed: faster and equal on {where_measured(env)}"


def _suits_flash3(config: RunConfig, workload: Workload) -> bool:
    """Say whether this is what FlashAttention 3 was measured at."""
    if config.train.deterministic or not workload.attends_plainly(config):
        return False
    length = workload.positions_per_sample(config) or 0
    return workload.head_dim(config) in FLASH3_HEADS and length >= FLASH3_LENGTH


def where_measured(env: Env) -> str:
    """Return the chip that was measured, and what another one has of it."""
    for gpu in env.gpus:
        if MEASURED_CHIP not in gpu.name:
            like = f"{gpu.name} was not measured, and has its compute capability 9.0"
            return f"an {MEASURED_CHIP}; {like}"
    return f"an {MEASURED_CHIP}"


def _route_nsa(
    config: RunConfig, env: Env, device: Choice[Device], workload: Workload
) -> Choice[Attention]:
    """Choose dense attention where it was measured to be faster: nsa is for long contexts."""
    as_asked: Choice[Attention] = Choice.as_asked("nsa")
    if config.attention.nsa.route == "sparse" or device.value == "cpu" or not env.gpus:
        return as_asked
    if "nsa" not in workload.own_attention:
        return as_asked  # refused below
    length, shape = workload.sparse_shape(config)  # type: ignore[attr-defined]
    found = find_crossover(env, shape)
    if isinstance(found, str):
        because = f"as asked; where dense attention is faster could not be measured: {found}"
        return Choice(requested="nsa", value="nsa", because=because)
    where = f"faster than dense from {found.length} tokens on" if found.length else "never faster"
    because = f"on {env.gpus[0].name} nsa was measured to be {where}, and a sequence has {length}"
    is_faster = found.length is not None and length >= found.length
    return Choice(requested="nsa", value="nsa" if is_faster else "sdpa", because=because)


def choose_matmul(config: RunConfig, env: Env, device: Choice[Device]) -> Choice[Matmul]:
    """Choose as asked; where there is no TF32, only what somebody typed is worth a line."""
    asked = config.precision.matmul
    has_tf32 = choose_arithmetic(env, device.value, "fp32", "high") == "tf32"
    means = "fp32 products stay fp32" if asked == "highest" else "fp32 products may use TF32"
    if not has_tf32:
        means = "fp32 products stay fp32: there is no TF32 here"
    return Choice(requested=asked, value=asked, because=means, matters=has_tf32 or asked != "high")


def effective_config(config: RunConfig, attention: str, kernels: str = "torch") -> RunConfig:
    """Return what a workload builds its model from: the choices, where the user left them to us."""
    section = config.attention.model_copy(update={"impl": attention})
    train = config.train.model_copy(update={"kernels": kernels})
    return config.model_copy(update={"attention": section, "train": train})


def keep_route(config: RunConfig, begun: Plan) -> RunConfig:
    """Return the config of a run that resumes, with the attention that it began with: sparse and
    dense have other weights, and this machine may have measured another crossover."""
    if config.attention.impl != "nsa" or begun.attention.requested != "nsa":
        return config
    nsa = config.attention.nsa.model_copy(update={"route": "sparse"})
    section = config.attention.model_copy(update={"impl": begun.attention.value, "nsa": nsa})
    return config.model_copy(update={"attention": section})


def check_policy(config: RunConfig, env: Env, plan: Plan, workload: Workload) -> Iterator[Finding]:
    yield from _precision_problems(config, env, plan)
    yield from _attention_problems(config, env, plan, workload)


def _precision_problems(config: RunConfig, env: Env, plan: Plan) -> Iterator[Finding]:
    capability = capability_of(env) if plan.on_gpu else None
    if plan.precision.value == "bf16" and capability is not None and capability < FAST_BF16:
        yield Finding.error(
            "precision.mode",
            f"bf16 was asked for, and {_because(capability)} has no bf16 arithmetic",
            hint="set precision.mode=fp16, or auto, which chooses it",
            cause="cluster",
        )
    if plan.precision.value == "fp16" and config.precision.loss_scale == "off":
        yield Finding.error(
            "precision.loss_scale",
            "fp16 without a gradient scaler: gradients under 6e-8 would become 0",
            hint="set precision.loss_scale=auto",
        )


def _attention_problems(
    config: RunConfig, env: Env, plan: Plan, workload: Workload
) -> Iterator[Finding]:
    impl, on_cpu = plan.attention.value, not plan.on_gpu
    own = workload.own_attention
    if impl in ("eager", "flex", "nsa") and impl not in own:
        yield _refused(impl, f"{plan.workload} has no {impl} attention", _offer(own, on_cpu))
    elif on_cpu and impl == "flex":
        yield _refused(impl, "flex_attention has no backward pass on CPU", _offer(own, on_cpu))
    elif on_cpu and impl not in (*SDPA_ON_CPU, "eager", "nsa"):
        yield _refused(impl, f"{impl} is a kernel for GPUs, and the ranks are on CPU", "use sdpa")
    elif impl == "flash3":
        kernels = find_flash3()
        broken = why_not_loaded(kernels, env.torch) if kernels else None
        if kernels is None or broken:
            what = f"it cannot be loaded here: {broken}" if broken else "it is not installed here"
            yield _refused(impl, what, INSTALL)
    head = workload.head_dim(config)
    if impl == "nsa" and impl in own and head is not None:
        yield from _sparse_problems(config.attention.nsa, head, on_cpu)
    if impl in ("flash", "flash3", "cudnn") and not on_cpu and head is not None:
        yield from _head_problems(impl, head, plan, capability_of(env))


def _sparse_problems(asked: NSAConfig, head: int, on_cpu: bool) -> Iterator[Finding]:
    """Yield why Triton does not compute nsa where it was asked to, or would on this GPU."""
    is_asked, lacking = asked.kernels == "triton", Sizes.of(asked).no_kernels(head)
    if is_asked and on_cpu:
        yield Finding.error(
            "attention.nsa.kernels",
            "triton was asked for, and the ranks are on CPU",
            hint="set attention.nsa.kernels=auto",
        )
    elif lacking and asked.kernels != "torch" and not on_cpu:
        yield Finding(
            severity="error" if is_asked else "warning",
            where="attention.nsa.l_sel" if "l_sel" in lacking else "attention.nsa.kernels",
            what=f"no Triton kernel: {lacking}; torch's own operations hold a square of tokens",
            hint="the paper's sizes are l_sel=64 and d=16",
        )
    elif asked.ranges == "v1" and asked.kernels != "torch" and not on_cpu:
        yield Finding.warning(
            "attention.nsa.ranges",
            "is set but has no effect: Triton reads the blocks themselves",
            hint="attention.nsa.kernels=torch reads it",
        )


def _head_problems(
    impl: str, head: int, plan: Plan, capability: tuple[int, int] | None
) -> Iterator[Finding]:
    if plan.precision.value == "fp32":
        what = f"{impl} takes bf16 or fp16, and precision is fp32"
        yield _refused(impl, what, "set precision.mode=bf16, or attention.impl=sdpa")
    if head % 8 or head > MAX_FLASH_HEAD:
        what = f"heads of {head}: {impl} takes multiples of 8 up to {MAX_FLASH_HEAD}"
        yield _refused(impl, what, "choose another number of heads, or attention.impl=sdpa")
    if impl == "flash3" and capability is not None and capability != CHIP:
        what = f"it is for compute capability 9.0 alone, and this is {_because(capability)}"
        yield _refused(impl, what, "use sdpa, flash or cudnn")
    elif capability is not None and capability < FAST_BF16:
        yield _refused(impl, f"needs 8.0, and this is {_because(capability)}", "use sdpa or eager")


def _refused(impl: str, what: str, hint: str) -> Finding:
    return Finding.error("attention.impl", f"{impl} was asked for; {what}", hint)


def _offer(own: frozenset[str], on_cpu: bool) -> str:
    # nsa is another model, not another way to compute this one.
    names = [*sorted(own - {"nsa"} - ({"flex"} if on_cpu else set())), "sdpa"]
    return f"set attention.impl to {' or '.join(names)}"


def capability_of(env: Env) -> tuple[int, int] | None:
    """Return the compute capability of the weakest GPU; None where there is none to look at."""
    found = [gpu.compute_capability.partition(".") for gpu in env.gpus]
    return min(((int(major), int(minor or 0)) for major, _, minor in found), default=None)


def _because(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"
