"""Streams, the judge's look-up against a loop, and policies at equal call rates."""

import numpy as np
import pytest
import torch

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.tasks import event_streams as es
from auto_research.tasks.intent_queries import Case, IntentData, QueryCatalogue, token_f1


def interactions(users=5, events=14, items=12, seed=0):
    rng = np.random.default_rng(seed)
    base = ItemTable.of_ids([str(i) for i in range(items)], [f"Film {i} (19{60 + 3 * i})" for i in range(items)])
    genres = rng.random((items, 3)) < 0.5
    table = ItemTable(
        raw_id=base.raw_id, title=base.title, genres=genres, genre_names=("Comedy", "Drama", "War"),
        year=np.array([1960 + 3 * i for i in range(items)]),
    )  # fmt: skip
    length = rng.integers(5, events, users)
    user = np.repeat(np.arange(users), length)
    item = rng.integers(0, items, len(user))
    item[:items] = np.arange(items)  # every item occurs
    return Interactions.from_events("films", user, item, np.ones(len(user), np.float32), np.arange(len(user)), table)


def setting():
    films = interactions()
    catalogue = QueryCatalogue.of_films(films.items)
    data = IntentData(catalogue, [], [], [], [], history=3)
    streams = es.film_streams(films, range(films.num_users), 10)
    return films, catalogue, data, streams


def test_streams_hold_the_first_events_and_their_labels():
    films, _, _, streams = setting()
    for u in range(films.num_users):
        expected = films.item[films.offsets[u] : films.offsets[u + 1]][:10].tolist()
        row = streams.items[u][streams.valid[u]].tolist()
        assert row == expected
        for t, item in enumerate(row):
            assert int(streams.labels[u, t].sum()) == int(films.items.genres[item].sum()) + 1  # and a decade
    assert not streams.labels[~streams.valid].any()


def test_judge_against_a_loop():
    _, catalogue, data, streams = setting()
    asked = []

    def answer(cases):
        asked.extend(cases)
        return [catalogue.type_of(c.history[-1]) for c in cases], torch.zeros(len(cases))

    judge = es.StreamJudge(answer, data, streams)
    assert all(isinstance(c, Case) and 1 <= len(c.history) <= 3 for c in asked)
    generator = torch.Generator().manual_seed(0)
    ran = es.random_calls(streams.valid, len(streams) + 6, generator)
    values = []
    for u, row in enumerate(streams.items.tolist()):
        items, cached, found = [i for i in row if i >= 0], "", []
        for t in range(len(items) - 1):
            if ran[u, t]:
                cached = catalogue.type_of(items[t])
            if catalogue.phrase[items[t + 1]]:
                found.append(float(token_f1([cached], [catalogue.phrase[items[t + 1]]])))
        values.append(sum(found) / len(found) if found else float("nan"))
    evaluation = judge.evaluate(ran)
    torch.testing.assert_close(evaluation.metrics["token f1"].values, torch.tensor(values), equal_nan=True)


def test_rival_policies_have_the_triggers_call_rate():
    _, catalogue, data, streams = setting()
    judge = es.StreamJudge(
        lambda cases: ([catalogue.type_of(c.history[-1]) for c in cases], torch.zeros(len(cases))), data, streams
    )
    found = es.run_policies(judge, streams, seed=1, thresholds=(0.3, 0.8))
    assert found.calls["always"] == 1.0
    for threshold in ("0.3", "0.8"):
        rate = found.calls[f"drift {threshold}"]
        assert 0 < rate <= 1
        assert found.calls[f"every-k at {threshold}"] == rate
        assert found.calls[f"random at {threshold}"] == rate
    assert found.calls["drift 0.8"] <= found.calls["drift 0.3"]
    gated = next(name for name in found.calls if "gate" in name)
    assert found.calls[gated] <= 1
    for term in es.REMOVED:
        assert abs(found.calls[f"drift without {term}"] - found.calls["drift 0.8"]) <= 0.25
    again = es.run_policies(judge, streams, seed=1, thresholds=(0.3, 0.8))
    assert {n: e["token f1"] for n, e in found.quality.items()} == pytest.approx(
        {n: e["token f1"] for n, e in again.quality.items()}
    )


def test_the_table_holds_a_line_a_policy_and_the_mean_drift_is_the_papers_threshold():
    _, catalogue, data, streams = setting()
    judge = es.StreamJudge(
        lambda cases: ([catalogue.type_of(c.history[-1]) for c in cases], torch.zeros(len(cases))), data, streams
    )
    one = es.run_policies(judge, streams, seed=1, thresholds=(0.8,))
    more = es.run_policies(judge, streams, seed=1, thresholds=(0.2, 0.8, 1.5))
    assert one.drift_mean == more.drift_mean
    lines = es.policy_table([one, one])
    assert len(lines) == len(one.quality)
    always, drift = one.quality["always"]["token f1"], one.quality["drift 0.8"]["token f1"]
    assert f"always-run token F1 {always:.4f}" in lines[0]
    expected = f"streams, drift 0.8: {one.calls['drift 0.8']:.3f} calls per event, F1 {drift:.4f}"
    assert f"{expected}, staleness loss {always - drift:.4f}" in lines
