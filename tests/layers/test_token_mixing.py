"""Per-token layers against loops, token mixing against its definition, the block against its two equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from auto_research.layers.token_mixing import (
    GroupedLinear,
    MixerBlock,
    MixerTrunk,
    PerTokenFFN,
    TokenMixing,
    dense_blocks,
    mix_tokens,
)


@given(tokens=st.integers(1, 6), heads=st.integers(1, 6), slice_width=st.integers(1, 4), batch=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_mixing_concatenates_over_tokens_the_slice_of_each_head(tokens, heads, slice_width, batch):
    x = torch.randn(batch, tokens, heads * slice_width)
    mixed = mix_tokens(x, heads)
    assert mixed.shape == (batch, heads, tokens * slice_width)
    for head in range(heads):
        expected = torch.cat([x[:, t, head * slice_width : (head + 1) * slice_width] for t in range(tokens)], dim=-1)
        assert torch.equal(mixed[:, head], expected)


def test_mixing_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
    assert mix_tokens(x).tolist() == [[[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]]


@given(tokens=st.integers(1, 8), slice_width=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_mixing_twice_is_the_identity(tokens, slice_width):
    x = torch.randn(2, tokens, tokens * slice_width)
    assert torch.equal(mix_tokens(mix_tokens(x)), x)


def test_every_mixed_token_depends_on_every_token():
    x = torch.randn(1, 4, 8, requires_grad=True)
    mixed = mix_tokens(x)
    for token in range(4):
        (gradient,) = torch.autograd.grad(mixed[0, token].sum(), x, retain_graph=True)
        assert (gradient[0].abs().sum(1) > 0).all()


def test_mixing_has_no_parameters_and_refuses_a_width_that_does_not_divide():
    assert not list(TokenMixing().parameters())
    with pytest.raises(ValueError, match="multiple of 3"):
        mix_tokens(torch.randn(1, 3, 8))


def test_grouped_linear_is_one_linear_for_each_token():
    layer, x = GroupedLinear(5, 3, 4).double(), torch.randn(7, 5, 3, dtype=torch.float64)
    expected = torch.stack([x[:, t] @ layer.weight[t] + layer.bias[t] for t in range(5)], dim=1)
    torch.testing.assert_close(layer(x), expected)
    assert layer(x).shape == (7, 5, 4)
    assert layer.weight.abs().max() <= 3**-0.5  # scaled by the fan-in


@pytest.mark.parametrize("part", [slice(None, 2), slice(2, None), slice(1, 3)])
def test_a_part_of_the_tokens_passes_its_own_weights(part):
    x = torch.randn(3, 4, 8)
    for layer in (GroupedLinear(4, 8, 5), GroupedLinear(4, 8, 5, bias=False), PerTokenFFN(4, 8, 6, "swiglu")):
        torch.testing.assert_close(layer(x[:, part], part), layer(x)[:, part])


def test_per_token_ffn_is_one_network_for_each_token():
    layer, x = PerTokenFFN(3, 4, 6), torch.randn(5, 3, 4)
    rows = []
    for t in range(3):
        hidden = F.gelu(x[:, t] @ layer.rise.weight[t] + layer.rise.bias[t])
        rows.append(hidden @ layer.fall.weight[t] + layer.fall.bias[t])
    torch.testing.assert_close(layer(x), torch.stack(rows, 1))


def test_a_per_token_ffn_sees_its_own_token_only():
    layer, x = PerTokenFFN(3, 4, 6), torch.randn(1, 3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0, 1].sum(), x)
    assert gradient[0, 1].abs().sum() > 0
    assert gradient[0, 0].abs().sum() == gradient[0, 2].abs().sum() == 0


def test_the_block_is_post_norm_with_both_residuals():
    block = MixerBlock(4, TokenMixing(), PerTokenFFN(2, 4, 8))
    for norm in (block.mixing_norm, block.feed_forward_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(3, 2, 4)

    def norm(value, layer):
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias

    s = norm(mix_tokens(x) + x, block.mixing_norm)
    expected = norm(block.feed_forward(s) + s, block.feed_forward_norm)
    torch.testing.assert_close(block(x), expected)


def test_ablations_of_the_block():
    x = torch.randn(3, 2, 4)
    ffn = PerTokenFFN(2, 4, 8)
    bare = MixerBlock(4, TokenMixing(), ffn, residual=False, norm=False)
    torch.testing.assert_close(bare(x), ffn(mix_tokens(x)))
    alone = MixerBlock(4, None, ffn)
    changed = x.clone()
    changed[:, 1] += 1
    assert torch.equal(alone(x)[:, 0], alone(changed)[:, 0])


@pytest.mark.parametrize("bias", [True, False])
def test_per_token_swiglu_is_one_gated_network_for_each_token(bias):
    layer, x = PerTokenFFN(3, 4, 6, "swiglu", bias=bias), torch.randn(5, 3, 4)
    for t in range(3):
        rise, fall = layer.rise.weight[t], layer.fall.weight[t]
        gate, up = x[:, t] @ rise[:, :6], x[:, t] @ rise[:, 6:]
        if bias:
            gate, up = gate + layer.rise.bias[t, :6], up + layer.rise.bias[t, 6:]
        expected = (F.silu(gate) * up) @ fall + (layer.fall.bias[t] if bias else 0)
        torch.testing.assert_close(layer(x)[:, t], expected)
    assert (layer.rise.bias is not None) == bias


def test_mixer_trunk_is_slices_blocks_mean_and_tower():
    trunk, e = MixerTrunk(21, 4, 8, dense_blocks(4, 8, 16, 2)), torch.randn(3, 21)
    padded = torch.cat([e, torch.zeros(3, 3)], 1)
    x = torch.stack(
        [padded[:, 6 * i : 6 * i + 6] @ trunk.tokenise.weight[i] + trunk.tokenise.bias[i] for i in range(4)], 1
    )
    for block in trunk.blocks:
        mixed = block.mixing_norm(mix_tokens(x) + x)
        x = block.feed_forward_norm(block.feed_forward(mixed) + mixed)
    torch.testing.assert_close(trunk(e), trunk.tower(x.mean(1)))


def test_mixer_trunk_ends_in_the_tower_that_is_given():
    trunk = MixerTrunk(21, 4, 8, dense_blocks(4, 8, 16, 1), nn.Identity())
    assert trunk(torch.randn(3, 21)).shape == (3, 8)
    assert not any(name.startswith("tower") for name, _ in trunk.named_parameters())
