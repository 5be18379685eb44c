"""Splits of interactions in time, for tasks that predict each event (a click, a rating) by itself."""

from __future__ import annotations

import numpy as np

from auto_research.data.sequences import Ids, Interactions


def chronological(
    interactions: Interactions,
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    *,
    over: str = "user",
) -> tuple[Ids, Ids, Ids]:
    """Event indices `(E_train,)`, `(E_valid,)`, `(E_test,)`: the earliest events train, the latest test.

    With `over="user"` every user's events are divided by `fractions`, part sizes rounded up in favour of the
    earlier part; with `over="all"` the events of all users are divided at two moments, as in serving. Events
    at the same time (of the same user, or of all) are never divided: they stay in the earlier part. So all
    training events lie strictly before validation, and these before test, for each user or altogether.
    Indices ascend, that is, they are ordered by (user, time).
    """
    if len(fractions) != 3 or min(fractions) < 0 or fractions[0] <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"fractions must be three numbers that add up to 1, the first above 0, not {fractions}")
    if over == "user":
        order = np.arange(len(interactions))
        group = interactions.user
    elif over == "all":
        order = np.argsort(interactions.time, kind="stable")
        group = np.zeros(len(interactions), dtype=np.int64)
    else:
        raise ValueError(f"over must be 'user' or 'all', not {over!r}")
    time = interactions.time[order]
    position = np.arange(len(order))
    begins_group = np.ones(len(order), dtype=bool)
    begins_group[1:] = group[1:] != group[:-1]
    begins_tie = begins_group.copy()
    begins_tie[1:] |= time[1:] != time[:-1]
    begin = np.maximum.accumulate(np.where(begins_group, position, 0))
    size = np.bincount(group, minlength=1)[group]
    # the place in its group of the first event at the same time
    rank = np.maximum.accumulate(np.where(begins_tie, position, 0)) - begin
    part = np.zeros(len(order), dtype=np.int64)
    for share in (fractions[0], fractions[0] + fractions[1]):
        part += rank >= np.ceil(size * share - 1e-9)
    part_of_event = np.empty_like(part)
    part_of_event[order] = part
    train, valid, test = (np.flatnonzero(part_of_event == p) for p in range(3))
    return train, valid, test
