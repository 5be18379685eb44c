"""What a task is: data protocol, training loop and evaluation for one kind of problem.

A task owns batching and evaluation; a model brings `loss(batch)` and whatever the task's evaluation calls
(`scores(batch)`, `generate(batch)`, ...). Every metric is kept per unit (a user, a list, a document), so that two
models can be compared by a paired bootstrap over the same units.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Named tensors that share their leading (batch) dimension."""

Split = Literal["validation", "test"]


class UnitMetric(Protocol):
    """A metric that can be recomputed when its units are re-weighted (0 = left out, 2 = drawn twice)."""

    def resample(self, weights: Tensor) -> Tensor:
        """Weights (R, U), float64 -> metric of each of the R resamples (R,)."""
        ...


@dataclass(frozen=True)
class Mean:
    """Mean of one value a unit; units whose value is NaN are left out.

    Shapes: values (U,).
    """

    values: Tensor

    def resample(self, weights: Tensor) -> Tensor:
        values = self.values.double()
        present = ~values.isnan()
        kept = weights.double() * present
        return (kept @ values.nan_to_num(0.0)) / kept.sum(1)


@dataclass(frozen=True)
class Ratio:
    """Ratio of two sums over units, for example total log-likelihood over total tokens.

    Shapes: numerator (U,), denominator (U,). `transform` is applied to the ratio (perplexity: `torch.exp`).
    """

    numerator: Tensor
    denominator: Tensor
    transform: Callable[[Tensor], Tensor] | None = None

    def resample(self, weights: Tensor) -> Tensor:
        weights = weights.double()
        ratio = (weights @ self.numerator.double()) / (weights @ self.denominator.double())
        return self.transform(ratio) if self.transform else ratio


@dataclass(frozen=True)
class PooledAUC:
    """Area under the ROC curve over all examples together, ties counted one half; units own their examples.

    Shapes: score (N,), label (N,) in {0, 1}, unit (N,) in 0..U-1.
    """

    score: Tensor
    label: Tensor
    unit: Tensor

    def resample(self, weights: Tensor) -> Tensor:
        order = torch.argsort(self.score.double())
        label, unit = self.label.double()[order], self.unit[order]
        # Examples of equal score form one step of the ROC curve.
        step = torch.unique_consecutive(self.score.double()[order], return_inverse=True)[1]
        steps = int(step[-1]) + 1
        results = []
        for chunk in weights.double().split(64):  # bounds memory to 64 x N
            example = chunk[:, unit]  # (r, N)
            zeros = torch.zeros(len(chunk), steps, dtype=torch.float64)
            positive = zeros.index_add(1, step, example * label)
            negative = zeros.index_add(1, step, example * (1 - label))
            below = negative.cumsum(1) - negative
            wins = (positive * (below + 0.5 * negative)).sum(1)
            results.append(wins / (positive.sum(1) * negative.sum(1)))
        return torch.cat(results)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on one split, recomputable under unit weights.

    `metrics` maps a metric's name to its `UnitMetric`; all share the same `units` in the same order.
    `diagnostics` are plain numbers that are reported but never compared (invalid-id rate, code usage, ...).
    """

    units: int
    metrics: dict[str, UnitMetric]
    diagnostics: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return float(self.metrics[name].resample(torch.ones(1, self.units, dtype=torch.float64))[0])

    def values(self) -> dict[str, float]:
        """All metrics as numbers."""
        return {name: self[name] for name in self.metrics}


@runtime_checkable
class Task(Protocol):
    """Data, batches and evaluation of one kind of problem."""

    name: str
    primary: str
    """The metric that chooses on validation."""
    lower_is_better: frozenset[str]
    """Metrics of which less is better (log-loss, perplexity)."""

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless training batches, in an order that depends on `seed` alone."""
        ...

    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of `model` (in eval mode, without gradients) on a held-out split."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How every variant of a comparison is trained; one recipe serves all of them.

    Attributes:
        learning_rate: peak AdamW learning rate.
        warmup: share of the steps over which the rate rises linearly from zero.
        schedule: shape after the warm-up; `cosine` falls to 10 % of the peak.
        clip_norm: largest gradient norm.
        validations: how often validation is looked at (evenly spread, the last step included); the best state is
            kept.
    """

    learning_rate: float = 1e-3
    batch_size: int = 128
    weight_decay: float = 0.0
    warmup: float = 0.05
    schedule: Literal["constant", "cosine"] = "constant"
    clip_norm: float = 1.0
    validations: int = 5
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass
class Fitted:
    """What training one model gave."""

    model: nn.Module
    steps: int
    best_step: int
    validation: Evaluation
    history: list[tuple[int, float]]
    losses: list[float]
    seconds: float


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training moves."""
    return [p for p in model.parameters() if p.requires_grad]


def count_parameters(model: nn.Module, *, only_trainable: bool = True) -> int:
    """Number of (trainable) scalars; a tied parameter counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trainable)


def learning_rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Learning rate of update `step` (0-based) out of `steps`."""
    rising = max(1, round(recipe.warmup * steps))
    if step < rising:
        return recipe.learning_rate * (step + 1) / rising
    if recipe.schedule == "constant":
        return recipe.learning_rate
    progress = (step - rising) / max(1, steps - rising)
    return recipe.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class NonFiniteLoss(RuntimeError):
    """Training met a loss that is not a number; it stops at once instead of spending the budget."""


def train_steps(
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    steps: int,
    recipe: Recipe,
    loss: Callable[[Batch], Tensor] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Takes `steps` AdamW updates of `model` on `batches`; the loop every stage of every paper shares.

    `loss` defaults to `model.loss`; a model with an `on_step_end(step)` method has it called after each update
    (for multipliers, moving averages and the like). Returns the loss of each step. Raises `NonFiniteLoss`.
    """
    parameters = trainable(model)
    # One fused multi-tensor update instead of one kernel a parameter.
    optimiser = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    compute = loss or model.loss
    hook: Any = getattr(model, "on_step_end", None)
    model.train()
    losses = torch.empty(steps, device=parameters[0].device)  # small tensors kept one by one would fragment the heap
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate_at(step, steps, recipe)
        value = compute(next(batches))
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        optimiser.step()
        losses[step] = value.detach()
        if step % 50 == 0 and not math.isfinite(float(losses[step])):
            raise NonFiniteLoss(f"the loss is not finite at step {step + 1} of {steps}; lower the learning rate")
        if hook is not None:
            hook(step)
        if after_step is not None:
            after_step(step)
    values: list[float] = losses.tolist()
    if not all(math.isfinite(v) for v in values):
        first = next(i for i, v in enumerate(values) if not math.isfinite(v))
        raise NonFiniteLoss(f"the loss is not finite at step {first + 1} of {steps}; lower the learning rate")
    return values


def fit(
    model: nn.Module,
    task: Task,
    *,
    steps: int,
    seed: int,
    device: torch.device,
    recipe: Recipe | None = None,
    on_progress: Callable[[int, float | None], None] | None = None,
) -> Fitted:
    """Trains `model` on `task` and keeps the state that is best on validation.

    A model without trainable parameters (a popularity floor) is evaluated as it is. `on_progress(step, value)` is
    called after every step, with the primary metric when validation was just looked at.
    """
    recipe = recipe or Recipe()
    started = time.perf_counter()
    model.to(device)
    sign = -1.0 if task.primary in task.lower_is_better else 1.0
    if not trainable(model):
        validation = task.evaluate(model.eval(), "validation", device)
        return Fitted(model, 0, 0, validation, [], [], time.perf_counter() - started)
    looks = {round(steps * (i + 1) / recipe.validations) for i in range(recipe.validations)}
    best: tuple[float, int, dict[str, Any], Evaluation] | None = None
    history: list[tuple[int, float]] = []

    def look(step: int) -> None:
        nonlocal best
        value = None
        if step + 1 in looks:
            evaluation = task.evaluate(model.eval(), "validation", device)
            model.train()
            value = evaluation[task.primary]
            history.append((step + 1, value))
            if best is None or sign * value > best[0]:
                best = (sign * value, step + 1, copy.deepcopy(model.state_dict()), evaluation)
        if on_progress is not None:
            on_progress(step + 1, value)

    losses = train_steps(
        model,
        task.batches(seed, recipe.batch_size, device),
        steps=steps,
        recipe=recipe,
        after_step=look,
    )
    if best is None:
        raise ValueError(f"training needs at least one step, got {steps}")
    model.load_state_dict(best[2])
    model.eval()
    return Fitted(model, steps, best[1], best[3], history, losses, time.perf_counter() - started)
