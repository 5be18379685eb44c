"""HSTU block and its bias against loops; linear biases against their definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers.attention import alibi, alibi_slopes, attend
from auto_research.layers.hstu import HSTUBlock, RelativeBias
from auto_research.layers.longer import gap_buckets


def test_hstu_block_against_a_loop():
    torch.manual_seed(0)
    block = HSTUBlock(8, 2, length=5)
    x, bias = torch.randn(2, 4, 8), torch.randn(2, 2, 4, 4)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    found = block(x, allowed, bias)
    gate, value, query, key = F.silu(block.inputs(block.norm(x))).chunk(4, dim=-1)
    for b in range(2):
        for i in range(4):
            heads = []
            for h in range(2):
                cut = slice(4 * h, 4 * h + 4)
                total = torch.zeros(4)
                for j in range(i + 1):
                    weight = F.silu(query[b, i, cut] @ key[b, j, cut] + bias[b, h, i, j]) / 5
                    total = total + weight * value[b, j, cut]
                heads.append(total)
            expected = x[b, i] + block.output(block.inner_norm(torch.cat(heads)) * gate[b, i])
            torch.testing.assert_close(found[b, i], expected, atol=1e-5, rtol=1e-4)


def test_only_the_latest_tokens_ask_and_get_the_same():
    torch.manual_seed(0)
    block = HSTUBlock(8, 2, length=5)
    x, bias = torch.randn(2, 6, 8), torch.randn(2, 2, 6, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, allowed, bias, latest=2), block(x, allowed, bias)[:, -2:])


def test_relative_bias_looks_up_distance_and_time():
    torch.manual_seed(0)
    bias = RelativeBias(2, distance=3)
    position, seconds = torch.tensor([0, 1, 5]), torch.tensor([[900, 100, 0]])
    found = bias(position, seconds)
    assert found.shape == (1, 2, 3, 3)
    for i in range(3):
        for j in range(3):
            near = min(abs(int(position[i] - position[j])), 3)
            apart = gap_buckets((seconds[0, i] - seconds[0, j]).abs())
            torch.testing.assert_close(found[0, :, i, j], bias.positions.weight[near] + bias.times.weight[apart])


def test_slopes_are_geometric():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-h for h in range(1, 9)]))
    torch.testing.assert_close(alibi_slopes(4), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]))


def test_linear_biases_are_added_to_the_scaled_scores():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 3, 4, generator=generator) for _ in range(3))
    position = torch.tensor([0, 1, 1])
    found = attend(query, key, value, alibi(position, position, 2)[None])
    for h, slope in enumerate((1 / 16, 1 / 256)):
        for i in range(3):
            score = [query[0, h, i] @ key[0, h, j] / 2 - slope * abs(int(position[i] - position[j])) for j in range(3)]
            expected = torch.stack(score).softmax(0) @ value[0, h]
            torch.testing.assert_close(found[0, h, i], expected)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="do not divide"):
        HSTUBlock(9, 2, length=4)
