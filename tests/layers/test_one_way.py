"""Operators of generalised layer masking: against dense ones with zero blocks, loops, and the contract itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from auto_research.layers.attention import attend
from auto_research.layers.one_way import (
    BlockLinear,
    BlockMLP,
    GroupNorm,
    OneWayCross,
    OneWayFM,
    Owner,
    TokenCompression,
    attend_owned,
)
from auto_research.layers.towers import CrossLayer, forward_flops

OWNER = Owner(torch.tensor([1, 0, 2, 1, 1], dtype=torch.int32))


def block_weight(layer: BlockLinear) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole weight [[W_RR, 0], [W_CR, W_CC]] and bias of a layer."""
    zero = torch.zeros(layer.rr.weight.shape[0], layer.cc.weight.shape[1])
    top, bottom = torch.cat([layer.rr.weight, zero], 1), torch.cat([layer.cr.weight, layer.cc.weight], 1)
    return torch.cat([top, bottom]), torch.cat([layer.rr.bias, layer.cc.bias])


def test_block_linear_is_a_lower_triangular_dense_layer_on_broadcast_rows():
    torch.manual_seed(0)
    layer, r, c = BlockLinear((4, 3), (5, 2)), torch.randn(3, 4), torch.randn(5, 3)
    y_r, kept = layer.request(r)
    y_c = layer.candidate(c, kept, OWNER)
    weight, bias = block_weight(layer)
    dense = torch.cat([r[OWNER.index], c], 1) @ weight.T + bias
    torch.testing.assert_close(y_r[OWNER.index], dense[:, :5])
    torch.testing.assert_close(y_c, dense[:, 5:])


def test_broadcast_in_the_kernel_has_the_reference_semantics():
    """out[b] = W_cand E_cand[b] + W_user E_user[u(b)], the token axis compressed, index int32 in any order."""
    torch.manual_seed(1)
    block = TokenCompression((6, 3), (2, 4))
    user, cand = torch.randn(3, 6, 8), torch.randn(5, 3, 8)
    _, kept = block.request(user)
    found = block.candidate(cand, kept, OWNER)
    for b, u in enumerate(OWNER.index.tolist()):
        torch.testing.assert_close(found[b], block.map.cc.weight @ cand[b] + block.map.cr.weight @ user[u])
    assert kept.shape == (3, 8, 4)  # once a request


def test_adjacent_candidates_are_the_index_of_the_same_candidates():
    torch.manual_seed(2)
    fast = Owner.adjacent(3, 4, torch.device("cpu"))
    assert fast.index.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    slow = Owner(fast.index)
    kept, x = torch.randn(3, 2, 5), torch.randn(12, 2, 5)
    assert torch.equal(fast.gather(kept), slow.gather(kept))
    assert torch.equal(fast.add(x, kept), slow.add(x, kept))
    assert torch.equal(fast.add(x, None), x)


def test_mlp_partitions_its_hidden_units():
    torch.manual_seed(3)
    mlp, r, c = BlockMLP((4, 6, 2), (3, 5, 1)), torch.randn(3, 4), torch.randn(5, 3)
    y_r, kept = mlp.request(r)
    x = torch.cat([r[OWNER.index], c], 1)
    for i, layer in enumerate(mlp.layers):
        weight, bias = block_weight(layer)
        x = (F.gelu(x) if i else x) @ weight.T + bias
    torch.testing.assert_close(y_r[OWNER.index], x[:, :2])
    torch.testing.assert_close(mlp.candidate(c, kept, OWNER), x[:, 2:])


def test_fm_keeps_pairs_in_the_group_that_may_know_them():
    torch.manual_seed(4)
    fm, r, c = OneWayFM((4, 3), 2), torch.randn(3, 4, 6), torch.randn(5, 3, 6)
    f_r, kept = fm.request(r)
    torch.testing.assert_close(f_r, torch.stack([x @ x.T @ fm.rr for x in r]))
    y = torch.cat([fm.cr, fm.cc])
    for b, u in enumerate(OWNER.index.tolist()):
        both = torch.cat([r[u], c[b]])
        torch.testing.assert_close(fm.candidate(c, kept, OWNER)[b], c[b] @ both.T @ y)


def test_fm_without_requests_is_wukongs():
    torch.manual_seed(5)
    fm, x = OneWayFM((0, 4), 3), torch.randn(2, 4, 6)
    torch.testing.assert_close(fm.candidate(x, None, OWNER), x @ x.mT @ fm.cc)
    assert fm.rr is None
    assert fm.cr is None
    y, kept = fm.request(torch.randn(2, 0, 6))
    assert y.shape == (2, 0, 3)
    assert kept is None


def test_norms_never_span_the_groups():
    norm, r, c = GroupNorm((4, 3)), torch.randn(2, 4), torch.randn(2, 3)
    torch.testing.assert_close(norm.request(r), F.layer_norm(r, (4,)))
    torch.testing.assert_close(norm.candidate(c), F.layer_norm(c, (3,)))
    assert not any(isinstance(part, nn.LayerNorm) for part in GroupNorm((0, 3)).request.modules())


def test_cross_without_requests_is_dcn_v2_and_with_them_block_triangular():
    torch.manual_seed(6)
    plain, joint = CrossLayer(5), OneWayCross((0, 5))
    joint.map.cc.load_state_dict(plain.map.state_dict())
    first, x = torch.randn(2, 5), torch.randn(2, 5)
    torch.testing.assert_close(joint.candidate(first, x, (None, None), OWNER), plain(first, x))
    cross = OneWayCross((3, 2))
    r0, r, c0, c = torch.randn(3, 3), torch.randn(3, 3), torch.randn(5, 2), torch.randn(5, 2)
    weight, bias = block_weight(cross.map)
    first, x = torch.cat([r0[OWNER.index], c0], 1), torch.cat([r[OWNER.index], c], 1)
    expected = first * (x @ weight.T + bias) + x
    y_r, kept = cross.request(r0, r)
    torch.testing.assert_close(y_r[OWNER.index], expected[:, :3])
    torch.testing.assert_close(cross.candidate(c0, c, kept, OWNER), expected[:, 3:])


def test_cross_of_a_low_rank_is_a_product_of_two_block_triangular_maps():
    torch.manual_seed(10)
    cross, r, c = OneWayCross((6, 4), (3, 2)), torch.randn(3, 6), torch.randn(5, 4)
    y_r, kept = cross.request(r, r)
    u, bias = block_weight(cross.map)
    zero = torch.zeros(3, 4)
    v = torch.cat(
        [torch.cat([cross.fall.rr.weight, zero], 1), torch.cat([cross.fall.cr.weight, cross.fall.cc.weight], 1)]
    )
    x = torch.cat([r[OWNER.index], c], 1)
    expected = x * (x @ (u @ v).T + bias) + x
    torch.testing.assert_close(y_r[OWNER.index], expected[:, :6])
    torch.testing.assert_close(cross.candidate(c, c, kept, OWNER), expected[:, 6:])
    plain, joint = CrossLayer(5, rank=2), OneWayCross((0, 5), (0, 2))
    joint.fall.cc.load_state_dict(plain.map[0].state_dict())
    joint.map.cc.load_state_dict(plain.map[1].state_dict())
    x = torch.randn(2, 5)
    torch.testing.assert_close(joint.candidate(x, x, (None, None), OWNER), plain(x, x))


@pytest.mark.parametrize("each", [1, 3])
def test_candidates_attend_to_their_own_request(each):
    torch.manual_seed(7)
    key, value, valid = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    valid[0, :3] = False
    fast = Owner.adjacent(2, each, torch.device("cpu"))
    query = torch.randn(2 * each, 2, 3, 4)
    packed = attend_owned(query, key, value, valid, fast)
    torch.testing.assert_close(packed, attend_owned(query, key, value, valid, Owner(fast.index)))
    for b, u in enumerate(fast.index.tolist()):
        alone = attend(query[b : b + 1], key[u : u + 1][:, :, valid[u]], value[u : u + 1][:, :, valid[u]])
        torch.testing.assert_close(packed[b : b + 1], alone)


def test_blocks_that_do_not_read_never_meet():
    layer = BlockLinear((4, 3), (5, 2), reads=False)
    assert layer.cr is None
    assert layer.request(torch.randn(3, 4))[1] is None
    assert OneWayFM((4, 3), 2, reads=False).cr is None


def test_weights_of_the_candidate_row_start_with_the_joint_fan_in():
    torch.manual_seed(8)
    layer = BlockLinear((300, 100), (50, 60))
    assert float(layer.rr.weight.detach().abs().max()) == pytest.approx(300**-0.5, rel=0.01)
    for part in (layer.cr, layer.cc):
        assert float(part.weight.detach().abs().max()) == pytest.approx(400**-0.5, rel=0.01)
    # so that a candidate starts at the scale of a dense layer over both groups, not 1.4 times that
    dense = nn.Linear(400, 60)
    r, c = torch.randn(2000, 300), torch.randn(2000, 100)
    found = layer.candidate(c, layer.request(r)[1], Owner(torch.arange(2000))).detach()
    assert float(found.std() / dense(torch.cat([r, c], 1)).detach().std()) == pytest.approx(1, abs=0.05)


class Stack(nn.Module):
    """A composition of all operators over tokens (U, n_R, d) and (C, n_C, d)."""

    def __init__(self, n_r: int, n_c: int, d: int) -> None:
        super().__init__()
        self.mix, self.fm = TokenCompression((n_r, n_c), (3, 2)), OneWayFM((3, 2), 4)
        self.mlp, self.cross = BlockMLP((12, 7, 6), (8, 5, 4)), OneWayCross((6, 4))

    def forward(self, r, c, owner):
        r, mixed = self.mix.request(r)
        r, squared = self.fm.request(r)
        r, hidden = self.mlp.request(r.flatten(1))
        r, crossed = self.cross.request(r, r)
        c = self.fm.candidate(self.mix.candidate(c, mixed, owner), squared, owner)
        c = self.mlp.candidate(c.flatten(1), hidden, owner)
        return r, self.cross.candidate(c, c, crossed, owner)


@given(seed=st.integers(0, 10_000), n_r=st.integers(1, 5), n_c=st.integers(1, 5), candidates=st.integers(1, 7))
@settings(deadline=None, max_examples=25)
def test_compositions_obey_the_contract(seed, n_r, n_c, candidates):
    """Equal groups up to i give equal output groups up to i; no gradient leads from C to R; C does read R."""
    torch.manual_seed(seed)
    model, owner = Stack(n_r, n_c, 4), Owner(torch.randint(0, 2, (candidates,)))
    r, c = torch.randn(2, n_r, 4, requires_grad=True), torch.randn(candidates, n_c, 4, requires_grad=True)
    y_r, y_c = model(r, c, owner)
    assert torch.equal(model(r, torch.randn(candidates, n_c, 4), owner)[0], y_r)
    assert torch.autograd.grad(y_r.sum(), c, allow_unused=True, retain_graph=True) == (None,)
    read = torch.autograd.grad(y_c.square().sum(), r)[0].abs().sum((1, 2))
    assert ((read > 0) == (torch.bincount(owner.index, minlength=2) > 0)).all()


def test_one_call_on_the_request_costs_the_same_for_any_number_of_candidates():
    torch.manual_seed(9)
    layer, r = BlockLinear((16, 8), (16, 8)), torch.randn(1, 16)
    _, kept = layer.request(r)
    assert forward_flops(lambda: layer.request(r)) == 2 * (16 * 16 + 16 * 8)  # W_CR x belongs to the request
    for count in (1, 10):
        owner, c = Owner.adjacent(1, count, torch.device("cpu")), torch.randn(count, 8)
        assert forward_flops(lambda c=c, owner=owner: layer.candidate(c, kept, owner)) == count * 2 * 8 * 8
