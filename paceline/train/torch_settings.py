"""Settings that torch keeps for a whole process: precision, determinism, attention kernels."""

import torch
from torch.nn.attention import SDPBackend

from paceline.attention.flash3 import use_flash3
from paceline.records import Plan

# `attention.impl` to the only kernel that SDPA may then take.
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def apply_policy(plan: Plan) -> None:
    """Set what torch holds for the whole process: once, from the plan, before a model is built.

    A context around the forward pass would not do: recomputation runs in backward.
    """
    _apply_determinism(plan)
    torch.set_float32_matmul_precision(plan.matmul.value)
    torch.backends.cudnn.allow_tf32 = plan.matmul.value != "highest"
    allow_kernels(plan.attention.value, plan.compile.value != "off")


def allow_kernels(attention: str, is_compiled: bool) -> None:
    """Let SDPA take this kernel alone, or any."""
    if is_compiled:
        import torch.compiler.config as compiler_config

        # torch keys its cache of compiled graphs by the graph, not by which kernels were allowed:
        # without a mark of our own, a run that asks for cudnn gets the flash of the run before it.
        compiler_config.cache_key_tag = f"paceline: {attention} attention"
    use_flash3(attention == "flash3")
    only = KERNELS.get(attention)
    torch.backends.cuda.enable_flash_sdp(only in (None, SDPBackend.FLASH_ATTENTION))
    torch.backends.cuda.enable_mem_efficient_sdp(only in (None, SDPBackend.EFFICIENT_ATTENTION))
    torch.backends.cuda.enable_cudnn_sdp(only in (None, SDPBackend.CUDNN_ATTENTION))
    torch.backends.cuda.enable_math_sdp(only in (None, SDPBackend.MATH))


def _apply_determinism(plan: Plan) -> None:
    """Allow only kernels that give the same bits again, or any: a process may run several plans."""
    # torch.use_deterministic_algorithms does the same, and loads the compiler: 2 s in each rank.
    torch.set_deterministic_debug_mode("error" if plan.deterministic else "default")
    torch.backends.cudnn.deterministic = plan.deterministic
    if plan.deterministic:
        torch.backends.cudnn.benchmark = False  # it takes whichever was fastest this time
    if plan.compile.value != "off":
        import torch._inductor.config as inductor_config

        inductor_config.deterministic = plan.deterministic  # its kernels are not chosen by timing
