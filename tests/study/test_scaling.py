"""Scaling curves: the fit against numpy and hypothesis, the clause by its ends; alternatives of a decision rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.study.scaling import fit_log, scaling_curve
from auto_research.study.verdict import Clause, Difference, any_of, fact


@given(
    values=st.lists(st.floats(0.1, 0.9), min_size=3, max_size=6),
    slope=st.floats(-0.1, 0.1),
)
@settings(deadline=None, max_examples=50)
def test_fit_is_that_of_numpy(values, slope):
    costs = [10.0 ** (i + 1) for i in range(len(values))]
    values = [v + slope * i for i, v in enumerate(values)]
    fit = fit_log(costs, values)
    expected = np.polyfit(np.log10(costs), values, 1)
    assert (fit.slope, fit.offset) == pytest.approx(tuple(expected), abs=1e-9)
    if np.std(values) > 1e-3:
        assert fit.r2 == pytest.approx(np.corrcoef(np.log10(costs), values)[0, 1] ** 2, abs=1e-6)


def test_a_curve_needs_sizes_that_differ():
    with pytest.raises(ValueError, match="two sizes"):
        fit_log([5.0, 5.0], [0.1, 0.2])
    with pytest.raises(ValueError, match="two sizes"):
        scaling_curve({"one": 3.0}, "auc")


def comparing(low: float, high: float):
    means = {"small": 0.70, "middle": 0.71, "large": 0.72}

    def compare(method: str, baseline: str, metric: str) -> Difference:
        return Difference(
            method=method,
            baseline=baseline,
            metric=metric,
            mean=means[method] - means[baseline],
            low=low,
            high=high,
            relative=None,
            baseline_mean=means[baseline],
            wins=3,
            seeds=3,
            units=10,
        )

    return compare


@pytest.mark.parametrize(
    ("low", "high", "state"), [(0.01, 0.03, "holds"), (-0.01, 0.03, "undecided"), (-0.03, -0.01, "reversed")]
)
def test_the_largest_must_beat_the_smallest_whatever_the_order_given(low, high, state):
    clause = scaling_curve({"large": 1e4, "small": 1e2, "middle": 1e3}, "auc")
    found, detail = clause.decide(comparing(low, high))
    assert found == state
    assert not clause.required
    assert "small: 0.7000 at 100, middle: 0.7100 at 1e+03, large: 0.7200 at 1e+04" in detail
    assert "auc = 0.6800 +0.01000 log10(cost), R² 1.00" in detail


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("holds", "reversed"), "holds"),
        (("undecided", "holds"), "holds"),
        (("undecided", "reversed"), "undecided"),
        (("reversed", "reversed"), "reversed"),
    ],
)
def test_any_of_holds_with_one_and_falls_with_all(states, expected):
    clauses: list[Clause] = [fact(f"clause {i}", state, f"detail {i}") for i, state in enumerate(states)]
    joined = any_of(*clauses)
    assert joined.decide(comparing(0, 0)) == (expected, "detail 0; detail 1")
    assert joined.text == "clause 0 or clause 1"
