"""Fingerprints, provenance, directions and the effect test, on a workflow whose every description is visible here."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import ToyWorkflow

from auto_research.evolve.cells import Cell
from auto_research.evolve.genome import (
    Effect,
    code_digest,
    effects,
    ensure_runnable,
    find_evidence,
    find_operators,
    fingerprint,
    make_candidate,
    mark_duplicates,
    provenance,
)
from auto_research.evolve.records import Candidate
from auto_research.evolve.space import Axis, Constraint, Genome, Space
from auto_research.evolve.workflow import Cost, Data, Described, Evidence, Operator, Sizes, digest
from auto_research.runtime.errors import UserError

SIZES = Sizes("smoke", {"steps": 3})
DATA = Data(None, {"text": "d1", "tokenizer": "t1"}, {}, 10)


class Attention(ToyWorkflow):
    """A language model on paper: what it describes and probes follows from the key/value heads it really uses."""

    key = "attention"
    space = Space(
        (
            Axis("model.attention", values=("mha", "gqa", "sliding")),
            Axis("model.kv_heads", "int", values=(2, 1, 4, 3), condition={"model.attention": ("gqa",)}),
            Axis("model.window", "int", values=(16, 32), condition={"model.attention": ("sliding",)}),
            Axis("model.rescue", values=("off", "on"), group="structure"),
            Axis("model.width", "int", values=(64, 96)),
            Axis("model.ffn", values=("gelu", "swiglu")),
            Axis("model.hidden", "int", values=(256, 170)),
            Axis("train.lr", "log-float", low=1e-4, high=1e-1, default=1e-3, stage="train", group="joint"),
            Axis("post.method", values=("none", "sft"), stage="post", group="post-training"),
        ),
        (
            Constraint("heads", lambda g: g.get("model.kv_heads") != 3, "4 heads are no multiple of 3"),
            Constraint(
                "parity",
                lambda g: g["model.ffn"] != "swiglu" or g["model.hidden"] == 170,
                "SwiGLU takes two thirds of the hidden width",
                lambda g: {**g, "model.hidden": 170},
            ),
        ),
    )
    operators: ClassVar[tuple[Operator, ...]] = (
        Operator(
            "gqa", "Grouped queries", {"model.attention": ("gqa",)}, "2305.13245", "core_mechanism", (),
            ("grouped-query", "gqa", "группов", "分组查询"), ("toy.design",),
        ),
        Operator(
            "window", "Sliding window", {"model.attention": ("sliding",)}, "2310.06825", "simplified",
            ("rolling buffer",), ("sliding window", "gleitendes Fenster", "滑动窗口"), ("toy.exchange",),
        ),
        Operator("swiglu", "SwiGLU", {"model.ffn": ("swiglu",)}, "2002.05202", "core_mechanism", code=("toy.burn",)),
        Operator("rescue", "Rescue", {"model.rescue": ("on",)}, "1234.56789", "core_mechanism", code=("toy.ornament",)),
    )  # fmt: skip

    def _kv_heads(self, genome: Genome) -> int:
        return int(genome.get("model.kv_heads", 4))

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        return Described(
            {
                "window": genome.get("model.window"),
                "kv_heads": self._kv_heads(genome),
                "ffn": genome["model.ffn"],
                "lr": genome["train.lr"],
                "post": genome["post.method"],
                **sizes.values,
            },
            {"kv": [int(genome["model.width"]), self._kv_heads(genome)], "ffn": [int(genome["model.hidden"])]},
            {"name": "cross entropy"},
        )

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        described = self.describe(genome, sizes, data)
        configuration = {**described.configuration, "lr": None}
        return {
            "forward": digest(configuration, described.parameters),
            "loss": digest(described.configuration),
            "cost": digest(described.parameters),
        }

    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        parameters = 100 * int(genome["model.width"]) + self._kv_heads(genome)
        return Cost(parameters, 6.0 * parameters, 4 * parameters, {"kv_bytes_per_token": self._kv_heads(genome)})

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        return super(ToyWorkflow, self).match(genome, baseline, sizes, data)


WORK = Attention()
BASE = WORK.space.baseline()


def print_of(genome: Genome, workflow: ToyWorkflow = WORK, data: Data = DATA, seeds: Sequence[int] = (0, 1)) -> str:
    return fingerprint(workflow, {**BASE, **genome}, SIZES, data, seeds)


def candidate(
    genome: Genome, parents: Sequence[Candidate] = (), id: str = "g1-1", sampler: str = "planned", **changed: Any
) -> Candidate:
    arguments = {"workflow": WORK, "sizes": SIZES, "data": DATA, "seeds": [0, 1], **changed}
    cost = WORK.cost(BASE, SIZES, DATA) if parents else None
    return make_candidate(
        id=id, generation=1, genome=genome, parents=parents, sampler=sampler, baseline_cost=cost, **arguments
    )


BASELINE = candidate(BASE, id="baseline")
GQA = candidate({"model.attention": "gqa"}, [BASELINE], "g1-gqa")
SFT = candidate({"post.method": "sft", "train.lr": 0.01}, [BASELINE], "g1-sft")


# ------------------------------------------------------------------------------------------------ fingerprints


class Described_(Attention):
    """Describes what it was made with."""

    def __init__(self, **described: Any) -> None:
        self.described: dict[str, Any] = {"configuration": {}, "parameters": {}, "loss": {}, **described}

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        return Described(**self.described)


def test_every_part_of_a_candidate_counts() -> None:
    variants = [
        print_of({}, Described_()),
        print_of({}, Described_(configuration={"steps": 3})),
        print_of({}, Described_(configuration={"steps": 4})),
        print_of({}, Described_(parameters={"w": [2, 3]})),
        print_of({}, Described_(parameters={"w": [3, 2]})),
        print_of({}, Described_(parameters={"v": [2, 3]})),
        print_of({}, Described_(loss={"name": "ipo"})),
        print_of({}, Described_(loss={"name": "ipo", "tau": 0.1})),
        print_of({}, Described_(), replace(DATA, digests={**DATA.digests, "text": "d2"})),
        print_of({}, Described_(), replace(DATA, digests={**DATA.digests, "tokenizer": "t2"})),
        print_of({}, Described_(), replace(DATA, digests={**DATA.digests, "checkpoint": "c1"})),
        print_of({}, Described_(), seeds=[0]),
        print_of({}, Described_(), seeds=[0, 2]),
    ]
    assert len(set(variants)) == len(variants)


def test_order_of_axes_and_seeds_and_what_the_data_weigh_do_not_count() -> None:
    genome = dict(reversed(list(BASE.items())))
    assert list(genome) != list(BASE)
    assert fingerprint(WORK, genome, SIZES, DATA, [1, 0]) == print_of({})
    assert print_of({}, data=replace(DATA, examples=11, parts=object())) == print_of({})


def test_a_description_that_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        print_of({}, Described_(configuration={"activation": object()}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_of({}, Described_(configuration={"lr": float("nan")}))


def _package(folder: Path, body: str, name: str) -> None:
    folder.mkdir()
    (folder / f"{name}.py").write_text(
        f"def step(x):\n    {body}\n\n\nclass Block:\n    def run(self):\n        pass\n"
    )


def test_the_operator_s_source_counts_and_its_place_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks, digests = [], []
    for folder, body in (("one", "return x"), ("two", "return x"), ("three", "return 2 * x")):
        _package(tmp_path / folder, body, "planted_operator")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / folder))
            patch.delitem(sys.modules, "planted_operator", raising=False)
            operator = replace(WORK.operators[0], code=("planted_operator.step", "planted_operator:Block.run"))
            patch.setattr(Attention, "operators", (operator, *WORK.operators[1:]))
            digests.append(code_digest(operator))
            marks.append((print_of({}), print_of({"model.attention": "gqa"})))
        sys.modules.pop("planted_operator", None)
    assert digests[0] == digests[1] != digests[2]
    assert [baseline for baseline, _ in marks] == [print_of({})] * 3, "an operator that is not installed counts"
    assert marks[0][1] == marks[1][1] != marks[2][1]


def test_code_without_a_source_counts_by_its_version_and_code_that_is_not_there_is_an_error() -> None:
    import numpy

    operator = replace(WORK.operators[0], code=("numpy.dot",))
    before = code_digest(operator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy, "__version__", "0.0")
        assert code_digest(operator) != before
    for name in ("toy.no_such_thing", "no_such_module.step", "toy.ToyWorkflow.key"):
        with pytest.raises(UserError, match=f"operator gqa names '{name}' as its code"):
            code_digest(replace(operator, code=(name,)))


def test_another_process_finds_the_same_fingerprint() -> None:
    code = (
        "from toy import ToyWorkflow; from auto_research.evolve.genome import fingerprint\n"
        "w = ToyWorkflow(); s = w.sizes('smoke'); d = w.load(s, None)\n"
        "print(fingerprint(w, {'model.bias': 'on'}, s, d, [0, 1]))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    toy = ToyWorkflow()
    sizes = toy.sizes("smoke")
    assert found.stdout.strip() == fingerprint(toy, {"model.bias": "on"}, sizes, toy.load(sizes, None), [0, 1])


def test_an_operator_that_changes_nothing_leaves_the_fingerprint() -> None:
    assert print_of({"model.rescue": "on"}) == print_of({})
    assert print_of({"model.rescue": "on", "model.attention": "gqa"}) == print_of({"model.attention": "gqa"})
    assert print_of({"model.attention": "gqa", "model.kv_heads": 4}) == print_of({}), "as many groups as heads are MHA"
    assert print_of({"model.attention": "gqa"}) != print_of({})


@given(st.permutations(["a", "b", "c"]), st.lists(st.sampled_from([0, 1, 2]), min_size=3, max_size=3))
def test_duplicates_point_to_the_first_of_a_kind(names: list[str], kinds: list[int]) -> None:
    made = [
        BASELINE.model_copy(update={"id": name, "fingerprint": str(kind), "duplicate_of": ""})
        for name, kind in zip(names, kinds, strict=True)
    ]
    known = [BASELINE.model_copy(update={"id": "old", "fingerprint": "0"})]
    mark_duplicates(made, known)
    first = {"0": "old"}
    for one in made:
        original = first.setdefault(one.fingerprint, one.id)
        assert one.duplicate_of == ("" if original == one.id else original)
        assert (original in one.reason) == bool(one.duplicate_of)


def test_infeasible_candidates_are_no_duplicates_of_each_other_and_known_ones_not_of_themselves() -> None:
    refused = [candidate({"model.attention": "gqa", "model.kv_heads": 3}, [BASELINE], name) for name in ("x", "y")]
    assert not any(one.duplicate_of for one in mark_duplicates([*refused, BASELINE], [BASELINE]))


def test_a_duplicate_of_a_known_duplicate_points_to_the_original() -> None:
    boast = BASELINE.model_copy(update={"id": "boast", "fingerprint": "f", "duplicate_of": "baseline"})
    again = boast.model_copy(update={"id": "again", "duplicate_of": ""})
    assert mark_duplicates([again], [BASELINE, boast])[0].duplicate_of == "baseline"


def test_a_planted_no_op_ends_as_duplicate() -> None:
    toy = ToyWorkflow()
    sizes = toy.sizes("smoke")
    data = toy.load(sizes, None)
    cost = toy.cost(toy.space.baseline(), sizes, data)
    made: list[Candidate] = []
    for name, genome in (("baseline", {}), ("g1-1", {"model.bias": "on"}), ("g1-2", {"model.decor": "on"})):
        made.append(make_candidate(toy, name, 1, genome, made[:1], "planned", sizes, data, [0], cost))
    mark_duplicates(made)
    assert [one.duplicate_of for one in made] == ["", "", "baseline"]
    assert made[2].fingerprint == made[0].fingerprint
    assert made[2].operators == ["decor"], "it is credited, and shown as what it is"


def test_a_combination_credits_no_operator_that_changes_nothing_in_it() -> None:
    both = candidate({"model.rescue": "on", "model.attention": "gqa"}, [BASELINE])
    assert both.operators == ["gqa"]
    assert both.papers == ["2305.13245"]
    assert set(both.code) == {"gqa"}
    assert {"model.rescue", "model.attention"} <= set(both.difference)
    assert both.axis_from["model.rescue"].startswith("sampler:")
    two = candidate({"model.ffn": "swiglu", "model.hidden": 170, "model.attention": "gqa"}, [BASELINE])
    assert two.operators == ["gqa", "swiglu"], "both do something"


def test_a_no_op_that_describes_itself_as_a_change_ends_as_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Attention.describe

    def boasts(self: Attention, genome: Genome, sizes: Sizes, data: Data) -> Described:
        described = honest(self, genome, sizes, data)
        return replace(described, configuration={**described.configuration, "rescue": genome["model.rescue"]})

    monkeypatch.setattr(Attention, "effect_probe", lambda self, *given: {"forward": digest(honest(self, *given).loss)})
    monkeypatch.setattr(Attention, "describe", boasts)
    work = Attention()
    child = candidate({"model.rescue": "on"}, [BASELINE], workflow=work)
    assert child.fingerprint != BASELINE.fingerprint
    assert (child.duplicate_of, child.reason) == ("baseline", "rescue changes nothing of what baseline computes")
    monkeypatch.setattr(Attention, "operators", ())  # a mere axis is no better
    mutated = candidate({"model.rescue": "on"}, [BASELINE], workflow=Attention())
    assert mutated.origin == "hyperparameter-mutation"
    assert mutated.reason == "model.rescue changes nothing of what baseline computes"
    twice = candidate({"model.rescue": "on"}, [child.model_copy(update={"genome": BASE})], workflow=work)
    assert twice.duplicate_of == "baseline", "never a duplicate of a duplicate"


# -------------------------------------------------------------------------------------------------- provenance


@pytest.mark.parametrize(
    ("genome", "origin", "operators", "difference"),
    [
        ({}, "replicate", [], {}),
        ({"train.lr": 0.01}, "hyperparameter-mutation", [], {"train.lr": [0.001, 0.01]}),
        (
            {"model.attention": "gqa"},
            "paper-operator",
            ["gqa"],
            {"model.attention": ["mha", "gqa"], "model.kv_heads": [None, 2]},
        ),
        (
            {"model.attention": "gqa", "model.kv_heads": 1},
            "paper-operator",
            ["gqa"],
            {"model.attention": ["mha", "gqa"], "model.kv_heads": [None, 1]},
        ),
        (
            {"model.ffn": "swiglu", "model.attention": "gqa", "model.hidden": 170},
            "combination",
            ["gqa", "swiglu"],
            {
                "model.attention": ["mha", "gqa"],
                "model.kv_heads": [None, 2],
                "model.ffn": ["gelu", "swiglu"],
                "model.hidden": [256, 170],
            },
        ),
        (
            {"model.attention": "gqa", "train.lr": 0.01},
            "combination",
            ["gqa"],
            {"model.attention": ["mha", "gqa"], "model.kv_heads": [None, 2], "train.lr": [0.001, 0.01]},
        ),
        (
            {"post.method": "sft", "train.lr": 0.01},
            "combination",
            [],
            {"train.lr": [0.001, 0.01], "post.method": ["none", "sft"]},
        ),
    ],
)
def test_provenance_follows_from_the_difference(
    genome: Genome, origin: str, operators: list[str], difference: dict[str, Any]
) -> None:
    made = candidate(genome, [BASELINE], sampler="optuna:tpe")
    assert (made.origin, made.operators, made.difference) == (origin, operators, difference)
    assert made.parents == ["baseline"]
    assert made.sampler == "optuna:tpe"
    assert set(made.axis_from) == (set(difference) if origin == "combination" else set())
    assert set(made.code) == set(operators)


def test_a_paper_operator_records_its_paper() -> None:
    made = candidate({"model.attention": "sliding"}, [GQA])
    assert (made.origin, made.papers, made.fidelity) == ("paper-operator", ["2310.06825"], "simplified")
    assert made.omitted == ["rolling buffer"]
    assert made.code == {"window": code_digest(WORK.operators[1])}


def test_several_operators_have_the_weaker_fidelity_and_say_which_axis_is_whose() -> None:
    made = candidate({"model.attention": "sliding", "model.ffn": "swiglu", "train.lr": 0.02}, [BASELINE])
    assert made.fidelity == "simplified"
    assert made.papers == ["2310.06825", "2002.05202"]
    assert made.axis_from == {
        "model.attention": "operator:window",
        "model.window": "sampler:planned",
        "model.ffn": "operator:swiglu",
        "model.hidden": "sampler:planned",
        "train.lr": "sampler:planned",
    }


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 4)])
def test_another_value_of_an_installed_operator_is_a_mutation(old: int, new: int) -> None:
    parent = candidate({"model.attention": "gqa", "model.kv_heads": old}, [BASELINE])
    made = candidate({"model.attention": "gqa", "model.kv_heads": new}, [parent])
    assert (made.origin, made.operators) == ("hyperparameter-mutation", [])
    assert made.difference == {"model.kv_heads": [old, new]}


def test_taking_an_operator_out_credits_no_paper() -> None:
    made = candidate({}, [GQA])
    assert (made.origin, made.operators, made.papers) == ("hyperparameter-mutation", [], [])


def test_a_crossover_says_which_axis_came_from_whom() -> None:
    made = candidate({"model.attention": "gqa", "post.method": "sft", "model.width": 96}, [GQA, SFT])
    assert made.origin == "combination"
    assert made.parents == ["g1-gqa", "g1-sft"]
    assert made.axis_from == {
        "post.method": "g1-sft",
        "model.width": "sampler:planned",
        "model.attention": "g1-gqa",
        "model.kv_heads": "g1-gqa",
        "train.lr": "g1-gqa",
    }


def test_a_second_parent_that_gives_nothing_makes_no_crossover() -> None:
    made = candidate({"model.attention": "gqa", "model.width": 96}, [GQA, SFT])
    assert (made.origin, made.axis_from) == ("hyperparameter-mutation", {})


def test_a_crossover_that_is_one_of_its_parents_is_a_replicate_of_it() -> None:
    made = candidate(SFT.genome, [GQA, SFT])
    assert (made.origin, made.parents, made.difference) == ("replicate", ["g1-sft"], {})
    assert mark_duplicates([made], [BASELINE, GQA, SFT])[0].duplicate_of == "g1-sft"


def test_a_replicate_with_fresh_seeds_is_a_trial_of_its_own() -> None:
    fresh = candidate(GQA.genome, [GQA], seeds=[10, 11])
    assert fresh.origin == "replicate"
    assert not mark_duplicates([fresh], [BASELINE, GQA])[0].duplicate_of


def test_names_decide_nothing() -> None:
    parent = BASELINE.model_copy(update={"id": "gqa", "operators": ["gqa"], "papers": ["2305.13245"]})
    fields = provenance(WORK, {**BASE, "train.lr": 0.01}, [parent], "gqa")
    assert (fields["origin"], fields["operators"]) == ("hyperparameter-mutation", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "operators", (replace(WORK.operators[0], id="train.lr", title="lr", paper="x"),))
        assert provenance(WORK, {**BASE, "train.lr": 0.01}, [BASELINE], "planned")["operators"] == []


def test_without_parents() -> None:
    assert BASELINE.origin == "baseline"
    assert (BASELINE.parents, BASELINE.difference, BASELINE.match) == ([], {}, "")
    assert candidate({}, sampler="random").origin == "random-search"
    assert candidate({}, sampler="fixed").origin == "fixed"


# -------------------------------------------------------------------------------------------------- candidates


def test_a_repair_is_recorded_and_is_no_second_change() -> None:
    made = candidate({"model.ffn": "swiglu"}, [BASELINE])
    assert made.repairs == ["parity"]
    assert made.genome["model.hidden"] == 170
    assert (made.origin, made.operators) == ("paper-operator", ["swiglu"])
    assert made.difference["model.hidden"] == [256, 170]


def test_an_infeasible_candidate_keeps_its_reason_and_never_runs() -> None:
    made = candidate({"model.attention": "gqa", "model.kv_heads": 3}, [BASELINE])
    assert (made.reason, made.fingerprint) == ("heads: 4 heads are no multiple of 3", "")
    assert made.genome["model.kv_heads"] == 3
    with pytest.raises(UserError, match="infeasible: heads"):
        ensure_runnable(made)


def test_unknown_axes_and_values_are_errors() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'model.kv_heads'"):
        candidate({"model.kvheads": 2}, [BASELINE])
    with pytest.raises(UserError, match=r"Did you mean 'sliding'"):
        candidate({"model.attention": "slide"}, [BASELINE])


def test_cost_and_match_are_recorded() -> None:
    made = candidate({"model.width": 96}, [BASELINE])
    assert (made.parameters, made.flops, made.memory_bytes) == (9604, 6.0 * 9604, 4 * 9604)
    assert made.cost == {"kv_bytes_per_token": 4}
    assert made.match == "+50.0% parameters"
    assert GQA.match == ""


@pytest.mark.parametrize("origin", ["evidence-only", "quarantined"])
def test_some_origins_can_never_become_a_cell(origin: str) -> None:
    never = BASELINE.model_copy(update={"origin": origin, "reason": "no operator"})
    with pytest.raises(UserError, match=f"baseline is {origin} and never runs: no operator"):
        Cell(never, 0, "search")
    assert Cell(BASELINE, 0, "search").candidate is BASELINE


def test_papers_without_an_operator_are_evidence() -> None:
    class TwoPapers(ToyWorkflow):
        evidence = (*ToyWorkflow.evidence, Evidence("Splines", "0001.00005", "no basis", "a basis", ("spline",)))

    for direction, first in (("", "0001.00004"), ("a spline, please", "0001.00005")):
        found = find_evidence(TwoPapers(), direction)
        assert len(found) == 2
        assert found[0].citation == first


# -------------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize(
    ("direction", "expected"),
    [
        ("", ["gqa", "window", "swiglu", "rescue"]),
        ("make it better", ["gqa", "window", "swiglu", "rescue"]),
        ("GQA, please", ["gqa"]),
        ("try Grouped Query heads", ["gqa"]),
        ("ein gleitendes\nFenster", ["window"]),
        ("用滑动窗口代替分组查询", ["gqa", "window"]),
        ("a sliding-window: 滑动窗口, or gqa", ["window", "gqa"]),
        ("as in 2310.06825", ["window"]),
        ("SWIGLU", ["swiglu"]),
        ("gqax or windows that slide", ["gqa", "window", "swiglu", "rescue"]),
    ],
)
def test_a_direction_orders_and_filters_by_keywords(direction: str, expected: list[str]) -> None:
    operators, explanation = find_operators(WORK, direction)
    assert [operator.id for operator in operators] == expected
    assert len(expected) == 4 or all(f"{name} by '" in explanation for name in expected)
    left_out = {"gqa", "window", "swiglu", "rescue"} - set(expected)
    assert all(name in explanation.partition("left out: ")[2] for name in left_out)


# ------------------------------------------------------------------------------------------------- effect test


def found(workflow: ToyWorkflow, *axes: str) -> dict[tuple[str, Any], Effect]:
    return {(effect.axis, effect.value): effect for effect in effects(workflow, SIZES, DATA, axes)}


def test_the_effect_test_finds_every_dead_value_of_the_toy() -> None:
    toy = ToyWorkflow()
    sizes = toy.sizes("smoke")
    measured = effects(toy, sizes, toy.load(sizes, None))
    assert {(e.axis, e.value) for e in measured} == {(a.name, v) for a in toy.space.axes for v in a.probes()}
    assert {e.axis for e in measured if not e.holds} == {"model.decor"}
    assert next(e for e in measured if e.axis == "train.momentum").parent["train.optimiser"] == "momentum"


def test_effects_and_their_reasons() -> None:
    measured = found(WORK)
    held = {key for key, effect in measured.items() if effect.holds}
    assert set(measured) - held == {("model.rescue", "on"), ("model.kv_heads", 3)}
    assert "the effective fingerprint stays" in measured["model.rescue", "on"].text
    assert "no feasible genome has it" in measured["model.kv_heads", 3].text
    assert measured["train.lr", 1e-4].moved == ("loss",)
    assert measured["train.lr", 1e-4].text == "train.lr=0.0001 moves loss"
    assert measured["model.kv_heads", 1].parent["model.attention"] == "gqa"
    assert measured["model.kv_heads", 1].parent["model.kv_heads"] == 2
    assert measured["model.window", 32].parent["model.attention"] == "sliding"
    changed = measured["model.width", 96]
    assert WORK.space.difference(changed.parent, changed.child) == {"model.width": (64, 96)}
    assert changed.parent == BASE


def test_an_axis_is_compared_where_both_its_values_are_feasible() -> None:
    effect = found(WORK, "model.hidden")["model.hidden", 170]
    assert WORK.space.difference(effect.parent, effect.child) == {"model.hidden": (256, 170)}
    effect = found(WORK, "model.ffn")["model.ffn", "swiglu"]
    assert WORK.space.difference(effect.parent, effect.child) == {"model.ffn": ("gelu", "swiglu")}, "without a repair"


def test_conditions_of_conditions_are_switched_on_first() -> None:
    class Nested(Attention):
        space = Space(
            (
                *Attention.space.axes,
                Axis("sink.kind", values=("off", "fixed", "learned"), condition={"model.attention": ("sliding",)}),
                Axis("sink.size", "int", values=(1, 2), condition={"sink.kind": ("fixed", "learned")}),
                Axis("sink.rate", "int", values=(1, 2), condition={"sink.kind": ("learned",), "sink.size": (2,)}),
            )
        )

        def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
            described = super().describe(genome, sizes, data)
            sinks = {name: value for name, value in genome.items() if name.startswith("sink.")}
            return replace(described, configuration={**described.configuration, **sinks})

    measured = found(Nested(), "sink.kind", "sink.size", "sink.rate")
    assert all(effect.holds for effect in measured.values())
    assert measured["sink.size", 2].parent["sink.kind"] == "fixed"
    parent = measured["sink.rate", 2].parent
    assert (parent["model.attention"], parent["sink.kind"], parent["sink.size"]) == ("sliding", "learned", 2)


def test_a_value_that_is_always_repaired_away_is_dead() -> None:
    class Repaired(Attention):
        space = Space(
            Attention.space.axes,
            (
                Constraint(
                    "heads",
                    lambda g: g.get("model.kv_heads") != 3,
                    "4 heads are no multiple of 3",
                    lambda g: {**g, "model.kv_heads": 1},
                ),
            ),
        )

    measured = found(Repaired(), "model.kv_heads")
    assert {value for (_, value), effect in measured.items() if not effect.holds} == {3}
    assert measured["model.kv_heads", 3].child == {}


class RecordedOnly(Attention):
    """Its rescue axis is written down and changes nothing that is computed; its windows are one and the same."""

    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        described = super().describe(genome, sizes, data)
        window = "wide" if "model.window" in genome else None
        configuration = {**described.configuration, "rescue": genome["model.rescue"], "window": window}
        return replace(described, configuration=configuration)

    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        described = super().describe(genome, sizes, data)
        return {"loss": digest(described.configuration), "cost": digest(described.parameters)}


def test_an_axis_that_is_only_recorded_and_one_that_is_only_probed_are_dead() -> None:
    measured = found(RecordedOnly())
    rescue, window = measured["model.rescue", "on"], measured["model.window", 32]
    assert (rescue.fingerprint_changed, rescue.moved, rescue.holds) == (True, (), False)
    assert "moves none of forward, loss" in rescue.text
    assert (window.fingerprint_changed, window.moved, window.holds) == (False, ("loss",), False)


def test_two_values_that_do_the_same_are_one_too_many() -> None:
    class Clipped(Attention):
        """Takes 1 for 2, its start; 4 does something else."""

        def _kv_heads(self, genome: Genome) -> int:
            return {4: 1}.get(int(genome.get("model.kv_heads", 4)), 2) if "model.kv_heads" in genome else 4

    measured = found(Clipped(), "model.kv_heads")
    assert not measured["model.kv_heads", 1].holds
    assert measured["model.kv_heads", 4].holds

    class Aliased(Attention):
        def _kv_heads(self, genome: Genome) -> int:
            return {4: 1}.get(super()._kv_heads(genome), super()._kv_heads(genome))

    measured = found(Aliased(), "model.kv_heads")
    assert measured["model.kv_heads", 1].holds
    assert measured["model.kv_heads", 4].twin == 1
    assert not measured["model.kv_heads", 4].holds
    assert "it does what model.kv_heads=1 does" in measured["model.kv_heads", 4].text


def test_two_values_that_differ_on_paper_only_are_one_too_many() -> None:
    class Paper(Attention):
        def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
            return {"cost": digest(genome.get("model.kv_heads", 4) == 2)}

    measured = found(Paper(), "model.kv_heads")
    assert measured["model.kv_heads", 1].holds
    assert measured["model.kv_heads", 4].fingerprint_changed
    assert measured["model.kv_heads", 4].twin == 1


def test_a_probe_that_is_not_repeatable_or_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()
    monkeypatch.setattr(Attention, "effect_probe", lambda *given: {"loss": str(next(counter))})
    with pytest.raises(ValueError, match="not repeatable"):
        effects(Attention(), SIZES, DATA)
    monkeypatch.setattr(Attention, "effect_probe", lambda *given: {"name": "a"})
    with pytest.raises(ValueError, match=r"gives \['name'\]; known: forward"):
        effects(Attention(), SIZES, DATA)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({}, "owns no axis value"),
        ({"model.attn": ("gqa",)}, "no axis 'model.attn'"),
        ({"model.ffn": ("glu",)}, "'glu'"),
    ],
)
def test_an_operator_owns_axis_values_that_exist(sets: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "operators", (replace(WORK.operators[0], sets=sets),))
    with pytest.raises((ValueError, UserError), match=message):
        effects(Attention(), SIZES, DATA)
