"""Metrics against loops, scipy and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import rankdata
from torch import Tensor

from auto_research.tasks import metrics


def rank_by_loop(scores: Tensor, target: int, excluded: set[int]) -> int:
    """Average rank by scipy, rounded up, among the candidates only."""
    candidates = [i for i in range(len(scores)) if i == target or i not in excluded]
    ranks = rankdata([-float(scores[i]) for i in candidates], method="average")
    return math.ceil(ranks[candidates.index(target)])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_rank_with_ties_and_repeated_exclusions(seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (6, 9), generator=generator).float()
    scores[0, :4] = -torch.inf  # a generative model gives nothing to what its beam missed
    target = torch.randint(9, (6,), generator=generator)
    exclude = torch.randint(9, (6, 5), generator=generator)  # repeats, and sometimes the target
    kept = scores.clone()
    rank = metrics.rank_of_target(scores, target, exclude)
    expected = [rank_by_loop(scores[b], int(target[b]), set(exclude[b].tolist())) for b in range(6)]
    assert rank.tolist() == expected
    assert torch.equal(scores, kept)


def test_equal_scores_get_the_rank_of_chance_never_better() -> None:
    scores = torch.zeros(3, 100)
    rank = metrics.rank_of_target(scores, torch.tensor([0, 50, 99]))
    assert rank.tolist() == [51, 51, 51]


def test_nan_scores_are_refused() -> None:
    scores = torch.tensor([[0.0, torch.nan, 1.0]])
    with pytest.raises(ValueError, match="NaN"):
        metrics.rank_of_target(scores, torch.tensor([2]))
    with pytest.raises(ValueError, match="NaN"):
        metrics.auc(scores[0], torch.tensor([0, 1, 1]))


def test_exclusion_does_not_touch_the_scores() -> None:
    scores = torch.arange(4.0).expand(2, 4)
    out = metrics.exclude_items(scores, torch.tensor([[3, 3], [0, 1]]))
    assert out.tolist() == [[0.0, 1.0, 2.0, -torch.inf], [-torch.inf, -torch.inf, 2.0, 3.0]]
    assert scores[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_cut_metrics_by_hand() -> None:
    rank = torch.tensor([1, 3, 10, 11])
    assert metrics.hit_rate(rank, 10).tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(metrics.ndcg(rank, 10), torch.tensor([1.0, 0.5, 1 / math.log2(11), 0.0]))
    torch.testing.assert_close(metrics.reciprocal_rank(rank), torch.tensor([1.0, 1 / 3, 0.1, 1 / 11]))
    torch.testing.assert_close(metrics.reciprocal_rank(rank, 10)[-1], torch.tensor(0.0))


def test_ranks_give_torchmetrics_ndcg_and_hit_rate() -> None:
    from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_normalized_dcg

    scores, target = torch.randn(20, 30), torch.randint(30, (20,))
    rank = metrics.rank_of_target(scores, target)
    relevant = torch.zeros(20, 30, dtype=torch.bool).scatter(1, target[:, None], True)
    for row in range(20):
        theirs = retrieval_normalized_dcg(scores[row], relevant[row], top_k=10)
        torch.testing.assert_close(metrics.ndcg(rank, 10)[row], theirs)
        assert float(metrics.hit_rate(rank, 10)[row]) == float(retrieval_hit_rate(scores[row], relevant[row], top_k=10))


def pairwise_auc(score: Tensor, label: Tensor) -> float:
    wins = [
        1.0 if p > n else 0.5 if p == n else 0.0 for p in score[label == 1].tolist() for n in score[label == 0].tolist()
    ]
    return sum(wins) / len(wins) if wins else math.nan


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31))
def test_user_auc_is_the_share_of_won_pairs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(6, (60,), generator=generator).float()
    label = torch.randint(2, (60,), generator=generator)
    user = torch.randint(7, (60,), generator=generator)
    user[-1] = 6
    values = metrics.user_auc(score, label, user)
    expected = [pairwise_auc(score[user == u], label[user == u]) for u in range(7)]
    np.testing.assert_allclose(values.numpy(), expected)
    assert metrics.auc(score, label) == pytest.approx(pairwise_auc(score, label))


def test_auc_without_both_labels_is_undefined() -> None:
    assert math.isnan(metrics.auc(torch.randn(4), torch.ones(4)))
    assert math.isnan(metrics.auc(torch.randn(0), torch.ones(0)))


def test_user_ndcg_against_torchmetrics() -> None:
    from torchmetrics.functional.retrieval import retrieval_normalized_dcg

    score, gain = torch.randn(50), torch.randint(4, (50,))
    user = torch.randint(4, (50,))
    user[0] = 3
    gain[user == 2] = 0
    values = metrics.user_ndcg(score, gain, user, k=5)
    for u in (0, 1, 3):
        theirs = retrieval_normalized_dcg(score[user == u], gain[user == u], top_k=5)
        assert float(values[u]) == pytest.approx(float(theirs), abs=1e-6)
    assert math.isnan(float(values[2]))


def test_user_ndcg_rounds_tied_ranks_up() -> None:
    values = metrics.user_ndcg(torch.zeros(2), torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64), k=10)
    assert float(values[0]) == pytest.approx(1 / math.log2(3))


def test_log_loss_and_calibration_by_hand() -> None:
    logit, label = torch.tensor([0.0, math.log(3.0)]), torch.tensor([1, 0])
    torch.testing.assert_close(metrics.log_loss(logit, label), torch.tensor([math.log(2.0), math.log(4.0)]))
    probability = torch.tensor([0.1, 0.3, 0.95, 1.0])
    label = torch.tensor([0, 1, 1, 0])
    assert metrics.calibration_ratio(probability, label) == pytest.approx(2.35 / 2)
    assert math.isnan(metrics.calibration_ratio(probability, torch.zeros(4)))
    # Two bins: {0.1, 0.3} with labels {0, 1} and {0.95, 1.0} with labels {1, 0}.
    expected = (abs(0.4 - 1) + abs(1.95 - 1)) / 4
    assert metrics.expected_calibration_error(probability, label, bins=2) == pytest.approx(expected)


def test_calibration_error_against_torchmetrics() -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    probability, label = torch.rand(300), torch.randint(2, (300,))
    theirs = float(binary_calibration_error(probability, label, n_bins=15, norm="l1"))
    assert metrics.expected_calibration_error(probability, label, bins=15) == pytest.approx(theirs, abs=1e-6)


def test_head_and_its_share() -> None:
    head = metrics.popularity_head(torch.tensor([5, 1, 5, 9, 0]), 0.5)  # three of five; the tie goes to item 0
    assert head.tolist() == [True, False, True, True, False]
    assert metrics.popularity_head(torch.tensor([5, 1, 5, 9, 0]), 0.4).tolist() == [True, False, False, True, False]
    top = torch.tensor([[0, 1], [1, 4]])
    assert metrics.head_share(top, head).tolist() == [0.5, 0.0]


def test_intra_list_diversity_is_the_mean_pairwise_cosine_distance() -> None:
    vectors, top = torch.randn(12, 5), torch.randint(12, (6, 4))
    expected = [pdist(vectors[row].numpy(), metric="cosine").mean() for row in top]
    np.testing.assert_allclose(metrics.intra_list_diversity(top, vectors).numpy(), expected, atol=1e-5)
    assert metrics.intra_list_diversity(top[:, :1], vectors).isnan().all()
