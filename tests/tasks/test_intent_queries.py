"""Phrases, actions, scenes, the split by user, co-purchases of training users, and the metrics of written queries."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.sequences import Cases, ItemTable, SequenceSplit, offsets_of
from auto_research.tasks import intent_queries as iq
from auto_research.tasks.bm25 import BM25Index, words
from auto_research.tasks.query_retrieval import FrequentPhrase, LastPhrase, PhraseTransitions, QueryTask

TITLES = [
    "Pilot G2 Gel Pens, Fine Point, 12 Count", "Pentel EnerGel Gel Pen, Black", "Zebra Sarasa Gel Pens",
    "Canon Black Ink Cartridge", "HP 60 Ink Cartridges", "Epson 200 Ink Cartridge", "KUM Pencil Sharpener",
    "X-Acto Electric Pencil Sharpener", "Deluxe Pencil Sharpener Blue", "Mystery Thing",
]  # fmt: skip
BRANDS = ["Pilot", "Pentel", "Zebra", "Canon", "HP", "Epson", "KUM", "X-Acto", "", "Nobody"]


def table():
    base = ItemTable.of_ids([str(i) for i in range(len(TITLES))], TITLES)
    return ItemTable(raw_id=base.raw_id, title=TITLES, genres=base.genres, genre_names=(), year=base.year, brand=BRANDS)


def make_data(train, heldout, **options):
    """Users of `heldout` have a test row (history, target); everybody has a training sequence."""
    items = [i for sequence in train for i in sequence]
    users = np.array([u for u, _, _ in heldout], dtype=np.int64)
    histories = [h for _, h, _ in heldout]
    cases = Cases(
        users,
        np.array([i for h in histories for i in h], dtype=np.int64),
        offsets_of(np.array([len(h) for h in histories])),
        np.array([t for _, _, t in heldout], dtype=np.int64),
    )
    split = SequenceSplit(
        "tiny", np.array(items, dtype=np.int64), offsets_of(np.array([len(s) for s in train])), cases, cases, table()
    )
    return iq.IntentData.of_split(split, iq.QueryCatalogue.of_products(table(), least=3), **options)


def test_a_later_start_draws_other_held_out_users():
    train = [[0, 1, 2] for _ in range(20)]
    heldout = [(user, [0, 1], 2) for user in range(20)]
    first = make_data(train, heldout, test_users=5, validation_users=3)
    later = make_data(train, heldout, test_users=5, validation_users=3, start=0.5)
    seen = {case.user for case in (*first.test, *first.validation)}
    assert len(seen) == 8
    assert not seen & {case.user for case in (*later.test, *later.validation)}
    assert seen <= set(later.train_users)


def test_type_phrases_are_brand_free_and_written_as_most_titles_do():
    phrases = iq.type_phrases(TITLES, BRANDS, least=3)
    assert phrases == ["gel pens"] * 3 + ["ink cartridge"] * 3 + ["pencil sharpener"] * 3 + [""]
    catalogue = iq.QueryCatalogue.of_products(table(), least=3)
    for phrase, brand in zip(catalogue.phrase, BRANDS, strict=True):
        assert not set(words(phrase)) & set(words(brand))


def test_a_rare_modifier_is_dropped_and_a_rare_head_gives_no_phrase():
    titles = ["purple pens", "gel pens", "gel pens", "green felt chair"]
    assert iq.type_phrases(titles, [""] * 4, least=2) == ["pens", "gel pens", "gel pens", ""]


def test_film_queries_are_decade_and_first_genre():
    genres = np.array([[1, 1], [0, 1], [0, 0]], dtype=bool)
    base = ItemTable.of_ids(["a", "b", "c"], ["A (1994)", "B (2003)", "C"])
    films = ItemTable(
        raw_id=base.raw_id, title=base.title, genres=genres, genre_names=("Comedy", "Drama"),
        year=np.array([1994, 2003, 0]),
    )  # fmt: skip
    catalogue = iq.QueryCatalogue.of_films(films)
    assert catalogue.phrase == ["90s comedy", "2000s drama", ""]
    assert catalogue.paraphrase["90s comedy"] == "funny film of the 90s"
    assert "90s" in catalogue.documents[0]


def test_actions_by_hand():
    types = ["pen", "pen", "ink", "box", "tape"]
    brands = ["", "", "hp", "hp", "3m"]
    expected = [iq.CLICK, iq.CART, iq.CLICK, iq.FAVORITE, iq.PURCHASE]
    assert iq.assign_actions(types, brands) == expected
    assert iq.scene_of(expected) == iq.FAVORITE
    assert iq.scene_of([iq.PURCHASE]) == iq.PURCHASE


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_actions_never_depend_on_later_events(types):
    whole = iq.assign_actions(types, types)
    for n in range(1, len(types)):
        assert iq.assign_actions(types[:n], types[:n])[:-1] == whole[: n - 1]


TRAIN = [[0, 3, 6], [1, 4, 7, 0], [2, 5], [0, 3], [6, 9, 0], [7, 1]]
HELD = [(0, [0, 3], 6), (1, [1, 4], 7), (2, [2], 5)]


def test_users_are_split_and_no_heldout_user_or_target_trains():
    data = make_data(TRAIN, HELD, test_users=2, validation_users=1)
    test, validation = ({c.user for c in cases} for cases in (data.test, data.validation))
    assert len(test) == 2
    assert len(validation) == 1
    assert not test & validation
    assert not (test | validation) & set(data.train_users)
    for user, sequence in zip(data.train_users, data.train, strict=True):
        assert sequence.tolist() == TRAIN[user]


def test_co_purchases_come_from_training_users_only():
    """Only a test user joined gel pens with a pencil sharpener."""
    train = [[0, 6], [0, 3], [3, 0], [1, 3]]
    data = make_data(train, [(0, [0], 6)], test_users=1, validation_users=0)
    found = iq.complements(data)
    assert found == {0: "ink cartridge", 1: "ink cartridge", 3: "gel pens"}
    everyone = make_data(train, [(0, [0], 6)], test_users=0, validation_users=0)
    assert 6 in iq.complements(everyone)


def test_training_cases_see_strictly_earlier_events_and_skip_items_without_a_phrase():
    data = make_data(TRAIN, HELD, test_users=2, validation_users=1, history=2)
    early, last = data.training_cases
    for case in (*early, *last):
        sequence = TRAIN[case.user]
        at = len(sequence) - 1 - sequence[::-1].index(case.target)
        assert list(case.history) == sequence[max(0, at - 2) : at]
        assert data.catalogue.phrase[case.target]
    assert {c.user for c in last} <= set(data.train_users)
    assert early or last


def test_transitions_against_a_loop():
    data = make_data(TRAIN, [], test_users=0, validation_users=0)
    expected = Counter()
    for sequence in TRAIN:
        phrases = [p for i in sequence if (p := data.catalogue.phrase[i])]
        expected.update(pairwise(phrases))
    names = data.catalogue.queries
    found = data.transitions()
    assert {(names[i], names[j]): int(found[i, j]) for i, j in found.nonzero().tolist()} == dict(expected)


def test_token_f1_by_hand():
    found = iq.token_f1(["gel pens", "gel gel", "", "a b c"], ["gel pens", "gel pens", "", "c d"])
    assert found.tolist() == pytest.approx([1.0, 0.5, 1.0, 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)])


def test_rules_answer_with_known_phrases():
    data = make_data(TRAIN, HELD, test_users=1, validation_users=0)
    cases = [iq.Case(0, (0, 3, 1), 6), iq.Case(1, (9,), 6)]
    assert LastPhrase(data).queries(cases)[0] == "gel pens"
    assert FrequentPhrase(data).queries(cases)[0] == "gel pens"
    best = data.transitions()[data.catalogue.queries.index("gel pens")].argmax()
    assert PhraseTransitions(data).queries(cases)[0] == data.catalogue.queries[int(best)]
    assert PhraseTransitions(data).queries(cases)[1] in data.catalogue.queries


class Written(torch.nn.Module):
    """Answers what it is told to."""

    def __init__(self, queries):
        super().__init__()
        self.queries = queries

    def answer(self, cases):
        return self.queries, torch.full((len(cases),), 7.0)


def unit_vectors(texts):
    return torch.eye(64)[[sum(map(ord, text)) % 64 for text in texts]]


def test_metrics_of_written_queries_by_hand():
    data = make_data(TRAIN, [], test_users=0, validation_users=0)
    cases = [iq.Case(0, (0,), 3), iq.Case(1, (3,), 0), iq.Case(2, (0,), 9), iq.Case(3, (1,), 8)]
    data = iq.IntentData(data.catalogue, [], [], [], cases, 10)
    task = QueryTask(data, unit_vectors, lambda *_: iter(()))
    written = Written(["ink cartridge", "pens gel", "sharpener", "nothing known"])
    found = task.evaluate(written, "test", torch.device("cpu"))
    assert found.metrics["recall@20"].values.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found["exact match"] == pytest.approx(1 / 3)  # the third item has no phrase
    assert found["token f1"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["prompt tokens"] == 7.0
    assert found.diagnostics["share of known queries"] == 0.25


def test_recall_leaves_out_the_history():
    """With k = 1 the pen in the history would be found first."""
    data = make_data(TRAIN, [], test_users=0, validation_users=0)
    task = QueryTask(data, unit_vectors, lambda *_: iter(()))
    index = BM25Index(TITLES)
    order = index(index.counts(["gel pens"]))[0, 1:].argsort(descending=True).tolist()
    assert float(task.found(["gel pens"], [iq.Case(0, (order[0],), order[1])], k=1)) == 1.0
    assert float(task.found(["gel pens"], [iq.Case(0, (order[2],), order[1])], k=1)) == 0.0


def test_bm25_of_a_written_query_equals_that_of_the_same_words_as_an_item():
    index = BM25Index(TITLES)
    # Word 0 is the filler of short titles; it has no postings.
    torch.testing.assert_close(index.counts([TITLES[3]])[:, 1:], index.counts_of_items(torch.tensor([[4]]))[:, 1:])
    assert index.counts(["unheard words"]).sum() == 0
    assert index(index.counts(["", "gel"])).shape == (2, len(TITLES) + 1)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 4))
def test_complements_against_a_loop(train, distance):
    data = make_data(train, [], test_users=0, validation_users=0)
    phrase, counts = data.catalogue.phrase, Counter()
    for sequence in (s for s in train if len(s) > 1):  # others do not train
        for i, j in ((i, j) for i in range(len(sequence)) for j in range(len(sequence)) if 0 < abs(i - j) <= distance):
            item, other = sequence[i], phrase[sequence[j]]
            if other and other != phrase[item]:
                counts[item, other] += 1
    expected = {}
    for item, other in sorted(counts, key=lambda pair: (-counts[pair], pair[1])):
        expected.setdefault(item, other)
    assert iq.complements(data, distance=distance) == expected
