"""Losses over pairs of candidates of one list, with certain or with uncertain scores.

Letters: B lists of N candidates, P = N(N-1)/2 pairs (i, j) with i < j, K objectives. All in float32 at least: a normal
distribution function in bfloat16 saturates beyond three standard deviations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of all pairs: values (B, N, ...) -> (B, P, ...) of i and of j."""
    first, second = torch.triu_indices(values.shape[1], values.shape[1], offset=1, device=values.device)
    return values[:, first], values[:, second]


def list_ranks(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Place of each candidate in the order of its list, 1 = largest value, ties at their mean place.

    Shapes: values (B, N) or (B, N, K) with one order for each k; valid (B, N) leaves candidates out of the order
    (their own rank then means nothing). Returns float32 of the shape of values.
    """
    other, own = values[:, None, :], values[:, :, None]  # (B, N, N[, K]), summed over the middle one
    ahead = (other > own).float() + 0.5 * (other == own).float()
    if valid is not None:
        counted = valid[:, None]
        ahead = ahead * (counted if values.dim() == 2 else counted[..., None])
    return ahead.sum(2) + 0.5


def rank_spread(ranks: Tensor) -> Tensor:
    """Standard deviation over K of a candidate's places (B, N, K) -> (B, N): how far K orders disagree on it.

    Places are multiples of one half, so the sums are exact and equal disagreement gives equal numbers.
    """
    count = ranks.shape[-1]
    exact = count * ranks.square().sum(-1) - ranks.sum(-1).square()
    return (exact.clamp(min=0.0) / (count * max(1, count - 1))).sqrt()


def logistic_win(difference: Tensor) -> tuple[Tensor, Tensor]:
    """log P and log(1 - P) of P = σ(difference) that i stands before j, any shape."""
    difference = difference.to(torch.promote_types(difference.dtype, torch.float32))
    return F.logsigmoid(difference), F.logsigmoid(-difference)


def gaussian_win(difference: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """log P and log(1 - P) of P = Φ(difference / √variance): i beats j when scores are normal and independent.

    `difference` is of the means and `variance` the sum of both variances, of one shape.
    """
    exact = torch.promote_types(difference.dtype, torch.float32)
    z = difference.to(exact) / variance.to(exact).sqrt()
    return torch.special.log_ndtr(z), torch.special.log_ndtr(-z)


def order_loss(
    win: tuple[Tensor, Tensor],
    first: Tensor,
    second: Tensor,
    weight: Tensor | None = None,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of "i before j" against the order of `first` and `second`; equal values make no pair.

    Shapes: win, log P and log(1 - P), (B, P); first, second (B, P) or (B, P, K), where each of the K orders gives a
    label of its own and the mean is over all their pairs; weight (B, P) multiplies the loss of a pair; pairs that are
    not `kept` (B, P) bool do not count.
    """
    log_win, log_loss = (part if first.dim() == 2 else part[..., None] for part in win)
    loss = -torch.where(first > second, log_win, log_loss)
    counted = first != second
    if kept is not None:
        counted = counted & (kept if first.dim() == 2 else kept[..., None])
    if weight is not None:
        loss = loss * (weight if first.dim() == 2 else weight[..., None])
    return (loss * counted).sum() / counted.sum().clamp(min=1)


def min_max_weight(uncertainty: Tensor, scale: float) -> Tensor:
    """γ (U - min U) / (max U - min U) over everything given; all γ where every U is the same. Not detached."""
    uncertainty = uncertainty.to(torch.promote_types(uncertainty.dtype, torch.float32))
    low, high = uncertainty.min(), uncertainty.max()
    spread = high - low
    scaled = (uncertainty - low) / torch.where(spread > 0, spread, 1.0)
    return scale * torch.where(spread > 0, scaled, 1.0)
