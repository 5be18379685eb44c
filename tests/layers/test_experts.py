"""Routed experts against their sums written out, the two routers, the penalty's reach and λ's rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.layers.experts import (
    AdaptivePenalty,
    LoadMeter,
    ReLUExperts,
    Routing,
    TokenExperts,
    TokenRouter,
    TopKExperts,
)
from auto_research.layers.token_mixing import PerTokenFFN

B, T, D, H, E = 5, 3, 4, 8, 4


def one_expert(layer: TokenExperts, token: int, expert: int, s: torch.Tensor) -> torch.Tensor:
    """Expert (token, expert) as a two-layer network of its own, on rows s (N, D)."""
    size = H // E
    own = slice(expert * size, (expert + 1) * size)
    hidden = F.gelu(s @ layer.rise.weight[token][:, own] + layer.rise.bias[token][own])
    return hidden @ layer.fall.weight[token][own] + layer.offset.weight[token, expert]


def summed(layer: TokenExperts, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Σ_j G_tj e_tj(s_t) with a loop over tokens and experts."""
    tokens = [sum(gates[:, t, j, None] * one_expert(layer, t, j, x[:, t]) for j in range(E)) for t in range(x.shape[1])]
    return torch.stack(tokens, 1)


def test_experts_are_the_gated_sum_of_private_networks():
    layer, x = TokenExperts(T, D, H, E), torch.randn(B, T, D)
    gates = F.relu(torch.randn(B, T, E))
    torch.testing.assert_close(layer(x, gates), summed(layer, x, gates))


@given(seed=st.integers(0, 1000), share=st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_skipping_idle_experts_changes_no_output(seed, share):
    generator = torch.Generator().manual_seed(seed)
    layer, x = TokenExperts(T, D, H, E), torch.randn(B, T, D, generator=generator)
    gates = torch.rand(B, T, E, generator=generator) * (torch.rand(B, T, E, generator=generator) < share)
    torch.testing.assert_close(layer(x, gates, only_active=True), layer(x, gates), atol=1e-6, rtol=1e-4)


def test_open_gates_make_the_experts_a_dense_per_token_network_of_equal_cost():
    layer, dense = TokenExperts(T, D, H, E), PerTokenFFN(T, D, H)
    dense.rise, dense.fall.weight = layer.rise, layer.fall.weight
    with torch.no_grad():
        dense.fall.bias.copy_(layer.offset.weight.sum(1))
    x = torch.randn(B, T, D)
    torch.testing.assert_close(layer(x, torch.ones(B, T, E)), dense(x))


def test_experts_must_share_the_hidden_width_evenly():
    with pytest.raises(ValueError, match="shared out"):
        TokenExperts(T, D, 7, E)


def test_relu_gates_are_neither_normalised_nor_limited_in_number():
    layer, x = ReLUExperts(T, D, H, E), torch.randn(200, T, D) * 3
    router = layer.routers["for_infer"]
    with torch.no_grad():
        router.linear.weight.mul_(10)
        router.linear.bias.zero_()
    routing = Routing("infer")
    out = layer(x, routing)
    expected = torch.stack([x[:, t] @ router.linear.weight[t] for t in range(T)], 1).clamp(min=0)
    torch.testing.assert_close(routing.gates[0], expected)
    torch.testing.assert_close(out, summed(layer.experts, x, expected))
    counts = (routing.gates[0] > 0).sum(-1)
    assert counts.unique().numel() > 2  # the number of active experts varies by token and example
    assert routing.gates[0].sum(-1).std() > 0.1


def test_training_and_serving_use_different_routers_and_the_same_experts():
    layer, x = ReLUExperts(T, D, H, E), torch.randn(B, T, D)
    with torch.no_grad():
        layer.routers["for_train"].linear.bias.fill_(2.0)
    train, infer = Routing("train"), Routing("infer")
    outputs = layer(x, train), layer(x, infer)
    assert not torch.equal(train.gates[0], infer.gates[0])
    for routing, out in zip((train, infer), outputs, strict=True):
        torch.testing.assert_close(out, summed(layer.experts, x, routing.gates[0]))
    # Serving ignores the training router altogether.
    with torch.no_grad():
        layer.routers["for_train"].linear.weight.normal_()
    assert torch.equal(layer(x, Routing("infer")), outputs[1])


def test_gates_begin_open():
    layer = ReLUExperts(T, D, H, E)
    routing = Routing("infer")
    layer(F.layer_norm(torch.randn(64, T, D), (D,)), routing)
    assert routing.active_ratio() == 1
    torch.testing.assert_close(routing.gates[0].mean(), torch.tensor(1.0), atol=0.1, rtol=0)


def test_the_penalty_is_the_batch_mean_of_all_gates_and_reaches_the_serving_router_only():
    layer, x = ReLUExperts(T, D, H, E), torch.randn(B, T, D, requires_grad=True)
    routing = Routing("infer")
    layer(x, routing)
    torch.testing.assert_close(routing.penalty(), routing.gates[0].sum() / B)
    routing.penalty().backward()
    touched = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == {"routers.for_infer.linear.weight", "routers.for_infer.linear.bias"}
    assert x.grad is None
    train = Routing("train")
    layer(x, train)
    assert not train.penalties


def test_a_single_router_and_a_shared_one():
    assert list(ReLUExperts(T, D, H, E, routers="one").routers) == ["for_infer"]
    router, x = TokenRouter(T, D, E, shared=True), torch.randn(B, T, D)
    torch.testing.assert_close(router(x), x @ router.linear.weight.T + router.linear.bias)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_keeps_the_k_best_probabilities_times_the_number_of_experts(k):
    layer, x = TopKExperts(T, D, H, E, k=k), torch.randn(B, T, D)
    with torch.no_grad():
        layer.router.linear.weight.normal_()
    routing = Routing()
    out = layer(x, routing)
    gates = torch.zeros(B, T, E)
    for b in range(B):
        for t in range(T):
            p = (x[b, t] @ layer.router.linear.weight[t] + layer.router.linear.bias[t]).softmax(-1)
            for j in sorted(range(E), key=lambda j: -p[j])[:k]:
                gates[b, t, j] = E * p[j]
    torch.testing.assert_close(routing.gates[0], gates)
    torch.testing.assert_close(out, summed(layer.experts, x, gates))
    torch.testing.assert_close(routing.active_ratio(), torch.tensor(k / E))


def test_the_balancing_loss_is_one_for_an_even_load_and_more_for_a_lopsided_one():
    layer = TopKExperts(1, 4, 8, 4, k=1)
    with torch.no_grad():
        layer.router.linear.weight.copy_(10 * torch.eye(4)[None])
    even, lopsided = Routing(), Routing()
    layer(torch.eye(4)[:, None], even)
    layer(torch.eye(4)[:1, None].expand(4, 1, 4), lopsided)
    torch.testing.assert_close(even.penalty(), torch.tensor(1.0))
    assert lopsided.penalty() > 3.9
    with pytest.raises(ValueError, match="between 1 and 4"):
        TopKExperts(1, 4, 8, 4, k=5)


def test_lambda_rises_by_a_fifth_above_the_budget_and_falls_by_it_below():
    penalty = AdaptivePenalty(0.25, start=1e-6, rate=1.2)
    for _ in range(3):
        penalty.update(torch.tensor(0.3))
    torch.testing.assert_close(penalty.weight, torch.tensor(1e-6 * 1.2**3))
    penalty.update(torch.tensor(0.2))
    torch.testing.assert_close(penalty.weight, torch.tensor(1e-6 * 1.2**2))
    for _ in range(10):
        penalty.update(torch.tensor(0.25))
    torch.testing.assert_close(penalty.weight, torch.tensor(1e-6))
    torch.testing.assert_close(penalty(torch.tensor(3.0)), torch.tensor(3e-6))
    for _ in range(100):
        penalty.update(torch.tensor(1.0))
    torch.testing.assert_close(penalty.weight, torch.tensor(1e-2))  # the limit
    penalty.update(torch.tensor(0.0))
    torch.testing.assert_close(penalty.weight, torch.tensor(1e-2 / 1.2))
    assert "weight" in penalty.state_dict()
    with pytest.raises(ValueError, match="budget"):
        AdaptivePenalty(0.0)


def test_the_steered_penalty_brings_the_active_ratio_to_its_budget():
    torch.manual_seed(0)
    layer, penalty = ReLUExperts(T, D, H, E), AdaptivePenalty(0.5, start=1e-3, limit=0.2)
    x = F.layer_norm(torch.randn(64, T, D), (D,))
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    # The task would keep all experts: it asks for the output of open gates.
    wanted = layer.experts(x, torch.ones(64, T, E)).detach()
    ratios = []
    for _ in range(300):
        routing = Routing("infer")
        loss = F.mse_loss(layer(x, routing), wanted) + penalty(routing.penalty())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        penalty.update(routing.active_ratio())
        ratios.append(float(routing.active_ratio()))
    assert ratios[0] == 1
    assert abs(sum(ratios[-100:]) / 100 - 0.5) < 0.1


def test_load_meter_counts_by_hand():
    meter = LoadMeter()
    gates = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[2.0, 0.0], [0.0, 3.0]]])  # (2 examples, 2 tokens, 2 experts)
    meter.add(Routing(gates=[gates]))
    meter.add(Routing(gates=[gates[:1]]))
    assert meter.usage().tolist() == [[[1.0, 0.0], [pytest.approx(2 / 3), 1.0]]]
    report = meter.report()
    assert report["experts never active"] == 1
    assert report["active ratio"] == pytest.approx((1 + 0 + 2 / 3 + 1) / 4)
    assert report["active ratio, block 0 token 0"] == pytest.approx(0.5)
    assert report["busiest expert"] == pytest.approx((2 + 1 * 2 / (5 / 3)) / 2)
    with pytest.raises(ValueError, match="no pass"):
        LoadMeter().report()
