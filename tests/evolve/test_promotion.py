"""The promotion and claim rules: hand-computed cases, and simulations with the functions that decide real runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from synthetic import candidate, cell, config
from toy import DeterministicToy, ToyWorkflow

from auto_research.evolve import promotion
from auto_research.evolve.promotion import (
    bootstrap_error,
    clears,
    confirm,
    confirmed,
    decide,
    gain_and_error,
    noise_floor,
    paired,
    pareto,
    pareto_ranks,
    ranking_score,
    summarise,
    survivors,
    violations,
)
from auto_research.evolve.records import CellResult, Paired, Trial

METRIC = "closeness"


def made(
    id: str, values: dict[int, float | str], *, units: dict[int, list[float]] | None = None, **fields: Any
) -> Trial:
    """A trial with one cell a seed; a text is the state of a cell that gave no value."""
    cells = []
    for seed, value in values.items():
        one = cell(id, seed, value, metric=METRIC)  # type: ignore[arg-type]
        if one.metrics:
            one = one.model_copy(update={"metrics": {METRIC: one.metrics[METRIC]}})
        if units:
            one = one.model_copy(update={"units": units[seed]})
        cells.append(one)
    generation = 0 if id == "baseline" else 1
    return summarise(candidate(id, generation, **fields), cells, list(values), ToyWorkflow(), z=1.0)


def against(child: Trial, parent: Trial, **changes: Any) -> Paired:
    values: dict[str, Any] = {"direction": "max", "metric": METRIC, "z": 1.0, "noise": None}
    found = paired(child, parent, **{**values, **changes})
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ by seeds


def test_pairs_by_seed_whatever_their_order() -> None:
    parent = made("baseline", {1: 0.5, 2: 0.7, 3: 0.6})
    child = made("g1-1", {3: 0.63, 1: 0.51, 2: 0.72})
    found = against(child, parent, z=2.0)
    differences = np.array([0.03, 0.01, 0.02])
    error = differences.std(ddof=1) / math.sqrt(3)
    assert found.n == 3
    assert found.by == "seeds"
    assert found.gain == pytest.approx(0.02)
    assert found.se == pytest.approx(error)
    assert (found.lower, found.upper) == pytest.approx((0.02 - 2 * error, 0.02 + 2 * error))
    assert not found.provisional
    assert found.missing == []


def test_gain_is_in_the_direction_of_improvement() -> None:
    parent = made("baseline", {1: 5.2, 2: 5.3, 3: 5.1})
    child = made("g1-1", {1: 5.1, 2: 5.1, 3: 5.0})
    assert against(child, parent, direction="min").gain == pytest.approx(0.4 / 3)
    assert against(child, parent, direction="max").gain == pytest.approx(-0.4 / 3)


def test_one_seed_has_no_error_of_its_own() -> None:
    parent, child = made("baseline", {1: 0.5}), made("g1-1", {1: 0.9})
    with_noise = against(child, parent, noise=0.1)
    assert (with_noise.se, with_noise.lower, with_noise.provisional) == (0.1, pytest.approx(0.3), True)
    without = against(child, parent)
    assert (without.se, without.lower, without.upper, without.provisional) == (None, None, None, True)


def test_failed_seeds_are_named_and_bar_promotion() -> None:
    parent = made("baseline", {1: 0.5, 2: 0.5, 3: 0.52, 4: 0.51})
    child = made("g1-1", {1: 0.9, 2: 0.91, 3: 0.92, 4: "non_finite"})
    assert child.state == "partial"
    assert child.mean == pytest.approx(0.91)  # of the three that finished; the state says that one is missing
    found = against(child, parent)
    assert (found.n, found.missing) == (3, [4])
    decision = decide(1, parent, [child], config(), ToyWorkflow())
    assert decision.champion == "baseline"
    assert decision.reason == "no improvement found: baseline stays; g1-1: not promotable (partial, seed 4 non finite)"
    assert decision.comparisons == [found.model_copy(update={"z": 1.0})]


def test_nothing_in_common_is_no_comparison() -> None:
    parent, child = made("baseline", {1: 0.5, 2: 0.5, 3: 0.5}), made("g1-1", {4: 0.9, 5: 0.9, 6: 0.9})
    assert paired(child, parent, direction="max", metric=METRIC, z=1, noise=None) is None
    decision = decide(1, parent, [child], config(), ToyWorkflow())
    assert decision.champion == "baseline"
    assert "shares no finished seed" in decision.reason


@pytest.mark.parametrize(
    ("values", "clear"),
    [
        ([0.03, 0.01, 0.02], True),  # t = 3.46
        ([0.03, -0.01, 0.0], False),  # t = 0.55
        ([0.03, 0.01], False),  # n below n_min
    ],
)
def test_rule(values: list[float], clear: bool) -> None:
    gain, error = gain_and_error(np.array(values))
    assert clears(gain, error, len(values), n_min=3, z=1.0, delta_min=0.0) == clear
    t = stats.ttest_1samp(values, 0.0).statistic
    assert gain / error == pytest.approx(t)


def test_rule_is_strict_and_respects_the_least_gain() -> None:
    assert not clears(0.0, 0.0, 3, n_min=3, z=1, delta_min=0.0)
    assert not clears(0.01, 0.001, 3, n_min=3, z=1, delta_min=0.01)
    assert clears(0.012, 0.001, 3, n_min=3, z=1, delta_min=0.01)
    with pytest.raises(ValueError, match="one difference"):
        gain_and_error(np.array([0.1]))


# --------------------------------------------------------------------------------------------- by examples


def units(seed: int, n: int = 300, shift: float = 0.0) -> list[float]:
    return (np.random.default_rng(seed).random(n) < 0.5 + shift).astype(float).tolist()


def test_deterministic_workflow_bootstraps_over_examples() -> None:
    first, second = units(0), units(1, shift=0.2)
    parent = made("baseline", {7: float(np.mean(first))}, units={7: first})
    child = made("g1-1", {7: float(np.mean(second))}, units={7: second})
    found = against(child, parent, stochastic=False, noise=123.0)
    differences = np.array(second) - np.array(first)
    assert (found.by, found.n, found.provisional) == ("examples", 300, False)
    assert found.gain == pytest.approx(differences.mean())
    assert found.se == pytest.approx(differences.std() / math.sqrt(300), rel=0.03)  # what the bootstrap estimates
    again = against(child, parent, stochastic=False, noise=None)
    assert again == found  # fixed seed
    boot = stats.bootstrap((differences,), np.mean, n_resamples=10_000, rng=5).standard_error
    assert found.se == pytest.approx(boot, rel=0.03)


def test_few_examples_are_provisional() -> None:
    first, second = units(0, 24), units(1, 24, shift=0.4)
    parent = made("baseline", {7: float(np.mean(first))}, units={7: first})
    child = made("g1-1", {7: float(np.mean(second))}, units={7: second})
    found = against(child, parent, stochastic=False)
    assert (found.n, found.provisional) == (24, True)
    strict = decide(1, parent, [child], config(budget="standard"), DeterministicToy())
    assert strict.champion == "baseline"
    smoke = decide(1, parent, [child], config(budget="smoke"), DeterministicToy())
    assert smoke.champion == "g1-1"
    assert smoke.reason.startswith("g1-1 replaces baseline provisionally")


def test_seeds_that_change_nothing_are_one_observation() -> None:
    """Greedy decoding repeated with three seeds must not look like three agreeing runs."""
    parent = made("baseline", {1: 0.5, 2: 0.5, 3: 0.5})
    child = made("g1-1", {1: 0.6, 2: 0.6, 3: 0.6})
    found = against(child, parent)
    assert (found.n, found.se, found.provisional) == (1, None, True)
    assert decide(1, parent, [child], config(), ToyWorkflow()).champion == "baseline"
    assert noise_floor(parent, METRIC) is None


def test_equal_means_of_different_examples_are_separate_observations() -> None:
    rows = {seed: np.roll([1.0] * 5 + [0.0] * 5, seed).tolist() for seed in (1, 2, 3)}
    parent = made("baseline", dict.fromkeys(rows, 0.5), units=rows)
    child = made("g1-1", {1: 0.6, 2: 0.6, 3: 0.6})
    assert against(child, parent).n == 3


def test_bootstrap_error_of_equal_differences_is_zero() -> None:
    assert bootstrap_error(np.full(50, 0.25)) == 0.0


# --------------------------------------------------------------------------------------- scores and choices


def test_ranking_score_is_pessimistic() -> None:
    values = [0.5, 0.6, 0.7]
    assert ranking_score(values, direction="max", z=1.0, noise=None) == pytest.approx(0.6 - 0.1 / math.sqrt(3))
    assert ranking_score(values, direction="min", z=2.0, noise=None) == pytest.approx(0.6 + 0.2 / math.sqrt(3))
    assert ranking_score([0.6], direction="max", z=1.0, noise=0.05) == pytest.approx(0.55)
    assert ranking_score([0.6], direction="max", z=1.0, noise=None) is None
    assert ranking_score([], direction="max", z=1.0, noise=0.05) is None


@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(0.1, 3), st.integers(2, 9))
def test_one_run_never_outranks_repeated_runs_of_the_same_mean_and_spread(
    mean: float, noise: float, z: float, n: int
) -> None:
    spread = np.linspace(-1, 1, n)
    repeated = (mean + noise * spread / spread.std(ddof=1)).tolist()
    several = ranking_score(repeated, direction="max", z=z, noise=None)
    single = ranking_score([mean], direction="max", z=z, noise=noise)
    assert several is not None
    assert single is not None
    assert single < several


def test_decide_takes_the_highest_lower_bound() -> None:
    parent = made("baseline", {1: 0.50, 2: 0.60, 3: 0.70})
    steady = made("g1-1", {1: 0.54, 2: 0.641, 3: 0.739})
    wild = made("g1-2", {1: 0.54, 2: 0.60, 3: 0.88})  # larger mean, uncertain
    decision = decide(1, parent, [wild, steady], config(), ToyWorkflow())
    assert decision.champion == "g1-1"
    assert decision.reason.startswith("g1-1 replaces baseline; g1-2 against baseline: +0.07")
    assert [c.child for c in decision.comparisons] == ["g1-2", "g1-1"]


def test_a_hard_limit_bars_promotion() -> None:
    class Limited(ToyWorkflow):
        def violations(self, metrics: Any) -> list[str]:
            return ["closeness above 0.8"] if metrics["closeness"] > 0.8 else []

    parent = made("baseline", {1: 0.5, 2: 0.51, 3: 0.52})
    over, under = made("g1-1", {1: 0.9, 2: 0.91, 3: 0.92}), made("g1-2", {1: 0.7, 2: 0.71, 3: 0.73})
    decision = decide(1, parent, [over, under], config(), Limited())
    assert decision.champion == "g1-2"
    assert "g1-1: not promotable (breaks closeness above 0.8)" in decision.reason


class Frugal(ToyWorkflow):
    """Closeness stands for a measured cost of at most 0.8 here."""

    def limits(self, sizes: Any) -> dict[str, float]:
        return {"closeness": 0.8}


def test_a_measured_limit_decides_what_is_feasible() -> None:
    parent = made("baseline", {1: 0.5, 2: 0.51, 3: 0.52})
    over, at = made("g1-1", {1: 0.9, 2: 0.91, 3: 0.92}), made("g1-2", {1: 0.8, 2: 0.8, 3: 0.8})
    decision = decide(1, parent, [over, at], config(), Frugal())
    assert decision.champion == "g1-2", "a mean at its limit is feasible"
    assert "g1-1: not promotable (breaks closeness 0.91 above its limit 0.8)" in decision.reason


def test_a_champion_beyond_its_limit_makes_way_for_any_child_within() -> None:
    parent = made("baseline", {1: 0.9, 2: 0.91, 3: 0.92})
    worse, worst = made("g1-1", {1: 0.7, 2: 0.71, 3: 0.73}), made("g1-2", {1: 0.1, 2: 0.12, 3: 0.11})
    decision = decide(1, parent, [worst, worse], config(), Frugal())
    assert decision.champion == "g1-1", "the best of those within"
    assert decision.reason.startswith("g1-1 replaces baseline, which breaks closeness 0.91 above its limit 0.8")
    beyond = made("g1-3", {1: 0.95, 2: 0.96, 3: 0.99})
    kept = decide(1, parent, [beyond], config(), Frugal())
    assert kept.champion == "baseline"
    assert kept.reason.startswith("no improvement found: baseline stays, though it breaks closeness 0.91")


def test_a_limit_on_what_is_not_measured_is_broken() -> None:
    assert violations(made("a", {1: 0.5}), ToyWorkflow(), {"cost": 1.0}) == ["cost is not measured"]
    assert violations(made("a", {1: 0.5}), ToyWorkflow(), {"closeness": 0.4}) == [
        "closeness 0.5 above its limit 0.4",
    ]


def test_seeds_that_change_no_example_are_one_observation_whatever_the_clock_says() -> None:
    """Greedy decoding with three seeds: each took another time, and all gave the same answers."""

    def timed(id: str, units: list[float]) -> Trial:
        trial = made(id, dict.fromkeys((1, 2, 3), sum(units) / len(units)))
        for second, one in enumerate(trial.cells):
            assert one.metrics is not None
            one.units, one.metrics["latency_s"] = units, float(second)
        return trial

    parent, child = timed("baseline", [0.0, 1.0, 0.0, 1.0]), timed("g1-1", [1.0, 1.0, 0.0, 1.0])
    found = against(child, parent)
    assert (found.by, found.n, found.provisional) == ("examples", 4, True)
    assert found.se is not None
    assert found.se > 0


def test_one_seed_promotes_in_a_smoke_run_alone() -> None:
    parent, child = made("baseline", {1: 0.5}), made("g1-1", {1: 0.9})
    assert decide(1, parent, [child], config(), ToyWorkflow(), noise=0.1).champion == "baseline"
    smoke = decide(1, parent, [child], config(budget="smoke"), ToyWorkflow(), noise=0.1)
    assert smoke.champion == "g1-1"
    assert smoke.comparisons[0].provisional
    within = decide(1, parent, [child], config(budget="smoke"), ToyWorkflow(), noise=0.5)
    assert within.champion == "baseline"


def test_duplicates_and_infeasible_ones_are_not_compared() -> None:
    parent = made("baseline", {1: 0.5, 2: 0.5, 3: 0.6})
    twin = summarise(candidate("g1-1", 1, duplicate_of="baseline", reason="same"), [], [1, 2, 3], ToyWorkflow(), z=1)
    odd = summarise(candidate("g1-2", 1, reason="no"), [], [1, 2, 3], ToyWorkflow(), z=1)
    assert (twin.state, odd.state) == ("duplicate", "infeasible")
    decision = decide(1, parent, [twin, odd], config(), ToyWorkflow())
    assert (decision.champion, decision.comparisons) == ("baseline", [])


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["completed", "completed"], "completed"),
        (["completed", "failed"], "partial"),
        (["timed_out", "failed"], "failed"),
        (["completed", "running"], "running"),
        (["completed", "interrupted"], "running"),
        (["planned", "planned"], "planned"),
        ([], "planned"),
    ],
)
def test_states_of_trials(states: list[str], state: str) -> None:
    cells = [cell("g1-1", i, 0.5 if s == "completed" else s, metric=METRIC) for i, s in enumerate(states)]  # type: ignore[arg-type]
    assert summarise(candidate("g1-1", 1), cells, [0, 1], ToyWorkflow(), z=1).state == state


def test_noise_floor_is_the_spread_of_single_runs() -> None:
    assert noise_floor(made("baseline", {1: 0.5, 2: 0.6, 3: 0.7}), METRIC) == pytest.approx(0.1)
    assert noise_floor(made("baseline", {1: 0.5, 2: "failed"}), METRIC) is None


def test_survivors_are_the_better_half_and_what_is_close() -> None:
    trials = [made(f"g1-{i}", {1: value}) for i, value in enumerate([0.9, 0.8, 0.79, 0.5])]
    assert survivors(trials, ToyWorkflow(), 0.01) == ["g1-0", "g1-1", "g1-2"]
    assert survivors(trials, ToyWorkflow(), None) == ["g1-0", "g1-1"]
    assert survivors([], ToyWorkflow(), 0.1) == []


# ------------------------------------------------------------------------------------------- confirmation


def test_confirmation_needs_fresh_seeds() -> None:
    champion = made("g1-1", {42: 0.9, 1002: 0.9, 1003: 0.91})
    baseline = made("baseline", {42: 0.5, 1002: 0.5, 1003: 0.52})
    with pytest.raises(ValueError, match=r"seeds \[42\] decided the search already"):
        confirm(champion, baseline, config(), ToyWorkflow())


def test_a_claim_needs_every_seed_and_its_own_z() -> None:
    baseline = made("baseline", {1001: 0.50, 1002: 0.52, 1003: 0.51, 1004: 0.53, 1005: 0.5})
    clear = made("g1-1", {1001: 0.60, 1002: 0.61, 1003: 0.61, 1004: 0.64, 1005: 0.6})
    weak = made("g1-2", {1001: 0.53, 1002: 0.51, 1003: 0.53, 1004: 0.53, 1005: 0.51})
    lost = made("g1-3", {1001: 0.60, 1002: 0.61, 1003: 0.61, 1004: 0.64, 1005: "killed"})
    found = {t.candidate.id: confirm(t, baseline, config(), ToyWorkflow()) for t in (clear, weak, lost)}
    assert all(paired is not None and paired.z == 2.0 for paired in found.values())
    assert {id: confirmed(p, config()) for id, p in found.items()} == {"g1-1": True, "g1-2": False, "g1-3": False}
    weak_gain = found["g1-2"]
    assert weak_gain is not None
    assert weak_gain.se is not None
    assert weak_gain.gain - weak_gain.se > 0  # z 1 would have let it pass
    assert not confirmed(None, config())


# -------------------------------------------------------------------------------------------- Pareto front


@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(st.lists(st.integers(0, 4), min_size=m, max_size=m), min_size=1, max_size=12)
    ),
)
def test_ranks_equal_optunas(points: list[list[int]]) -> None:
    from optuna.study._multi_objective import _fast_non_domination_rank

    values = np.array(points, dtype=float)
    directions = ["max" if i % 2 else "min" for i in range(values.shape[1])]
    losses = values * [-1 if d == "max" else 1 for d in directions]
    expected = _fast_non_domination_rank(losses)
    np.testing.assert_array_equal(pareto_ranks(values, directions), expected)  # type: ignore[arg-type]


def test_pareto_front_of_trials() -> None:
    cheap = made("g1-1", {1: 0.5, 2: 0.5, 3: 0.6}, parameters=10)
    good = made("g1-2", {1: 0.8, 2: 0.8, 3: 0.9}, parameters=100)
    poor = made("g1-3", {1: 0.7, 2: 0.7, 3: 0.7}, parameters=200)
    lost = made("g1-4", {1: 0.99, 2: "failed", 3: 0.99}, parameters=1)
    objectives: dict[str, promotion.Direction] = {METRIC: "max", "parameters": "min"}
    assert pareto([cheap, good, poor, lost], objectives) == {"g1-1": 0, "g1-2": 0, "g1-3": 1}
    assert pareto([lost], objectives) == {}
    assert pareto([cheap], {"unknown": "max"}) == {}


# --------------------------------------------------------------------------------------------- simulations

RUNS = 20_000


def simulate(children: int, n: int, effect: float, seed: int) -> np.ndarray:
    """Paired differences (RUNS, children, n) of children against one parent; single runs have deviation 1."""
    random = np.random.default_rng(seed)
    parent = random.standard_normal((RUNS, 1, n))
    return random.standard_normal((RUNS, children, n)) + effect - parent


def rates(children: int, n: int, z: float, effect: float = 0.0, seed: int = 0) -> tuple[float, float]:
    """Share of children, and of runs with at least one child, that clear."""
    differences = simulate(children, n, effect, seed)
    clear = clears(*gain_and_error(differences), n, n_min=3, z=z, delta_min=0.0)
    return float(clear.mean()), float(clear.any(1).mean())


@pytest.mark.parametrize(("n", "z", "one", "some"), [(3, 1.0, 0.21, 0.56), (3, 2.0, 0.09, 0.33), (5, 2.0, 0.06, 0.23)])
def test_wrong_promotions_without_an_effect(n: int, z: float, one: float, some: float) -> None:
    share, any_of_six = rates(6, n, z)
    assert share == pytest.approx(one, abs=0.01)
    assert share == pytest.approx(stats.t.sf(z, n - 1), abs=0.01)  # d / SE is Student's t
    assert any_of_six == pytest.approx(some, abs=0.015)


def claims(effect: float, fresh: int, z: float, children: int = 6, seed: int = 1) -> float:
    """Share of runs that end in a claim: search with three seeds and z 1, the best lower bound, fresh seeds."""
    gain, error = gain_and_error(simulate(children, 3, effect, seed))
    clear = clears(gain, error, 3, n_min=3, z=1.0, delta_min=0.0)
    best = np.where(clear, gain - error, -np.inf).argmax(1)
    again = simulate(children, fresh, effect, seed + 1)[np.arange(RUNS), best]  # the champion and the baseline anew
    return float((clear.any(1) & clears(*gain_and_error(again), fresh, n_min=3, z=z, delta_min=0.0)).mean())


def test_false_claims_are_rare_with_fresh_seeds() -> None:
    """No effect, six children: at most 5 % with five fresh seeds and z 2, far more under weaker rules."""
    assert claims(0.0, 5, 2.0) <= 0.05
    assert claims(0.0, 5, 2.0) == pytest.approx(0.03, abs=0.01)
    assert claims(0.0, 3, 2.0) == pytest.approx(0.05, abs=0.01)
    assert claims(0.0, 3, 1.0) == pytest.approx(0.12, abs=0.015)


def test_an_effect_of_two_deviations_is_found() -> None:
    assert rates(1, 3, 1.0, effect=2.0)[0] == pytest.approx(0.92, abs=0.015)
    power, _ = rates(1, 5, 2.0, effect=2.0)
    assert power == pytest.approx(0.86, abs=0.015)
    exact = stats.nct.sf(2.0, 4, 2.0 / math.sqrt(2.0) * math.sqrt(5))
    assert power == pytest.approx(exact, abs=0.01)
    assert claims(2.0, 5, 2.0) > 0.8


def test_simulated_cells_decide_as_the_arithmetic_says() -> None:
    """The same draws as cells through `decide` and `confirm`: the rates above are those of real runs."""
    runs = 200
    random = np.random.default_rng(4)
    scores = random.standard_normal((runs, 7, 3))
    fresh = random.standard_normal((runs, 7, 5))
    gain, error = gain_and_error(scores[:, 1:] - scores[:, :1])
    clear = clears(gain, error, 3, n_min=3, z=1.0, delta_min=0.0)
    best = np.where(clear, gain - error, -np.inf).argmax(1) + 1
    expected = np.where(clear.any(1), best, 0)
    again = fresh[np.arange(runs), expected] - fresh[:, 0]
    claimed = (expected > 0) & clears(*gain_and_error(again), 5, n_min=3, z=2.0, delta_min=0.0)
    names = ["baseline", *(f"g1-{i}" for i in range(1, 7))]
    found, said = [], []
    for run in range(runs):
        trials = [bare(name, dict(zip((42, 43, 44), scores[run, i]))) for i, name in enumerate(names)]
        winner = names.index(decide(1, trials[0], trials[1:], config(), ToyWorkflow()).champion)
        found.append(winner)
        rerun = [bare(names[i], dict(zip(config().confirm_seeds, fresh[run, i]))) for i in (winner, 0)]
        said.append(winner > 0 and confirmed(confirm(rerun[0], rerun[1], config(), ToyWorkflow()), config()))
    assert found == expected.tolist()
    assert said == claimed.tolist()


def bare(name: str, values: dict[int, float]) -> Trial:
    cells = [
        CellResult(
            cell=f"{name}-{seed}", candidate=name, seed=seed, role="search", state="completed",
            metrics={METRIC: float(value)},
        )
        for seed, value in values.items()
    ]  # fmt: skip
    return Trial(candidate=candidate(name, 1), state="completed", cells=cells)
