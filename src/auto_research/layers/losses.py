"""Losses between two towers whose negatives come from the batch itself.

All compare unit vectors by their cosine times a scale: without the scale the logits lie in [-1, 1] and no softmax over
many items can become certain.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sigmoid_pairs(scores: Tensor, positive: Tensor) -> Tensor:
    """Sigmoid loss of all pairs of a batch (arXiv:2303.15343): each pair is a decision of its own.

    -1/B Σ_ij log σ(z_ij · s_ij), z = +1 for a positive pair and -1 otherwise. Shapes: scores (B, M), positive (B, M)
    bool. In float32 at least.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.softplus(torch.where(positive, -scores, scores)).sum() / len(scores)


def in_batch_softmax(users: Tensor, items: Tensor, ids: Tensor, positive: Tensor, *, scale: float = 20.0) -> Tensor:
    """Softmax of each positive pair against the items of the other rows: mean over pairs (arXiv:2405.03988).

    With s = scale · cosine, the pair (j, k) of row i costs -log e^s(u_ij, v_ik) / (e^s(u_ij, v_ik) + sum over the items
    of other rows of e^s(u_ij, v)). The positives of one row do not compete with each other, and an item of another row
    that is also a target of row i is no negative of row i (a collision). One user state and one item a row
    (H = T = 1) give the usual in-batch softmax with its collisions masked; H states and T items with all pairs
    positive give the dense all-action loss.

    Shapes: users (B, H, D), items (B, T, D), ids (B, T) with 0 where there is no item, positive (B, H, T) bool; a
    positive pair must have an item. The softmax is in float32 at least.
    """
    rows, states = users.shape[:2]
    users, items = F.normalize(users, dim=-1), F.normalize(items, dim=-1)
    logits = scale * (users.flatten(0, 1) @ items.flatten(0, 1).T).view(rows, states, -1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    distinct, code = ids.unique(return_inverse=True)
    target_of_row = torch.zeros(rows, len(distinct), dtype=torch.bool, device=ids.device).scatter_(1, code, True)
    barred = target_of_row[:, code.flatten()] | (ids.flatten() == 0)  # (B, B·T)
    negatives = logits.masked_fill(barred[:, None], -torch.inf).logsumexp(-1, keepdim=True)  # (B, H, 1)
    row = torch.arange(rows, device=ids.device)
    own = logits.view(rows, states, rows, -1)[row, :, row]  # (B, H, T)
    return F.softplus(negatives - own)[positive].sum() / positive.sum().clamp(min=1)
