"""Optimizers that torch lacks: Lion; Muon, with AdamW for the parameters that Muon is not for; and
AdamW that reads each gradient once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from paceline.strategies.gather import cut_like, first_row, locals_of, whole

# Muon's steps at the size of AdamW's, so that one learning rate and one decay fit both.
SIZE = "match_rms_adamw"
ONE_READ = "paceline::adamw"  # what an update is called in a profile


class Lion(Optimizer):
    """Moves each weight by the sign of its momentum (https://arxiv.org/abs/2302.06675): every
    number changes by lr, whatever its gradient, and one moment is kept."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for parameter in moved:
                if "exp_avg" not in self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            if not moved:
                continue
            # Each number by itself: this rank's pieces are as good as whole tensors.
            weights, gradients = locals_of(moved), locals_of(p.grad for p in moved)
            momenta = locals_of(self.state[p]["exp_avg"] for p in moved)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            signs: list[Tensor] = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
            torch._foreach_sign_(signs)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, signs, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class MuonAndAdamW(Optimizer):
    """torch's Muon for groups that say `is_hidden`, torch's AdamW for the others, as one optimizer
    with one state (https://arxiv.org/abs/2502.16982). Of sharded matrices each rank keeps its rows
    of the momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "is_hidden": False})
        hidden, others = self._split()
        self.parts: list[tuple[bool, Optimizer]] = []
        if hidden:
            muon = Muon(hidden, momentum=momentum, adjust_lr_fn=SIZE)
            self.parts.append((True, muon))
        if others:
            self.parts.append((False, AdamW(others, betas=betas, eps=eps)))

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the groups of Muon and those of AdamW. Each fills its own settings into them."""
        hidden = [group for group in self.param_groups if group["is_hidden"]]
        return hidden, [group for group in self.param_groups if not group["is_hidden"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        hidden, others = self._split()
        for is_hidden, part in self.parts:
            # To load a state makes new groups and a new state.
            part.param_groups, part.state = hidden if is_hidden else others, self.state
            if is_hidden and isinstance(hidden[0]["params"][0], DTensor):
                for group in hidden:
                    self._step_sharded(group)
            else:
                part.step()

    def _step_sharded(self, group: dict[str, Any]) -> None:
        """Gather each gradient after its momentum was applied, one matrix at a time, and let every
        rank orthogonalise the whole and keep its own rows. A collective."""
        lr, momentum = group["lr"], group["momentum"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            mine = (parameter, parameter.grad, state["momentum_buffer"])
            weight, gradient, kept = locals_of(mine)
            kept.lerp_(gradient, 1 - momentum)
            update = whole(cut_like(parameter, gradient.lerp(kept, momentum)))
            # torch's own, from 0 and without a momentum of its own: what is left is the move.
            move = nn.Parameter(torch.zeros_like(update))
            move.grad = update
            Muon([move], lr, 0.0, momentum=0.0, nesterov=False, adjust_lr_fn=SIZE).step()
            first = first_row(parameter)
            weight.mul_(1 - lr * group["weight_decay"]).add_(move[first : first + len(weight)])


class OneReadAdamW(AdamW):
    """torch's AdamW, with its settings and its state, using our own kernel, which reads each
    gradient once and never writes it. `found_inf` vetoes an update and `grad_scale` divides the
    gradient: scalars on the device, as for torch's fused kernel; without them it does neither."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        from paceline.kernels.adamw import Rates, update_weight

        with torch.profiler.record_function(ONE_READ):
            for group in self.param_groups:
                moved = [p for p in group["params"] if p.grad is not None]
                if not moved:
                    continue
                veto, scale = self._scalars(moved[0].device)
                states = [self._state_of(p) for p in moved]
                # A list: for one tensor to add to all, torch would wait for its value.
                taken = [1 - veto] * len(states)
                torch._foreach_add_([state["step"] for state in states], taken)
                beta1, beta2 = group["betas"]
                rates = Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
                for p, state in zip(moved, states, strict=True):
                    held = locals_of([p, p.grad, state["exp_avg"], state["exp_avg_sq"]])
                    w, g, m, v = _laid_alike(held)
                    update_weight((w, g, m, v), (state["step"], scale, veto), rates)
                    for mine, changed in ((held[0], w), (held[2], m), (held[3], v)):
                        if changed is not mine:
                            mine.copy_(changed)

    def _scalars(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the veto and the divisor."""
        veto, scale = self.found_inf, self.grad_scale
        return (
            torch.zeros((), device=device) if veto is None else veto,
            torch.ones((), device=device) if scale is None else scale,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        if not self.state[parameter]:
            self.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        state: dict[str, Any] = self.state[parameter]
        return state


def _laid_alike(tensors: list[Tensor]) -> list[Tensor]:
    """Return them as they are if all have the first one's layout in memory, without gaps, because
    the kernel pairs numbers by place. Otherwise return copies with that layout."""
    if all(value.is_contiguous() for value in tensors):
        return tensors
    first = tensors[0]
    strides = torch.empty_like(first, device="meta").stride()  # its own, if it has no gaps
    return [
        value
        if value.stride() == strides
        else torch.empty_like(first, dtype=value.dtype).copy_(value)
        for value in tensors
    ]
