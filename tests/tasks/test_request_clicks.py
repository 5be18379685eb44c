"""The click task by request: grouping, what is known when a request begins, no leak, evaluation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auto_research.data.sequences import Interactions
from auto_research.tasks.base import Recipe, fit
from auto_research.tasks.click import PastMeans
from auto_research.tasks.event_log import miniature_ratings
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests

CPU = torch.device("cpu")
INPUTS_LATER = ("label",)


def ratings(seed: int = 0) -> Interactions:
    """Ratings with many ties in time."""
    data = miniature_ratings(5, 30, 24, seed=seed)
    return replace(data, time=data.time // 2000 * 2000)


@pytest.fixture(scope="module")
def task():
    return RequestClicks(ratings(), history_length=5, width=4)


def everything(task: RequestClicks) -> dict[str, torch.Tensor]:
    return task.shown(torch.cat([*task.requests.values()]).sort().values, CPU)


def test_requests_are_consecutive_events_of_one_user_and_one_part(task):
    first, count = task._tables["request"]["first"], task._tables["request"]["count"]
    part = {int(e): name for name in ("train", "validation", "test") for e in getattr(task, name)}
    assert int(count.sum()) == len(task.user)
    for begin, many in zip(first.tolist(), count.tolist(), strict=True):
        events = range(begin, begin + many)
        assert 1 <= many <= 4
        assert len({(int(task.user[e]), part[e]) for e in events}) == 1
    for name, requests in task.requests.items():
        shown = [e for r in requests.tolist() for e in range(int(first[r]), int(first[r] + count[r]))]
        assert shown == getattr(task, name).tolist()


def test_batches_against_a_loop(task):
    batch = everything(task)
    first, count = task._tables["request"]["first"].tolist(), task._tables["request"]["count"].tolist()
    alone = task.rows(torch.tensor(first), CPU)
    for field in task.request_fields:
        assert torch.equal(batch[field.name], alone[field.name]), field.name
    for r in range(0, len(first), 3):
        begin, many = first[r], count[r]
        for column in range(4):
            event = begin + column
            if column >= many:
                assert batch["label"][r, column].isnan()
                assert batch["item"][r, column] == batch["year"][r, column] == 0
                assert batch["genres"][r, column].abs().sum() + batch["statistics"][r, column].abs().sum() == 0
                continue
            # as if this item had been the candidate at the moment of the request's first event
            shown = task.rows(torch.tensor([begin]), CPU, candidate=task.item[event : event + 1])
            for name in ("item", "genres", "year", "item statistics", "cross statistics", "statistics"):
                torch.testing.assert_close(batch[name][r, column], shown[name][0])
            assert batch["label"][r, column] == task.label[event]


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_nothing_that_happens_in_a_request_or_later_reaches_its_inputs(seed):
    data = ratings(seed)
    task = RequestClicks(data, history_length=5, width=4)
    request = int(np.random.default_rng(seed).integers(len(task._tables["request"]["first"])))
    start = data.time[int(task._tables["request"]["first"][request])]
    other = RequestClicks(
        replace(data, rating=np.where(data.time >= start, 6 - data.rating, data.rating)), history_length=5, width=4
    )
    before, after = (t.shown(torch.tensor([request]), CPU) for t in (task, other))
    assert not torch.equal(before["label"], after["label"])
    for name, value in before.items():
        if name not in INPUTS_LATER:
            assert torch.equal(value, after[name]), name


class ByItem(nn.Module):
    """The item's id as its score."""

    def scores(self, batch):
        return batch["item"].float()


def test_scores_of_requests_are_those_of_the_events_in_order(task):
    found = task._scores(ByItem(), "test", CPU)
    assert found.tolist() == (task.item[task.test] + 1).tolist()
    metrics = task.evaluate(PastMeans(), "validation", CPU).values()
    assert {"auc", "user_auc", "log_loss"} <= set(metrics)
    assert 0 <= metrics["auc"] <= 1


def test_a_pass_visits_every_training_request_once(task):
    steps = task.steps_per_pass(3)
    batches = task.batches(1, 3, CPU)
    seen = torch.cat([batch["item"][~batch["label"].isnan()] for batch in (next(batches) for _ in range(steps))])
    assert sorted(seen.tolist()) == sorted((task.item[task.train] + 1).tolist())
    again = next(task.batches(1, 3, CPU))
    assert torch.equal(again["item"], next(task.batches(1, 3, CPU))["item"])


class Table(nn.Module):
    """One logit an item."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.score = nn.Embedding(items + 1, 1)
        nn.init.zeros_(self.score.weight)

    def scores(self, batch):
        return self.score(batch["item"]).squeeze(-1)

    def loss(self, batch):
        real = ~batch["label"].isnan()
        return nn.functional.binary_cross_entropy_with_logits(self.scores(batch)[real], batch["label"][real])


def test_training_learns_what_decides_the_label():
    data = miniature_ratings(12, 30, 30)
    data = replace(data, rating=np.where(data.item % 2 == 0, 5, 1).astype(np.float32))
    task = RequestClicks(data, width=4)
    recipe = Recipe(learning_rate=0.3, batch_size=16, validations=1)
    fitted = fit(Table(30), task, steps=15, seed=0, device=CPU, recipe=recipe)
    assert fitted.validation["auc"] > 0.99


def test_a_request_has_room_for_a_candidate():
    with pytest.raises(ValueError, match="room for a candidate"):
        RequestClicks(ratings(), width=0)
    assert miniature_requests().width == 3
