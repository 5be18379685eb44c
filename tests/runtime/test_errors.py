"""Errors carry one sentence and survive the trip between processes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.runtime.errors import DeviceAbsent, MissingCheckpoint, MissingData, UserError, nearest


def test_the_message_is_the_sentence() -> None:
    data = MissingData("ml-1m", "ml-1m is not here: run auto-research prepare ml-1m.")
    checkpoint = MissingCheckpoint("minilm", "minilm is not here.")
    assert str(data) == "ml-1m is not here: run auto-research prepare ml-1m."
    assert (data.dataset, checkpoint.checkpoint) == ("ml-1m", "minilm")
    assert all(isinstance(error, UserError) for error in (data, checkpoint, DeviceAbsent("no")))


@pytest.mark.parametrize("error", [MissingData("a", "b"), MissingCheckpoint("c", "d"), UserError("e")])
def test_errors_survive_pickling(error: UserError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "word, hint",
    [("tigre", " Did you mean 'tiger'?"), ("TIGER", " Did you mean 'tiger'?"), ("qqq", ""), ("", "")],
)
def test_nearest(word: str, hint: str) -> None:
    assert nearest(word, ["learn", "tiger", "sort-gen"]) == hint


@given(st.lists(st.text(min_size=1), min_size=1, unique_by=str.casefold))
def test_a_known_word_is_its_own_nearest(words: list[str]) -> None:
    assert nearest(words[0], words) == f" Did you mean {words[0]!r}?"
