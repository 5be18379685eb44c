"""Search spaces: rules that hold for every space and genome, and errors that name the nearest known word."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.evolve.space import Axis, Constraint, Genome, Infeasible, Space, Value
from auto_research.runtime.errors import UserError

ATTENTION = Space(
    (
        Axis("model.attention", values=("mha", "gqa", "sliding")),
        Axis("model.heads", "int", values=(4, 6)),
        Axis("model.kv_heads", "int", values=(2, 1, 3), condition={"model.attention": ("gqa",)}),
        Axis("model.window", "int", values=(16, 32), condition={"model.attention": ("sliding",)}),
        Axis("model.sinks", "int", values=(0, 4), condition={"model.window": (32,)}),
        Axis("model.tied", values=(True, False)),
        Axis("train.lr", "log-float", low=1e-4, high=1e-1, default=1e-3),
    ),
    (
        Constraint(
            "heads",
            lambda g: g["model.heads"] % g.get("model.kv_heads", 1) == 0,  # type: ignore[operator]
            "the number of heads is no multiple of the key/value heads",
        ),
    ),
)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Up to six axes of all kinds, with conditions on axes before them."""
    axes: list[Axis] = []
    for index in range(draw(st.integers(1, 6))):
        finite = [axis for axis in axes if axis.values]
        conditioned = draw(st.lists(st.sampled_from(finite), max_size=2, unique_by=lambda a: a.name)) if finite else []
        condition = {
            axis.name: tuple(draw(st.lists(st.sampled_from(axis.values), min_size=1, max_size=2, unique=True)))
            for axis in conditioned
        }
        name, kind = f"part.axis{index}", draw(st.sampled_from(("categorical", "int", "float", "log-float")))
        if kind == "categorical":
            values: tuple[Value, ...] = draw(st.sampled_from((("a", "b", "c"), (True, False), ("on", "off"))))
            axes.append(Axis(name, "categorical", values, condition=condition))
        elif kind == "int":
            axes.append(Axis(name, "int", draw(st.sampled_from(((1, 2, 4), (8, 0)))), condition=condition))
        else:
            low = draw(st.floats(1e-6, 1.0))
            high = low * draw(st.floats(1.5, 100.0))
            scale: Literal["float", "log-float"] = "float" if kind == "float" else "log-float"
            axes.append(Axis(name, scale, low=low, high=high, default=low * 1.2, condition=condition))
    return Space(tuple(axes))


@st.composite
def spaces_with_values(draw: st.DrawFn, genomes: int = 1) -> tuple[Any, ...]:
    """A space and incomplete assignments of it."""
    space = draw(spaces())

    def value_of(axis: Axis) -> st.SearchStrategy[Value]:
        return st.sampled_from(axis.values) if axis.values else st.floats(axis.low, axis.high)

    assignment = st.fixed_dictionaries({}, optional={axis.name: value_of(axis) for axis in space.axes})
    return (space, *(draw(assignment) for _ in range(genomes)))


@settings(max_examples=50)
@given(spaces_with_values())
def test_a_resolved_genome_holds_exactly_the_axes_whose_conditions_hold(made: tuple[Space, Genome]) -> None:
    space, values = made
    genome = space.resolve(values)
    for axis in space.axes:
        active = all(other in genome and genome[other] in allowed for other, allowed in axis.condition.items())
        assert (axis.name in genome) == active
        if active:
            assert genome[axis.name] == values.get(axis.name, axis.start)
    assert space.resolve(genome) == genome


@settings(max_examples=50)
@given(spaces_with_values())
def test_values_left_out_are_named(made: tuple[Space, Genome]) -> None:
    space, values = made
    assert set(space.unused(values)) == set(values) - set(space.resolve(values))


@given(spaces())
def test_the_baseline_has_the_first_values_and_no_probe_repeats_them(space: Space) -> None:
    baseline = space.baseline()
    assert all(baseline[axis.name] == axis.start for axis in space.axes if axis.name in baseline)
    for axis in space.axes:
        assert axis.start not in axis.probes()
        assert {axis.check(value) for value in axis.probes()} == set(axis.probes())


@settings(max_examples=50)
@given(spaces_with_values(genomes=2))
def test_a_difference_leads_from_the_parent_to_the_child_and_back(made: tuple[Space, Genome, Genome]) -> None:
    space, parent, child = made[0], made[0].resolve(made[1]), made[0].resolve(made[2])
    difference = space.difference(parent, child)
    walked = {**parent, **{name: new for name, (_, new) in difference.items()}}
    assert {name: value for name, value in walked.items() if value is not None} == child
    assert all(old != new for old, new in difference.values())
    assert space.difference(child, parent) == {name: (new, old) for name, (old, new) in difference.items()}
    assert (difference == {}) == (parent == child)


@settings(max_examples=50)
@given(spaces_with_values())
def test_a_value_survives_the_command_line(made: tuple[Space, Genome]) -> None:
    space, values = made
    for name, value in values.items():
        parsed = space[name].parse(str(value))
        assert parsed == value
        assert type(parsed) is type(value)


@given(spaces(), st.text(min_size=1))
def test_an_unknown_axis_is_an_error(space: Space, name: str) -> None:
    if name not in {axis.name for axis in space.axes}:
        with pytest.raises(UserError, match="there is no axis"):
            space.resolve({name: 1})


@given(spaces(), st.one_of(st.text(), st.integers(), st.booleans(), st.floats()))
def test_a_value_is_of_the_axis_or_an_error_and_never_another(space: Space, value: Value) -> None:
    axis = space.axes[-1]
    if axis.values:
        known = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in axis.values)
    else:
        known = isinstance(value, int | float) and not isinstance(value, bool) and axis.low <= value <= axis.high
    if known:
        assert axis.check(value) == value
    else:
        with pytest.raises(UserError, match=re.escape(f"axis {axis.name} ")):
            axis.check(value)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no axis 'model.kv_head'. Did you mean 'model.kv_heads'\?"):
        ATTENTION.resolve({"model.kv_head": 1})
    with pytest.raises(UserError, match=r"model.attention has no value 'slidin'. Did you mean 'sliding'\?.*mha, gqa"):
        ATTENTION.resolve({"model.attention": "slidin"})
    with pytest.raises(UserError, match=r"model.heads has no value '5'"):
        ATTENTION["model.heads"].parse("5")


@pytest.mark.parametrize("value", [1, 0, "True"])
def test_a_number_is_no_truth_value(value: Value) -> None:
    with pytest.raises(UserError, match="has no value"):
        ATTENTION["model.tied"].check(value)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -math.inf, 0.2, 0, "0.01"])
def test_a_range_takes_numbers_inside_it(value: Value) -> None:
    with pytest.raises(UserError, match=r"takes numbers from 0.0001 to 0.1"):
        ATTENTION["train.lr"].check(value)


@pytest.mark.parametrize("text", ["fast", "", "0x1", "nan", "1e9"])
def test_a_range_on_the_command_line(text: str) -> None:
    with pytest.raises(UserError, match=r"train\.lr takes"):
        ATTENTION["train.lr"].parse(text)


def test_conditions_cascade() -> None:
    genome = ATTENTION.resolve({"model.attention": "sliding", "model.window": 32})
    assert genome["model.sinks"] == 0
    assert "model.kv_heads" not in genome
    assert {"model.window", "model.sinks"}.isdisjoint(ATTENTION.resolve({"model.window": 32, "model.sinks": 4}))
    assert ATTENTION.unused({"model.window": 32, "model.sinks": 4}) == ["model.window", "model.sinks"]


@given(st.sampled_from((4, 6)), st.sampled_from((1, 2, 3)))
def test_a_genome_is_feasible_or_rejected_with_the_reason(heads: int, groups: int) -> None:
    values: Genome = {"model.attention": "gqa", "model.heads": heads, "model.kv_heads": groups}
    if heads % groups == 0:
        assert ATTENTION.feasible(values) == (ATTENTION.resolve(values), [])
    else:
        with pytest.raises(Infeasible, match="heads: the number of heads is no multiple"):
            ATTENTION.feasible(values)


def _widths(*constraints: Constraint) -> Space:
    return Space((Axis("w", "int", values=(2, 3, 4)), Axis("d", "int", values=(1, 2, 3))), constraints)


EVEN = Constraint("even", lambda g: g["w"] != 3, "w is odd", lambda g: {**g, "w": 4})
SMALL = Constraint("small", lambda g: int(g["w"]) * int(g["d"]) <= 8, "too large", lambda g: {**g, "d": 1})


@given(st.sampled_from((2, 3, 4)), st.sampled_from((1, 2, 3)))
def test_repairs_are_declared_applied_and_named(w: int, d: int) -> None:
    genome, repairs = _widths(EVEN, SMALL).feasible({"w": w, "d": d})
    assert genome["w"] != 3
    assert int(genome["w"]) * int(genome["d"]) <= 8
    width = 4 if w == 3 else w
    assert repairs == [*(["even"] if w == 3 else []), *(["small"] if width * d > 8 else [])]
    assert (repairs == []) == (genome == {"w": w, "d": d})


def test_a_repair_that_does_not_help_or_breaks_another_rule_rejects() -> None:
    useless = Constraint("useless", lambda g: g["w"] == 2, "w is not 2", lambda g: g)
    with pytest.raises(Infeasible, match="useless: w is not 2"):
        _widths(useless).feasible({"w": 4})
    breaks = Constraint("deep", lambda g: g["d"] == 3, "too flat", lambda g: {**g, "d": 3})
    with pytest.raises(Infeasible, match="small: too large, after repair by even, deep"):
        _widths(EVEN, SMALL, breaks).feasible({"w": 3})


def test_a_repair_cannot_invent_values() -> None:
    invents = Constraint("invents", lambda g: g["w"] == 7, "w is not 7", lambda g: {**g, "w": 7})
    with pytest.raises(UserError, match="axis w has no value '7'"):
        _widths(invents).feasible({})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((Axis("a", values=("x",)), Axis("a", values=("y",))), "two axes are called a"),
        ((Axis("a"),), "neither values nor a default"),
        ((Axis("a", values=("x",), default="y"),), "declared wrongly"),
        ((Axis("a", "float", low=0, high=1, default=2.0),), "declared wrongly"),
        ((Axis("a", values=("x",), condition={"b": ("y",)}), Axis("b", values=("y",))), "no axis before it"),
        ((Axis("b", values=("y",)), Axis("a", values=("x",), condition={"b": ("yes",)})), "has no value 'yes'"),
    ],
)
def test_a_space_that_would_hold_a_dead_axis_cannot_be_made(axes: tuple[Axis, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space(axes)


def test_groups() -> None:
    space = Space((Axis("a", values=(1,)), Axis("b", values=(1,), group="data"), Axis("c", values=(1,), group="joint")))
    assert [axis.name for axis in space.group("data", "joint")] == ["b", "c"]
