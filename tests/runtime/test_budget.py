"""Overrides: documented ones only, positive integers only, the neighbours' left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.runtime.budget import BUDGETS, Overrides, variable_name
from auto_research.runtime.errors import UserError

DOCUMENTED = {"steps": "steps of the generator", "beam-width": "beams in decoding"}


def test_budgets_grow() -> None:
    assert BUDGETS == ("smoke", "standard", "full")


def test_names_of_variables() -> None:
    assert variable_name("sort-gen", "beam-width") == "AUTO_RESEARCH_SORT_GEN_BEAM_WIDTH"


def test_only_what_was_asked_for_is_used() -> None:
    environ = {"AUTO_RESEARCH_SORT_GEN_STEPS": "3", "AUTO_RESEARCH_SORT_GEN_BEAM_WIDTH": "007", "PATH": "/bin"}
    overrides = Overrides("sort-gen", DOCUMENTED, environ)
    assert overrides.used() == {}
    assert overrides.get("steps") == 3
    assert overrides.used() == {"AUTO_RESEARCH_SORT_GEN_STEPS": 3}
    assert overrides.get("beam_width") == overrides.get("Beam-Width") == 7
    assert overrides.get("undocumented") is None
    assert set(overrides.used().values()) == {3, 7}


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTO_RESEARCH_SORT_GEN_STEPS", "5")
    assert Overrides("sort-gen", DOCUMENTED).get("steps") == 5


@pytest.mark.parametrize(
    "value", ["0", "-1", "+1", "1.5", "1e3", "1_000", " 1", "", "ten", "٣", "0x10", "9" * 19, "9" * 5000]
)
def test_a_value_that_is_no_positive_integer(value: str) -> None:
    with pytest.raises(UserError) as error:
        Overrides("sort-gen", DOCUMENTED, {"AUTO_RESEARCH_SORT_GEN_STEPS": value})
    assert repr(value)[:38] in str(error.value)
    assert "AUTO_RESEARCH_SORT_GEN_BEAM_WIDTH (beams in decoding)" in str(error.value)


def test_an_undocumented_override_lists_the_documented() -> None:
    with pytest.raises(UserError) as error:
        Overrides("sort-gen", DOCUMENTED, {"AUTO_RESEARCH_SORT_GEN_STEP": "3"})
    text = str(error.value)
    assert "Did you mean 'AUTO_RESEARCH_SORT_GEN_STEPS'?" in text
    assert "steps of the generator" in text
    assert "beams in decoding" in text


def test_an_adapter_without_overrides() -> None:
    with pytest.raises(UserError, match="documents no overrides"):
        Overrides("learn", {}, {"AUTO_RESEARCH_LEARN_STEPS": "3"})


def test_a_longer_key_keeps_its_own_variables() -> None:
    environ = {"AUTO_RESEARCH_ONEREC_V2_STEPS": "3"}
    keys = ["onerec", "onerec-v2", "tiger"]
    with pytest.raises(UserError):
        Overrides("onerec", {"steps": "s"}, environ)
    assert Overrides("onerec", {"steps": "s"}, environ, other_keys=keys).get("steps") is None
    assert Overrides("onerec-v2", {"steps": "s"}, environ, other_keys=keys).get("steps") == 3
    with pytest.raises(UserError):
        Overrides("onerec", {"steps": "s"}, {"AUTO_RESEARCH_ONEREC_V3": "1"}, other_keys=keys)


@given(st.integers(min_value=1, max_value=10**12), st.sampled_from(sorted(DOCUMENTED)))
def test_every_positive_integer_is_taken(value: int, name: str) -> None:
    assert Overrides("k", DOCUMENTED, {variable_name("k", name): str(value)}).get(name) == value
