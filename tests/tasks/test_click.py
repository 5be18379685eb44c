"""The click task: split, strictly earlier inputs, past statistics against a loop, metrics, no leak of labels."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.layers.towers import FeatureEmbedding, ScoreMLP
from auto_research.tasks.base import PooledAUC, Recipe, fit
from auto_research.tasks.click import (
    GAPS,
    PRIOR,
    RATINGS,
    SIDES,
    STATISTICS,
    ClickTask,
    PastMeans,
    PastTotals,
    Ranker,
    click_loss,
    miniature,
    pad_history,
)

CPU = torch.device("cpu")


def world(users: int, items: int, events: int, seed: int, *, moments: int = 40) -> Interactions:
    """Random ratings with many ties in time, without demographics."""
    generator = np.random.default_rng(seed)
    table = replace(
        ItemTable.of_ids([str(i) for i in range(items)]),
        genres=generator.random((items, 3)) < 0.5,
        genre_names=("a", "b", "c"),
        year=generator.integers(1950, 2020, items),
    )
    return Interactions.from_events(
        "world",
        user=generator.integers(0, users, events),
        item=generator.integers(0, items, events),
        rating=generator.integers(1, 6, events).astype(np.float32),
        time=generator.integers(0, moments, events) * 3600,
        items=table,
    )


def everything(task: ClickTask) -> dict[str, torch.Tensor]:
    return task.rows(torch.arange(len(task.user)), CPU)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=25)
def test_ratings_at_or_after_an_event_never_reach_its_inputs(seed):
    data = world(6, 9, 80, seed)
    generator = np.random.default_rng(seed + 1)
    event = int(generator.integers(len(data)))
    later = data.time >= data.time[event]
    rating = data.rating.copy()
    rating[later] = 6 - rating[later]  # a like becomes a dislike and the other way round (3 becomes 3)
    rating[event] = 1 if data.rating[event] >= 4 else 5
    before, after = ClickTask(data), ClickTask(replace(data, rating=rating))
    row = torch.tensor([event])
    old, new = before.rows(row, CPU), after.rows(row, CPU)
    assert old["label"] != new["label"]
    for name in old:
        if name != "label":
            assert torch.equal(old[name], new[name]), name


def test_ratings_before_an_event_do_reach_its_inputs():
    data = world(4, 6, 120, 3)
    event = int(np.argmax(data.time))
    rating = data.rating.copy()
    rating[data.time < data.time[event]] = 5
    row = torch.tensor([event])
    old, new = ClickTask(data).rows(row, CPU), ClickTask(replace(data, rating=rating)).rows(row, CPU)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert {"statistics", "history_rating"} <= changed


def test_statistics_against_a_loop_over_training_events_strictly_before():
    data = world(5, 7, 150, 0)
    task = ClickTask(data)
    rows = everything(task)["statistics"].double()
    train = set(task.train.tolist())
    liked, genres = data.rating >= 4, data.items.genres

    def mean(values: list[float], above: float) -> float:
        return (sum(values) + PRIOR * above) / (len(values) + PRIOR)

    for e in range(0, len(data), 7):
        past = [i for i in train if data.time[i] < data.time[e]]
        overall = mean([liked[i] for i in past], 0.5)
        own = [i for i in past if data.user[i] == data.user[e]]
        same = [i for i in past if data.item[i] == data.item[e]]
        # A past event counts once for each genre that it shares with the candidate.
        shared = [liked[i] for i in own for g in range(3) if genres[data.item[e], g] and genres[data.item[i], g]]
        user_mean = mean([liked[i] for i in own], overall)
        expected = {
            "user mean": 2 * user_mean - 1,
            "item mean": 2 * mean([liked[i] for i in same], overall) - 1,
            "user x genre mean": 2 * mean(shared, user_mean) - 1,
            "user count": np.log1p(len(own)) / 3 - 1,
            "item count": np.log1p(len(same)) / 3 - 1,
            "user x genre count": np.log1p(len(shared)) / 3 - 1,
        }
        for column, name in enumerate(STATISTICS):
            assert float(rows[e, column]) == pytest.approx(expected[name], abs=1e-6), name


def test_history_gap_and_last_item_are_strictly_earlier():
    data = world(5, 7, 150, 1)
    task = ClickTask(data, history_length=4)
    batch = everything(task)
    for e in range(len(data)):
        past = [i for i in range(len(data)) if data.user[i] == data.user[e] and data.time[i] < data.time[e]][-4:]
        padding = [0] * (4 - len(past))
        assert batch["history_item"][e].tolist() == padding + [int(data.item[i]) + 1 for i in past]
        assert batch["history_rating"][e].tolist() == padding + [int(2 * data.rating[i]) for i in past]
        assert batch["last_item"][e] == (data.item[past[-1]] + 1 if past else 0)
        assert batch["last_rating"][e] == (2 * data.rating[past[-1]] if past else 0)
        gap = int(data.time[e] - data.time[past[-1]]) if past else None
        assert batch["gap"][e] == (0 if gap is None else 1 + int(np.floor(np.log2(gap))))
    assert batch["gap"].max() < GAPS
    assert batch["history_rating"].max() < RATINGS


def test_split_is_chronological_within_each_user():
    data = world(8, 20, 400, 2, moments=4000)
    task = ClickTask(data)
    parts = [task.train, task.validation, task.test]
    assert sorted(torch.cat(parts).tolist()) == list(range(len(data)))
    for user in range(data.num_users):
        earlier, middle, later = (data.time[p[task.user[p] == user].numpy()] for p in parts)
        assert earlier.max() < middle.min()
        assert middle.max() < later.min()
    assert abs(len(task.train) / len(data) - 0.8) < 0.02


def test_clock_is_the_calendar_in_utc():
    data = world(2, 3, 10, 0)
    for moment in (0, 875_000_000, 1_700_000_000):
        batch = everything(ClickTask(replace(data, time=np.full(10, moment, dtype=np.int64))))
        expected = datetime.fromtimestamp(moment, UTC)
        assert batch["weekday"].tolist() == [expected.weekday()] * 10
        assert batch["hour"].tolist() == [expected.hour] * 10


def test_profiles_are_there_only_where_the_data_has_them():
    with_profiles, without = miniature(), ClickTask(world(5, 7, 100, 0))
    assert {f.name for f in with_profiles.fields if f.group == "profile"} == {"gender", "age", "occupation", "zip"}
    assert not [f for f in without.fields if f.group == "profile"]
    assert "gender" not in everything(without)
    batch = everything(with_profiles)
    assert batch["age"].unique().tolist() == [0, 1, 2, 3, 5, 6]  # 15, 22, 29, 36, 43, 50, 57, 64 years
    assert batch["zip"].unique().tolist() == [1, 2, 3]  # regions 0, 1 (two codes) and 9


@pytest.mark.parametrize("task", [miniature(), ClickTask(world(6, 9, 120, 4))], ids=["profiles", "no profiles"])
def test_every_field_stays_within_its_declared_size(task):
    batch = everything(task)
    for field in task.fields:
        if field.kind == "history":
            assert batch[f"{field.name}_rating"].max() < field.size
        elif field.kind == "id":
            assert 0 <= batch[field.name].min() <= batch[field.name].max() < field.size
        else:
            assert batch[field.name].shape[1] == field.size
            assert torch.isfinite(batch[field.name]).all()
    assert set(batch) == {
        "label",
        *(f.name for f in task.fields if f.kind != "history"),
        "history_item",
        "history_rating",
    }


def test_batches_depend_on_the_seed_alone_and_cover_the_training_events_once_a_pass():
    task = ClickTask(world(6, 9, 120, 5))
    passes = -(-len(task.train) // 16)

    def labels(seed: int, batches: int) -> list[float]:
        stream = task.batches(seed, 16, CPU)
        return torch.cat([next(stream)["label"] for _ in range(batches)]).tolist()

    assert labels(1, passes + 2) == labels(1, passes + 2)
    assert labels(1, passes) != labels(2, passes)
    assert sorted(labels(1, passes)) == sorted(task.label[task.train].tolist())


class Fixed(nn.Module):
    """Scores that are given event by event, found again by user and statistics."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def scores(self, batch):
        return self.scale * (batch["statistics"].sum(1) + 0.1 * batch["item"])


def test_metrics_against_pairs_counted_in_a_loop():
    task = ClickTask(world(6, 9, 200, 6, moments=4000))
    found = task.evaluate(Fixed(), "test", CPU)
    score = Fixed().scores(task.rows(task.test, CPU)).double()
    label, user = task.label[task.test], task.user[task.test]

    def area(keep: torch.Tensor) -> float:
        s, y = score[keep], label[keep]
        pairs = [(float(a > b) + 0.5 * float(a == b)) for a in s[y == 1] for b in s[y == 0]]
        return sum(pairs) / len(pairs) if pairs else float("nan")

    assert found["auc"] == pytest.approx(area(torch.ones_like(label, dtype=torch.bool)))
    areas = [area(user == u) for u in range(task.num_users)]
    assert found["user_auc"] == pytest.approx(float(np.nanmean(areas)))
    p = torch.sigmoid(score)
    loss = -(label * p.log() + (1 - label) * (1 - p).log()).mean()
    assert found["log_loss"] == pytest.approx(float(loss), rel=1e-5)
    share = float(label.mean())
    constant = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert found["ne"] == pytest.approx(float(loss) / constant, rel=1e-5)
    # Order alone counts for the areas, size for the loss.
    scaled = task.evaluate(Fixed(3.0), "test", CPU)
    assert scaled["auc"] == pytest.approx(found["auc"])
    assert scaled["log_loss"] != pytest.approx(found["log_loss"])


def test_auc_under_user_weights_repeats_the_examples_of_a_user():
    task = ClickTask(world(4, 9, 150, 7))
    metric = task.evaluate(Fixed(), "test", CPU).metrics["auc"]
    assert isinstance(metric, PooledAUC)
    weights = torch.tensor([[2.0, 0.0, 1.0, 1.0]])
    repeated = torch.cat([torch.arange(len(metric.unit))[metric.unit == u] for u in (0, 0, 2, 3)])
    again = PooledAUC(metric.score[repeated], metric.label[repeated], metric.unit[repeated])
    assert float(metric.resample(weights)) == pytest.approx(float(again.resample(torch.ones(1, 4))))


def test_full_catalogue_ranks_all_items_but_those_rated_before():
    data = world(5, 9, 60, 8, moments=4000)
    task = ClickTask(data, catalogue_users=99)
    found = task.evaluate(Fixed(), "test", CPU)
    gains = {}
    for user in range(task.num_users):
        liked = [e for e in task.test.tolist() if task.user[e] == user and task.label[e] == 1]
        if not liked:
            continue
        event = liked[0]
        batch = task.rows(torch.full((9,), event), CPU, candidate=torch.arange(9))
        assert "label" not in batch
        score = Fixed().scores(batch)
        seen = {int(i) for i, t, u in zip(data.item, data.time, data.user) if u == user and t < data.time[event]}
        own = int(data.item[event])
        ahead = sum(float(score[i]) > float(score[own]) for i in range(9) if i not in seen and i != own)
        gains[user] = 1 / np.log2(2 + ahead) if ahead < 10 else 0.0
    assert found["ndcg@10"] == pytest.approx(np.mean(list(gains.values())), rel=1e-5)
    assert found["hit@10"] == pytest.approx(1.0)  # nine items
    assert 0 <= found.diagnostics["head share@10"] <= 1
    assert "ndcg@10" not in task.evaluate(Fixed(), "validation", CPU).metrics


def test_a_candidate_in_place_of_the_own_item_changes_item_fields_only():
    task = miniature()
    event = task.test
    own, other = task.rows(event, CPU), task.rows(event, CPU, candidate=task.item[event])
    for name in other:
        assert torch.equal(own[name], other[name]), name
    moved = task.rows(event, CPU, candidate=(task.item[event] + 1) % task.num_items)
    same = {name for name in moved if torch.equal(moved[name], own[name])}
    assert {"user", "gap", "last_item", "history_item", "history_rating", "hour"} <= same
    assert not same & {"item", "statistics"}


def test_past_totals_by_hand():
    totals = PastTotals(
        group=torch.tensor([0, 1, 0, 0]),
        moment=torch.tensor([2, 0, 0, 2]),
        values=torch.tensor([[1.0], [10.0], [100.0], [1000.0]]),
        moments=4,
    )
    count, total = totals.before(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 2, 3, 0, 3]))
    assert count.tolist() == [0, 1, 3, 0, 1]
    assert total[:, 0].tolist() == [0, 100, 1101, 0, 10]


def test_training_learns_what_decides_the_label():
    data = world(30, 12, 3000, 9, moments=100_000)
    rating = np.where(data.item % 2 == 0, 5, 1).astype(np.float32)
    task = ClickTask(replace(data, rating=rating), history_length=2)
    torch.manual_seed(0)
    features = FeatureEmbedding(task.fields, 8)
    model = Ranker(features, ScoreMLP(features.width, 16))
    fitted = fit(
        model, task, steps=40, seed=0, device=CPU, recipe=Recipe(learning_rate=2e-2, batch_size=128, validations=1)
    )
    assert fitted.validation["auc"] > 0.99
    assert task.evaluate(PastMeans(), "test", CPU)["auc"] > 0.99


def test_click_loss_is_binary_cross_entropy_in_float32():
    logit, label = torch.tensor([2.0, -1.0], dtype=torch.bfloat16), torch.tensor([1.0, 1.0])
    expected = (np.log1p(np.exp(-2)) + np.log1p(np.exp(1))) / 2
    found = click_loss(logit, label)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(expected)


def test_details_of_events_and_statistics_by_side_against_a_loop():
    data = world(5, 7, 150, 1)
    task = ClickTask(data, history_length=4, detailed=True)
    batch = everything(task)
    gap = batch["gap"]
    for e in range(len(data)):
        past = [i for i in range(len(data)) if data.user[i] == data.user[e] and data.time[i] < data.time[e]][-4:]
        none = 4 - len(past)
        assert batch["history_gap"][e].tolist() == [0] * none + [int(gap[i]) for i in past]
        assert batch["history_age"][e].tolist() == [0] * none + [int(data.time[e] - data.time[i]) for i in past]
        expected = np.concatenate([np.zeros((none, 3)), data.items.genres[data.item[past]]])
        assert (batch["history_genres"][e].numpy() == expected).all()
    assert torch.equal(torch.cat([batch[name] for name in SIDES], 1), batch["statistics"])
    named = {f.name for f in (*task.request_fields, *task.candidate_fields)}
    assert named == {f.name for f in task.fields} - {"last_item", "history", "statistics"} | set(SIDES)
    plain = everything(ClickTask(data, history_length=4))
    assert all(torch.equal(batch[name], value) for name, value in plain.items())


def test_padding_a_history_adds_empty_events_before_it():
    task = miniature(detailed=True)
    batch = task.rows(task.test[:3], CPU)
    padded = pad_history(batch, 3)
    for name, value in batch.items():
        if name.startswith("history_"):
            assert padded[name].shape[1] == value.shape[1] + 3
            assert (padded[name][:, :3] == 0).all()
            assert torch.equal(padded[name][:, 3:], value)
        else:
            assert padded[name] is value


def test_candidates_of_a_pack_differ_in_the_candidate_fields_alone():
    task = miniature(detailed=True)
    events, items = task.test[:3], torch.tensor([0, 5, 7, 2])
    requests, candidates = task.pack(events, items, CPU)
    assert len(requests["user"]) == 3
    assert candidates["item"].tolist() == [1, 6, 8, 3] * 3
    assert not any(name.startswith("history") for name in candidates)
    for field in task.request_fields:
        repeated = requests[field.name].repeat_interleave(4, dim=0)
        assert torch.equal(repeated, candidates[field.name]), field.name


class Packed(Fixed):
    """The same scores, with the part that is known before the candidate read once a request."""

    shares_requests = True

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def scores(self, batch):
        return batch["history_rating"].sum(1) + 0.1 * batch["item"] + batch["item statistics"].sum(1)

    def request_side(self, batch):
        self.requests += len(batch["user"])
        return batch["history_rating"].sum(1)

    def candidate_scores(self, side, batch):
        own = 0.1 * batch["item"] + batch["item statistics"].sum(1)
        return side.repeat_interleave(len(own) // len(side)) + own


def test_a_model_that_shares_requests_reads_each_once_and_ranks_the_same():
    task = ClickTask(world(5, 9, 60, 8, moments=4000), catalogue_users=99, detailed=True)
    packed, plain = Packed(), Packed()
    plain.shares_requests = False
    found, expected = task.evaluate(packed, "test", CPU), task.evaluate(plain, "test", CPU)
    assert found.values() == pytest.approx(expected.values(), nan_ok=True)
    assert 0 < packed.requests <= 5
    assert plain.requests == 0
    assert found.diagnostics["packed gap"] < 1e-5
    assert "packed gap" not in expected.diagnostics
