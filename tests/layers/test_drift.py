"""The drift score, its trigger over streams, the gate, the cache, and the rival policies."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers import drift as d


def test_terms_by_hand():
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.tensor([0.0, 0.5, 0.5])
    assert float(d.entropy(p)) == pytest.approx(math.log(2))
    assert float(d.jaccard(p, q)) == pytest.approx(1 / 3)
    # M = (1/4, 1/2, 1/4): H(M) = 1.5 ln 2, both entropies are ln 2.
    assert float(d.jensen_shannon(p, q)) == pytest.approx(0.5 * math.log(2))
    expected = 0.4 * 0 + 0.3 * (2 / 3) + 0.3 * 0.5 * math.log(2)
    assert float(d.intent_drift(p, q)) == pytest.approx(expected)
    assert float(d.jaccard(torch.zeros(3), torch.zeros(3))) == 1.0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=6), st.lists(st.integers(0, 4), min_size=3, max_size=6))
def test_jensen_shannon_against_scipy_and_its_bound(one, two):
    from scipy.spatial.distance import jensenshannon

    size = min(len(one), len(two))
    p, q = torch.tensor(one[:size]).float(), torch.tensor(two[:size]).float()
    if p.sum() == 0 or q.sum() == 0:
        return
    p, q = d.distribution(p), d.distribution(q)
    found = float(d.jensen_shannon(p, q))
    assert found == pytest.approx(jensenshannon(p.double(), q.double()) ** 2, abs=1e-5)
    assert found <= math.log(2) + 1e-5


def test_the_default_threshold_needs_an_entropy_change():
    """With equal entropies the score tops out at 0.3 + 0.3 ln 2 = 0.508."""
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert float(d.intent_drift(p, q)) == pytest.approx(0.3 + 0.3 * math.log(2), abs=1e-6)
    assert float(d.intent_drift(p, q)) < d.DRIFT_THRESHOLD


def test_window_counts_against_a_loop():
    torch.manual_seed(0)
    labels = (torch.rand(3, 9, 5) < 0.4).float()
    found = d.window_counts(labels, 4)
    for t in range(9):
        torch.testing.assert_close(found[:, t], labels[:, max(0, t - 3) : t + 1].sum(1))
    with pytest.raises(ValueError, match="window"):
        d.window_counts(labels, 0)


def random_streams(seed, users=4, events=20):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(users, events, 6, generator=generator) < 0.3).float()
    length = torch.randint(5, events + 1, (users,), generator=generator)
    valid = torch.arange(events) < length[:, None]
    return d.distribution(d.window_counts(labels * valid[..., None], 3)), valid


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.1, 0.3, 0.8]), st.booleans())
def test_trigger_against_a_loop_with_an_anchor(seed, threshold, gated):
    windows, valid = random_streams(seed)
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(valid.shape, generator=generator) < 0.6 if gated else None
    found, drift = d.drift_calls(windows, valid, threshold=threshold, allowed=allowed)
    for u in range(len(windows)):
        anchor = None
        for t in range(int(valid[u].sum())):
            if anchor is None:
                runs = True
            else:
                score = float(d.intent_drift(windows[u, t], anchor))
                assert float(drift[u, t]) == pytest.approx(score, abs=1e-6)
                runs = score > threshold and (allowed is None or bool(allowed[u, t]))
            assert bool(found[u, t]) == runs
            if runs:
                anchor = windows[u, t]
        assert not found[u, int(valid[u].sum()) :].any()


def test_the_anchor_is_the_last_call_not_the_previous_event():
    """A slow drift: each step is small, the sum is not."""
    steps = torch.linspace(0, 1, 11)
    windows = torch.stack([1 - steps, steps], dim=-1)[None]
    valid = torch.ones(1, 11, dtype=torch.bool)
    step = float(d.intent_drift(windows[0, 5], windows[0, 4]))
    ran, _ = d.drift_calls(windows, valid, threshold=0.45, weights=(0.0, 0.3, 1.0))
    assert step < 0.45
    assert 1 < int(ran.sum()) < 6


def test_a_closed_gate_reuses_the_cache_and_keeps_the_anchor_but_an_empty_cache_runs():
    windows = torch.eye(3)[None]
    valid = torch.ones(1, 3, dtype=torch.bool)
    closed = torch.zeros_like(valid)
    ran, drift = d.drift_calls(windows, valid, threshold=0.1, allowed=closed)
    assert ran.tolist() == [[True, False, False]]
    assert float(drift[0, 2]) == pytest.approx(float(d.intent_drift(windows[0, 2], windows[0, 0])))
    assert d.cached_source(ran).tolist() == [[0, 0, 0]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_rivals_make_exactly_as_many_calls(seed, share):
    _, valid = random_streams(seed)
    least, most = len(valid), int(valid.sum())
    calls = least + round(share * (most - least))
    generator = torch.Generator().manual_seed(seed)
    for ran in (d.random_calls(valid, calls, generator), d.periodic_calls(valid, calls)):
        assert int(ran.sum()) == calls
        assert ran[:, 0].all()
        assert not (ran & ~valid).any()


def test_every_second_event_is_periodic():
    valid = torch.ones(2, 8, dtype=torch.bool)
    assert d.periodic_calls(valid, 8)[0].tolist() == [True, False] * 4
    with pytest.raises(ValueError, match="do not fit"):
        d.periodic_calls(valid, 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_periodic_calls_lie_evenly_within_a_stream_and_over_streams(seed, share):
    _, valid = random_streams(seed)
    length = valid.sum(1).tolist()
    calls = len(valid) + round(share * (sum(length) - len(valid)))
    ran = d.periodic_calls(valid, calls)
    for row, n in zip(ran, length, strict=True):
        at = row.nonzero().flatten().tolist()
        gaps = [b - a for a, b in pairwise([*at, n])]
        assert max(gaps) - min(gaps) <= 1
    # No stream could take a call from another and have its calls lie no closer than the other's then would.
    count = ran.sum(1).tolist()
    for giver in range(len(count)):
        for taker in range(len(count)):
            if count[giver] > 1 and count[taker] < length[taker]:
                assert length[taker] / count[taker] <= length[giver] / (count[giver] - 1)


def test_few_periodic_calls_fall_into_the_middle_of_streams_not_on_their_ends():
    """One call more for each of two equal streams in three."""
    valid = torch.ones(3, 10, dtype=torch.bool)
    ran = d.periodic_calls(valid, 5)
    assert [row.nonzero().flatten().tolist() for row in ran] == [[0, 5], [0, 5], [0]]
    assert d.periodic_calls(torch.ones(2, 1, dtype=torch.bool), 2).all()


def test_cached_source_is_the_latest_call():
    ran = torch.tensor([[True, False, False, True, False]])
    assert d.cached_source(ran).tolist() == [[0, 0, 0, 3, 3]]
