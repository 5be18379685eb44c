"""Selection and sharding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.audit.plan import Selection, check_overrides, select, shard
from auto_research.runtime.errors import UserError

from .conftest import PASSING, Package

KEYS = st.lists(st.text("abc-19", min_size=1, max_size=6), unique=True, max_size=80)


@given(keys=KEYS, shards=st.integers(1, 100), order=st.randoms())
def test_shards_divide_every_selection(keys: list[str], shards: int, order: object) -> None:
    parts = [shard(keys, shards, index) for index in range(shards)]
    together = [key for part in parts for key in part]
    assert sorted(together) == sorted(keys)  # nothing lost, nothing twice
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    shuffled = list(keys)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert [shard(shuffled, shards, index) for index in range(shards)] == parts


@pytest.mark.parametrize(("shards", "index"), [(0, 0), (3, 3), (3, -1), (-1, 0)])
def test_a_shard_that_does_not_exist_is_refused(shards: int, index: int) -> None:
    with pytest.raises(UserError, match="--shard"):
        shard(["a"], shards, index)


@pytest.fixture
def planted(package: Package) -> Package:
    package.add("neural", PASSING)
    package.add("demo", PASSING, fidelity="concept_demo")
    package.add("popular", "# device_for\ndef run(study): return 1\n", family="baselines")
    return package


def test_selection(planted: Package) -> None:
    adapters = planted.adapters()

    def chosen(**selection: object) -> list[str]:
        return select(adapters, Selection(**selection))  # type: ignore[arg-type]

    assert chosen() == ["neural", "popular"]
    assert chosen(concept_demos=True) == ["demo", "neural", "popular"]
    assert chosen(only_explicit=True) == ["neural"]
    assert chosen(only_explicit=True, concept_demos=True) == ["demo", "neural"]
    assert chosen(families=["baselines"]) == ["popular"]
    assert chosen(fidelities=["concept_demo"]) == ["demo"]
    assert chosen(keys=["demo", "popular"]) == ["demo", "popular"]


def test_unknown_names_and_empty_selections_are_errors(planted: Package) -> None:
    adapters = planted.adapters()
    with pytest.raises(UserError, match="Did you mean 'neural'"):
        select(adapters, Selection(keys=["nueral"]))
    with pytest.raises(UserError, match="no family is called 'rankin'"):
        select(adapters, Selection(families=["rankin"]))
    with pytest.raises(UserError, match="no fidelity is called"):
        select(adapters, Selection(fidelities=["demo"]))
    with pytest.raises(UserError, match="no adapter fits"):
        select(adapters, Selection(keys=["popular"], only_explicit=True))


def test_overrides_of_other_adapters_do_not_matter(planted: Package) -> None:
    adapters = planted.adapters()
    environ = {"AUTO_RESEARCH_DEMO_STEPS": "1"}
    check_overrides(adapters, ["neural"], environ)
    with pytest.raises(UserError, match="documents no overrides"):
        check_overrides(adapters, ["demo"], environ)
