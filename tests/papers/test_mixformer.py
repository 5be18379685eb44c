"""MixFormer: heads, exchange, one query a head, private networks, decoupling, and the arms of the protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.layers.towers import forward_flops
from auto_research.papers.ranking.mixformer import (
    ATTENTION,
    DECOUPLED,
    INVARIANCE,
    METHOD,
    NO_MIXING,
    PARALLEL,
    SHARED_FUSION,
    SHARED_SEQUENCE,
    STACKED,
    MixFormer,
    MixFormerBlock,
    MixFormerConfig,
    SequenceNetwork,
    Stacked,
    co_scaling,
    decision_rule,
    decoupling_mask,
    variants,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.event_log import miniature_ratings
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests
from auto_research.tasks.request_cost import RequestCost, measure_requests

CPU = torch.device("cpu")
TINY = MixFormerConfig(heads=4, width=8, history=6, field_width=8, event_width=4)


@pytest.fixture(scope="module")
def task():
    return miniature_requests()


@pytest.fixture(scope="module")
def batch(task):
    """Single examples."""
    return task.rows(task.train[2::4], CPU)


def model_of(task, **changes):
    torch.manual_seed(0)
    return MixFormer(task.request_fields, task.candidate_fields, replace(TINY, **changes)).eval()


# -- inputs --------------------------------------------------------------------------------------------------------


def test_heads_are_equal_slices_and_the_request_fills_the_first_half(task, batch):
    model = model_of(task)
    inputs = model.inputs
    assert inputs.slice * 2 == 4 * 8  # four groups a side, two heads a side
    e = torch.cat([inputs.request(batch), inputs.candidate(batch)], 1)
    for j in range(4):
        piece = e[:, j * inputs.slice : (j + 1) * inputs.slice]
        torch.testing.assert_close(model.heads(batch)[:, j], piece @ inputs.split.weight[j] + inputs.split.bias[j])
    other = {**batch, "item": batch["item"] % task.num_items + 1, "item statistics": 1 - batch["item statistics"]}
    moved = (model.heads(other) != model.heads(batch)).any(-1).any(0)
    assert moved.tolist() == [False, False, True, True]


def test_without_a_profile_each_side_still_fills_its_heads(task):
    fields = [f for f in task.request_fields if f.group != "profile"]
    inputs = MixFormer(fields, task.candidate_fields, TINY).inputs
    assert (inputs.request.width, inputs.candidate.width, inputs.slice) == (24, 32, 16)


def test_an_event_is_item_genres_rating_and_gap(task, batch):
    model = model_of(task)
    s, valid = model.sequence(model.inputs.candidate, batch)
    assert s.shape == (len(batch["label"]), 6, 32)
    last = valid[:, -1].nonzero().flatten()
    for name in ("history_item", "history_rating", "history_gap"):
        changed = {**batch, name: batch[name].clone()}
        changed[name][:, -1] = changed[name][:, -1] % 5 + 1
        assert (model.sequence(model.inputs.candidate, changed)[0] != s).any(-1)[last, -1].all(), name
        assert torch.equal(model.sequence(model.inputs.candidate, changed)[0][:, :-1], s[:, :-1]), name


def test_history_is_cut_to_the_latest_events(task, batch):
    short = model_of(task, history=3)
    changed = {**batch, "history_item": batch["history_item"].clone()}
    changed["history_item"][:, :3] = 1
    assert torch.equal(short.scores(changed), short.scores(batch))
    assert not torch.equal(model_of(task).scores(changed), model_of(task).scores(batch))


# -- the block -----------------------------------------------------------------------------------------------------


def by_loops(block: MixFormerBlock, x, s, valid):
    """The block head by head and event by event, from its equations."""
    n, d = x.shape[1:]
    slices = d // n

    def swiglu(net, i, y):
        both = y @ net.rise.weight[i] + net.rise.bias[i]
        gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
        return (gate * torch.sigmoid(gate) * up) @ net.fall.weight[i] + net.fall.bias[i]

    def rms(norm, y):
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    y = rms(block.mixer_norm, x)
    p = torch.zeros_like(x)
    for c in range(n):
        for j in range(n):
            if block.mask is None or c >= n // 2 or j < n // 2:
                p[:, c, j * slices : (j + 1) * slices] = y[:, j, c * slices : (c + 1) * slices]
    p = p + x
    q = torch.stack([swiglu(block.mixer_ffn, i, rms(block.mixer_ffn_norm, p[:, i])) + p[:, i] for i in range(n)], 1)
    reader, network = block.reader, block.reader.network
    gate, up = F.linear(rms(network.norm, s), network.network.rise.weight, network.network.rise.bias).chunk(2, -1)
    h = F.linear(gate * torch.sigmoid(gate) * up, network.network.fall.weight, network.network.fall.bias) + s
    h = rms(reader.norm, h)
    out = []
    for i in range(n):
        piece = h[..., i * d : (i + 1) * d]
        key, value = piece @ reader.key_value.weight[i, :, :d], piece @ reader.key_value.weight[i, :, d:]
        z = q[:, i].clone()
        for b in range(len(x)):
            seen = valid[b].nonzero().flatten()
            if len(seen):
                score = torch.stack([q[b, i] @ key[b, t] / d**0.5 for t in seen]).softmax(0)
                z[b] = z[b] + score @ value[b, seen]
        out.append(swiglu(block.fusion_ffn, i, rms(block.fusion_norm, z)) + z)
    return torch.stack(out, 1)


@pytest.mark.parametrize("decoupled", [True, False])
def test_block_equals_its_equations_by_loops(decoupled):
    torch.manual_seed(1)
    block = MixFormerBlock(replace(TINY, decoupled=decoupled), SequenceNetwork(32, 64)).double()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, s = torch.randn(3, 4, 8).double(), torch.randn(3, 5, 32).double()
    valid = torch.tensor([[True] * 5, [False, False, True, True, True], [False] * 5])
    torch.testing.assert_close(block(x, s, valid), by_loops(block, x, s, valid))


def test_each_head_is_its_own_query_there_is_no_projection(task):
    block = model_of(task).blocks[0]
    names = {name for name, _ in block.named_parameters()}
    assert {name.split(".")[0] for name in names} == {
        "mixer_norm",
        "mixer_ffn_norm",
        "mixer_ffn",
        "reader",
        "fusion_norm",
        "fusion_ffn",
    }
    assert block.reader.key_value.weight.shape == (4, 8, 16)  # D x D for keys and for values, private to each head
    assert block.mixer_ffn.rise.weight.shape == (4, 8, 32)
    assert block.mixer_ffn.rise.weight is not block.fusion_ffn.rise.weight


def test_every_block_reads_the_raw_sequence_with_a_network_of_its_own(task, batch):
    model = model_of(task)
    s, _ = model.sequence(model.inputs.candidate, batch)
    seen = []
    for block in model.blocks:
        block.reader.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    model.scores(batch)
    assert len(seen) == 2
    assert all(torch.equal(one, s) for one in seen)
    first, second = (block.reader.network for block in model.blocks)
    assert first is not second
    shared = model_of(task, sequence_ffn="shared")
    assert shared.blocks[0].reader.network is shared.blocks[1].reader.network


def test_a_later_block_exchanges_heads_that_have_read_the_sequence(task, batch):
    """The history reaches a head's second exchange: without it only the head's own attention would know it."""
    model = model_of(task)
    entered = []
    model.blocks[1].register_forward_hook(lambda module, inputs, out: entered.append(inputs[0]))
    older = {**batch, "history_item": batch["history_item"] % task.num_items + (batch["history_item"] > 0)}
    for b in (batch, older):
        model.scores(b)
    known = (batch["history_item"] > 0).any(1)
    assert (entered[0] != entered[1]).any(-1)[known].all()


def test_flops_of_the_sequence_network_grow_with_the_history(task):
    def flops(length: int) -> int:
        model = MixFormer(task.request_fields, task.candidate_fields, replace(TINY, history=length))
        s = torch.randn(1, length, 32)
        return forward_flops(lambda: [block.reader(s) for block in model.blocks])

    wide, blocks = 32, 2
    one = 2 * (3 * wide * 2 * wide + 4 * 8 * 16)  # SwiGLU of hidden 2·N·D, keys and values of four heads
    assert flops(6) == blocks * 6 * one
    assert flops(3) * 2 == flops(6)


# -- decoupling and requests ---------------------------------------------------------------------------------------


def test_mask_by_hand():
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert decoupling_mask(4, 4).int().tolist() == expected
    assert decoupling_mask(2, 4).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("sequence_ffn", ["per-layer", "shared"])
def test_decoupled_request_heads_are_exactly_the_same_for_another_candidate_in_every_block(task, batch, sequence_ffn):
    other = {**batch, "item": batch["item"] % task.num_items + 1, "genres": 1 - batch["genres"]}
    free, bound = (model_of(task, decoupled=d, sequence_ffn=sequence_ffn) for d in (True, False))
    for x, y in zip(free.states(batch), free.states(other), strict=True):
        assert torch.equal(x[:, :2], y[:, :2])
        assert (x[:, 2:] != y[:, 2:]).any(-1).all()
    for x, y in zip(bound.states(batch), bound.states(other), strict=True):
        assert (x[:, :2] - y[:, :2]).abs().max() > 1e-3
    assert free.invariance_error(batch) == 0
    assert bound.invariance_error(batch) > 1e-3


def test_candidate_heads_still_receive_the_request(task, batch):
    model = model_of(task, decoupled=True)
    other = {**batch, "hour": (batch["hour"] + 5) % 24}
    moved = (model.states(other)[-1] != model.states(batch)[-1]).any(-1)
    assert moved.all()


def test_every_evaluation_reports_the_invariance_of_the_trained_model(task):
    assert task.evaluate(model_of(task, decoupled=True), "test", CPU).diagnostics[INVARIANCE] == 0
    assert task.evaluate(model_of(task), "test", CPU).diagnostics[INVARIANCE] > 1e-3


def test_the_mask_is_not_for_attention_among_heads():
    with pytest.raises(ValueError, match="exchange of slices"):
        MixFormerConfig(decoupled=True, mixing="attention")
    with pytest.raises(ValueError, match="divide the width"):
        MixFormerConfig(heads=4, width=10)


CHANGES = [{}, {"fusion_ffn": "shared"}, {"query_norm": True}, {"mixing": "none"}, {"read_out": "mean"}]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("changes", CHANGES)
def test_shared_scores_equal_plain_scores_for_a_pack_of_candidates(task, decoupled, changes):
    model = model_of(task, decoupled=decoupled, **changes)
    items = torch.arange(task.num_items)
    with torch.no_grad():
        plain = task.pack_scores(model, task.test, items, CPU, packed=False)
        packed = task.pack_scores(model, task.test, items, CPU, packed=True)
    assert (plain - packed).abs().max() < 1e-5
    assert plain.std(1).min() > 1e-4


def stacked_of(task, **options):
    torch.manual_seed(0)
    return Stacked(task.request_fields, task.candidate_fields, TINY, 24, 16, **options).eval()


MODELS = {
    "method": model_of,
    "ui": lambda task: model_of(task, decoupled=True),
    "attention": lambda task: model_of(task, mixing="attention"),
    "stacked": stacked_of,
    "parallel": lambda task: stacked_of(task, parallel=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_request_scores_as_each_of_its_candidates_alone(task, name):
    model = MODELS[name](task)
    batch = task.shown(task.requests["train"], CPU)
    with torch.no_grad():
        together = model.scores(batch)
        for column in range(3):
            alone = {**batch, **{f.name: batch[f.name][:, column] for f in task.candidate_fields}}
            torch.testing.assert_close(together[:, column], model.scores(alone), atol=1e-5, rtol=1e-5)
    assert together.std() > 1e-3


def test_places_without_a_candidate_cost_nothing(task):
    model = model_of(task)
    batch = task.shown(torch.cat([task.requests["train"], task.requests["test"]]), CPU)
    empty = batch["label"].isnan()
    assert empty.any()
    assert not empty.all()
    changed = {**batch, "item": torch.where(empty, 3, batch["item"])}
    assert torch.equal(model.loss(batch), model.loss(changed))
    expected = F.binary_cross_entropy_with_logits(model.scores(batch)[~empty], batch["label"][~empty])
    torch.testing.assert_close(model.loss(batch), expected)


def test_sharing_saves_more_when_decoupled(task):
    plain = measure_requests(task, model_of(task), CPU, candidates=100, rounds=1)
    decoupled = measure_requests(task, model_of(task, decoupled=True), CPU, candidates=100, rounds=1)
    assert plain.plain_flops == decoupled.plain_flops
    assert decoupled.packed_flops < plain.packed_flops < 0.7 * plain.plain_flops
    assert max(plain.gap, decoupled.gap) < 1e-5


# -- the protocol --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arms():
    task = RequestClicks(miniature_ratings(12, 120, 110), history_length=100)
    found = variants(task, MixFormerConfig(), widths=(4, 12))
    return {v.name: v.build() for v in found.variants if v.kind != "floor"}, found


def test_budgets_are_equal_in_parameters_and_flops(arms):
    models, found = arms
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    flops = {name: m.logged["flops"] for name, m in models.items()}
    pairs = [(METHOD, STACKED), (METHOD, PARALLEL), *found.pairs.values()]
    for method, control in pairs:
        assert count[control] == pytest.approx(count[method], rel=0.03), control
        assert flops[control] == pytest.approx(flops[method], rel=0.03), control
    assert count[NO_MIXING] < count[METHOD]  # the norm before the exchange
    assert count[NO_MIXING] == pytest.approx(count[METHOD], rel=0.001)
    assert count[DECOUPLED] == count[METHOD]
    assert flops[NO_MIXING] == flops[DECOUPLED] == flops[SHARED_SEQUENCE] == flops[SHARED_FUSION] == flops[METHOD]
    assert count[SHARED_SEQUENCE] < count[METHOD]
    assert count[SHARED_FUSION] < count[METHOD]
    assert count[ATTENTION] > count[METHOD]


def test_sweeps_have_the_lengths_of_the_protocol_and_the_costs_of_their_arms(arms):
    models, found = arms
    assert sorted(found.pairs) == [10, 50, 100]
    assert found.pairs[50] == (METHOD, STACKED)
    assert found.scales == {name: models[name].logged["flops"] for name in found.scales}
    assert len(found.scales) == 3
    for length, names in found.pairs.items():
        assert [models[name].sequence.history for name in names] == [length, length]


def test_the_control_has_as_many_layers_and_a_rankmixer_of_the_same_width(arms):
    models, _ = arms
    for name in (STACKED, PARALLEL):
        model = models[name]
        assert len(model.readers) == len(model.networks) == len(model.mixer.blocks) == len(models[METHOD].blocks) == 2
        assert model.mixer.tokenise.weight.shape[0] == 4
        assert model.mixer.tokenise.weight.shape[2] == 8
        assert model.mixer.blocks[0].feed_forward.rise.weight.shape[2] >= 8
        assert {"parameters of target attention", "parameters of the rankmixer"} <= set(model.logged)


def test_only_the_stacked_rankmixer_sees_what_was_read(task, batch):
    older = {**batch, "history_item": batch["history_item"] % task.num_items + (batch["history_item"] > 0)}
    known = (batch["history_item"] > 0).any(1)
    for parallel in (True, False):
        model, seen = stacked_of(task, parallel=parallel), []
        model.mixer.register_forward_hook(lambda module, inputs, out, seen=seen: seen.append(out))
        assert (model.scores(batch) != model.scores(older))[known].all()
        assert torch.equal(seen[0], seen[1]) == parallel


COST = RequestCost(100, 1e-7, 0.5, 1.0, 60, 100)


def rule_on(gaps, cost=COST, invariance=0.0):
    def compare(method, baseline, metric):
        return difference(method, baseline, metric, gaps.get((method, baseline, metric), (0.001, 0.003)), 0.8)

    pairs = {10: ("m10", "s10"), 50: ("m50", "s50")}
    rule = decision_rule({"a": 1.0, METHOD: 10.0}, pairs, cost, invariance)
    return conclude(rule, compare, budget="standard", seeds=3)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ({}, "reproduced"),
        ({(METHOD, STACKED, "auc"): (-0.003, -0.001)}, "reproduced"),  # AUC within users suffices
        ({(METHOD, STACKED, m): (-0.003, 0.001) for m in ("auc", "user_auc")}, "inconclusive"),
        ({(METHOD, STACKED, m): (-0.003, -0.001) for m in ("auc", "user_auc")}, "not reproduced"),
        ({(METHOD, NO_MIXING, "auc"): (-0.003, -0.001)}, "reproduced"),  # one of both ablations suffices
        ({(METHOD, b, "auc"): (-0.003, -0.001) for b in (NO_MIXING, SHARED_FUSION)}, "not reproduced"),
        ({(DECOUPLED, METHOD, "auc"): (-0.003, -0.002)}, "reproduced"),  # decoupling is reported
    ],
)
def test_decision_rule_of_the_protocol(gaps, verdict):
    assert rule_on(gaps)[0] == verdict


@pytest.mark.parametrize(
    ("interval", "invariance", "packed", "state"),
    [
        ((0.001, 0.003), 0.0, 60, "holds"),
        ((-0.0007, 0.001), 0.0, 60, "holds"),  # less than 0.1 % of 0.8
        ((-0.0020, 0.001), 0.0, 60, "undecided"),
        ((-0.0020, -0.0009), 0.0, 60, "reversed"),
        ((0.001, 0.003), 1e-9, 60, "reversed"),  # exactly zero or not at all
        ((0.001, 0.003), 0.0, 75, "reversed"),
    ],
)
def test_decoupling_needs_quality_an_exact_invariance_and_a_third_fewer_flops(interval, invariance, packed, state):
    cost = replace(COST, packed_flops=packed)
    clauses = rule_on({(DECOUPLED, METHOD, "auc"): interval}, cost, invariance)[1]
    (found,) = [c for c in clauses if c.clause.startswith("decoupling")]
    assert (found.state, found.required) == (state, False)


@pytest.mark.parametrize(
    ("gains", "state"),
    [
        ({10: (0.001, 0.003), 50: (0.001, 0.003), 100: (0.002, 0.004)}, "holds"),
        ({10: (0.001, 0.003), 50: (0.004, 0.006), 100: (0.002, 0.004)}, "undecided"),  # shrinks on the way
        ({10: (0.001, 0.003), 50: (0.000, 0.001), 100: (0.000, 0.002)}, "undecided"),
        ({10: (0.005, 0.007), 50: (0.004, 0.006), 100: (0.000, 0.002)}, "reversed"),
    ],
)
def test_co_scaling_compares_the_gains_along_the_lengths(gains, state):
    clause = co_scaling({n: (f"m{n}", f"s{n}") for n in (50, 10, 100)})
    found, detail = clause.decide(lambda m, b, metric: difference(m, b, metric, gains[int(m[1:])], 0.8))
    assert found == state
    assert not clause.required
    assert detail.index("T 10:") < detail.index("T 50:") < detail.index("T 100:")


def test_loss_stays_in_float32_under_bfloat16(task, batch):
    model = model_of(task, decoupled=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(task.shown(task.requests["train"], CPU))
        packed = task.pack_scores(model, task.test[:2], torch.arange(3), CPU)
    assert loss.dtype == packed.dtype == torch.float32
    assert torch.isfinite(packed).all()
    loss.backward()
