"""What a generation tries. Every proposal is a pure function of (run seed, generation, index, parent, visible trials).

* Generation 0: the baseline.
* Generation 1: a fair ablation. Each child is the baseline with one structural operator, everything else equal. The
  direction orders and filters the operators by their keywords, and nothing else.
* Generation 2 and later, sampler `planned`: the workflow's schedule of axis groups around the champion, crossovers of
  the champion with other candidates that gained, and single changes in turn.
* Generation 2 and later, any other sampler: Optuna over the joint space. Every candidate names its sampler; one plan
  holds one kind.
* A workflow that only measures has fixed points; a smoke run may follow the workflow's own short plan.

Duplicates and infeasible proposals stay in the plan with their reason, and the next proposal takes their place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from auto_research.evolve import promotion, storage
from auto_research.evolve.genome import NEVER_RUN, find_operators, make_candidate, mark_duplicates
from auto_research.evolve.records import Candidate, Part, Plan, RunConfig, Trial
from auto_research.evolve.space import CONTROL, Axis, Genome, Space, Value
from auto_research.evolve.workflow import Cost, Data, Operator, Sizes, Workflow
from auto_research.runtime.errors import UserError

PROPOSALS_PER_PLACE = 10
"""A sampler that keeps proposing what was tried is stopped after this many proposals for each place."""
DRAWS = 100
"""Values that a plan draws from one range at most."""
BASELINE = "baseline"


@dataclass(frozen=True)
class Proposal:
    """A genome to be looked at.

    Attributes:
        parents: the first is the one it will be compared with.
        operator: id of the one operator that it may bring; "" allows any.
    """

    genome: Genome
    parents: tuple[Candidate, ...]
    sampler: str = "planned"
    operator: str = ""


def runs(candidate: Candidate) -> bool:
    """Whether a candidate of a plan is executed."""
    return not candidate.duplicate_of and not candidate.reason and candidate.origin not in NEVER_RUN


def baseline_genome(config: RunConfig, workflow: Workflow) -> Genome:
    """The starting point: the first values, or the first fixed point, with the run's changes.

    Raises `UserError` for an unknown axis or value, and for a change of an axis that does not count there.
    """
    start = workflow.start(config.budget) if workflow.select else workflow.points(config.budget)[0]
    values = {**start, **config.changes}
    unused = [name for name in workflow.space.unused(values) if name in config.changes]
    if unused:
        needs = "; ".join(
            f"{other} = {' or '.join(map(str, allowed))}"
            for name in unused
            for other, allowed in workflow.space[name].condition.items()
        )
        raise UserError(f"{', '.join(unused)} does not count in this baseline: it needs {needs}")
    return workflow.space.resolve(values)


def plan_generation(
    config: RunConfig,
    workflow: Workflow,
    generation: int,
    champion: Candidate | None,
    trials: Sequence[Trial],
    sizes: Sizes,
    data: Data,
) -> Plan:
    """The plan of a generation, a pure function of its arguments; the order of `trials` does not matter.

    Args:
        champion: parent of generation 2 and later; generation 0 has none, generation 1 starts from the baseline.
        trials: all of earlier generations, finished, with duplicates and infeasible ones.

    Raises `UserError` when the baseline is infeasible, `ValueError` when earlier generations are missing.
    """
    if generation == 0:
        genome = baseline_genome(config, workflow)
        made = make_candidate(workflow, BASELINE, 0, genome, [], "planned", sizes, data, config.seeds, None)
        if made.reason:
            raise UserError(f"the baseline is infeasible: {made.reason}")
        return Plan(generation=0, parent="", candidates=[made], notes=_direction_notes(config, workflow))
    seen = storage.ordered(trials)
    baseline = next((trial.candidate for trial in seen if trial.candidate.id == BASELINE), None)
    if baseline is None:
        raise ValueError("a generation is planned after its baseline")
    parent = champion or baseline
    notes = _direction_notes(config, workflow)
    proposals = _proposals(config, workflow, generation, baseline, parent, seen, notes)
    candidates = _fill(config, workflow, generation, proposals, baseline, [t.candidate for t in seen], sizes, data)
    empty = config.population - sum(map(runs, candidates))
    if empty > 0 and workflow.select:
        notes.append(f"{empty} of {config.population} places stay empty: {_why_empty(config, workflow, generation)}")
    return Plan(generation=generation, parent=parent.id, candidates=candidates, notes=notes)


def _direction_notes(config: RunConfig, workflow: Workflow) -> list[str]:
    notes = [find_operators(workflow, config.direction).explanation] if workflow.operators else []
    if controls := [axis.name for axis in workflow.space.group(CONTROL)]:
        notes.append(f"negative controls, which no sampler draws (a plan or --set sets them): {', '.join(controls)}")
    return notes


def _why_empty(config: RunConfig, workflow: Workflow, generation: int) -> str:
    if generation == 1:
        offered = [operator.id for operator in find_operators(workflow, config.direction).operators]
        return f"there is no other single structural change than {', '.join(offered) or 'those shown'}"
    if config.sampler == "planned":
        return "every single change and crossover around the champion was tried or is infeasible"
    return f"the sampler found nothing new in {PROPOSALS_PER_PLACE * config.population} proposals"


def _fill(
    config: RunConfig,
    workflow: Workflow,
    generation: int,
    proposals: Iterable[Proposal],
    baseline: Candidate,
    known: Sequence[Candidate],
    sizes: Sizes,
    data: Data,
) -> list[Candidate]:
    """Candidates from proposals until as many as the population can run; what cannot run is kept in between."""
    cost = Cost(baseline.parameters, baseline.flops, baseline.memory_bytes, dict(baseline.cost))
    made: list[Candidate] = []
    places = config.population
    for index, proposal in enumerate(itertools.islice(proposals, PROPOSALS_PER_PLACE * config.population), start=1):
        candidate = make_candidate(
            workflow,
            f"g{generation}-{index}",
            generation,
            proposal.genome,
            proposal.parents,
            proposal.sampler,
            sizes,
            data,
            config.seeds,
            cost,
        )
        if proposal.sampler == "fixed":
            candidate.origin = "fixed"
        elif proposal.operator and not candidate.reason and candidate.operators != [proposal.operator]:
            brought = ", ".join(candidate.operators) or "none"
            candidate.reason = f"generation 1 adds one operator at a time, and this genome, repaired, has {brought}"
        mark_duplicates([candidate], [*known, *made])
        made.append(candidate)
        places -= runs(candidate)
        if places == 0:
            break
    return made


# ------------------------------------------------------------------------------------------------- proposals


def _proposals(
    config: RunConfig,
    workflow: Workflow,
    generation: int,
    baseline: Candidate,
    champion: Candidate,
    trials: Sequence[Trial],
    notes: list[str],
) -> Iterator[Proposal]:
    tried = [trial.candidate.genome for trial in trials]
    if not workflow.select:
        points = [workflow.space.resolve({**point, **config.changes}) for point in workflow.points(config.budget)]
        return (Proposal(point, (baseline,), "fixed") for point in _untried(points, tried))
    found = find_operators(workflow, config.direction)
    if generation == 1:
        general = _ablation(workflow, baseline, found.operators)
    elif config.sampler == "planned":
        general = _schedule(config, workflow, generation, champion, trials, found.operators, notes)
    else:
        general = _sampled(config, workflow, generation, champion, trials)
    smoke = workflow.smoke_plan() if config.budget == "smoke" else None
    named = found.operators != list(workflow.operators)  # a direction that chooses operators goes before the short plan
    if smoke is None or named:
        return general
    wanted = list(_untried([_moved(workflow.space, baseline, genome) for genome in smoke], tried))
    if not wanted:
        return general
    notes.append("the smoke run of this workflow has a plan of its own")
    rest = (proposal for proposal in general if proposal.sampler != "planned" or proposal.genome not in wanted)
    return itertools.chain((Proposal(genome, (baseline,)) for genome in wanted), rest)


def _untried(genomes: Iterable[Genome], tried: Sequence[Genome]) -> Iterator[Genome]:
    """Genomes in their order, each once, without those that were tried."""
    seen = list(tried)
    for genome in genomes:
        if genome not in seen:
            seen.append(genome)
            yield genome


def _moved(space: Space, baseline: Candidate, genome: Genome) -> Genome:
    """A genome that was declared against the first values, carried over to a baseline that the run changed."""
    changed = {name: new for name, (_, new) in space.difference(space.baseline(), space.resolve(genome)).items()}
    return space.resolve({**baseline.genome, **{name: new for name, new in changed.items() if new is not None}})


def _with(space: Space, genome: Genome, axis: Axis, value: Value) -> Genome | None:
    """`genome` with one axis changed and its conditions met by their first allowed values; None if that fails."""
    values: dict[str, Value] = {**genome, axis.name: value}
    waiting = [axis]
    while waiting:
        for name, allowed in waiting.pop().condition.items():
            if values.get(name) not in allowed:
                values[name] = allowed[0]
            waiting.append(space[name])
    made = space.resolve(values)
    return made if made.get(axis.name) == value else None


def _ablation(workflow: Workflow, baseline: Candidate, operators: Sequence[Operator]) -> Iterator[Proposal]:
    """The baseline with one operator each: every operator's first value, then every second one, and so on.

    When the operators run out, single values of structure axes that no operator owns.
    """
    space, start = workflow.space, baseline.genome
    variants: list[list[tuple[str, Genome]]] = []
    for operator in operators:
        if any(start.get(name) in owned for name, owned in operator.sets.items()):
            continue  # part of the baseline
        made = []
        for name, owned in operator.sets.items():
            for value in owned:
                genome = _with(space, start, space[name], value)
                if genome is not None and _only(space, operator, start, genome):
                    made.append((operator.id, genome))
        variants.append(made)
    seen: list[Genome] = [start]
    for id, genome in (v for row in itertools.zip_longest(*variants) for v in row if v is not None):
        if genome not in seen:
            seen.append(genome)
            yield Proposal(genome, (baseline,), operator=id)
    for axis in space.group("structure"):
        for value in axis.probes():
            if axis.name not in start or value == start[axis.name] or _owned(workflow.operators, axis.name, value):
                continue
            changed = _with(space, start, axis, value)
            if changed is not None and changed not in seen:
                seen.append(changed)
                yield Proposal(changed, (baseline,))


def _only(space: Space, operator: Operator, start: Genome, genome: Genome) -> bool:
    """Whether every axis that counts in both genomes and differs has a value that the operator owns."""
    return all(
        new in operator.sets.get(name, ())
        for name, (old, new) in space.difference(start, genome).items()
        if old is not None and new is not None
    )


def _owned(operators: Iterable[Operator], axis: str, value: Value) -> bool:
    return any(value in operator.sets.get(axis, ()) for operator in operators)


def _schedule(
    config: RunConfig,
    workflow: Workflow,
    generation: int,
    champion: Candidate,
    trials: Sequence[Trial],
    operators: Sequence[Operator],
    notes: list[str],
) -> Iterator[Proposal]:
    """Proposals in the generation's axis groups; when those are used up, in the groups that come next."""
    present = {axis.group for axis in workflow.space.axes} - {CONTROL}
    stages = [groups for groups in workflow.schedule if present & set(groups)] or [tuple(sorted(present))]
    first = min(generation - 2, len(stages) - 1)
    notes.append(f"axis groups of this generation: {', '.join(stages[first])}")
    seen = [champion.genome, *(trial.candidate.genome for trial in trials)]
    for stage in stages[first:]:
        if stage is not stages[first]:
            notes.append(f"used up; continued with {', '.join(stage)}")
        key = (config.run_seed, generation, champion.fingerprint, "/".join(stage))
        crossed = _crossovers(workflow, stage, champion, trials)
        mutated = _mutations(workflow, stage, champion, operators, key)
        for proposal in _alternately(crossed, mutated):
            if proposal.genome not in seen:
                seen.append(proposal.genome)
                yield proposal


def _alternately(*sources: Iterator[Proposal]) -> Iterator[Proposal]:
    """One of each source in turn, until all have ended."""
    open_sources = list(sources)
    while open_sources:
        for source in list(open_sources):
            if (item := next(source, None)) is None:
                open_sources.remove(source)
            else:
                yield item


def _crossovers(
    workflow: Workflow, groups: Sequence[str], champion: Candidate, trials: Sequence[Trial]
) -> Iterator[Proposal]:
    """The champion with what another candidate changed and gained by, the largest gain first.

    Only axes of these groups, and only where the champion still has the baseline's value: a crossover adds.
    """
    space = workflow.space
    by_id = {trial.candidate.id: trial for trial in trials}
    start = by_id[BASELINE].candidate.genome
    gains: list[tuple[float, Candidate]] = []
    for trial in trials:
        made = trial.candidate
        parent = by_id.get(made.parents[0]) if made.parents else None
        ours = promotion.values(trial, workflow.metric)
        theirs = promotion.values(parent, workflow.metric) if parent is not None else []
        if trial.state == "completed" and made.id != champion.id and len(ours) == len(theirs) > 0:
            gain = promotion.sign(workflow.direction) * float(np.mean(ours) - np.mean(theirs))
            if gain > 0:
                gains.append((gain, made))
    for _, partner in sorted(gains, key=lambda found: -found[0]):
        given = {
            name: partner.genome[name]
            for name in partner.difference
            if name in partner.genome
            and space[name].group in groups
            and champion.genome.get(name) == start.get(name) != partner.genome[name]
        }
        made_genome = space.resolve({**champion.genome, **given})
        if given and made_genome != champion.genome:
            yield Proposal(made_genome, (champion, partner))


def _mutations(
    workflow: Workflow,
    groups: Sequence[str],
    champion: Candidate,
    operators: Sequence[Operator],
    key: tuple[int | str, ...],
) -> Iterator[Proposal]:
    """The champion with one axis changed, one value of each axis in turn.

    Axes whose values belong to operators that the direction names come first, the rest in an order drawn from `key`.
    """
    space = workflow.space
    named: dict[str, int] = {}
    if operators != list(workflow.operators):
        for position, operator in enumerate(operators):
            for name in operator.sets:
                named.setdefault(name, position)
    random = np.random.default_rng(storage.seed_of(*key))
    axes = [axis for axis in space.group(*groups) if axis.name in champion.genome]
    axes = [axes[i] for i in random.permutation(len(axes))]
    axes.sort(key=lambda axis: named.get(axis.name, len(operators)))
    yield from _alternately(*(_mutations_of(space, champion, axis, key) for axis in axes))


def _mutations_of(space: Space, champion: Candidate, axis: Axis, key: tuple[int | str, ...]) -> Iterator[Proposal]:
    random = np.random.default_rng(storage.seed_of(*key, axis.name))
    values: Iterator[Value]
    if axis.values:
        values = (axis.values[i] for i in random.permutation(len(axis.values)))
    else:
        values = (_draw(axis, float(at)) for at in random.random(DRAWS))
    for value in values:
        if value != champion.genome[axis.name]:
            yield Proposal(space.resolve({**champion.genome, axis.name: value}), (champion,))


def _draw(axis: Axis, at: float) -> float:
    """The value of a range at a share in [0, 1), on its own scale."""
    if axis.kind == "log-float":
        return storage.rounded(axis, math.exp(math.log(axis.low) + at * (math.log(axis.high) - math.log(axis.low))))
    return storage.rounded(axis, axis.low + at * (axis.high - axis.low))


def _sampled(
    config: RunConfig, workflow: Workflow, generation: int, champion: Candidate, trials: Sequence[Trial]
) -> Iterator[Proposal]:
    """Optuna's proposals over the joint space, each compared with the champion.

    The study lives in memory and holds the visible trials alone. Proposals of this plan stay open in it, so that a
    sampler which knows about open trials keeps away from them.
    """
    study = storage.history(config, workflow, trials)
    while True:
        _, genome = storage.ask(config, workflow, study, generation)
        yield Proposal(genome, (champion,), f"optuna:{config.sampler}")


def random_plan(config: RunConfig, workflow: Workflow, sizes: Sizes, data: Data, count: int) -> list[Candidate]:
    """Random search: `count` candidates that can run, drawn over the joint space without looking at any result.

    Ids are `random-1`, `random-2` ...; duplicates of the baseline or of each other and infeasible ones are kept in
    between with their reason. Fewer come back when the space holds no more.
    """
    baseline = plan_generation(config, workflow, 0, None, [], sizes, data).candidates[0]
    plain = config.model_copy(update={"sampler": "random", "population": max(1, count), "run_seed": _other(config)})
    proposals = _sampled(plain, workflow, 0, baseline, [])
    made = _fill(plain, workflow, 0, proposals, baseline, [baseline], sizes, data) if count > 0 else []
    return [
        candidate.model_copy(
            update={
                "id": f"random-{index}",
                "origin": "random-search",
                "sampler": "random",
                "duplicate_of": candidate.duplicate_of.replace("g0-", "random-"),
                "reason": candidate.reason.replace(" g0-", " random-"),
            }
        )
        for index, candidate in enumerate(made, start=1)
    ]


def _other(config: RunConfig) -> int:
    """A run seed for the random search, so that it does not repeat the draws of a sampler of this run."""
    return storage.seed_of(config.run_seed, "random search")


# ------------------------------------------------------------------------------------------------------ cost


class CostEstimate(Part):
    """What a run will need, as far as it can be known.

    Attributes:
        trials: candidates of the search, baseline included.
        cells: processes that train: trials times seeds, the confirmation and the random search.
        baseline_runs: their training FLOPs, in runs of the baseline; generations that are not planned yet count as
            the mean so far.
        peak_memory_bytes: of the largest planned candidate.
        seconds: of processor time, one cell after another; None until the baseline was measured.
    """

    trials: int
    cells: int
    confirm_cells: int
    random_cells: int
    test_evaluations: int
    baseline_runs: float
    peak_memory_bytes: int
    seconds: float | None = None


def _work(candidate: Candidate) -> float:
    """FLOPs of a whole training where the workflow names its steps as a cost `training_steps`, else of one step."""
    return candidate.flops * candidate.cost.get("training_steps", 1.0)


def cost_estimate(
    config: RunConfig, workflow: Workflow, plans: Sequence[Plan], trials: Sequence[Trial] = ()
) -> CostEstimate:
    """The cost of a whole run from the plans made so far, generation 0 first, and measured baseline cells if any."""
    planned = [candidate for plan in plans for candidate in plan.candidates if runs(candidate)]
    baseline = planned[0]
    shares = [_work(c) / _work(baseline) if baseline.flops else 1.0 for c in planned]
    usual = float(np.mean(shares[1:])) if len(shares) > 1 else 1.0
    later = max(0, config.generations + 1 - len(plans)) * config.population
    if not workflow.select:
        later = min(later, max(0, len(workflow.points(config.budget)) - len(planned)))
    seeds = len(config.seeds) if workflow.stochastic else 1
    confirm = 2 * len(config.confirm_seeds) if workflow.select and workflow.stochastic else 0
    random = config.generations * config.population * seeds if config.random_search and workflow.select else 0
    search = (len(planned) + later) * seeds
    amount = (sum(shares) + later * usual) * seeds + (1 + usual) * confirm / 2 + random * usual
    measured = [
        cell.cpu_seconds or cell.seconds
        for trial in trials
        if trial.candidate.id == BASELINE
        for cell in trial.cells
        if cell.state == "completed"
    ]
    return CostEstimate(
        trials=len(planned) + later,
        cells=search + confirm + random,
        confirm_cells=confirm,
        random_cells=random,
        test_evaluations=2 if workflow.select else 1,
        baseline_runs=amount,
        peak_memory_bytes=max(candidate.memory_bytes for candidate in planned),
        seconds=float(np.mean(measured)) * amount if measured else None,
    )
