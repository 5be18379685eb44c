"""Wukong's layer against its parts by hand, alone and with a group of the request; the map along the token axis."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from auto_research.layers.one_way import Owner
from auto_research.layers.token_mixing import SlotLinear
from auto_research.layers.wukong import WukongKept, WukongLayer

CPU = torch.device("cpu")


def test_slot_linear_mixes_tokens_and_never_channels():
    torch.manual_seed(0)
    layer, x = SlotLinear(5, 3), torch.randn(2, 4, 5, 6)
    found = layer(x)
    assert found.shape == (2, 4, 3, 6)
    for i in range(3):
        torch.testing.assert_close(found[1, 2, i], sum(layer.weight[i, j] * x[1, 2, j] for j in range(5)))
    x[..., 0] = 0
    assert layer(x)[..., 0].abs().max() == 0
    assert abs(float(SlotLinear(400, 200).weight.detach().std()) * 20 - 1) < 0.02  # N(0, 1/inputs)


def test_layer_joins_products_of_pairs_and_linear_combinations():
    torch.manual_seed(0)
    layer, x = WukongLayer(8, 3, (0, 16), (0, 5), (0, 5)), torch.randn(2, 5, 8)
    found = layer.candidate(x, WukongKept(), Owner.adjacent(2, 1, CPU))
    for b in range(2):
        products = x[b] @ x[b].T @ layer.machine.cc  # every pair of tokens, compressed
        flat = F.layer_norm(products.flatten(), (15,))
        first, last = (part.cc for part in layer.network.layers)
        crossed = last(F.gelu(first(flat))).view(2, 8)
        mixed = layer.compress.map.cc.weight @ x[b]
        rest = layer.residual.map.cc.weight @ x[b]
        torch.testing.assert_close(found[b], F.layer_norm(torch.cat([crossed, mixed]) + rest, (8,)))


def test_a_requests_group_is_read_by_its_candidates_and_reads_none_of_them():
    torch.manual_seed(0)
    layer = WukongLayer(8, 3, (16, 16), (4, 5), (4, 6))
    known, x, owner = torch.randn(2, 4, 8), torch.randn(6, 5, 8), Owner.adjacent(2, 3, CPU)
    own, kept = layer.request(known)
    found = layer.candidate(x, kept, owner)
    assert own.shape == (2, 4, 8)
    assert found.shape == (6, 6, 8)
    other = layer.candidate(x, layer.request(known + torch.tensor([0.0, 1.0])[:, None, None])[1], owner)
    assert torch.equal(other[:3], found[:3])
    assert (other[3:] != found[3:]).any(-1).all()
