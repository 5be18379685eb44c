"""Tables, splits and padding, against plain loops."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.impressions import chronological
from auto_research.data.sequences import Interactions, ItemTable, UserTable, leave_one_out
from auto_research.runtime.errors import UserError

rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=60
)


def build(events: list[tuple[int, int, int, int]]) -> Interactions:
    """(user key, item, rating, time) rows; item names, genres and demographics derive from the keys."""
    user, item, rating, time = np.array(events, dtype=np.int64).T
    numbers = np.arange(7)
    items = ItemTable(
        raw_id=[f"i{n}" for n in numbers],
        title=[f"Item {n} ({1990 + n})" for n in numbers],
        genres=numbers[:, None] % np.array([2, 3]) == 0,
        genre_names=("even", "third"),
        year=1990 + numbers,
        brand=[f"b{n}" for n in numbers],
    )
    users = UserTable(gender=numbers % 2, age=20 + numbers, occupation=numbers, zip=numbers[::-1].copy())
    return Interactions.from_events("tiny", user, item, rating.astype(np.float32), time, items, users)


def as_rows(x: Interactions) -> list[tuple[int, str, float, int]]:
    """Events by what does not depend on indices: age stands for the user, the raw id for the item."""
    assert x.users is not None
    return [
        (int(x.users.age[u]), x.items.raw_id[i], float(r), int(t))
        for u, i, r, t in zip(x.user, x.item, x.rating, x.time, strict=True)
    ]


@settings(deadline=None)
@given(rows)
def test_from_events_keeps_every_event_in_time_order(events):
    x = build(events)
    expected = sorted(events, key=lambda e: (e[0], e[3]))  # Python's sort is stable, as the file order must be
    assert as_rows(x) == [(20 + u, f"i{i}", float(r), t) for u, i, r, t in expected]
    assert set(x.user.tolist()) == set(range(x.num_users))
    assert set(x.item.tolist()) == set(range(x.num_items))
    assert x.items.year.tolist() == [1990 + int(raw[1:]) for raw in x.items.raw_id]
    assert x.items.genres.tolist() == [[int(raw[1:]) % 2 == 0, int(raw[1:]) % 3 == 0] for raw in x.items.raw_id]
    assert x.items.brand == [f"b{raw[1:]}" for raw in x.items.raw_id]
    assert x.offsets.tolist() == [sum(e[0] < u for e in events) for u in sorted({e[0] for e in events})] + [len(events)]


@settings(deadline=None)
@given(rows, st.integers(1, 5), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_filters_agree_with_filtering_rows(events, min_rating, least, drawn, seed):
    x = build(events)
    assert as_rows(x.positive(min_rating)) == [row for row in as_rows(x) if row[2] >= min_rating]
    count = {row[0]: sum(other[0] == row[0] for other in as_rows(x)) for row in as_rows(x)}
    assert as_rows(x.with_min_events(least)) == [row for row in as_rows(x) if count[row[0]] >= least]
    subset = x.subset_users(drawn, seed)
    ages = {row[0] for row in as_rows(subset)}
    assert len(ages) == min(drawn, x.num_users)
    assert as_rows(subset) == [row for row in as_rows(x) if row[0] in ages]
    assert subset.fingerprint == x.subset_users(drawn, seed).fingerprint
    for part in (x.positive(min_rating), x.with_min_events(least), subset):
        assert (part.fingerprint == x.fingerprint) == (len(part) == len(x))
        assert set(part.item.tolist()) == set(range(part.num_items))


@settings(deadline=None)
@given(rows, st.integers(1, 5), st.integers(0, 3))
def test_a_split_of_fewer_users_keeps_their_sequences_and_cases(events, drawn, seed):
    x = build(events)
    split, subset = leave_one_out(x), leave_one_out(x).subset_users(drawn, seed)
    kept = leave_one_out(x.subset_users(drawn, seed))  # the same draw; only the items are numbered differently
    assert subset.num_users == kept.num_users == min(drawn, split.num_users)
    assert subset.num_items == split.num_items
    assert subset.users is not None
    assert kept.users is not None
    assert subset.users.age.tolist() == kept.users.age.tolist()
    assert subset.time is not None
    assert kept.time is not None
    assert subset.time.tolist() == kept.time.tolist()

    def named(part, padded: np.ndarray) -> list[str]:
        return [part.items_table.raw_id[i - 1] if i else "" for i in padded.ravel()]

    for name in ("train", "valid", "test"):
        for a, b in zip(subset.padded(name, 4), kept.padded(name, 4), strict=True):
            assert named(subset, a) == named(kept, b)
        assert subset.cases(name).user.tolist() == list(range(subset.num_users))


def test_no_events_are_no_error():
    x = build([(0, 1, 3, 1)]).positive(4)
    assert (len(x), x.num_users, x.num_items) == (0, 0, 0)
    split = leave_one_out(x)
    assert split.padded("test", 3)[0].shape == (0, 3)
    assert split.training_windows(3)[0].shape == (0, 3)
    for over in ("user", "all"):
        assert [len(part) for part in chronological(x, over=over)] == [0, 0, 0]
    assert x.fingerprint != split.fingerprint


def test_subset_users_depends_on_the_seed():
    x = build([(u, u % 7, 3, 0) for u in range(6)] * 2)
    assert len({x.subset_users(2, seed).fingerprint for seed in range(20)}) > 3


def test_fingerprint_covers_events_and_titles():
    events = [(0, 1, 3, 5), (0, 2, 4, 6), (1, 1, 5, 7)]
    x = build(events)
    assert x.fingerprint == build(events).fingerprint
    for changed in ((1, 1, 5, 8), (1, 1, 4, 7), (1, 2, 5, 7)):
        assert build([*events[:2], changed]).fingerprint != x.fingerprint
    renamed = replace(x.items, title=["Other", *x.items.title[1:]])
    assert replace(x, items=renamed).fingerprint != x.fingerprint


@settings(deadline=None)
@given(rows, st.integers(3, 5))
def test_leave_one_out_never_trains_on_a_target_at_or_after_its_time(events, min_events):
    x = build(events)
    split = leave_one_out(x, min_events)
    assert split.time is not None
    # times of the targets: the last two distinct (item, time) events of the user
    for u in range(x.num_users):
        own = list(dict.fromkeys(zip(x.item[x.user == u].tolist(), x.time[x.user == u].tolist(), strict=True)))
        train = slice(split.offsets[u], split.offsets[u + 1])
        trained = list(zip(split.items[train].tolist(), split.time[train].tolist(), strict=True))
        if len(own) < min_events:
            assert split.valid_target[u] == split.test_target[u] == -1
            assert trained == own
            continue
        (valid, valid_time), (test, test_time) = own[-2:]
        assert (split.valid_target[u], split.test_target[u]) == (valid, test)
        assert trained == own[:-2]
        assert not any(i == valid and t >= valid_time for i, t in trained)
        assert not any(i == test and t >= test_time for i, t in trained)
        assert all(t <= valid_time <= test_time for _, t in trained)
        for cases, history in ((split.valid, own[:-2]), (split.test, own[:-1])):
            assert cases.user[u] == u
            assert cases.items[cases.offsets[u] : cases.offsets[u + 1]].tolist() == [i for i, _ in history]


def test_leave_one_out_breaks_ties_by_file_order():
    split = leave_one_out(build([(0, 4, 3, 1), (0, 2, 3, 1), (0, 6, 3, 1), (0, 1, 3, 1)]))
    raw = split.items_table.raw_id
    assert [raw[i] for i in split.items] == ["i4", "i2"]
    assert (raw[split.valid_target[0]], raw[split.test_target[0]]) == ("i6", "i1")


def test_leave_one_out_counts_a_repeated_event_once():
    split = leave_one_out(build([(0, 1, 3, 1), (0, 2, 3, 2), (0, 3, 3, 3), (0, 3, 4, 3)]))
    raw = split.items_table.raw_id
    assert ([raw[i] for i in split.items], raw[split.valid_target[0]], raw[split.test_target[0]]) == (
        ["i1"],
        "i2",
        "i3",
    )


def test_leave_one_out_needs_three_events():
    with pytest.raises(ValueError, match="min_events"):
        leave_one_out(build([(0, 1, 3, 1)]), min_events=2)


@settings(deadline=None)
@given(rows, st.integers(1, 6))
def test_padded_agrees_with_a_loop(events, length):
    split = leave_one_out(build(events))
    for name in ("train", "valid", "test"):
        history, target = split.padded(name, length)
        cases = split.cases(name)
        assert history.shape == (split.num_users, length)
        for u in range(split.num_users):
            own = cases.items[cases.offsets[u] : cases.offsets[u + 1]].tolist()
            kept = [i + 1 for i in own][-length:]
            assert history[u].tolist() == [0] * (length - len(kept)) + kept
        assert target.tolist() == (cases.target + 1).tolist()
    train = split.cases("train")
    for u in range(split.num_users):
        own = split.items[split.offsets[u] : split.offsets[u + 1]].tolist()
        history = train.items[train.offsets[u] : train.offsets[u + 1]].tolist()
        assert history + [train.target[u]] * bool(own) == own
        assert own or train.target[u] == -1


@settings(deadline=None)
@given(rows, st.integers(1, 6))
def test_training_windows_predict_each_event_but_the_first_once(events, length):
    split = leave_one_out(build(events))
    sequence, target = split.training_windows(length)
    pairs = []
    for s, t in zip(sequence.tolist(), target.tolist(), strict=True):
        real = [p for p in range(length) if t[p]]
        assert real == list(range(length - len(real), length))
        assert real
        assert [s[p] for p in real[1:]] == [t[p] for p in real[:-1]]
        assert all(s[p] == 0 for p in range(length) if p not in real)
        pairs += [(s[p], t[p]) for p in real]
    expected, last = [], []
    for u in range(split.num_users):
        own = (split.items[split.offsets[u] : split.offsets[u + 1]] + 1).tolist()
        expected += list(itertools.pairwise(own))
        last += [own[:-1][-length:]] if len(own) > 1 else []
    assert sorted(pairs) == sorted(expected)
    only_last, _ = split.training_windows(length, every_position=False)
    assert [[i for i in row if i] for row in only_last.tolist()] == last


@settings(deadline=None)
@given(rows, st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.6, 0.0, 0.4), (1.0, 0.0, 0.0)]))
def test_chronological_parts_are_disjoint_and_ordered(events, fractions):
    x = build(events)
    for over in ("user", "all"):
        parts = chronological(x, fractions, over=over)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(x)))
        groups = range(x.num_users) if over == "user" else [None]
        for g in groups:
            times = [x.time[part[(x.user[part] == g)]] if g is not None else x.time[part] for part in parts]
            for earlier in range(3):
                for later in range(earlier + 1, 3):
                    if len(times[earlier]) and len(times[later]):
                        assert times[earlier].max() < times[later].min()


def test_chronological_divides_distinct_times_by_the_fractions():
    x = build([(u, 1, 3, t) for u in (0, 1) for t in range(10)])
    train, valid, test = chronological(x)
    assert (train.tolist(), valid.tolist(), test.tolist()) == ([*range(8), *range(10, 18)], [8, 18], [9, 19])
    train, valid, test = chronological(x, over="all")
    assert (len(train), len(valid), len(test)) == (16, 2, 2)
    with pytest.raises(ValueError, match="fractions"):
        chronological(x, (0.8, 0.1, 0.2))
    with pytest.raises(ValueError, match="over"):
        chronological(x, over="item")


def test_item_text_is_one_sentence_an_item():
    x = build([(0, n, 3, n) for n in range(7)])
    assert x.items.text()[:2] == ["Item 0 (1990); genres: even, third; brand: b0", "Item 1 (1991); brand: b1"]
    assert x.items.text("title")[3] == "Item 3 (1993)"
    with pytest.raises(UserError, match="no item description"):
        x.items.text("title", "description")
    with pytest.raises(ValueError, match="unknown text field"):
        x.items.text("titel")
    with pytest.raises(UserError, match="no titles"):
        ItemTable.of_ids(["a", "b"]).text()
    assert ItemTable.of_ids(["a"], ["8.5&rdquo; &amp; more"]).text() == ["8.5” & more"]


def test_tables_refuse_columns_of_another_length():
    with pytest.raises(ValueError, match="brand"):
        replace(ItemTable.of_ids(["a", "b"]), brand=["x"])
    x = build([(0, 1, 3, 1), (0, 2, 3, 2)])
    with pytest.raises(ValueError, match="sorted"):
        replace(x, time=x.time[::-1])
