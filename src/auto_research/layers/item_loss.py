"""Losses over a catalogue: full softmax without storing its logits, shared sampled negatives, and pairs.

All take hidden states (N, D), one target item a state (N,) and the item table (I + 1, D) whose row 0 is padding
and never competes; logits are inner products (plus an optional bias an item). Each returns the mean over states.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossKind = Literal["softmax", "sampled", "bce"]


class _SoftmaxCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over the whole table, a block of states at a time.

    The gradients are taken while a block's probabilities are at hand, so that the (N, I) logits never exist and no
    pass over them is made twice.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, items: Tensor, bias: Tensor | None, target: Tensor, block: int) -> Tensor:
        wants_hidden, wants_items, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        items_grad = torch.zeros_like(items) if wants_items else None
        bias_grad = torch.zeros_like(bias) if bias is not None and wants_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), block):
            rows = slice(start, start + block)
            state, answer = hidden[rows], target[rows]
            logits = state @ items.T if bias is None else torch.addmm(bias, state, items.T)
            logits = logits.float()
            logits[:, 0] = -torch.inf
            # log sum exp in place: what remains in `logits` are the probabilities.
            largest = logits.amax(1, keepdim=True)
            own = logits.gather(1, answer[:, None])
            probability = logits.sub_(largest).exp_()
            mass = probability.sum(1, keepdim=True)
            total += (mass.log() + largest - own).sum()
            if hidden_grad is None and items_grad is None and bias_grad is None:
                continue
            probability /= mass
            probability.scatter_add_(1, answer[:, None], torch.full_like(own, -1.0))
            gradient = probability.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(gradient, items, out=hidden_grad[rows])
            if items_grad is not None:
                items_grad.addmm_(gradient.T, state)
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
        ctx.save_for_backward(hidden_grad, items_grad, bias_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        saved = [None if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors]
        return (*saved, None, None)


def full_softmax_loss(
    hidden: Tensor, target: Tensor, items: Tensor, bias: Tensor | None = None, *, block: int = 512
) -> Tensor:
    """Cross-entropy of target (N,) in 1..I over all items; exact, in memory block x I.

    It can be differentiated once. The softmax is computed in float32.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, items, bias = hidden.to(dtype), items.to(dtype), None if bias is None else bias.to(dtype)
    total = _SoftmaxCrossEntropy.apply(hidden, items, bias, target, block)
    return total / max(1, len(target))


def sampled_softmax_loss(
    hidden: Tensor,
    target: Tensor,
    items: Tensor,
    bias: Tensor | None = None,
    *,
    negatives: int = 1024,
    proposal: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the target against negatives that all states of the batch share.

    Negatives are drawn with replacement, uniformly (all items have the same chance, so no correction is made) or
    from `proposal` (I + 1,), any positive weights: a negative's logit then loses the log of how often its item is
    expected among the draws (logQ correction), so that the sum over negatives estimates the one over the catalogue.
    A negative that equals a state's own target is masked for that state.
    """
    if proposal is None:
        drawn = torch.randint(1, len(items), (negatives,), device=hidden.device)
    else:
        weights = proposal.index_fill(0, proposal.new_zeros(1, dtype=torch.int64), 0.0)
        drawn = torch.multinomial(weights, negatives, replacement=True)
    positive = (hidden * items[target]).sum(-1, keepdim=True).float()  # (N, 1)
    negative = (hidden @ items[drawn].T).float()  # (N, negatives)
    if bias is not None:
        positive, negative = positive + bias[target, None], negative + bias[drawn]
    if proposal is not None:
        negative = negative - (negatives * weights[drawn] / weights.sum()).log()
    negative = negative.masked_fill(drawn == target[:, None], -torch.inf)
    return (torch.cat([positive, negative], 1).logsumexp(1, keepdim=True) - positive).mean()


def binary_loss(
    hidden: Tensor, target: Tensor, items: Tensor, bias: Tensor | None = None, *, negatives: int = 1
) -> Tensor:
    """Binary cross-entropy of the target and of negatives drawn for each state alone (SASRec's own loss).

    Negatives are uniform over the items that are not the state's target.
    """
    count = len(items) - 1
    if count < 2:
        raise ValueError("a catalogue of one item has no negatives")
    # Uniform over the other count - 1 items: step past the target.
    step = torch.randint(1, count, (len(target), negatives), device=hidden.device)
    drawn = (target[:, None] - 1 + step) % count + 1
    positive = (hidden * items[target]).sum(-1)
    negative = torch.einsum("nd,nkd->nk", hidden, items[drawn])
    if bias is not None:
        positive, negative = positive + bias[target], negative + bias[drawn]
    return F.softplus(-positive.float()).mean() + F.softplus(negative.float()).mean(1).mean()


def item_loss(
    hidden: Tensor,
    target: Tensor,
    items: Tensor,
    bias: Tensor | None = None,
    *,
    kind: LossKind = "softmax",
    negatives: int = 1024,
) -> Tensor:
    """One of the losses, over the states that have a target.

    Shapes: hidden (..., D), target (...) with 0 where there is nothing to predict, items (I + 1, D). `negatives`
    counts shared ones for `sampled` and those of each state for `bce`; `softmax` uses every item.
    """
    wanted = target > 0
    hidden, target = hidden[wanted], target[wanted]
    if not len(target):
        return hidden.sum()  # zero, and still connected to the parameters
    if kind == "softmax":
        return full_softmax_loss(hidden, target, items, bias)
    if kind == "sampled":
        return sampled_softmax_loss(hidden, target, items, bias, negatives=negatives)
    if kind == "bce":
        return binary_loss(hidden, target, items, bias, negatives=negatives)
    raise ValueError(f"loss '{kind}' is none of softmax, sampled, bce")
