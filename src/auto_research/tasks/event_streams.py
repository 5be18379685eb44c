"""Event streams on which a query is kept in a cache: when to write it anew, and how good what is served stays.

Policies are compared at equal numbers of calls: the drift trigger, every k-th event, and random events.

Letters: U streams, T events, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auto_research.data.sequences import Interactions
from auto_research.layers.drift import (
    DRIFT_THRESHOLD,
    cached_source,
    distribution,
    drift_calls,
    periodic_calls,
    random_calls,
    window_counts,
)
from auto_research.tasks.base import Evaluation, Mean
from auto_research.tasks.intent_queries import Case, IntentData, decade, token_f1

LABEL_WINDOW = 10
RANDOM_DRAWS = 20
REMOVED = {"entropy": (0.0, 0.3, 0.3), "Jaccard": (0.4, 0.0, 0.3), "Jensen-Shannon": (0.4, 0.3, 0.0)}
"""Weights of the drift score with one term taken out."""


@dataclass(frozen=True)
class EventStreams:
    """U event streams side by side, real events first.

    `items` (U, T) item indices, -1 after the end; `labels` (U, T, L) 0/1: all genres and the decade of each film.
    """

    items: Tensor
    labels: Tensor

    @property
    def valid(self) -> Tensor:
        """(U, T) bool."""
        return self.items >= 0

    def __len__(self) -> int:
        return len(self.items)


def film_streams(interactions: Interactions, users: Iterable[int], events: int) -> EventStreams:
    """The first `events` events of each user, and their labels."""
    users = list(users)
    offsets = interactions.offsets
    items = torch.full((len(users), events), -1)
    for row, user in enumerate(users):
        stream = interactions.item[offsets[user] : offsets[user + 1]][:events]
        items[row, : len(stream)] = torch.from_numpy(stream)
    periods = sorted({decade(y) for y in interactions.items.year.tolist()} - {""})
    place = {period: i for i, period in enumerate(periods)}
    of_item = torch.zeros(interactions.num_items, len(interactions.items.genre_names) + len(periods))
    of_item[:, : len(interactions.items.genre_names)] = torch.from_numpy(interactions.items.genres).float()
    for item, year in enumerate(interactions.items.year.tolist()):
        if year > 0:
            of_item[item, len(interactions.items.genre_names) + place[decade(year)]] = 1.0
    labels = of_item[items.clamp(min=0)] * (items >= 0)[..., None]
    return EventStreams(items, labels)


@dataclass
class StreamResults:
    """Policies on the event streams of one seed: quality of the served query, and calls per event.

    `drift_mean`: what events see on average under the trigger at the paper's threshold.
    """

    quality: dict[str, Evaluation]
    calls: dict[str, float]
    drift_mean: float


class StreamJudge:
    """Quality of served queries on event streams: token F1 with the phrase of the next event.

    Every event's own query is written once (the always-run policy); what a policy serves is looked up.
    """

    def __init__(
        self, answer: Callable[[list[Case]], tuple[list[str], Tensor]], data: IntentData, streams: EventStreams
    ) -> None:
        """`answer` writes a query for each case, as `QueryTask`'s models do; a case is the history up to and
        including an event, at most `data.history` long."""
        cases, where = [], []
        for u, row in enumerate(streams.items.tolist()):
            items = [item for item in row if item >= 0]
            for t in range(len(items)):
                cases.append(Case(u, tuple(items[max(0, t + 1 - data.history) : t + 1]), -1))
                where.append((u, t))
        queries, _ = answer(cases)
        distinct, phrases = list(dict.fromkeys(queries)), data.catalogue.queries
        pairs = [(q, p) for q in distinct for p in phrases]
        self.f1 = token_f1([q for q, _ in pairs], [p for _, p in pairs]).view(len(distinct), len(phrases))
        number = {query: i for i, query in enumerate(distinct)}
        self.query = torch.zeros(streams.items.shape, dtype=torch.long)
        users, times = torch.tensor(where).T
        self.query[users, times] = torch.tensor([number[q] for q in queries])
        phrase = torch.from_numpy(data.catalogue.phrase_index)[streams.items.clamp(min=0)]
        phrase = phrase.masked_fill(~streams.valid, -1)
        self.next_phrase = torch.cat([phrase[:, 1:], torch.full_like(phrase[:, :1], -1)], dim=1)
        self.valid = streams.valid

    def served(self, ran: Tensor) -> Tensor:
        """F1 (U, T) of what the cache serves at each event; NaN where no phrase follows."""
        query = self.query.gather(1, cached_source(ran).clamp(min=0))
        value = self.f1[query, self.next_phrase.clamp(min=0)]
        return value.masked_fill((self.next_phrase < 0) | ~self.valid, torch.nan)

    def evaluate(self, *ran: Tensor) -> Evaluation:
        """Mean F1 of each user, averaged over the given runs of a policy."""
        per_user = torch.stack([self.served(r).nanmean(1) for r in ran]).mean(0)
        return Evaluation(units=len(per_user), metrics={"token f1": Mean(per_user)})


def threshold_for(windows: Tensor, valid: Tensor, weights: tuple[float, float, float], calls: int) -> Tensor:
    """Runs (U, T) of the trigger whose threshold gives the number of calls closest to `calls`."""
    low, high = -1.0, 4.0
    best: Tensor | None = None
    for _ in range(24):
        middle = (low + high) / 2
        ran, _ = drift_calls(windows, valid, threshold=middle, weights=weights)
        if best is None or abs(int(ran.sum()) - calls) <= abs(int(best.sum()) - calls):
            best = ran
        low, high = (middle, high) if int(ran.sum()) > calls else (low, middle)
    assert best is not None
    return best


def run_policies(judge: StreamJudge, streams: EventStreams, seed: int, thresholds: Sequence[float]) -> StreamResults:
    """Always-run, drift at several thresholds, and at each threshold's call rate every-k and random.

    At the paper's threshold, which must be among them, also the trigger without each term of its score and under a
    resource gate that is closed at a fifth of the events.
    """
    valid = streams.valid
    windows = distribution(window_counts(streams.labels, LABEL_WINDOW))
    generator = torch.Generator().manual_seed(seed)
    runs: dict[str, list[Tensor]] = {"always": [valid]}
    for threshold in thresholds:
        ran, _ = drift_calls(windows, valid, threshold=threshold)
        calls = int(ran.sum())
        runs[f"drift {threshold:g}"] = [ran]
        runs[f"every-k at {threshold:g}"] = [periodic_calls(valid, calls)]
        runs[f"random at {threshold:g}"] = [random_calls(valid, calls, generator) for _ in range(RANDOM_DRAWS)]
    _, drift = drift_calls(windows, valid)
    calls = int(runs[f"drift {DRIFT_THRESHOLD:g}"][0].sum())
    for term, weights in REMOVED.items():
        runs[f"drift without {term}"] = [threshold_for(windows, valid, weights, calls)]
    gate = torch.rand(valid.shape, generator=generator) > 0.2
    runs[f"drift {DRIFT_THRESHOLD:g}, gate closed at 20 % of events"] = [drift_calls(windows, valid, allowed=gate)[0]]
    return StreamResults(
        quality={name: judge.evaluate(*ran) for name, ran in runs.items()},
        calls={name: float(ran[0].sum() / valid.sum()) for name, ran in runs.items()},
        drift_mean=float(drift[valid].mean()),
    )


def policy_table(results: Sequence[StreamResults]) -> list[str]:
    """The trigger's curve in words, one line a policy, means over seeds."""

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    always = mean(r.quality["always"]["token f1"] for r in results)
    lines = [f"streams: always-run token F1 {always:.4f}; mean drift {mean(r.drift_mean for r in results):.3f}"]
    for name in results[0].quality:
        if name != "always":
            value = mean(r.quality[name]["token f1"] for r in results)
            rate = mean(r.calls[name] for r in results)
            loss = always - value
            lines.append(f"streams, {name}: {rate:.3f} calls per event, F1 {value:.4f}, staleness loss {loss:.4f}")
    return lines
