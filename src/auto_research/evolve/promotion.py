"""Who parents the next generation, and what may be claimed: paired differences with a standard error.

Promotion (cheap, after every generation) and claim (the champion and the baseline again, on fresh seeds) use the same
arithmetic with different constants. With differences d_i = f(child, seed i) - f(parent, seed i) in the direction of
improvement, mean d, sample deviation s and SE = s / sqrt(n), a child clears iff n >= n_min and d - z SE > delta_min.

Why two steps: without any true effect, one child clears n 3, z 1 in 21 % of cases, and some child of six in 56 %. A
champion that clears fresh n 5, z 2 as well was picked wrongly in about 3 % of runs. Simulated in the tests with
the functions of this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from auto_research.evolve.cells import sizes_for
from auto_research.evolve.records import Candidate, CellResult, Decision, Paired, RunConfig, Trial, TrialState
from auto_research.evolve.workflow import Workflow

Direction = Literal["max", "min"]

MINIMUM_EXAMPLES = 200
"""Fewer evaluated examples decide nothing where examples are what is resampled."""
RESAMPLES = 10_000
"""Of the paired bootstrap over examples; its seed is fixed."""

# ------------------------------------------------------------------------------------------------ arithmetic


def sign(direction: Direction) -> int:
    """+1 when more is better, -1 when less is."""
    return 1 if direction == "max" else -1


def gain_and_error(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the paired differences and its standard error s / sqrt(n), over the last axis: (..., n) -> (...), (...).

    n must be at least 2; one difference has no standard error.
    """
    n = differences.shape[-1]
    if n < 2:
        raise ValueError("one difference has no standard error")
    return differences.mean(-1), differences.std(-1, ddof=1) / math.sqrt(n)


def clears(
    gain: np.ndarray | float, error: np.ndarray | float, n: int, *, n_min: int, z: float, delta_min: float
) -> np.ndarray:
    """The rule, elementwise: n >= n_min and gain - z error > delta_min."""
    return np.asarray((n >= n_min) & (np.asarray(gain) - z * np.asarray(error) > delta_min))


def ranking_score(values: Sequence[float], *, direction: Direction, z: float, noise: float | None) -> float | None:
    """Mean of a candidate's runs, made worse by z standard errors; `noise` is the deviation where there is one run.

    None without a run, or with a single one and no noise floor: a single run must not outrank a repeated one.
    """
    if not values:
        return None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else noise
    if deviation is None:
        return None
    return float(np.mean(values)) - sign(direction) * z * deviation / math.sqrt(len(values))


def pareto_ranks(values: np.ndarray, directions: Sequence[Direction]) -> np.ndarray:
    """NSGA-II's non-domination ranks (N,) of N points with M objectives (N, M); 0 is the Pareto front.

    A point dominates another when it is no worse everywhere and better somewhere (Deb et al. 2002).
    """
    losses = np.asarray(values, dtype=float) * [-sign(d) for d in directions]
    no_worse = (losses[:, None] <= losses[None]).all(-1)
    better = (losses[:, None] < losses[None]).any(-1)
    dominates = no_worse & better  # (N, N): row dominates column
    ranks = np.full(len(losses), -1)
    rank = 0
    while (left := ranks < 0).any():
        ranks[left & ~(dominates & left[:, None]).any(0)] = rank
        rank += 1
    return ranks


# -------------------------------------------------------------------------------------------------- trials


def completed(trial: Trial, metric: str) -> dict[int, CellResult]:
    """The cells of a trial that gave the metric, by seed."""
    return {c.seed: c for c in trial.cells if c.state == "completed" and c.metrics and metric in c.metrics}


def values(trial: Trial, metric: str) -> list[float]:
    """The metric of every finished seed, in the order of the cells."""
    return [(cell.metrics or {})[metric] for cell in completed(trial, metric).values()]


def mean_metrics(trial: Trial) -> dict[str, float]:
    """Means over the finished seeds of every metric that all of them report."""
    found = [c.metrics for c in trial.cells if c.state == "completed" and c.metrics]
    names = [name for name in (found[0] if found else {}) if all(name in metrics for metrics in found)]
    return {name: float(np.mean([metrics[name] for metrics in found])) for name in names}


def noise_floor(baseline: Trial, metric: str) -> float | None:
    """Sample deviation of the baseline's single runs.

    None with fewer than two finished seeds, and where all of them agree: then seeds measured no noise.
    """
    found = values(baseline, metric)
    return (float(np.std(found, ddof=1)) or None) if len(found) >= 2 else None


def summarise(
    candidate: Candidate,
    cells: Sequence[CellResult],
    seeds: Sequence[int],
    workflow: Workflow,
    *,
    z: float,
    noise: float | None = None,
    parent: Trial | None = None,
    n_min: int = 3,
    limits: Mapping[str, float] | None = None,
) -> Trial:
    """A candidate with its cells as a trial: state, mean over the finished seeds, deviation, score, gain, violations.

    A seed that did not finish makes the trial `partial`; its mean then covers the finished seeds alone, and the state
    says so wherever it is shown.
    """
    trial = Trial(candidate=candidate, state=_state(candidate, cells, seeds, workflow.metric), cells=list(cells))
    found = values(trial, workflow.metric)
    if found:
        trial.mean = float(np.mean(found))
        trial.deviation = float(np.std(found, ddof=1)) if len(found) > 1 else None
        trial.score = ranking_score(found, direction=workflow.direction, z=z, noise=noise)
        trial.violations = violations(trial, workflow, limits)
        if parent is not None:
            trial.gain = compare(trial, parent, workflow, z=z, noise=noise, n_min=n_min)
    return trial


def _state(candidate: Candidate, cells: Sequence[CellResult], seeds: Sequence[int], metric: str) -> TrialState:
    if candidate.duplicate_of:
        return "duplicate"
    if candidate.reason:
        return "infeasible"
    states = {cell.seed: cell.state for cell in cells}
    waiting = [s for s in seeds if states.get(s, "planned") in ("planned", "queued", "running", "interrupted")]
    if len(waiting) == len(seeds) and all(states.get(s, "planned") == "planned" for s in seeds):
        return "planned"
    if waiting:
        return "running"
    finished = [s for s in seeds if states[s] == "completed"]
    return "completed" if len(finished) == len(seeds) else "partial" if finished else "failed"


def paired(
    child: Trial,
    parent: Trial,
    *,
    direction: Direction,
    metric: str,
    z: float,
    noise: float | None,
    stochastic: bool = True,
    n_min: int = 3,
) -> Paired | None:
    """Child minus parent in the direction of improvement, over the seeds that both finished; None without any.

    * Two or more seeds: SE from the differences. Fewer than `n_min` are provisional.
    * One seed: no standard error of its own; `noise`, the baseline's single-run deviation, stands in for it.
    * Seeds that change nothing are one observation, however many there are: always where the workflow is not
      `stochastic`, and where every seed gave both sides the same values of all examples. SE then comes from a paired
      bootstrap over examples (`units`); fewer than 200 examples are provisional.
    """
    ours, theirs = completed(child, metric), completed(parent, metric)
    both = [seed for seed in ours if seed in theirs]
    if not both:
        return None
    asked = dict.fromkeys(cell.seed for cell in (*child.cells, *parent.cells))
    missing = sorted(seed for seed in asked if seed not in both)
    pairs = [(ours[seed], theirs[seed]) for seed in both]
    one_observation = not stochastic or (len(pairs) > 1 and _alike([a for a, _ in pairs], [b for _, b in pairs]))
    better = sign(direction)
    gains = np.array([better * ((a.metrics or {})[metric] - (b.metrics or {})[metric]) for a, b in pairs])
    n, by, error = len(gains), "seeds", noise or None
    first, second = pairs[0]
    if one_observation:
        n, gain, error = 1, float(gains[0]), None
        if first.units and len(first.units) == len(second.units):
            units = better * (np.array(first.units) - np.array(second.units))
            n, by, gain, error = len(units), "examples", float(units.mean()), bootstrap_error(units)
    elif n == 1:
        gain = float(gains[0])
    else:
        gain, error = map(float, gain_and_error(gains))
    return Paired(
        child=child.candidate.id,
        parent=parent.candidate.id,
        n=n,
        by="examples" if by == "examples" else "seeds",
        gain=gain,
        se=error,
        z=z,
        lower=None if error is None else gain - z * error,
        upper=None if error is None else gain + z * error,
        provisional=n < (MINIMUM_EXAMPLES if by == "examples" else n_min),
        missing=missing,
    )


def _alike(*sides: Sequence[CellResult]) -> bool:
    """Whether all cells of each side hold the same numbers: of each example where there are units, else the metrics.

    Metrics may hold times, which no two runs share.
    """
    numbers = [[c.units or c.metrics for c in cells] for cells in sides]
    return all(found == cells[0] for cells in numbers for found in cells)


def bootstrap_error(differences: np.ndarray) -> float:
    """Standard error of the mean of paired differences over examples (U,): 10,000 resamples, fixed seed."""
    import torch

    from auto_research.study.compare import resample
    from auto_research.tasks.base import Evaluation, Mean

    evaluation = Evaluation(len(differences), {"difference": Mean(torch.from_numpy(differences))})
    blocks = 10  # bounds memory to RESAMPLES / blocks x U
    means = [
        resample([evaluation], "difference", resamples=RESAMPLES // blocks, seed=block)[0] for block in range(blocks)
    ]
    return float(torch.cat(means).std())


def compare(
    child: Trial, parent: Trial, workflow: Workflow, *, z: float, noise: float | None, n_min: int = 3
) -> Paired | None:
    """`paired` on the primary metric of a workflow."""
    return paired(
        child,
        parent,
        direction=workflow.direction,
        metric=workflow.metric,
        z=z,
        noise=noise,
        stochastic=workflow.stochastic,
        n_min=n_min,
    )


# ----------------------------------------------------------------------------------------------- decisions


def violations(trial: Trial, workflow: Workflow, limits: Mapping[str, float] | None = None) -> list[str]:
    """The hard constraints that a trial's means over seeds break, in words: the workflow's own, and its `limits`."""
    found = mean_metrics(trial)
    beyond = [
        f"{name} {found[name]:.4g} above its limit {most:.4g}" if name in found else f"{name} is not measured"
        for name, most in (limits or {}).items()
        if not found.get(name, math.inf) <= most * (1 + 1e-9)  # a mean of equal values may round up
    ]
    return [*workflow.violations(found), *beyond]


def obstacle(trial: Trial, workflow: Workflow, limits: Mapping[str, float] | None = None) -> str:
    """Why a trial cannot be promoted whatever its numbers; "" when nothing stands in the way."""
    if trial.state != "completed":
        unfinished = [f"seed {c.seed} {c.state.replace('_', ' ')}" for c in trial.cells if c.state != "completed"]
        return ", ".join([trial.state, *unfinished])
    broken = violations(trial, workflow, limits)
    return f"breaks {', '.join(broken)}" if broken else ""


def cleared(comparison: Paired, *, n_min: int, z: float, delta_min: float) -> bool:
    """Whether a comparison that is not provisional clears the rule."""
    if comparison.se is None or comparison.provisional:
        return False
    least = MINIMUM_EXAMPLES if comparison.by == "examples" else n_min
    return bool(clears(comparison.gain, comparison.se, comparison.n, n_min=least, z=z, delta_min=delta_min))


def decide(
    generation: int,
    champion: Trial,
    children: Sequence[Trial],
    config: RunConfig,
    workflow: Workflow,
    *,
    noise: float | None = None,
) -> Decision:
    """The parent of the next generation: the child with the highest lower bound among those that clear, or as before.

    In a smoke run a provisional comparison (too few seeds or examples) may promote too, and the reason says so; it is
    never a claim. `noise` is the baseline's `noise_floor`. A champion that breaks a hard constraint makes way for the
    best child that breaks none, whatever their difference.
    """
    limits = workflow.limits(sizes_for(workflow, config))
    outside = violations(champion, workflow, limits)
    comparisons: list[Paired] = []
    ready: list[tuple[float, Paired]] = []
    remarks: list[str] = []
    for child in children:
        if child.state in ("duplicate", "infeasible"):
            continue
        comparison = compare(child, champion, workflow, z=config.z, noise=noise, n_min=config.n_min)
        if comparison is not None:
            comparisons.append(comparison)
        if barred := obstacle(child, workflow, limits):
            remarks.append(f"{child.candidate.id}: not promotable ({barred})")
        elif comparison is None:
            remarks.append(f"{child.candidate.id}: shares no finished seed with {champion.candidate.id}")
        else:
            bound = comparison.gain if comparison.lower is None else comparison.lower
            may = (
                bool(outside)
                or cleared(comparison, n_min=config.n_min, z=config.z, delta_min=config.delta_min)
                or (config.budget == "smoke" and comparison.provisional and bound > config.delta_min)
            )
            remarks.append(in_words(comparison))
            if may:
                ready.append((bound, comparison))
    kept = champion.candidate.id
    if not ready:
        why = f"no improvement found: {kept} stays" + (f", though it breaks {', '.join(outside)}" if outside else "")
        best = None
    else:
        best = max(ready, key=lambda found: found[0])[1]
        why = f"{best.child} replaces {kept}" + (" provisionally" if best.provisional else "")
        why += f", which breaks {', '.join(outside)}" if outside else ""
    return Decision(
        generation=generation,
        parent=kept,
        champion=best.child if best else kept,
        comparisons=comparisons,
        reason="; ".join([why, *remarks]),
    )


def in_words(comparison: Paired) -> str:
    """A comparison as a phrase: gain, standard error, n, and what weakens it."""
    error = "no standard error" if comparison.se is None else f"SE {comparison.se:.3g}"
    by = comparison.by.removesuffix("s") if comparison.n == 1 else comparison.by
    weak = [f"n {comparison.n} {by}", error]
    if comparison.provisional:
        weak.append("provisional")
    if comparison.missing:
        weak.append(f"without seed{'s' * (len(comparison.missing) > 1)} {', '.join(map(str, comparison.missing))}")
    return f"{comparison.child} against {comparison.parent}: {comparison.gain:+.4g} ({', '.join(weak)})"


def confirm(
    champion: Trial, baseline: Trial, config: RunConfig, workflow: Workflow, *, noise: float | None = None
) -> Paired | None:
    """The comparison that a claim rests on: both rerun on seeds that no decision of the search has seen.

    A deterministic workflow has no fresh seeds; it is compared over examples, at `confirm_z`.

    Raises `ValueError` when a cell used a seed of the search.
    """
    if workflow.stochastic:
        seen = {cell.seed for trial in (champion, baseline) for cell in trial.cells} & set(config.seeds)
        if seen:
            raise ValueError(f"seeds {sorted(seen)} decided the search already; a confirmation needs fresh ones")
    return compare(champion, baseline, workflow, z=config.confirm_z, noise=noise, n_min=config.n_min)


def confirmed(comparison: Paired | None, config: RunConfig) -> bool:
    """Whether a confirmation carries the claim `improved`: no seed missing, and it clears at `confirm_z`."""
    return (
        comparison is not None
        and not comparison.missing
        and cleared(comparison, n_min=config.n_min, z=config.confirm_z, delta_min=config.delta_min)
    )


def survivors(trials: Sequence[Trial], workflow: Workflow, noise: float | None) -> list[str]:
    """After a screening with one seed each: who gets the remaining seeds.

    The better half (rounded up), and everything within two noise floors of its worst member.
    """
    means = {t.candidate.id: sign(workflow.direction) * t.mean for t in trials if t.mean is not None}
    ranked = sorted(means, key=lambda id: -means[id])
    if not ranked:
        return []
    bar = means[ranked[(len(ranked) - 1) // 2]] - 2 * (noise or 0.0)
    return [id for id in ranked if means[id] >= bar]


def pareto(trials: Sequence[Trial], objectives: Mapping[str, Direction]) -> dict[str, int]:
    """Non-domination rank of every completed trial by candidate id; 0 is the front.

    Objectives are metrics (means over seeds), `parameters`, `flops`, `memory_bytes` or names of `Candidate.cost`;
    trials that lack one are left out.
    """
    points: dict[str, list[float]] = {}
    for trial in trials:
        made = trial.candidate
        costs = {"parameters": made.parameters, "flops": made.flops, "memory_bytes": made.memory_bytes, **made.cost}
        known = {**costs, **mean_metrics(trial)}
        if trial.state == "completed" and all(name in known for name in objectives):
            points[made.id] = [float(known[name]) for name in objectives]
    if not points:
        return {}
    ranks = pareto_ranks(np.array(list(points.values())), list(objectives.values()))
    return {id: int(rank) for id, rank in zip(points, ranks)}
