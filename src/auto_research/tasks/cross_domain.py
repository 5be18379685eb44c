"""Two domains of one product: a large source surface and a small target surface with other inputs and other labels.

The target domain is the niche-genre events of a few users; the source domain is everything else of all other users,
with a small share of niche events, so that a source model knows the niche items by name. Users are disjoint. What
differs between the domains on purpose: the history (all genres, long, in the source; niche events only in the
target), a `surface` field (its default in the target), the tasks (rated at least 3, at least 4, exactly 5 in the
source; at least 4, exactly 5 in the target), and the rate of sampled negatives, hence the base rates.

Letters: E examples, T length of a history, M source tasks, K target tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from auto_research.data.impressions import chronological
from auto_research.data.sequences import Interactions
from auto_research.runtime.errors import UserError
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, PooledAUC, Ratio, Split, UnitMetric

NICHE = frozenset({"Musical", "Animation", "Children's", "Children"})
SOURCE_TASKS = ("click", "satisfied", "long")
"""Rated at least 3, at least 4, exactly 5; 0 for a sampled negative."""
TARGET_TASKS = ("click", "like")
"""Rated at least 4, exactly 5; 0 for a sampled negative."""
DEFAULT_SURFACE, SOURCE_SURFACE = 0, 1
STUDENT_HISTORY = 10
YEAR_CODES = 32
"""Five-year steps from 1900, from 1; 0 is unknown."""


@dataclass(frozen=True)
class Examples:
    """Examples of one domain as flat tensors; item ids are shifted by one, 0 is padding.

    item, hour, user (E,) int64; history (E, T) int64, events strictly before, latest last; rating (E,), 0 for a
    sampled negative.
    """

    item: Tensor
    history: Tensor
    hour: Tensor
    user: Tensor
    rating: Tensor

    def __len__(self) -> int:
        return len(self.item)

    def source_labels(self) -> Tensor:
        """(E, M) in the order of `SOURCE_TASKS`."""
        return torch.stack([self.rating >= 3, self.rating >= 4, self.rating >= 5], 1).float()

    def target_labels(self) -> Tensor:
        """(E, K) in the order of `TARGET_TASKS`."""
        return torch.stack([self.rating >= 4, self.rating >= 5], 1).float()

    def take(self, rows: Tensor) -> Examples:
        """The examples `rows` (R,)."""
        return Examples(*(getattr(self, name)[rows] for name in ("item", "history", "hour", "user", "rating")))


def histories(interactions: Interactions, length: int) -> Tensor:
    """The latest `length` items of the same user strictly before each event, (E, T) shifted ids, padded left."""
    user, time = torch.from_numpy(interactions.user), torch.from_numpy(interactions.time)
    moment = time.unique(return_inverse=True)[1]
    key = user * (int(moment.max()) + 1) + moment  # ascends: events are sorted by user and time
    end = torch.searchsorted(key, key)
    begin = torch.from_numpy(interactions.offsets)[user]
    position = end[:, None] + torch.arange(-length, 0)
    real = position >= begin[:, None]
    return torch.where(real, torch.from_numpy(interactions.item)[position.clamp(min=0)] + 1, 0)


def make_examples(
    interactions: Interactions, pool: Tensor, *, negatives: int, history: int, generator: torch.Generator
) -> tuple[Examples, Tensor]:
    """Events and, after each, `negatives` items drawn from `pool` that its user never rated in this domain.

    Returns the examples and the event (index into `interactions`) that each belongs to, (E,). A negative has the
    time, the history and the user of its event, so it falls into the same part of a split.
    """
    events = len(interactions)
    item, user = torch.from_numpy(interactions.item), torch.from_numpy(interactions.user)
    drawn = pool[torch.randint(len(pool), (events, negatives), generator=generator)]
    rated = torch.zeros(interactions.num_users * interactions.num_items, dtype=torch.bool)
    rated[user * interactions.num_items + item] = True
    for _ in range(20):  # redraw what the user has rated
        hit = rated[user[:, None] * interactions.num_items + drawn]
        if not hit.any():
            break
        fresh = pool[torch.randint(len(pool), (events, negatives), generator=generator)]
        drawn = torch.where(hit, fresh, drawn)
    event = torch.arange(events).repeat_interleave(1 + negatives)
    shown = torch.cat([item[:, None], drawn], 1).flatten()
    real = torch.zeros(events, 1 + negatives, dtype=torch.bool)
    real[:, 0] = True
    rating = torch.where(real.flatten(), torch.from_numpy(interactions.rating)[event], 0.0)
    keep = real.flatten() | ~rated[user[event] * interactions.num_items + shown]
    event, shown, rating = event[keep], shown[keep], rating[keep]
    hour = torch.from_numpy(interactions.time)[event] // 3600 % 24
    return Examples(shown + 1, histories(interactions, history)[event], hour, user[event], rating), event


@dataclass
class CrossDomain:
    """Target-domain ranking with source examples and stored teacher predictions at hand.

    A training batch holds `item`, `history` (B, T), `hour`, `label` (B, K) of target examples; `teacher` (B, M) the
    stored predictions for them, once `store_teacher` was called, and further stores by name; and as many source
    examples under `source_item`, `source_history`, `source_hour`, `source_label` (in the target's label
    definitions), for models that train on them.

    Metrics on later events of the target users, for the served click: `auc`, `log_loss`, `calibration`
    (|log(predicted clicks / clicks)|), `new_item_auc` (items with at most three target training events), and
    `like_auc`. Units are target users.
    """

    source: Examples
    target: Examples
    train: Tensor
    validation: Tensor
    test: Tensor
    genres: Tensor
    year: Tensor
    users: int
    items: int
    source_events: int
    target_events: int
    name: str = "cross-domain ranking"
    primary: str = "auc"
    lower_is_better: frozenset[str] = frozenset({"log_loss", "calibration"})
    stores: dict[str, Tensor] = field(default_factory=dict)

    def store_teacher(self, name: str, predictions: Tensor) -> None:
        """Keeps a teacher's constant predictions (E, M) for all target examples under `name`."""
        if predictions.shape != (len(self.target), len(SOURCE_TASKS)) or predictions.requires_grad:
            raise ValueError(f"teacher predictions must be a constant ({len(self.target)}, {len(SOURCE_TASKS)})")
        self.stores[name] = predictions

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless target batches with as many source examples; the order depends on `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = self.train[torch.randperm(len(self.train), generator=generator)]
            for rows in order.split(batch_size):
                batch = self.rows(rows)
                other = torch.randint(len(self.source), (len(rows),), generator=generator)
                batch |= {f"source_{name}": value for name, value in student_view(self.source.take(other)).items()}
                yield {name: value.to(device) for name, value in batch.items()}

    def rows(self, rows: Tensor) -> Batch:
        """Target examples `rows` (B,) as the student sees them, with labels and stored teacher predictions."""
        batch = student_view(self.target.take(rows))
        return batch | {name: store[rows] for name, store in self.stores.items()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        rows = self.validation if split == "validation" else self.test
        logits = []
        for part in rows.split(4096):
            batch = {name: value.to(device) for name, value in self.rows(part).items()}
            logits.append(model.scores(batch).float().cpu())
        score, examples = torch.cat(logits), self.target.take(rows)
        label, user = examples.target_labels(), examples.user
        zeros = torch.zeros(self.users, dtype=torch.float64)
        loss = zeros.index_add(0, user, metrics.log_loss(score[:, 0], label[:, 0]).double())
        count = zeros.index_add(0, user, torch.ones(len(rows), dtype=torch.float64))
        predicted = zeros.index_add(0, user, score[:, 0].sigmoid().double())
        clicks = zeros.index_add(0, user, label[:, 0].double())
        found: dict[str, UnitMetric] = {
            "auc": PooledAUC(score[:, 0], label[:, 0], user),
            "like_auc": PooledAUC(score[:, 1], label[:, 1], user),
            "log_loss": Ratio(loss, count),
            "calibration": Ratio(predicted, clicks, lambda ratio: ratio.log().abs()),
        }
        trained = self.target.take(self.train)
        known = torch.bincount(trained.item[trained.rating > 0], minlength=self.items + 1)
        new = known[examples.item] <= 3
        if 0 < label[new, 0].sum() < new.sum():
            found["new_item_auc"] = PooledAUC(score[new, 0], label[new, 0], user[new])
        ratio = float(predicted.sum() / clicks.sum())
        return Evaluation(self.users, found, {"predicted / actual clicks": ratio})


def student_view(examples: Examples) -> Batch:
    """What the small target model sees, and the target's labels."""
    return {
        "item": examples.item,
        "history": examples.history[:, -STUDENT_HISTORY:],
        "hour": examples.hour,
        "label": examples.target_labels(),
    }


def teacher_view(examples: Examples, genres: Tensor, year: Tensor, surface: int) -> Batch:
    """What the source model takes: item, its genres and year, the whole history, and the surface."""
    return {
        "item": examples.item,
        "genres": genres[examples.item],
        "year": year[examples.item],
        "history": examples.history,
        "surface": torch.full_like(examples.item, surface),
        "label": examples.source_labels(),
    }


def _keep(interactions: Interactions, rows: NDArray[np.bool_]) -> Interactions:
    """The events marked in `rows` (E,); users and items keep their indices."""
    columns = {name: getattr(interactions, name)[rows] for name in ("user", "item", "rating", "time")}
    return replace(interactions, **columns)


def target_share(users: int) -> float:
    """Share of the users in the target: a twentieth, more where that leaves fewer than 200, at most a fifth."""
    return min(0.2, max(0.05, 200 / users))


def split_domains(
    interactions: Interactions,
    *,
    target_users: float | None = None,
    known_niche: float = 0.2,
    source_negatives: int = 1,
    target_negatives: int = 2,
    history: int = 50,
    train_share: float = 1.0,
    seed: int = 0,
) -> CrossDomain:
    """Divides ratings into the two domains; the division depends on `seed` alone, not on the training seed.

    Args:
        target_users: share of the users who belong to the target domain; `target_share` when left out.
        known_niche: share of the other users' niche events that the source domain contains.
        train_share: share of the target's training events that is used.
    """
    niche_columns = [i for i, name in enumerate(interactions.items.genre_names) if name in NICHE]
    if not niche_columns:
        raise UserError("this data set has none of the niche genres; use a MovieLens data set")
    niche_item: NDArray[np.bool_] = np.any(interactions.items.genres[:, niche_columns], axis=1)
    rng = np.random.default_rng(seed)
    share = target_share(interactions.num_users) if target_users is None else target_users
    in_target = np.zeros(interactions.num_users, dtype=bool)
    in_target[rng.permutation(interactions.num_users)[: round(share * interactions.num_users)]] = True
    niche_event = niche_item[interactions.item]
    kept = ~niche_event | (rng.random(len(interactions)) < known_niche)
    source_rows = ~in_target[interactions.user] & kept
    target_rows = in_target[interactions.user] & niche_event
    source, target = _keep(interactions, source_rows), _keep(interactions, target_rows)
    generator = torch.Generator().manual_seed(seed)
    pools = torch.arange(interactions.num_items), torch.from_numpy(np.flatnonzero(niche_item))
    source_examples, _ = make_examples(
        source, pools[0], negatives=source_negatives, history=history, generator=generator
    )
    examples, event = make_examples(target, pools[1], negatives=target_negatives, history=history, generator=generator)
    parts = [torch.from_numpy(part) for part in chronological(target, (0.6, 0.15, 0.25))]
    if train_share < 1:
        order = torch.randperm(len(parts[0]), generator=generator)
        parts[0] = parts[0][order[: max(1, round(train_share * len(order)))]]
    train, validation, test = (torch.isin(event, part).nonzero().flatten() for part in parts)
    pad = torch.zeros(1, dtype=torch.long)
    genres = torch.from_numpy(interactions.items.genres).float()
    year = torch.from_numpy(interactions.items.year)
    return CrossDomain(
        source=source_examples,
        target=examples,
        train=train,
        validation=validation,
        test=test,
        genres=torch.cat([torch.zeros(1, genres.shape[1]), genres]),
        year=torch.cat([pad, torch.where(year > 0, ((year - 1900) // 5).clamp(0, 30) + 1, 0)]),
        users=interactions.num_users,
        items=interactions.num_items,
        source_events=len(source),
        target_events=len(target),
    )
