"""OneTrans: tokens, mixed parameters, the mask, the pyramid, the cache, and the arms of the protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.layers.attention import KVCache
from auto_research.layers.towers import forward_flops
from auto_research.papers.ranking import onetrans as paper
from auto_research.papers.ranking.onetrans import (
    FULL,
    GROUP_WISE,
    METHOD,
    NO_PYRAMID,
    SEP,
    SHARED,
    STRONG,
    WEAK,
    OneTrans,
    OneTransBlock,
    OneTransConfig,
    decision_rule,
    fields_of,
    variants,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.click import miniature
from auto_research.tasks.request_cost import measure_requests

CPU = torch.device("cpu")
TINY = OneTransConfig(width=8, heads=2, queries=(6, 3, 0), history=6, field_width=8, event_width=4)


@pytest.fixture(scope="module")
def task():
    return miniature(detailed=True, history_length=6)


@pytest.fixture(scope="module")
def batch(task):
    return task.rows(task.train[2::4], CPU)


def model_of(task, **changes):
    torch.manual_seed(0)
    return OneTrans(fields_of(task), replace(TINY, **changes), liked=task.liked_code).eval()


# -- tokens --------------------------------------------------------------------------------------------------------


def test_auto_split_cuts_one_network_into_tokens_and_group_wise_has_one_for_each_group(task, batch):
    auto = model_of(task, ns_tokens=3).other
    e = auto.features(batch)
    hidden = F.gelu(e @ auto.split[0].weight.T + auto.split[0].bias)
    flat = hidden @ auto.split[2].weight.T + auto.split[2].bias
    torch.testing.assert_close(auto(batch), torch.stack(flat.chunk(3, dim=1), 1))
    grouped = model_of(task, tokens="group-wise").other
    e = grouped.features(batch)
    for i in range(grouped.count):
        hidden = F.gelu(e[:, 8 * i : 8 * i + 8] @ grouped.rise.weight[i] + grouped.rise.bias[i])
        torch.testing.assert_close(grouped(batch)[:, i], hidden @ grouped.fall.weight[i] + grouped.fall.bias[i])
    assert grouped.count == 6  # user, profile, item, content, context, statistics


def test_streams_have_networks_of_their_own_and_interleave_by_time(task, batch):
    model = model_of(task)
    sequence, features = model.sequence, model.other.features
    x, valid = sequence(features, batch)
    events = sequence.events(features, batch)
    assert torch.equal(valid, batch["history_item"] > 0)
    row = int(valid.sum(1).argmax())
    for place in valid[row].nonzero().flatten().tolist():
        stream = int(batch["history_rating"][row, place] < task.liked_code)
        slot = int(valid[row, :place].sum())
        expected = sequence.streams[stream](events[row, place]) + sequence.types.weight[stream]
        torch.testing.assert_close(x[row, place], expected + sequence.slots.weight[slot])
    assert 0 < (batch["history_rating"][valid] < task.liked_code).float().mean() < 1


@pytest.mark.parametrize("separator", [True, False])
def test_intent_order_is_liked_separator_disliked(task, batch, separator):
    model = model_of(task, merge="intent", separator=separator)
    sequence, features = model.sequence, model.other.features
    x, valid = sequence(features, batch)
    events = sequence.events(features, batch)
    for row in range(len(x)):
        items, ratings = batch["history_item"][row], batch["history_rating"][row]
        liked = [i for i in range(6) if items[i] > 0 and ratings[i] >= task.liked_code]
        disliked = [i for i in range(6) if items[i] > 0 and ratings[i] < task.liked_code]
        expected = [sequence.streams[0](events[row, i]) for i in liked]
        expected += [sequence.separator] if separator else []
        expected += [sequence.streams[1](events[row, i]) for i in disliked]
        assert int(valid[row].sum()) == len(expected)
        for slot, (token, found) in enumerate(zip(expected, x[row][valid[row]], strict=True)):
            torch.testing.assert_close(found, token + sequence.slots.weight[slot])


# -- the block -----------------------------------------------------------------------------------------------------


def by_loops(block: OneTransBlock, x: torch.Tensor, valid: torch.Tensor, count: int) -> torch.Tensor:
    """The block token by token: private weights at the last `count` tokens, keys up to the query's place."""
    batch, length, width = x.shape
    heads, d = block.heads, width // block.heads
    first = length - count - min(block.queries, length - count)

    def project(mixed, y, place, outputs):
        token = place - (length - count)
        if mixed.private is None or token < 0:
            return mixed.shared(y)
        weight, bias = mixed.private.weight[token], mixed.private.bias[token]
        return (y @ weight + bias)[..., :outputs]

    def ffn(y, place):
        token = place - (length - count)
        if block.feed_forward.private is None or token < 0:
            return block.feed_forward.shared(y)
        net = block.feed_forward.private
        hidden = F.gelu(y @ net.rise.weight[token] + net.rise.bias[token])
        return hidden @ net.fall.weight[token] + net.fall.bias[token]

    y = block.attention_norm(x)
    kv = [project(block.key_value, y[:, j], j, 2 * width) for j in range(length)]
    rows = []
    for p in range(first, length):
        q = project(block.query, y[:, p], p, width)
        found = torch.zeros(batch, width, dtype=x.dtype)
        for b in range(batch):
            keys = [j for j in range(length) if valid[b, j] and (j <= p or not block.causal)]
            for h in range(heads if keys else 0):
                cut = slice(h * d, (h + 1) * d)
                score = torch.stack([q[b, cut] @ kv[j][b, cut] / d**0.5 for j in keys]).softmax(0)
                values = torch.stack([kv[j][b, width:][cut] for j in keys])
                found[b, cut] = score @ values
        z = x[:, p] + block.output(found)
        rows.append(z + ffn(block.feed_forward_norm(z), p))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("queries", [0, 2, 5])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("parameters", ["mixed", "shared"])
def test_block_equals_loops_over_tokens_heads_and_keys(queries, mask, parameters):
    torch.manual_seed(1)
    block = OneTransBlock(replace(TINY, mask=mask, parameters=parameters), 3, queries).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, :2] = False
    found, expected = block(x, valid, 3), by_loops(block, x, valid, 3)
    assert found.shape == (2, queries + 3, 8)
    torch.testing.assert_close(found, expected)


def test_mixed_weights_have_the_sheets_shapes_and_differ_between_ns_tokens():
    block = OneTransBlock(TINY, 3, 2)
    assert block.query.private.weight.shape == (3, 8, 8)
    assert block.key_value.private.weight.shape == (3, 8, 16)
    assert block.feed_forward.private.rise.weight.shape == (3, 8, 32)
    assert block.feed_forward.private.fall.weight.shape == (3, 32, 8)
    x = torch.randn(1, 1, 8).expand(1, 7, 8)
    keys = block.key_value(x, 3)[0]
    torch.testing.assert_close(keys[:4], keys[:1].expand(4, -1))  # one set for all S tokens
    distinct = torch.cdist(keys[3:], keys[3:])
    assert (distinct + torch.eye(4)).min() > 0.1


def test_history_never_sees_a_feature_or_a_candidate(task, batch):
    model, leaky = model_of(task), model_of(task, mask="full")
    changed = {**batch, "item": batch["item"] % task.num_items + 1, "statistics": -batch["statistics"]}

    def history_states(m, b):
        s, valid = m.sequence(m.other.features, b)
        x = torch.cat([s, m.other(b)], 1)
        return m.blocks[0](x, F.pad(valid, (0, m.count), value=True), m.count)[:, : -m.count]

    assert torch.equal(history_states(model, batch), history_states(model, changed))
    assert not torch.equal(history_states(leaky, batch), history_states(leaky, changed))


def test_feature_tokens_read_the_history_in_every_layer(task, batch):
    model = model_of(task)
    s, valid = model.sequence(model.other.features, batch)
    x, valid = torch.cat([s, model.other(batch)], 1), F.pad(valid, (0, model.count), value=True)
    for block in model.blocks:
        x = x.detach().requires_grad_()
        out = block(x, valid, model.count)
        # The first NS token sees no other NS token, but it sees the history.
        (gradient,) = torch.autograd.grad(out[:, -model.count].sum(), x, retain_graph=True)
        assert (gradient[:, : -model.count].abs().sum((1, 2)) > 0).all()
        assert gradient[:, -model.count + 1 :].abs().sum() == 0
        x, valid = out, valid[:, valid.shape[1] - out.shape[1] :]


# -- the pyramid ---------------------------------------------------------------------------------------------------


def test_pyramid_keeps_the_tail_and_ends_with_the_feature_tokens(task, batch):
    model = model_of(task)
    lengths = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, out: lengths.append(out.shape[1]))
    model.scores(batch)
    assert lengths == [6 + 6, 3 + 6, 0 + 6]


def test_tail_queries_give_the_end_of_all_queries(task):
    torch.manual_seed(2)
    whole = OneTransBlock(TINY, 3, 9).double()
    for queries in range(1, 6):
        tail = OneTransBlock(TINY, 3, queries).double()
        tail.load_state_dict(whole.state_dict())
        x, valid = torch.randn(2, 9, 8, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
        torch.testing.assert_close(tail(x, valid, 3), whole(x, valid, 3)[:, -queries - 3 :])


def test_queries_are_computed_for_the_tail_alone():
    def flops(queries: int) -> int:
        block = OneTransBlock(TINY, 3, queries)
        x, valid = torch.randn(1, 33, 8), torch.ones(1, 33, dtype=torch.bool)
        return forward_flops(lambda: block(x, valid, 3))

    d, hidden, length = 8, 32, 33
    one = 2 * (2 * d * d + 2 * d * hidden + 2 * length * d)  # query, output, network, scores and values
    assert flops(10) - flops(5) == 5 * one
    assert flops(30) == flops(99)  # there are 30 S tokens


def test_no_pyramid_has_the_larger_attention(task):
    config = OneTransConfig()
    torch.manual_seed(0)
    model = OneTrans(fields_of(task), config)
    assert model.score_elements == (32 + 6) * (32 + 6) + (16 + 6) * (32 + 6) + (0 + 6) * (16 + 6)


# -- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"merge": "intent"}, {"tokens": "group-wise"}, {"parameters": "shared"}])
def test_cached_scores_equal_plain_scores_for_a_pack_of_candidates(task, changes):
    model = model_of(task, **changes)
    items = torch.arange(task.num_items)
    with torch.no_grad():
        plain = task.pack_scores(model, task.test, items, CPU, packed=False)
        cached = task.pack_scores(model, task.test, items, CPU, packed=True)
    assert (plain - cached).abs().max() < 1e-5
    assert plain.std(1).min() > 1e-4  # candidates differ, so there is something to compare


def test_a_candidates_cached_score_does_not_depend_on_the_others(task):
    model = model_of(task)
    with torch.no_grad():
        some = task.pack_scores(model, task.test, torch.tensor([3, 5]), CPU)
        others = task.pack_scores(model, task.test, torch.tensor([3, 8, 1]), CPU)
    torch.testing.assert_close(some[:, 0], others[:, 0])


def test_keys_that_were_kept_stay_valid_when_events_are_appended(task):
    """Slots count from the oldest event, so the first layer's keys of old events do not move."""
    model, block = model_of(task), model_of(task).blocks[0]
    event = task.test[:1]
    batch = task.rows(event, CPU)
    columns = [name for name in batch if name.startswith("history")]
    earlier = {**batch, **{name: batch[name][:, :-2] for name in columns}}
    caches = []
    for b in (earlier, batch):
        x, valid = model.sequence(model.other.features, b)
        caches.append(KVCache())
        block(x, valid, 0, caches[-1])
    torch.testing.assert_close(caches[1].key[:, :, :4], caches[0].key)


def test_full_attention_cannot_share_requests(task):
    assert model_of(task).shares_requests
    assert not model_of(task, mask="full").shares_requests


def test_sharing_costs_less_and_the_measure_says_so(task):
    cost = measure_requests(task, model_of(task), CPU, candidates=40, rounds=1)
    assert cost.gap < 1e-5
    assert cost.packed_flops < 0.8 * cost.plain_flops
    assert cost.packed_seconds > 0
    assert cost.plain_seconds > 0
    one = measure_requests(task, model_of(task), CPU, candidates=1, rounds=1)
    shared = (40 * one.plain_flops - cost.packed_flops) / 39  # what each further candidate saves
    assert 0 < shared < one.plain_flops


# -- the protocol --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arms():
    task = miniature(users=12, items=60, events=40, detailed=True, history_length=32)
    found, costs = variants(task, OneTransConfig(), scales=(8, 24))
    return {v.name: v.build() for v in found if v.kind != "floor"}, costs


def test_budgets_are_equal_in_parameters_and_flops(arms):
    models, _ = arms
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    flops = {name: m.logged["flops"] for name, m in models.items()}
    for name in (STRONG, WEAK):
        assert count[name] == pytest.approx(count[METHOD], rel=0.05), name
        assert flops[name] == pytest.approx(flops[METHOD], rel=0.10), name
    assert count[SHARED] == pytest.approx(count[METHOD], rel=0.05)
    assert count[FULL] == count[METHOD]
    assert flops[FULL] == flops[METHOD]
    assert count[GROUP_WISE] == pytest.approx(count[METHOD], rel=0.05)
    assert flops[NO_PYRAMID] > 1.3 * flops[METHOD]
    assert models[NO_PYRAMID].logged["attention scores"] > 1.3 * models[METHOD].logged["attention scores"]
    assert set(models) == {
        STRONG,
        WEAK,
        SHARED,
        FULL,
        NO_PYRAMID,
        GROUP_WISE,
        SEP,
        METHOD,
        "onetrans, d 8",
        "onetrans, d 24",
    }


def test_costs_of_the_curve_are_the_flops_of_its_arms(arms):
    models, costs = arms
    assert costs == {name: models[name].logged["flops"] for name in ("onetrans, d 8", METHOD, "onetrans, d 24")}


def test_strong_control_reads_the_whole_history_and_crosses_all_fields(task, batch):
    torch.manual_seed(0)
    model = paper.TransformerRankMixer(fields_of(task), replace(TINY, width=16), 16, 16).eval()
    score = model.scores(batch)
    rows = batch["history_item"][:, 0] > 0
    assert rows.any()
    older = {**batch, "history_item": batch["history_item"].clone()}
    older["history_item"][:, 0] = older["history_item"][:, 0] % task.num_items + 1
    assert (model.scores(older) != score)[rows].all()
    assert (model.scores({**batch, "hour": (batch["hour"] + 5) % 24}) != score).all()


def rule_on(gaps, cost=None):
    def compare(method, baseline, metric):
        interval = gaps.get((baseline, metric), (0.001, 0.003))
        return difference(method, baseline, metric, interval, 0.8)

    return conclude(decision_rule({"a": 1.0, METHOD: 10.0}, cost), compare, budget="standard", seeds=3)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ({}, "reproduced"),
        ({(STRONG, "auc"): (-0.003, -0.001)}, "reproduced"),  # AUC within users suffices
        ({(STRONG, "auc"): (-0.003, -0.001), (STRONG, "user_auc"): (-0.003, 0.001)}, "inconclusive"),
        ({(STRONG, "auc"): (-0.003, -0.001), (STRONG, "user_auc"): (-0.003, -0.001)}, "not reproduced"),
        ({(SHARED, "auc"): (-0.003, -0.001)}, "not reproduced"),
        ({(NO_PYRAMID, "auc"): (-0.0007, 0.0)}, "reproduced"),  # less than 0.1 % of 0.8
        ({(NO_PYRAMID, "auc"): (-0.0020, -0.0009)}, "not reproduced"),
        ({("a", "auc"): (-0.003, -0.001)}, "reproduced"),  # the curve is reported
    ],
)
def test_decision_rule_of_the_protocol(gaps, verdict):
    assert rule_on(gaps)[0] == verdict


def test_systems_claim_needs_equality_and_speed():
    def state(gap: float, packed: float) -> str:
        cost = paper.RequestCost(100, gap, packed, 1.0, 10, 100)
        (found,) = [c for c in rule_on({}, cost)[1] if c.clause.startswith("systems")]
        assert not found.required
        return found.state

    assert [state(1e-7, 0.5), state(1e-7, 1.5), state(1e-4, 0.5)] == ["holds", "reversed", "reversed"]


def test_loss_stays_in_float32_under_bfloat16(task, batch):
    model = model_of(task)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(batch)
        cached = task.pack_scores(model, task.test[:2], torch.arange(3), CPU)
    assert loss.dtype == cached.dtype == torch.float32
    assert torch.isfinite(cached).all()
    loss.backward()
