"""Search spaces: typed axes, conditions, constraints, and genomes that are complete assignments of one space.

A genome is a plain dict, axis name -> value. Nothing is ever clipped: a value outside its axis is an error, and a
combination that a constraint refuses is repaired by a declared rule or rejected with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from auto_research.runtime.errors import UserError, nearest

Value = str | int | float | bool
Genome = dict[str, Value]
Changes = Literal["compute", "memory", "data", "loss", "model", "inference"]

CONTROL = "control"
"""Group of negative controls: only a plan or a user sets them, no sampler draws them."""


@dataclass(frozen=True)
class Axis:
    """One typed dimension.

    Attributes:
        name: namespaced, such as `model.kv_heads`.
        values: of a categorical or int axis, the baseline's first; empty for a range.
        low, high: bounds of a `float` or `log-float` axis, with `default` inside.
        condition: axis name -> values under which this axis counts; otherwise it is not part of the genome.
        stage: what consumes it: data, model, train, post or inference.
        changes: what a change of it alters at least.
        source: where the values come from (a paper, a measurement).
        group: of the schedule of later generations (structure, data, post-training, joint), or `CONTROL`.
    """

    name: str
    kind: Literal["categorical", "int", "float", "log-float"] = "categorical"
    values: tuple[Value, ...] = ()
    low: float = math.nan
    high: float = math.nan
    default: Value | None = None
    condition: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    stage: Literal["data", "model", "train", "post", "inference"] = "model"
    changes: Changes = "model"
    source: str = ""
    group: str = "structure"

    @property
    def start(self) -> Value:
        """The baseline's value."""
        return self.values[0] if self.default is None else self.default

    def check(self, value: Value) -> Value:
        """`value` in this axis's type; raises `UserError` when it is no value of the axis."""
        if self.kind in ("categorical", "int"):
            for known in self.values:
                if known == value and isinstance(known, bool) == isinstance(value, bool):
                    return known
            known_text = ", ".join(map(str, self.values))
            raise UserError(
                f"axis {self.name} has no value '{value}'.{nearest(str(value), map(str, self.values))} "
                f"Known: {known_text}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise UserError(f"axis {self.name} takes numbers from {self.low:g} to {self.high:g}, not '{value}'")
        return float(value)

    def parse(self, text: str) -> Value:
        """The value written as `text` on a command line."""
        if self.kind in ("float", "log-float"):
            try:
                return self.check(float(text))
            except ValueError:
                raise UserError(f"axis {self.name} takes a number, not '{text}'") from None
        written = {str(value): value for value in self.values}
        return written[text] if text in written else self.check(text)

    def probes(self) -> tuple[Value, ...]:
        """Values that the effect test tries: all of a finite axis, both ends of a range; not the baseline's."""
        found = self.values if self.values else (self.low, self.high)
        return tuple(value for value in found if value != self.start)


@dataclass(frozen=True)
class Constraint:
    """A predicate over a genome.

    Attributes:
        holds: True when the genome is feasible in this respect.
        reason: what is wrong otherwise, in words.
        repair: returns a genome that holds; None rejects.
    """

    name: str
    holds: Callable[[Genome], bool]
    reason: str
    repair: Callable[[Genome], Genome] | None = None


class Infeasible(UserError):
    """A genome that a constraint refuses and no rule repairs."""


@dataclass(frozen=True)
class Space:
    """All axes of one workflow, and what their combinations must satisfy."""

    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would make an axis dead without a word.

        Raises `ValueError`: two axes of one name, a start outside the axis or none, a condition on an axis or a value
        that the space does not have or that is declared later (so conditions never go round in a circle).
        """
        declared: dict[str, Axis] = {}
        for axis in self.axes:
            if axis.name in declared:
                raise ValueError(f"two axes are called {axis.name}")
            if not axis.values and axis.default is None:
                raise ValueError(f"axis {axis.name} has neither values nor a default")
            try:
                axis.check(axis.start)
                for other, allowed in axis.condition.items():
                    if other not in declared:
                        raise ValueError(f"the condition of {axis.name} names {other}, which no axis before it is")
                    for value in allowed:
                        declared[other].check(value)
            except UserError as error:
                raise ValueError(f"axis {axis.name} is declared wrongly: {error}") from error
            declared[axis.name] = axis

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = [axis.name for axis in self.axes]
        raise UserError(f"there is no axis '{name}'.{nearest(name, names)} Known: {', '.join(names)}.")

    def baseline(self) -> Genome:
        """The genome of all first values."""
        return self.resolve({axis.name: axis.start for axis in self.axes})

    def active(self, genome: Mapping[str, Value], axis: Axis) -> bool:
        """Whether the conditions of `axis` hold in `genome`."""
        return all(genome.get(other) in allowed for other, allowed in axis.condition.items())

    def resolve(self, values: Mapping[str, Value]) -> Genome:
        """A complete genome: defaults filled in, values checked, inactive axes left out.

        Raises `UserError` for an unknown axis or value.
        """
        for name in values:
            self[name]
        genome = {axis.name: axis.check(values.get(axis.name, axis.start)) for axis in self.axes}
        while dropped := [a.name for a in self.axes if a.name in genome and not self.active(genome, a)]:
            for name in dropped:
                del genome[name]
        return genome

    def feasible(self, values: Mapping[str, Value]) -> tuple[Genome, list[str]]:
        """(resolved genome, names of the repairs applied). Raises `Infeasible` with the reason."""
        genome, repairs = self.resolve(values), []
        for constraint in self.constraints:
            if constraint.holds(genome):
                continue
            if constraint.repair is not None:
                repaired = self.resolve(constraint.repair(dict(genome)))
                if constraint.holds(repaired):
                    genome = repaired
                    repairs.append(constraint.name)
                    continue
            raise Infeasible(f"{constraint.name}: {constraint.reason}")
        for constraint in self.constraints:
            if not constraint.holds(genome):
                raise Infeasible(f"{constraint.name}: {constraint.reason}, after repair by {', '.join(repairs)}")
        return genome, repairs

    def unused(self, values: Mapping[str, Value]) -> list[str]:
        """Axes named in `values` whose conditions do not hold there: `resolve` leaves them out."""
        genome = self.resolve(values)
        return [axis.name for axis in self.axes if axis.name in values and axis.name not in genome]

    def difference(
        self, parent: Mapping[str, Value], child: Mapping[str, Value]
    ) -> dict[str, tuple[Value | None, Value | None]]:
        """Axis -> (value in the parent, value in the child), None where it is inactive; only what differs."""
        names = [axis.name for axis in self.axes if axis.name in parent or axis.name in child]
        return {n: (parent.get(n), child.get(n)) for n in names if parent.get(n) != child.get(n)}

    def group(self, *names: str) -> Iterable[Axis]:
        """The axes of these groups."""
        return (axis for axis in self.axes if axis.group in names)
