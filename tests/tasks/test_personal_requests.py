"""Requests with their user's side: what is known before the first candidate, against a loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from auto_research.tasks.click import PRIOR
from auto_research.tasks.event_log import LIKED, miniature_ratings
from auto_research.tasks.personal_requests import PersonalRequests, miniature, packed_gap
from auto_research.tasks.request_ranking import change_outcomes, pad_requests
from auto_research.tasks.timing import median_seconds, now

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task():
    return miniature(users=5, events=60)


def test_user_columns_against_a_loop(task):
    log = task.log
    batch = task.rows(torch.arange(len(task.first)), CPU)
    for r, first in enumerate(task.first.tolist()):
        begin = int(log.begin[first])
        likes = sum(int(a >= LIKED) for a in log.action[begin:first].tolist())
        seen = first - begin
        assert batch["user"][r] == log.user[first] + 1
        hours = int(log.time[first]) // 3600
        assert (batch["hour"][r], batch["weekday"][r]) == (hours % 24, (hours // 24 + 3) % 7)
        assert batch["last_action"][r] == (log.action[first - 1] if seen else 0)
        share, count = batch["user statistics"][r].tolist()
        assert share == pytest.approx(2 * (likes + 0.5 * PRIOR) / (seen + PRIOR) - 1, abs=1e-6)
        assert count == pytest.approx(math.log1p(seen) / 3 - 1, abs=1e-6)


def test_the_users_side_ignores_the_candidates_and_everything_later():
    """With all reactions from a request on changed, its user's side and history stay."""
    ratings = miniature_ratings(users=2, events=40)
    before = PersonalRequests(ratings, history=8, width=4)
    for r in range(0, len(before.first), 3):
        first = int(before.first[r])
        later = ratings.rating.copy()
        later[first:] = 6 - later[first:]
        after = PersonalRequests(replace(ratings, rating=later), history=8, width=4)
        one, two = (t.rows(torch.tensor([r]), CPU) for t in (before, after))
        assert {n for n in one if not torch.equal(one[n].nan_to_num(9), two[n].nan_to_num(9))} == {"label", "outcome"}


def test_fields_name_columns_that_are_in_range_and_leave_out_missing_demographics(task):
    batch = task.rows(torch.arange(len(task.first)), CPU)
    assert list(dict.fromkeys(f.group for f in task.user_fields)) == ["user", "profile", "context", "user statistics"]
    for field in task.user_fields:
        if field.kind == "id":
            assert int(batch[field.name].min()) >= 0
            assert int(batch[field.name].max()) < field.size
    without = PersonalRequests(replace(miniature_ratings(), users=None))
    assert "profile" not in {f.group for f in without.user_fields}


def test_the_age_of_an_event_is_not_the_age_of_the_user(task):
    batch = task.rows(torch.arange(4), CPU)
    assert batch["age"].shape == batch["item"].shape
    assert batch["user age"].shape == (4,)


class Neighbours(nn.Module):
    """Scores a candidate by itself, or by the whole pack."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks

    def scores(self, batch):
        own = batch["candidate"].float()[..., None].expand(-1, -1, 2)
        return own + own.sum(1, keepdim=True) if self.leaks else own


def test_packed_gap_finds_candidates_that_see_each_other(task):
    batch = task.rows(task.requests["train"][:6], CPU)
    assert packed_gap(Neighbours(leaks=False), batch) == 0
    assert packed_gap(Neighbours(leaks=True), batch) > 1
    assert task.evaluate(Neighbours(leaks=True), "test", CPU).diagnostics["packed gap"] > 1
    assert "packed gap" not in task.evaluate(Neighbours(leaks=True), "validation", CPU).diagnostics


def test_padding_and_other_outcomes_touch_what_they_should(task):
    batch = task.rows(task.requests["train"][:6], CPU)
    padded, changed = pad_requests(batch, 3), change_outcomes(batch)
    assert padded["item"].shape[1] == batch["item"].shape[1] + 3
    assert (padded["item"][:, :3] == 0).all()
    assert {n for n in batch if not torch.equal(batch[n].nan_to_num(9), changed[n].nan_to_num(9))} == {
        "label",
        "outcome",
    }
    shown = batch["candidate"] > 0
    assert torch.equal(changed["label"][shown], 1 - batch["label"][shown])


def test_median_seconds_alternates_and_leaves_out_the_warm_up():
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    taken = median_seconds(ways, CPU, rounds=3, warm_up=2)
    assert order == ["a", "b"] * 5
    assert set(taken) == {"a", "b"}
    assert min(taken.values()) >= 0
    assert now(CPU) <= now(CPU)
