"""Where candidates come from and what each step gave: a graph over a `RunRecord`, as JSON and as Graphviz text.

Nodes are candidates. The edge from the first parent carries the candidate's origin and genome difference; an edge from
a further parent of a crossover carries the axes that it gave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from auto_research.evolve import promotion
from auto_research.evolve.records import Candidate, Paired, Part, RunRecord, Trial, TrialState
from auto_research.runtime.errors import UserError, nearest


class Node(Part):
    """A candidate of the graph."""

    id: str
    generation: int
    origin: str
    state: TrialState
    operators: list[str]
    mean: float | None
    duplicate_of: str
    champion: bool


class Edge(Part):
    """From a parent to a child.

    Attributes:
        kind: the child's origin, or `gives` from a further parent of a crossover.
        difference: axis -> [value in this parent, value in the child] of the axes that this edge is about.
        gain: of the child over this parent; only on the edge from the first parent.
    """

    parent: str
    child: str
    kind: str
    difference: dict[str, list[Any]]
    gain: Paired | None = None


class Use(Part):
    """One candidate that an operator was added to, and what it gave there.

    Attributes:
        alone: the operator is all that changed; otherwise its effect is mixed with other changes.
    """

    candidate: str
    parent: str
    alone: bool
    gain: float | None
    se: float | None


class Attribution(Part):
    """What an operator gave over the parents of all candidates that added it.

    Attributes:
        mean: over the uses that were measured; None without any.
        se: of that mean, from the standard errors of the uses as if they were independent (candidates that share a
            parent share its noise); None when a use has none.
    """

    operator: str
    paper: str
    uses: list[Use]
    measured: int
    mean: float | None
    se: float | None


class Lineage(Part):
    """The graph of a run with its answers; gains are in the direction of improvement.

    Attributes:
        ancestors: edges from the baseline to the champion, each with the gain of that step.
        confirmed: the champion against the baseline on fresh seeds, beside the search's numbers.
    """

    metric: str
    champion: str
    nodes: list[Node]
    edges: list[Edge]
    ancestors: list[Edge]
    confirmed: Paired | None
    attribution: list[Attribution]


def lineage(record: RunRecord) -> Lineage:
    """The whole lineage of a run; `runtime.records.to_json` makes its JSON."""
    return Lineage(
        metric=record.metric,
        champion=record.champion,
        nodes=[_node(trial, record.champion) for trial in record.trials],
        edges=edges(record),
        ancestors=ancestors(record) if record.trials else [],
        confirmed=record.confirmed,
        attribution=attribution(record),
    )


def _node(trial: Trial, champion: str) -> Node:
    made = trial.candidate
    return Node(
        id=made.id,
        generation=made.generation,
        origin=made.origin,
        state=trial.state,
        operators=made.operators,
        mean=trial.mean,
        duplicate_of=made.duplicate_of,
        champion=made.id == champion,
    )


def _find(record: RunRecord, id: str) -> Trial:
    for trial in record.trials:
        if trial.candidate.id == id:
            return trial
    known = [trial.candidate.id for trial in record.trials]
    raise UserError(f"the run has no candidate '{id}'.{nearest(id, known)} Known: {', '.join(known)}.")


def gain(record: RunRecord, trial: Trial) -> Paired | None:
    """A trial's gain over its first parent: as recorded, or from the cells of both; None where that cannot be."""
    if not trial.candidate.parents:
        return None
    first = trial.candidate.parents[0]
    if trial.gain is not None and trial.gain.parent == first:
        return trial.gain
    parent = next((other for other in record.trials if other.candidate.id == first), None)
    if parent is None:
        return None
    return promotion.paired(
        trial,
        parent,
        direction=record.direction,
        metric=record.metric,
        z=record.config.z,
        noise=record.noise,
        n_min=record.config.n_min,
    )


def edges(record: RunRecord) -> list[Edge]:
    """All edges between candidates of the run, in the order of the children."""
    genomes = {trial.candidate.id: trial.candidate.genome for trial in record.trials}
    found = []
    for trial in record.trials:
        made = trial.candidate
        for place, parent in enumerate(made.parents):
            if parent not in genomes:
                continue
            if place == 0:
                found.append(_first_edge(record, trial))
                continue
            given = [axis for axis, giver in made.axis_from.items() if giver == parent]
            difference = {axis: [genomes[parent].get(axis), made.genome.get(axis)] for axis in given}
            found.append(Edge(parent=parent, child=made.id, kind="gives", difference=difference))
    return found


def _first_edge(record: RunRecord, trial: Trial) -> Edge:
    made = trial.candidate
    return Edge(
        parent=made.parents[0],
        child=made.id,
        kind=made.origin,
        difference=made.difference,
        gain=gain(record, trial),
    )


def ancestors(record: RunRecord, id: str | None = None) -> list[Edge]:
    """The steps from the baseline to a candidate, the champion by default, along first parents.

    Raises `UserError` for an unknown candidate.
    """
    trial = _find(record, record.champion if id is None else id)
    by_id = {other.candidate.id: other for other in record.trials}
    steps: list[Edge] = []
    passed: set[str] = set()
    while trial.candidate.parents and trial.candidate.id not in passed:
        passed.add(trial.candidate.id)  # a damaged record may go round in a circle
        steps.append(_first_edge(record, trial))
        parent = by_id.get(trial.candidate.parents[0])
        if parent is None:
            break
        trial = parent
    return steps[::-1]


def children(record: RunRecord, id: str) -> list[Candidate]:
    """Candidates that have `id` among their parents."""
    _find(record, id)
    return [trial.candidate for trial in record.trials if id in trial.candidate.parents]


def siblings(record: RunRecord, id: str) -> list[Candidate]:
    """Other candidates of the same generation with the same first parent."""
    made = _find(record, id).candidate
    return [
        other.candidate
        for other in record.trials
        if other.candidate.id != id
        and other.candidate.generation == made.generation
        and other.candidate.parents[:1] == made.parents[:1] != []
    ]


def attribution(record: RunRecord) -> list[Attribution]:
    """Every operator that some candidate added, with its effect against those candidates' parents, the best first.

    Duplicates and infeasible candidates never ran and are no uses.
    """
    uses: dict[str, list[Use]] = {}
    papers: dict[str, str] = {}
    for trial in record.trials:
        made = trial.candidate
        if trial.state in ("duplicate", "infeasible") or not made.parents:
            continue
        measured = gain(record, trial)
        for place, operator in enumerate(made.operators):
            if made.papers:  # one for each, or one that they share
                papers.setdefault(operator, made.papers[min(place, len(made.papers) - 1)])
            uses.setdefault(operator, []).append(
                Use(
                    candidate=made.id,
                    parent=made.parents[0],
                    alone=made.origin == "paper-operator",
                    gain=None if measured is None else measured.gain,
                    se=None if measured is None else measured.se,
                )
            )
    table = [_attributed(operator, papers.get(operator, ""), found) for operator, found in uses.items()]
    return sorted(table, key=lambda row: (row.mean is None, -(row.mean or 0.0)))


def _attributed(operator: str, paper: str, uses: Sequence[Use]) -> Attribution:
    gains = [use.gain for use in uses if use.gain is not None]
    errors = [use.se for use in uses if use.gain is not None and use.se is not None]
    count = len(gains)
    return Attribution(
        operator=operator,
        paper=paper,
        uses=list(uses),
        measured=count,
        mean=sum(gains) / count if count else None,
        se=math.sqrt(sum(error**2 for error in errors)) / count if count and len(errors) == count else None,
    )


# ---------------------------------------------------------------------------------------------------- Graphviz

LONGEST_LINE = 60


def graphviz(record: RunRecord) -> str:
    """The graph in the DOT language; texts of a record can hold anything and stay texts."""
    found = lineage(record)
    names = {node.id: f"n{index}" for index, node in enumerate(found.nodes)}
    path = {(step.parent, step.child) for step in found.ancestors}
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [shape=box, fontname="sans-serif"];']
    for node in found.nodes:
        score = "" if node.mean is None else f"{found.metric} {node.mean:.4g}"
        text = [node.id, ", ".join(node.operators) or node.origin, score or node.state.replace("_", " ")]
        style = ["penwidth=2"] if node.champion else []
        if node.state != "completed":
            style.append("style=dashed")
        lines.append(f"  {names[node.id]} [{', '.join([f'label={_quoted(text)}', *style])}];")
    for edge in found.edges:
        text = [f"{axis}: {' -> '.join(map(str, pair))}" for axis, pair in edge.difference.items()]
        if edge.gain is not None:
            error = "" if edge.gain.se is None else f" (SE {edge.gain.se:.2g})"
            text.append(f"{edge.gain.gain:+.4g}{error}")
        style = ["style=dotted"] if edge.kind == "gives" else []
        if (edge.parent, edge.child) in path and edge.kind != "gives":
            style.append("penwidth=2")
        lines.append(
            f"  {names[edge.parent]} -> {names[edge.child]} [{', '.join([f'label={_quoted(text)}', *style])}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(lines: Sequence[str]) -> str:
    """A DOT string of several lines: quotes and backslashes escaped, control characters replaced, long lines cut."""
    shown = []
    for line in lines:
        line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", line)
        line = line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"
        shown.append(line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;"))
    return '"' + "\\n".join(shown) + '"'
