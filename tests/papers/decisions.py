"""Made-up differences for tests of a paper's decision rule."""

from __future__ import annotations

from auto_research.study.verdict import Difference


def difference(
    method: str, baseline: str, metric: str, interval: tuple[float, float] = (0.001, 0.003), level: float = 0.6
) -> Difference:
    """Method minus baseline with this interval, over three seeds and 100 units, of a baseline at `level`."""
    low, high = interval
    return Difference(
        method=method,
        baseline=baseline,
        metric=metric,
        mean=(low + high) / 2,
        low=low,
        high=high,
        relative=None,
        baseline_mean=level,
        wins=3,
        seeds=3,
        units=100,
    )
