"""Constraints on policies."""

import pytest
import torch

from auto_research.layers.policy import Multiplier


def test_dual_steps_by_hand():
    multiplier = Multiplier(0.1, start=0.05, rate=0.5)
    multiplier.update(torch.tensor(0.3))
    assert float(multiplier.value) == pytest.approx(0.05 + 0.5 * 0.2)
    multiplier.update(torch.tensor(0.0))
    assert float(multiplier.value) == pytest.approx(0.10)
    for _ in range(3):
        multiplier.update(torch.tensor(0.0))
    assert float(multiplier.value) == 0.0


def test_the_term_is_lambda_times_the_excess_and_its_gradient_reaches_the_constraint_alone():
    multiplier = Multiplier(0.1, start=2.0)
    constraint = torch.tensor(0.4, requires_grad=True)
    term = multiplier(constraint)
    assert float(term.detach()) == pytest.approx(2.0 * 0.3)
    term.backward()
    assert float(constraint.grad) == 2.0
    assert multiplier.value.grad is None


def test_lambda_is_saved_and_is_no_autograd_leaf_of_the_optimiser():
    multiplier = Multiplier(1e-4, start=0.05)
    assert not list(multiplier.parameters())
    assert not multiplier.value.requires_grad
    multiplier.update(torch.tensor(1.0, requires_grad=True) * 2)
    assert multiplier.value.grad_fn is None
    other = Multiplier(1e-4)
    other.load_state_dict(multiplier.state_dict())
    assert float(other.value) == float(multiplier.value) > 0.05


def test_on_a_convex_problem_the_pair_finds_the_constrained_optimum():
    # min x² subject to 1 - x <= 0: x = 1, λ = 2.
    x, multiplier = torch.tensor(0.0), Multiplier(0.0, rate=0.1)
    for _ in range(2000):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(x.square() + multiplier(1 - x), x)
        x = x.detach() - 0.05 * gradient
        multiplier.update(1 - x)
    assert float(x) == pytest.approx(1.0, abs=1e-3)
    assert float(multiplier.value) == pytest.approx(2.0, abs=1e-3)


def test_negative_settings_are_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        Multiplier(0.1, rate=-1.0)
