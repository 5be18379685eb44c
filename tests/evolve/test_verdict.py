"""What a run may claim: levels and verdicts from what ran, and the first sentence."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from synthetic import config, prepared
from test_promotion import made
from toy import DeterministicToy, FixedToy, ToyWorkflow

from auto_research.evolve.promotion import confirm, decide
from auto_research.evolve.records import Prepared, RunConfig, Trial, Verdict
from auto_research.evolve.verdict import judge
from auto_research.evolve.workflow import Workflow

BASELINE = made("baseline", {42: 0.50, 43: 0.52, 44: 0.51})
BETTER = made("g1-1", {42: 0.60, 43: 0.63, 44: 0.61})
WORSE = made("g1-2", {42: 0.40, 43: 0.42, 44: 0.42})
SAME = made("g1-3", {42: 0.502, 43: 0.517, 44: 0.512})
FRESH = dict(zip(config().confirm_seeds, (0.50, 0.52, 0.51, 0.53, 0.5)))


def facts(**changes: Any) -> Prepared:
    sizes = ToyWorkflow().sizes("standard").values
    return prepared(**{"floors": {"mean": 0.3, "zero": 0.1}, "examples": 400, "sizes": sizes, **changes})


def judged(
    trials: list[Trial],
    *,
    lift: float | None = None,
    data: Prepared | None = None,
    workflow: Workflow | None = None,
    **changes: Any,
) -> tuple[Verdict, str, str]:
    """The verdict on trials (baseline first) after one decision; `lift` is the champion's gain on fresh seeds."""
    settings: RunConfig = config(**changes)
    flow = workflow or ToyWorkflow()
    decision = decide(1, trials[0], trials[1:], settings, flow)
    again = None
    if lift is not None:
        champion = made(decision.champion, {s: v + lift + 0.004 * (s % 2) for s, v in FRESH.items()})
        again = confirm(champion, made("baseline", dict(FRESH)), settings, flow)
    return judge(
        config=settings, workflow=flow, prepared=data or facts(), trials=trials, decisions=[decision],
        champion=decision.champion, confirmed=again,
    )  # fmt: skip


def test_improved_needs_a_confirmation() -> None:
    trials = [BASELINE, BETTER, SAME]
    verdict, level, sentence = judged(trials, lift=0.09)
    assert (verdict, level) == ("improved", "L0 mechanism")
    assert sentence.startswith("Improved: g1-1 gains +0.0924 closeness over the baseline on 5 fresh seeds (SE 0.0")
    verdict, _, sentence = judged(trials)
    assert verdict == "not improved"
    assert sentence == (
        "No improvement found: g1-1 led the search (g1-1 against baseline: +0.1033 (n 3 seeds, SE 0.00333)), "
        "and no confirmation was run."
    )
    verdict, _, sentence = judged(trials, lift=-0.002)
    assert verdict == "not improved"
    assert sentence.startswith("No improvement found: g1-1 led the search, and its confirmation gave +0.0004")
    assert sentence.endswith("not above 0 by 2 SE.")


def test_a_confirmation_with_a_lost_seed_claims_nothing() -> None:
    settings, flow = config(), ToyWorkflow()
    champion = made("g1-1", {s: (v + 0.09 if s != 1003 else "killed") for s, v in FRESH.items()})
    again = confirm(champion, made("baseline", dict(FRESH)), settings, flow)
    decision = decide(1, BASELINE, [BETTER], settings, flow)
    verdict, _, sentence = judge(
        config=settings, workflow=flow, prepared=facts(), trials=[BASELINE, BETTER], decisions=[decision],
        champion="g1-1", confirmed=again,
    )  # fmt: skip
    assert verdict == "not improved"
    assert sentence.endswith("seeds 1003 did not finish.")


def test_nothing_better_is_said_first_and_failures_are_counted() -> None:
    lost = made("g1-4", {42: 0.9, 43: "timed_out", 44: 0.9})
    verdict, _, sentence = judged([BASELINE, WORSE, SAME, lost])
    assert verdict == "not improved"
    assert sentence == (
        "No improvement found: none of 3 candidates beats the baseline on closeness, 1 worse. "
        "1 of 4 candidates did not complete."
    )
    assert judged([BASELINE, SAME])[2] == (
        "No improvement found: the one candidate does not beat the baseline on closeness, no difference beyond noise."
    )


@pytest.mark.parametrize(
    ("data", "changes", "why"),
    [
        ({}, {"budget": "smoke"}, "smoke budget"),
        ({"stand_in": "a synthetic text"}, {}, "stand-in data"),
        ({"examples": 199}, {}, "199 evaluated examples"),
        ({"sizes": {"steps": 79}}, {}, "steps 79 instead of 80"),
        ({"sizes": {"steps": 79}}, {"budget": "full"}, "steps 79 instead of 160"),
    ],
)
def test_whatever_is_reduced_is_smoke(data: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    verdict, level, sentence = judged([BASELINE, BETTER], lift=0.09, data=facts(**data), **changes)
    assert (verdict, level) == ("smoke: no conclusion", "smoke")
    assert sentence.startswith(f"Smoke run, no conclusion ({why}). g1-1 led the search and its confirmation, +0.0924")
    assert "mproved" not in sentence


def test_a_full_run_of_standard_size_is_no_smoke() -> None:
    assert judged([BASELINE, SAME], data=facts(sizes={"steps": 80, "micro_batch": 1}), budget="full")[1] != "smoke"


def test_a_smoke_run_without_a_winner_says_so() -> None:
    one = made("baseline", {42: 0.5})
    verdict, level, sentence = judged([one, made("g1-1", {42: 0.4})], budget="smoke", seeds=[42])
    assert (verdict, level) == ("smoke: no conclusion", "smoke")
    assert sentence == (
        "Smoke run, no conclusion (smoke budget, 1 seed). "
        "No improvement found: the one candidate does not beat the baseline on closeness."
    )


def test_two_finished_seeds_are_smoke_unless_seeds_change_nothing() -> None:
    two = [made("baseline", {42: 0.5, 43: 0.52}), made("g1-1", {42: 0.4, 43: 0.41})]
    assert judged(two)[1] == "smoke"
    rows = [float(i % 2) for i in range(300)]
    one = [made("baseline", {42: 0.5}, units={42: rows}), made("g1-1", {42: 0.5}, units={42: rows[::-1]})]
    verdict, level, _ = judged(one, workflow=DeterministicToy(), seeds=[42])
    assert (verdict, level) == ("not improved", "L0 mechanism")


def test_below_the_floor_is_no_signal() -> None:
    verdict, _, sentence = judged([BASELINE, BETTER], lift=0.09, data=facts(floors={"mean": 0.9, "zero": 0.1}))
    assert verdict == "no signal"
    assert sentence.startswith("No signal: baseline at 0.51 and g1-1 at 0.6133 no better than mean (closeness 0.9)")
    verdict, _, sentence = judged([BASELINE, BETTER], lift=0.09, data=facts(floors={"mean": 0.55}))
    assert verdict == "no signal"  # a win over a baseline that learned nothing
    assert sentence.startswith("No signal: baseline at 0.51 no better than mean")
    smoke = judged([BASELINE, WORSE], data=facts(floors={"mean": 0.9}), budget="smoke")
    assert smoke[:2] == ("no signal", "smoke")
    assert judged([BASELINE, SAME], data=facts(floors={}))[0] == "not improved"


def test_less_is_better_where_the_workflow_says_so() -> None:
    class Loss(ToyWorkflow):
        direction: ClassVar[Literal["max", "min"]] = "min"

    low = made("g1-1", {s: v - 0.09 for s, v in zip((42, 43, 44), (0.50, 0.525, 0.51))})
    verdict, _, sentence = judged([BASELINE, low], data=facts(floors={"mean": 0.9, "chance": 2.0}), workflow=Loss())
    assert verdict == "not improved"
    assert "g1-1 led the search" in sentence
    assert judged([BASELINE, low], data=facts(floors={"mean": 0.45}), workflow=Loss())[0] == "no signal"
    assert judged([BASELINE, low], lift=-0.09, data=facts(floors={"m": 0.9}), workflow=Loss())[0] == "improved"


def test_fixed_candidates_are_measured() -> None:
    verdict, level, sentence = judged([BASELINE, BETTER, WORSE], workflow=FixedToy())
    assert (verdict, level) == ("measured", "L0 mechanism")
    assert sentence == "Measured: 3 fixed candidates, none selected."
    assert judged([BASELINE, BETTER], workflow=FixedToy(), budget="smoke")[1] == "smoke"


def test_nothing_completed_is_no_signal() -> None:
    dead = made("baseline", {42: "failed", 43: "killed", 44: "out_of_memory"})
    assert judged([dead]) == ("no signal", "smoke", "No signal: nothing can be compared (baseline failed).")
    verdict, level, sentence = judge(
        config=config(), workflow=ToyWorkflow(), prepared=None, trials=[], decisions=[], champion="baseline",
        confirmed=None,
    )  # fmt: skip
    assert (verdict, level, sentence) == ("no signal", "smoke", "No signal: nothing can be compared (nothing ran).")


def test_candidates_that_never_ran_are_not_counted() -> None:
    twin = made("g1-2", {}, duplicate_of="baseline", reason="same")
    assert twin.state == "duplicate"
    assert judged([BASELINE, twin])[2] == ("No improvement found: no candidate could be compared with the baseline.")
