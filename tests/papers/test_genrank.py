"""GenRank: tokens, masks, isolation of candidates, where the loss is, the cached history, and the arms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.papers.ranking import genrank
from auto_research.papers.ranking.genrank import (
    ACTION_ONLY,
    FULL_MASK,
    GENRANK,
    HISTORY_LOSS,
    HSTU,
    GenRank,
    GenRankConfig,
    Layout,
    Speed,
    arms,
    decision_rule,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.event_log import miniature
from auto_research.tasks.request_ranking import RequestRanking

CPU = torch.device("cpu")
TINY = GenRankConfig(width=16, heads=2, history=10)
FORMS = {
    "genrank": {},
    "learned": {"bias": "learned"},
    "hstu": {"bias": "relative"},
    "interleaved": {"tokens": "interleaved"},
    "interleaved hstu": {"tokens": "interleaved", "bias": "relative"},
    "history loss": {"history_loss": True},
}


@pytest.fixture(scope="module")
def task():
    return RequestRanking(miniature(), history=6, width=4)


@pytest.fixture(scope="module")
def batch(task):
    rows = task.rows(task.requests["train"], CPU)
    full = (rows["candidate"] > 0).all(1)
    return {name: value[full][1:9] for name, value in rows.items()}


def model_of(task, **changes):
    torch.manual_seed(0)
    return GenRank(task.log, replace(TINY, **changes)).eval()


def test_an_action_oriented_sequence_has_half_the_tokens_and_a_quarter_of_the_scores(task):
    action, interleaved = model_of(task), model_of(task, tokens="interleaved")
    n, m = 64, 8
    assert action.tokens_per_request(n, m, training=True) == n + m
    assert interleaved.tokens_per_request(n, m, training=True) == 2 * n + 2 * m
    assert interleaved.tokens_per_request(n, m, training=False) == 2 * n + m  # no action token of a candidate


def test_tokens_are_sums_of_their_embeddings(task, batch):
    model = model_of(task)
    layout = Layout.of(6, 4, model.config, CPU, acting=False)
    context = model._context(layout, batch, torch.arange(10))
    history, asked = model._history(batch) + context[:, :6], model._asked(batch["candidate"], None) + context[:, 6:]
    phi, log = model.exposures, task.log

    def vector(item):
        genres = log.genres[item] / log.genres[item].sum().clamp(min=1)
        return phi.item.weight[item] + phi.genre.weight @ genres + phi.years.weight[log.year[item]]

    for b in range(2):
        for i in range(6):
            expected = vector(batch["item"][b, i]) + phi.action.weight[batch["action"][b, i]]
            expected = expected + model.positions.weight[6 - i] + model.requests.weight[batch["back"][b, i]]
            torch.testing.assert_close(history[b, i], expected + model.waits.weight[batch["wait"][b, i]])
        for j in range(4):
            expected = vector(batch["candidate"][b, j]) + model.mask_action + model.positions.weight[0]
            expected = expected + model.requests.weight[0] + model.waits.weight[batch["wait_now"][b]]
            torch.testing.assert_close(asked[b, j], expected)


def test_candidates_of_a_request_share_one_position():
    layout = Layout.of(6, 4, TINY, CPU, acting=False)
    assert layout.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    pair = Layout.of(3, 2, replace(TINY, tokens="interleaved"), CPU, acting=True)
    assert pair.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7]


def test_mask_is_causal_history_and_the_candidate_itself():
    """allowed(a, b) = (b <= a and b is history) or a = b."""
    allowed = Layout.of(5, 3, TINY, CPU, acting=False).allowed(TINY)
    for a in range(8):
        for b in range(8):
            assert bool(allowed[a, b]) is ((b <= a and b < 5) or a == b)


def test_interleaved_mask_keeps_pairs_apart():
    config = replace(TINY, tokens="interleaved")
    allowed = Layout.of(2, 2, config, CPU, acting=True).allowed(config)
    for a in range(8):
        for b in range(8):
            pair_a, pair_b = (a - 4) // 2, (b - 4) // 2
            expected = b <= a if b < 4 else a >= 4 and pair_a == pair_b and b <= a
            assert bool(allowed[a, b]) is expected, (a, b)


def test_switches_of_the_mask():
    full = replace(TINY, history_mask="full")
    assert Layout.of(4, 2, full, CPU, acting=False).allowed(full)[:4, :4].all()
    assert not Layout.of(4, 2, full, CPU, acting=False).allowed(full)[:4, 4:].any()
    visible = replace(TINY, candidates="visible")
    assert Layout.of(4, 3, visible, CPU, acting=False).allowed(visible)[4:, 4:].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    copies = replace(TINY, history_loss=True)
    allowed = Layout.of(3, 1, copies, CPU, acting=False).allowed(copies)
    # The masked copy of event t sees the events before t and itself, never the event it asks about.
    assert allowed[3:6, :3].tolist() == [[False] * 3, [True, False, False], [True, True, False]]
    assert torch.equal(allowed[3:6, 3:6], torch.eye(3, dtype=torch.bool))
    assert not allowed[6, 3:6].any()


@pytest.mark.parametrize("form", FORMS)
def test_permuting_candidates_permutes_scores(task, batch, form):
    model = model_of(task, **FORMS[form])
    order = torch.tensor([2, 0, 3, 1])
    moved = {**batch, "candidate": batch["candidate"][:, order]}
    torch.testing.assert_close(model.scores(moved), model.scores(batch)[:, order], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_changing_a_candidate_leaves_the_others_alone(task, batch, form):
    model = model_of(task, **FORMS[form])
    candidate = batch["candidate"].clone()
    candidate[:, 1] = candidate[:, 1] % task.log.num_items + 1
    before, after = model.scores(batch), model.scores({**batch, "candidate": candidate})
    others = [0, 2, 3]
    torch.testing.assert_close(after[:, others], before[:, others], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(after[:, 1], before[:, 1])


def test_a_visible_candidate_does_change_the_others(task, batch):
    model = model_of(task, candidates="visible")
    candidate = batch["candidate"].clone()
    candidate[:, 0] = candidate[:, 0] % task.log.num_items + 1
    assert not torch.allclose(model.scores(batch)[:, 1:], model.scores({**batch, "candidate": candidate})[:, 1:])


def test_a_later_event_changes_no_earlier_state_of_the_history(task, batch):
    changed = {**batch, "item": batch["item"].clone(), "action": batch["action"].clone()}
    changed["item"][:, 4] = changed["item"][:, 4] % task.log.num_items + 1
    changed["action"][:, 4] = changed["action"][:, 4] % 5 + 1
    causal, full = model_of(task), model_of(task, history_mask="full")
    for model, moves in ((causal, False), (full, True)):
        # Keys of the second layer are functions of the states after the first.
        before, after = (model.request_side(b).cache[1].own.key[:, :, :4] for b in (batch, changed))
        assert torch.allclose(before, after, atol=1e-6) is not moves


@pytest.mark.parametrize("form", FORMS)
def test_outcomes_reach_no_score_and_not_even_the_states_that_are_trained(task, batch, form):
    model = model_of(task, **FORMS[form])
    acting = model.config.parts == 2
    other = {**batch, "label": 1 - batch["label"], "outcome": 6 - batch["outcome"]}
    assert torch.equal(model.scores(batch), model.scores(other))
    before, after = (model._states(b, acting=acting) for b in (batch, other))
    torch.testing.assert_close(before, after, atol=0, rtol=0)
    torch.testing.assert_close(model._logits(before[:, -4:]), model.scores(batch), atol=1e-5, rtol=1e-4)


def test_loss_is_the_mean_over_outcomes_at_the_candidates(task, batch):
    model = model_of(task)
    found = model.scores(batch)
    expected = F.binary_cross_entropy_with_logits(found, batch["label"])
    torch.testing.assert_close(model.loss(batch), expected)


def test_no_head_reads_the_history_and_yet_its_embeddings_learn(task, batch):
    model = model_of(task)
    seen = []
    model.heads.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    model.loss(batch).backward()
    assert seen == [4]
    only_history = set(batch["item"].flatten().tolist()) - set(batch["candidate"].flatten().tolist()) - {0}
    gradient = model.exposures.item.weight.grad
    assert all(gradient[i].abs().sum() > 0 for i in only_history)
    copies = model_of(task, history_loss=True)
    copies.heads.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    copies.loss(batch)
    assert seen[-1] == 10


@pytest.mark.parametrize("changes", [{}, {"bias": "learned"}, {"tokens": "interleaved"}, {"history_mask": "full"}])
def test_a_cached_history_gives_the_same_scores(task, batch, changes):
    model = model_of(task, **changes)
    with torch.no_grad():
        plain = model.scores(batch)
        side = model.request_side(batch)
        for size in (4, 1):  # in one go, and one by one against the same cache
            parts = [
                model.candidate_scores(side, {**batch, "candidate": part}) for part in batch["candidate"].split(size, 1)
            ]
            torch.testing.assert_close(torch.cat(parts, 1), plain, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_cached_says_so(task, batch):
    for changes in ({"bias": "relative"}, {"candidates": "visible"}):
        with pytest.raises(ValueError, match="candidates apart only"):
            model_of(task, **changes).request_side(batch)


def test_linear_biases_are_no_parameters_and_matter(task, batch):
    with_biases, without = model_of(task), model_of(task, bias="learned")
    assert [p.shape for p in with_biases.parameters()] == [p.shape for p in without.parameters()]
    assert not torch.allclose(with_biases.scores(batch), without.scores(batch))


def test_arms_differ_from_the_method_in_what_their_name_says():
    found = {name: config for name, (_, config) in arms(TINY).items()}
    assert found[GENRANK] == TINY
    assert found[HSTU] == replace(TINY, tokens="interleaved", bias="relative")
    assert found[ACTION_ONLY] == replace(TINY, bias="relative")
    assert found[HISTORY_LOSS] == replace(TINY, history_loss=True)
    assert found[FULL_MASK] == replace(TINY, history_mask="full")
    assert next(iter(arms(TINY).values()))[0] == "baseline"


def test_the_curve_has_four_sizes_that_grow(task):
    sizes = genrank.curve(replace(TINY, heads=4, width=32))
    count = [genrank.sequence_parameters(GenRank(task.log, config)) for config in sizes.values()]
    assert len(count) == 4
    assert count == sorted(set(count))


def test_speed_is_measured_in_turn(task, batch):
    models = {name: model_of(task, **FORMS[form]) for name, form in ((HSTU, "interleaved hstu"), (GENRANK, "genrank"))}
    speeds = genrank.measure(models, batch, repeats=2)
    assert speeds[HSTU].tokens == 2 * speeds[GENRANK].tokens
    assert all(s.train > 0 and s.serve > 0 for s in speeds.values())


@pytest.mark.parametrize(
    ("gaps", "faster", "verdict"),
    [
        ({}, 2.0, "reproduced"),
        ({}, 1.2, "inconclusive"),
        ({}, 0.8, "not reproduced"),
        ({HSTU: (-0.0019, 0.0015)}, 2.0, "reproduced"),
        ({HSTU: (-0.0030, 0.0025)}, 2.0, "inconclusive"),
        ({HSTU: (-0.0090, -0.0030)}, 2.0, "not reproduced"),
        ({ACTION_ONLY: (-0.0090, -0.0030)}, 2.0, "not reproduced"),
        ({HISTORY_LOSS: (-0.004, -0.001)}, 2.0, "not reproduced"),
        ({FULL_MASK: (-0.004, 0.001)}, 2.0, "inconclusive"),
    ],
)
def test_decision_rule_of_the_protocol(gaps, faster, verdict):
    speeds = {HSTU: Speed(faster, 1.0, 80), ACTION_ONLY: Speed(1.0, 1.0, 40), GENRANK: Speed(1.0, 1.0, 40)}

    def compare(method, baseline, metric):
        return difference(method, baseline, metric, gaps.get(baseline, (0.001, 0.003)), 0.75)

    assert conclude(decision_rule(speeds, 32, {}), compare, budget="standard", seeds=3)[0] == verdict
