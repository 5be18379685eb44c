"""Exercises: values, keys, split, characters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from auto_research.tasks.arithmetic import (
    END,
    PAD,
    decode,
    encode_prompts,
    encode_responses,
    expression,
    one_step,
    split,
    two_step,
)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=5).flatmap(
        lambda x: st.tuples(st.just(x), st.lists(st.sampled_from("+-*"), min_size=len(x) - 1, max_size=len(x) - 1))
    )
)
def test_answers_are_what_python_computes(drawn: tuple[list[int], list[str]]) -> None:
    made = expression(*drawn)
    assert made.answer == eval(made.text)


def test_keys_ignore_the_order_of_summands_and_factors_alone() -> None:
    def key(operands: tuple[int, ...], operators: str) -> str:
        return expression(operands, operators).key

    assert key((3, 5), "+") == key((5, 3), "+") != key((3, 5), "*")
    assert key((3, 5), "-") != key((5, 3), "-")
    assert key((9, 2, 4), "-+") == key((4, 9, 2), "+-")
    assert key((2, 3, 4), "*+") == key((4, 3, 2), "+*") != key((2, 3, 4), "+*")


@pytest.mark.parametrize(
    ("expressions", "sizes"),
    [(one_step(), (960, 120, 120)), ([*one_step("+-*"), *two_step()], (8640, 1080, 1080))],
)
def test_split_is_complete_disjoint_and_free_of_reordered_twins(expressions, sizes: tuple[int, int, int]) -> None:
    parts = split(expressions)
    assert tuple(len(parts[name]) for name in ("train", "validation", "test")) == sizes
    texts = [{one.text for one in part} for part in parts.values()]
    assert len(set.union(*texts)) == sum(sizes) == sum(map(len, texts))
    keys = [{one.key for one in part} for part in parts.values()]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_split_does_not_depend_on_the_order_of_its_input() -> None:
    ahead, back = split(one_step()), split(reversed(one_step()))
    assert all({x.text for x in ahead[part]} == {x.text for x in back[part]} for part in ahead)


def test_characters() -> None:
    prompts = encode_prompts([expression((7, 3), "-"), expression((29, 19), "+")])
    assert (prompts == PAD).tolist() == [[True, True, False, False, False, False], [False] * 6]
    responses = encode_responses(["-12", "4"])
    assert responses[1].tolist()[1:] == [END, PAD, PAD]
    assert decode(responses) == ["-12", "4"]
    assert decode(responses[:, :1]) == [None, None]  # cut off before the end
    assert decode(torch.tensor([[END, PAD]])) == [""]
