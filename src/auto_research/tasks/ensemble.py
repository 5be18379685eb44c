"""The last stage of ranking: one order out of several predicted behaviours, judged by the ratings nobody predicted.

Stage 1 is a multi-task model of K behaviours that learns from the first 70 % of each user's events and is frozen. Its
predictions ("pxtr") for a request's candidates are all that stage 2 gets to know about what users do. Explicit ratings
play the questionnaire: they say how satisfied a user was, and only evaluation reads them.

A *request* is a list of N candidates: up to N/2 events of a user that follow each other in the data, the rest items
that the user never rates (half of them drawn evenly, half by popularity). Requests to learn from come from the next
10 % of a user's events, validation from the 5 % after it and test from the last 15 %.

Letters: B requests, N candidates, K behaviours, E events, U users, I items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.impressions import chronological
from auto_research.data.sequences import Interactions, ItemTable
from auto_research.layers.heads import TaskHeads, binary_task_losses
from auto_research.layers.pairwise import list_ranks, pairs, rank_spread
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, Ratio, Recipe, Split, UnitMetric, train_steps
from auto_research.tasks.click import Reports

BEHAVIOURS = ("interact", "like", "love", "keep", "binge", "interest")
"""Interacted with rather than an item drawn evenly; rated at least 4; rated 5; rated above 2; followed by a similar
film within five events; interacted with rather than an item drawn by popularity."""
NEAR = 5
SIMILAR = 0.5
"""Least overlap of two films' genres (shared over all) that makes them similar."""
LEAST_RATED = 5


def behaviour_labels(interactions: Interactions, part: Tensor) -> Tensor:
    """Labels (E, K) of every event; `part` (E,) numbers the parts of the data, across which nothing is looked up."""
    rating = torch.from_numpy(interactions.rating)
    user, item = torch.from_numpy(interactions.user), torch.from_numpy(interactions.item)
    genres = torch.from_numpy(interactions.items.genres).float()[item]
    binge = torch.zeros(len(rating), dtype=torch.bool)
    for step in range(1, NEAR + 1):
        own, later = genres[:-step], genres[step:]
        shared = (own * later).sum(1)
        overlap = shared / (own.sum(1) + later.sum(1) - shared).clamp(min=1)
        together = (user[:-step] == user[step:]) & (part[:-step] == part[step:])
        binge[:-step] |= together & (overlap >= SIMILAR)
    ones = torch.ones_like(rating)
    return torch.stack([ones, rating >= 4, rating >= 5, rating > 2, binge, ones], 1).float()


class BehaviourModel(nn.Module):
    """Stage 1: shared bottom over user, item and genres, one head a behaviour.

    Batches: {"user": (B,), "item": (B,), "label": (B, K)}; a label of NaN was not observed.
    """

    genres: Tensor

    def __init__(self, users: int, genres: Tensor, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(len(genres), width)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        self.register_buffer("genres", genres / genres.sum(1, keepdim=True).clamp(min=1), persistent=False)
        self.content = nn.Linear(genres.shape[1], width)
        self.bottom = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.GELU())
        self.heads = TaskHeads(2 * width, dict.fromkeys(BEHAVIOURS, 1), hidden=width)

    def logits(self, user: Tensor, item: Tensor) -> dict[str, Tensor]:
        """User and item of any one shape -> logit of each behaviour, of that shape."""
        who, what = self.user(user), self.item(item) + self.content(self.genres[item])
        return self.heads(self.bottom(torch.cat([who, what, who * what], -1)))

    def loss(self, batch: Batch) -> Tensor:
        """Sum over behaviours of the mean binary cross-entropy of what was observed."""
        labels = dict(zip(BEHAVIOURS, batch["label"].unbind(-1), strict=True))
        return torch.stack([*binary_task_losses(self.logits(batch["user"], batch["item"]), labels).values()]).sum()

    @torch.no_grad()
    def predict(self, user: Tensor, item: Tensor) -> Tensor:
        """Pxtr: probability of each behaviour, (..., K)."""
        return torch.stack([*self.logits(user, item).values()], -1).sigmoid()


@dataclass(frozen=True)
class Requests:
    """Requests whose candidates are fixed: item (R, N), rating (R, N) with 0 where the user gives none, label
    (R, N, K) with NaN where a behaviour was not observed, user (R,), time (R,)."""

    user: Tensor
    item: Tensor
    rating: Tensor
    label: Tensor
    time: Tensor

    def __len__(self) -> int:
        return len(self.user)


@dataclass(frozen=True)
class MeanOf:
    """Mean of several metrics of the same units."""

    parts: tuple[UnitMetric, ...]

    def resample(self, weights: Tensor) -> Tensor:
        """(R, U) -> (R,)."""
        return torch.stack([part.resample(weights) for part in self.parts]).mean(0)


class EnsembleRanking:
    """Requests for stage 2. A model takes {"user": (B,), "item": (B, N), "pxtr": (B, N, K), "hour", "weekday": (B,)}
    and gives `scores(batch)` (B, N), higher is earlier; one with `uncertainty(batch)` (B, N) is asked for it, too.

    Metrics, by user: NDCG@5 and HR@5 of the ratings, among the rated candidates of a list (HR: share of its
    best-rated films in the first five). `gauc/...`, the area under the ROC curve within lists of each behaviour's own
    outcome, and their mean `gauc`. `agreement`, the share of candidate pairs that stand in the order of a pxtr, over
    all K: the very thing that the losses train. For models with an uncertainty its mean Spearman correlation within
    lists with *bias*, the distance between an item's place by mean pxtr and by rating among the rated ones, and with
    *conflict*, the standard deviation of an item's places under the K pxtr.
    """

    name = "ensemble ranking"
    primary = "ndcg@5"
    lower_is_better: frozenset[str] = frozenset()

    def __init__(self, interactions: Interactions, *, candidates: int = 20, seed: int = 0) -> None:
        if candidates % 4 or candidates < 2 * LEAST_RATED:
            raise ValueError(f"candidates must be a multiple of 4 and at least {2 * LEAST_RATED}, got {candidates}")
        self.candidates, self.rated = candidates, candidates // 2
        self.num_users, self.num_items = interactions.num_users, interactions.num_items
        self.user, self.item = torch.from_numpy(interactions.user), torch.from_numpy(interactions.item)
        self.rating, self.time = torch.from_numpy(interactions.rating), torch.from_numpy(interactions.time)
        self.genres = torch.from_numpy(interactions.items.genres).float()
        part = torch.zeros(len(interactions), dtype=torch.int64)
        for split in (chronological(interactions, (0.7, 0.15, 0.15)), chronological(interactions, (0.8, 0.05, 0.15))):
            part[torch.from_numpy(np.concatenate(split[1:]))] += 1
            part[torch.from_numpy(split[2])] += 1
        # A later cut adds one more: 0 stage 1; 1 stage 2; 2 validation; 4 test.
        self.part = part
        self.labels = behaviour_labels(interactions, part)
        self._seen = torch.zeros(self.num_users, self.num_items, dtype=torch.bool)
        self._seen[self.user, self.item] = True
        self.popularity = torch.bincount(self.item[part == 0], minlength=self.num_items).float()
        self.priors = BehaviourModel(self.num_users, self.genres)
        generator = torch.Generator().manual_seed(seed)
        self._starts = self._windows(1, stride=1)
        self._held_out: dict[Split, Requests] = {
            "validation": self.requests(*self._windows(2, stride=self.rated), generator),
            "test": self.requests(*self._windows(4, stride=self.rated), generator),
        }

    # -- stage 1 ---------------------------------------------------------------------------------------------------

    def behaviour_batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless batches for stage 1: events of the first part, each with an even and a popular negative."""
        generator = torch.Generator().manual_seed(seed)
        events = torch.nonzero(self.part == 0).squeeze(1)
        nothing = torch.full((batch_size, len(BEHAVIOURS)), torch.nan)
        even, popular = nothing.clone(), nothing.clone()
        even[:, BEHAVIOURS.index("interact")] = 0.0
        popular[:, BEHAVIOURS.index("interest")] = 0.0
        while True:
            chosen = events[torch.randint(len(events), (batch_size,), generator=generator)]
            drawn = torch.randint(self.num_items, (batch_size,), generator=generator)
            hot = torch.multinomial(self.popularity, batch_size, replacement=True, generator=generator)
            batch = {
                "user": self.user[chosen].repeat(3),
                "item": torch.cat([self.item[chosen], drawn, hot]),
                "label": torch.cat([self.labels[chosen], even, popular]),
            }
            yield {name: value.to(device) for name, value in batch.items()}

    def train_priors(self, *, steps: int, seed: int, device: torch.device, batch_size: int = 512) -> list[float]:
        """Trains the multi-task model and freezes it; every arm then reads the same predictions."""
        self.priors.to(device).requires_grad_(True)
        batches = self.behaviour_batches(seed, batch_size, device)
        losses = train_steps(self.priors, batches, steps=steps, recipe=Recipe(learning_rate=3e-3, weight_decay=1e-2))
        self.priors.eval().requires_grad_(False)
        return losses

    # -- requests --------------------------------------------------------------------------------------------------

    def _windows(self, part: int, *, stride: int) -> tuple[Tensor, Tensor]:
        """First event and number of events (W,) of the windows of a part: up to `rated` events of one user."""
        inside = torch.nonzero(self.part == part).squeeze(1)
        user = self.user[inside]
        start = torch.searchsorted(user, user)  # place of the user's first event of the part
        place = torch.arange(len(inside)) - start
        left = torch.searchsorted(user, user, right=True) - start - place
        kept = (place % stride == 0) & (left >= LEAST_RATED)
        return inside[kept], left[kept].clamp(max=self.rated)

    def requests(self, first: Tensor, count: Tensor, generator: torch.Generator) -> Requests:
        """Lists of the events first, first + 1, ... (count of them), filled up with items that are never rated."""
        user = self.user[first]
        column = torch.arange(self.candidates)
        real = column < count[:, None]
        event = (first[:, None] + column).clamp(max=len(self.user) - 1)
        seen = self._seen[user]
        # The largest keys are a draw without replacement: even, and by popularity (Gumbel noise on its logarithm).
        half = self.candidates // 2
        noise = torch.rand(2, *seen.shape, generator=generator).clamp(min=1e-9)
        hot = (self.popularity.clamp(min=0.1).log() - (-noise[0].log()).log()).masked_fill(seen, -torch.inf)
        popular = hot.topk(half, dim=1).indices
        even = noise[1].masked_fill(seen, -1.0).scatter_(1, popular, -1.0).topk(half, dim=1).indices
        drawn = torch.stack([popular, even], 2).flatten(1)  # in turn, wherever the rated ones end
        unseen = torch.full((len(BEHAVIOURS),), torch.nan).repeat(self.candidates, 1)
        unseen[0::2, BEHAVIOURS.index("interest")] = 0.0
        unseen[1::2, BEHAVIOURS.index("interact")] = 0.0
        return Requests(
            user=user,
            item=self.item[event].where(real, drawn),
            rating=self.rating[event].where(real, 0.0),
            label=self.labels[event].where(real[..., None], unseen),
            time=self.time[first],
        )

    def inputs(self, requests: Requests, index: Tensor, device: torch.device) -> Batch:
        """What a model may see of requests (B,): no rating and no outcome."""
        user, item = requests.user[index].to(device), requests.item[index].to(device)
        hour = torch.div(requests.time[index].to(device), 3600, rounding_mode="floor")
        pxtr = self.priors.to(device).predict(user[:, None].expand_as(item), item)
        day = torch.div(hour, 24, rounding_mode="floor")
        return {"user": user, "item": item, "pxtr": pxtr, "hour": hour % 24, "weekday": (day + 3) % 7}

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless requests of the second part, with candidates drawn anew each time."""
        generator = torch.Generator().manual_seed(seed)
        first, count = self._starts
        while True:
            order = torch.randperm(len(first), generator=generator)
            for chosen in order.split(batch_size):
                requests = self.requests(first[chosen], count[chosen], generator)
                yield self.inputs(requests, torch.arange(len(chosen)), device)

    # -- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Satisfaction, behaviours, and what uncertainty goes with, on the requests of a split."""
        requests, training = self._held_out[split], model.training
        model.eval()
        if isinstance(model, Reports):
            model.start_report()
        scores, priors, uncertain = [], [], []
        for index in torch.arange(len(requests)).split(512):
            batch = self.inputs(requests, index, device)
            scores.append(model.scores(batch).float().cpu())
            priors.append(batch["pxtr"].float().cpu())
            found = model.uncertainty(batch) if hasattr(model, "uncertainty") else None
            if found is not None:
                uncertain.append(found.float().cpu())
        model.train(training)
        uncertainty = torch.cat(uncertain) if uncertain else None
        values = self.judge(requests, torch.cat(scores), torch.cat(priors), uncertainty)
        diagnostics = model.report() if isinstance(model, Reports) else {}
        return Evaluation(self.num_users, values, {"requests": float(len(requests)), **diagnostics})

    def judge(
        self, requests: Requests, score: Tensor, pxtr: Tensor, uncertainty: Tensor | None = None
    ) -> dict[str, UnitMetric]:
        """Metrics of scores (R, N) on requests with pxtr (R, N, K)."""
        rated = requests.rating > 0
        lists = torch.arange(len(score))[:, None].expand_as(score)
        flat_list = lists[rated]
        gain = 2.0 ** (requests.rating[rated].double() - 1.0) - 1.0
        best = (requests.rating == requests.rating.amax(1, keepdim=True)) & rated
        hits = ((list_ranks(score, rated) <= LEAST_RATED) & best).sum(1) / best.sum(1)
        found: dict[str, UnitMetric] = {
            "ndcg@5": self._by_user(requests, metrics.user_ndcg(score[rated], gain, flat_list, LEAST_RATED)),
            "hr@5": self._by_user(requests, hits),
        }
        areas = {}
        for k, name in enumerate(BEHAVIOURS):
            label = requests.label[..., k]
            known = ~label.isnan()
            area = torch.full((len(score),), torch.nan, dtype=torch.float64)
            values = metrics.user_auc(score[known], label[known], lists[known])
            area[: len(values)] = values
            areas[f"gauc/{name}"] = self._by_user(requests, area)
        left, right = pairs(score)
        first, second = pairs(pxtr)
        agree = ((left - right)[..., None] * (first - second) > 0).double() + 0.5 * (left == right)[..., None]
        found |= {
            "gauc": MeanOf(tuple(areas.values())),
            **areas,
            "agreement": self._by_user(requests, agree.mean((1, 2))),
        }
        if uncertainty is not None:
            bias = (list_ranks(pxtr.mean(-1), rated) - list_ranks(requests.rating, rated)).abs()
            conflict = rank_spread(list_ranks(pxtr))
            everything = torch.ones_like(rated)
            found["bias correlation"] = self._by_user(requests, metrics.list_spearman(uncertainty, bias, rated))
            related = metrics.list_spearman(uncertainty, conflict, everything)
            found["conflict correlation"] = self._by_user(requests, related)
        return found

    def _by_user(self, requests: Requests, values: Tensor) -> Ratio:
        """Mean over lists (R,), resampled by user; NaN is left out."""
        known = ~values.isnan()
        zeros = torch.zeros(self.num_users, dtype=torch.float64)
        total = zeros.index_add(0, requests.user, values.nan_to_num(0.0).double())
        return Ratio(total, zeros.index_add(0, requests.user, known.double()))


def miniature(users: int = 6, items: int = 150, events: int = 100) -> EnsembleRanking:
    """A made-up task of a few users for specimens and tests, its stage 1 untrained; the same at each call."""
    generator = np.random.default_rng(0)
    table = replace(
        ItemTable.of_ids([str(i) for i in range(items)]),
        genres=generator.random((items, 4)) < 0.4,
        genre_names=("a", "b", "c", "d"),
    )
    interactions = Interactions.from_events(
        "miniature",
        user=np.repeat(np.arange(users), events),
        item=np.argsort(generator.random((users, items)), axis=1)[:, :events].ravel(),
        rating=generator.integers(1, 6, users * events).astype(np.float32),
        time=1_000_000 + np.tile(np.arange(events), users) * 4000,
        items=table,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EnsembleRanking(interactions, candidates=12)
