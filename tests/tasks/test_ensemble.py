"""Ensemble ranking: who sees what and when, requests, behaviours and metrics against loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.tasks import metrics
from auto_research.tasks.ensemble import BEHAVIOURS, EnsembleRanking, behaviour_labels, miniature

CPU = torch.device("cpu")


def world(seed: int = 0, users: int = 7, items: int = 80, events: int = 60) -> Interactions:
    generator = np.random.default_rng(seed)
    table = replace(
        ItemTable.of_ids([str(i) for i in range(items)]),
        genres=generator.random((items, 4)) < 0.4,
        genre_names=("a", "b", "c", "d"),
    )
    return Interactions.from_events(
        "world",
        user=np.repeat(np.arange(users), events),
        item=np.argsort(generator.random((users, items)), axis=1)[:, :events].ravel(),
        rating=generator.integers(1, 6, users * events).astype(np.float32),
        time=np.tile(np.arange(events), users) * 3600,
        items=table,
    )


@pytest.fixture(scope="module")
def task():
    return miniature()


def test_the_parts_follow_each_other_in_time():
    data = world()
    task = EnsembleRanking(data, candidates=12)
    for user in range(data.num_users):
        own = task.part[task.user == user]
        assert own.tolist() == [0] * 42 + [1] * 6 + [2] * 3 + [4] * 9


def test_ratings_of_stage_two_reach_no_input_and_no_training_label():
    data = world()
    task = EnsembleRanking(data, candidates=12)
    rating = data.rating.copy()
    later = task.part.numpy() > 0
    rating[later] = 6 - rating[later]
    torch.manual_seed(0)
    first = EnsembleRanking(data, candidates=12)
    torch.manual_seed(0)
    second = EnsembleRanking(replace(data, rating=rating), candidates=12)
    for one, two in ((first.behaviour_batches, second.behaviour_batches), (first.batches, second.batches)):
        left, right = next(one(3, 16, CPU)), next(two(3, 16, CPU))
        for name in left:
            torch.testing.assert_close(left[name], right[name], equal_nan=True, rtol=0, atol=0)
    assert not torch.equal(first._held_out["test"].rating, second._held_out["test"].rating)


def test_a_batch_holds_no_rating_and_no_outcome(task):
    assert set(next(task.batches(0, 4, CPU))) == {"user", "item", "pxtr", "hour", "weekday"}


def test_behaviours_against_a_loop():
    data = world(1)
    part = EnsembleRanking(data, candidates=12).part
    found = behaviour_labels(data, part)
    genres = data.items.genres
    for e in range(0, len(data), 11):
        near = [x for x in range(e + 1, min(e + 6, len(data))) if data.user[x] == data.user[e] and part[x] == part[e]]
        own = genres[data.item[e]]
        overlap = [(own & genres[data.item[x]]).sum() / max(1, (own | genres[data.item[x]]).sum()) for x in near]
        r = data.rating[e]
        assert found[e].tolist() == [1, r >= 4, r == 5, r > 2, any(o >= 0.5 for o in overlap), 1]


def test_requests_hold_consecutive_events_and_items_never_rated(task):
    requests = task._held_out["test"]
    assert len(requests) > 0
    interacted = BEHAVIOURS.index("interact")
    for r in range(len(requests)):
        rated = requests.rating[r] > 0
        count = int(rated.sum())
        assert 5 <= count <= 6
        assert rated.tolist() == [True] * count + [False] * (12 - count)
        assert len(requests.item[r].unique()) == 12
        assert not task._seen[requests.user[r], requests.item[r][~rated]].any()
        assert task._seen[requests.user[r], requests.item[r][rated]].all()
        drawn = requests.label[r][~rated]
        # Each drawn candidate is the negative of exactly one of the two interaction behaviours.
        assert (drawn == 0).sum(1).tolist() == [1] * (12 - count)
        assert drawn[:, [i for i in range(6) if i not in (interacted, 5)]].isnan().all()


def test_stage_one_learns_and_is_frozen_afterwards():
    torch.manual_seed(0)
    task = EnsembleRanking(world(), candidates=12)
    losses = task.train_priors(steps=40, seed=0, device=CPU, batch_size=64)
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    batch = next(task.batches(0, 4, CPU))
    assert not batch["pxtr"].requires_grad
    assert not any(p.requires_grad for p in task.priors.parameters())
    assert ((batch["pxtr"] > 0) & (batch["pxtr"] < 1)).all()


def test_metrics_against_loops(task):
    requests = task._held_out["test"]
    generator = torch.Generator().manual_seed(0)
    shape = requests.item.shape
    score, pxtr = torch.randn(shape, generator=generator), torch.rand(*shape, 6, generator=generator)
    variance = torch.rand(shape, generator=generator)
    found = task.judge(requests, score, pxtr, variance)
    ones = torch.ones(1, task.num_users, dtype=torch.float64)
    values = {name: float(metric.resample(ones)) for name, metric in found.items()}
    ndcg, hits, agree, bias, conflict = [], [], [], [], []
    areas: dict[str, list[float]] = {name: [] for name in BEHAVIOURS}
    for r in range(shape[0]):
        rated = (requests.rating[r] > 0).numpy()
        s, rating = score[r].numpy()[rated], requests.rating[r].numpy()[rated]
        order, gain = np.argsort(-s), 2.0 ** (rating - 1) - 1
        discount = 1 / np.log2(np.arange(2, 2 + len(s)))
        top = slice(0, 5)
        ideal = (np.sort(gain)[::-1] * discount)[top].sum()
        if ideal > 0:
            ndcg.append((gain[order] * discount)[top].sum() / ideal)
        best = rating == rating.max()
        hits.append(best[order[:5]].sum() / best.sum())
        agree.append(
            np.mean(
                [
                    (score[r, i] - score[r, j]) * (pxtr[r, i, k] - pxtr[r, j, k]) > 0
                    for i in range(12)
                    for j in range(i)
                    for k in range(6)
                ]
            )
        )
        places = np.abs(stats.rankdata(-pxtr[r].mean(-1).numpy()[rated]) - stats.rankdata(-rating))
        if places.std() > 0:
            bias.append(stats.spearmanr(variance[r].numpy()[rated], places).statistic)
        ranks = np.stack([stats.rankdata(-pxtr[r, :, k].numpy()) for k in range(6)], 1)
        conflict.append(stats.spearmanr(variance[r].numpy(), ranks.std(1, ddof=1).round(9)).statistic)
        for k, name in enumerate(BEHAVIOURS):
            label = requests.label[r, :, k]
            known = ~label.isnan()
            if len(label[known].unique()) == 2:
                areas[name].append(metrics.auc(score[r][known], label[known]))
    assert values["ndcg@5"] == pytest.approx(np.mean(ndcg))
    assert values["hr@5"] == pytest.approx(np.mean(hits))
    assert values["agreement"] == pytest.approx(np.mean(agree))
    assert values["bias correlation"] == pytest.approx(np.mean(bias), rel=1e-4)
    assert values["conflict correlation"] == pytest.approx(np.mean(conflict), rel=1e-4)
    for name, own in areas.items():
        assert values[f"gauc/{name}"] == pytest.approx(np.mean(own)), name
    assert values["gauc"] == pytest.approx(np.mean([values[f"gauc/{name}"] for name in BEHAVIOURS]))


def test_list_spearman_is_scipys():
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 5, (6, 9), generator=generator).float()
    second = first + torch.randint(0, 4, (6, 9), generator=generator)
    valid = torch.rand(6, 9, generator=generator) < 0.7
    expected = [stats.spearmanr(a[v], b[v]).statistic for a, b, v in zip(first, second, valid, strict=True)]
    np.testing.assert_allclose(metrics.list_spearman(first, second, valid), expected, rtol=1e-6)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        EnsembleRanking(world(), candidates=10)
