"""Okapi BM25 over short texts, as one sparse product: for next-item baselines and for retrieval by a written query."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return re.findall(r"\w+", text.lower())


class BM25Index(nn.Module):
    """Scores I documents for a query.

    score(document) = sum over query words w of idf(w) tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length)), with
    idf(w) = ln(1 + (N - df + 0.5) / (df + 0.5)); a word counts as often as the query repeats it.

    Row 0 of the scores is padding, document i is row i + 1, as items are in models. Buffers: postings `item`, `word`,
    `weight` (E,), and `title` (I + 1, L), the words of each document, 0 = none.
    """

    item: Tensor
    word: Tensor
    weight: Tensor
    title: Tensor

    def __init__(self, documents: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        super().__init__()
        split = [words(document) for document in documents]
        self.vocabulary = {word: i + 1 for i, word in enumerate(dict.fromkeys(w for d in split for w in d))}
        coded = [Counter(self.vocabulary[w] for w in document) for document in split]
        item = np.array([i + 1 for i, document in enumerate(coded) for _ in document], dtype=np.int64)
        word = np.array([w for document in coded for w in document], dtype=np.int64)
        frequency = np.array([n for document in coded for n in document.values()], dtype=np.float64)
        length = np.array([0] + [len(document) for document in split], dtype=np.float64)
        document_frequency = np.bincount(word, minlength=len(self.vocabulary) + 1)
        idf = np.log1p((len(documents) - document_frequency + 0.5) / (document_frequency + 0.5))
        relative = length / max(1e-12, length[1:].mean()) if len(documents) else length
        weight = idf[word] * frequency * (k1 + 1) / (frequency + k1 * (1 - b + b * relative[item]))
        title = np.zeros((len(documents) + 1, max([1, *map(len, split)])), dtype=np.int64)
        for i, document in enumerate(split):
            title[i + 1, : len(document)] = [self.vocabulary[w] for w in document]
        self.words = len(self.vocabulary) + 1
        self.register_buffer("item", torch.from_numpy(item))
        self.register_buffer("word", torch.from_numpy(word))
        self.register_buffer("weight", torch.from_numpy(weight).float())
        self.register_buffer("title", torch.from_numpy(title))

    def counts(self, queries: Sequence[str]) -> Tensor:
        """How often each query has each known word, (B, words) float; unknown words are dropped."""
        known = [[self.vocabulary[w] for w in words(query) if w in self.vocabulary] for query in queries]
        row = [b for b, query in enumerate(known) for _ in query]
        column = [w for query in known for w in query]
        out = torch.zeros(len(queries), self.words, device=self.weight.device)
        index = torch.tensor([row, column], dtype=torch.long, device=out.device)
        return out.index_put_((index[0], index[1]), torch.ones(len(row), device=out.device), accumulate=True)

    def counts_of_items(self, items: Tensor) -> Tensor:
        """The words of the documents `items` (B, n), 0 = none, taken together as one query: (B, words)."""
        asked = self.title[items].flatten(1)
        query = torch.zeros(len(asked), self.words, device=asked.device)
        return query.scatter_add_(1, asked, torch.ones_like(asked, dtype=query.dtype))

    def forward(self, query: Tensor) -> Tensor:
        """Scores (B, I + 1) of word counts (B, words)."""
        matched = query.T[self.word] * self.weight[:, None]  # (postings, B)
        total = torch.zeros(len(self.title), len(query), device=query.device)
        return total.index_add_(0, self.item, matched).T
