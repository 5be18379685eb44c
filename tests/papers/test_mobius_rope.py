"""Equations of the anti-periodic rotary tables, their controls, and the recall task they are judged on."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.attention import RotaryEmbedding
from auto_research.papers.architecture import mobius_rope as m
from auto_research.tasks.recall import RecallVocabulary, most_distractors, recall_sequences

CONFIG = m.MobiusConfig(vocabulary=50, length=16, dim=32, heads=4, layers=2)


def rotation(ladder, position):
    """Dense rotation matrix (D, D) at an integer position, in the layout of `rotate`."""
    planes = len(ladder)
    matrix = torch.zeros(2 * planes, 2 * planes, dtype=torch.float64)
    for i, theta in enumerate(ladder.double()):
        c, s = math.cos(position * theta), math.sin(position * theta)
        matrix[i, i], matrix[i, i + planes] = c, -s
        matrix[i + planes, i], matrix[i + planes, i + planes] = s, c
    return matrix


def test_boundary_conditions_of_the_ladders():
    length, planes = 2048, 32
    identity = torch.eye(2 * planes, dtype=torch.float64)
    mobius = m.special_ladder("mobius", planes, length)
    torch.testing.assert_close(rotation(mobius, length), -identity, atol=2e-4, rtol=0)
    torch.testing.assert_close(rotation(mobius, 2 * length), identity, atol=4e-4, rtol=0)
    periodic = m.special_ladder("periodic", planes, length)
    torch.testing.assert_close(rotation(periodic, length), identity, atol=2e-4, rtol=0)
    band = m.special_ladder("band", planes, length)
    assert band[0] == pytest.approx(float(mobius[0]))
    assert band[-1] == pytest.approx(float(mobius[-1]), rel=1e-6)
    assert (rotation(band, length) + identity).abs().max() > 0.5
    assert (rotation(band, length) - identity).abs().max() > 0.5


def test_kernel_is_the_dirichlet_kernel_of_the_paper():
    length, width = 2048, 64
    distance = torch.arange(1, length)
    found = m.positional_kernel(m.special_ladder("mobius", width // 2, length), distance)
    x = math.pi * distance.double() / length
    torch.testing.assert_close(found, torch.sin(width * x) / (width * torch.sin(x)), atol=1e-5, rtol=0)
    assert float(found.abs()[length // 4 : 3 * length // 4].max()) <= 0.022 + 1e-3
    assert float(m.positional_kernel(m.special_ladder("mobius", 32, length), torch.tensor([0]))) == pytest.approx(1)
    assert found[-1] < -0.99


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 5000), st.sampled_from([(16, 4), (64, 8), (128, 12)]))
def test_kernel_is_anti_periodic_in_n_and_periodic_in_2n(distance, sizes):
    length, planes = sizes
    ladder = m.special_ladder("mobius", planes, length)
    at = m.positional_kernel(ladder, torch.tensor([distance, distance + length, distance + 2 * length]))
    assert float(at[1]) == pytest.approx(-float(at[0]), abs=1e-3)
    assert float(at[2]) == pytest.approx(float(at[0]), abs=1e-3)


def test_scores_of_the_model_follow_the_kernel():
    ladder = m.special_ladder("mobius", 4, 16)
    rotary = RotaryEmbedding(8, frequencies=ladder)
    ones = torch.ones(1, 1, 17, 8)
    query, key = rotary(ones, ones)
    scores = (query[0, 0] @ key[0, 0].T)[:, 0] / 8
    torch.testing.assert_close(scores.double(), m.positional_kernel(ladder, torch.arange(17)), atol=1e-5, rtol=0)


def test_a_head_wider_than_the_window_is_refused():
    with pytest.raises(ValueError, match="alias"):
        m.special_ladder("mobius", 9, 16)


def test_a_quarter_of_the_heads_is_special_and_groups_stay_whole():
    ladders = m.head_ladders(CONFIG)
    torch.testing.assert_close(ladders[0], m.special_ladder("mobius", 4, 16))
    torch.testing.assert_close(ladders[1:], m.standard_ladder(4).expand(3, -1))
    with pytest.raises(ValueError, match="whole key-value groups"):
        m.head_ladders(replace(CONFIG, kv_heads=2))
    grouped = m.head_ladders(replace(CONFIG, heads=8, kv_heads=4))
    assert torch.equal(grouped[0], grouped[1])
    m.MobiusLM(replace(CONFIG, heads=8, kv_heads=4)).hidden(torch.zeros(1, 5, dtype=torch.long))


def test_arms_have_equal_parameters_and_equal_initial_weights():
    def build(config):
        torch.manual_seed(0)
        return m.MobiusLM(config)

    standard = build(replace(CONFIG, share=0.0)).state_dict()
    for config in (CONFIG, replace(CONFIG, ladder="band"), replace(CONFIG, positions=False)):
        other = build(config).state_dict()
        assert standard.keys() == other.keys()
        assert all(torch.equal(standard[name], other[name]) for name in standard)


def test_the_design_length_is_not_rescaled_to_the_input():
    model = m.MobiusLM(CONFIG).eval()
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        short, long = model.hidden(tokens[:, :8]), model.hidden(tokens)[:, :8]
    torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-4)


def test_tables_stay_exact_in_a_bfloat16_model():
    model = m.MobiusLM(replace(CONFIG, length=2048)).bfloat16()
    assert model.rotary.frequencies.dtype == torch.float32
    cos, _ = model.rotary.tables(2, offset=2047)
    torch.testing.assert_close(cos[0, 1], -torch.ones(4), atol=1e-3, rtol=0)
    assert torch.isfinite(model.hidden(torch.zeros(1, 6, dtype=torch.long))).all()


def task(length=64, examples=90):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (900,), generator=generator)
    text = m.TokenisedText(tokens[:600], tokens[600:750], tokens[750:], 40)
    return m.TextWithRecall(text, symbols=8, length=length, examples=examples, windows=8)


def test_table_swap_leaves_weights_and_tables_as_they_were():
    one = task()
    model = m.MobiusLM(replace(CONFIG, length=64, vocabulary=one.vocabulary.size)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tables = model.rotary.frequencies.clone()
    evaluation = one.evaluate(model, "test", torch.device("cpu"))
    assert "recall lost by the table swap" in evaluation.diagnostics
    assert torch.equal(tables, model.rotary.frequencies)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    standard = m.MobiusLM(replace(CONFIG, length=64, vocabulary=one.vocabulary.size, share=0.0)).eval()
    standard.load_state_dict(before)
    hits = one._hits(standard, one.held_out("test"), torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(hits, one.swapped_hits(model, one.held_out("test"), torch.device("cpu")))


def test_every_recall_example_holds_at_least_two_distractors():
    one = task(64, 900)
    mark = one.vocabulary.key_mark
    batches = one.batches(0, 8, torch.device("cpu"))
    for batch in (one.held_out("test"), one.held_out("validation"), *(next(batches) for _ in range(12))):
        pairs = (batch["recall"] == mark).sum(1) - 1  # the query has the mark, too
        assert pairs.min() >= 3
        assert pairs.max() <= 5
    with pytest.raises(ValueError, match="distractors"):
        task(32)


def test_the_local_mixing_sees_two_tokens_back_and_no_further():
    torch.manual_seed(0)
    model = m.MobiusLM(CONFIG)
    tokens = torch.arange(10)[None]
    found = model.mixed(tokens)[0]
    embedded, taps = model.embedding.weight, model.taps
    for t in range(10):
        expected = embedded[t].clone()
        for back in (1, 2):
            if t >= back:
                expected = expected + taps[back - 1] * embedded[t - back]
        torch.testing.assert_close(found[t], expected)


def test_weights_of_another_design_length_are_refused():
    model = m.MobiusLM(CONFIG)
    m.MobiusLM(CONFIG).load_state_dict(model.state_dict())
    with pytest.raises((ValueError, RuntimeError), match="design length 16"):
        m.MobiusLM(replace(CONFIG, length=32)).load_state_dict(model.state_dict())


def test_perplexity_against_a_loop():
    one = task()
    model = m.MobiusLM(replace(CONFIG, length=64, vocabulary=one.vocabulary.size)).eval()
    found = one.evaluate(model, "test", torch.device("cpu"))["perplexity"]
    losses = []
    text = one.text.test
    for start in range(0, (len(text) - 1) // 64 * 64, 64):
        with torch.no_grad():
            logits = model.logits(model.hidden(text[None, start : start + 64]))[0].double()
        losses += [-logits[t].log_softmax(-1)[text[start + t + 1]] for t in range(64)]
    assert found == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([8, 16, 32, 64]), st.integers(0, 4), st.floats(0, 1))
def test_recall_sequences_hold_what_they_promise(seed, length, distractors, depth):
    vocabulary = RecallVocabulary(text_tokens=30, symbols=8)
    distractors = min(distractors, most_distractors(length))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(30, (200,), generator=generator)
    tokens, answers, needles = recall_sequences(
        torch.full((5,), depth), length, distractors, text, vocabulary, generator
    )
    assert tokens.shape == (5, length)
    for row, answer, needle in zip(tokens.tolist(), answers.tolist(), needles.tolist(), strict=True):
        marks = [i for i, token in enumerate(row) if token == vocabulary.key_mark]
        pairs, query = marks[:-1], marks[-1]
        assert len(pairs) == distractors + 1
        assert query == length - 2
        asked = row[query + 1]
        keys = [row[i + 1] for i in pairs]
        assert len(set(keys)) == len(keys)
        assert keys.count(asked) == 1
        here = pairs[keys.index(asked)]
        assert here == needle
        assert row[here : here + 4] == [vocabulary.key_mark, asked, vocabulary.value_mark, answer]
        assert all(b - a >= 4 for a, b in pairwise(pairs))
    if depth in (0.0, 1.0):
        expected = 0 if depth == 0 else length - 6
        assert needles.tolist() == [expected] * 5


def test_the_value_cannot_be_guessed_from_the_key():
    vocabulary = RecallVocabulary(10, symbols=8)
    generator = torch.Generator().manual_seed(0)
    tokens, answers, _ = recall_sequences(
        torch.rand(20_000, generator=generator), 24, 3, torch.arange(10).repeat(20), vocabulary, generator
    )
    key = tokens[:, -1] - vocabulary.key(torch.tensor(0))
    value = answers - vocabulary.value(torch.tensor(0))
    table = torch.zeros(8, 8).index_put_((key, value), torch.ones(20_000), accumulate=True)
    from scipy import stats

    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3
    assert table.min() > 0.8 * 20_000 / 64


def test_held_out_examples_cover_depths_and_lengths_and_stay_fixed():
    one, two = task(64, 900), task(64, 900)
    batch = one.held_out("test")
    assert torch.equal(batch["recall"], two.held_out("test")["recall"])
    assert not torch.equal(batch["recall"], one.held_out("validation")["recall"])
    assert sorted(set(batch["length"].tolist())) == [16, 32, 64]
    assert sorted(set(batch["depth"].tolist())) == list(range(10))
    first = next(one.batches(3, 4, torch.device("cpu")))
    again = next(two.batches(3, 4, torch.device("cpu")))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_brown_forsythe_by_hand():
    one, two = [0.9, 0.91, 0.92, 0.9], [0.2, 0.9, 0.5, 0.7]
    found = m.spread(one, two)
    gaps = [[abs(x - sorted(s)[1] / 2 - sorted(s)[2] / 2) for x in s] for s in (one, two)]
    means = [sum(g) / 4 for g in gaps]
    grand = sum(means) / 2
    between = sum(4 * (mean - grand) ** 2 for mean in means)
    within = sum((x - mean) ** 2 for g, mean in zip(gaps, means, strict=True) for x in g)
    from scipy import stats

    assert found.p_value == pytest.approx(stats.f.sf(between / (within / 6), 1, 6), rel=1e-6)
    assert (found.worst, found.standard_worst) == (0.9, 0.2)
    assert m.spread([0.5], [0.6]).p_value == 1.0
