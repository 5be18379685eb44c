"""The event log and requests of it: sessions, parts, what is earlier, no leak of outcomes, metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.layers.longer import gap_buckets
from auto_research.tasks import metrics
from auto_research.tasks.event_log import SESSION, EventLog, miniature, since
from auto_research.tasks.request_ranking import REQUESTS_BACK, RequestRanking

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task():
    return RequestRanking(miniature(users=5, events=60), history=10, width=4)


def test_since_counts_from_the_latest_beginning():
    assert since(torch.tensor([True, False, False, True, False])).tolist() == [0, 1, 2, 0, 1]


def test_actions_are_whole_stars_and_nothing_is_dropped():
    table = ItemTable.of_ids(["a", "b", "c", "d"])
    log = EventLog.of(
        Interactions.from_events(
            "stars",
            user=np.zeros(4, dtype=np.int64),
            item=np.arange(4),
            rating=np.array([0.5, 3.0, 3.5, 5.0]),
            time=np.array([0, 10, 10, 5000]),
            items=table,
        )
    )
    assert log.action.tolist() == [1, 3, 4, 5]
    assert log.place.tolist() == [0, 1, 2, 0]
    assert log.gap.tolist() == [0, 1 + int(gap_buckets(torch.tensor(10))), 1, 1 + int(gap_buckets(torch.tensor(4990)))]


def test_requests_stay_within_one_user_session_and_part(task):
    log = task.log
    for first, count in zip(task.first.tolist(), task.count.tolist(), strict=True):
        events = range(first, first + count)
        assert 1 <= count <= 4
        assert len({int(log.user[e]) for e in events}) == 1
        assert len({int(log.part[e]) for e in events}) == 1
        assert all(int(log.time[e] - log.time[e - 1]) <= SESSION for e in list(events)[1:])
    assert int(task.count.sum()) == len(log.item)
    assert sum(len(r) for r in task.requests.values()) == len(task.first)


def test_rows_against_a_loop(task):
    log = task.log
    request = torch.arange(len(task.first))
    batch = task.rows(request, CPU)
    for r in range(0, len(request), 5):
        first, count = int(task.first[r]), int(task.count[r])
        begin = int(log.offsets[log.user[first]])
        past = list(range(max(begin, first - 10), first))
        pad = [0] * (10 - len(past))
        number = [int((task.first <= e).sum()) - 1 for e in past]
        assert batch["item"][r].tolist() == pad + [int(log.item[e]) + 1 for e in past]
        assert batch["action"][r].tolist() == pad + [int(log.action[e]) for e in past]
        assert batch["back"][r].tolist() == pad + [min(r - q, REQUESTS_BACK) for q in number]
        assert batch["age"][r].tolist() == pad + [int(log.time[first] - log.time[e]) for e in past]
        waits = []
        for q in [*number, r]:
            start = int(task.first[q])
            alone = start == begin
            waits.append(0 if alone else 1 + int(gap_buckets(log.time[start] - log.time[start - 1])))
        assert batch["wait"][r].tolist() == pad + waits[:-1]
        assert batch["wait_now"][r] == waits[-1]
        shown = list(range(first, first + count))
        empty = [0] * (4 - count)
        assert batch["candidate"][r].tolist() == [int(log.item[e]) + 1 for e in shown] + empty
        assert batch["outcome"][r].tolist() == [int(log.action[e]) for e in shown] + empty
        for j, e in enumerate(shown):
            assert batch["label"][r, j].tolist() == [float(log.action[e] >= 4), float(log.action[e] == 5)]
        assert batch["label"][r, count:].isnan().all()


def test_actions_of_a_request_and_later_reach_no_input(task):
    request = task.requests["test"][:1]
    first = int(task.first[request[0]])
    action = task.log.action.clone()
    action[first:] = 6 - action[first:]
    other = RequestRanking(replace(task.log, action=action), history=10, width=4)
    old, new = task.rows(request, CPU), other.rows(request, CPU)
    for name in old:
        if name not in ("label", "outcome"):
            assert torch.equal(old[name], new[name]), name
    assert not torch.equal(old["outcome"], new["outcome"])


def test_one_pass_visits_every_training_request_once(task):
    stream = task.batches(0, 8, CPU)
    seen = torch.cat([next(stream)["candidate"] for _ in range(task.steps_per_pass(8))])
    everything = task.rows(task.requests["train"], CPU)["candidate"]
    assert sorted(seen.tolist()) == sorted(everything.tolist())


class ByItem(nn.Module):
    """Scores that the item alone decides."""

    def scores(self, batch):
        item = batch["candidate"].float()
        return torch.stack([item % 7, -item % 5], -1)


def test_metrics_are_over_all_candidates_of_the_split(task):
    found = task.evaluate(ByItem(), "test", CPU)
    held_out = task.log.part == 2
    item, user = task.log.item[held_out].float() + 1, task.log.user[held_out]
    for name, least, score in (("like", 4, item % 7), ("love", 5, -item % 5)):
        label = (task.log.action[held_out] >= least).float()
        assert found[f"{name} auc"] == pytest.approx(metrics.auc(score, label))
        areas = metrics.user_auc(score, label, user)
        assert found[f"{name} user_auc"] == pytest.approx(float(areas.nanmean()))
        assert found[f"{name} log_loss"] == pytest.approx(float(metrics.log_loss(score, label).mean()), rel=1e-5)
