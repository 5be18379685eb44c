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


class _CrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of each state's own logit against a table of competitors, block by block.

    Gradients are taken while a block's probabilities are at hand, so the (N, C) logits are never stored. Row 0 of
    the table never competes, nor does column `own_column` (N,) of each state (its target, or 0 where the target is
    not among the competitors). The softmax is in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, own: Tensor, table: Tensor, bias: Tensor | None, own_column: Tensor, block: int
    ) -> Tensor:
        wants_hidden, wants_own, wants_table, wants_bias = ctx.needs_input_grad[:4]
        wants = wants_hidden or wants_own or wants_table or wants_bias
        hidden_grad = torch.empty_like(hidden) if wants else None
        own_grad = torch.empty_like(own) if wants else None
        table_grad = torch.zeros_like(table) if wants else None
        bias_grad = torch.zeros_like(bias) if wants and bias is not None else None
        total = own.new_zeros(())
        for start in range(0, len(hidden), block):
            rows = slice(start, start + block)
            state, answer = hidden[rows], own[rows, None]
            logits = (state @ table.T if bias is None else torch.addmm(bias, state, table.T)).to(own.dtype)
            logits[:, 0] = -torch.inf
            logits.scatter_(1, own_column[rows, None], -torch.inf)
            largest = torch.maximum(logits.amax(1, keepdim=True), answer)
            weight = logits.sub_(largest).exp_()
            mass = weight.sum(1, keepdim=True) + (answer - largest).exp()
            total += (mass.log() + largest - answer).sum()
            if hidden_grad is None or own_grad is None or table_grad is None:
                continue
            # Dividing the states by the mass is cheaper than dividing the weights.
            weight, per_state = weight.to(hidden.dtype), (1.0 / mass).to(hidden.dtype)
            torch.mul(weight @ table, per_state, out=hidden_grad[rows])
            table_grad.addmm_(weight.T, state * per_state)
            own_grad[rows] = ((answer - largest).exp() / mass - 1.0).squeeze(1)
            if bias_grad is not None:
                bias_grad += (weight.T @ per_state).squeeze(1)
        ctx.save_for_backward(hidden_grad, own_grad, table_grad, bias_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        saved = [None if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors]
        return (*saved, None, None)


def _mean_cross_entropy(
    hidden: Tensor,
    target: Tensor,
    items: Tensor,
    bias: Tensor | None,
    slot: Tensor,
    drawn: Tensor | None,
    block: int | None,
) -> Tensor:
    """Mean loss of target (N,) against items[drawn] (all, if None); `slot` (N,) is each target's place in there."""
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, items, bias = hidden.to(dtype), items.to(dtype), None if bias is None else bias.to(dtype)
    own = (hidden * items[target]).sum(-1)
    if bias is not None:
        own = own + bias[target]
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    if drawn is not None:
        items, bias = items[drawn], None if bias is None else bias[drawn]
    # A block's logits should fit a processor's cache, or a modest part of an accelerator's memory.
    block = block or max(64, (2**21 if hidden.device.type == "cpu" else 2**26) // len(items))
    return _CrossEntropy.apply(hidden, own, items, bias, slot, block) / max(1, len(target))


def full_softmax_loss(
    hidden: Tensor, target: Tensor, items: Tensor, bias: Tensor | None = None, *, block: int | None = None
) -> Tensor:
    """Cross-entropy of target (N,) in 1..I over all items; exact; differentiable once.

    Memory is `block` x I, by default a few megabytes on a CPU and a quarter gigabyte elsewhere.
    """
    return _mean_cross_entropy(hidden, target, items, bias, target, None, block)


def sampled_softmax_loss(
    hidden: Tensor,
    target: Tensor,
    items: Tensor,
    bias: Tensor | None = None,
    *,
    negatives: int = 1024,
    block: int | None = None,
) -> Tensor:
    """Cross-entropy of the target against negatives that all states of the batch share; differentiable once.

    The negatives are different items drawn uniformly, so no correction for their frequency is needed; one that
    equals a state's own target does not compete there. As many negatives as items give the full softmax.
    """
    drawn = torch.randperm(len(items) - 1, device=hidden.device)[:negatives] + 1
    drawn = torch.cat([drawn.new_zeros(1), drawn])  # row 0 never competes
    slot = drawn.new_zeros(len(items))
    slot[drawn] = torch.arange(len(drawn), device=drawn.device)
    return _mean_cross_entropy(hidden, target, items, bias, slot[target], drawn, block)


def corrected_softmax_loss(
    hidden: Tensor,
    target: Tensor,
    items: Tensor,
    drawn: Tensor,
    log_q: Tensor,
    barred: Tensor | None = None,
) -> Tensor:
    """Softmax of the target against negatives drawn unevenly, each negative's logit less log Q of its item.

    With that correction the sum over the drawn ones estimates the sum over all items, and the loss the full softmax;
    without it items that are drawn often, the popular ones, would be pushed down. The target is always present (Q = 1),
    so its own logit needs none. Negatives that equal a state's own target, or that are barred for it (positives of the
    same user), do not compete. In float32 at least.

    Shapes: hidden (N, D), target (N,), items (I + 1, D), drawn (M,) with repetitions, log_q (I + 1,) logarithm of how
    often an item is expected among the M, barred (N, M) bool.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    own = (hidden * items[target]).sum(-1).to(exact)
    negative = (hidden @ items[drawn].T).to(exact) - log_q[drawn]
    out = drawn == target[:, None]
    negative = negative.masked_fill(out if barred is None else out | barred, -torch.inf)
    return (torch.cat([own[:, None], negative], 1).logsumexp(1) - own).mean()


def mixture_log_q(counts: Tensor, in_batch: int, uniform: int) -> Tensor:
    """log of the expected number of draws of each item, (I + 1,) counts in training -> (I + 1,); row 0 is padding.

    `in_batch` negatives come from the targets of the batch, that is by popularity, and `uniform` ones from all items.
    """
    share = counts.double() / counts[1:].sum().clamp(min=1)
    return (in_batch * share + uniform / (len(counts) - 1)).clamp(min=1e-12).log().float()


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
