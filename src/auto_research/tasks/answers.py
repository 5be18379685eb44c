"""What a free text says: the number it gives as its answer, and whether the equations that it writes down hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
# A sign counts where it cannot be an operator: not right behind a word or a closing bracket. Commas stand only between
# digits.
_NUMBER = re.compile(r"((?<![\w)\]])[-+\u2212])?([0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)")


def parse_answer(text: str) -> str | None:
    """The number that a free text gives as its answer, in plain form ("12", "-3", "2.5"); None without a number.

    It is the last signed number after "Answer:" where that occurs, else the last number of the text. Commas inside
    digits, leading zeros, trailing zeros of a fraction and the sign of zero are dropped: "1,250.0" is "1250".
    """
    marker = _ANSWER.search(text)
    found = _NUMBER.findall(text, marker.end() if marker else 0)
    if not found:
        return None
    sign, digits = found[-1]
    return plain(digits, negative=sign in ("-", "\u2212"))


def plain(digits: str, *, negative: bool = False) -> str:
    """Digits with commas and a fraction in the form of `parse_answer`."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    number = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".rstrip(".")
    return f"-{number}" if negative and number != "0" else number


# ------------------------------------------------------------------------------------------------------- equations

# How an operator may be written, longest first; "is" and "equals" stand for the equals sign.
_WRITTEN = {
    r"\times": "*", r"\cdot": "*", r"\div": "/", "divided by": "/", "times": "*", "plus": "+", "minus": "-",
    "equals": "=", "is": "=", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "x": "*", "$": "",
}  # fmt: skip
_SPELLING = re.compile("|".join(rf"\b{re.escape(w)}\b" if w.isalpha() or " " in w else re.escape(w) for w in _WRITTEN))
_TERM = r"-?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
_SIDE = rf"{_TERM}(?:\s*[-+*/]\s*{_TERM})*"
_EQUATION = re.compile(rf"{_SIDE}(?:\s*=\s*{_SIDE})+")
# Next to one of these, what was found is a piece of something longer that is not read here.
_BEFORE = re.compile(r"[\w.,)\]]$|[)\]*/+=^-]\s*$")
_AFTER = re.compile(r"[\w%]|[.,][0-9]|\s*[(\[*/^=]|\s*[-+]\s*[\w(]")


def check_arithmetic(text: str) -> bool | None:
    """Whether the arithmetic of a text is right, told from the text alone.

    False when an equation in it is wrong. True when it has equations, all hold, and its answer is the result of one of
    them. None when it has none, or answers something else. An equation is read where numbers are joined by + - * / (or
    their words) and an equals sign ("3 + 4 = 7", "2 x 3 = 6 - 1 = 5", "7 plus 5 is 12"); brackets are not read. A
    result with a fraction may be rounded to the digits it shows.
    """
    results: set[str] = set()
    for sides in _equations(text):
        values = [_value(side) for side in sides]
        if any(not _same(left, right, side) for left, right, side in zip(values, values[1:], sides[1:])):
            return False
        if re.fullmatch(_TERM, sides[-1]):
            results.add(plain(sides[-1].lstrip("-"), negative=sides[-1].startswith("-")))
    return True if parse_answer(text) in results else None


def _equations(text: str) -> Iterator[list[str]]:
    """The sides of every equation that calculates something."""
    text = _SPELLING.sub(lambda found: _WRITTEN[found[0]], text)
    for found in _EQUATION.finditer(text):
        sides = [side.strip() for side in found[0].split("=")]
        whole = not _BEFORE.search(text[: found.start()]) and not _AFTER.match(text, found.end())
        if whole and any(not re.fullmatch(_TERM, side) for side in sides):
            yield sides


def _value(side: str) -> Fraction | None:
    """Products and quotients bind first; None for a division by zero."""
    terms = [Fraction(0)]
    for operator, digits in re.findall(rf"\s*((?<=[\d])\s*[-+*/]|^)\s*({_TERM})", side):
        number, factor = Fraction(digits.replace(",", "")), operator.strip() or "+"
        if factor == "*":
            terms[-1] *= number
        elif factor == "/":
            if not number:
                return None
            terms[-1] /= number
        else:
            terms.append(-number if factor == "-" else number)
    return sum(terms, Fraction(0))


def _same(left: Fraction | None, right: Fraction | None, written: str) -> bool:
    """Whether both sides are equal, or the right one is a rounded fraction."""
    if left is None or right is None:
        return False
    digits = len(written.partition(".")[2]) if re.fullmatch(_TERM, written) else 0
    return left == right or (digits > 0 and abs(left - right) <= Fraction(1, 2 * 10**digits))
