"""Lineage: steps with their gains, relatives, operators against parents, exports that hold any text."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import RECORDS, candidate, failures, improved, record
from test_promotion import METRIC, made

from auto_research.evolve.lineage import ancestors, attribution, children, edges, graphviz, lineage, siblings
from auto_research.evolve.records import RunRecord
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import to_json

BASE = {"model.bias": "off", "train.lr": 0.05}


def run() -> RunRecord:
    """baseline -> g1-1 (bias) -> g2-1 (rate) -> g3-1; g2-2 crosses g1-1 with g1-2 (exchange); g2-3 is a duplicate."""

    def one(id: str, values: list[float], **fields: object) -> object:
        return made(id, dict(zip((1, 2, 3), values)), parent_genome=BASE, **fields)

    trials = [
        one("baseline", [0.50, 0.52, 0.51]),
        one("g1-1", [0.60, 0.63, 0.60], operators=["bias"], papers=["0001"], origin="paper-operator",
            changes={"model.bias": "on"}),
        one("g1-2", [0.49, 0.50, 0.52], operators=["exchange"], papers=["0002"], origin="paper-operator",
            changes={"data.exchange": "on"}),
        one("g2-1", [0.65, 0.66, 0.66], parents=["g1-1"], changes={"train.lr": 0.1}),
        one("g2-2", [0.58, 0.60, 0.59], parents=["g1-1", "g1-2"], operators=["exchange"], papers=["0002"],
            origin="combination", changes={"data.exchange": "on"}, axis_from={"data.exchange": "g1-2"}),
        one("g2-3", [], parents=["g1-1"], operators=["bias"], duplicate_of="g1-1", reason="same"),
        one("g3-1", [0.66, 0.67, 0.66], parents=["g2-1"], changes={"train.lr": 0.11}),
    ]  # fmt: skip
    for trial in trials:
        trial.candidate.generation = 0 if trial.candidate.id == "baseline" else int(trial.candidate.id[1])  # type: ignore[attr-defined]
    return record(trials=trials, champion="g3-1", metric=METRIC, decisions=[], random_search=[])


def test_ancestors_of_the_champion_with_the_gain_of_each_step() -> None:
    steps = ancestors(run())
    assert [(s.parent, s.child) for s in steps] == [("baseline", "g1-1"), ("g1-1", "g2-1"), ("g2-1", "g3-1")]
    gains = [np.array([0.10, 0.11, 0.09]), np.array([0.05, 0.03, 0.06]), np.array([0.01, 0.01, 0.0])]
    for step, expected in zip(steps, gains):
        assert step.gain is not None
        assert step.gain.gain == pytest.approx(expected.mean())
        assert step.gain.se == pytest.approx(expected.std(ddof=1) / math.sqrt(3))
    assert [s.kind for s in steps] == ["paper-operator", "hyperparameter-mutation", "hyperparameter-mutation"]
    assert steps[0].difference == {"model.bias": ["off", "on"]}
    assert ancestors(run(), "baseline") == []
    assert [s.child for s in ancestors(run(), "g2-2")] == ["g1-1", "g2-2"]


def test_relatives() -> None:
    assert [c.id for c in children(run(), "g1-1")] == ["g2-1", "g2-2", "g2-3"]
    assert [c.id for c in children(run(), "g1-2")] == ["g2-2"]  # a further parent is a parent
    assert [c.id for c in siblings(run(), "g2-1")] == ["g2-2", "g2-3"]
    assert siblings(run(), "baseline") == []
    with pytest.raises(UserError, match="Did you mean 'g1-1'"):
        children(run(), "g1-11")


def test_operators_are_credited_against_their_parents() -> None:
    table = {row.operator: row for row in attribution(run())}
    assert list(table) == ["bias", "exchange"]  # the best first
    assert table["bias"].mean == pytest.approx(0.10)
    assert [use.candidate for use in table["bias"].uses] == ["g1-1"]  # the duplicate never ran
    exchange = table["exchange"]
    alone, crossed = np.array([-0.01, -0.02, 0.01]), np.array([-0.02, -0.03, -0.01])
    assert [(use.candidate, use.parent, use.alone) for use in exchange.uses] == [
        ("g1-2", "baseline", True),
        ("g2-2", "g1-1", False),
    ]
    assert exchange.mean == pytest.approx((alone.mean() + crossed.mean()) / 2)
    errors = [d.std(ddof=1) / math.sqrt(3) for d in (alone, crossed)]
    assert exchange.se == pytest.approx(math.hypot(*errors) / 2)
    assert (exchange.measured, exchange.paper) == (2, "0002")


def test_uses_that_failed_are_listed_and_not_averaged() -> None:
    broken = run()
    broken.trials[2] = made("g1-2", {1: "failed", 2: "killed", 3: "failed"}, operators=["exchange"], parent_genome=BASE)
    row = next(row for row in attribution(broken) if row.operator == "exchange")
    assert row.uses[0].gain is None
    assert (row.measured, row.mean) == (1, pytest.approx(-0.02))


def test_edges_of_a_crossover_say_what_each_parent_gave() -> None:
    found = {(e.parent, e.child): e for e in edges(run())}
    assert found["g1-1", "g2-2"].kind == "combination"
    assert found["g1-1", "g2-2"].gain is not None
    gift = found["g1-2", "g2-2"]
    assert (gift.kind, gift.gain) == ("gives", None)
    assert gift.difference == {"data.exchange": ["on", "on"]}


def test_recorded_gains_are_kept() -> None:
    shown = improved()
    steps = ancestors(shown)
    assert [s.gain for s in steps] == [shown.trials[2].gain, shown.trials[4].gain]


def test_failures_have_no_gain_or_say_what_is_missing() -> None:
    found = {e.child: e.gain for e in edges(failures())}
    assert found["g1-7"] is None  # all seeds failed
    assert found["g1-8"] is None  # a duplicate
    partial = found["g1-1"]
    assert partial is not None
    assert partial.provisional


def test_a_circle_in_a_damaged_record_ends() -> None:
    damaged = run()
    damaged.trials[1].candidate.parents = ["g2-1"]
    assert len(ancestors(damaged)) <= len(damaged.trials)


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_exports(name: str) -> None:
    shown = RECORDS[name]()
    found = json.loads(to_json(lineage(shown)))
    assert len(found["nodes"]) == len(shown.trials)
    check_dot(graphviz(shown), len(shown.trials))


STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
STYLE = r"(?:, (?:penwidth=2|style=dashed|style=dotted))*"


def check_dot(text: str, nodes: int) -> None:
    """Every line is one of ours, and only quoted strings hold what the record says."""
    lines = text.splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("digraph lineage {", "  rankdir=LR;", "}")
    node = re.compile(rf"  n\d+ \[label={STRING}{STYLE}\];")
    edge = re.compile(rf"  n\d+ -> n\d+ \[label={STRING}{STYLE}\];")
    kinds = ["node" if node.fullmatch(line) else "edge" if edge.fullmatch(line) else line for line in lines[3:-1]]
    assert set(kinds) <= {"node", "edge"}
    assert kinds.count("node") == nodes
    if dot := shutil.which("dot"):
        subprocess.run([dot, "-Tcanon"], input=text.encode(), check=True, capture_output=True)


@given(st.text(min_size=1, max_size=80))
def test_any_text_stays_inside_its_label(text: str) -> None:
    shown = run()
    shown.trials[1].candidate = candidate(text, 1, {text: text}, operators=[text], parent_genome=BASE)
    dot = graphviz(shown)
    for line in dot.splitlines()[3:-1]:
        assert re.fullmatch(rf"  n\d+(?: -> n\d+)? \[label={STRING}{STYLE}\];", line)


def test_the_path_to_the_champion_is_marked() -> None:
    dot = graphviz(run())
    assert dot.count("penwidth=2") == 4  # the champion, and three steps
    assert 'label="model.bias: off -> on\\n+0.1 (SE 0.0058)", penwidth=2' in dot
    assert "style=dotted" in dot
    assert dot.count("style=dashed") == 1  # the duplicate
