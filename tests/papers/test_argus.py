"""ARGUS: which token sees what, the two tasks, logQ, the delayed two towers, and the arms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decisions import difference
from torch.nn import functional as F

from auto_research.layers.item_loss import corrected_softmax_loss, mixture_log_q
from auto_research.papers.ranking import argus
from auto_research.papers.ranking.argus import (
    ARGUS,
    FEEDBACK_ONLY,
    ITEM_ONLY,
    ONE_TOKEN,
    REVERSED,
    SCRATCH,
    ArgusConfig,
    DelayedDIN,
    Encoder,
    LikedSASRec,
    Pretraining,
    TwoTower,
    arms,
    decision_rule,
)
from auto_research.study.verdict import conclude
from auto_research.tasks.base import Recipe
from auto_research.tasks.event_log import miniature
from auto_research.tasks.user_log import UserLog

CPU = torch.device("cpu")
TINY = ArgusConfig(width=16, layers=1, heads=2, impressions=4, size=4)
FORMS = [{}, {"encoder": "hstu"}, {"tokens": "one"}]


@pytest.fixture(scope="module")
def task():
    return UserLog(miniature(events=60), impressions=4, size=4)


@pytest.fixture(scope="module")
def batch(task):
    rows = next(task.batches(0, 12, CPU))
    full = (rows["item"] > 0).all(1)
    return {name: value[full] for name, value in rows.items()}


def encoder_of(task, **changes):
    torch.manual_seed(0)
    return Encoder(task.log, replace(TINY, layers=2, **changes)).eval()


def moved(before, after):
    """Places (T,) at which states differ for some row."""
    return ((before - after).abs().amax((0, 2)) > 1e-6).tolist()


def changed(batch, task, name, place):
    other = {key: value.clone() for key, value in batch.items()}
    sizes = {"item": task.log.num_items, "action": 5}
    if name in sizes:
        other[name][:, place] = other[name][:, place] % sizes[name] + 1
    else:
        other[name][:, place] = (other[name][:, place] + 5) % 16
    return other


@pytest.mark.parametrize("form", FORMS)
def test_item_first_no_token_sees_its_own_answer(task, batch, form):
    """At event t the item state sees c_t and all before; the feedback state sees i_t as well; neither sees f_t."""
    encoder = encoder_of(task, **form)
    before = encoder(batch)
    for name, item_sees, feedback_sees in (("place", True, True), ("item", False, True), ("action", False, False)):
        after = encoder(changed(batch, task, name, 5))
        assert moved(before[0], after[0]) == [False] * 5 + [item_sees] + [True] * 10, name
        assert moved(before[1], after[1]) == [False] * 5 + [feedback_sees] + [True] * 10, name
        assert moved(before[2], after[2]) == [False] * 5 + [True] * 11, name


@pytest.mark.parametrize("form", FORMS)
def test_feedback_first_reverses_who_sees_what(task, batch, form):
    encoder = encoder_of(task, order="feedback-first", **form)
    before = encoder(batch)
    for name, item_sees, feedback_sees in (("place", True, True), ("item", False, False), ("action", True, False)):
        after = encoder(changed(batch, task, name, 5))
        assert moved(before[0], after[0])[5] is item_sees, name
        assert moved(before[1], after[1])[5] is feedback_sees, name


@pytest.mark.parametrize("form", FORMS)
def test_padding_on_the_right_changes_nothing(task, batch, form):
    encoder = encoder_of(task, **form)
    short = {name: value.clone() for name, value in batch.items()}
    for value in short.values():
        value[:, 8:] = 0
    for one, other in zip(encoder(batch), encoder(short), strict=True):
        torch.testing.assert_close(one[:, :8], other[:, :8])


def test_three_tokens_an_event(task, batch):
    encoder = encoder_of(task)
    seen = []
    encoder.stack.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    encoder(batch)
    assert seen == [3 * 16]


def test_loss_is_both_tasks_by_hand(task, batch):
    torch.manual_seed(0)
    model = Pretraining(task.log, replace(TINY, feedback_weight=0.3), task.counts)
    on_item, on_feedback, _ = model.encoder(batch)
    logits = model.project(on_item) @ model.encoder.towers.catalogue().T / model.log_temperature.exp()
    item = F.cross_entropy(logits[..., 1:].flatten(0, 1), batch["item"].flatten() - 1)
    heads = model.heads(on_feedback)
    stars = F.cross_entropy(heads["rating"].flatten(0, 1), batch["action"].flatten() - 1)
    like = F.binary_cross_entropy_with_logits(heads["like"], (batch["action"] >= 4).float())
    torch.testing.assert_close(model.loss(batch), item + 0.3 * (stars + like))


def test_padding_is_not_predicted(task, batch):
    torch.manual_seed(0)
    model = Pretraining(task.log, TINY, task.counts)
    short = {name: value[:, :12] for name, value in batch.items()}
    padded = {name: F.pad(value, (0, 4)) for name, value in short.items()}
    torch.testing.assert_close(model.loss(short), model.loss(padded))


def test_temperature_is_clipped(task, batch):
    model = Pretraining(task.log, TINY, task.counts)
    state = torch.randn(2, 16)
    for value, scale in ((-50.0, 100.0), (50.0, 0.01)):
        with torch.no_grad():
            model.log_temperature.fill_(value)
        torch.testing.assert_close(model.scaled(state), model.project(state) * scale)


def test_negative_reactions_stay_in_the_log(task, batch):
    assert (batch["action"] < 4).any()
    encoder = encoder_of(task)
    low = torch.where(batch["action"] <= 2, 1, batch["action"])
    assert not torch.allclose(encoder(batch)[2], encoder({**batch, "action": low})[2])


def test_log_q_is_the_expected_number_of_draws():
    counts = torch.tensor([0, 6, 3, 1])
    expected = torch.tensor([4 * 0.6 + 2, 4 * 0.3 + 2, 4 * 0.1 + 2]).log()
    torch.testing.assert_close(mixture_log_q(counts, 4, 6)[1:], expected)


def test_corrected_softmax_estimates_the_full_one_and_the_uncorrected_does_not():
    torch.manual_seed(0)
    items, counts = torch.randn(51, 4) * 0.5, torch.arange(51) ** 2
    state, target = torch.randn(200, 4), torch.randint(1, 51, (200,))
    full = F.cross_entropy((state @ items.T)[:, 1:], target - 1)
    popular = torch.multinomial(counts.float(), 4000, replacement=True)
    drawn = torch.cat([popular, torch.randint(1, 51, (2000,))])
    corrected = corrected_softmax_loss(state, target, items, drawn, mixture_log_q(counts, 4000, 2000))
    plain = corrected_softmax_loss(state, target, items, drawn, torch.zeros(51))
    assert float(corrected) == pytest.approx(float(full), rel=0.02)
    assert float(plain) > float(full) + 1.0


def test_barred_negatives_and_the_own_target_do_not_compete():
    state, items = torch.ones(1, 2), torch.ones(4, 2)
    drawn = torch.tensor([1, 2, 3])
    zeros = torch.zeros(4)
    loss = corrected_softmax_loss(state, torch.tensor([1]), items, drawn, zeros)
    assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()))  # itself, 2 and 3
    barred = torch.tensor([[False, False, True]])
    loss = corrected_softmax_loss(state, torch.tensor([1]), items, drawn, zeros, barred)
    assert float(loss) == pytest.approx(float(torch.tensor(2.0).log()))


def test_no_item_of_the_same_window_is_a_negative(task, batch, monkeypatch):
    torch.manual_seed(0)
    model = Pretraining(task.log, replace(TINY, item_loss="sampled", uniform=64), task.counts)
    seen = []
    original = argus.corrected_softmax_loss

    def watch(state, target, items, drawn, log_q, barred):
        seen.append((drawn, barred))
        return original(state, target, items, drawn, log_q, barred)

    monkeypatch.setattr(argus, "corrected_softmax_loss", watch)
    model.loss(batch)
    drawn, barred = seen[0]
    rows = barred.unflatten(0, batch["item"].shape)
    for b in range(len(batch["item"])):
        own = torch.isin(drawn, batch["item"][b])
        assert all(torch.equal(rows[b, t], own) for t in range(16))


def test_the_user_state_ends_before_the_impression_before(task, batch):
    torch.manual_seed(0)
    model = TwoTower(Encoder(task.log, TINY)).eval()
    before = model.scores(batch)
    # Events 12..15 are ranked by the state after event 7; events 8..11 are the impression in between.
    for place in range(8, 12):
        torch.testing.assert_close(model.scores(changed(batch, task, "action", place))[:, 12:], before[:, 12:])
        torch.testing.assert_close(model.scores(changed(batch, task, "item", place))[:, 12:], before[:, 12:])
    assert not torch.allclose(model.scores(changed(batch, task, "action", 7))[:, 12:], before[:, 12:])
    after = model.scores(changed(batch, task, "action", 13))
    torch.testing.assert_close(after, before)  # its own reaction least of all


def test_pair_loss_by_a_loop_over_each_impression(task, batch):
    torch.manual_seed(0)
    model = TwoTower(Encoder(task.log, TINY))
    rows = {name: value.clone() for name, value in batch.items()}
    for value in rows.values():
        value[0, 14:] = 0
    score, losses = model.scores(rows), []
    for b in range(len(score)):
        for g in (2, 3):
            for i in range(4 * g, 4 * g + 4):
                for j in range(i + 1, 4 * g + 4):
                    x, y = int(rows["action"][b, i]), int(rows["action"][b, j])
                    if x and y and x != y:
                        d = score[b, i] - score[b, j]
                        losses.append(-F.logsigmoid(d if x > y else -d))
    torch.testing.assert_close(model.loss(rows), torch.stack(losses).mean())


@pytest.mark.parametrize("baseline", [LikedSASRec, DelayedDIN])
def test_baselines_know_no_more_than_the_delayed_state(task, batch, baseline):
    torch.manual_seed(0)
    model = baseline(task.log, TINY).eval()
    before = model.answers(batch).affinity
    for name in ("action", "item"):
        torch.testing.assert_close(model.answers(changed(batch, task, name, 9)).affinity[:, 12:], before[:, 12:])
    flipped = {**batch, "action": 6 - batch["action"]}
    assert not torch.allclose(model.answers(flipped).affinity[:, 12:], before[:, 12:])


def test_sasrec_reads_liked_items_in_their_order():
    item, action = torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[4, 2, 5, 3, 0]])
    assert LikedSASRec.liked(item, action).tolist() == [[0, 0, 0, 5, 7]]


def test_both_stages_take_their_steps_and_the_heads_are_left_behind(task):
    torch.manual_seed(0)
    recipe = Recipe(batch_size=4, validations=1)
    trained = argus.train_argus(task, TINY, pretrain=2, finetune=1, seed=0, recipe=recipe, device=CPU)
    model = trained.model
    assert trained.steps == 3
    assert not any("heads" in name for name, _ in model.towers.named_parameters())
    # Fine-tuning moves its own copy: what pre-training says stays what it was.
    pairs = zip(model.towers.encoder.parameters(), model.pretrained.encoder.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    found = task.evaluate(model, "test", CPU)
    assert {"item ne", "feedback ne", "pairwise accuracy", "user_auc", "ndcg@10"} <= set(found.metrics)
    scratch = argus.train_argus(task, TINY, pretrain=0, finetune=3, seed=0, recipe=recipe, device=CPU)
    assert scratch.steps == trained.steps
    assert scratch.parameters == trained.parameters
    assert "item ne" not in task.evaluate(scratch.model, "test", CPU).metrics


def test_arms_differ_in_what_their_name_says():
    found = {name: config for name, (_, config) in arms(TINY).items()}
    assert found[SCRATCH] == found[ARGUS] == TINY
    assert found[ITEM_ONLY] == replace(TINY, objectives="item")
    assert found[FEEDBACK_ONLY] == replace(TINY, objectives="feedback")
    assert found[REVERSED] == replace(TINY, order="feedback-first")
    assert found[ONE_TOKEN] == replace(TINY, tokens="one")
    assert [found[f"feedback weight {w}"].feedback_weight for w in ("0.3", "3")] == [0.3, 3.0]


def test_the_curve_has_four_widths():
    assert argus.widths(ArgusConfig(width=32)) == (8, 16, 32, 48)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ({}, "reproduced"),
        ({SCRATCH: (-0.01, 0.01)}, "inconclusive"),
        ({ITEM_ONLY: (-0.02, -0.01)}, "not reproduced"),
        ({FEEDBACK_ONLY: (-0.004, 0.002)}, "reproduced"),  # less than 1 % of 0.6
        ({FEEDBACK_ONLY: (-0.02, -0.007)}, "not reproduced"),
        ({REVERSED: (-0.02, -0.01)}, "reproduced"),  # reported only
        ({"argus, width 8": (-0.02, -0.01)}, "reproduced"),
    ],
)
def test_decision_rule_of_the_protocol(gaps, verdict):
    config = ArgusConfig(width=32)
    costs = {argus.sized(ARGUS, width, config): float(width) for width in argus.widths(config)}

    def compare(method, baseline, metric):
        interval = gaps.get(baseline, (0.001, 0.003))
        return difference(method, baseline, metric, interval, 0.6)

    assert conclude(decision_rule(config, costs), compare, budget="standard", seeds=3)[0] == verdict
