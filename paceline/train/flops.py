"""FLOPs of a sample where the workload does not state them: counted by torch on meta tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.schema import RunConfig
from paceline.data.loader import map_tensors
from paceline.records import Plan
from paceline.workloads.base import Workload


def flops_per_sample(
    workload: Workload, config: RunConfig, plan: Plan, first_batch: Callable[[], Any]
) -> tuple[float | None, str]:
    """FLOPs of one sample, forward and backward, and where the figure comes from."""
    if plan.flops_per_sample.value is not None:
        return plan.flops_per_sample.value, plan.flops_per_sample.because
    batch = first_batch()
    try:
        with torch.device("meta"):
            model = workload.build_model(config)
        on_meta = map_tensors(lambda tensor: tensor.to("meta"), batch)
        # The counter sees attention only where it is spelt out as matrix products.
        spelt_out = sdpa_kernel(SDPBackend.MATH)
        with FlopCounterMode(display=False) as counter, torch.device("meta"), spelt_out:
            loss, _ = workload.loss(model, on_meta)
            loss.backward()
    except Exception as error:  # any operation of the user's may lack a meta kernel
        return None, f"not counted: {type(error).__name__} on meta tensors: {error}"
    counted = counter.get_total_flops() / plan.batch.micro
    return counted, "counted on the first batch by torch.utils.flop_counter"
