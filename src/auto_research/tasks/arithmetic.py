"""Arithmetic exercises: enumerated expressions, a split without leaks, and a character vocabulary."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

PAD, END = 0, 1
_CHARACTERS = "0123456789+-*="
VOCABULARY = ("<pad>", "<end>", *_CHARACTERS)
"""Token of each id."""

_IDS = {character: i for i, character in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class Expression:
    """An exercise such as 12-7.

    Attributes:
        text: as it is asked, without the equals sign.
        answer: its value.
        key: equal for expressions that differ in the order of summands or factors only (3+5 and 5+3).
    """

    text: str
    answer: int
    key: str


def expression(operands: Sequence[int], operators: Sequence[str]) -> Expression:
    """The expression of operands with + - * between them; products bind first."""
    terms: list[tuple[int, list[int]]] = [(1, [operands[0]])]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            terms[-1][1].append(operand)
        else:
            terms.append((1 if operator == "+" else -1, [operand]))
    written = [("+" if sign > 0 else "-") + "*".join(map(str, sorted(factors))) for sign, factors in terms]
    text = str(operands[0]) + "".join(o + str(x) for o, x in zip(operators, operands[1:], strict=True))
    return Expression(text, sum(sign * prod(factors) for sign, factors in terms), "".join(sorted(written)))


def one_step(operators: str = "+-") -> list[Expression]:
    """a o b for a in 0..29, b in 0..19 and every operator: 600 expressions an operator."""
    return [expression((a, b), o) for o in operators for a in range(30) for b in range(20)]


def two_step(operators: str = "+-*") -> list[Expression]:
    """a o b p c for digits a, b, c and every pair of operators: 1,000 expressions a pair."""
    pairs = itertools.product(operators, repeat=2)
    return [expression(digits, pair) for pair in pairs for digits in itertools.product(range(10), repeat=3)]


def split(expressions: Iterable[Expression]) -> dict[str, list[Expression]]:
    """Parts train, validation and test of 80, 10 and 10 %, the same on every machine.

    Expressions with one key stay in one part, so that no part asks what another asks in a different order. Keys are
    taken in the order of their hashes.
    """
    groups: dict[str, list[Expression]] = {}
    for one in expressions:
        groups.setdefault(one.key, []).append(one)
    total = sum(map(len, groups.values()))
    room = {"test": total // 10, "validation": total // 10, "train": total}
    parts: dict[str, list[Expression]] = {"train": [], "validation": [], "test": []}
    for key in sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest()):
        part = next(name for name, left in room.items() if left >= len(groups[key]))
        room[part] -= len(groups[key])
        parts[part] += groups[key]
    return parts


def encode_prompts(expressions: Sequence[Expression]) -> Tensor:
    """Ids of "12-7=", padded on the left to the longest, (N, P)."""
    rows = [[_IDS[character] for character in f"{one.text}="] for one in expressions]
    width = max(map(len, rows))
    return torch.tensor([[PAD] * (width - len(row)) + row for row in rows])


def encode_responses(texts: Sequence[str]) -> Tensor:
    """Ids of answers with their end token, padded on the right to the longest, (N, R)."""
    rows = [[_IDS[character] for character in text] + [END] for text in texts]
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def decode(responses: Tensor) -> list[str | None]:
    """Texts of responses (N, R) before their end token; None for one that was cut off before it ended."""
    texts: list[str | None] = []
    for row in responses.tolist():
        ended = END in row
        texts.append("".join(VOCABULARY[i] for i in row[: row.index(END)] if i != PAD) if ended else None)
    return texts
