"""Explicit-feedback ranking: will this user like (rate at least 4) the item they meet now?

Every rating is one example. Each user's events are split in time order 80/10/10. What a model sees of an example
was known strictly before its time: the user's earlier events (the history, the last item, the gap), and past means
and counts of the user, the item and the user's genres, which are taken from training events strictly before. So no
rating at the time of an example or after it reaches its inputs.

Everything is laid out once as flat tensors; a batch is an index into them, on the device.
Letters: E events, U users, I items, G genres, B examples of a batch, T length of the history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.data.impressions import chronological
from auto_research.data.sequences import Interactions, ItemTable
from auto_research.layers.towers import FeatureEmbedding, Field
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, Mean, PooledAUC, Ratio, Split, UnitMetric
from auto_research.tasks.event_log import made_up_people

AGE_GROUPS = (18, 25, 35, 45, 50, 56)
"""Lower ends of MovieLens 1M's age groups, used for every data set with ages."""
FIRST_YEAR, LAST_YEAR = 1900, 2030
GAPS = 33
"""Number of codes of the time since the user's last event: 0 none, else 1 + floor(log2(seconds)), at most 32."""
RATINGS = 11
"""Number of rating codes: twice the rating in stars, 0 for padding."""
PRIOR = 5.0
"""Pseudo-examples by which past means are drawn to the mean above them."""
STATISTICS = ("user mean", "user count", "item mean", "item count", "user x genre mean", "user x genre count")
SIDES = {"user statistics": 2, "item statistics": 2, "cross statistics": 2}
"""The columns of `STATISTICS` by what they are about; the first group needs no candidate."""


class PastTotals:
    """Counts and sums over the events of a group strictly before a moment, by prefix sums.

    Args:
        group: (N,) int64, which group each event belongs to.
        moment: (N,) int64 in 0..moments-1, order of the events in time; equal moments are not before each other.
        values: (N, V) what is summed.
    """

    def __init__(self, group: Tensor, moment: Tensor, values: Tensor, moments: int) -> None:
        self.moments = moments
        key = group * moments + moment
        self.key, order = key.sort(stable=True)
        sums = values.double()[order].cumsum(0)
        self.sums = torch.cat([sums.new_zeros(1, sums.shape[1]), sums])

    def before(self, group: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (Q,), (Q,) -> count (Q,) float64 and sums (Q, V) float64."""
        begin = torch.searchsorted(self.key, group * self.moments)
        end = torch.searchsorted(self.key, group * self.moments + moment)
        return (end - begin).double(), self.sums[end] - self.sums[begin]


@dataclass(frozen=True)
class _Past:
    """Totals of training events by user (liked, and each genre liked and seen), by item, and altogether."""

    user: PastTotals
    item: PastTotals
    everything: PastTotals

    def statistics(self, user: Tensor, item: Tensor, moment: Tensor, genres: Tensor) -> Tensor:
        """The columns of `STATISTICS` for queries (Q,) with candidate genres (Q, G), scaled to about ±1: (Q, 6)."""
        genre_count = genres.shape[1]
        seen, total = self.everything.before(torch.zeros_like(user), moment)
        # Before the first training event nothing is known: one half.
        overall = (total[:, 0] + 0.5 * PRIOR) / (seen + PRIOR)
        user_seen, user_total = self.user.before(user, moment)
        user_mean = (user_total[:, 0] + PRIOR * overall) / (user_seen + PRIOR)
        item_seen, item_total = self.item.before(item, moment)
        item_mean = (item_total[:, 0] + PRIOR * overall) / (item_seen + PRIOR)
        genre_liked = (user_total[:, 1 : 1 + genre_count] * genres).sum(1)
        genre_seen = (user_total[:, 1 + genre_count :] * genres).sum(1)
        genre_mean = (genre_liked + PRIOR * user_mean) / (genre_seen + PRIOR)
        means = torch.stack([user_mean, item_mean, genre_mean], 1) * 2 - 1
        counts = torch.stack([user_seen, item_seen, genre_seen], 1).log1p() / 3 - 1
        return torch.stack([means, counts], 2).flatten(1).float()


@runtime_checkable
class Reports(Protocol):
    """A model that keeps figures about itself while it scores (expert load, attention entropy, ...)."""

    def start_report(self) -> None:
        """Forgets earlier figures."""
        ...

    def report(self) -> dict[str, float]:
        """Figures of what was scored since."""
        ...


@runtime_checkable
class RequestScorer(Protocol):
    """A model that can read a request once for all of its candidates."""

    shares_requests: bool
    """Whether it can as configured (an ablation that lets the history see the candidate cannot)."""

    def request_side(self, batch: Batch) -> Any:
        """What R requests need no candidate for."""
        ...

    def candidate_scores(self, side: Any, batch: Batch) -> Tensor:
        """Logits (R·C,) of C candidates of each request, adjacent; `batch` has R·C rows and no history."""
        ...


class ClickTask:
    """The ranking task over MovieLens-like ratings.

    `fields` describes the inputs by group: user, profile (gender, age, occupation, zip; only where the data set has
    them), item, content (genres, year), context (hour, weekday, gap, last rating), last item, history, statistics.
    A batch holds one tensor a field (see `Field`), `history_item` and `history_rating` (B, T), and `label` (B,).
    Item ids in batches are shifted by one: 0 is "none".

    With `detailed`, batches also hold what each event of the history was about: `history_genres` (B, T, G) float,
    `history_gap` (B, T), the code of the time since the event before it, and `history_age` (B, T) int64, seconds
    between it and the example; zero at padding. And they hold the statistics by side, named as in `SIDES`. The
    inputs of a request (everything but the candidate) are then `request_fields` and the history, those of a candidate
    `candidate_fields`.

    Metrics: `auc` over all examples, `user_auc` (users with both labels), `log_loss`, and `ne`, normalised entropy: the
    log-loss over that of the best constant, so that 1 is what a constant reaches; with `catalogue_users`, on test
    only, also `ndcg@10` and `hit@10` of the first liked test event of that many users among all items they have not
    rated before, and the diagnostic `head share@10` (of the most-rated 10 % of items). Units are users. A
    `RequestScorer` reads each of these requests once; the diagnostic `packed gap` is the largest difference to the
    plain scores of the same candidates.

    Args:
        history_length: T, the latest events that are kept.
        like: smallest rating of a positive label.
        catalogue_users: users ranked over the full catalogue.
        detailed: whether batches hold the details of events and the statistics by side.
        primary: the metric that chooses on validation.
    """

    name = "click ranking"
    lower_is_better = frozenset({"log_loss", "ne"})

    def __init__(
        self,
        interactions: Interactions,
        *,
        history_length: int = 32,
        like: float = 4.0,
        catalogue_users: int = 0,
        detailed: bool = False,
        primary: str = "auc",
        fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    ) -> None:
        if history_length < 1:
            raise ValueError(f"history_length must be at least 1, got {history_length}")
        self.num_users, self.num_items = interactions.num_users, interactions.num_items
        self.history_length = history_length
        self.detailed = detailed
        self.primary = primary
        self.liked_code = int(2 * like)
        train, valid, test = (torch.from_numpy(part) for part in chronological(interactions, fractions))
        self.train, self.validation, self.test = train, valid, test
        self.user = torch.from_numpy(interactions.user)
        self.item = torch.from_numpy(interactions.item)
        self.rating = torch.from_numpy(interactions.rating)
        self.label = (self.rating >= like).float()
        code = (2 * self.rating).round().long().clamp(1, RATINGS - 1)
        self.genres = torch.from_numpy(interactions.items.genres).float()
        self.year = _year_code(torch.from_numpy(interactions.items.year))
        time = torch.from_numpy(interactions.time)
        moments, self.moment = time.unique(return_inverse=True)
        begin, end = _strictly_earlier(torch.from_numpy(interactions.offsets), self.user, self.moment)
        self._past = self._totals(len(moments))
        last = (end - 1).clamp(min=0)
        known = end > begin
        hour = time // 3600
        event: Batch = {"user": self.user + 1, **profile_codes(interactions, self.user)}
        event["hour"] = hour % 24
        event["weekday"] = (hour // 24 + 3) % 7  # 1 January 1970 was a Thursday; 0 is Monday
        seconds = (time - time[last]).clamp(min=1).double()
        event["gap"] = torch.where(known, 1 + seconds.log2().floor().long().clamp(max=GAPS - 2), 0)
        event["last_rating"] = torch.where(known, code[last], 0)
        event["last_item"] = torch.where(known, self.item[last] + 1, 0)
        self._tables = {
            "event": event,
            "item": {"item": torch.arange(self.num_items) + 1, "genres": self.genres, "year": self.year},
            "pair": {"statistics": self._past.statistics(self.user, self.item, self.moment, self.genres[self.item])},
            "flat": {"item": self.item, "code": code, "begin": begin, "end": end, "label": self.label, "time": time},
        }
        self._on_device: dict[torch.device, dict[str, Batch]] = {torch.device("cpu"): self._tables}
        self.fields = self._fields(interactions)
        self._cases = self._catalogue_cases(catalogue_users)
        seen = torch.bincount(self.item[self.train], minlength=self.num_items)
        self._head = metrics.popularity_head(seen, 0.1)

    def _totals(self, moments: int) -> _Past:
        user, item, moment = self.user[self.train], self.item[self.train], self.moment[self.train]
        liked, genres = self.label[self.train, None], self.genres[item]
        return _Past(
            user=PastTotals(user, moment, torch.cat([liked, liked * genres, genres], 1), moments),
            item=PastTotals(item, moment, liked, moments),
            everything=PastTotals(torch.zeros_like(user), moment, liked, moments),
        )

    def _fields(self, interactions: Interactions) -> tuple[Field, ...]:
        profile: list[Field] = []
        if interactions.users is not None:
            event = self._tables["event"]
            profile = [
                Field(name, "profile", "id", int(event[name].max()) + 1)
                for name in ("gender", "age", "occupation", "zip")
            ]
        return (
            Field("user", "user", "id", self.num_users + 1),
            *profile,
            Field("item", "item", "id", self.num_items + 1),
            Field("genres", "content", "multi-hot", self.genres.shape[1]),
            Field("year", "content", "id", LAST_YEAR - FIRST_YEAR + 2),
            Field("hour", "context", "id", 24),
            Field("weekday", "context", "id", 7),
            Field("gap", "context", "id", GAPS),
            Field("last_rating", "context", "id", RATINGS),
            Field("last_item", "last item", "id", self.num_items + 1, table="item"),
            Field("history", "history", "history", RATINGS),
            Field("statistics", "statistics", "dense", len(STATISTICS)),
        )

    @property
    def request_fields(self) -> tuple[Field, ...]:
        """Fields that are known before a candidate is: user, profile, context and the user's statistics."""
        shared = [f for f in self.fields if f.group in ("user", "profile", "context")]
        return (*shared, Field("user statistics", "user statistics", "dense", SIDES["user statistics"]))

    @property
    def candidate_fields(self) -> tuple[Field, ...]:
        """Fields of the candidate: item, content, the item's statistics and those of the user with its genres."""
        own = [f for f in self.fields if f.group in ("item", "content")]
        return (*own, *(Field(n, n, "dense", SIDES[n]) for n in ("item statistics", "cross statistics")))

    def _on(self, device: torch.device) -> dict[str, Batch]:
        """The tables on a device, copied there once."""
        if device not in self._on_device:
            self._on_device[device] = {
                part: {name: value.to(device) for name, value in table.items()} for part, table in self._tables.items()
            }
        return self._on_device[device]

    def rows(
        self, event: Tensor, device: torch.device, *, candidate: Tensor | None = None, history: bool = True
    ) -> Batch:
        """The examples `event` (B,) as a batch on `device`, without the columns of the history if `history` is False.

        With `candidate` (B,), 0-based items take the place of the event's own item; the batch then has no label.
        """
        tables = self._on(device)
        event = event.to(device)
        flat = tables["flat"]
        item = flat["item"][event] if candidate is None else candidate.to(device)
        batch = {name: value[event] for name, value in tables["event"].items()}
        batch |= {name: value[item] for name, value in tables["item"].items()}
        if history:
            batch |= self._history(event, tables)
        if candidate is None:
            batch["statistics"] = tables["pair"]["statistics"][event]
            batch["label"] = flat["label"][event]
        else:
            there, shown = event.cpu(), candidate.cpu()
            statistics = self._past.statistics(self.user[there], shown, self.moment[there], self.genres[shown])
            batch["statistics"] = statistics.to(device)
        if self.detailed:
            batch |= dict(zip(SIDES, batch["statistics"].split(list(SIDES.values()), dim=1), strict=True))
        return batch

    def _history(self, event: Tensor, tables: dict[str, Batch]) -> Batch:
        """The columns of the latest `history_length` events strictly before each event (B,)."""
        flat = tables["flat"]
        position = flat["end"][event, None] + torch.arange(-self.history_length, 0, device=event.device)
        real = position >= flat["begin"][event, None]
        position = position.clamp(min=0)
        item = flat["item"][position]
        found = {
            "history_item": torch.where(real, item + 1, 0),
            "history_rating": torch.where(real, flat["code"][position], 0),
        }
        if self.detailed:
            found["history_genres"] = tables["item"]["genres"][item] * real[..., None]
            found["history_gap"] = torch.where(real, tables["event"]["gap"][position], 0)
            found["history_age"] = torch.where(real, flat["time"][event, None] - flat["time"][position], 0)
        return found

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless training batches; every pass over the data has its own order, which `seed` alone decides."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = self.train[torch.randperm(len(self.train), generator=generator)]
            for event in order.to(device).split(batch_size):
                yield self.rows(event, device)

    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of `model.scores(batch)`, a logit (B,), on the events of a split."""
        event = self.validation if split == "validation" else self.test
        was_training = model.training
        model.eval()
        if isinstance(model, Reports):
            model.start_report()
        with torch.no_grad():
            score = self._scores(model, split, device)
            diagnostics = model.report() if isinstance(model, Reports) else {}
            found: dict[str, UnitMetric] = self._pointwise(score, event)
            if split == "test" and len(self._cases):
                ranked, further = self._catalogue(model, device)
                found |= ranked
                diagnostics |= further
            found["ne"] = self._normalised(found["log_loss"], event)
        model.train(was_training)
        return Evaluation(self.num_users, found, diagnostics)

    def _scores(self, model: nn.Module, split: Split, device: torch.device) -> Tensor:
        """Logits float32 of the events of a split, in their order, on the CPU."""
        event = self.validation if split == "validation" else self.test
        return torch.cat([model.scores(self.rows(part, device)).float() for part in event.split(4096)]).cpu()

    def _pointwise(self, score: Tensor, event: Tensor) -> dict[str, UnitMetric]:
        label, user = self.label[event], self.user[event]
        per_user = torch.full((self.num_users,), torch.nan, dtype=torch.float64)
        values = metrics.user_auc(score, label, user)
        per_user[: len(values)] = values
        zeros = torch.zeros(self.num_users, dtype=torch.float64)
        loss = zeros.index_add(0, user, metrics.log_loss(score, label).double())
        count = zeros.index_add(0, user, torch.ones_like(score, dtype=torch.float64))
        return {"auc": PooledAUC(score, label, user), "user_auc": Mean(per_user), "log_loss": Ratio(loss, count)}

    def _normalised(self, log_loss: UnitMetric, event: Tensor) -> Ratio:
        """The log-loss over the entropy of the share of likes among `event`."""
        assert isinstance(log_loss, Ratio)
        share = self.label[event].double().mean()
        entropy = torch.special.entr(torch.stack([share, 1 - share])).sum()
        return Ratio(log_loss.numerator, log_loss.denominator * entropy)

    # -- full catalogue ----------------------------------------------------------------------------------------

    def _catalogue_cases(self, users: int) -> Tensor:
        """First liked test event of each of `users` users, drawn with a fixed seed."""
        liked = self.test[self.label[self.test] > 0]
        owner = self.user[liked]
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[1:] != owner[:-1]  # events are sorted by user and time
        cases = liked[first]
        drawn = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0))[:users]
        return cases[drawn.sort().values]

    def _catalogue(self, model: nn.Module, device: torch.device) -> tuple[dict[str, UnitMetric], dict[str, float]]:
        everything = torch.arange(self.num_items)
        parts = self._cases.split(max(1, 8192 // self.num_items))
        scores = torch.cat([self.pack_scores(model, part, everything, device).cpu() for part in parts])
        diagnostics = {}
        if shares_requests(model):
            some = everything[:100]
            plain = self.pack_scores(model, self._cases[:1], some, device, packed=False).cpu()
            diagnostics["packed gap"] = float((plain - scores[:1, : len(some)]).abs().max())
        scores = F.pad(scores, (1, 0), value=-torch.inf)  # column 0 is "no item"
        seen, target = self._seen(self._cases), self.item[self._cases] + 1
        rank = metrics.rank_of_target(scores, target, exclude=seen)
        top = metrics.exclude_items(scores, seen).topk(10).indices - 1
        owner = self.user[self._cases]
        nothing = torch.full((self.num_users,), torch.nan, dtype=torch.float64)
        diagnostics["head share@10"] = float(metrics.head_share(top, self._head).mean())
        return {
            "ndcg@10": Mean(nothing.index_copy(0, owner, metrics.ndcg(rank, 10).double())),
            "hit@10": Mean(nothing.index_copy(0, owner, metrics.hit_rate(rank, 10).double())),
        }, diagnostics

    def pack(self, event: Tensor, items: Tensor, device: torch.device) -> tuple[Batch, Batch]:
        """Requests at the moments of `event` (R,), each with the candidates `items` (C,), 0-based.

        Returns a batch of R requests and one of their R·C candidates, those of a request adjacent, without history.
        The requests' own item fields are those of the event; a `request_side` must not read them.
        """
        each, shown = event.repeat_interleave(len(items)), items.repeat(len(event))
        return self.rows(event, device), self.rows(each, device, candidate=shown, history=False)

    def pack_scores(
        self, model: nn.Module, event: Tensor, items: Tensor, device: torch.device, *, packed: bool | None = None
    ) -> Tensor:
        """Logits float32 (R, C) of the candidates `items` (C,) at `event` (R,).

        `packed` reads each request once, by default where the model can; otherwise it is read for each candidate.
        """
        if shares_requests(model) if packed is None else packed:
            requests, candidates = self.pack(event, items, device)
            found = model.candidate_scores(model.request_side(requests), candidates)
        else:
            each, shown = event.repeat_interleave(len(items)), items.repeat(len(event))
            found = model.scores(self.rows(each, device, candidate=shown))
        return found.float().view(len(event), -1)

    def _seen(self, event: Tensor) -> Tensor:
        """Shifted ids of the items that the users of `event` (C,) rated before it, (C, most), padded with 0."""
        begin, end = self._tables["flat"]["begin"][event, None], self._tables["flat"]["end"][event, None]
        position = end + torch.arange(-int((end - begin).max()), 0)
        return torch.where(position >= begin, self.item[position.clamp(min=0)] + 1, 0)


def pad_history(batch: Batch, by: int = 2) -> Batch:
    """The batch with `by` more columns of padding before its histories (B, T) and (B, T, G)."""

    def pad(name: str, value: Tensor) -> Tensor:
        return F.pad(value, (0, 0) * (value.dim() - 2) + (by, 0)) if name.startswith("history_") else value

    return {name: pad(name, value) for name, value in batch.items()}


def shares_requests(model: nn.Module) -> bool:
    """Whether a model, as configured, reads a request once for all of its candidates."""
    return isinstance(model, RequestScorer) and model.shares_requests


def _strictly_earlier(offsets: Tensor, user: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """For each event (E,): the user's events at an earlier moment are those in begin (E,) up to end (E,)."""
    begin = offsets[user]
    key = user * (int(moment.max()) + 1) + moment  # ascends, as events are sorted by user and time
    return begin, torch.searchsorted(key, key)


def profile_codes(interactions: Interactions, user: Tensor) -> Batch:
    """Demographic codes of each event's user (E,), from 1; nothing where the data set has no demographics."""
    table = interactions.users
    if table is None:
        return {}
    # Whole zip codes nearly name their users; the first character is a region.
    first = [name[:1] for name in table.zip_names]
    regions = {name: code for code, name in enumerate(sorted(set(first)), start=1)}
    region = np.array([regions[name] for name in first], dtype=np.int64)[table.zip] if first else table.zip * 0
    codes = {
        "gender": table.gender + 1,
        "age": np.digitize(table.age, AGE_GROUPS),
        "occupation": table.occupation + 1,
        "zip": region,
    }
    return {name: torch.from_numpy(np.asarray(code, dtype=np.int64))[user] for name, code in codes.items()}


def _year_code(year: Tensor) -> Tensor:
    """0 for an unknown year, else the year counted from `FIRST_YEAR`, from 1."""
    return torch.where(year > 0, year.clamp(FIRST_YEAR, LAST_YEAR) - FIRST_YEAR + 1, 0)


def miniature(
    users: int = 8, items: int = 12, events: int = 10, *, history_length: int = 4, detailed: bool = False
) -> ClickTask:
    """A made-up task of a few users with demographics, for specimens and tests; always the same for the same sizes."""
    generator = np.random.default_rng(0)
    genres = generator.random((items, 3)) < 0.4
    table = ItemTable.of_ids([str(i) for i in range(items)])
    table = replace(table, genres=genres, genre_names=("a", "b", "c"), year=1990 + np.arange(items) % 9)
    item = np.argsort(generator.random((users, items)), axis=1)[:, :events]
    return ClickTask(
        Interactions.from_events(
            "miniature",
            user=np.repeat(np.arange(users), events),
            item=item.ravel(),
            rating=generator.integers(1, 6, users * events).astype(np.float32),
            time=1_000_000 + generator.integers(0, 4_000, users * events) * 1_000,
            items=table,
            users=made_up_people(users),
        ),
        history_length=history_length,
        detailed=detailed,
    )


class Ranker(nn.Module):
    """A pointwise ranking model: embedded fields, then a trunk that gives one logit; binary cross-entropy.

    Args:
        features: batch -> (B, F).
        trunk: (B, F) -> (B,).
    """

    def __init__(self, features: FeatureEmbedding, trunk: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.trunk = trunk
        self.logged: dict[str, float] = {}

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like, (B,)."""
        return self.trunk(self.features(batch))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return click_loss(self.scores(batch), batch["label"])


def click_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits (B,) against labels (B,), in float32."""
    return metrics.log_loss(logit, label).mean()


class PastMeans(nn.Module):
    """Floor without parameters: the sum of the user's and the item's past means."""

    def scores(self, batch: Batch) -> Tensor:
        """Logits of `statistics` (..., 6): means are scaled to ±1, so that their sum is one of about the right size."""
        statistics = batch["statistics"]
        return statistics[..., STATISTICS.index("user mean")] + statistics[..., STATISTICS.index("item mean")]
