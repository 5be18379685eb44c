"""CCFormer: streams, time and position encoding, subspace mixing, compression, shared requests, arms, decision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.layers.towers import forward_flops
from auto_research.layers.transformer import make_norm
from auto_research.papers.ranking import ccformer as paper
from auto_research.papers.ranking.ccformer import (
    ATTENTION,
    FUSED,
    HSTU,
    METHOD,
    NO_COMPRESSION,
    NO_ENCODING,
    NO_MIXING,
    PLAIN,
    SOFTMAX,
    CCFormer,
    CCFormerBlock,
    CCFormerConfig,
    Compression,
    CrossFieldAttention,
    FusedAttention,
    SubspaceMixing,
    TimePositionEncoding,
    TrainingSpeed,
    decision_rule,
    measure_training,
    variants,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.personal_requests import miniature, packed_gap
from auto_research.tasks.request_rankers import Events, SelfAttentionTrunk
from auto_research.tasks.request_ranking import candidates_apart

CPU = torch.device("cpu")
TINY = CCFormerConfig(width=16, layers=2, heads=2, group=4, subspace=4)
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def task():
    return miniature(events=60, history=10)


@pytest.fixture(scope="module")
def batch(task):
    return task.rows(task.requests["train"][4:24:2], CPU)


def model_of(task, **changes):
    torch.manual_seed(0)
    return CCFormer(task, replace(TINY, **changes)).eval()


def events_of(rows=2, length=8, width=16, missing=3):
    """Made-up events in float64; the second row lacks its oldest."""
    torch.manual_seed(1)
    valid = torch.ones(rows, length, dtype=torch.bool)
    valid[1:, :missing] = False
    seconds = torch.randint(1, 100_000, (rows, length)).sort(dim=1, descending=True).values * valid
    return Events(torch.randn(rows, length, width, dtype=DOUBLE) * valid[..., None], seconds, valid)


# -- streams -------------------------------------------------------------------------------------------------------


def by_heads(query, key, value, valid, heads):
    """Softmax attention pair by pair: query (Q, d), key and value (K, d), valid (K,) -> (Q, d)."""
    size = query.shape[1] // heads
    out = torch.zeros_like(query)
    for i in range(len(query)):
        for h in range(heads):
            cut = slice(h * size, (h + 1) * size)
            seen = [j for j in range(len(key)) if valid[j]]
            score = torch.stack([query[i, cut] @ key[j, cut] / math.sqrt(size) for j in seen]).softmax(0)
            out[i, cut] = sum(s * value[j, cut] for s, j in zip(score, seen, strict=True))
    return out


def test_three_streams_equal_loops_over_pairs():
    layer = CrossFieldAttention(16, 2).double()
    events, user, target = events_of(), torch.randn(2, 3, 16, dtype=DOUBLE), torch.randn(2, 5, 16, dtype=DOUBLE)
    change, moved, kept = layer.request(user, events)
    read = layer.read(target, kept)
    assert moved is None  # the sequence issues no query
    everyone = torch.ones(3, dtype=torch.bool)
    for b in range(2):
        qu, ku, vu = (layer.user_norm(user[b]) @ layer.user.weight.T).chunk(3, dim=1)
        ks, vs = (layer.sequence_norm(events.x[b]) @ layer.sequence.weight.T).chunk(2, dim=1)
        to_sequence, to_user = (target[b] @ layer.target.weight.T).chunk(2, dim=1)  # without a norm
        us = by_heads(qu, ks, vs, events.valid[b], 2)
        torch.testing.assert_close(change[b], us @ layer.user_out.weight.T)
        ts, tu = by_heads(to_sequence, ks, vs, events.valid[b], 2), by_heads(to_user, ku, vu, everyone, 2)
        torch.testing.assert_close(read[b], torch.cat([ts, tu], 1) @ layer.target_out.weight.T)


def test_projections_have_the_sheets_shapes():
    layer = CrossFieldAttention(16, 2)
    shapes = {name: tuple(p.shape[::-1]) for name, p in layer.named_parameters() if p.dim() == 2}
    assert shapes == {
        "user.weight": (16, 48),
        "sequence.weight": (16, 32),
        "target.weight": (16, 32),
        "user_out.weight": (16, 16),
        "target_out.weight": (32, 16),
    }


def test_targets_do_not_attend_to_each_other_and_nothing_reads_them(task, batch):
    model = model_of(task)
    other = {**batch, "candidate": batch["candidate"].clone()}
    other["candidate"][:, 1:] = other["candidate"][:, 1:] % task.log.num_items + 1
    torch.testing.assert_close(model.scores(batch)[:, 0], model.scores(other)[:, 0])
    assert not torch.equal(model.scores(batch)[:, 1], model.scores(other)[:, 1])
    one, two = model.request_side(batch), model.request_side(other)
    assert torch.equal(one.summary, two.summary)
    for first, second in zip(one.kept, two.kept, strict=True):
        assert torch.equal(first.sequence.key, second.sequence.key)
        assert torch.equal(first.user.value, second.user.value)


def test_the_sequence_reads_nobody(task, batch):
    """Another user leaves every block's keys of the sequence as they are; with one fused attention it does not."""
    other = {**batch, "user": batch["user"] % task.log.num_users + 1}
    for attention, same in (("separate", True), ("fused", False)):
        model = model_of(task, attention=attention)
        one, two = model.request_side(batch).kept[1].sequence.key, model.request_side(other).kept[1].sequence.key
        length = one.shape[2] if same else one.shape[2] - 4
        assert torch.equal(one[:, :, :length], two[:, :, :length]) is same


@pytest.mark.parametrize("skip", ["input", "ffn"])
def test_block_passes_each_fields_network_and_adds_what_was_read(skip):
    torch.manual_seed(3)
    block = CCFormerBlock(replace(TINY, skip=skip)).double()
    user, target = torch.randn(2, 3, 16, dtype=DOUBLE), torch.randn(2, 5, 16, dtype=DOUBLE)
    found, after, kept = block.request(user, events_of())

    def network(net, x):
        gate, up = (x @ net.rise.weight.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ net.fall.weight.T

    passed = network(block.user_network, user)  # one network for all tokens of the field
    change, _, _ = block.attention.request(passed, events_of())
    torch.testing.assert_close(found, (user if skip == "input" else passed) + change)
    passed = network(block.target_network, target)
    expected = (target if skip == "input" else passed) + block.attention.read(passed, kept)
    torch.testing.assert_close(block.read(target, kept), expected)
    assert after.x.shape[1] == 4


def test_order_within_a_block_is_attention_encoding_mixing_compression():
    torch.manual_seed(3)
    user, events = torch.randn(2, 3, 16, dtype=DOUBLE), events_of()
    for encoding in ("after", "before", "none"):
        block = CCFormerBlock(replace(TINY, encoding=encoding)).double()
        _, found, kept = block.request(user, events)
        x, real = events.x, events.valid[..., None]
        read = x
        if encoding != "none":
            with torch.no_grad():
                block.encoding.position.normal_()
            _, found, kept = block.request(user, events)
            x = (x + block.encoding(x, events.seconds)) * real
            read = x if encoding == "before" else read
        x = (x + block.mixing(x)) * real
        torch.testing.assert_close(found.x, block.compression(events.with_vectors(x)).x)
        key, _ = block.attention.sequence(block.attention.sequence_norm(read)).chunk(2, dim=-1)
        torch.testing.assert_close(kept.sequence.key.transpose(1, 2).flatten(2), key)


# -- within the sequence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["log", "days"])
def test_time_and_position_weights_by_hand(clock):
    layer = TimePositionEncoding(3, clock)
    with torch.no_grad():
        layer.scale.fill_(0.3)
        layer.rate.fill_(-0.4)
        layer.base.fill_(0.7)
        layer.position.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    t = [200_000, 90_000, 89_990]
    alpha, gamma, beta = math.log1p(math.exp(0.3)), math.log1p(math.exp(-0.4)), 1 / (1 + math.exp(-0.7))
    for i in range(3):
        for j in range(3):
            apart = abs(t[i] - t[j])
            apart = math.log1p(apart) if clock == "log" else apart / 86_400
            expected = alpha * beta ** (gamma * apart) + (i - j + 2 + 1)  # w[i - j + m - 1]
            assert float(layer.weights(torch.tensor(t))[i, j].detach()) == pytest.approx(expected, rel=1e-5)


def test_encoding_replaces_each_group_by_its_weighted_sum():
    torch.manual_seed(0)
    layer = TimePositionEncoding(4).double()
    with torch.no_grad():
        layer.position.normal_()
    events = events_of()
    found = layer(events.x, events.seconds)
    for p in range(2):
        group = slice(4 * p, 4 * p + 4)
        for b in range(2):
            weights = layer.weights(events.seconds[b, group]).double()
            torch.testing.assert_close(found[b, group], weights @ events.x[b, group])


def test_encoding_starts_as_told():
    layer = TimePositionEncoding(4)
    assert torch.equal(layer.position, torch.zeros(7))  # w has 2m - 1 entries
    assert float(torch.sigmoid(layer.base.detach())) == 0.5
    assert float(F.softplus(layer.scale.detach())) == pytest.approx(0.25)
    assert float(F.softplus(layer.rate.detach())) == pytest.approx(0.25)
    for value in (-30.0, 30.0):  # however far they move, α and γ stay positive and β inside (0, 1)
        with torch.no_grad():
            for parameter in (layer.scale, layer.rate, layer.base):
                parameter.fill_(value)
        weights = layer.weights(torch.tensor([5, 4, 2, 0]))
        assert torch.isfinite(weights).all()
        assert (weights >= 0).all()


def test_decay_is_of_time_not_of_place(task, batch):
    """Same order, other moments: scores move; without the encoding they do not."""
    later = {**batch, "age": batch["age"] * 50}
    model = model_of(task)
    assert (model.scores(batch) - model.scores(later)).abs().max() > 1e-5
    model = model_of(task, encoding="none")
    assert torch.equal(model.scores(batch), model.scores(later))


def test_encoding_and_mixing_cost_grows_with_length_not_with_its_square():
    encoding, mixing = TimePositionEncoding(4), SubspaceMixing(16, 4, 4)

    def flops(length):
        x, t = torch.randn(1, length, 16), torch.arange(length)[None]
        return forward_flops(lambda: encoding(x, t)), forward_flops(lambda: mixing(x))

    assert flops(64) == (2 * 64 * 4 * 16, 3 * 2 * 16 * 4 * 16 * 16)  # L·m·d, and 3 maps of P·(d/n)·(mn)²
    assert [a / b for a, b in zip(flops(256), flops(64), strict=True)] == [4, 4]


def test_subspace_mixing_equals_loops_over_groups_and_subspaces():
    torch.manual_seed(0)
    m, n, d = 4, 2, 8
    layer = SubspaceMixing(d, m, n, hidden=5).double()
    x = torch.randn(2, 12, d, dtype=DOUBLE)
    gates, falls = layer.networks.rise.weight, layer.networks.fall.weight
    assert gates.shape == (d // n, m * n, 2 * 5)  # private over the subspaces, shared over positions
    expected = torch.zeros_like(x)
    for b in range(2):
        for p in range(3):
            for c in range(d // n):
                vector = torch.stack([x[b, m * p + e, n * c + k] for e in range(m) for k in range(n)])
                gate, value = (vector @ gates[c]).chunk(2)
                out = (F.silu(gate) * value) @ falls[c]
                for e in range(m):
                    expected[b, m * p + e, n * c : n * c + n] = out[n * e : n * e + n]
    torch.testing.assert_close(layer(x), expected)


def test_subspaces_have_networks_of_their_own():
    torch.manual_seed(0)
    layer = SubspaceMixing(8, 4, 2)
    same = torch.randn(1, 4, 1, 2).expand(-1, -1, 4, -1).flatten(2)  # every subspace holds the same numbers
    out = layer(same).unflatten(-1, (4, 2))
    assert min(float((out[:, :, i] - out[:, :, j]).abs().max()) for i in range(4) for j in range(i)) > 1e-3
    shared = layer.networks.rise.weight
    with torch.no_grad():
        shared.copy_(shared[:1].expand_as(shared))
        layer.networks.fall.weight.copy_(layer.networks.fall.weight[:1].expand_as(layer.networks.fall.weight))
    out = layer(same).unflatten(-1, (4, 2))
    torch.testing.assert_close(out[:, :, 0], out[:, :, 3])


@pytest.mark.parametrize("layer", [SubspaceMixing(16, 4, 4), TimePositionEncoding(4)], ids=["mixing", "encoding"])
def test_whole_groups_commute_and_an_event_touches_its_own_group_only(layer):
    torch.manual_seed(0)
    x, t = torch.randn(2, 12, 16), torch.randint(0, 1000, (2, 12))
    call = (lambda x, t: layer(x, t)) if isinstance(layer, TimePositionEncoding) else (lambda x, t: layer(x))

    def permuted(y, order=(2, 0, 1)):
        return y.unflatten(1, (3, 4))[:, list(order)].flatten(1, 2)

    torch.testing.assert_close(call(permuted(x), permuted(t)), permuted(call(x, t)))
    changed = x.clone()
    changed[:, 5] += 1
    moved = (call(changed, t) != call(x, t)).any(-1).any(0)
    assert moved.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_zero_init_makes_mixing_begin_as_nothing():
    x = torch.randn(2, 8, 16)
    assert SubspaceMixing(16, 4, 4, zero_init=True)(x).abs().max() == 0
    assert SubspaceMixing(16, 4, 4)(x).abs().max() > 0


@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 2), (3, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize("length", [7, 8])
def test_compression_equals_loops_over_windows_that_end_at_the_latest_event(kernel, stride, length):
    torch.manual_seed(0)
    layer, events = Compression(16, kernel, stride).double(), events_of(length=length)
    found = layer(events)
    count = math.ceil(length / stride)
    assert found.x.shape == (2, count, 16)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    for j in range(count):
        end = length - 1 - stride * (count - 1 - j)
        assert torch.equal(found.seconds[:, j], events.seconds[:, end])  # the last moment of the window
        assert torch.equal(found.valid[:, j], events.valid[:, end])
        out = bias.expand(2, -1)
        for k in range(kernel):
            place = end - kernel + 1 + k
            out = out + (events.x[:, place] @ weight[:, :, k].T if place >= 0 else 0)
        torch.testing.assert_close(found.x[:, j], out * found.valid[:, j, None])


def test_a_thousand_events_are_four_tokens_after_eight_blocks():
    layer, events = Compression(2, 3, 2), events_of(1, 1000, 2)
    events = replace(events, x=events.x.float())
    lengths = []
    for _ in range(8):
        events = layer(events)
        lengths.append(events.x.shape[1])
    assert lengths == [500, 250, 125, 63, 32, 16, 8, 4]


def test_receptive_field_grows_with_depth():
    """How many events reach the latest token: 3 after one block, 7 after two, 15 after three."""
    layers = [Compression(2, 3, 2).double() for _ in range(3)]
    for depth, reach in ((1, 3), (2, 7), (3, 15)):
        events = events_of(1, 32, 2)
        x = events.x.clone().requires_grad_()
        events = replace(events, x=x)
        for layer in layers[:depth]:
            events = layer(events)
        (gradient,) = torch.autograd.grad(events.x[0, -1].sum(), x)
        assert (gradient[0].abs().sum(1) > 0).nonzero().flatten().tolist() == list(range(32 - reach, 32))


def test_every_block_halves_the_whole_sequence(task, batch):
    model = model_of(task, layers=3)
    assert [kept.valid.shape[1] for kept in model.request_side(batch).kept] == [12, 8, 4]  # 10, 6, 4 in whole groups
    logged = [model.logged[f"sequence tokens in block {i}"] for i in (1, 2, 3)]
    assert logged == [10, 6, 4]
    none = model_of(task, layers=3, stride=1)
    assert [kept.valid.shape[1] for kept in none.request_side(batch).kept] == [12, 12, 12]


def test_the_oldest_event_reaches_the_score(task):
    """Compression is of the whole sequence: no recent window is kept and no old event dropped."""
    full = task.rows(task.requests["test"][:6], CPU)
    assert (full["item"] > 0).all()
    model = model_of(task)
    older = {**full, "item": full["item"].clone()}
    older["item"][:, 0] = older["item"][:, 0] % task.log.num_items + 1
    assert ((model.scores(full) - model.scores(older)).abs().amax((1, 2)) > 0).all()


# -- read-out and shared requests ----------------------------------------------------------------------------------


def test_read_out_is_the_means_of_user_and_sequence_beside_the_target():
    torch.manual_seed(0)
    trunk = paper.CCFormerTrunk(TINY).double()
    user, target, events = (
        torch.randn(2, 3, 16, dtype=DOUBLE),
        torch.randn(2, 5, 16, dtype=DOUBLE),
        events_of(),
    )
    states = trunk(user, events, target)
    assert states.shape == (2, 5, 48)
    for block in trunk.blocks:
        user, events, kept = block.request(user, events)
        target = block.read(target, kept)
    for b in range(2):
        torch.testing.assert_close(states[b, 0, :16], trunk.norms["user"](user[b]).mean(0))
        real = events.x[b][events.valid[b]]
        torch.testing.assert_close(states[b, 0, 16:32], trunk.norms["sequence"](real).mean(0))
        torch.testing.assert_close(states[b, :, 32:], trunk.norms["target"](target[b]))


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention": "fused"}, {"mixing": "attention"}, {"encoding": "before"}, {"read_out": "target"}],
    ids=str,
)
def test_shared_requests_and_packs_score_as_each_candidate_alone(task, batch, changes):
    model = model_of(task, **changes)
    with torch.no_grad():
        packed = model.scores(batch)
        cached = model.candidate_scores(model.request_side(batch), batch)
        alone = model.scores(candidates_apart(batch)).view_as(packed)
    assert (packed - cached).abs().max() == 0
    assert (packed - alone).abs().max() < 1e-5
    assert packed.std(1).min() > 1e-5  # candidates differ, so there is something to compare


def test_one_request_serves_several_packs(task, batch):
    model = model_of(task)
    with torch.no_grad():
        side = model.request_side(batch)
        whole = model.candidate_scores(side, batch)
        parts = [model.candidate_scores(side, {"candidate": batch["candidate"][:, i : i + 2]}) for i in (0, 2)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_packing_costs_less_than_reading_the_request_for_each(task, batch):
    model = model_of(task)
    count = batch["candidate"].shape[1]
    packed = forward_flops(lambda: model.scores(batch))
    alone = forward_flops(lambda: model.scores(candidates_apart(batch)))
    assert packed < 0.5 * alone
    assert alone < count * packed


def test_a_user_without_history_has_finite_scores(task, batch):
    nothing = {**batch, **{n: torch.zeros_like(batch[n]) for n in ("item", "action", "age", "back", "wait")}}
    for build in (lambda: model_of(task), paper.baseline(task, TINY, "hstu"), paper.baseline(task, TINY, "softmax")):
        model = build()
        loss = model.loss(nothing)
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# -- the other arms ------------------------------------------------------------------------------------------------


def test_fused_attention_is_one_masked_attention_over_all_three_fields():
    torch.manual_seed(0)
    layer = FusedAttention(16, 2).double()
    events, user, target = events_of(), torch.randn(2, 3, 16, dtype=DOUBLE), torch.randn(2, 5, 16, dtype=DOUBLE)
    own, moved, kept = layer.request(user, events)
    read = layer.read(target, kept)
    x = torch.cat([events.x, user, target], 1)
    query, key, value = layer.inputs(layer.norm(x)).chunk(3, dim=-1)
    allowed = torch.zeros(16, 16, dtype=torch.bool)
    allowed[:, :11] = True  # everyone sees sequence and user,
    allowed |= torch.eye(16, dtype=torch.bool)  # and targets themselves
    for b in range(2):
        seen = allowed & F.pad(events.valid[b], (0, 8), value=True)
        heads = []
        for cut in (slice(0, 8), slice(8, 16)):
            score = (query[b][:, cut] @ key[b][:, cut].T / 8**0.5).masked_fill(~seen, -torch.inf)
            heads.append(score.softmax(1) @ value[b][:, cut])
        expected = torch.cat(heads, 1) @ layer.output.weight.T
        torch.testing.assert_close(torch.cat([moved[b], own[b], read[b]]), expected)


@pytest.mark.parametrize("kind", ["hstu", "softmax"])
def test_baselines_are_causal_and_keep_targets_apart(kind):
    torch.manual_seed(0)
    trunk = SelfAttentionTrunk(kind, 16, 2, 8, 2, 8).double()
    events = events_of()
    user = torch.randn(2, 3, 16, dtype=DOUBLE, requires_grad=True)
    target = torch.randn(2, 5, 16, dtype=DOUBLE, requires_grad=True)
    x = events.x.clone().requires_grad_()
    out = trunk(user, replace(events, x=x), target)
    assert out.shape == (2, 5, 16)
    to_user, to_target, to_events = torch.autograd.grad(out[:, 2].square().sum(), (user, target, x))
    assert (to_user.abs().sum((0, 2)) > 0).all()
    assert (to_target.abs().sum((0, 2)) > 0).tolist() == [False, False, True, False, False]
    assert torch.equal(to_events.abs().sum(2) > 0, events.valid)


def test_baselines_use_the_moments_of_events(task, batch):
    later = {**batch, "age": batch["age"] * 50}
    for kind in ("hstu", "softmax"):
        torch.manual_seed(0)
        model = paper.baseline(task, TINY, kind, hidden=8)().eval()
        assert not torch.equal(model.scores(batch), model.scores(later))


@pytest.fixture(scope="module")
def arms():
    task = miniature(events=60, history=96)
    config = CCFormerConfig()
    return task, {v.name: (v, v.build()) for v in variants(task, config)}


def test_arms_are_those_of_the_protocol(arms):
    _, found = arms
    expected = [HSTU, METHOD, SOFTMAX, ATTENTION, NO_MIXING, NO_COMPRESSION, NO_ENCODING, FUSED, "din"]
    assert list(found) == expected
    assert found[HSTU][0].kind == "baseline"


def test_budgets_are_equal(arms):
    task, found = arms
    count = {name: sum(p.numel() for p in model.parameters()) for name, (_, model) in found.items()}
    for name in (HSTU, SOFTMAX, ATTENTION, FUSED):
        assert count[name] == pytest.approx(count[METHOD], rel=0.05), name
    assert count[NO_COMPRESSION] == count[METHOD]
    assert count[METHOD] - count[NO_ENCODING] == 3 * (3 + 2 * 4 - 1)
    assert count[METHOD] - count[NO_MIXING] == 3 * CCFormerConfig().mixing_parameters
    trunk = sum(p.numel() for p in paper.CCFormerTrunk(CCFormerConfig()).parameters())
    assert trunk == pytest.approx(120_000, rel=0.1)
    plain = paper.baseline(task, CCFormerConfig(), "hstu", hidden=0)()
    assert not plain.trunk.networks


def test_compression_and_streams_save_work(arms):
    _, found = arms
    flops = {name: model.logged["flops"] for name, (_, model) in found.items()}
    assert flops[NO_COMPRESSION] > 1.5 * flops[METHOD]
    assert flops[HSTU] > 2 * flops[METHOD]
    assert flops[NO_MIXING] < flops[METHOD]
    assert found[METHOD][1].logged["sequence tokens in block 3"] == 24
    assert found[NO_COMPRESSION][1].logged["sequence tokens in block 3"] == 96


def test_training_speed_is_of_all_arms_at_the_tasks_length(task):
    speed = measure_training(task, TINY, CPU, batch_size=4, rounds=1)
    assert speed.history == 10
    assert set(speed.requests) == {METHOD, HSTU, PLAIN, SOFTMAX, NO_COMPRESSION, ATTENTION}
    assert min(speed.requests.values()) > 0
    assert speed.ratio == speed.requests[METHOD] / speed.requests[HSTU]
    assert "at a history of 10" in str(speed)


# -- the decision --------------------------------------------------------------------------------------------------


def rule_on(intervals=None, ratio=2.0, gap=1e-7, level=0.8):
    speed = TrainingSpeed(192, {METHOD: ratio, HSTU: 1.0})

    def compare(method, baseline, metric):
        return difference(method, baseline, metric, (intervals or {}).get(baseline, (0.001, 0.003)), level)

    verdict, found = conclude(decision_rule(speed, gap), compare, budget="standard", seeds=3)
    return verdict, {c.clause.split(":")[0]: c.state for c in found if c.required}


def test_all_three_claims_are_needed_and_reported_apart():
    assert rule_on() == (
        "reproduced",
        {"accuracy": "holds", "core mechanism": "holds", "efficiency": "holds"},
    )
    for baseline, interval, lost in (
        (HSTU, (-0.0005, 0.003), "accuracy"),
        (NO_MIXING, (-0.001, 0.003), "core mechanism"),
    ):
        verdict, states = rule_on({baseline: interval})
        assert verdict == "not reproduced"
        assert [name for name, state in states.items() if state != "holds"] == [lost]


def test_efficiency_needs_speed_and_an_auc_within_a_thousandth():
    assert rule_on(ratio=1.49)[1]["efficiency"] == "reversed"
    assert rule_on(ratio=1.5)[1]["efficiency"] == "holds"
    assert rule_on({HSTU: (-0.0015, 0.0)}, level=0.8)[1]["efficiency"] == "holds"  # -0.00075 of 0.8
    assert rule_on({HSTU: (-0.0025, 0.0)}, level=0.8)[1]["efficiency"] == "reversed"  # -0.00125


def test_other_arms_and_serving_decide_nothing():
    worse = dict.fromkeys((SOFTMAX, ATTENTION, NO_COMPRESSION, NO_ENCODING, FUSED, "din"), (-0.01, -0.005))
    assert rule_on(worse, gap=1.0)[0] == "reproduced"


# -- precision -----------------------------------------------------------------------------------------------------


def test_decay_and_logits_stay_in_float32_under_bfloat16(task, batch):
    layer = TimePositionEncoding(4)
    seconds = torch.tensor([[90_000, 400, 399, 1]])
    exact = layer.weights(seconds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.weights(seconds), exact)
    half = layer.bfloat16().weights(seconds)
    assert half.dtype == torch.float32
    norm, x = make_norm("rms", 64), 100 * torch.randn(8, 64).bfloat16()
    torch.testing.assert_close(norm(x).float(), norm(x.float()), rtol=2**-8, atol=0)  # one rounding, of the result
    model = model_of(task)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(batch)
        assert model.scores(batch).dtype == torch.float32
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    loss.backward()
    assert packed_gap(model, batch) < 1e-5


def test_a_model_in_bfloat16_gives_float32_logits(task, batch):
    model = model_of(task).bfloat16()
    assert model.scores(batch).dtype == torch.float32


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        CCFormerConfig(width=30, subspace=8)
    with pytest.raises(ValueError, match="multiple"):
        CCFormerConfig(width=32, heads=3)
