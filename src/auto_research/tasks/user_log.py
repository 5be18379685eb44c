"""A user's log as a sequence to model: which item comes next, how the user reacts, what an offline state ranks high.

A log is read in *windows* of consecutive events that begin at a multiple of `size` events from the user's first. Each
`size` consecutive events are an *impression*. Windows are padded on the right, so that impressions lie side by side: a
causal model sees no padding from a real event.

Three questions are asked of the events of a split. *Next item* and *feedback* at every event, from all before it (and
for the feedback from the item itself). *Ranking* within an impression, from a state of the user that ends before the
impression before: what a job that runs offline, and late by one impression, would have.

Letters: B windows, G impressions of S events in a window, T = G·S events, I items, D width of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.pairwise import pairs
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, Mean, Ratio, Split, UnitMetric
from auto_research.tasks.event_log import ACTIONS, LIKED, EventLog

DELAY = 1
"""Impressions between the end of the user's state and the impression that is ranked."""
PLACES = 16
"""Codes of the place in a session; later places share the last."""


@dataclass(frozen=True)
class Answers:
    """What a model says about a batch of windows; None where it has no such head.

    Attributes:
        state, items: (B, T, D) and (I + 1, D), whose products are logits of the item of each event, from before it.
        rating, like: logits (B, T, 5) and (B, T) of the reaction to each event, given its item.
        affinity: (B, T) how high each event's item is ranked within its impression. It is not asked for in the first
            1 + `DELAY` impressions of a window, where no state is old enough.
    """

    state: Tensor | None = None
    items: Tensor | None = None
    rating: Tensor | None = None
    like: Tensor | None = None
    affinity: Tensor | None = None


def delayed(states: Tensor, size: int, delay: int = DELAY) -> tuple[Tensor, Tensor]:
    """States after each event (B, T, D) -> those that impressions may use (B, G, D), and whether there is one (G,).

    Impression g uses the state at the end of impression g - 1 - delay.
    """
    last = states[:, size - 1 :: size]  # after each impression
    shift = 1 + delay
    moved = F.pad(last, (0, 0, shift, 0))[:, : last.shape[1]]
    return moved, torch.arange(last.shape[1], device=states.device) >= shift


class UserLog:
    """Windows of logs to learn from, and the evaluation of `model.answers(batch) -> Answers`.

    Batches: `item` (B, T) shifted items padded with 0 on the right, `action` (B, T) 1..5, and the context that is known
    before an event: `gap`, `hour`, `weekday`, `place` (B, T).

    Metrics by user: `item ne` and `feedback ne`, cross-entropies over those of training popularity and of the training
    share of each reaction (lower is better), `item gain` = 1 - item ne; `pairwise accuracy` of affinities over the
    pairs of an impression with different ratings (ties one half) and `user_auc` of likes; `ndcg@10` and `hit@10` of the
    next item over the full catalogue at each user's first event of the split, items of the user's past excluded.
    """

    name = "user log"
    primary = "pairwise accuracy"
    lower_is_better = frozenset({"item ne", "feedback ne"})

    def __init__(self, log: EventLog, *, impressions: int = 6, size: int = 8) -> None:
        self.log, self.impressions, self.size = log, impressions, size
        self.length = impressions * size
        hour = torch.div(log.time, 3600, rounding_mode="floor")
        self._columns: Batch = {
            "item": log.item + 1,
            "action": log.action,
            "gap": log.gap,
            "hour": hour % 24,
            "weekday": (torch.div(hour, 24, rounding_mode="floor") + 3) % 7,
            "place": log.place.clamp(max=PLACES - 1),
        }
        self._on_device: dict[torch.device, Batch] = {}
        train = log.part == 0
        self.counts = torch.bincount(log.item[train] + 1, minlength=log.num_items + 1)
        popularity = (self.counts[1:].double() + 1) / (self.counts[1:].sum() + log.num_items)
        self._item_base = F.pad(-popularity.log(), (1, 0))
        share = torch.bincount(log.action[train], minlength=ACTIONS).double()[1:] + 1
        liked = (log.action[train] >= LIKED).double().mean()
        like_base = torch.where(torch.arange(1, ACTIONS) >= LIKED, -liked.log(), -(1 - liked).log())
        self._feedback_base = F.pad(-(share / share.sum()).log() + like_base, (1, 0))
        self.head = F.pad(metrics.popularity_head(self.counts[1:], 0.1), (1, 0))
        place = torch.arange(len(log.user)) - log.begin
        opens = place % size == 0
        self._starts = torch.nonzero(opens & train & (place % (self.length // 2 // size * size or size) == 0)).squeeze(
            1
        )
        self._openings = torch.nonzero(opens).squeeze(1)

    def _on(self, device: torch.device) -> Batch:
        if device not in self._on_device:
            flat = self._columns | {"user": self.log.user, "part": self.log.part}
            self._on_device[device] = {name: value.to(device) for name, value in flat.items()}
        return self._on_device[device]

    def windows(self, start: Tensor, device: torch.device, *, last_part: int) -> tuple[Batch, Tensor]:
        """Windows (B,) that begin at events `start`, and the event at each place (B, T).

        Events of another user, or of a part after `last_part`, are padding.
        """
        flat, start = self._on(device), start.to(device)
        event = start[:, None] + torch.arange(self.length, device=device)
        inside = event < len(flat["item"])
        event = event.clamp(max=len(flat["item"]) - 1)
        real = inside & (flat["user"][event] == flat["user"][start, None]) & (flat["part"][event] <= last_part)
        return {name: torch.where(real, flat[name][event], 0) for name in self._columns}, event

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless batches of training windows, which overlap by half."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in self._starts[torch.randperm(len(self._starts), generator=generator)].split(batch_size):
                yield self.windows(chosen, device, last_part=0)[0]

    def held_out(self, split: Split, device: torch.device) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Windows that end with each impression of a split, (their batch, events (B, T), asked (B, T) bool).

        Only the events of the split in the last impression are asked about; so each is asked once.
        """
        part = 1 if split == "validation" else 2
        log = self.log
        end = (self._openings + self.size).clamp(max=len(log.user)) - 1
        end = torch.minimum(end, log.offsets[log.user[self._openings] + 1] - 1)
        wanted = self._openings[(log.part[end] >= part) & (log.part[self._openings] <= part)]
        start = torch.maximum(wanted - (self.impressions - 1) * self.size, log.begin[wanted])
        for chosen, opening in zip(start.split(128), wanted.split(128), strict=True):
            batch, event = self.windows(chosen, device, last_part=part)
            opening = opening.to(device)[:, None]
            asked = (event >= opening) & (event < opening + self.size) & (batch["item"] > 0)
            yield batch, event, asked & (self._on(device)["part"][event] == part)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of `model.answers` on the events of a split. Units are users."""
        asking: Any = model
        training = model.training
        model.eval()
        columns: dict[str, list[Tensor]] = {}

        def keep(name: str, value: Tensor) -> None:
            columns.setdefault(name, []).append(value.cpu())

        for batch, event, asked in self.held_out(split, device):
            answers: Answers = asking.answers(batch)
            user = self._on(device)["user"][event]
            keep("user", user[asked])
            keep("item", batch["item"][asked])
            keep("action", batch["action"][asked])
            keep("event", event[asked])
            if answers.state is not None and answers.items is not None:
                logits = answers.state[asked].float() @ answers.items.float().T
                logits[:, 0] = -torch.inf
                keep("item loss", F.cross_entropy(logits, batch["item"][asked], reduction="none"))
                keep("logits", logits)
            if answers.rating is not None and answers.like is not None:
                keep("feedback loss", feedback_loss(answers.rating[asked], answers.like[asked], batch["action"][asked]))
            if answers.affinity is not None:
                early = torch.arange(self.length, device=device) < (1 + DELAY) * self.size
                affinity = answers.affinity.float().masked_fill(early, torch.nan)
                keep("affinity", affinity[asked])
                keep("wins", self._pairs(affinity, batch["action"], asked))
                keep("owner", user[:, 0])
        model.train(training)
        return self._summarise({name: torch.cat(parts) for name, parts in columns.items()})

    def _pairs(self, affinity: Tensor, action: Tensor, asked: Tensor) -> Tensor:
        """Won and counted pairs of each window's asked events (B, 2); pairs lie within one impression."""

        def shaped(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, self.size)).flatten(0, 1)

        (first, second), (left, right) = pairs(shaped(affinity)), pairs(shaped(action))
        both = [part & ~a.isnan() for part, a in zip(pairs(shaped(asked)), (first, second), strict=True)]
        counted = both[0] & both[1] & (left != right)
        won = ((first - second) * (left - right) > 0).double() + 0.5 * (first == second).double()
        sums = torch.stack([(won * counted).sum(1), counted.double().sum(1)], 1)
        return sums.unflatten(0, (len(affinity), -1)).sum(1)

    def _summarise(self, found: dict[str, Tensor]) -> Evaluation:
        users = self.log.num_users
        user, item, action = found["user"], found["item"], found["action"]

        def total(value: Tensor, owner: Tensor = user) -> Tensor:
            return torch.zeros(users, dtype=torch.float64).index_add(0, owner, value.double())

        metric: dict[str, UnitMetric] = {}
        diagnostics = {"events": float(len(user))}
        if "item loss" in found:
            own, base = total(found["item loss"]), total(self._item_base[item])
            metric |= {"item ne": Ratio(own, base), "item gain": Ratio(own, base, transform=lambda ratio: 1 - ratio)}
            ranked, share = self._catalogue(found, user)
            metric |= ranked
            diagnostics["head share@10"] = share
        if "feedback loss" in found:
            metric["feedback ne"] = Ratio(total(found["feedback loss"]), total(self._feedback_base[action]))
        if "affinity" in found:
            won, counted = found["wins"].unbind(1)
            owner = found["owner"]
            metric["pairwise accuracy"] = Ratio(total(won, owner), total(counted, owner))
            known = ~found["affinity"].isnan()
            areas = torch.full((users,), torch.nan, dtype=torch.float64)
            label = (action[known] >= LIKED).float()
            values = metrics.user_auc(found["affinity"][known], label, user[known])
            areas[: len(values)] = values
            metric["user_auc"] = Mean(areas)
        return Evaluation(users, metric, diagnostics)

    def _catalogue(self, found: dict[str, Tensor], user: Tensor) -> tuple[dict[str, UnitMetric], float]:
        """Full-catalogue ranking at each user's first asked event; past items of the user are no candidates."""
        order = found["event"].argsort()
        first = order[torch.cat([torch.tensor([True]), user[order][1:] != user[order][:-1]])]
        event, owner = found["event"][first], user[first]
        begin = self.log.begin[event, None]
        position = event[:, None] + torch.arange(-int((event - begin[:, 0]).max()), 0)
        seen = torch.where(position >= begin, self.log.item[position.clamp(min=0)] + 1, 0)
        scores = found["logits"][first]
        rank = metrics.rank_of_target(scores, found["item"][first], F.pad(seen, (1, 0)))
        top = metrics.exclude_items(scores, seen).topk(min(10, self.log.num_items), dim=1).indices
        nothing = torch.full((self.log.num_users,), torch.nan, dtype=torch.float64)
        return {
            "ndcg@10": Mean(nothing.index_copy(0, owner, metrics.ndcg(rank, 10).double())),
            "hit@10": Mean(nothing.index_copy(0, owner, metrics.hit_rate(rank, 10).double())),
        }, float(metrics.head_share(top, self.head).mean())


def feedback_loss(rating: Tensor, like: Tensor, action: Tensor) -> Tensor:
    """Cross-entropy of the rating (N, 5) plus that of the like (N,) for actions (N,) 1..5, (N,) float32."""
    stars = F.cross_entropy(rating.float(), action - 1, reduction="none")
    return stars + metrics.log_loss(like, (action >= LIKED).float())
