"""Constraints on what a policy may do to its reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Multiplier(nn.Module):
    """Lagrange multiplier λ ≥ 0 of one constraint C(θ) ≤ ε, for min over θ, max over λ of L(θ) + λ (C(θ) − ε).

    The policy descends on θ with λ held constant; after each such step λ ascends by projected gradient,
    λ ← max(0, λ + η (C(θ) − ε)) (Bertsekas, Nonlinear Programming, section 7.2). λ is a buffer: saved with the model,
    outside autograd, and never seen by the policy's optimiser.

    Args:
        bound: ε, in the unit of C.
        start: λ before the first step.
        rate: η.
    """

    value: Tensor

    def __init__(self, bound: float, *, start: float = 0.0, rate: float = 1e-2) -> None:
        super().__init__()
        if start < 0 or rate < 0:
            raise ValueError(f"start and rate of a multiplier must not be negative, got {start} and {rate}")
        self.bound, self.rate = bound, rate
        self.register_buffer("value", torch.tensor(float(start)))

    def forward(self, constraint: Tensor) -> Tensor:
        """λ (C − ε), a float32 scalar; its gradient reaches C alone."""
        return self.value.float() * (constraint.float() - self.bound)

    @torch.no_grad()
    def update(self, constraint: Tensor) -> None:
        """One dual step, from the C (a scalar) of the primal step just taken."""
        self.value.add_(self.rate * (constraint.detach().to(self.value) - self.bound)).clamp_(min=0.0)
