"""Building a prompt under a budget: a light scorer chooses a template, then components by marginal gain.

1. Template: alpha_k = M(T_k), p = softmax(beta alpha), the most probable that fits.
2. Components: one after the other, c joins P when M(P + c) - M(P) > tau_c and cost(P + c) <= C_max.
3. Finalise: the subset of the joined components with the highest score that fits.

The scorer M is a two-layer network over [template one-hot, component multi-hot, features, scene]. Everything is done
for a batch at once; the only loop is over components, whose number is a handful.

Letters: B cases, K templates, C components, F features, S scene values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PromptScorer(nn.Module):
    """M_score: how good a prompt of this make-up is for this case, (B,); trained to regress it.

    Targets are standardised inside (`mean`, `deviation`, set by `calibrate`), so that scores and thresholds are in
    the target's unit, nats.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, templates: int, components: int, features: int, scenes: int, width: int = 32) -> None:
        super().__init__()
        self.templates, self.components = templates, components
        self.hidden = nn.Linear(templates + components + features + scenes, width)
        self.out = nn.Linear(width, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))

    def calibrate(self, target: Tensor) -> None:
        """Takes mean and deviation of the regression targets (N,)."""
        self.mean.copy_(target.mean())
        self.deviation.copy_(target.std().clamp(min=1e-6))

    def forward(self, template: Tensor, chosen: Tensor, features: Tensor, scene: Tensor) -> Tensor:
        """template (..., K) one-hot, chosen (..., C) 0/1, features (..., F), scene (..., S) -> (...)."""
        x = torch.cat([template, chosen, features, scene], dim=-1).to(self.hidden.weight)
        return self.out(F.gelu(self.hidden(x)))[..., 0] * self.deviation + self.mean

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        return self(batch["template"], batch["chosen"], batch["features"], batch["scene"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean squared error in standard deviations of the target."""
        return F.mse_loss(self.scores(batch) / self.deviation, batch["target"].to(self.mean) / self.deviation)


@dataclass(frozen=True)
class PromptPlan:
    """What the builder chose: template (B,) int64, components (B, C) bool, probability (B, K), score (B,)."""

    template: Tensor
    components: Tensor
    probability: Tensor
    score: Tensor


@torch.no_grad()
def plan_prompts(
    scorer: PromptScorer,
    features: Tensor,
    scene: Tensor,
    template_cost: Tensor,
    component_cost: Tensor,
    *,
    budget: int,
    gain_threshold: float = 0.0,
    sharpness: float = 1.0,
) -> PromptPlan:
    """Chooses template and components of B prompts.

    Args:
        template_cost: (B, K) tokens of a prompt with that template and no component.
        component_cost: (B, C) tokens that a component adds.
        budget: C_max in tokens.
        gain_threshold: tau_c, the least marginal gain.
        sharpness: beta; changes the probabilities, never the choice.

    Costs add up, since a component is a line of its own. Where no template fits the cheapest one is taken.
    """
    rows, templates = template_cost.shape
    components = component_cost.shape[1]
    one_hot = torch.eye(templates, device=features.device)
    none = torch.zeros(rows, components, dtype=torch.bool, device=features.device)

    def wide(x: Tensor, n: int) -> Tensor:
        return x[:, None].expand(-1, n, -1)

    of_case = wide(features, templates), wide(scene, templates)
    alpha = scorer(one_hot.expand(rows, -1, -1), wide(none, templates), *of_case)
    fits = template_cost <= budget
    cheapest = F.one_hot(template_cost.argmin(1), templates).bool()
    allowed = torch.where(fits.any(1, keepdim=True), fits, cheapest)
    template = alpha.masked_fill(~allowed, -torch.inf).argmax(1)
    chosen_template = one_hot[template]
    base = template_cost.gather(1, template[:, None])[:, 0]

    picked = none.clone()
    score = scorer(chosen_template, picked, features, scene)
    cost = base.clone()
    for c in range(components):
        added = picked.clone()
        added[:, c] = True
        with_it = scorer(chosen_template, added, features, scene)
        join = (with_it - score > gain_threshold) & (cost + component_cost[:, c] <= budget)
        picked = torch.where(join[:, None], added, picked)
        score = torch.where(join, with_it, score)
        cost = cost + component_cost[:, c] * join

    # All subsets at once: bit c of the subset's number says whether component c is in.
    numbers = torch.arange(2**components, device=features.device)
    subsets = (numbers[:, None] >> torch.arange(components, device=features.device) & 1).bool()  # (2^C, C)
    inside = (~subsets[None] | picked[:, None]).all(2)  # (B, 2^C)
    total = base[:, None] + component_cost.float() @ subsets.float().T
    usable = inside & ((total <= budget) | (numbers == 0))
    n = len(subsets)
    values = scorer(
        wide(chosen_template, n), subsets.expand(rows, -1, -1), wide(features, n), wide(scene, n)
    ).masked_fill(~usable, -torch.inf)
    best = values.argmax(1)
    return PromptPlan(
        template=template,
        components=subsets[best],
        probability=torch.softmax(sharpness * alpha, dim=1),
        score=values.gather(1, best[:, None])[:, 0],
    )
