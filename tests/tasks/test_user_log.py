"""Windows of logs: alignment, delay, one question an event, metrics against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.tasks import metrics
from auto_research.tasks.event_log import miniature
from auto_research.tasks.user_log import Answers, UserLog, delayed, feedback_loss

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task():
    return UserLog(miniature(users=5, items=70, events=70), impressions=4, size=4)


def test_a_delayed_state_ends_before_the_impression_before():
    states = torch.arange(16.0).view(1, 16, 1)
    found, usable = delayed(states, 4)
    assert usable.tolist() == [False, False, True, True]
    assert found[0, 2:, 0].tolist() == [3, 7]  # impression 2 is events 8..11, impression 1 is events 4..7
    now, usable = delayed(states, 4, delay=0)
    assert usable.tolist() == [False, True, True, True]
    assert now[0, 1:, 0].tolist() == [3, 7, 11]


def test_training_windows_hold_training_events_of_one_user_in_order(task):
    batch, event = task.windows(task._starts, CPU, last_part=0)
    log = task.log
    for row in range(len(event)):
        real = batch["item"][row] > 0
        assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding stands on the right
        own = event[row][real]
        assert (log.part[own] == 0).all()
        assert len(log.user[own].unique()) == 1
        assert (int(own[0]) - int(log.begin[own[0]])) % task.size == 0
        assert torch.equal(batch["item"][row][real], log.item[own] + 1)
        assert torch.equal(batch["action"][row][real], log.action[own])


@pytest.mark.parametrize(("split", "part"), [("validation", 1), ("test", 2)])
def test_every_event_of_a_split_is_asked_about_once(task, split, part):
    asked = torch.cat([event[where] for _, event, where in task.held_out(split, CPU)])
    assert sorted(asked.tolist()) == torch.nonzero(task.log.part == part).squeeze(1).tolist()


class Oracle(nn.Module):
    """Answers that are functions of item and place, found again in a loop."""

    def answers(self, batch):
        item = batch["item"].float()
        angle = item[..., None] * torch.arange(1, 4)
        items = torch.cos(torch.arange(71.0)[:, None] * torch.arange(1, 4))
        rating = torch.stack([(item * k) % 3 for k in range(1, 6)], -1)
        return Answers(torch.sin(angle), items, rating, item % 5 - 2, (item * 7) % 11)


def test_metrics_against_a_loop(task):
    found = task.evaluate(Oracle(), "test", CPU)
    log, answers = task.log, Oracle()
    item_loss = base = feedback = feedback_base = won = count = 0.0
    areas = {u: ([], []) for u in range(log.num_users)}
    train = log.part == 0
    popularity = torch.bincount(log.item[train], minlength=log.num_items) + 1
    share = torch.bincount(log.action[train], minlength=6)[1:] + 1
    liked = float((log.action[train] >= 4).float().mean())
    for e in torch.nonzero(log.part == 2).squeeze(1).tolist():
        item, action = int(log.item[e]) + 1, int(log.action[e])
        said = answers.answers({"item": torch.tensor([[item]])})
        logits = said.state[0, 0] @ said.items.T
        item_loss -= float(logits[1:].log_softmax(0)[item - 1])
        base -= math.log(float(popularity[item - 1] / popularity.sum()))
        like = float(said.like[0, 0])
        feedback -= float(said.rating[0, 0].log_softmax(0)[action - 1])
        feedback += math.log1p(math.exp(-like if action >= 4 else like))
        feedback_base -= math.log(float(share[action - 1] / share.sum()))
        feedback_base -= math.log(liked if action >= 4 else 1 - liked)
        areas[int(log.user[e])][0].append(float(said.affinity[0, 0]))
        areas[int(log.user[e])][1].append(float(action >= 4))
        place = e - int(log.begin[e])
        for other in range(e + 1, int(log.offsets[log.user[e] + 1])):
            if log.part[other] == 2 and (other - int(log.begin[e])) // 4 == place // 4:
                gap = int(log.action[e] - log.action[other])
                if gap:
                    second = float(answers.answers({"item": log.item[other].view(1, 1) + 1}).affinity)
                    mine = float(said.affinity[0, 0]) - second
                    won += 0.5 if mine == 0 else float(mine * gap > 0)
                    count += 1
    assert found["item ne"] == pytest.approx(item_loss / base, rel=1e-4)
    assert found["item gain"] == pytest.approx(1 - item_loss / base, rel=1e-4)
    assert found["feedback ne"] == pytest.approx(feedback / feedback_base, rel=1e-4)
    assert found["pairwise accuracy"] == pytest.approx(won / count)
    values = [metrics.auc(torch.tensor(s), torch.tensor(y)) for s, y in areas.values()]
    assert found["user_auc"] == pytest.approx(float(np.nanmean(values)))


def test_catalogue_ranks_the_first_event_of_each_user_among_items_not_rated_before(task):
    found = task.evaluate(Oracle(), "test", CPU)
    log, gains = task.log, []
    for user in range(log.num_users):
        own = torch.nonzero((log.user == user) & (log.part == 2)).squeeze(1)
        first = int(own[0])
        item = int(log.item[first]) + 1
        said = Oracle().answers({"item": torch.tensor([[item]])})
        logits = said.state[0, 0] @ said.items.T
        seen = set((log.item[int(log.offsets[user]) : first] + 1).tolist())
        ahead = sum(float(logits[i]) > float(logits[item]) for i in range(1, 71) if i not in seen and i != item)
        gains.append(1 / math.log2(2 + ahead) if ahead < 10 else 0.0)
    assert found["ndcg@10"] == pytest.approx(np.mean(gains), rel=1e-5)


def test_a_model_of_the_base_rates_has_normalised_entropy_one(task):
    log = task.log
    train = log.part == 0
    popularity = (torch.bincount(log.item[train], minlength=log.num_items) + 1).float()
    share = (torch.bincount(log.action[train], minlength=6)[1:] + 1).float()
    liked = (log.action[train] >= 4).float().mean()

    class Base(nn.Module):
        def answers(self, batch):
            shape = batch["item"].shape
            items = torch.cat([torch.zeros(1, 1), popularity.log()[:, None]])
            rating = (share / share.sum()).log().expand(*shape, 5)
            return Answers(torch.ones(*shape, 1), items, rating, torch.logit(liked).expand(shape))

    found = task.evaluate(Base(), "test", CPU)
    assert found["item ne"] == pytest.approx(1.0, abs=1e-5)
    assert found["feedback ne"] == pytest.approx(1.0, abs=1e-5)


def test_feedback_loss_is_both_components():
    rating, like = torch.tensor([[0.0, 1.0, 2.0, 0.5, 0.1]]), torch.tensor([0.7])
    expected = -rating.log_softmax(-1)[0, 3] + math.log1p(math.exp(-0.7))
    torch.testing.assert_close(feedback_loss(rating, like, torch.tensor([4]))[0], expected)
