"""A scaling curve as a clause: one metric of several sizes at equal data against the logarithm of their cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from auto_research.study.verdict import Clause, Compare, State


@dataclass(frozen=True)
class LogFit:
    """value = offset + slope · log10(cost) by least squares, and the share of variance it explains."""

    offset: float
    slope: float
    r2: float


def fit_log(costs: list[float], values: list[float]) -> LogFit:
    """Fits at least two points of different cost; R² is 1 when the values do not vary."""
    if len(costs) != len(values) or len(set(costs)) < 2 or min(costs) <= 0:
        raise ValueError(f"a curve needs at least two sizes of different positive cost, got {costs}")
    x = [math.log10(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(values) / len(values)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, values, strict=True)) / spread
    offset = mean_y - slope * mean_x
    total = sum((b - mean_y) ** 2 for b in values)
    error = sum((b - offset - slope * a) ** 2 for a, b in zip(x, values, strict=True))
    return LogFit(offset, slope, 1 - error / total if total else 1.0)


def scaling_curve(costs: Mapping[str, float], metric: str, *, required: bool = False) -> Clause:
    """The largest size (variant -> cost, say FLOPs) beats the smallest; the detail holds the curve and its fit.

    Holds and is reversed like `beats`. The metric must be one of which more is better. A few sizes at equal data on a
    small set are a curve, not a scaling law.
    """
    names = sorted(costs, key=lambda name: costs[name])
    if len(names) < 2:
        raise ValueError(f"a curve needs at least two sizes, got {names}")

    def decide(compare: Compare) -> tuple[State, str]:
        smallest, largest = names[0], names[-1]
        values = [compare(name, smallest, metric) for name in names[1:]]
        points = [values[0].baseline_mean, *(d.baseline_mean + d.mean for d in values)]
        fit = fit_log([costs[name] for name in names], points)
        ends = compare(largest, smallest, metric)
        state: State = "holds" if ends.low > 0 else "reversed" if ends.high < 0 else "undecided"
        curve = ", ".join(
            f"{name}: {value:.4f} at {costs[name]:.3g}" for name, value in zip(names, points, strict=True)
        )
        return state, (
            f"{curve}; fit {metric} = {fit.offset:.4f} {fit.slope:+.5f} log10(cost), R² {fit.r2:.2f};"
            f" largest - smallest {ends.mean:+.5f} [{ends.low:+.5f}, {ends.high:+.5f}]"
        )

    return Clause(f"scaling: {metric} grows with the cost of {len(names)} sizes at equal data", decide, required)
