"""A synthetic text whose entropy is known: a Markov chain of order 2 over a few letters and the line end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

LETTERS = "abc\n"


def chain(seed: int = 0) -> np.ndarray:
    """P(c | a, b) (4, 4, 4)."""
    return np.random.default_rng(seed).dirichlet(np.full(len(LETTERS), 0.25), size=(len(LETTERS), len(LETTERS)))


def entropy(p: np.ndarray, order: int = 2) -> float:
    """Bits a letter: of the chain itself, or of its best description by one letter (order 1) or none (order 0)."""
    n = len(LETTERS)
    state = np.full((n, n), 1 / n**2)
    for _ in range(300):
        state = np.einsum("ab,abc->bc", state, p)
    joint = state[:, :, None] * p  # (a, b, c)
    if order == 1:
        joint = joint.sum(0, keepdims=True)
    if order == 0:
        joint = joint.sum((0, 1), keepdims=True)
    given = joint / joint.sum(-1, keepdims=True)
    return float(-(joint * np.log2(given)).sum())


def write(p: np.ndarray, length: int, seed: int) -> str:
    """`length` letters of the chain."""
    rng = np.random.default_rng(seed)
    cumulative, draws = p.cumsum(-1), rng.random(length)
    a, b, out = 0, 1, []
    for u in draws:
        a, b = b, min(int(np.searchsorted(cumulative[a, b], u)), len(LETTERS) - 1)
        out.append(LETTERS[b])
    return "".join(out)


def lay(folder: Path, train_and_validation: int = 60_000, test: int = 4_000) -> Path:
    """A data folder with WikiText-2's valid.txt and test.txt, and a narrative text, all of chains."""
    p = chain()
    (folder / "wikitext-2").mkdir(parents=True)
    (folder / "tiny-shakespeare").mkdir()
    (folder / "wikitext-2" / "valid.txt").write_text(write(p, train_and_validation, 1))
    (folder / "wikitext-2" / "test.txt").write_text(write(p, test, 2))
    (folder / "tiny-shakespeare" / "input.txt").write_text(write(chain(9), 5_000, 3))
    return folder


BITS = entropy(chain())
assert 0 < BITS < entropy(chain(), 1) < entropy(chain(), 0) < math.log2(len(LETTERS))
