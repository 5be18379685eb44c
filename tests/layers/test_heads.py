"""Heads of several objectives, and their losses where not every label is observed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers.heads import TaskHeads, binary_task_losses


def test_shapes_and_independence_of_the_heads():
    torch.manual_seed(0)
    heads = TaskHeads(6, {"like": 1, "stars": 5}, hidden=4)
    state = torch.randn(3, 2, 6)
    found = heads(state)
    assert {name: tuple(v.shape) for name, v in found.items()} == {"like": (3, 2), "stars": (3, 2, 5)}
    found["like"].sum().backward()
    assert all(p.grad is None for p in heads.heads["stars"].parameters())
    with pytest.raises(ValueError, match="at least one logit"):
        TaskHeads(6, {"like": 0})


def test_logits_are_float32_in_a_bfloat16_model():
    heads = TaskHeads(4, {"like": 1}).to(torch.bfloat16)
    assert heads(torch.randn(2, 4, dtype=torch.bfloat16))["like"].dtype == torch.float32


def test_unobserved_labels_cost_nothing():
    logit = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    label = torch.tensor([1.0, torch.nan, 0.0])
    loss = binary_task_losses({"a": logit}, {"a": label})["a"]
    expected = F.binary_cross_entropy_with_logits(logit[[0, 2]], label[[0, 2]])
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logit.grad[1] == 0
    assert float(binary_task_losses({"a": logit.detach()}, {"a": torch.full((3,), torch.nan)})["a"]) == 0.0
