"""Pair losses against loops, scipy and hand values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from auto_research.layers.pairwise import (
    gaussian_win,
    list_ranks,
    logistic_win,
    min_max_weight,
    order_loss,
    pairs,
    rank_spread,
)


def test_pairs_are_all_i_before_j():
    first, second = pairs(torch.tensor([[1.0, 2.0, 3.0]]))
    assert first.tolist() == [[1, 1, 2]]
    assert second.tolist() == [[2, 3, 3]]


@given(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_ranks_are_scipys_average_ranks_from_the_top(rows):
    values = torch.tensor(rows, dtype=torch.float32)
    expected = np.stack([stats.rankdata(-np.array(row)) for row in rows])
    np.testing.assert_allclose(list_ranks(values), expected)
    both = torch.stack([values, -values], -1)
    np.testing.assert_allclose(list_ranks(both)[..., 0], expected)


def test_ranks_among_the_valid_ignore_the_others():
    values = torch.tensor([[9.0, 1.0, 5.0, 3.0]])
    valid = torch.tensor([[False, True, True, True]])
    assert list_ranks(values, valid)[0, 1:].tolist() == [3, 1, 2]
    assert list_ranks(values[..., None], valid)[0, 1:, 0].tolist() == [3, 1, 2]


def test_gaussian_win_is_the_probability_that_one_normal_exceeds_another():
    mean, variance = torch.tensor([[1.0, 0.2]]), torch.tensor([[0.5, 0.3]])
    win, loss = gaussian_win(mean[:, 0] - mean[:, 1], variance.sum(1))
    expected = stats.norm.cdf(0.8 / math.sqrt(0.8))
    assert float(win.exp()) == pytest.approx(expected, rel=1e-6)
    assert float(loss.exp()) == pytest.approx(1 - expected, rel=1e-6)
    draws = mean + variance.sqrt() * torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))
    assert float((draws[:, 0] > draws[:, 1]).float().mean()) == pytest.approx(expected, abs=0.005)


def test_far_pairs_keep_a_finite_loss_and_gradient_in_bfloat16():
    difference = torch.tensor([-30.0, 30.0], dtype=torch.bfloat16, requires_grad=True)
    win, loss = gaussian_win(difference, torch.ones(2))
    assert win.dtype == torch.float32
    (win + loss).sum().backward()
    assert torch.isfinite(win).all()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(difference.grad).all()


@pytest.mark.parametrize("win", ["logistic", "gaussian"])
def test_order_loss_against_a_loop_over_pairs_and_objectives(win):
    generator = torch.Generator().manual_seed(1)
    mean, variance = torch.randn(2, 4, generator=generator), torch.rand(2, 4, generator=generator) + 0.1
    order = torch.randint(0, 3, (2, 4, 3), generator=generator).float()
    weight = torch.rand(2, 6, generator=generator)
    (mean_i, mean_j), (var_i, var_j) = pairs(mean), pairs(variance)
    both = logistic_win(mean_i - mean_j) if win == "logistic" else gaussian_win(mean_i - mean_j, var_i + var_j)
    total, count = 0.0, 0
    for b in range(2):
        place = 0
        for i in range(4):
            for j in range(i + 1, 4):
                gap = float(mean[b, i] - mean[b, j])
                spread = math.sqrt(float(variance[b, i] + variance[b, j]))
                p = 1 / (1 + math.exp(-gap)) if win == "logistic" else stats.norm.cdf(gap / spread)
                for k in range(3):
                    if order[b, i, k] != order[b, j, k]:
                        y = float(order[b, i, k] > order[b, j, k])
                        total -= float(weight[b, place]) * (y * math.log(p) + (1 - y) * math.log(1 - p))
                        count += 1
                place += 1
    assert float(order_loss(both, *pairs(order), weight)) == pytest.approx(total / count, rel=1e-5)


def test_equal_values_make_no_pair():
    mean_i, mean_j = pairs(torch.tensor([[1.0, -1.0]]))
    assert float(order_loss(logistic_win(mean_i - mean_j), *pairs(torch.ones(1, 2)))) == 0.0


def test_weight_runs_from_zero_to_gamma_and_equal_uncertainties_weigh_alike():
    weight = min_max_weight(torch.tensor([[1.0, 2.0], [5.0, 3.0]]), 2.0)
    assert weight.tolist() == [[0.0, 0.5], [2.0, 1.0]]
    assert min_max_weight(torch.full((2, 3), 0.7), 2.0).tolist() == [[2.0] * 3] * 2


def test_spread_of_places_is_their_standard_deviation_and_exact():
    ranks = torch.tensor([[[1.0, 3.0, 7.5], [7.5, 1.0, 3.0], [4.0, 4.0, 4.0]]])
    found = rank_spread(ranks)
    torch.testing.assert_close(found, ranks.std(-1))
    assert found[0, 0] == found[0, 1]
    assert found[0, 2] == 0
