"""Interactions of users with items, and their split into sequences to train on and events to predict.

Everything is numpy, flat and vectorised. A ragged list of sequences is kept as CSR: one array `items` and
`offsets` of one more entry than there are sequences; sequence `u` is `items[offsets[u]:offsets[u + 1]]`.

Indices in these tables start at 0. *Inside models 0 is padding and item `i` is `i + 1`*: `padded` and
`training_windows` return those shifted ids, padded on the left so that the latest event stands last.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from auto_research.runtime.errors import UserError

Ids: TypeAlias = NDArray[np.int64]
Split: TypeAlias = Literal["train", "valid", "test"]

TEXT_FIELDS = ("title", "genres", "brand", "category", "description")


@dataclass(frozen=True)
class ItemTable:
    """What is known of `I` items; row `i` describes item index `i`.

    `raw_id`: the identifier of the published files. `title`: "" where the data set has none.
    `genres (I, G) bool` with `genre_names` of length G. `year (I,) int64`, 0 where unknown.
    `semantic_ids (I, L) int64`: published codes, one level a column, where the data set comes with them.
    """

    raw_id: list[str]
    title: list[str]
    genres: NDArray[np.bool_]
    genre_names: tuple[str, ...]
    year: Ids
    brand: list[str] | None = None
    category: list[str] | None = None
    description: list[str] | None = None
    semantic_ids: Ids | None = None

    def __post_init__(self) -> None:
        for column in fields(self):
            value = getattr(self, column.name)
            if column.name != "genre_names" and value is not None and len(value) != len(self.raw_id):
                raise ValueError(f"ItemTable.{column.name} has {len(value)} rows, raw_id {len(self.raw_id)}")
        if self.genres.shape != (len(self.raw_id), len(self.genre_names)):
            raise ValueError(f"ItemTable.genres has shape {self.genres.shape}, not (I, {len(self.genre_names)})")

    def __len__(self) -> int:
        return len(self.raw_id)

    @classmethod
    def of_ids(cls, raw_id: Sequence[str], title: Sequence[str] | None = None) -> Self:
        """A table that knows identifiers and, perhaps, titles only."""
        count = len(raw_id)
        return cls(
            raw_id=list(raw_id),
            title=[""] * count if title is None else list(title),
            genres=np.zeros((count, 0), dtype=bool),
            genre_names=(),
            year=np.zeros(count, dtype=np.int64),
        )

    @property
    def has_text(self) -> bool:
        """Whether any item has a title."""
        return any(self.title)

    def take(self, index: Ids) -> Self:
        """The rows `index (J,)`, in that order."""

        def rows(column: list[str]) -> list[str]:
            return [column[i] for i in index.tolist()]

        return replace(
            self,
            raw_id=rows(self.raw_id),
            title=rows(self.title),
            genres=self.genres[index],
            year=self.year[index],
            brand=None if self.brand is None else rows(self.brand),
            category=None if self.category is None else rows(self.category),
            description=None if self.description is None else rows(self.description),
            semantic_ids=None if self.semantic_ids is None else self.semantic_ids[index],
        )

    def text(self, *names: str) -> list[str]:
        """One sentence an item, such as "Toy Story (1995); genres: Comedy, Children".

        `names` are taken from `TEXT_FIELDS`; without any, all of them that the data set has but the
        description. An item without a value for a field leaves it out; HTML entities in published titles are
        resolved. UserError if the data set has no text.
        """
        if not self.has_text:
            raise UserError(
                "This data set has item ids only, no titles: choose one with item text, such as "
                "ml-latest-small or office-products."
            )
        for name in names:
            if name not in TEXT_FIELDS:
                raise ValueError(f"unknown text field {name!r}; the fields are {', '.join(TEXT_FIELDS)}")
            if name not in ("title", "genres") and getattr(self, name) is None:
                raise UserError(f"This data set has no item {name}: leave that field out.")
        chosen = names or tuple(f for f in TEXT_FIELDS[:-1] if f in ("title", "genres") or getattr(self, f))
        columns = [self._labelled(name) for name in chosen]
        return [html.unescape("; ".join(filter(None, parts))) for parts in zip(*columns, strict=True)]

    def _labelled(self, name: str) -> list[str]:
        if name == "genres":
            values = [", ".join(self.genre_names[g] for g in np.flatnonzero(row).tolist()) for row in self.genres]
        else:
            values = getattr(self, name)
        return list(values) if name == "title" else [f"{name}: {v}" if v else "" for v in values]


@dataclass(frozen=True)
class UserTable:
    """Demographics of `U` users as int64 arrays `(U,)`.

    `gender`, `occupation` and `zip` are codes into the sorted names beside them; `age` is the published number
    (years in MovieLens 100K; in MovieLens 1M the lower end of its age group, 1 meaning under 18).
    """

    gender: Ids
    age: Ids
    occupation: Ids
    zip: Ids
    gender_names: tuple[str, ...] = ()
    occupation_names: tuple[str, ...] = ()
    zip_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.gender)

    def take(self, index: Ids) -> Self:
        """The rows `index (V,)`, in that order; codes keep their meaning."""
        return replace(
            self,
            gender=self.gender[index],
            age=self.age[index],
            occupation=self.occupation[index],
            zip=self.zip[index],
        )


@dataclass(frozen=True)
class Interactions:
    """`E` events sorted by (user, time); events of one user at the same time keep the order of the file.

    `user (E,) int64` in 0..U-1, `item (E,) int64` in 0..I-1, `rating (E,) float32`,
    `time (E,) int64` in seconds since 1970 UTC (or the position, where a data set publishes no time).
    Every user and every item of the tables has at least one event.
    """

    name: str
    user: Ids
    item: Ids
    rating: NDArray[np.float32]
    time: Ids
    items: ItemTable
    users: UserTable | None = None

    def __post_init__(self) -> None:
        if not len(self.user) == len(self.item) == len(self.rating) == len(self.time):
            raise ValueError("user, item, rating and time must have one entry an event")
        step = np.diff(self.user)
        if np.any(step < 0) or np.any((step == 0) & (np.diff(self.time) < 0)):
            raise ValueError("events must be sorted by (user, time): build them with Interactions.from_events")
        if len(self.item) and not 0 <= self.item.min() <= self.item.max() < len(self.items):
            raise ValueError(f"item indices must lie in 0..{len(self.items) - 1}")

    @classmethod
    def from_events(
        cls,
        name: str,
        user: Ids,
        item: Ids,
        rating: NDArray[np.floating],
        time: Ids,
        items: ItemTable,
        users: UserTable | None = None,
    ) -> Self:
        """Sort events `(E,)` by (user, time), ties in the given order, and reindex without gaps.

        `item` indexes `items`; `user` is any non-negative integer key, and indexes `users` where given.
        Users keep the order of their keys, items the order of their table; those without events are dropped.
        """
        order = np.lexsort((time, user))  # stable: ties keep the order of the file
        known_users, user_index = np.unique(user[order], return_inverse=True)
        known_items, item_index = np.unique(item[order], return_inverse=True)
        return cls(
            name=name,
            user=user_index.astype(np.int64, copy=False),
            item=item_index.astype(np.int64, copy=False),
            rating=rating[order].astype(np.float32, copy=False),
            time=time[order].astype(np.int64, copy=False),
            items=items if len(known_items) == len(items) else items.take(known_items),
            users=None if users is None else users.take(known_users),
        )

    def __len__(self) -> int:
        return len(self.user)

    @property
    def num_users(self) -> int:
        return int(self.user[-1]) + 1 if len(self.user) else 0

    @property
    def num_items(self) -> int:
        return len(self.items)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the events and of the items' identifiers and titles."""
        return _fingerprint((self.user, self.item, self.rating, self.time), self.items)

    @property
    def offsets(self) -> Ids:
        """`(U + 1,)`: events of user `u` are `offsets[u]:offsets[u + 1]`."""
        return np.searchsorted(self.user, np.arange(self.num_users + 1)).astype(np.int64)

    def where(self, keep: NDArray[np.bool_]) -> Self:
        """The events marked in `keep (E,)`, reindexed."""
        return self.from_events(
            self.name,
            self.user[keep],
            self.item[keep],
            self.rating[keep],
            self.time[keep],
            self.items,
            self.users,
        )

    def positive(self, min_rating: float) -> Self:
        """The events rated at least `min_rating`, reindexed."""
        return self.where(self.rating >= min_rating)

    def with_min_events(self, n: int) -> Self:
        """The events of users who have at least `n` of them, reindexed."""
        return self.where((np.diff(self.offsets) >= n)[self.user])

    def subset_users(self, n: int, seed: int) -> Self:
        """The events of `n` users drawn without replacement (of all, if there are no more), reindexed."""
        return self.where(_draw(self.num_users, n, seed)[self.user])


@dataclass(frozen=True)
class Cases:
    """`R` predictions to make: from a history, the next item.

    `user (R,) int64`: whose; the unit to resample in a bootstrap. `items`, `offsets (R + 1,)`: CSR of the
    histories, oldest first. `target (R,) int64`: the item index that came next, -1 where there is none.
    """

    user: Ids
    items: Ids
    offsets: Ids
    target: Ids

    def __len__(self) -> int:
        return len(self.target)

    def of_users(self, chosen: NDArray[np.bool_]) -> Self:
        """The cases of the users marked in `chosen (U,)`, who are numbered anew without gaps."""
        keep = chosen[self.user]
        length = np.diff(self.offsets)
        return replace(
            self,
            user=(np.cumsum(chosen) - 1)[self.user[keep]],
            items=self.items[np.repeat(keep, length)],
            offsets=offsets_of(length[keep]),
            target=self.target[keep],
        )


@dataclass(frozen=True)
class SequenceSplit:
    """Training sequences of `U` users, and the later events to predict in validation and in test.

    `items (N,) int64`, `offsets (U + 1,)`: CSR of the training sequences, oldest event first. `time (N,)`:
    their times, where known. `valid` and `test`: what is predicted from what. After `leave_one_out` they have one
    case a user, in the order of users (target -1 for a user too short); published splits may have several
    cases a user, or none.
    """

    name: str
    items: Ids
    offsets: Ids
    valid: Cases
    test: Cases
    items_table: ItemTable
    users: UserTable | None = None
    time: Ids | None = field(default=None, repr=False)

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        return len(self.items_table)

    @property
    def valid_target(self) -> Ids:
        """`(R,)` item index to predict in each validation case, -1 = none."""
        return self.valid.target

    @property
    def test_target(self) -> Ids:
        """`(R,)` item index to predict in each test case, -1 = none."""
        return self.test.target

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of sequences, cases, and the items' identifiers and titles."""
        arrays = [self.items, self.offsets]
        for cases in (self.valid, self.test):
            arrays += [cases.user, cases.items, cases.offsets, cases.target]
        return _fingerprint(arrays, self.items_table)

    def cases(self, split: Split) -> Cases:
        """The cases of a split. "train": each user's last training item, predicted from those before it."""
        if split == "valid":
            return self.valid
        if split == "test":
            return self.test
        if split != "train":
            raise ValueError(f"split must be 'train', 'valid' or 'test', not {split!r}")
        begin, end = self.offsets[:-1], self.offsets[1:]
        some = end > begin
        target = np.full(self.num_users, -1, dtype=np.int64)
        target[some] = self.items[end[some] - 1]
        kept = np.ones(len(self.items), dtype=bool)
        kept[end[some] - 1] = False
        offsets = offsets_of(end - begin - some)
        return Cases(np.arange(self.num_users, dtype=np.int64), self.items[kept], offsets, target)

    def padded(self, split: Split, max_length: int) -> tuple[Ids, Ids]:
        """Histories `(R, max_length)` and targets `(R,)` of a split, as shifted ids.

        The latest `max_length` events, padded on the left with 0; a target of 0 means there is none.
        """
        cases = self.cases(split)
        history = left_pad(cases.items, cases.offsets[:-1], cases.offsets[1:], max_length)
        return history, cases.target + 1

    def subset_users(self, n: int, seed: int) -> Self:
        """`n` users drawn without replacement (all, if there are no more), and their cases; items stay as they are."""
        drawn = _draw(self.num_users, n, seed)
        users = np.flatnonzero(drawn)
        events = np.repeat(drawn, np.diff(self.offsets))
        return replace(
            self,
            items=self.items[events],
            offsets=offsets_of(np.diff(self.offsets)[users]),
            valid=self.valid.of_users(drawn),
            test=self.test.of_users(drawn),
            users=None if self.users is None else self.users.take(users),
            time=None if self.time is None else self.time[events],
        )

    def training_windows(self, max_length: int, every_position: bool = True) -> tuple[Ids, Ids]:
        """Next-item training rows `(W, max_length)`: `sequence`, and `target` = the sequence one step later.

        Shifted ids, left padded with 0; position `t` predicts `target[:, t]` from `sequence[:, :t + 1]`.
        A user's sequence is cut from its end into windows so that each of its events but the first is a
        target exactly once; with `every_position=False` only the last window of each user is kept (SASRec).
        Users with fewer than two training events give no row.
        """
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, not {max_length}")
        begin, end = self.offsets[:-1], self.offsets[1:]
        windows = -(-np.maximum(end - begin - 1, 0) // max_length)
        if not every_position:
            windows = np.minimum(windows, 1)
        row = np.repeat(np.arange(self.num_users), windows)
        # nth window of its user, counted from the end of the sequence
        nth = np.arange(len(row)) - np.repeat(offsets_of(windows)[:-1], windows)
        stop = end[row] - nth * max_length
        sequence = left_pad(self.items, begin[row], stop - 1, max_length)
        target = left_pad(self.items, begin[row] + 1, stop, max_length)
        return sequence, target


def left_pad(items: Ids, begin: Ids, end: Ids, max_length: int) -> Ids:
    """`(R, max_length)`: the last `max_length` of `items[begin[r]:end[r]]`, each plus 1, after zeros."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, not {max_length}")
    position = end[:, None] - max_length + np.arange(max_length)
    real = position >= begin[:, None]
    padded = np.zeros(position.shape, dtype=np.int64)
    padded[real] = items[position[real]] + 1
    return padded


def leave_one_out(interactions: Interactions, min_events: int = 3) -> SequenceSplit:
    """Split each user in time order: the last event is the test target, the one before it the validation target.

    Events of one user at the same time are ordered as in the file; one that repeats user, item and time of an
    earlier event is left out, so that a target never stands in training at its own time. The history of a
    validation case is the training sequence; that of a test case is the training sequence and the validation
    target. A user with fewer than `min_events` (at least 3) events is not evaluated: all their events are training
    and both targets are -1.
    """
    if min_events < 3:
        raise ValueError("leave_one_out needs min_events >= 3: one event each to train, validate and test")
    interactions = _without_repeats(interactions)
    offsets, item = interactions.offsets, interactions.item
    user = np.arange(interactions.num_users, dtype=np.int64)
    count = np.diff(offsets)
    evaluated = count >= min_events
    from_end = offsets[interactions.user + 1] - np.arange(len(item))  # 1 for a user's last event, 2 before it, ...
    of_evaluated = evaluated[interactions.user]

    def target(place: int) -> Ids:
        chosen = np.full(len(user), -1, dtype=np.int64)
        chosen[evaluated] = item[of_evaluated & (from_end == place)]
        return chosen

    in_train = ~of_evaluated | (from_end > 2)
    before_test = ~of_evaluated | (from_end > 1)
    train, train_offsets = item[in_train], offsets_of(count - 2 * evaluated)
    return SequenceSplit(
        name=interactions.name,
        items=train,
        offsets=train_offsets,
        valid=Cases(user, train, train_offsets, target(2)),
        test=Cases(user, item[before_test], offsets_of(count - evaluated), target(1)),
        items_table=interactions.items,
        users=interactions.users,
        time=interactions.time[in_train],
    )


def _without_repeats(interactions: Interactions) -> Interactions:
    """Leave out events that repeat the user, item and time of an earlier one."""
    key = (interactions.item, interactions.time, interactions.user)
    order = np.lexsort(key)
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in key:
        same &= column[order][1:] == column[order][:-1]
    if not same.any():
        return interactions
    keep = np.ones(len(order), dtype=bool)
    keep[order[1:][same]] = False
    return interactions.where(keep)


def _draw(count: int, n: int, seed: int) -> NDArray[np.bool_]:
    """`(count,)`: which `n` of them are drawn without replacement."""
    if n < 1:
        raise ValueError(f"a subset needs at least one user, not {n}")
    drawn = np.zeros(count, dtype=bool)
    drawn[np.random.default_rng(seed).permutation(count)[:n]] = True
    return drawn


def offsets_of(lengths: Ids) -> Ids:
    """CSR offsets `(U + 1,)` of sequences of `lengths (U,)`."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _fingerprint(arrays: Sequence[NDArray[np.generic]], items: ItemTable) -> str:
    digest = hashlib.sha256()
    for part in _parts(arrays, items):
        digest.update(len(part).to_bytes(8, "little"))  # so that parts cannot run into each other
        digest.update(part)
    return digest.hexdigest()


def _parts(arrays: Sequence[NDArray[np.generic]], items: ItemTable) -> Iterator[bytes]:
    for array in arrays:  # little endian on every machine
        yield array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    for column in (items.raw_id, items.title):
        yield "\x00".join(column).encode("utf-8", "surrogatepass")
