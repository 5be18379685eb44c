"""Slates, prior scores, MMR, the list simulator and the task: against loops, hand values and enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.data.sequences import Interactions, ItemTable
from auto_research.runtime.errors import UserError
from auto_research.tasks import rerank as r
from auto_research.tasks.base import Recipe, train_steps

CPU = torch.device("cpu")
WEIGHTS = (1.0, 2.0, 0.5)


def ratings(users=40, items=30, seed=0):
    """Users of 10 to 60 events each, whose ratings depend on genres and users."""
    rng = np.random.default_rng(seed)
    genres = rng.random((items, 4)) < 0.4
    genres[:, 0] |= ~genres.any(1)
    count = rng.integers(10, 61, users)
    user = np.repeat(np.arange(users), count)
    item = rng.integers(0, items, len(user))
    taste = rng.normal(size=(users, 4))
    value = 3.2 + (taste[user] * genres[item]).sum(1) + rng.normal(size=len(user))
    table = replace(ItemTable.of_ids([str(i) for i in range(items)]), genres=genres, genre_names=tuple("abcd"))
    rating = np.clip(np.round(value), 1, 5)
    return Interactions.from_events("made-up", user, item, rating, np.arange(len(user)), table, None)


def slates(source=None, **changes):
    return r.build_slates(source or ratings(), **{"length": 4, "candidates": 8, "seed": 3, **changes})


def parts(data):
    return {"train": data.train, "validation": data.validation, "test": data.test, **data.shown}


def task(seed=0, **changes):
    data = slates(**changes)
    torch.manual_seed(seed)
    scorer = r.PriorScorer(30, 4, data.prior.profile.shape[1], dim=8)
    train_steps(scorer, r.prior_batches(data, 0, 16, CPU), steps=15, recipe=Recipe(learning_rate=1e-2))
    return r.make_task(data, scorer, WEIGHTS, CPU)


# -- Slates --


def test_users_are_disjoint_and_lists_come_after_the_history():
    source = ratings()
    data = slates(source)
    groups = [set(s.user.tolist()) for s in (data.train, data.validation, data.test)]
    assert all(groups)
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]
    assert not groups[1] & groups[2]
    assert set(data.prior.user.tolist()).isdisjoint(groups[1] | groups[2])
    for split in ("validation", "test"):
        assert set(data.shown[split].user.tolist()) >= set(getattr(data, split).user.tolist())
    count, begin = np.diff(source.offsets), source.offsets[:-1]
    middle = begin + np.maximum(4, np.floor(0.4 * count)).astype(int)
    assert (data.prior.event < torch.from_numpy(middle)[data.prior.user][:, None]).all()
    for part in parts(data).values():
        assert (part.event >= torch.from_numpy(middle)[part.user][:, None]).all()
        assert (part.event < torch.from_numpy(source.offsets[1:])[part.user][:, None]).all()


def test_lists_are_consecutive_events_with_the_labels_of_their_ratings():
    source = ratings()
    data = slates(source)
    for name, part in {"prior": data.prior, **parts(data)}.items():
        assert (part.event.diff(dim=1) == 1).all(), name
        rating = source.rating[part.event.numpy()]
        assert np.array_equal(part.click.numpy(), rating >= 4)
        assert np.array_equal(part.pay.numpy(), rating >= 5)
        assert np.array_equal(part.item.numpy(), source.item[part.event.numpy()] + 1)
        assert (source.user[part.event.numpy()] == part.user.numpy()[:, None]).all()
    for split in ("validation", "test"):  # what is evaluated never overlaps
        event = getattr(data, split).event.flatten()
        assert len(event.unique()) == len(event)
    assert data.validation.item.shape[1] == 8
    assert data.train.item.shape[1] == 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.none() | st.integers(1, 7),
    st.none() | st.integers(1, 3),
)
def test_blocks_against_a_loop(spans, width, stride, most):
    begin = np.array([b for b, _ in spans])
    end = begin + np.array([n for _, n in spans])
    user = np.arange(len(spans)) * 2
    expected = []
    for u, b, e in zip(user, begin, end, strict=True):
        starts = [s for s in range(b, e, stride or width) if s + width <= e]
        expected += [(u, s) for s in starts[:most]]
    found = r._blocks(user, begin, end, width, most=most, stride=stride)
    assert list(zip(*(x.tolist() for x in found), strict=True)) == expected


def test_changing_the_label_of_an_evaluated_event_changes_no_prior_queue_or_input():
    source = ratings()
    data = slates(source)
    held_out = [part for name, part in parts(data).items() if name != "train"]
    touched = torch.cat([part.event.flatten() for part in held_out]).unique().numpy()
    rating = source.rating.copy()
    rating[touched] = 6 - rating[touched]  # every label that is evaluated, in requests and in shown pages
    other = slates(replace(source, rating=rating))
    lists = []
    for one in (data, other):
        torch.manual_seed(0)
        scorer = r.PriorScorer(30, 4, one.prior.profile.shape[1], dim=8)
        train_steps(scorer, r.prior_batches(one, 0, 16, CPU), steps=15, recipe=Recipe(learning_rate=1e-2))
        made = r.make_task(one, scorer, WEIGHTS, CPU)
        everything = torch.arange(len(one.test))
        batch = made._inputs("test", one.test, everything, CPU)
        chosen = r.FormulaReranker(WEIGHTS, 4, (0.8,)).rerank(batch, 0.8)
        lists.append({**batch, **made.priors, "order": r.objective_priors(batch).argsort(1), "chosen": chosen})
        lists[-1] |= {f"profile {name}": part.profile for name, part in parts(one).items()}
        lists[-1]["taste"] = one.taste
    assert all(not torch.equal(parts(data)[n].click, parts(other)[n].click) for n in parts(data) if n != "train")
    for name, value in lists[0].items():
        assert torch.equal(value, lists[1][name]), name
    assert not {"click", "pay"} & set(lists[0])


@pytest.mark.parametrize("part", ["prior", "train"])
def test_a_page_does_not_see_its_own_labels(part):
    source = ratings()
    pages = getattr(slates(source), part)
    mixed = torch.nonzero(pages.click.amin(1) != pages.click.amax(1)).flatten()  # both labels occur
    row = int(mixed[len(mixed) // 2])
    own = pages.event[row].numpy()
    rating = source.rating.copy()
    # Swapping two ratings of the page keeps every overall rate: only its own labels move.
    high, low = own[rating[own] >= 4][0], own[rating[own] < 4][0]
    rating[[high, low]] = rating[[low, high]]
    changed = getattr(slates(replace(source, rating=rating)), part)
    assert not torch.equal(changed.click[row], pages.click[row])
    assert torch.equal(changed.profile[row], pages.profile[row])
    later = (pages.user == pages.user[row]) & (pages.event[:, 0] > int(max(high, low)))
    assert not later.any() or not torch.equal(changed.profile[later], pages.profile[later])


def test_profiles_against_a_loop():
    source = ratings()
    data = slates(source)
    known = data.prior.event.flatten().numpy()
    rate = (source.rating[known] >= 4).mean(), (source.rating[known] >= 5).mean()
    pages = [(part, row) for part in (data.prior, data.train) for row in (0, len(part) // 2, len(part) - 1)]
    for part, row in pages:
        user, start = int(part.user[row]), int(part.event[row, 0])
        seen = range(int(source.offsets[user]), start)
        click = [float(source.rating[e] >= 4) for e in seen]
        pay = [float(source.rating[e] >= 5) for e in seen]
        own = (sum(click) + 5 * rate[0]) / (len(click) + 5)
        expected = [math.log1p(len(click)) / 4, own - rate[0], (sum(pay) + 5 * rate[1]) / (len(pay) + 5) - rate[1]]
        genres = source.items.genres
        shown = [sum(genres[source.item[e], g] for e in seen) for g in range(4)]
        liked = [sum(c for e, c in zip(seen, click, strict=True) if genres[source.item[e], g]) for g in range(4)]
        expected += [n / max(len(click), 1) for n in shown]
        expected += [(k - n * own) / (n + 5) for k, n in zip(liked, shown, strict=True)]
        torch.testing.assert_close(part.profile[row], torch.tensor(expected).float(), atol=1e-5, rtol=1e-5)


def test_taste_comes_from_the_simulators_users_alone():
    source = ratings()
    data = slates(source)
    others = torch.cat([data.prior.user, data.train.user, data.shown["validation"].user, data.shown["test"].user])
    rating = source.rating.copy()
    mine = np.isin(source.user, others.unique().numpy())
    rating[mine] = 6 - rating[mine]
    assert torch.equal(slates(replace(source, rating=rating)).taste, data.taste)
    simulator = np.setdiff1d(np.arange(source.num_users), others.numpy())
    rating = source.rating.copy()
    rating[source.user == simulator[0]] = np.arange((source.user == simulator[0]).sum()) % 5 + 1
    changed = slates(replace(source, rating=rating))
    assert not torch.equal(changed.taste, data.taste)
    assert torch.equal(changed.train.click, data.train.click)


def test_the_same_seed_gives_the_same_slates_and_another_seed_other_users():
    one, two, other = slates(), slates(), slates(seed=4)
    for name, part in parts(one).items():
        assert all(torch.equal(getattr(part, f.name), getattr(parts(two)[name], f.name)) for f in fields(part))
    assert set(one.test.user.tolist()) != set(other.test.user.tolist())


def test_prices_are_seeded_and_have_mean_one():
    price = r.pseudo_prices(2000, 5)
    assert torch.equal(price, r.pseudo_prices(2000, 5))
    assert not torch.equal(price, r.pseudo_prices(2000, 6))
    assert price[0] == 0
    assert float(price[1:].mean()) == pytest.approx(1.0, abs=1e-6)
    assert float(price[1:].log().std()) == pytest.approx(0.6, abs=0.03)


def test_too_few_data_are_refused():
    with pytest.raises(UserError, match="candidates"):
        slates(ratings(users=8), candidates=60)
    with pytest.raises(ValueError, match="multiple"):
        slates(candidates=10)


# -- Prior scores, formula, MMR --


def test_the_prior_loss_is_click_and_pay_cross_entropy_through_the_product():
    torch.manual_seed(0)
    data = slates()
    scorer = r.PriorScorer(30, 4, data.prior.profile.shape[1], dim=8).eval()
    batch = next(r.prior_batches(data, 0, 8, CPU))
    click, buy = scorer.scores(batch).detach().double().unbind(-1)
    expected = F.binary_cross_entropy(click, batch["click"].double())
    expected += F.binary_cross_entropy(click * buy, batch["pay"].double())
    assert float(scorer.loss(batch).detach()) == pytest.approx(float(expected), rel=1e-5)


def test_formula_and_objective_priors_by_hand():
    batch = {"prior": torch.tensor([[[0.5, 0.4], [0.2, 1.0]]]), "price": torch.tensor([[2.0, 0.5]])}
    priors = r.objective_priors(batch)
    torch.testing.assert_close(priors, torch.tensor([[[0.5, 0.2, 0.4], [0.2, 0.2, 0.1]]]))
    torch.testing.assert_close(r.formula(batch, (1.0, 2.0, 3.0)), torch.tensor([[0.5 + 0.4 + 1.2, 0.2 + 0.4 + 0.3]]))
    torch.testing.assert_close(r.request_scale(batch, (1.0, 2.0, 3.0)), torch.tensor([[1.5]]))


def test_mmr_by_hand():
    value = torch.tensor([[1.0, 0.9, 0.5]])
    similarity = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    assert r.mmr_select(value, similarity, 1.0, 3).tolist() == [[0, 1, 2]]
    # second pick: 0.5 * 0.9 - 0.5 * 1 = -0.05 against 0.5 * 0.5 - 0 = 0.25
    assert r.mmr_select(value, similarity, 0.5, 3).tolist() == [[0, 2, 1]]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(1, 6))
def test_mmr_against_a_loop(seed, trade_off, length):
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(3, 6, generator=generator)
    vectors = F.normalize(torch.randn(3, 6, 4, generator=generator), dim=-1)  # cosines of either sign
    similarity = vectors @ vectors.transpose(1, 2)
    found = r.mmr_select(value, similarity, trade_off, length).tolist()
    for row in range(3):
        chosen: list[int] = []
        for _ in range(length):
            best, best_score = -1, -math.inf
            for c in range(6):
                if c in chosen:
                    continue
                near = max((float(similarity[row, c, b]) for b in chosen), default=0.0)
                score = trade_off * float(value[row, c]) - (1 - trade_off) * near
                if score > best_score + 1e-9:
                    best, best_score = c, score
            chosen.append(best)
        assert found[row] == chosen


# -- Simulator --


TASTE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])


def test_freshness_falls_with_similarity_to_what_was_shown_before():
    simulator = r.ListSimulator(TASTE, fatigue=0.7)
    fresh = simulator.freshness(torch.tensor([[1, 3, 2, 4], [0, 1, 4, 1]]))
    torch.testing.assert_close(fresh, torch.tensor([[1.0, 1.0, 0.3, 1.0], [1.0, 1.0, 1.0, 0.3]]))


def test_expected_answers_against_enumeration():
    simulator = r.ListSimulator(TASTE, fatigue=0.6, after_click=0.9, after_skip=0.5)
    item = torch.tensor([[1, 2, 3, 1]])
    click, pay = torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    fresh = simulator.freshness(item)[0].tolist()
    clicks, pays = [0.0] * 4, [0.0] * 4
    for survives in itertools.product([0, 1], repeat=4):
        for stays in itertools.product([0, 1], repeat=4):
            chance, looking = 1.0, 1
            for k in range(4):
                chance *= fresh[k] if survives[k] else 1 - fresh[k]
            seen = []
            for k in range(4):
                answer = float(click[0, k]) * survives[k]
                go = 0.9 if answer else 0.5
                chance *= go if stays[k] else 1 - go
                seen.append(looking * answer)
                looking *= stays[k]
            for k in range(4):
                clicks[k] += chance * seen[k]
                pays[k] += chance * seen[k] * float(pay[0, k])
    found = simulator.expected(item, click, pay)
    torch.testing.assert_close(found[0], torch.tensor([clicks]))
    torch.testing.assert_close(found[1], torch.tensor([pays]))


def test_drawn_answers_have_the_expected_mean():
    simulator = r.ListSimulator(TASTE, fatigue=0.6, after_click=0.9, after_skip=0.5)
    item = torch.tensor([[1, 2, 3, 1]]).expand(20_000, -1)
    click = torch.tensor([[1.0, 1.0, 0.0, 1.0]]).expand(20_000, -1)
    pay = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(20_000, -1)
    drawn = simulator.draw(item, click, pay, torch.Generator().manual_seed(0))
    for found, expected in zip(drawn, simulator.expected(item[:1], click[:1], pay[:1]), strict=True):
        assert set(found.unique().tolist()) <= {0.0, 1.0}
        torch.testing.assert_close(found.mean(0), expected[0], atol=0.015, rtol=0)
    assert (drawn[1] <= drawn[0]).all()


# -- Task --


def test_objectives_by_hand_and_order_matters():
    click, pay = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    price = torch.tensor([[3.0, 1.0, 4.0]])
    found = r.objectives(click, pay, price, WEIGHTS)
    assert float(found["clicks"]) == pytest.approx(1 + 0.5)
    assert float(found["pays"]) == pytest.approx(0.5)
    assert float(found["GMV"]) == pytest.approx(2.0)
    assert float(found["value"]) == pytest.approx(1.5 + 2 * 0.5 + 0.5 * 2.0)
    turned = r.objectives(click.flip(1), pay.flip(1), price.flip(1), WEIGHTS)
    assert float(turned["pays"]) == pytest.approx(1.0)


class Fixed(r.Reranker):
    """Takes the first items at lambda 1 and the last ones otherwise; notes what it was shown."""

    def __init__(self):
        super().__init__((0.5, 1.0))
        self.seen = set()

    def rerank(self, batch, trade_off):
        self.seen |= set(batch)
        return torch.where(trade_off == 1.0, torch.arange(4), torch.arange(7, 3, -1))


def test_lambda_is_chosen_on_validation_and_kept_on_test():
    one = task()
    model = Fixed()
    for best, labels in ((1.0, [1.0] * 4 + [0.0] * 4), (0.5, [0.0] * 4 + [1.0] * 4)):
        validation, test = one.data.validation, one.data.test
        label = torch.tensor(labels).expand(len(validation), -1)
        opposite = (1 - torch.tensor(labels)).expand(len(test), -1)
        data = replace(
            one.data,
            validation=replace(validation, click=label, pay=label),
            test=replace(test, click=opposite, pay=opposite),  # test would prefer the other lambda
        )
        shown = r.RerankTask(data, one.priors, WEIGHTS, one.simulator)
        shown.evaluate(model, "validation", CPU)
        assert model.trade_off == best
        found = shown.evaluate(model, "test", CPU)
        assert model.trade_off == best
        assert found["value"] == found[f"value at {best:g}"] == 0.0
        assert found[f"value at {1.5 - best:g}"] > 0
        assert found.units == len(test)
    assert model.seen == {"item", "content", "price", "profile", "prior"}, "a re-ranker must see no label"
    fresh = Fixed()
    fresh.load_state_dict(model.state_dict())
    assert fresh.trade_off == 0.5


def test_metrics_of_lists_against_a_loop():
    one = task()
    test = one.data.test
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(len(test))])
    found = one.views(test, chosen)
    for row in (0, len(test) - 1):
        picks = chosen[row].tolist()
        clicks = sum(float(test.click[row, c]) / math.log2(k + 2) for k, c in enumerate(picks))
        gmv = sum(float(test.pay[row, c] * one.data.price[test.item[row, c]]) / math.log2(k + 2)
                  for k, c in enumerate(picks))  # fmt: skip
        assert float(found["clicks"][row]) == pytest.approx(clicks, abs=1e-5)
        assert float(found["GMV"][row]) == pytest.approx(gmv, abs=1e-5)
        vectors = one.data.content[test.item[row, picks]]
        pairs = [1 - float(vectors[a] @ vectors[b]) for a in range(4) for b in range(a)]
        assert float(found["ILAD"][row]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
        assert float(found["simulated clicks"][row]) <= clicks + 1e-6


def test_calibration_compares_expected_with_observed_counts():
    one = task()
    shown = one.data.shown["test"]

    class Oracle(Fixed):
        def expected_counts(self, batch):
            match = (shown.item[:, None] == batch["item"]).all(-1) & (shown.profile[:, None] == batch["profile"]).all(
                -1
            )
            row = match.float().argmax(0)
            return shown.click[row].cumsum(1), 2 * shown.pay[row].cumsum(1)

    found = one.evaluate(Oracle(), "test", CPU).diagnostics
    assert found["expected over observed clicks in the first 4"] == pytest.approx(1.0, abs=1e-6)
    assert found["expected over observed pays in the first 2"] == pytest.approx(2.0, abs=1e-6)
    assert not any("expected" in name for name in one.evaluate(Fixed(), "test", CPU).diagnostics)


def test_batches_hold_every_page_once_an_epoch_with_both_kinds_of_labels():
    one = task()
    pages = one.data.train
    stream = one.batches(0, len(pages), CPU)
    batch = next(stream)
    assert sorted(batch["item"].flatten().tolist()) == sorted(pages.item.flatten().tolist())
    assert set(r.LABELS) <= set(batch)
    assert (batch["simulated click"] <= batch["click"]).all()
    assert float(batch["simulated click"].sum()) < float(batch["click"].sum())
    again = next(one.batches(0, len(pages), CPU))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["item"], next(one.batches(1, len(pages), CPU))["item"])


def test_the_formula_with_lambda_one_sorts_by_the_formula():
    one = task()
    batch = one._inputs("test", one.data.test, torch.arange(len(one.data.test)), CPU)
    found = r.FormulaReranker(WEIGHTS, 4).rerank(batch, 1.0)
    expected = r.formula(batch, WEIGHTS).argsort(dim=1, descending=True, stable=True)[:, :4]
    assert torch.equal(found, expected)


def test_lists_at_each_lambda_in_one_call_are_those_of_a_call_each():
    one = task()
    batch = one._inputs("test", one.data.test, torch.arange(len(one.data.test)), CPU)
    model = r.FormulaReranker(WEIGHTS, 4, (0.3, 0.6, 1.0))
    together = model.rerank_at_each(batch)
    assert not torch.equal(together[0], together[2]), "lambda must matter here"
    for trade_off, lists in zip(model.trade_offs, together, strict=True):
        assert torch.equal(lists, model.rerank(batch, trade_off))
