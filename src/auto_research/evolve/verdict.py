"""What a run may say about itself: verdict, level of claim and first sentence, computed from what ran.

In this order: nothing learned is `no signal`; a workflow that only measures is `measured`; anything reduced is
`smoke: no conclusion`; `improved` needs a confirmation on fresh seeds; everything else is `not improved`, and its
sentence begins with "No improvement found".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auto_research.evolve import promotion
from auto_research.evolve.records import Decision, Paired, Prepared, RunConfig, Trial, Verdict
from auto_research.evolve.workflow import Workflow

MINIMUM_SEEDS = 3
NOT_A_REDUCTION = ("micro_batch", "accumulate")
"""Sizes that split the same work differently."""


def judge(
    *,
    config: RunConfig,
    workflow: Workflow,
    prepared: Prepared | None,
    trials: Sequence[Trial],
    decisions: Sequence[Decision],
    champion: str,
    confirmed: Paired | None,
) -> tuple[Verdict, str, str]:
    """(verdict, level, first sentence) of a run; the level is `smoke` until a baseline and its champion completed.

    Args:
        trials: of the search, baseline included.
        confirmed: `promotion.confirm` of the champion against the baseline, where it was run.
    """
    by_id = {trial.candidate.id: trial for trial in trials}
    compared = [by_id[id] for id in dict.fromkeys(("baseline", champion)) if id in by_id]
    reduced = reductions(config, workflow, prepared, compared)
    level = "smoke" if reduced else workflow.level
    means = {trial.candidate.id: promotion.values(trial, workflow.metric) for trial in compared}
    if "baseline" not in by_id or not all(means.values()):
        failed = [f"{t.candidate.id} {t.state}" for t in compared]
        return "no signal", "smoke", f"No signal: nothing can be compared ({', '.join(failed) or 'nothing ran'})."
    if below := _below_floor(workflow, prepared, {id: float(np.mean(found)) for id, found in means.items()}):
        return "no signal", level, f"No signal: {below}; candidates are not ranked.{_failures(trials)}"
    if not workflow.select:
        measured = sum(trial.state == "completed" for trial in trials)
        scope = f" Smoke level: {', '.join(reduced)}." if reduced else ""
        return "measured", level, f"Measured: {measured} fixed candidates, none selected.{scope}{_failures(trials)}"
    claims = not reduced and champion != "baseline" and promotion.confirmed(confirmed, config)
    found = _found(config, workflow, trials, decisions, champion, confirmed, claims)
    if reduced:
        return "smoke: no conclusion", level, f"Smoke run, no conclusion ({', '.join(reduced)}). {found}"
    return "improved" if claims else "not improved", level, found


def reductions(
    config: RunConfig, workflow: Workflow, prepared: Prepared | None, compared: Sequence[Trial]
) -> list[str]:
    """Why a run is of level `smoke`, in words; empty when it is not.

    A smoke budget, a size below both the standard's and the budget's own, stand-in data, fewer than three finished
    seeds of a compared candidate (where seeds change something), fewer than 200 distinct validation examples.
    """
    found = ["smoke budget"] if config.budget == "smoke" else []
    if prepared is None:
        return [*found, "data not prepared"]
    if config.budget != "smoke":
        standard, own = workflow.sizes("standard").values, workflow.sizes(config.budget).values
        found += [
            f"{name} {value} instead of {own[name]}"
            for name, value in prepared.sizes.items()
            if name not in (*NOT_A_REDUCTION, *workflow.settings)
            and name in own
            and value < min(own[name], standard.get(name, own[name]))
        ]
    if prepared.stand_in:
        found.append("stand-in data")
    seeds = min((len(promotion.completed(trial, workflow.metric)) for trial in compared), default=0)
    if workflow.stochastic and seeds < MINIMUM_SEEDS:
        found.append(f"{seeds} seed{'s' * (seeds != 1)}")
    if prepared.examples < promotion.MINIMUM_EXAMPLES:
        found.append(f"{prepared.examples} evaluated examples")
    return found


def floor(workflow: Workflow, prepared: Prepared) -> tuple[str, float] | None:
    """The best trivial predictor and its score."""
    if not prepared.floors:
        return None
    better = promotion.sign(workflow.direction)
    name = max(prepared.floors, key=lambda name: better * prepared.floors[name])
    return name, prepared.floors[name]


def _below_floor(workflow: Workflow, prepared: Prepared | None, means: dict[str, float]) -> str:
    best = floor(workflow, prepared) if prepared else None
    if best is None:
        return ""
    better = promotion.sign(workflow.direction)
    below = [f"{id} at {mean:.4g}" for id, mean in means.items() if better * (mean - best[1]) <= 0]
    return f"{' and '.join(below)} no better than {best[0]} ({workflow.metric} {best[1]:.4g})" if below else ""


def _found(
    config: RunConfig,
    workflow: Workflow,
    trials: Sequence[Trial],
    decisions: Sequence[Decision],
    champion: str,
    confirmed: Paired | None,
    claims: bool,
) -> str:
    """What search and confirmation found; begins with "Improved" only where that may be claimed."""
    tail = _failures(trials)
    comparisons = [comparison for decision in decisions for comparison in decision.comparisons]
    if champion == "baseline":
        candidates = len({comparison.child for comparison in comparisons})
        if not candidates:
            return f"No improvement found: no candidate could be compared with the baseline.{tail}"
        worse = len({c.child for c in comparisons if c.upper is not None and c.upper < 0})
        intervals = all(c.lower is not None for c in comparisons)
        beyond = ", no difference beyond noise" if intervals and not worse else f", {worse} worse" if worse else ""
        who = f"none of {candidates} candidates beats" if candidates > 1 else "the one candidate does not beat"
        return f"No improvement found: {who} the baseline on {workflow.metric}{beyond}.{tail}"
    if confirmed is None:
        steps = [promotion.in_words(comparison) for comparison in comparisons if comparison.child == champion]
        led = f"{champion} led the search ({'; '.join(steps)})" if steps else f"{champion} led the search"
        return f"No improvement found: {led}, and no confirmation was run.{tail}"
    what = "fresh seeds" if confirmed.by == "seeds" else "validation examples"
    error = "no standard error" if confirmed.se is None else f"SE {confirmed.se:.2g}"
    numbers = f"{confirmed.gain:+.4g} {workflow.metric} over the baseline on {confirmed.n} {what} ({error})"
    if workflow.direction == "min":
        numbers += ", less being better"
    if claims:
        return f"Improved: {champion} gains {numbers}.{tail}"
    if promotion.confirmed(confirmed, config):
        return f"{champion} led the search and its confirmation, {numbers}.{tail}"
    if confirmed.missing:
        why = f"seeds {', '.join(map(str, confirmed.missing))} did not finish"
    elif confirmed.provisional:
        why = f"too few {what}"
    else:
        why = f"not above {config.delta_min:g} by {config.confirm_z:g} SE"
    return f"No improvement found: {champion} led the search, and its confirmation gave {numbers}: {why}.{tail}"


def _failures(trials: Sequence[Trial]) -> str:
    ran = [t for t in trials if t.state not in ("duplicate", "infeasible", "planned")]
    lost = [t for t in ran if t.state in ("failed", "partial")]
    beyond = [t.candidate.id for t in ran if t.violations]
    said = f" {len(lost)} of {len(ran)} candidates did not complete." if lost else ""
    return said + (f" Beyond a hard limit: {', '.join(beyond)}." if beyond else "")
