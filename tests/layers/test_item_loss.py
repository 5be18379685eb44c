"""Catalogue losses against PyTorch's cross-entropy, and what their negatives may not do."""

import math

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers import item_loss as losses


def example(items: int = 13, states: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(states, 4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(items + 1, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(items + 1, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(1, items + 1, (states,)), table, bias


@pytest.mark.parametrize("block", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_full_softmax_equals_cross_entropy_in_value_and_gradients(block: int, with_bias: bool) -> None:
    hidden, target, items, bias = example()
    inputs = [hidden, items] + ([bias] if with_bias else [])
    logits = hidden @ items[1:].T + (bias[1:] if with_bias else 0.0)
    expected = F.cross_entropy(logits, target - 1)
    loss = losses.full_softmax_loss(hidden, target, items, bias if with_bias else None, block=block)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs)):
        torch.testing.assert_close(ours, theirs)


def test_full_softmax_survives_large_logits_and_bfloat16() -> None:
    hidden = torch.full((2, 4), 300.0)
    items = torch.randn(6, 4)
    target = torch.tensor([1, 5])
    expected = F.cross_entropy(hidden @ items[1:].T, target - 1)
    torch.testing.assert_close(losses.full_softmax_loss(hidden, target, items), expected)
    low = hidden.bfloat16().requires_grad_()
    loss = losses.full_softmax_loss(low, target, items.bfloat16())
    loss.backward()
    assert loss.dtype == torch.float32
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16


def test_full_softmax_follows_autocast() -> None:
    hidden, target, items, _ = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses.full_softmax_loss(hidden.float(), target, items.float())
    rounded = losses.full_softmax_loss(hidden.bfloat16(), target, items.bfloat16())
    torch.testing.assert_close(loss, rounded)


def test_sampled_softmax_is_cross_entropy_over_the_drawn_items_with_collisions_masked() -> None:
    hidden, target, items, bias = example(items=9, states=12)
    torch.manual_seed(3)
    drawn = torch.randperm(9)[:4] + 1
    assert set(drawn.tolist()) & set(target.tolist())  # some states meet their own target
    torch.manual_seed(3)
    loss = losses.sampled_softmax_loss(hidden, target, items, bias, negatives=4)
    logits = hidden @ items.T + bias
    competing = torch.zeros(12, 10, dtype=torch.bool)
    competing[:, drawn] = True
    competing.scatter_(1, target[:, None], True)
    expected = F.cross_entropy(logits.masked_fill(~competing, -torch.inf), target)
    torch.testing.assert_close(loss, expected)
    inputs = [hidden, items, bias]
    for ours, theirs in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(ours, theirs)


def test_as_many_negatives_as_items_give_the_full_softmax() -> None:
    hidden, target, items, bias = example()
    full = losses.full_softmax_loss(hidden, target, items, bias)
    torch.testing.assert_close(losses.sampled_softmax_loss(hidden, target, items, bias, negatives=500), full)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    hidden, target, items, _ = example()
    (alone,) = torch.autograd.grad(losses.full_softmax_loss(hidden, target, items.detach()), hidden)
    (among,) = torch.autograd.grad(losses.full_softmax_loss(hidden, target, items), hidden)
    torch.testing.assert_close(alone, among)
    with torch.no_grad():
        assert not losses.full_softmax_loss(hidden, target, items).requires_grad


def test_binary_negatives_are_uniform_over_the_other_items() -> None:
    torch.manual_seed(0)
    items = torch.eye(5)  # the negative logit of item j is hidden[j]
    hidden = torch.zeros(4, 5)
    hidden[:, 2] = 50.0  # seeing item 2 as a negative costs 50
    target = torch.tensor([2, 2, 1, 4])
    total = torch.stack([losses.binary_loss(hidden[i : i + 1], target[i : i + 1], items) for i in range(2)])
    torch.testing.assert_close(total, torch.full((2,), math.log(2.0)))  # never its own target
    costs = torch.stack([losses.binary_loss(hidden[3:], target[3:], items) for _ in range(3000)])
    assert (costs > 25).float().mean().item() == pytest.approx(1 / 3, abs=0.04)
    with pytest.raises(ValueError, match="negatives"):
        losses.binary_loss(hidden[:1, :2], torch.tensor([1]), items[:2, :2])


@pytest.mark.parametrize("kind", ["softmax", "sampled", "bce"])
def test_positions_without_a_target_do_not_count(kind: losses.LossKind) -> None:
    hidden, target, items, _ = example()
    loss = losses.item_loss(hidden[:6].view(2, 3, 4), target[:6].view(2, 3), items, kind=kind, negatives=4)
    assert loss.isfinite()
    padded = target[:6].clone()
    padded[[0, 4]] = 0
    states = torch.cat([hidden[1:4], hidden[5:6]])
    torch.manual_seed(1)
    ours = losses.item_loss(hidden[:6], padded, items, kind=kind, negatives=4)
    torch.manual_seed(1)
    expected = losses.item_loss(states, padded[padded > 0], items, kind=kind, negatives=4)
    torch.testing.assert_close(ours, expected)
    nothing = losses.item_loss(hidden, torch.zeros_like(target), items, kind=kind)
    assert nothing.item() == 0.0


def test_an_unknown_loss_is_refused() -> None:
    hidden, target, items, _ = example()
    with pytest.raises(ValueError, match="softmax, sampled, bce"):
        losses.item_loss(hidden, target, items, kind="hinge")  # type: ignore[arg-type]
