"""The click task by request: one user at one moment, and the next items they rated as the candidates.

All that a model sees of a request and of its candidates was known strictly before the request began; what happened at
one candidate is unknown at the others. Fields are those of `ClickTask`, divided into `request_fields` and
`candidate_fields`.

Letters: B requests, m candidates, T events of the history, G genres, E events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from auto_research.data.sequences import Interactions
from auto_research.tasks.base import Batch, Split
from auto_research.tasks.click import SIDES, ClickTask
from auto_research.tasks.event_log import miniature_ratings, since


class RequestClicks(ClickTask):
    """`ClickTask` whose batches hold requests of up to `width` consecutive events of a user and of a part of the split.

    Batches: a tensor a field of `request_fields` (B, ...) and the history (B, T, ...) as of the request's first event;
    of the candidates, padded with zeros on the right, `item`, `year` (B, m), `genres` (B, m, G) and the statistics
    (B, m, 2), in `statistics` (B, m, 6) together; `label` (B, m), NaN at padding. `scores(batch)` gives logits (B, m).
    """

    name = "request clicks"

    def __init__(self, interactions: Interactions, *, width: int = 8, **options: Any) -> None:
        super().__init__(interactions, **{**options, "detailed": True})
        if width < 1:
            raise ValueError(f"a request needs room for a candidate, got a width of {width}")
        self.width = width
        part = torch.zeros_like(self.user)
        part[self.validation], part[self.test] = 1, 2
        run = 3 * self.user + part
        fresh = torch.ones_like(run, dtype=torch.bool)
        fresh[1:] = run[1:] != run[:-1]
        begins = since(fresh) % width == 0
        first = torch.nonzero(begins).squeeze(1)
        start = first[begins.long().cumsum(0) - 1]  # of each event's request
        known = self._past.statistics(self.user, self.item, self.moment[start], self.genres[self.item])
        self._tables["pair"]["known statistics"] = known
        self._tables["request"] = {"first": first, "count": torch.diff(first, append=torch.tensor([len(begins)]))}
        self.requests = {
            name: torch.nonzero(part[first] == number).squeeze(1)
            for number, name in enumerate(("train", "validation", "test"))
        }

    def shown(self, request: Tensor, device: torch.device) -> Batch:
        """Requests (B,) with their candidates as a batch; see the class."""
        tables, request = self._on(device), request.to(device)
        first = tables["request"]["first"][request]
        column = torch.arange(self.width, device=device)
        real = column < tables["request"]["count"][request, None]
        event = torch.where(real, first[:, None] + column, first[:, None])
        item = tables["flat"]["item"][event]

        def padded(value: Tensor) -> Tensor:
            return value * real.view(*real.shape, *[1] * (value.dim() - 2))

        own = {name: padded(value[item]) for name, value in tables["item"].items()}
        statistics = padded(tables["pair"]["known statistics"][event])
        sides = dict(zip(SIDES, statistics.split(list(SIDES.values()), dim=-1), strict=True))
        batch = self.rows(first, device)
        return {
            **batch,
            **own,
            "item statistics": sides["item statistics"],
            "cross statistics": sides["cross statistics"],
            "statistics": statistics,
            "label": tables["flat"]["label"][event].masked_fill(~real, torch.nan),
        }

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless batches of `batch_size` training requests; every pass has its own order, decided by `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        requests = self.requests["train"]
        while True:
            for chosen in requests[torch.randperm(len(requests), generator=generator)].split(batch_size):
                yield self.shown(chosen, device)

    def steps_per_pass(self, batch_size: int) -> int:
        """Updates that visit every training request once."""
        return -(-len(self.requests["train"]) // batch_size)

    def _scores(self, model: nn.Module, split: Split, device: torch.device) -> Tensor:
        """Logits float32 of the events of a split, in their order, on the CPU."""
        found = []
        for chosen in self.requests[split].split(512):
            batch = self.shown(chosen, device)
            found.append(model.scores(batch).float().cpu()[~batch["label"].cpu().isnan()])
        return torch.cat(found)


def miniature_requests(
    users: int = 8, items: int = 20, events: int = 14, *, history_length: int = 6, width: int = 3
) -> RequestClicks:
    """A made-up task of a few users with demographics, for specimens and tests; always the same for the same sizes."""
    return RequestClicks(miniature_ratings(users, items, events), history_length=history_length, width=width)
