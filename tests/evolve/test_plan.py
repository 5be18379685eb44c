"""Plans: one structural change at a time, schedules and samplers apart, pure functions of what the planner sees."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from toy import DeterministicToy, FixedToy, ToyWorkflow

from auto_research.evolve.genome import find_operators
from auto_research.evolve.plan import baseline_genome, cost_estimate, plan_generation, random_plan, runs
from auto_research.evolve.promotion import decide, summarise
from auto_research.evolve.records import Candidate, CellResult, Plan, RunConfig, Trial
from auto_research.evolve.space import Axis, Constraint, Genome, Space
from auto_research.evolve.workflow import Cost, Operator, Sizes, Workflow
from auto_research.runtime.errors import UserError

TOY = ToyWorkflow()
SIZES = TOY.sizes("smoke")
DATA = TOY.load(SIZES, None)


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": "r", "workflow": "toy:ToyWorkflow", "budget": "standard", "generations": 3, "population": 3,
        "seeds": [0, 1, 2],
    }  # fmt: skip
    return RunConfig(**{**values, **changes})


def measured(workflow: Workflow, made: Candidate, seeds: Sequence[int]) -> Trial:
    """The candidate trained and validated here, in this process."""
    cells = []
    for seed in seeds if runs(made) else []:
        artefact = workflow.train(made.genome, DATA, seed, SIZES, "cpu", lambda step, loss: None)
        found = workflow.validate(artefact, DATA, SIZES, "cpu")
        cells.append(
            CellResult(
                cell=f"{made.id}-{seed}", candidate=made.id, seed=seed, role="search", state="completed",
                metrics=found.metrics, units=found.units, cpu_seconds=2.0,
            )
        )  # fmt: skip
    return summarise(made, cells, seeds, workflow, z=1.0)


def search(
    settings: RunConfig, workflow: Workflow = TOY, shuffle: int | None = None, sizes: Sizes = SIZES
) -> tuple[list[Plan], list[Trial]]:
    """Plans and trials of a whole run, in memory; `shuffle` hands the planner its trials in another order."""
    plans: list[Plan] = []
    trials: list[Trial] = []
    champion: Trial | None = None
    for generation in range(settings.generations + 1):
        shown = list(trials)
        if shuffle is not None:
            random.Random(shuffle + generation).shuffle(shown)
        best = champion.candidate if champion else None
        plans.append(plan_generation(settings, workflow, generation, best, shown, sizes, DATA))
        new = [measured(workflow, made, settings.seeds) for made in plans[-1].candidates]
        trials += new
        if champion is None:
            champion = new[0]
        elif workflow.select:
            chosen = decide(generation, champion, new, settings, workflow).champion
            champion = next(trial for trial in trials if trial.candidate.id == chosen)
    return plans, trials


# ---------------------------------------------------------------------------------------- generations 0 and 1


def test_baseline_first() -> None:
    plan = plan_generation(config(), TOY, 0, None, [], SIZES, DATA)
    assert [c.id for c in plan.candidates] == ["baseline"]
    assert plan.candidates[0].origin == "baseline"
    assert plan.candidates[0].genome == TOY.space.baseline()


def test_changes_move_the_baseline() -> None:
    settings = config(changes={"train.lr": 0.1, "train.optimiser": "momentum", "train.momentum": 0.8})
    assert baseline_genome(settings, TOY)["train.momentum"] == 0.8
    with pytest.raises(
        UserError, match=r"train\.momentum does not count in this baseline: it needs train\.optimiser = m"
    ):
        baseline_genome(config(changes={"train.momentum": 0.8}), TOY)
    with pytest.raises(UserError, match=r"Did you mean 'train\.lr'"):
        baseline_genome(config(changes={"train.lt": 0.1}), TOY)
    with pytest.raises(UserError, match="the baseline is infeasible: stable"):
        plan_generation(
            config(changes={"train.lr": 0.3, "train.optimiser": "momentum", "train.momentum": 0.8}),
            TOY, 0, None, [], SIZES, DATA,
        )  # fmt: skip


def test_first_generation_adds_one_operator_at_a_time() -> None:
    plans, _ = search(config(generations=1))
    children = plans[1].candidates
    assert [c.operators for c in children] == [["bias"], ["exchange"], ["decor"]]
    for child in children:
        assert child.parents == ["baseline"]
        assert child.origin == "paper-operator"
        assert len(child.difference) == 1
    assert [c.id for c in children if runs(c)] == ["g1-1", "g1-2"]
    assert children[2].duplicate_of == "baseline"  # the planted no-op, shown with its reason
    assert "changes nothing" in children[2].reason
    assert "1 of 3 places stay empty" in plans[1].notes[-1]


class Rich(ToyWorkflow):
    """More structure: an operator with two values behind a condition, a free structure axis, a repair-free trap."""

    space = Space(
        (
            *(axis for axis in ToyWorkflow.space.axes if axis.name != "model.decor"),
            Axis("model.kind", values=("line", "sum"), source="test"),
            Axis("model.terms", "int", values=(1, 2, 3), condition={"model.kind": ("sum",)}, source="test"),
            Axis("model.sign", values=("plus", "minus"), source="test"),
            Axis("train.shape", values=("flat", "steep"), stage="train", group="joint", source="test"),
        ),
        ToyWorkflow.space.constraints,
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "terms", "Sums", {"model.kind": ("sum",), "model.terms": (2, 3)}, "0001.00009", "core_mechanism",
            keywords=("sum",), code=("toy.design",),
        ),
        *ToyWorkflow.operators[:2],
    )  # fmt: skip

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Any) -> dict[str, str]:
        found = super().effect_probe(genome, sizes, data)
        return {**found, "cost": f"{found['cost']} {[genome.get(a.name) for a in self.space.axes[-4:]]}"}

    def describe(self, genome: Genome, sizes: Sizes, data: Any) -> Any:
        found = super().describe(genome, sizes, data)
        found.configuration["rich"] = [genome.get(axis.name) for axis in self.space.axes[-4:]]
        return found


class Inner(Rich):
    """The operator lives inside a choice that it does not own."""

    operators = (dataclasses.replace(Rich.operators[0], sets={"model.terms": (2, 3)}), *Rich.operators[1:])


def test_operators_come_in_turn_with_their_conditions_met() -> None:
    plan = search(config(generations=1, population=6), Rich())[0][1]
    assert [(c.operators, c.origin) for c in plan.candidates] == [
        (["terms"], "paper-operator"),
        (["bias"], "paper-operator"),
        (["exchange"], "paper-operator"),
        (["terms"], "paper-operator"),  # its second value
        (["terms"], "paper-operator"),  # its third
        ([], "hyperparameter-mutation"),  # then structure that no operator owns, one value at a time
    ]
    assert plan.candidates[0].genome["model.kind"] == "sum"
    assert [c.genome.get("model.terms") for c in plan.candidates] == [1, None, None, 2, 3, None]
    assert list(plan.candidates[5].difference) == ["model.sign"]
    inner = [c.operators for c in search(config(generations=1, population=6), Inner())[0][1].candidates]
    assert inner == [["bias"], ["exchange"], [], []]  # `terms` would need another change first; kind and sign are free


def test_a_direction_orders_and_filters_and_is_explained() -> None:
    found = find_operators(Rich(), "try an OFFSET, or 偏置")
    plan = search(config(generations=1, population=2, direction="try an OFFSET, or 偏置"), Rich())[0][1]
    assert [c.operators for c in plan.candidates] == [["bias"], []]
    assert plan.notes[0] == found.explanation
    assert "left out: terms, exchange" in plan.notes[0]
    other = search(config(generations=1, population=2, direction="noise then sum"), Rich())[0][1]
    assert {c.operators[0] for c in other.candidates} == {"exchange", "terms"}


def test_an_operator_of_the_baseline_is_not_tried_again() -> None:
    plan = search(config(generations=1, changes={"model.bias": "on"}))[0][1]
    assert ["bias"] not in [c.operators for c in plan.candidates]


# ------------------------------------------------------------------------------------- generation 2 and later


def test_schedule_stays_in_its_groups_until_they_are_used_up() -> None:
    plans, trials = search(config(population=2), Rich())
    groups = {axis.name: axis.group for axis in Rich.space.axes}
    champion = {t.candidate.id: t.candidate for t in trials}[plans[2].parent]
    for child in plans[2].candidates:
        assert child.parents[0] == champion.id
        assert {groups[axis] for axis in child.difference} == {"structure"}
    assert "axis groups of this generation: structure" in plans[2].notes
    assert "axis groups of this generation: data" in plans[3].notes
    assert any(note.startswith("used up; continued with") for note in plans[3].notes)  # one data axis is too little
    assert all(c.sampler == "planned" for plan in plans for c in plan.candidates)


def fake(made: Candidate, value: float, seeds: Sequence[int] = (0, 1, 2)) -> Trial:
    cells = [
        CellResult(
            cell=f"{made.id}-{s}", candidate=made.id, seed=s, role="search", state="completed",
            metrics={"closeness": value + 0.001 * s * (1 + value)},
        )
        for s in seeds
    ]  # fmt: skip
    return summarise(made, cells, seeds, TOY, z=1.0)


def test_champion_is_crossed_with_others_that_gained() -> None:
    settings, rich = config(population=4), Rich()
    zero = plan_generation(settings, rich, 0, None, [], SIZES, DATA)
    one = plan_generation(settings, rich, 1, None, [fake(zero.candidates[0], 0.5)], SIZES, DATA)
    scores = {"g1-1": 0.6, "g1-2": 0.7, "g1-3": 0.4, "g1-4": 0.55}  # terms 1, bias, exchange, terms 2
    trials = [fake(zero.candidates[0], 0.5), *(fake(c, scores[c.id]) for c in one.candidates)]
    champion = next(c for c in one.candidates if c.id == "g1-2")
    plan = plan_generation(settings, rich, 2, champion, trials, SIZES, DATA)
    crossed = [c for c in plan.candidates if len(c.parents) == 2]
    assert [c.parents for c in crossed] == [["g1-2", "g1-1"], ["g1-2", "g1-4"]]  # best gain first, no loser
    assert all(c.origin == "combination" for c in crossed)
    assert crossed[0].genome == {**champion.genome, "model.kind": "sum", "model.terms": 1}
    assert crossed[0].axis_from["model.terms"] == "g1-1"
    later = [*trials, fake(crossed[0], 0.8)]  # has terms 1 and bias: what g1-4 gained by would undo the first
    last = plan_generation(settings, rich, 5, crossed[0], later, SIZES, DATA)
    assert not [c for c in last.candidates if len(c.parents) == 2]
    level = [fake(t.candidate, 0.6 if t.candidate.id in ("g1-1", "g1-4") else t.mean or 0.0) for t in trials]
    tied = [plan_generation(settings, rich, 2, champion, shown, SIZES, DATA) for shown in (level, level[::-1])]
    assert tied[0] == tied[1]
    single = [c for c in plan.candidates if len(c.parents) == 1]
    assert len(single) == 2
    assert all(len([a for a, (old, new) in c.difference.items() if None not in (old, new)]) == 1 for c in single)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_samplers_take_over_after_the_ablation_and_are_never_mixed(sampler: str) -> None:
    plans, _ = search(config(sampler=sampler, generations=2))
    assert {c.sampler for c in plans[1].candidates} == {"planned"}
    assert {c.sampler for c in plans[2].candidates} == {f"optuna:{sampler}"}
    assert sum(map(runs, plans[2].candidates)) == 3
    for child in plans[2].candidates:
        assert child.parents == [plans[2].parent]
        assert child.genome["train.lr"] == float(f"{child.genome['train.lr']:.6g}")  # equal settings, equal numbers


def test_rejected_proposals_are_shown_and_replaced() -> None:
    class Tight(ToyWorkflow):
        """Four genomes, so that a sampler soon repeats itself."""

        space = Space(
            (
                Axis("model.bias", values=("off", "on"), source="test"),
                Axis("data.exchange", values=("off", "on"), stage="data", group="data", source="test"),
                Axis("model.decor", values=("off",), source="test"),
                Axis("train.lr", "log-float", low=0.05, high=0.05, default=0.05, stage="train", group="joint"),
                Axis("train.optimiser", values=("plain",), stage="train", group="joint", source="test"),
            ),
        )
        operators = ToyWorkflow.operators[:2]

    plans, _ = search(config(sampler="random", generations=3, population=2), Tight())
    last = plans[2].candidates  # three of four genomes are known by now
    assert sum(map(runs, last)) == 1
    assert len(last) == 20  # ten proposals for each place, all shown
    for rejected in (c for c in last if not runs(c)):
        assert rejected.duplicate_of
        assert rejected.reason == f"has the effective fingerprint of {rejected.duplicate_of}"
    assert "1 of 2 places stay empty: the sampler found nothing new in 20 proposals" in plans[2].notes[-1]
    assert not any(map(runs, plans[3].candidates))
    planned, _ = search(config(generations=3, population=2), Tight())
    assert [sum(map(runs, plan.candidates)) for plan in planned] == [1, 2, 1, 0]


class Narrow(ToyWorkflow):
    space = Space(
        ToyWorkflow.space.axes,
        (Constraint("calm", lambda g: float(g["train.lr"]) < 0.1, "rates from 0.1 on are not wanted"),),
    )


def test_infeasible_proposals_carry_the_reason_and_are_replaced() -> None:
    plans, _ = search(config(sampler="random", generations=2, population=6), Narrow())
    for proposals in (plans[2].candidates, random_plan(config(), Narrow(), SIZES, DATA, 6)):
        refused = [c for c in proposals if not c.fingerprint]
        assert sum(map(runs, proposals)) == 6
        assert refused
        assert all(c.reason == "calm: rates from 0.1 on are not wanted" for c in refused)
        assert all(c.genome["train.lr"] >= 0.1 for c in refused)  # shown as proposed, never clipped


# ------------------------------------------------------------------------------------------------------ purity


@pytest.mark.parametrize("sampler", ["planned", "tpe", "nsga2"])
def test_plans_do_not_depend_on_the_order_of_results_or_on_what_was_planned_before(sampler: str) -> None:
    settings = config(sampler=sampler, generations=2)
    plans, trials = search(settings)
    again, _ = search(settings, shuffle=3)
    assert again == plans
    # As after an interruption: only this one plan is made, from the trials that were read back from files.
    last = plans[2].generation
    read = [Trial.model_validate_json(t.model_dump_json()) for t in trials if t.candidate.generation < last]
    champion = next(t.candidate for t in read if t.candidate.id == plans[2].parent)
    assert plan_generation(settings, ToyWorkflow(), last, champion, read, SIZES, DATA) == plans[2]


def fingerprints() -> list[str]:
    return [
        c.fingerprint
        for sampler in ("planned", "tpe")
        for c in search(config(sampler=sampler, generations=2))[0][2].candidates
    ]


def test_plans_are_alike_in_another_process() -> None:
    here = str(__file__).rsplit("/", 1)[0]
    there = subprocess.run(
        [sys.executable, "-c", "import test_plan; print(*test_plan.fingerprints())"],
        cwd=here, capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": f"{here}/../../src:{here}", "PATH": "/usr/bin:/bin"},
    ).stdout.split()  # fmt: skip
    assert there == fingerprints()


@pytest.mark.parametrize("sampler", ["planned", "tpe", "nsga2", "random"])
def test_the_run_seed_and_the_results_decide(sampler: str) -> None:
    def genomes(**changes: Any) -> list[Genome]:
        return [c.genome for c in search(config(sampler=sampler, generations=2, **changes))[0][2].candidates]

    assert genomes(run_seed=1) != genomes(run_seed=2)
    assert genomes(run_seed=1) == genomes(run_seed=1)


def test_the_random_search_ignores_results_and_repeats_itself() -> None:
    settings = config(sampler="random")
    drawn = random_plan(settings, TOY, SIZES, DATA, 5)
    assert drawn == random_plan(settings, ToyWorkflow(), SIZES, DATA, 5)
    assert [c.id for c in drawn] == [f"random-{i}" for i in range(1, len(drawn) + 1)]
    assert {c.origin for c in drawn} == {"random-search"}
    assert sum(map(runs, drawn)) == 5
    assert random_plan(settings, TOY, SIZES, DATA, 3)[:3] == drawn[:3]
    sampled = search(config(sampler="random", generations=2))[0][2].candidates
    assert not {c.fingerprint for c in drawn} & {c.fingerprint for c in sampled}  # no draw in common
    assert random_plan(settings, TOY, SIZES, DATA, 0) == []


# ------------------------------------------------------------------------------------- fixed and smoke plans


def test_fixed_points_are_measured_in_their_order() -> None:
    fixed = FixedToy()
    plans, trials = search(config(budget="smoke", generations=2, population=2), fixed)
    points = fixed.points("smoke")
    ran = [t.candidate for t in trials if runs(t.candidate)]
    assert plans[0].candidates[0].genome == points[0]
    assert [c.genome for c in ran] == [points[0], *(p for p in points[1:] if p != points[0])]
    assert {c.origin for c in ran[1:]} == {"fixed"}
    assert not any("stay empty" in note for plan in plans for note in plan.notes)


class Short(ToyWorkflow):
    def smoke_plan(self) -> list[Genome] | None:
        start = self.space.baseline()
        return [{**start, "data.exchange": "on"}, {**start, "train.lr": 0.1, "model.bias": "on"}]


def test_smoke_runs_follow_the_workflows_own_plan() -> None:
    plans, _ = search(config(budget="smoke", generations=2, population=2), Short())
    assert [c.genome for c in plans[1].candidates] == [Short.space.resolve(g) for g in Short().smoke_plan() or []]
    assert "the smoke run of this workflow has a plan of its own" in plans[1].notes
    assert all(c.parents == [plans[2].parent] for c in plans[2].candidates)  # used up: the general plan goes on
    moved = search(config(budget="smoke", generations=1, population=2, changes={"train.lr": 0.2}), Short())[0][1]
    assert [c.genome["train.lr"] for c in moved.candidates] == [0.2, 0.1]
    wider = search(config(budget="smoke", generations=1, population=4), Short())[0][1]
    assert [c.operators for c in wider.candidates] == [["exchange"], ["bias"], ["bias"], ["decor"]]  # none twice
    standard = search(config(generations=1, population=2), Short())[0][1]
    assert [c.operators for c in standard.candidates] == [["bias"], ["exchange"]]
    directed = search(config(budget="smoke", generations=1, population=1, direction="intercept"), Short())[0][1]
    assert [c.operators for c in directed.candidates] == [["bias"]]


# -------------------------------------------------------------------------------------------------------- cost


def test_cost_counts_every_cell_and_scales_with_flops() -> None:
    settings = config(generations=2, population=2, confirm_seeds=[10, 11, 12, 13, 14])
    plans, trials = search(settings.model_copy(update={"generations": 1}))
    found = cost_estimate(settings, TOY, plans)
    assert (found.trials, found.confirm_cells, found.random_cells) == (5, 10, 12)
    assert found.cells == 5 * 3 + 10 + 12
    # bias costs twice the baseline, exchange once: (1 + 2 + 1) planned, 1.5 each for what is not planned yet
    assert found.baseline_runs == pytest.approx((4 + 2 * 1.5) * 3 + 5 * 2.5 + 12 * 1.5)
    assert found.seconds is None
    assert found.peak_memory_bytes == 1_000_000
    assert cost_estimate(settings, TOY, plans, trials).seconds == pytest.approx(2.0 * found.baseline_runs)


def test_cost_of_a_deterministic_workflow_and_of_longer_trainings() -> None:
    class Longer(DeterministicToy):
        def cost(self, genome: Genome, sizes: Sizes, data: Any) -> Cost:
            return Cost(1, 4.0, 1, {"training_steps": 30.0 if genome["model.bias"] == "on" else 10.0})

    settings = config(generations=1, population=2, random_search=False)
    first = plan_generation(settings, Longer(), 0, None, [], SIZES, DATA)
    done = [fake(first.candidates[0], 0.5)]
    second = plan_generation(settings, Longer(), 1, None, done, SIZES, DATA)
    found = cost_estimate(settings, Longer(), [first, second])
    assert found.cells == found.trials == 3  # seeds change nothing: one cell each
    assert found.baseline_runs == pytest.approx(1 + 3 + 1)
