"""What a candidate really is: its effective fingerprint, its provenance, and whether every axis has an effect.

All of it is derived from genomes and from what the workflow describes. Names and titles decide nothing: a candidate is
credited with an operator when its genome has an axis value that the operator owns and its parent's has none.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from auto_research.evolve.records import Candidate, Origin
from auto_research.evolve.space import Axis, Genome, Infeasible, Space, Value
from auto_research.evolve.workflow import Cost, Data, Evidence, Operator, Sizes, Workflow, digest
from auto_research.runtime.errors import UserError

PROBES = ("forward", "loss", "data_order", "generated", "cost")
"""What a change of an axis must move at least one of."""

CHANGED: tuple[Origin, ...] = ("paper-operator", "hyperparameter-mutation", "combination")
NEVER_RUN: tuple[Origin, ...] = ("evidence-only", "quarantined")


# ------------------------------------------------------------------------------------------------- fingerprint


def fingerprint(workflow: Workflow, genome: Mapping[str, Value], sizes: Sizes, data: Data, seeds: Sequence[int]) -> str:
    """The effective fingerprint (16 hex digits of SHA-256): equal for candidates that are the same experiment.

    It covers the resolved configuration, names and shapes of all parameters, loss name and constants, the digests of
    data, tokenizer and checkpoints, the source of the operators at work, and the seeds. An operator is at work when
    taking it out of the genome changes what the workflow describes: one that is installed and changes nothing leaves
    the fingerprint as it was. Nothing in it depends on a path or on the machine.
    """
    resolved = workflow.space.resolve(genome)
    described = _described(workflow, resolved, sizes, data)
    code = sorted(
        code_digest(operator)
        for operator in installed(workflow, resolved)
        if (without := _uninstalled(workflow.space, resolved, operator)) is None
        or _described(workflow, without, sizes, data) != described
    )
    return digest(described, data.digests, code, sorted(seeds))


def _described(workflow: Workflow, genome: Genome, sizes: Sizes, data: Data) -> str:
    """What the workflow says about a genome, as JSON. Strict: a value JSON has no form for could hold an address."""
    return json.dumps(vars(workflow.describe(dict(genome), sizes, data)), sort_keys=True, allow_nan=False)


def installed(workflow: Workflow, genome: Mapping[str, Value]) -> list[Operator]:
    """The operators of which a genome has at least one axis value."""
    return [
        operator
        for operator in workflow.operators
        if any(genome[axis] in owned for axis, owned in operator.sets.items() if axis in genome)
    ]


def _uninstalled(space: Space, genome: Genome, operator: Operator) -> Genome | None:
    """The genome with each axis value of `operator` replaced by one that it does not own; None if there is none."""
    values = dict(genome)
    for name, owned in operator.sets.items():
        if values.get(name) in owned:
            others = [value for value in (space[name].start, *space[name].values) if value not in owned]
            if not others:
                return None
            values[name] = others[0]
    try:
        return space.feasible(values)[0]
    except Infeasible:
        return None


def code_digest(operator: Operator) -> str:
    """SHA-256 (16 hex digits) of the source of the operator's functions and classes, in the declared order.

    Compiled functions, which have no source, count by name and by the version of their package.

    Raises `UserError` when a dotted name leads nowhere.
    """
    return digest(*(_source(name, operator.id) for name in operator.code))


def _source(dotted: str, operator: str) -> str:
    parts = dotted.replace(":", ".").split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise
        for part in parts[length:]:
            found = getattr(found, part, None)
        if not callable(found):
            break
        try:
            return inspect.cleandoc(inspect.getsource(inspect.unwrap(found)))
        except (OSError, TypeError):
            package = importlib.import_module(parts[0])
            return f"{dotted} {getattr(package, '__version__', '')}"
    raise UserError(f"operator {operator} names '{dotted}' as its code, and there is no such function or class")


# -------------------------------------------------------------------------------------------------- provenance


def provenance(
    workflow: Workflow,
    genome: Mapping[str, Value],
    parents: Sequence[Candidate],
    sampler: str,
    repaired: Collection[str] = (),
    idle: Collection[str] = (),
) -> dict[str, Any]:
    """Where a candidate comes from, as fields of `Candidate`, from the difference of genomes alone.

    * no parents: the baseline (`random-search` for the sampler `random`, `fixed` for `fixed`);
    * no difference to a parent: a replicate;
    * values of two parents, two or more operators, or several changes at once: a combination;
    * one operator and nothing else: that paper's operator;
    * one axis and no operator: a hyperparameter mutation.

    An axis that is active on one side only has nothing to be equal to: it follows from the axis that switches it.
    The same holds for an axis that a declared repair changed. Both are in the difference and count as no change of
    their own.

    Args:
        parents: the first is the one the candidate is compared with.
        sampler: what proposed it, such as `planned` or `optuna:tpe`.
        repaired: axes that a constraint's repair changed.
        idle: operators that change nothing here: their axes are in the difference, their papers get no credit.
    """
    space = workflow.space
    child = space.resolve(genome)
    if not parents:
        origins: dict[str, Origin] = {"random": "random-search", "fixed": "fixed"}
        return {"origin": origins.get(sampler, "baseline"), "sampler": sampler}
    same = [other for other in parents if not space.difference(space.resolve(other.genome), child)]
    parents = same[:1] or parents
    parent = space.resolve(parents[0].genome)
    difference = space.difference(parent, child)
    before = {operator.id for operator in installed(workflow, parent)}
    brought = [operator for operator in installed(workflow, child) if operator.id not in {*before, *idle}]
    changed = [name for name in difference if name in parent and name in child and name not in repaired]
    alone = [name for name in changed if not any(child[name] in operator.sets.get(name, ()) for operator in brought)]
    givers = _givers(space, child, difference, parents)

    origin: Origin
    axis_from: dict[str, str] = {}
    if same:
        origin = "replicate"
    elif givers or len(brought) + len(alone) != 1:
        origin = "combination"
        owners = {
            name: f"operator:{operator.id}"
            for operator in brought
            for name in difference
            if child.get(name) in operator.sets.get(name, ())
        }
        axis_from = {name: givers.get(name) or owners.get(name) or f"sampler:{sampler}" for name in difference}
        if givers:  # a crossover also says what it kept
            axis_from |= {n: parents[0].id for n in _disagreements(space, parents) if n in child and n not in axis_from}
    else:
        origin = "paper-operator" if brought else "hyperparameter-mutation"
    return {
        "origin": origin,
        "parents": [other.id for other in parents],
        "difference": {name: list(pair) for name, pair in difference.items()},
        "operators": [operator.id for operator in brought],
        "papers": list(dict.fromkeys(operator.paper for operator in brought)),
        "fidelity": _fidelity(brought),
        "omitted": [part for operator in brought for part in operator.omitted],
        "code": {operator.id: code_digest(operator) for operator in brought},
        "axis_from": axis_from,
        "sampler": sampler,
    }


def _givers(space: Space, child: Genome, difference: Collection[str], parents: Sequence[Candidate]) -> dict[str, str]:
    """Axis -> the further parent that has the child's value, of the axes in which the child leaves the first one."""
    found: dict[str, str] = {}
    for other in parents[1:]:
        genome = space.resolve(other.genome)
        for name in difference:
            if name in child and genome.get(name) == child[name]:
                found.setdefault(name, other.id)
    return found


def _disagreements(space: Space, parents: Sequence[Candidate]) -> list[str]:
    genomes = [space.resolve(parent.genome) for parent in parents]
    return [axis.name for axis in space.axes if len({genome.get(axis.name) for genome in genomes}) > 1]


def _fidelity(operators: Sequence[Operator]) -> str:
    """Of several operators the weaker."""
    return min((operator.fidelity for operator in operators), key=("simplified", "core_mechanism").index, default="")


# -------------------------------------------------------------------------------------------------- candidates


def make_candidate(
    workflow: Workflow,
    id: str,
    generation: int,
    genome: Mapping[str, Value],
    parents: Sequence[Candidate],
    sampler: str,
    sizes: Sizes,
    data: Data,
    seeds: Sequence[int],
    baseline_cost: Cost | None,
) -> Candidate:
    """A candidate with everything that is known before it runs.

    A genome that no rule repairs gives a candidate with a `reason` and without a fingerprint: it is infeasible. One
    that moves no probe of its parent is a duplicate of it at once, whatever the workflow describes.

    Args:
        genome: values of axes; missing ones take their defaults.
        baseline_cost: to compare its size with; None for the baseline itself.

    Raises `UserError` for an unknown axis or value.
    """
    space = workflow.space
    proposed = space.resolve(genome)
    repairs: list[str] = []
    reason = ""
    cost = Cost(0, 0.0, 0)
    made, mark, match = proposed, "", ""
    try:
        made, repairs = space.feasible(proposed)
        cost = workflow.cost(dict(made), sizes, data)
        match = workflow.match(dict(made), baseline_cost, sizes, data) if baseline_cost is not None else ""
        mark = fingerprint(workflow, made, sizes, data, seeds)
    except Infeasible as error:
        reason = str(error)
    repaired = space.difference(proposed, made)
    origin = provenance(workflow, made, parents, sampler, repaired)
    if mark and origin["origin"] == "combination" and len(origin["operators"]) > 1:
        parent = space.resolve(parents[0].genome)
        idle = _idle(workflow, made, parent, origin["operators"], sizes, data)
        origin = provenance(workflow, made, parents, sampler, repaired, idle)
    candidate = Candidate(
        id=id,
        generation=generation,
        genome=made,
        repairs=repairs,
        match=match,
        fingerprint=mark,
        reason=reason,
        parameters=cost.parameters,
        flops=cost.flops,
        memory_bytes=cost.memory_bytes,
        cost=cost.extra,
        **origin,
    )
    if mark and sampler != "fixed" and candidate.origin in CHANGED:
        parent = space.resolve(parents[0].genome)
        if _probe(workflow, parent, sizes, data) == _probe(workflow, made, sizes, data):
            candidate.duplicate_of = parents[0].duplicate_of or parents[0].id
            what = " and ".join(candidate.operators or candidate.difference)
            candidate.reason = f"{what} changes nothing of what {candidate.duplicate_of} computes"
    return candidate


def _idle(
    workflow: Workflow, genome: Genome, parent: Genome, operators: Collection[str], sizes: Sizes, data: Data
) -> list[str]:
    """Those of `operators` whose axes, taken back to the parent's values alone, move no probe of the genome."""
    space, found = workflow.space, []
    for operator in workflow.operators:
        if operator.id not in operators:
            continue
        taken = {n: v for n, v in genome.items() if n not in operator.sets or v not in operator.sets[n]}
        kept = {name: parent[name] for name in operator.sets if name in parent and name not in taken}
        try:
            without = space.feasible(space.resolve({**taken, **kept}))[0]
        except Infeasible:  # without it there is no such genome: it does something
            continue
        if _probe(workflow, without, sizes, data) == _probe(workflow, genome, sizes, data):
            found.append(operator.id)
    return found


def mark_duplicates(candidates: Sequence[Candidate], known: Sequence[Candidate] = ()) -> Sequence[Candidate]:
    """Let every candidate whose fingerprint was seen before point to the first that has it.

    Args:
        candidates: changed in place, and returned.
        known: earlier candidates, in the order of their making.
    """
    first: dict[str, str] = {}
    for candidate in known:
        if candidate.fingerprint:
            first.setdefault(candidate.fingerprint, candidate.duplicate_of or candidate.id)
    for candidate in candidates:
        if not candidate.fingerprint:
            continue
        original = first.setdefault(candidate.fingerprint, candidate.duplicate_of or candidate.id)
        if original != candidate.id and not candidate.duplicate_of:
            candidate.duplicate_of = original
            candidate.reason = candidate.reason or f"has the effective fingerprint of {original}"
    return candidates


def ensure_runnable(candidate: Candidate) -> None:
    """Raises `UserError` for a candidate that may never run: evidence, quarantined code, infeasible genomes."""
    if candidate.origin in NEVER_RUN:
        raise UserError(f"{candidate.id} is {candidate.origin} and never runs: {candidate.reason}")
    if candidate.reason and not candidate.fingerprint:
        raise UserError(f"{candidate.id} is infeasible: {candidate.reason}")


def find_evidence(workflow: Workflow, direction: str = "") -> list[Evidence]:
    """The papers without an operator, which never run; those that a direction names come first."""
    return sorted(workflow.evidence, key=lambda item: -len(_matches(direction, item.keywords)))


# ------------------------------------------------------------------------------------------------- directions


class Found(NamedTuple):
    """Operators for a direction, the best match first, and how they were found, in words."""

    operators: list[Operator]
    explanation: str


def find_operators(workflow: Workflow, direction: str) -> Found:
    """Order and filter the workflow's operators by a direction in free text.

    A word of the direction counts when it is a declared keyword of an operator (in any language the operator lists),
    its id or its paper. Without a match, or without a direction, all operators are offered in their declared order.
    """
    everything = list(workflow.operators)
    if not direction.strip():
        return Found(everything, "no direction was given: all operators, in their declared order")
    matches = {op.id: _matches(direction, (op.id, op.paper, *op.keywords)) for op in everything}
    kept = sorted((op for op in everything if matches[op.id]), key=lambda op: -len(matches[op.id]))
    if not kept:
        known = sorted({word for op in everything for word in op.keywords})
        return Found(
            everything,
            f"no keyword of an operator is in the direction '{direction}': all operators, in their declared order; "
            f"keywords: {', '.join(known)}",
        )
    lines = [f"{op.id} by {', '.join(repr(word) for word in matches[op.id])}" for op in kept]
    left_out = [op.id for op in everything if not matches[op.id]]
    return Found(kept, "; ".join([*lines, *([f"left out: {', '.join(left_out)}"] if left_out else [])]))


def _matches(direction: str, keywords: Sequence[str]) -> list[str]:
    """The distinct keywords that occur in the direction: as whole words, or anywhere in scripts without spaces."""
    text = f" {_words(direction)} "
    found: dict[str, str] = {}
    for keyword in keywords:
        words = _words(keyword)
        if words and (f" {words} " in text or (_unspaced(words) and words in text)):
            found.setdefault(words, keyword)
    return list(found.values())


def _words(text: str) -> str:
    """Letters and digits in one case, other signs as one space: `Grouped-Query` and `grouped query` are the same."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold().replace("_", " ")))


def _unspaced(text: str) -> bool:
    """Whether the text holds Chinese, Japanese, Korean or Thai, whose words are not set apart by spaces."""
    return any(
        unicodedata.name(letter, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI")) for letter in text
    )


# ------------------------------------------------------------------------------------------------- effect test


@dataclass(frozen=True)
class Effect:
    """What one axis value does when it alone is changed.

    Attributes:
        parent: the genome it was compared with: the baseline, with the axis switched on where that needs another value.
        child: the same with `value`; empty when no feasible genome has it.
        fingerprint_changed: whether the effective fingerprint differs from the parent's.
        moved: the probes that differ from the parent's.
        twin: another value of the axis with which this one agrees in the fingerprint or in every probe.
    """

    axis: str
    value: Value
    parent: Genome
    child: Genome
    fingerprint_changed: bool
    moved: tuple[str, ...]
    twin: Value | None = None

    @property
    def holds(self) -> bool:
        """Whether the value has an effect of its own."""
        return self.fingerprint_changed and bool(self.moved) and self.twin is None

    @property
    def text(self) -> str:
        """One line for a report."""
        name = f"{self.axis}={self.value}"
        if not self.child:
            return f"{name} has no effect: no feasible genome has it"
        if self.twin is not None:
            return f"{name} has no effect of its own: it does what {self.axis}={self.twin} does"
        if not self.fingerprint_changed:
            return f"{name} has no effect: the effective fingerprint stays"
        if not self.moved:
            return f"{name} has no effect: it moves none of {', '.join(PROBES)}"
        return f"{name} moves {', '.join(self.moved)}"


def effects(workflow: Workflow, sizes: Sizes, data: Data, axes: Collection[str] = ()) -> list[Effect]:
    """The effect test: change every axis to each of its values, alone, and see what moves.

    An axis whose condition does not hold in the baseline is switched on first, in parent and child alike.

    Args:
        axes: only these; all without.

    Raises:
        ValueError: the probe gives different digests for one genome, or an unknown probe; an operator owns nothing.
        UserError: an operator names an axis, a value or code that does not exist.
    """
    space = workflow.space
    _check_operators(workflow)
    baseline = space.feasible(space.baseline())[0]
    if _run_probe(workflow, baseline, sizes, data) != _run_probe(workflow, baseline, sizes, data):
        raise ValueError(f"the effect probe of {workflow.key} is not repeatable: the same genome gave other digests")
    chosen = [space[name] for name in axes] or list(space.axes)
    return [effect for axis in chosen for effect in _effects_of(workflow, axis, sizes, data)]


def _effects_of(workflow: Workflow, axis: Axis, sizes: Sizes, data: Data) -> Iterator[Effect]:
    seen: list[tuple[Genome, Value, str, dict[str, str]]] = []
    for value in axis.probes():
        pair = _pair(workflow.space, axis, value)
        if pair is None:
            yield Effect(axis.name, value, {}, {}, False, ())
            continue
        parent, child = pair
        (mark, probe), (mark_before, probe_before) = (
            (fingerprint(workflow, genome, sizes, data, [0]), _probe(workflow, genome, sizes, data))
            for genome in (child, parent)
        )
        moved = tuple(name for name in PROBES if probe.get(name) != probe_before.get(name))
        twins = [v for p, v, other, probed in seen if p == parent and (other == mark or probed == probe)]
        yield Effect(axis.name, value, parent, child, mark != mark_before, moved, twins[0] if twins else None)
        seen.append((parent, value, mark, probe))


def _pair(space: Space, axis: Axis, value: Value) -> tuple[Genome, Genome] | None:
    """(genome with the axis at its start, the same with `value`): the nearest to the baseline that are feasible.

    Tried in turn: the baseline with the axis switched on, that with one other axis changed; then with repairs.
    """
    start = _switched_on(space, axis, {})
    near = [start, *({**start, other.name: v} for other in space.axes for v in other.probes() if other is not axis)]
    for repairs_allowed, values in itertools.product((False, True), near):
        try:
            parent, _ = space.feasible(values)
            child, repairs = space.feasible({**parent, axis.name: value})
        except Infeasible:
            continue
        if parent.get(axis.name) == axis.start and child.get(axis.name) == value and (repairs_allowed or not repairs):
            return parent, child
    return None


def _switched_on(space: Space, axis: Axis, values: Mapping[str, Value]) -> dict[str, Value]:
    """`values` with the conditions of `axis` met, by the first allowed value where the start is none."""
    met = dict(values)
    for other, allowed in axis.condition.items():
        met = _switched_on(space, space[other], met)
        if met.get(other, space[other].start) not in allowed:
            met[other] = allowed[0]
    return met


def _check_operators(workflow: Workflow) -> None:
    for operator in workflow.operators:
        if not operator.sets:
            raise ValueError(f"operator {operator.id} owns no axis value: a paper without an operator is evidence")
        code_digest(operator)
        for name, owned in operator.sets.items():
            for value in owned:
                workflow.space[name].check(value)


_probed: WeakKeyDictionary[Workflow, dict[str, dict[str, str]]] = WeakKeyDictionary()


def _probe(workflow: Workflow, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
    """The workflow's effect probe; one workflow object probes a genome once."""
    known = _probed.setdefault(workflow, {})
    key = digest(genome, sizes.budget, sizes.values, data.digests)
    if key not in known:
        known[key] = _run_probe(workflow, genome, sizes, data)
    return known[key]


def _run_probe(workflow: Workflow, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
    found = workflow.effect_probe(dict(genome), sizes, data)
    if unknown := set(found) - set(PROBES):
        raise ValueError(f"the effect probe of {workflow.key} gives {sorted(unknown)}; known: {', '.join(PROBES)}")
    return found
