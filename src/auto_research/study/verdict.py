"""From differences to a verdict: a paper's decision rule as named clauses over paired bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

State = Literal["holds", "reversed", "undecided"]
Verdict = Literal["reproduced", "not reproduced", "inconclusive", "smoke: no conclusion", "no claim"]

MINIMUM_SEEDS = 3


class Difference(BaseModel):
    """Method minus baseline on test, signed so that positive is better, with its 95 % interval.

    Attributes:
        mean: mean over seeds of the paired difference.
        low, high: percentile interval of the paired bootstrap over units and seeds.
        relative: mean divided by the magnitude of the baseline's mean.
        wins: seeds on which the method was better.
        units: what was resampled (users, lists, documents).
    """

    model_config = ConfigDict(extra="forbid")

    method: str
    baseline: str
    metric: str
    mean: float
    low: float
    high: float
    relative: float | None
    baseline_mean: float
    wins: int
    seeds: int
    units: int


class ClauseResult(BaseModel):
    """One clause of the decision rule and what the numbers said."""

    model_config = ConfigDict(extra="forbid")

    clause: str
    state: State
    required: bool
    detail: str


Compare = Callable[[str, str, str], Difference]
"""(method, baseline, metric) -> their difference on test."""


@dataclass(frozen=True)
class Clause:
    """One condition of a decision rule.

    Attributes:
        text: the condition in words, as it is printed.
        decide: looks at the numbers and returns (state, detail).
        required: clauses that are not required are reported and do not change the verdict.
    """

    text: str
    decide: Callable[[Compare], tuple[State, str]]
    required: bool = True


def _shown(d: Difference) -> str:
    relative = f", {d.relative:+.2%} relative" if d.relative is not None else ""
    return f"{d.metric}: {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}]{relative}, better on {d.wins} of {d.seeds} seeds"


def beats(method: str, baseline: str, metric: str, *, strict: bool = False, required: bool = True) -> Clause:
    """Holds when the 95 % interval of method minus baseline lies above zero, is reversed when it lies below.

    `strict` counts an interval that includes zero against the claim instead of leaving it undecided.
    """

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        return ("holds" if d.low > 0 else "reversed" if strict or d.high < 0 else "undecided"), _shown(d)

    return Clause(f"{method} beats {baseline} on {metric}", decide, required)


def not_below(method: str, baseline: str, metric: str, *, tolerance: float, required: bool = True) -> Clause:
    """Holds when the interval rules out a loss of more than `tolerance` (a share of the baseline's mean)."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        floor = -tolerance * abs(d.baseline_mean)
        return ("holds" if d.low > floor else "reversed" if d.high < floor else "undecided"), _shown(d)

    return Clause(f"{method} is not below {baseline} on {metric} by more than {tolerance:.1%}", decide, required)


def wins_seeds(method: str, baseline: str, metric: str, *, at_least: int, required: bool = True) -> Clause:
    """Holds when the method is better on at least `at_least` seeds, is reversed when it is better on none."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        return ("holds" if d.wins >= at_least else "reversed" if d.wins == 0 else "undecided"), _shown(d)

    return Clause(f"{method} beats {baseline} on {metric} on at least {at_least} seeds", decide, required)


def mean_above(method: str, baseline: str, metric: str, *, required: bool = True) -> Clause:
    """Holds when the mean over seeds is higher (a floor to clear), is reversed when the interval lies below."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        return ("holds" if d.mean > 0 else "reversed" if d.high < 0 else "undecided"), _shown(d)

    return Clause(f"{method} is above {baseline} on {metric} in the mean", decide, required)


def any_of(*clauses: Clause, required: bool = True) -> Clause:
    """Holds when at least one clause holds, is reversed when all are; its detail is theirs."""

    def decide(compare: Compare) -> tuple[State, str]:
        found = [clause.decide(compare) for clause in clauses]
        states = {state for state, _ in found}
        state: State = "holds" if "holds" in states else "reversed" if states == {"reversed"} else "undecided"
        return state, "; ".join(detail for _, detail in found)

    return Clause(" or ".join(clause.text for clause in clauses), decide, required)


def fact(text: str, state: State, detail: str, *, required: bool = True) -> Clause:
    """A clause that the paper decided by its own test (a variance test, a cost, a call rate)."""
    return Clause(text, lambda compare: (state, detail), required)


def conclude(
    clauses: Sequence[Clause], compare: Compare, *, budget: str, seeds: int
) -> tuple[Verdict, list[ClauseResult]]:
    """Applies a decision rule.

    A smoke budget concludes nothing, whatever the numbers. Otherwise: `reproduced` when every required clause
    holds; `not reproduced` when one is reversed; `inconclusive` when one is undecided or there are fewer than
    three seeds.
    """
    results = []
    for clause in clauses:
        state, detail = clause.decide(compare)
        results.append(ClauseResult(clause=clause.text, state=state, required=clause.required, detail=detail))
    required = [r.state for r in results if r.required]
    verdict: Verdict
    if budget == "smoke":
        verdict = "smoke: no conclusion"
    elif not required:
        verdict = "no claim"
    elif "reversed" in required:
        verdict = "not reproduced"
    elif "undecided" in required or seeds < MINIMUM_SEEDS:
        verdict = "inconclusive"
    else:
        verdict = "reproduced"
    return verdict, results
