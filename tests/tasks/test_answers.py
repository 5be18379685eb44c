"""The answer parser's counter-examples, and what the checker of written arithmetic accepts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_research.tasks.answers import check_arithmetic, parse_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 is right, ok", "12"),  # the comma is not part of a number
        ("12, ok", "12"),
        ("12,", "12"),
        ("12.", "12"),
        ("12.0", "12"),
        ("1,250.50 dollars", "1250.5"),
        ("Answer: 12. I checked it", "12"),
        ("7 and 8 make 15. Answer: -3", "-3"),
        ("Answer: 4 + 5 = 9", "9"),
        ("The answer: 12", "12"),
        ("5 apples, 3 pears", "3"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("+7", "7"),
        ("7-5", "5"),
        ("(2)-5", "5"),
        ("x = -5", "-5"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("007", "7"),
        (".5", "0.5"),
        ("100", "100"),
        ("123456789012345678901234567890123", "123456789012345678901234567890123"),
        ("7 and 8. Answer:", None),  # cut off before its answer
        (", ,", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_parser(text: str, answer: str | None) -> None:
    assert parse_answer(text) == answer


@given(st.integers(), st.sampled_from(["{}", "{:,}", "{}.0", "{}.", "Answer: {}", "it is {}, I think", "3 + 4 = {}"]))
def test_parser_finds_any_integer(number: int, form: str) -> None:
    assert parse_answer(form.format(number)) == str(number)


@given(st.text())
def test_parser_takes_any_text(text: str) -> None:
    found = parse_answer(text)
    assert found is None or parse_answer(found) == found


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("7 + 5 = 12.", True),
        ("7 + 5 = 13.", False),
        ("The sum of 7 and 5 is 12.", None),  # nothing is calculated in figures
        ("7 plus 5 is 12", True),
        ("7 plus 5 equals 11", False),
        ("12", None),
        ("", None),
        ("7 + 5 = 12. Answer: 13", None),  # right arithmetic, and another answer
        ("7 + 5 = 12 and 12 - 2 = 9. Answer: 12", False),
        ("3 + 4 = 7 + 5 = 12", False),  # a running total is no equation
        ("2 x 3 = 12 - 6 = 6", True),
        ("2 \\times 3 = 6", True),
        ("$5 + $3 = $8", True),
        ("2 + 3 * 4 = 14", True),
        ("2 + 3 * 4 = 20", False),
        ("-3 + 5 = 2", True),
        ("3 - -5 = 8", True),
        ("3 \u2212 5 = \u22122", True),
        ("1,200 / 2 = 600", True),
        ("10 / 4 = 2.5", True),
        ("10 / 3 = 3.33", True),
        ("10 / 3 = 3.34", False),
        ("10 / 3 = 3", False),
        ("1 / 0 = 0", False),
        ("(2 + 3) * 4 + 1 = 21", None),  # brackets are not read, and no piece is taken for the whole
        ("2 * (3 + 4) = 14", None),
        ("x + 4 = 10", None),
        ("5 + 4 = 3y", None),
        ("12 = 12", None),
    ],
)
def test_checker(text: str, verdict: bool | None) -> None:
    assert check_arithmetic(text) is verdict


@given(st.integers(-99, 99), st.integers(0, 99), st.sampled_from("+-*"), st.integers(-3, 3))
def test_checker_agrees_with_python(a: int, b: int, operator: str, off: int) -> None:
    stated = eval(f"{a} {operator} {b}") + off
    assert check_arithmetic(f"{a} {operator} {b} = {stated}, so it is {stated}.") is (off == 0)


@given(st.text("0123456789+-*/=., ()is", max_size=30))
def test_checker_takes_any_text(text: str) -> None:
    assert check_arithmetic(text) in (True, False, None)
