"""Preference losses between a chosen and a rejected response, from sequence log-probabilities.

A response's log-probability is the sum over its tokens, end token included; its mean divides that by the number of
tokens. Every loss returns one value a pair, (B,), in float32 at least; the caller averages. Reference values carry no
gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def sequence_log_probabilities(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Summed log-probability and number of tokens of each response.

    Shapes: logits (B, T, V), where logits[:, t] predict targets[:, t] (already shifted); targets (B, T); mask (B, T),
    True at the tokens that count. Returns two (B,) tensors in float32 at least. Targets outside the mask may hold any
    valid id.
    """
    logits = _wide(logits)
    chosen = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    return chosen.where(mask, 0.0).sum(-1), mask.sum(-1).to(logits.dtype)


def log1m_exp(log_probability: Tensor) -> Tensor:
    """log(1 - e^l) of log-probabilities l <= 0, any shape, without cancellation.

    log(-expm1(l)) above -ln 2 and log1p(-e^l) below (Maechler, 2012). A certain event (l = 0) is taken at the largest
    negative number of the type and gets no gradient, so that a saturated policy yields no infinity.
    """
    value = _wide(log_probability)
    value = value.clamp(max=-torch.finfo(value.dtype).eps)
    near = value > -math.log(2.0)
    # Each branch sees only inputs that it handles: the gradient of the other one would be 0 times infinity.
    close = torch.log(-torch.expm1(value.where(near, -1.0)))
    far = torch.log1p(-torch.exp(value.where(~near, -1.0)))
    return torch.where(near, close, far)


def margin(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor) -> Tensor:
    """(log pi_w - log pi_l) - (log rho_w - log rho_l): how much more than its reference the policy prefers the chosen.

    All arguments and the result (B,).
    """
    chosen, rejected = _wide(chosen), _wide(rejected)
    return (chosen - rejected) - (reference_chosen.detach() - reference_rejected.detach())


def dpo_loss(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """-log sigmoid(beta * margin) (Direct Preference Optimization, arXiv:2305.18290): ln 2 where policy = reference.

    Arguments are summed log-probabilities (B,) of the policy and of its frozen reference; returns (B,).
    """
    return -F.logsigmoid(beta * margin(chosen, rejected, reference_chosen, reference_rejected))


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    tau: float = 0.1,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> Tensor:
    """(margin - 1 / (2 tau))^2 (Identity Preference Optimization, arXiv:2310.12036): a finite target margin.

    Arguments are summed log-probabilities (B,). With both lengths (B,), each response's log-ratio is first divided by
    its number of tokens, the form behind the paper's results; without them the sums are used. Returns (B,).
    """
    if (chosen_length is None) != (rejected_length is None):
        raise ValueError("give both lengths or neither")
    if chosen_length is not None and rejected_length is not None:
        chosen, reference_chosen = chosen / chosen_length, reference_chosen / chosen_length
        rejected, reference_rejected = rejected / rejected_length, reference_rejected / rejected_length
    return (margin(chosen, rejected, reference_chosen, reference_rejected) - 1 / (2 * tau)) ** 2


def log_odds_ratio(chosen_mean: Tensor, rejected_mean: Tensor) -> Tensor:
    """logit(p_w) - logit(p_l) with log p the mean log-probability a token; arguments and result (B,)."""
    chosen, rejected = _wide(chosen_mean), _wide(rejected_mean)
    return (chosen - rejected) - (log1m_exp(chosen) - log1m_exp(rejected))


def orpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, *, weight: float = 0.1) -> Tensor:
    """-l_w - weight * log sigmoid(log odds ratio) (Odds Ratio Preference Optimization, arXiv:2403.07691).

    Arguments are mean log-probabilities a token (B,); no reference. `weight` is the paper's lambda. Returns (B,).
    """
    return -_wide(chosen_mean) - weight * F.logsigmoid(log_odds_ratio(chosen_mean, rejected_mean))


def simpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-log sigmoid(beta * (l_w - l_l) - gamma) (Simple Preference Optimization, arXiv:2405.14734).

    Arguments are mean log-probabilities a token (B,); no reference. Returns (B,).
    """
    return -F.logsigmoid(beta * (_wide(chosen_mean) - _wide(rejected_mean)) - gamma)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
