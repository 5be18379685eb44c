"""Ranking and probability metrics, vectorised, with one rule for ties.

**Ties.** An item's rank is its average rank among the items of equal score, rounded up. A model that gives every
item the same score therefore gets the rank of chance, and rounding is never in its favour. Areas under the ROC
curve count a tie as one half. Scores that are not numbers are refused (they would sort as best).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.layers.pairwise import list_ranks


def exclude_items(scores: Tensor, items: Tensor) -> Tensor:
    """A copy of scores (B, I) in which each row's items (B, H) are at -inf; repeated items do no harm."""
    return scores.scatter(1, items, -torch.inf)


def rank_of_target(scores: Tensor, target: Tensor, exclude: Tensor | None = None) -> Tensor:
    """Rank (B,) int64, 1 = best, of each row's target (B,) among the items of scores (B, I).

    `exclude` (B, H) lists items that are no candidates (history, padding); the target itself is always one, even
    when it is listed. Items at -inf rank with each other, below all others. Ties as in the module's docstring.
    """
    own = scores.gather(1, target[:, None])  # (B, 1)
    if scores.amax(1).isnan().any():
        raise ValueError("scores contain NaN, so nothing can be ranked")
    # The default int64 sums are several times slower on a CPU.
    ahead = (scores > own).sum(1, dtype=torch.int32).long()
    tied = (scores == own).sum(1, dtype=torch.int32).long() - 1
    if exclude is not None and exclude.shape[1]:
        listed = exclude.sort(dim=1).values
        again = F.pad(listed[:, 1:] == listed[:, :-1], (1, 0))
        counted = ~again & (listed != target[:, None])
        score = scores.gather(1, listed)
        ahead = ahead - ((score > own) & counted).sum(1)
        tied = tied - ((score == own) & counted).sum(1)
    return 1 + ahead + (tied + 1) // 2


def hit_rate(rank: Tensor, k: int) -> Tensor:
    """1 where the target is among the first k, else 0; equals recall@k for one target a list. Shape of rank."""
    return (rank <= k).float()


def ndcg(rank: Tensor, k: int) -> Tensor:
    """1 / log2(1 + rank) within the first k, else 0: NDCG@k of a list with a single relevant item."""
    return torch.where(rank <= k, 1.0 / torch.log2(rank.float() + 1.0), 0.0)


def reciprocal_rank(rank: Tensor, k: int | None = None) -> Tensor:
    """1 / rank, and 0 beyond the first k if k is given."""
    value = 1.0 / rank.float()
    return value if k is None else torch.where(rank <= k, value, 0.0)


def _tie_blocks(score: Tensor, group: Tensor, *, descending: bool) -> tuple[Tensor, Tensor]:
    """First and last rank (N,), from 1, of each example's block of equal scores within its group."""
    if score.isnan().any():
        raise ValueError("scores contain NaN, so nothing can be ranked")
    order = torch.argsort(score, descending=descending, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    score, group = score[order], group[order]
    position = torch.arange(len(order), device=score.device)
    opens_group = torch.ones_like(position, dtype=torch.bool)
    opens_block = opens_group.clone()
    opens_group[1:] = group[1:] != group[:-1]
    opens_block[1:] = opens_group[1:] | (score[1:] != score[:-1])
    group_start = position[opens_group][opens_group.cumsum(0) - 1]
    block = opens_block.cumsum(0) - 1
    first = position[opens_block]
    last = torch.cat([first[1:], first.new_tensor([len(order)])])[: len(first)] - 1
    low, high = torch.empty_like(position), torch.empty_like(position)
    low[order] = first[block] - group_start + 1
    high[order] = last[block] - group_start + 1
    return low, high


def user_auc(score: Tensor, label: Tensor, user: Tensor) -> Tensor:
    """AUC of each user's own examples (U,) float64, ties one half; NaN for a user without both labels.

    Shapes: score (N,), label (N,) in {0, 1}, user (N,) in 0..U-1.
    """
    low, high = _tie_blocks(score, user, descending=False)
    users = int(user.max()) + 1 if len(user) else 0
    label = label.double()
    zeros = torch.zeros(users, dtype=torch.float64, device=score.device)
    positives = zeros.index_add(0, user, label)
    negatives = zeros.index_add(0, user, 1.0 - label)
    ranks = zeros.index_add(0, user, label * (low + high).double() / 2)
    # Mann-Whitney: sum of the positives' ranks less its smallest possible value. 0 / 0 gives the NaN.
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives)


def auc(score: Tensor, label: Tensor) -> float:
    """Area under the ROC curve over all examples together, ties one half; NaN without both labels."""
    values = user_auc(score, label, torch.zeros_like(label, dtype=torch.int64))
    return float(values[0]) if len(values) else float("nan")


def user_ndcg(score: Tensor, gain: Tensor, user: Tensor, k: int) -> Tensor:
    """NDCG@k of each user's own examples (U,) float64; NaN for a user without any gain.

    Shapes: score (N,), gain (N,) >= 0 (a 0/1 label, or 2^grade - 1), user (N,) in 0..U-1. Ties as above.
    """
    users = int(user.max()) + 1 if len(user) else 0

    def total(low: Tensor, high: Tensor) -> Tensor:
        rank = (low + high + 1) // 2
        value = gain.double() * torch.where(rank <= k, 1.0 / torch.log2(rank.double() + 1.0), 0.0)
        return torch.zeros(users, dtype=torch.float64, device=score.device).index_add(0, user, value)

    ideal_order = torch.argsort(gain, descending=True, stable=True)
    ideal_order = ideal_order[torch.argsort(user[ideal_order], stable=True)]
    # Equal gains are interchangeable in the ideal list, so their places are distinct.
    place = torch.empty_like(ideal_order)
    place[ideal_order] = torch.arange(len(ideal_order), device=score.device)
    low, _ = _tie_blocks(place, user, descending=False)
    return total(*_tie_blocks(score, user, descending=True)) / total(low, low)


def log_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy of each example (N,), in nats, from logits."""
    return F.binary_cross_entropy_with_logits(logit.float(), label.float(), reduction="none")


def list_spearman(first: Tensor, second: Tensor, valid: Tensor) -> Tensor:
    """Spearman's rank correlation (B,) float64 of two values of each list's valid candidates; ties at mean ranks.

    Shapes: first, second (B, N), valid (B, N) bool. NaN where one side does not vary.
    """

    def centred(values: Tensor) -> Tensor:
        rank = list_ranks(values, valid).double() * valid
        return (rank - rank.sum(1, keepdim=True) / valid.sum(1, keepdim=True)) * valid

    x, y = centred(first), centred(second)
    return (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()


def calibration_ratio(probability: Tensor, label: Tensor) -> float:
    """Expected over observed positives; 1 is calibrated, above 1 overestimates. NaN without positives."""
    observed = float(label.double().sum())
    return float(probability.double().sum()) / observed if observed else float("nan")


def expected_calibration_error(probability: Tensor, label: Tensor, bins: int = 10) -> float:
    """Mean over examples of |mean probability - mean label| in their bin of equal width (arXiv:1706.04599)."""
    index = (probability.double() * bins).long().clamp(0, bins - 1)
    gap = probability.double() - label.double()
    per_bin = torch.zeros(bins, dtype=torch.float64, device=gap.device).index_add(0, index, gap)
    return float(per_bin.abs().sum()) / max(1, len(gap))


def popularity_head(counts: Tensor, share: float) -> Tensor:
    """True (I,) for the given share of items (rounded up) with the largest counts; ties go to smaller ids."""
    size = -int(-share * len(counts) // 1)
    head = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    head[torch.argsort(counts, descending=True, stable=True)[:size]] = True
    return head


def head_share(top: Tensor, head: Tensor) -> Tensor:
    """Share (B,) of each list's items top (B, k) that belong to the popularity head (I,) bool."""
    return head[top].float().mean(1)


def intra_list_diversity(top: Tensor, vectors: Tensor) -> Tensor:
    """Mean cosine distance (B,) over the pairs of different places of each list top (B, k); vectors (I, D).

    A list of fewer than two items has no pairs: NaN.
    """
    unit = F.normalize(vectors.float(), dim=-1)[top]  # (B, k, D)
    k = top.shape[1]
    # Sum over all ordered pairs is |sum of vectors|²; the k pairs of an item with itself are taken off.
    together = unit.sum(1).square().sum(1) - unit.square().sum((1, 2))
    return 1.0 - together / (k * (k - 1)) if k > 1 else torch.full((len(top),), torch.nan, device=top.device)
