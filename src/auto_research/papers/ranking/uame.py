"""UAME: Uncertainty as Remedy, Mitigating Satisfaction Label Bias in Short Video Multi-Objective Ensemble Ranking.

arXiv:2607.17092, Kuaishou.

Official code: none.

The idea: the last ranking stage learns its order from predicted behaviours that contradict each other. Score each
candidate by a normal distribution, so that contradictory pairs widen it instead of dragging the mean; give wide pairs
more weight; and tie the width to how much the behaviours disagree on an item. Serving sorts by the mean alone.

Differs from the paper: MovieLens ratings play the questionnaire; six behaviours instead of eight; losses are means over
pairs and objectives instead of sums; the host has no satisfaction loss of its own.

Letters: B requests, N candidates, K behaviours, P pairs of a list, d width; μ mean, σ² variance, U = σ_i² + σ_j².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.pairwise import (
    gaussian_win,
    list_ranks,
    logistic_win,
    min_max_weight,
    order_loss,
    pairs,
    rank_spread,
)
from auto_research.layers.towers import MLP
from auto_research.layers.transformer import TransformerEncoder
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Trained, Variant
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Difference, beats, mean_above, not_below
from auto_research.tasks.base import Batch, Recipe, fit
from auto_research.tasks.ensemble import BEHAVIOURS, EnsembleRanking, miniature

if TYPE_CHECKING:
    from auto_research.study.context import Study

LEAST_VARIANCE = 1e-4
QUANTILES = 21


@dataclass(frozen=True)
class UAMEConfig:
    """Sizes and switches; the defaults are the full method.

    Attributes:
        width, layers, heads: of the host, a transformer over the candidates of a request.
        host: `list` lets candidates see each other (EMER's kind of host), `pointwise` does not.
        loss: `gaussian` compares distributions, `logistic` certain scores (the usual pair loss).
        weighting: `uncertainty` is ω, `random` draws weights with the distribution that ω had, `none` is one.
        gamma, alpha, beta: γ of ω, weight of the variance regulariser, weight of the alignment with conflict.
        detach: whether ω is a constant for the gradient.
        floor: added to ω (0 in the paper, which leaves the least uncertain pair of a batch without weight).
        warm_steps: updates with ω = 1 before the variance means anything.
        variance: how the second head's output becomes positive.
        align: what the alignment loss compares, σ² or log σ².
        labels: `each` behaviour orders its own pairs; `mean-rank` merges them into one order first, which removes the
            conflict.
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    host: Literal["list", "pointwise"] = "list"
    loss: Literal["gaussian", "logistic"] = "gaussian"
    weighting: Literal["uncertainty", "random", "none"] = "uncertainty"
    gamma: float = 2.0
    alpha: float = 0.02
    beta: float = 0.1
    detach: bool = True
    floor: float = 0.0
    warm_steps: int = 0
    variance: Literal["softplus", "exp"] = "softplus"
    align: Literal["variance", "log-variance"] = "variance"
    labels: Literal["each", "mean-rank"] = "each"


class Host(nn.Module):
    """EMER-like ranking network: every candidate with its pxtr and their places in the list, then a transformer."""

    def __init__(self, users: int, genres: Tensor, config: UAMEConfig) -> None:
        super().__init__()
        width, hidden = config.width, 2 * config.width
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(len(genres), width)
        self.hour, self.weekday = nn.Embedding(24, width), nn.Embedding(7, width)
        for table in (self.user, self.item, self.hour, self.weekday):
            nn.init.normal_(table.weight, std=0.1)
        self.genres: Tensor
        self.register_buffer("genres", genres / genres.sum(1, keepdim=True).clamp(min=1), persistent=False)
        self.content = nn.Linear(genres.shape[1], width)
        self.pxtr = nn.Linear(2 * len(BEHAVIOURS), width)
        self.together = config.host == "list"
        self.encoder = TransformerEncoder(width, config.heads, hidden, config.layers)

    def forward(self, batch: Batch) -> Tensor:
        """Requests -> candidate states (B, N, d); no gradient reaches the pxtr."""
        pxtr, item = batch["pxtr"].detach(), batch["item"]
        place = list_ranks(pxtr) / pxtr.shape[1]
        logit = torch.logit(pxtr.float(), eps=1e-4)
        seen = self.pxtr(torch.cat([logit, 2 * place - 1], -1).to(self.pxtr.weight.dtype))
        request = self.user(batch["user"]) + self.hour(batch["hour"]) + self.weekday(batch["weekday"])
        x = self.item(item) + self.content(self.genres[item]) + seen + request[:, None]
        if self.together:
            return self.encoder(x)
        return self.encoder(x.flatten(0, 1)[:, None]).view_as(x)


class UAME(nn.Module):
    """Host, two heads, and the losses over the pairs of a request."""

    omega: Tensor

    def __init__(self, users: int, genres: Tensor, config: UAMEConfig, omega: Tensor | None = None) -> None:
        """`omega` (Q,): evenly spaced quantiles that `random` weights are drawn from; 0..γ evenly by default."""
        super().__init__()
        self.config = config
        self.host = Host(users, genres, config)
        self.mean = MLP(config.width, config.width, 1, activation="gelu")
        self.spread = MLP(config.width, config.width, 1, activation="gelu") if config.loss == "gaussian" else None
        self.register_buffer("omega", torch.linspace(0, config.gamma, QUANTILES) if omega is None else omega.clone())
        self.step = 0
        self._seen: list[Tensor] = []

    def distribution(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """μ and σ² (B, N) in float32; no σ² for a certain score."""
        h = self.host(batch)
        mean = self.mean(h).squeeze(-1).float()
        if self.spread is None:
            return mean, None
        raw = self.spread(h).squeeze(-1).float()
        positive = F.softplus(raw) if self.config.variance == "softplus" else raw.clamp(-9.0, 9.0).exp()
        return mean, positive.clamp(min=LEAST_VARIANCE)

    def scores(self, batch: Batch) -> Tensor:
        """μ (B, N): serving needs neither the variance nor Φ."""
        return self.mean(self.host(batch)).squeeze(-1).float()

    def uncertainty(self, batch: Batch) -> Tensor | None:
        """σ² (B, N); for random weights a number that user and item alone decide, and nothing else."""
        if self.config.weighting == "random":
            mixed = (batch["user"][:, None] * 73_856_093 + batch["item"] * 19_349_663) % 10_007
            return mixed / 10_007
        return self.distribution(batch)[1]

    def weights(self, uncertainty: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
        """ω (B, P) of this step, None for one everywhere."""
        config = self.config
        if config.weighting == "none" or self.step < config.warm_steps:
            return None
        if config.weighting == "random":
            place = torch.rand(shape, device=device) * (len(self.omega) - 1)
            low = place.long().clamp(max=len(self.omega) - 2)
            return torch.lerp(self.omega[low], self.omega[low + 1], place - low)
        assert uncertainty is not None
        omega = min_max_weight(uncertainty, config.gamma) + config.floor
        return omega.detach() if config.detach else omega

    def loss(self, batch: Batch) -> Tensor:
        """Weighted pair loss + α · regulariser + β · alignment, a float32 scalar."""
        config = self.config
        mean, variance = self.distribution(batch)
        pxtr = batch["pxtr"].detach().float()
        ranks = list_ranks(pxtr)
        (mean_i, mean_j) = pairs(mean)
        order = pxtr if config.labels == "each" else -ranks.mean(-1)
        if variance is None:
            weight = self.weights(None, mean_i.shape, mean.device)
            return order_loss(logistic_win(mean_i - mean_j), *pairs(order), weight)
        variance_i, variance_j = pairs(variance)
        total = variance_i + variance_j
        weight = self.weights(total, mean_i.shape, mean.device)
        if weight is not None and self.training and self.step % 10 == 0:
            self._remember(weight.detach())
        value = order_loss(gaussian_win(mean_i - mean_j, total), *pairs(order), weight)
        if config.alpha:
            value = value + config.alpha * torch.log1p(total).mean()
        if config.beta:
            spread = variance if config.align == "variance" else variance.log()
            spread_i, spread_j = pairs(spread)
            value = value + config.beta * order_loss(logistic_win(spread_i - spread_j), *pairs(rank_spread(ranks)))
        return value

    @torch.no_grad()
    def _remember(self, weight: Tensor) -> None:
        """Follows the quantiles of ω, for the control that draws weights like them."""
        levels = torch.linspace(0, 1, QUANTILES, device=weight.device)
        found = torch.quantile(weight.flatten()[:: max(1, weight.numel() // 10_000)].float(), levels)
        self.omega.lerp_(found, 0.2)

    def on_step_end(self, step: int) -> None:
        """Counts the updates of the warm-up."""
        self.step = step + 1

    def start_report(self) -> None:
        """Forgets which σ² were reported."""
        self._seen = []

    def report(self) -> dict[str, float]:
        """How far ω spread at the end of training."""
        if self.config.weighting == "none":
            return {}
        middle = QUANTILES // 2
        return {"omega median": float(self.omega[middle]), "omega spread": float(self.omega[-3] - self.omega[2])}


class Formula(nn.Module):
    """Σ_k w_k log pxtr_k, the ensemble formula; w is chosen on validation among random mixtures."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def scores(self, batch: Batch) -> Tensor:
        """(B, N)."""
        return batch["pxtr"].clamp(min=1e-6).log() @ self.weight


def tuned_formula(task: EnsembleRanking, *, tries: int, seed: int, device: torch.device) -> Formula:
    """The best on validation of `tries` mixtures, the even one and each behaviour alone among them."""
    generator = torch.Generator().manual_seed(seed)
    k = len(BEHAVIOURS)
    drawn = torch.rand(tries, k, generator=generator).clamp(min=1e-6).log()
    mixtures = torch.cat([torch.full((1, k), 1 / k), torch.eye(k), drawn / drawn.sum(1, keepdim=True)])
    formulas = [Formula(weight).to(device) for weight in mixtures[: max(tries, 1)]]
    return max(formulas, key=lambda f: task.evaluate(f, "validation", device)[task.primary])


# -- the comparison ------------------------------------------------------------------------------------------------

CERTAIN = "certain pairs"
RANDOM = "certain pairs, random weights"
FULL = "uame"
NOT_DETACHED = "uame, weight not detached"
ONE_ORDER = "uame, one merged order"


def arms(config: UAMEConfig) -> dict[str, UAMEConfig]:
    """Arms B to H of the protocol, and one in which the behaviours are merged before the loss."""
    certain = replace(config, loss="logistic", weighting="none")
    plain = replace(config, weighting="none", alpha=0.0, beta=0.0)
    return {
        CERTAIN: certain,
        RANDOM: replace(certain, weighting="random"),
        "gaussian pairs": plain,
        "gaussian pairs + regulariser": replace(plain, alpha=config.alpha),
        "uame without alignment": replace(config, beta=0.0),
        FULL: config,
        NOT_DETACHED: replace(config, detach=False),
        ONE_ORDER: replace(config, labels="mean-rank"),
    }


def decision_rule() -> list[Clause]:
    """Satisfaction and what the variance goes with; either can hold without the other, which is then reported."""
    satisfaction = [beats(FULL, CERTAIN, "ndcg@5"), not_below(FULL, CERTAIN, "gauc", tolerance=0.005)]
    variance = [
        Clause(
            f"{FULL}: variance and bias are positively correlated",
            lambda compare: _positive(compare(FULL, RANDOM, "bias correlation")),
        ),
        beats(FULL, RANDOM, "bias correlation"),
        beats(FULL, RANDOM, "conflict correlation", required=False),
    ]
    effects = [
        beats(FULL, RANDOM, "ndcg@5", required=False),
        beats(FULL, NOT_DETACHED, "ndcg@5", required=False),
        mean_above(FULL, "formula", "ndcg@5", required=False),
    ]
    return [
        *(replace(c, text=f"satisfaction: {c.text}") for c in satisfaction),
        *(replace(c, text=f"uncertainty: {c.text}") for c in variance),
        *(replace(c, text=f"reported: {c.text}") for c in effects),
    ]


def _positive(d: Difference) -> tuple[Literal["holds", "reversed", "undecided"], str]:
    """Sign of the method's own mean, which a difference holds as baseline + difference."""
    value = d.baseline_mean + d.mean
    return ("holds" if value > 0 else "reversed"), f"mean Spearman correlation {value:+.4f}"


def run(study: Study) -> Comparison:
    """Stage 1 once, then all arms on the same requests."""
    device = device_for(study.device)
    with study.stage("requests", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=60, standard=10_000), seed=0)
        task = EnsembleRanking(interactions, candidates=study.size("candidates", smoke=12, standard=20))
    with study.stage("stage 1"):
        task.train_priors(
            steps=study.steps("prior", smoke=25, standard=600),
            seed=study.seeds[0],
            device=device,
            batch_size=study.size("prior batch", smoke=256, standard=512),
        )
    steps = study.steps("ranker", smoke=8, standard=400)
    recipe = Recipe(
        batch_size=study.size("batch", smoke=16, standard=32),
        validations=study.size("validations", smoke=1, standard=5),
    )
    config = UAMEConfig(width=study.size("width", smoke=32, standard=32), warm_steps=max(1, steps // 10))
    tries = study.size("formulas", smoke=4, standard=64)
    omega: dict[int, dict[float, Tensor]] = {}  # seed -> learning rate -> weights of pairs that the full method found

    def arm(name: str, config: UAMEConfig) -> Variant:
        def train(seed: int, rate: float) -> Trained:
            borrowed = None
            if name == RANDOM:  # of the same rate where the full method was trained at it
                borrowed = omega[seed].get(rate, next(iter(omega[seed].values())))
            model = UAME(task.num_users, task.genres, config, borrowed)
            fitted = fit(model, task, steps=steps, seed=seed, device=device, recipe=replace(recipe, learning_rate=rate))
            if name == FULL:
                omega.setdefault(seed, {})[rate] = model.omega.cpu()
            serving = sum(p.numel() for part in (model.host, model.mean) for p in part.parameters())
            return Trained(model, fitted.steps, parameters=serving, logged={"best step": float(fitted.best_step)})

        kinds = {FULL: "method", CERTAIN: "baseline", RANDOM: "control"}
        return Variant(name, train=train, kind=kinds.get(name, "ablation"))  # type: ignore[arg-type]

    def formula(seed: int, rate: float) -> Trained:
        return Trained(tuned_formula(task, tries=tries, seed=seed, device=device), steps=0, parameters=0)

    found = arms(config)
    # The full method runs before the control that borrows the distribution of its weights.
    order = [FULL, *(name for name in found if name not in (FULL, CERTAIN))]
    return study.compare(
        task,
        baseline=arm(CERTAIN, found[CERTAIN]),
        candidates=[
            *(arm(name, found[name]) for name in order),
            Variant("formula", train=formula, kind="floor", note="weights tuned on validation", trains=False),
        ],
        steps=steps,
        device=device,
        recipe=recipe,
        learning_rates=(1e-3,) if study.budget == "smoke" else (1e-3, 3e-3),
        clauses=decision_rule(),
    )


def specimens() -> list[Specimen]:
    """Tiny instances of the full method and of its certain counterpart."""
    task = miniature()
    batch = next(task.batches(0, 6, torch.device("cpu")))
    tiny = UAMEConfig(width=16, layers=1, heads=2)

    def of(config: UAMEConfig) -> Callable[[], UAME]:
        return lambda: UAME(task.num_users, task.genres, config)

    first, second = pairs(batch["pxtr"])
    share = (first > second).double().mean(-1)
    # Certain scores can do no better than the share of behaviours that prefer a candidate; ω can pass over such pairs.
    entropy = float((torch.special.entr(share) + torch.special.entr(1 - share)).mean())

    def specimen(name: str, config: UAMEConfig, floor: float, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=tuple(batch["item"].shape),
            why_no_padding="a request always has N candidates",
            why_no_order="the candidates of a request have no order in time",
            frozen={"mean.2.bias": "only differences of means are compared"},
            overfit_steps=80,
            loss_floor=floor,
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "uame",
            tiny,
            0.0,
            {
                "width = 32": {"width": 32},
                "layers = 2": {"layers": 2},
                "host = pointwise": {"host": "pointwise"},
                "loss = logistic": {"loss": "logistic", "weighting": "none"},
                "weighting = none": {"weighting": "none"},
                "gamma = 1": {"gamma": 1.0},
                "alpha = 0": {"alpha": 0.0},
                "beta = 0": {"beta": 0.0},
                "floor = 0.1": {"floor": 0.1},
                "warm_steps = 5": {"warm_steps": 5},
                "variance = exp": {"variance": "exp"},
                "align = log-variance": {"align": "log-variance"},
                "labels = mean-rank": {"labels": "mean-rank"},
            },
        ),
        specimen(
            "certain pairs",
            replace(tiny, loss="logistic", weighting="none"),
            entropy,
            {"weighting = random": {"weighting": "random"}},
        ),
    ]
