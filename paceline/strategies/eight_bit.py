"""AdamW with its moments in 8 bits: 2 bytes of state for a weight instead of 8.

Each 256 numbers of a row share a scale, and each is the nearest of 256 values that are densest
around 0 (https://arxiv.org/abs/2110.02861); torchao has the map and the search. The update itself
is in fp32. Codes and scales are plain tensors with a parameter's rows, so they are sharded, saved
and resumed bit by bit like any others. A parameter whose rows have another width, or with few
numbers, keeps moments of its own type."""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.strategies.fp8 import load_torchao
from paceline.strategies.gather import cut_rows_like, locals_of
from paceline.strategies.optimizers import CODES, EIGHT_BIT_BLOCK, SCALES, takes_8_bits

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


class AdamW8bit(Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= _first_state(parameter)
        state["step"] += 1
        names = [name for name in state if name != "step"]
        assert parameter.grad is not None, "asked by step"
        pieces = locals_of([parameter, parameter.grad, *(state[name] for name in names)])
        weight, gradient, kept = pieces[0], pieces[1], dict(zip(names, pieces[2:], strict=True))
        if not weight.numel():
            return
        update = _compiled() if weight.is_cuda else _move
        # Numbers that change go in as tensors: as constants each step would compile anew.
        rates = torch.tensor([group["lr"], *_corrections(state["step"], group["betas"])])
        settings = (*group["betas"], group["eps"], group["weight_decay"])
        maps = _maps(weight.device) if "exp_avg" not in kept else None
        update(weight, gradient, kept, rates.to(weight.device), settings, maps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; torch casts all state of a weight to the weight's type, which only moments of few
        numbers have."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name == "step":
                    self.state[parameter][name] = value.cpu()
                elif name.endswith((CODES, SCALES)):
                    dtype = torch.uint8 if name.endswith(CODES) else torch.float32
                    self.state[parameter][name] = value.to(parameter.device, dtype)


def _first_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.zeros(())}
    if not takes_8_bits(parameter.shape):
        zeros = {name: torch.zeros_like(parameter) for name in MOMENTS}
        return state | zeros
    (rows,) = locals_of([parameter])
    num_blocks = prod(parameter.shape[1:]) // EIGHT_BIT_BLOCK  # of a rank without rows, too
    for name, is_signed in MOMENTS.items():
        zero = _zero_code(is_signed)
        codes = torch.full(rows.shape, zero, dtype=torch.uint8, device=rows.device)
        scales = torch.zeros(len(rows), num_blocks, device=rows.device)
        state[f"{name}{CODES}"] = cut_rows_like(parameter, codes)
        state[f"{name}{SCALES}"] = cut_rows_like(parameter, scales)
    return state


@cache
def _zero_code(is_signed: bool) -> int:
    quant = load_torchao("optim.quant_utils")
    return int(quant.create_dynamic_map(is_signed).index(0))


@cache
def _maps(device: torch.device) -> dict[str, Tensor]:
    """Return the 256 values of each moment."""
    quant = load_torchao("optim.quant_utils")
    return {
        name: torch.tensor(quant.create_dynamic_map(is_signed), device=device)
        for name, is_signed in MOMENTS.items()
    }


def _corrections(step: Tensor, betas: tuple[float, float]) -> tuple[float, float]:
    count = float(step)
    return 1 - betas[0] ** count, 1 - betas[1] ** count


@cache
def _compiled() -> Callable[..., None]:
    """Return the update as one kernel; one for each shape of a weight."""
    return torch.compile(_move, fullgraph=True, dynamic=False)


def _move(
    weight: Tensor,
    gradient: Tensor,
    kept: dict[str, Tensor],
    rates: Tensor,
    settings: tuple[float, float, float, float],
    maps: dict[str, Tensor] | None,
) -> None:
    """Update a weight and its stored moments, in place."""
    lr, whole1, whole2 = rates.unbind()
    beta1, beta2, eps, decay = settings
    g = gradient.float()
    mean = _read("exp_avg", kept, maps).lerp(g, 1 - beta1)
    square = _read("exp_avg_sq", kept, maps).lerp(g.square(), 1 - beta2)
    _write("exp_avg", mean, kept, maps)
    _write("exp_avg_sq", square, kept, maps)
    w = weight - lr * decay * weight
    weight.copy_(w - lr / whole1 * mean / (square.sqrt() / whole2.sqrt() + eps))


def _read(name: str, kept: dict[str, Tensor], maps: dict[str, Tensor] | None) -> Tensor:
    if maps is None:
        return kept[name].float()
    codes, scales = kept[f"{name}{CODES}"], kept[f"{name}{SCALES}"]
    # By rows, however the weight lies in memory: so its codes lie too once they were loaded.
    values = maps[name][codes.int()].reshape(*scales.shape, EIGHT_BIT_BLOCK) * scales[..., None]
    return values.view(codes.shape)


def _write(
    name: str, value: Tensor, kept: dict[str, Tensor], maps: dict[str, Tensor] | None
) -> None:
    if maps is None:
        kept[name].copy_(value)
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scales = scale_tensor(value.contiguous(), EIGHT_BIT_BLOCK)
    kept[f"{name}{CODES}"].copy_(quantize_8bit_with_qmap(scaled, maps[name]))
    kept[f"{name}{SCALES}"].copy_(scales.view(kept[f"{name}{SCALES}"].shape))
