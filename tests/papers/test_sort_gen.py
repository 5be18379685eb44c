"""SORT-Gen: targets and loss by hand, masks, and generation against a loop that re-runs the model on [S, head]."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from auto_research.papers._registry import adapters
from auto_research.papers.rerank import sort_gen as m
from auto_research.runtime.budget import Overrides
from auto_research.runtime.errors import UserError
from auto_research.study.context import Study
from auto_research.study.verdict import Difference
from auto_research.tasks import rerank as r
from auto_research.tasks.base import Recipe, count_parameters

TINY = m.SortConfig(items=20, content=5, profile=4, length=4, dim=16, layers=2, heads=2, dropout=0.0)


def request(lists=5, candidates=12, seed=0):
    """Candidates with every input a re-ranker sees, and no label."""
    generator = torch.Generator().manual_seed(seed)
    item = torch.stack([torch.randperm(20, generator=generator)[:candidates] + 1 for _ in range(lists)])
    content = F.normalize(torch.rand(21, 5, generator=generator) - 0.3, dim=-1)
    return {
        "item": item,
        "content": content[item],
        "price": torch.rand(lists, candidates, generator=generator) + 0.5,
        "profile": torch.randn(lists, 4, generator=generator),
        "prior": torch.rand(lists, candidates, 2, generator=generator) * 0.8 + 0.1,
    }


def build(seed=0, model=m.SortGen, sharp=8.0, **changes):
    """A model whose values differ clearly between items."""
    torch.manual_seed(seed)
    built = model(replace(TINY, **changes)).eval()
    with torch.no_grad():
        for head in (built.click_head, built.pay_head):
            head[-1].weight.mul_(sharp)
        built.item.weight.mul_(sharp)
    return built


# -- Ordered regression --


def test_ordered_targets_by_hand():
    found = m.ordered_targets(torch.tensor([[0.0, 1.0, 1.0]]))
    assert found.tolist() == [[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]


def test_ordered_loss_by_hand_and_against_a_loop():
    assert float(m.ordered_loss(torch.zeros(2, 3, 3), torch.ones(2, 3))) == pytest.approx(9 * math.log(2))
    assert float(m.ordered_loss(torch.zeros(2, 3, 3), torch.ones(2, 3), keep_impossible=False)) == pytest.approx(
        6 * math.log(2)  # the grid has six places with i <= j
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 4, generator=generator)
    action = (torch.rand(3, 4, generator=generator) < 0.5).float()
    for keep in (True, False):
        total = 0.0
        for n in range(3):
            for j in range(1, 5):
                count = sum(action[n, :j].tolist())
                for i in range(1, 5):
                    if i > j and not keep:
                        continue
                    p = 1 / (1 + math.exp(-float(logits[n, j - 1, i - 1])))
                    total -= math.log(p if count >= i else 1 - p)
        assert float(m.ordered_loss(logits, action, keep_impossible=keep)) == pytest.approx(total / 3, rel=1e-5)


def test_terms_with_more_actions_than_positions_always_have_target_zero():
    generator = torch.Generator().manual_seed(0)
    action = (torch.rand(50, 6, generator=generator) < 0.8).float()
    assert m.ordered_targets(action)[:, ~m.possible(6)].sum() == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=6))
def test_the_tail_sum_of_a_count_is_its_mean(weights):
    distribution = torch.tensor(weights, dtype=torch.float64)  # over counts 0..n
    distribution = distribution / distribution.sum()
    at_least = distribution.flip(0).cumsum(0).flip(0)[1:]
    mean = (distribution * torch.arange(len(weights))).sum()
    assert float(at_least.sum()) == pytest.approx(float(mean), rel=1e-9)
    n = len(weights) - 1
    model = m.SortGen(replace(TINY, length=n))
    found = model.counts(torch.logit(at_least)[None, None], torch.tensor([n - 1]), torch.zeros(()))
    assert float(found) == pytest.approx(float(mean), rel=1e-6)


def test_monotone_logits_by_hand():
    found = m.monotone_logits(torch.tensor([[1.0, 0.0, -1.0]]))
    second = 1 - math.log(2)
    assert found[0].tolist() == pytest.approx([1.0, second, second - math.log(1 + math.exp(-1))], abs=1e-6)


def test_the_loss_is_the_click_grid_plus_the_pay_grid():
    model = build()
    batch = {**request(candidates=4), "click": torch.ones(5, 4), "pay": torch.zeros(5, 4)}
    click, pay = model.scores(batch).unbind(2)
    expected = m.ordered_loss(click, batch["click"]) + m.ordered_loss(pay, batch["pay"])
    assert torch.equal(model.loss(batch), expected)
    pointwise = build(values="pointwise")
    click, pay = pointwise.scores(batch).double().unbind(2)
    total = sum(
        -F.logsigmoid(click[:, j, j]).mean() - F.logsigmoid(-pay[:, j, j]).mean() for j in range(4)
    )  # fmt: skip
    torch.testing.assert_close(pointwise.loss(batch).double(), total, rtol=1e-5, atol=1e-5)


# -- Inputs and context --


@pytest.mark.parametrize("fuse", ["concatenate", "add"])
def test_a_token_joins_item_position_user_and_score(fuse):
    model = build(fuse=fuse)
    batch = request(lists=2, candidates=4)
    with torch.no_grad():
        tokens = model.place(model.blocks(batch), torch.arange(4))
        row, j = 1, 2
        item = model.item.weight[batch["item"][row, j]] + model.content(batch["content"][row, j])
        user = model.user(batch["profile"][row])
        click, buy = batch["prior"][row, j]
        odds = [math.log(float(p) / (1 - float(p))) for p in (click, buy)]
        score = model.score(torch.tensor([*odds, math.log(float(batch["price"][row, j]))]))
        if fuse == "concatenate":
            expected = model.join(torch.cat([item, user, score, model.position[j]]))
        else:
            expected = item + user + score + model.position[j]
    torch.testing.assert_close(tokens[row, j], expected, atol=1e-4, rtol=1e-4)


def test_position_j_sees_the_items_up_to_j_and_the_diagonal_mask_only_itself():
    batch = request(candidates=4)
    changed = {**batch, "item": batch["item"].clone()}
    changed["item"][:, 2] = changed["item"][:, 2] % 20 + 1
    with torch.no_grad():
        for context, reached in (("causal", [2, 3]), ("diagonal", [2])):
            model = build(context=context)
            gap = (model.scores(batch) - model.scores(changed)).abs().amax((0, 2, 3))
            assert torch.nonzero(gap > 1e-6).flatten().tolist() == reached


def test_pointwise_and_ordered_models_have_the_same_parameters():
    arms = m.arms_of(TINY)
    counts = {name: count_parameters(arm.model(arm.config)) for name, arm in arms.items()}
    assert len(set(counts.values())) == 1, counts


# -- Queues and masks --


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_queue_heads_against_a_loop(seed, gone):
    generator = torch.Generator().manual_seed(seed)
    queues = torch.stack([torch.stack([torch.randperm(6, generator=generator) for _ in range(3)]) for _ in range(2)])
    taken = torch.zeros(2, 6, dtype=torch.bool)
    for row in range(2):
        taken[row, torch.randperm(6, generator=generator)[:gone]] = True
    head, depth = m.queue_heads(queues, taken)
    for row in range(2):
        for q in range(3):
            first = next(k for k, c in enumerate(queues[row, q].tolist()) if not taken[row, c])
            assert (int(head[row, q]), int(depth[row, q])) == (int(queues[row, q, first]), first)


def test_head_mask_lets_heads_see_the_prefix_and_themselves_only():
    assert m.head_mask(2, 3).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]]
    assert m.head_mask(2, 2, causal=False).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 8), st.integers(1, 6), st.booleans())
def test_masks_never_give_nan(chosen, heads, causal):
    mask = m.head_mask(chosen, heads, causal=causal)
    assert mask[:, chosen:].diagonal().all()
    weights = torch.zeros(heads, chosen + heads).masked_fill(~mask, -torch.inf).softmax(-1)
    assert torch.isfinite(weights).all()


def test_heads_of_a_round_do_not_see_each_other():
    model, batch = build(search="all"), request()
    with torch.no_grad():
        blocks = model.blocks(batch)
        where = torch.zeros(12, dtype=torch.long)
        mask = m.head_mask(0, 12)

        def read(x):
            return model.stack(model.place(x, where), mask=mask, cache=model.stack.new_cache())

        changed = blocks.clone()
        changed[:, 3] += 1.0
        gap = (read(blocks) - read(changed)).abs().amax((0, 2))
    assert torch.nonzero(gap > 1e-6).flatten().tolist() == [3]


def test_a_committed_head_leaves_the_cache_of_a_plain_read():
    model, batch = build(), request()
    with torch.no_grad():
        blocks = model.blocks(batch)
        picks = torch.tensor([[0], [2], [1], [2], [0]])
        first = torch.tensor([[4, 5, 6]]).expand(5, -1)
        second = torch.tensor([[7, 8, 9]]).expand(5, -1)
        cache = model.stack.new_cache()
        for position, heads in enumerate((first, second)):
            tokens = model.place(r.take_rows(blocks, heads), torch.full((3,), position))
            model.stack(tokens, mask=m.head_mask(position, 3), cache=cache)
            m.commit(cache, position, picks)
        chosen = torch.cat([first.gather(1, picks), second.gather(1, picks)], 1)
        plain = model.stack.new_cache()
        model.stack(model.place(r.take_rows(blocks, chosen), torch.arange(2)), cache=plain)
    for one, two in zip(cache, plain, strict=True):
        torch.testing.assert_close(one.own.key, two.own.key, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(one.own.value, two.own.value, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="nothing was read"):
        m.commit(model.stack.new_cache(), 0, picks)


# -- Generation --


def naive(model, batch, trade_off):
    """The same search, one list, round and head at a time, each by a full read of [S, head] and of S."""
    config, queues = model.config, model.queues(batch)
    alpha, beta, gamma = config.weights

    def value(blocks, prices):
        if not len(prices):
            return 0.0
        clicks, pays = (c[0].tolist() for c in model.prefix_counts(blocks[None]))
        gmv = sum(p * (b - a) for p, a, b in zip(prices, [0.0, *pays], pays, strict=False))
        return alpha * clicks[-1] + beta * pays[-1] + gamma * gmv

    built = []
    for row in range(len(batch["item"])):
        one = {name: x[row : row + 1] for name, x in batch.items()}
        blocks, price = model.blocks(one)[0], one["price"][0].tolist()
        scale = float(r.request_scale(one, config.weights))
        content, chosen = one["content"][0], []
        for _ in range(config.length):
            best, best_score = None, -math.inf
            for queue in queues[row].tolist():
                free = [c for c in queue if c not in chosen]
                if not free:
                    continue
                a = free[0]
                if config.gain == "queue prefix":
                    front = queue[: queue.index(a) + 1]
                    gain = value(blocks[front], [price[c] for c in front])
                else:
                    longer = [*chosen, a]
                    gain = value(blocks[longer], [price[c] for c in longer])
                    gain -= value(blocks[chosen], [price[c] for c in chosen])
                near = max((float(content[a] @ content[b]) for b in chosen), default=0.0)
                score = trade_off * gain / scale - (1 - trade_off) * near
                if score > best_score + 1e-6:
                    best, best_score = a, score
            chosen.append(best)
        built.append(chosen)
    return torch.tensor(built)


SEARCHES = [
    {},
    {"search": "one queue"},
    {"search": "all"},
    {"gain": "queue prefix"},
    {"context": "diagonal"},
    {"values": "pointwise"},
    {"fuse": "add", "monotone": True, "impossible": "mask"},
    {"weights": (5.0, 1.0, 0.0)},
]


@pytest.mark.parametrize("trade_off", [0.7, 1.0])
@pytest.mark.parametrize("changes", SEARCHES, ids=str)
def test_generation_equals_a_loop_that_runs_the_model_again_on_prefix_and_head(changes, trade_off):
    model, batch = build(**changes), request(lists=3)
    with torch.no_grad():
        found = model.generate(batch, trade_off)
        assert torch.equal(found.chosen, naive(model, batch, trade_off))
        # what the loop expects of its list is what a read of that list says
        clicks, pays = model.prefix_counts(r.take_rows(model.blocks(batch), found.chosen))
    torch.testing.assert_close(found.clicks, clicks, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.pays, pays, atol=1e-4, rtol=1e-4)
    price = batch["price"].gather(1, found.chosen)
    alpha, beta, gamma = model.config.weights
    value = alpha * clicks[:, -1] + beta * pays[:, -1] + gamma * (price * F.pad(pays, (1, 0)).diff()).sum(1)
    torch.testing.assert_close(found.value, value, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from(["queues", "all", "one queue"]))
def test_no_candidate_is_chosen_twice(seed, trade_off, search):
    model, batch = build(seed, search=search), request(seed=seed)
    with torch.no_grad():
        chosen = model.generate(batch, trade_off).chosen
    assert all(len(set(row)) == 4 for row in chosen.tolist())


@pytest.mark.parametrize("search, tokens", [("queues", 12), ("one queue", 4), ("all", 48)])
def test_a_list_costs_its_rounds_times_the_heads_in_one_call(search, tokens):
    model, batch = build(search=search), request()
    read = []
    handle = model.stack.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    with torch.no_grad():
        found = model.generate(batch, 0.9)
    handle.remove()
    assert read == [tokens // 4] * 4  # q new tokens a round, never the prefix again
    assert found.tokens == model.token_evaluations(12) == tokens


class Dispatched(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_generation_makes_no_host_round_trip():
    """No operation reads a value back or has a shape that depends on values."""
    model, batch = build(), request()
    with torch.no_grad(), Dispatched() as seen:
        model.generate(batch, 0.9)
    assert "argmax" in seen.names
    assert not seen.names & {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim"}
    with Dispatched() as seen:
        float(torch.ones(()))
    assert seen.names & {"_local_scalar_dense", "item"}, "the test would not notice a read"


def test_within_a_round_the_cumulative_value_picks_what_the_gain_picks():
    model, batch = build(search="all"), request()
    with torch.no_grad():
        blocks = model.blocks(batch)
        prefix = torch.tensor([0, 5]).expand(5, -1)
        before = [c[:, -1:] for c in model.prefix_counts(r.take_rows(blocks, prefix))]
        others = [c for c in range(12) if c not in (0, 5)]
        cumulative, gain = [], []
        for c in others:
            longer = torch.cat([prefix, torch.full((5, 1), c)], 1)
            clicks, pays = (x[:, -1:] for x in model.prefix_counts(r.take_rows(blocks, longer)))
            price = batch["price"][:, c : c + 1]
            gain.append(model.worth(clicks - before[0], pays - before[1], price))
            cumulative.append(gain[-1] + model.worth(before[0], before[1], torch.ones(5, 1)))
    assert torch.equal(torch.cat(gain, 1).argmax(1), torch.cat(cumulative, 1).argmax(1))


def test_values_depend_on_what_was_selected():
    model, batch = build(), request()
    with torch.no_grad():
        blocks = model.blocks(batch)
        lists = [torch.tensor([[a, 7]]).expand(5, -1) for a in (1, 2)]
        gains = [F.pad(model.prefix_counts(r.take_rows(blocks, x))[0], (1, 0)).diff()[:, 1] for x in lists]
    assert ((gains[0] - gains[1]).abs() > 1e-4).all()


def test_one_queue_is_the_order_of_its_prior():
    model, batch = build(search="one queue"), request()
    with torch.no_grad():
        found = model.generate(batch, 0.7).chosen
    assert torch.equal(found, batch["prior"][..., 0].argsort(dim=1, descending=True)[:, :4])


def test_queues_are_sorted_by_click_pay_and_gmv_priors():
    batch = request(lists=1)
    queues = m.SortGen(TINY).queues(batch)[0]
    click, buy = batch["prior"][0].unbind(-1)
    for queue, prior in zip(queues, (click, click * buy, click * buy * batch["price"][0]), strict=True):
        assert (prior[queue].diff() <= 0).all()


def test_at_lambda_zero_only_diversity_counts():
    model, batch = build(search="all"), request()
    with torch.no_grad():
        chosen = model.generate(batch, 0.0).chosen
    content = batch["content"]
    for row in range(5):
        picks = chosen[row].tolist()
        for k in range(1, 4):
            near = (content[row] @ content[row, picks[:k]].T).amax(1)
            near[picks[:k]] = math.inf
            assert float(near[picks[k]]) == pytest.approx(float(near.min()), abs=1e-5)


def test_labels_are_no_input_of_generation():
    model, batch = build(), request()
    with torch.no_grad():
        plain = model.generate(batch, 0.9)
        labelled = model.generate({**batch, "click": torch.ones(5, 12), "pay": torch.ones(5, 12)}, 0.9)
    assert torch.equal(plain.chosen, labelled.chosen)
    assert torch.equal(plain.value, labelled.value)


def test_a_bfloat16_body_keeps_float32_values():
    model, batch = build().bfloat16(), request()
    with torch.no_grad():
        found = model.generate(batch, 0.9)
    assert found.value.dtype == torch.float32
    assert torch.isfinite(found.value).all()
    assert found.chosen.shape == (5, 4)


@pytest.mark.parametrize("changes", [*SEARCHES[:5], {"model": m.ContextReranker, "values": "pointwise"}], ids=str)
def test_lists_at_each_lambda_in_one_call_are_those_of_a_call_each(changes):
    model, batch = build(**changes, trade_offs=(0.1, 0.5, 1.0)), request()
    with torch.no_grad():
        together = model.rerank_at_each(batch)
        for trade_off, lists in zip(model.trade_offs, together, strict=True):
            assert torch.equal(lists, model.rerank(batch, trade_off))
    assert changes.get("search") == "one queue" or not torch.equal(together[0], together[2])


# -- Baseline, arms and decision --


def test_the_context_reranker_against_a_loop():
    model, batch = build(model=m.ContextReranker, values="pointwise"), request()
    with torch.no_grad():
        found = model.rerank(batch, 0.8)
        for row in range(5):
            one = {name: x[row : row + 1] for name, x in batch.items()}
            ranked = r.formula(one, TINY.weights)[0].argsort(descending=True, stable=True).tolist()
            value = torch.zeros(12)
            for page in range(3):
                dealt = ranked[page::3]  # dealt in turn
                logits = model.logits(model.read(model.blocks(one)[:, dealt]))
                for j, c in enumerate(dealt):
                    click, pay = (float(z[0, j, j].sigmoid()) for z in logits)
                    value[c] = click + pay + float(one["price"][0, c]) * pay
            scaled = (value / float(r.request_scale(one, TINY.weights)))[None]
            assert torch.equal(found[row], r.mmr_select(scaled, r.similarities(one), 0.8, 4)[0])
    assert model.token_evaluations(12) == 12


def small_task():
    generator = torch.Generator().manual_seed(0)

    def lists(width, count=24):
        click = (torch.rand(count, width, generator=generator) < 0.5).float()
        return r.Slates(
            torch.randint(1, 21, (count, width), generator=generator),
            click,
            click * (torch.rand(count, width, generator=generator) < 0.5),
            torch.randn(count, 4, generator=generator),
            torch.arange(count),
            torch.arange(count * width).view(count, width),
        )

    content = F.normalize(torch.rand(21, 5, generator=generator), dim=-1)
    data = r.SlateData(
        lists(4), lists(4), lists(12), lists(12), {"validation": lists(4), "test": lists(4)}, content,
        r.pseudo_prices(20, 0), torch.randn(21, 3, generator=generator), 4,
    )  # fmt: skip
    scorer = r.PriorScorer(20, 5, 4, dim=8)
    return r.make_task(data, scorer, m.WEIGHTS, torch.device("cpu"))


def test_arms_that_reuse_weights_receive_exactly_those_and_train_nothing():
    task, arms = small_task(), m.arms_of(TINY)
    trainer = m.Trainer(task, arms, 2, Recipe(batch_size=8, validations=1), torch.device("cpu"))
    alone = trainer.train("sort-gen", 1, 1e-3)
    before = len(trainer.fits)
    shared = trainer.train("all candidates", 1, 1e-3)
    assert len(trainer.fits) == before
    assert shared.steps == alone.steps == 2
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, shared.model.state_dict()[name]), name
    assert shared.model.config.search == "all"
    fresh = m.Trainer(task, arms, 2, Recipe(batch_size=8, validations=1), torch.device("cpu"))
    later = fresh.train("all candidates", 1, 1e-3)  # the other order gives the same weights
    assert torch.equal(later.model.item.weight, alone.model.item.weight)
    for arm in arms.values():
        assert not arm.reuses or not arms[arm.reuses].reuses


def test_arms_that_change_the_values_choose_rate_and_step_for_themselves():
    """Only an arm that searches otherwise with the method's values may serve the method's weights."""
    arms = m.arms_of(TINY)
    assert {name for name, arm in arms.items() if arm.reuses} == {"cumulative value", "one queue", "all candidates"}
    assert {arm.reuses for arm in arms.values()} == {"", "sort-gen"}


def test_a_width_that_the_heads_do_not_divide_is_refused():
    card = adapters()["sort-gen"].card
    study = Study(card, overrides=Overrides(card.key, card.overrides, {"AUTO_RESEARCH_SORT_GEN_WIDTH": "30"}))
    with pytest.raises(UserError, match="WIDTH 30 is no multiple of the 4 attention heads"):
        m.run(study)


def test_trained_arms_differ_in_one_thing_each():
    arms = m.arms_of(TINY)
    method = arms["sort-gen"].config
    changed = {
        name: {k for k in vars(method) if getattr(arm.config, k) != getattr(method, k)} for name, arm in arms.items()
    }
    assert changed == {
        "pointwise context + MMR": {"values"},
        "sort-gen": set(),
        "non-ordered values": {"values"},
        "cumulative value": {"gain"},
        "one queue": {"search"},
        "all candidates": {"search"},
        "no context": {"context"},
        "sort-gen, simulated feedback": {"feedback"},
        "pointwise, simulated feedback": {"values", "feedback"},
    }


def verdicts(table):
    """Clause text -> state, where `table` maps (baseline, metric) to (low, high) of the method's difference."""

    def compare(method, baseline, metric):
        low, high = table.get((baseline, metric), (0.1, 0.2))
        return Difference(
            method=method, baseline=baseline, metric=metric, mean=(low + high) / 2, low=low, high=high,
            relative=None, baseline_mean=1.0, wins=3, seeds=3, units=10,
        )  # fmt: skip

    return [clause.decide(compare)[0] for clause in m.decision_rule() if clause.required]


def test_the_decision_rule():
    none, worse = (-0.1, 0.1), (-0.2, -0.1)
    assert verdicts({}) == ["holds"] * 6
    assert verdicts({("formula", "clicks"): none})[0] == "holds"  # two of three are enough
    assert verdicts({("formula", "clicks"): worse})[0] == "reversed"  # but none may be worse
    pointwise = "pointwise context + MMR"
    assert verdicts({(pointwise, "clicks"): none, (pointwise, "pays"): none})[1] == "undecided"
    mmr = {("formula + MMR", name): none for name in r.OBJECTIVES}
    assert verdicts(mmr)[2] == "reversed"
    same = {("formula + MMR", f"value at {t:g}"): none for t in (0.7, 0.85, 0.95)}
    assert verdicts(same)[3] == "reversed"  # a gain at lambda = 1 only
    assert verdicts({**same, ("formula + MMR", "value at 1"): none})[3] == "undecided"
    assert verdicts({("formula + MMR", "ILAD"): (-0.05, -0.02)})[4] == "reversed"
    assert verdicts({("all candidates", "value"): (-0.04, 0.0)})[5] == "holds"  # 96 % are kept
    assert verdicts({("all candidates", "value"): (-0.2, -0.06)})[5] == "reversed"
