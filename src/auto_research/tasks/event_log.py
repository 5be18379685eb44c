"""A user's whole log of explicit feedback, liked or not: every event with its item, its action and its context.

Nothing is dropped: an event is an exposure that the user reacted to, and the reaction is its rating. Each user's events
are divided in time order 80/10/10. Events of one moment keep the order of the file, which is the order of the log.

Letters: E events, U users, I items, G genres.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.impressions import chronological
from auto_research.data.sequences import Interactions, ItemTable, UserTable
from auto_research.layers.longer import gap_buckets
from auto_research.layers.towers import embedding_table

ACTIONS = 6
"""Action codes: the rating in whole stars, rounded up, from 1 to 5; 0 is padding."""
LIKED, LOVED = 4, 5
"""Least actions that count as a like and as a love."""
SESSION = 30 * 60
"""Seconds without an event after which a session is over."""


@dataclass(frozen=True)
class EventLog:
    """Flat columns (E,), sorted by (user, time).

    Attributes:
        item: 0-based item; action: 1..5; part: 0 training, 1 validation, 2 test; time: seconds.
        gap: code of the time since the user's event before, 0 for the first (`layers.longer.gap_buckets` + 1).
        place: number of events since the session began.
        offsets: (U + 1,) events of user u are offsets[u]:offsets[u + 1].
        genres, year: (I + 1, G) float and (I + 1,) codes of shifted items; row 0 is padding.
    """

    user: Tensor
    item: Tensor
    action: Tensor
    part: Tensor
    time: Tensor
    gap: Tensor
    place: Tensor
    offsets: Tensor
    genres: Tensor
    year: Tensor
    num_users: int
    num_items: int

    @classmethod
    def of(cls, interactions: Interactions, fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)) -> EventLog:
        """The log of all ratings of a data set."""
        part = torch.zeros(len(interactions), dtype=torch.int64)
        for number, chosen in enumerate(chronological(interactions, fractions)):
            part[torch.from_numpy(chosen)] = number
        user, time = torch.from_numpy(interactions.user), torch.from_numpy(interactions.time)
        first = torch.ones_like(user, dtype=torch.bool)
        first[1:] = user[1:] != user[:-1]
        seconds = torch.zeros_like(time)
        seconds[1:] = time[1:] - time[:-1]
        year = torch.from_numpy(interactions.items.year)
        decade = torch.where(year > 0, (year - 1900).clamp(0, 139) // 5 + 1, 0)
        genres = torch.from_numpy(interactions.items.genres).float()
        return cls(
            user=user,
            item=torch.from_numpy(interactions.item),
            action=torch.from_numpy(interactions.rating).ceil().long().clamp(1, ACTIONS - 1),
            part=part,
            time=time,
            gap=torch.where(first, 0, gap_buckets(seconds) + 1),
            place=since(first | (seconds > SESSION)),
            offsets=torch.from_numpy(interactions.offsets),
            genres=torch.cat([genres.new_zeros(1, genres.shape[1]), genres]),
            year=torch.cat([decade.new_zeros(1), decade]),
            num_users=interactions.num_users,
            num_items=interactions.num_items,
        )

    @property
    def years(self) -> int:
        """Number of year codes."""
        return 29

    @cached_property
    def begin(self) -> Tensor:
        """(E,) first event of each event's user."""
        return self.offsets[self.user]


def since(begins: Tensor) -> Tensor:
    """Number of events (E,) since the latest one at which `begins` (E,) is True, itself included; begins[0] is."""
    position = torch.arange(len(begins), device=begins.device)
    return position - torch.where(begins, position, 0).cummax(0).values


class Exposures(nn.Module):
    """φ(x), an item's vector from its id, genres and year, and ψ(a), an action's."""

    genres: Tensor
    year: Tensor

    def __init__(self, log: EventLog, width: int, *, content: bool = True) -> None:
        super().__init__()
        self.item, self.action = embedding_table(log.num_items + 1, width), embedding_table(ACTIONS, width)
        self.genre = nn.Linear(log.genres.shape[1], width, bias=False) if content else None
        self.years = embedding_table(log.years, width) if content else None
        shares = log.genres / log.genres.sum(1, keepdim=True).clamp(min=1)
        self.register_buffer("genres", shares, persistent=False)
        self.register_buffer("year", log.year, persistent=False)

    def forward(self, item: Tensor) -> Tensor:
        """Shifted items (...) -> (..., d)."""
        found = self.item(item)
        if self.genre is not None and self.years is not None:
            found = found + self.genre(self.genres[item]) + self.years(self.year[item])
        return found


def miniature(users: int = 6, items: int = 30, events: int = 40, *, seed: int = 0) -> EventLog:
    """A made-up log for specimens and tests; always the same for the same arguments."""
    return EventLog.of(miniature_ratings(users, items, events, seed=seed))


def miniature_ratings(users: int = 6, items: int = 30, events: int = 40, *, seed: int = 0) -> Interactions:
    """The ratings behind `miniature`, by users with demographics."""
    generator = np.random.default_rng(seed)
    table = replace(
        ItemTable.of_ids([str(i) for i in range(items)]),
        genres=generator.random((items, 3)) < 0.4,
        genre_names=("a", "b", "c"),
        year=1990 + np.arange(items) % 9,
    )
    repeats = -(-events // items)
    item = np.concatenate([np.argsort(generator.random((users, items)), axis=1) for _ in range(repeats)], axis=1)
    return Interactions.from_events(
        "miniature",
        user=np.repeat(np.arange(users), events),
        item=item[:, :events].ravel(),
        rating=generator.integers(1, 6, users * events).astype(np.float32),
        time=1_000_000 + np.cumsum(generator.integers(1, 900, users * events)),
        items=table,
        users=made_up_people(users),
    )


def made_up_people(users: int) -> UserTable:
    """Demographics of users 0..users-1 that differ among them."""
    return UserTable(
        gender=np.arange(users) % 2,
        age=15 + 7 * np.arange(users),
        occupation=np.arange(users) % 3,
        zip=np.arange(users) % 4,
        zip_names=("01", "12", "13", "9x"),
    )
