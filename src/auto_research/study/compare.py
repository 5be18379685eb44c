"""A fair comparison: every variant under the same data, steps, batch, optimiser and seeds; test read once.

The record that comes out (`ComparisonRecord`) is the fact; tables and pages are drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from auto_research.study.verdict import Clause, ClauseResult, Difference, Verdict, conclude
from auto_research.tasks.base import Evaluation

Kind = Literal["baseline", "method", "ablation", "control", "floor"]

RESAMPLES = 1000


@dataclass(frozen=True)
class Trained:
    """A model trained by a paper's own loop.

    Attributes:
        steps: optimiser updates that produced it, over all of its stages.
        parameters: trainable scalars at serving time; counted from the model when left out.
    """

    model: nn.Module
    steps: int
    parameters: int | None = None
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One arm of a comparison.

    Give `build` (a fresh model; the shared loop trains it with the comparison's recipe) or `train` (the paper's
    own loop: seed and learning rate -> `Trained`). Both are called after every source of randomness was seeded.
    `trains=False` says that the arm serves weights which another arm trained, so its own stage takes no update.
    """

    name: str
    build: Callable[[], nn.Module] | None = None
    train: Callable[[int, float], Trained] | None = None
    kind: Kind = "ablation"
    note: str = ""
    trains: bool = True

    def __post_init__(self) -> None:
        if (self.build is None) == (self.train is None):
            raise ValueError(f"variant '{self.name}' needs exactly one of build and train")


@dataclass
class Trial:
    """One variant at one seed."""

    variant: str
    seed: int
    learning_rate: float
    parameters: int
    steps: int
    best_step: int
    seconds: float
    validation: Evaluation
    test: Evaluation = field(init=False)
    read_test: Callable[[], Evaluation] = field(init=False, repr=False)
    history: list[tuple[int, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)


class TrialRecord(BaseModel):
    """One variant at one seed, as stored."""

    model_config = ConfigDict(extra="forbid")

    seed: int
    learning_rate: float
    steps: int
    best_step: int
    seconds: float
    validation: dict[str, float | None]
    test: dict[str, float | None]
    diagnostics: dict[str, float | None]
    history: list[tuple[int, float]]
    losses: list[float | None]


class VariantRecord(BaseModel):
    """All seeds of one variant, with means and sample standard deviations over seeds."""

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: Kind
    note: str
    parameters: int
    mean: dict[str, float | None]
    deviation: dict[str, float | None]
    trials: list[TrialRecord]


class ComparisonRecord(BaseModel):
    """What a comparison found."""

    model_config = ConfigDict(extra="forbid")

    task: str
    primary: str
    lower_is_better: list[str]
    baseline: str
    steps: int
    recipe: dict[str, Any]
    seeds: list[int]
    variants: list[VariantRecord]
    differences: list[Difference]
    clauses: list[ClauseResult]
    verdict: Verdict


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {k: (float(v) if v == v and abs(v) != float("inf") else None) for k, v in values.items()}


def _thin(values: Sequence[float], most: int = 200) -> list[float | None]:
    """At most `most` block means: enough for a curve, small enough for a record."""
    if not values:
        return []
    block = -(-len(values) // most)
    pieces = torch.tensor(values).split(block)
    return [round(float(piece.mean()), 6) for piece in pieces]


def resample(evaluations: Sequence[Evaluation], metric: str, *, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """A metric on resampled units, (S, R) float64, for evaluations of S seeds.

    Each resample draws units with replacement. The draw depends on `seed` and the number of units alone, so that
    two variants are resampled alike.
    """
    units = evaluations[0].units
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(units, (resamples, units), generator=generator)
    weights = torch.zeros(resamples, units, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    return torch.stack([evaluation.metrics[metric].resample(weights) for evaluation in evaluations])


def paired_difference(
    method: Sequence[Evaluation],
    baseline: Sequence[Evaluation],
    metric: str,
    *,
    names: tuple[str, str] = ("method", "baseline"),
    lower_is_better: bool = False,
    resampled: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
) -> Difference:
    """Paired bootstrap of method minus baseline over units and seeds.

    Units are drawn alike for both sides and all seeds, and seeds are drawn too; so the interval holds both the
    sampling of test units and the luck of training. One evaluation a seed, in the same seed order on both sides;
    both sides must have the same units. `resampled` are the results of `resample` for both, where they are at hand.
    """
    if len(method) != len(baseline) or not method:
        raise ValueError(f"{names[0]} and {names[1]} must have the same seeds, got {len(method)} and {len(baseline)}")
    units = method[0].units
    if any(e.units != units for e in (*method, *baseline)):
        raise ValueError(f"{names[0]} and {names[1]} were evaluated on different units")
    sign = -1.0 if lower_is_better else 1.0
    first, second = resampled or (resample(method, metric, seed=seed), resample(baseline, metric, seed=seed))
    gaps = sign * (first - second)  # (S, R)
    seeds = torch.randint(len(method), gaps.T.shape, generator=torch.Generator().manual_seed(seed + 1))
    means = gaps.gather(0, seeds.T).mean(0)
    low, high = torch.quantile(means[~means.isnan()], torch.tensor([0.025, 0.975], dtype=torch.float64))
    observed = [sign * (m[metric] - b[metric]) for m, b in zip(method, baseline, strict=True)]
    baseline_mean = sum(b[metric] for b in baseline) / len(baseline)
    mean = sum(observed) / len(observed)
    return Difference(
        method=names[0],
        baseline=names[1],
        metric=metric,
        mean=mean,
        low=float(low),
        high=float(high),
        relative=mean / abs(baseline_mean) if baseline_mean else None,
        baseline_mean=baseline_mean,
        wins=sum(gap > 0 for gap in observed),
        seeds=len(method),
        units=units,
    )


@dataclass
class Comparison:
    """Trials of all variants, and what they say about each other."""

    task: str
    primary: str
    lower_is_better: frozenset[str]
    baseline: str
    variants: list[Variant]
    trials: dict[str, list[Trial]]
    seeds: tuple[int, ...]
    budget: str
    steps: int
    recipe: dict[str, Any]
    clauses: Sequence[Clause] = ()
    _resampled: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)

    def _resample(self, variant: str, metric: str) -> Tensor:
        """Resampled once for all the differences that need it, (S, R)."""
        if (variant, metric) not in self._resampled:
            self._resampled[variant, metric] = resample(self.tests(variant), metric)
        return self._resampled[variant, metric]

    def tests(self, variant: str) -> list[Evaluation]:
        """Test evaluations of a variant, one a seed."""
        return [trial.test for trial in self.trials[variant]]

    def difference(self, method: str, baseline: str, metric: str) -> Difference:
        """Method minus baseline on test, positive is better, with its interval."""
        return paired_difference(
            self.tests(method),
            self.tests(baseline),
            metric,
            names=(method, baseline),
            lower_is_better=metric in self.lower_is_better,
            resampled=(self._resample(method, metric), self._resample(baseline, metric)),
        )

    def per_seed(self, variant: str, metric: str) -> Tensor:
        """Test values of a metric, one a seed (S,)."""
        return torch.tensor([trial.test[metric] for trial in self.trials[variant]], dtype=torch.float64)

    def record(self) -> ComparisonRecord:
        """The comparison as it is stored; applies the decision rule."""
        variants, differences = [], []
        for variant in self.variants:
            trials = self.trials[variant.name]
            tests = [trial.test.values() for trial in trials]
            stacked = {m: torch.tensor([t[m] for t in tests], dtype=torch.float64) for m in tests[0]}
            variants.append(
                VariantRecord(
                    name=variant.name,
                    kind=variant.kind,
                    note=variant.note,
                    parameters=trials[0].parameters,
                    mean=_finite({m: float(v.mean()) for m, v in stacked.items()}),
                    deviation=_finite({m: float(v.std()) if len(v) > 1 else float("nan") for m, v in stacked.items()}),
                    trials=[
                        TrialRecord(
                            seed=t.seed,
                            learning_rate=t.learning_rate,
                            steps=t.steps,
                            best_step=t.best_step,
                            seconds=round(t.seconds, 3),
                            validation=_finite(t.validation.values()),
                            test=_finite(t.test.values()),
                            diagnostics=_finite({**t.test.diagnostics, **t.logged}),
                            history=t.history,
                            losses=_thin(t.losses),
                        )
                        for t in trials
                    ],
                )
            )
            if variant.name != self.baseline:
                differences.append(self.difference(variant.name, self.baseline, self.primary))
        verdict, clauses = conclude(self.clauses, self.difference, budget=self.budget, seeds=len(self.seeds))
        return ComparisonRecord(
            task=self.task,
            primary=self.primary,
            lower_is_better=sorted(self.lower_is_better),
            baseline=self.baseline,
            steps=self.steps,
            recipe=self.recipe,
            seeds=list(self.seeds),
            variants=variants,
            differences=differences,
            clauses=clauses,
            verdict=verdict,
        )
