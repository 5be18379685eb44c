"""Next query from behaviour as a task: written queries, judged by themselves and by what retrieval finds with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from auto_research.checkpoints.pooling import encode_texts
from auto_research.checkpoints.resolve import Resolved, load_text_encoder
from auto_research.tasks.base import Batch, Evaluation, Mean, Split, UnitMetric
from auto_research.tasks.bm25 import BM25Index
from auto_research.tasks.intent_queries import Case, IntentData, token_f1
from auto_research.tasks.metrics import rank_of_target


class PhraseRule(nn.Module, ABC):
    """A baseline that answers with a known phrase and needs no prompt (0 tokens)."""

    def __init__(self, data: IntentData) -> None:
        super().__init__()
        self.data = data

    @abstractmethod
    def queries(self, cases: Sequence[Case]) -> list[str]:
        """B phrases."""

    def answer(self, cases: Sequence[Case]) -> tuple[list[str], Tensor]:
        """B queries, and no tokens (B,)."""
        return self.queries(cases), torch.zeros(len(cases))


class LastPhrase(PhraseRule):
    """The type of the latest item."""

    def queries(self, cases: Sequence[Case]) -> list[str]:
        return [self.data.catalogue.type_of(case.history[-1]) for case in cases]


class FrequentPhrase(PhraseRule):
    """The most frequent type of the history, the latest among equals."""

    def queries(self, cases: Sequence[Case]) -> list[str]:
        shown = ([self.data.catalogue.type_of(item) for item in reversed(case.history)] for case in cases)
        return [Counter(types).most_common(1)[0][0] for types in shown]


class PhraseTransitions(PhraseRule):
    """The phrase that most often followed the latest known one among training users; the most popular after none."""

    def __init__(self, data: IntentData) -> None:
        super().__init__(data)
        counts = data.transitions()
        popular = counts.sum(0)
        # Popularity only orders phrases that followed equally often.
        self.best = (counts + popular / (1 + popular.sum())).argmax(1).tolist()
        self.popular = int(popular.argmax())

    def queries(self, cases: Sequence[Case]) -> list[str]:
        catalogue = self.data.catalogue
        out = []
        for case in cases:
            known = [int(catalogue.phrase_index[i]) for i in case.history if catalogue.phrase_index[i] >= 0]
            out.append(catalogue.queries[self.best[known[-1]] if known else self.popular])
        return out


class TextVectors:
    """Unit vectors of texts from a sentence encoder, loaded once; each text is encoded once."""

    def __init__(self, encoder: Resolved, device: torch.device) -> None:
        self.encoder, self.device = encoder, device
        self._loaded: tuple[Any, Any] | None = None
        self._known: dict[str, Tensor] = {}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU."""
        new = [t for t in dict.fromkeys(texts) if t not in self._known]
        if new:
            self._loaded = self._loaded or load_text_encoder(self.encoder, self.device)
            vectors = encode_texts(self.encoder, new, self.device, max_length=32, cache=False, loaded=self._loaded)
            self._known.update(zip(new, vectors, strict=True))
        return torch.stack([self._known[t] for t in texts])


class QueryTask:
    """Next query from behaviour, judged by the query itself and by what BM25 over item titles finds with it.

    A model answers cases: `answer(cases) -> (B queries, tokens of their prompts (B,))`. Metrics of each held-out user:
    `recall@20` of the next item (history items are no candidates; an item that shares no word with the query is not
    found), `exact match`, `token f1` and `cosine` with the next item's phrase (left out where it has none), and
    `prompt tokens`.
    """

    name = "next query from behaviour"
    primary = "recall@20"
    lower_is_better = frozenset({"prompt tokens"})

    def __init__(
        self, data: IntentData, vectors: TextVectors, training: Callable[[int, int, torch.device], Iterator[Batch]]
    ) -> None:
        self.data, self.vectors, self.training = data, vectors, training
        self.index = BM25Index(data.catalogue.documents)

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """The training batches that the task was given."""
        return self.training(seed, batch_size, device)

    def found(self, queries: Sequence[str], cases: Sequence[Case], k: int = 20) -> Tensor:
        """1 where the next item is among the first k that its query retrieves (B,)."""
        target = torch.tensor([case.target for case in cases]) + 1
        history = padded_history(cases)
        hits = []
        for rows in torch.arange(len(cases)).split(128):  # bounds memory to 128 x postings
            scores = self.index(self.index.counts([queries[i] for i in rows.tolist()]))
            scores[:, 0] = -torch.inf
            rank = rank_of_target(scores, target[rows], history[rows])
            matched = scores.gather(1, target[rows, None])[:, 0] > 0
            hits.append(((rank <= k) & matched).float())
        return torch.cat(hits)

    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """See the class."""
        cases = self.data.cases(split)
        queries, tokens = model.answer(cases)
        expected = [self.data.catalogue.phrase[case.target] for case in cases]
        known = torch.tensor([bool(phrase) for phrase in expected])
        exact = torch.tensor([float(q == e) for q, e in zip(queries, expected, strict=True)])
        cosine = (self.vectors([q or " " for q in queries]) * self.vectors([e or " " for e in expected])).sum(1)
        metrics: dict[str, UnitMetric] = {
            "recall@20": Mean(self.found(queries, cases)),
            "exact match": Mean(exact.masked_fill(~known, torch.nan)),
            "token f1": Mean(token_f1(queries, expected).masked_fill(~known, torch.nan)),
            "cosine": Mean(cosine.masked_fill(~known, torch.nan)),
            "prompt tokens": Mean(tokens),
        }
        catalogue = set(self.data.catalogue.queries)
        return Evaluation(
            units=len(cases),
            metrics=metrics,
            diagnostics={"share of known queries": sum(q in catalogue for q in queries) / len(queries)},
        )


def padded_history(cases: Sequence[Case]) -> Tensor:
    """Ids (item + 1, 0 padding) of histories (B, T), padded on the right."""
    return pad_sequence([torch.tensor(case.history) + 1 for case in cases], batch_first=True)
