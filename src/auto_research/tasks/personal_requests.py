"""Requests together with what is known about their user when they begin: the user's side of a ranking model.

Beside the history these are the user's id, demographics where the data set has them, the context of the request and
running statistics of what the user liked. All of it was known before the first candidate was shown.

Letters: B requests, m candidates, R requests of the log.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.data.sequences import Interactions
from auto_research.layers.longer import GAPS
from auto_research.layers.towers import Field
from auto_research.tasks.base import Batch, Evaluation, Split
from auto_research.tasks.click import PRIOR, profile_codes
from auto_research.tasks.event_log import ACTIONS, LIKED, EventLog, miniature_ratings
from auto_research.tasks.request_ranking import RequestRanking, candidates_apart


class PersonalRequests(RequestRanking):
    """`RequestRanking` whose batches also hold the fields of `user_fields`, one value a request.

    Groups of fields: user, profile (only where the data set has demographics), context (hour, weekday, time since the
    last request, last action) and the user's statistics: share of likes among earlier events, drawn to one half by
    `PRIOR` pseudo-events and scaled to ±1, and the logarithm of their number.

    On test the diagnostic `packed gap` is the largest difference between the scores of the candidates of some requests
    in one pack and those of each candidate alone.
    """

    def __init__(self, interactions: Interactions, *, history: int = 32, width: int = 8) -> None:
        super().__init__(EventLog.of(interactions), history=history, width=width)
        log, first = self.log, self.first
        begin = log.begin[first]
        likes = F.pad((log.action >= LIKED).double().cumsum(0), (1, 0))
        seen = (first - begin).double()
        share = (likes[first] - likes[begin] + 0.5 * PRIOR) / (seen + PRIOR)
        hour = torch.div(log.time[first], 3600, rounding_mode="floor")
        # Named apart from the age of an event.
        profile = {f"user {name}": code for name, code in profile_codes(interactions, log.user[first]).items()}
        self._personal: Batch = {
            "user": log.user[first] + 1,
            **profile,
            "hour": hour % 24,
            "weekday": (torch.div(hour, 24, rounding_mode="floor") + 3) % 7,  # 1 January 1970 was a Thursday
            "last_action": torch.where(seen > 0, log.action[(first - 1).clamp(min=0)], 0),
            "user statistics": torch.stack([2 * share - 1, seen.log1p() / 3 - 1], 1).float(),
        }
        self._personal_on: dict[torch.device, Batch] = {}
        self.user_fields = (
            Field("user", "user", "id", log.num_users + 1),
            *(Field(name, "profile", "id", int(code.max()) + 1) for name, code in profile.items()),
            Field("hour", "context", "id", 24),
            Field("weekday", "context", "id", 7),
            Field("wait_now", "context", "id", GAPS + 1),
            Field("last_action", "context", "id", ACTIONS),
            Field("user statistics", "user statistics", "dense", 2),
        )

    def rows(self, request: Tensor, device: torch.device) -> Batch:
        """Requests (B,) as a batch; see the class."""
        if device not in self._personal_on:
            self._personal_on[device] = {name: value.to(device) for name, value in self._personal.items()}
        request = request.to(device)
        own = {name: value[request] for name, value in self._personal_on[device].items()}
        return super().rows(request, device) | own

    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of `model.scores` on every candidate of a split's requests. Units are users."""
        found = super().evaluate(model, split, device)
        if split == "test":
            chosen = self.requests[split]
            some = chosen[torch.linspace(0, len(chosen) - 1, min(16, len(chosen))).long()]
            found.diagnostics["packed gap"] = packed_gap(model, self.rows(some, device))
        return found


@torch.no_grad()
def packed_gap(model: Any, batch: Batch) -> float:
    """Largest difference of `model.scores` between candidates (B, m) in one pack a request and each alone."""
    was_training = model.training
    model.eval()
    shown = batch["candidate"] > 0
    packed, alone = model.scores(batch).float(), model.scores(candidates_apart(batch)).float()
    model.train(was_training)
    return float((packed - alone.view_as(packed))[shown].abs().max())


def miniature(
    users: int = 6, items: int = 30, events: int = 40, *, history: int = 8, width: int = 4
) -> PersonalRequests:
    """A made-up task for specimens and tests; always the same for the same arguments."""
    return PersonalRequests(miniature_ratings(users, items, events), history=history, width=width)
