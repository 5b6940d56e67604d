"""The order in which a model is put together, written once, each line with its reason."""

import torch
from torch import nn

from paceline.strategies.base import EngineParts


def build_module(parts: EngineParts) -> nn.Module:
    """The workload's model with its weights on the device, the same on every rank."""
    config, device = parts.config, parts.device
    # Same seed on every rank: replicas start equal without a broadcast.
    torch.manual_seed(config.train.seed)
    if parts.workload.meta_init:
        # Built on meta, filled in place: the weights exist once, on the device.
        with torch.device("meta"):
            model = parts.workload.build_model(config)
        model.to_empty(device=device)
        model.init_weights()  # type: ignore[operator]
    else:
        with device:
            model = parts.workload.build_model(config).to(device)
    if config.train.compile != "off":
        # Before any wrapper: the graph holds the model, not the wrapper's hooks.
        dynamic = {"auto": None, "off": False, "on": True}[config.train.compile_dynamic]
        mode = config.train.compile
        model.compile(mode=None if mode == "default" else mode, dynamic=dynamic)
    return model
