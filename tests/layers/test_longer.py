"""LONGER's encoder: merging by hand, plain attention as a special case, and a cache that changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auto_research.layers.longer import (
    GAPS,
    GLOBALS,
    EventEmbedding,
    LongerEncoder,
    gap_buckets,
    group_events,
    layer_flops,
    merge_cost_ratio,
)
from auto_research.layers.transformer import CausalTransformer, TransformerBlock
from auto_research.runtime.evidence import DeviceWork


def inputs(batch: int, length: int, width: int, candidates: int, seed: int = 0) -> tuple[Tensor, ...]:
    """events (B, T, d), valid (B, T), user (B, d), target (B, C, d); the first history is full, others are shorter."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(1, length + 1, (batch, 1), generator=generator)
    real[0] = length
    valid = torch.arange(length) >= length - real
    events = torch.randn(batch, length, width, generator=generator) * valid[..., None]
    return (
        events,
        valid,
        torch.randn(batch, width, generator=generator),
        torch.randn(batch, candidates, width, generator=generator),
    )


def encoder(width: int = 8, **settings_: object) -> LongerEncoder:
    torch.manual_seed(3)
    return LongerEncoder(width, head_width=4, **settings_).eval()  # type: ignore[arg-type]


def cached(model: LongerEncoder, events: Tensor, valid: Tensor, user: Tensor, target: Tensor) -> Tensor:
    return model.read(model.user_side(events, valid, user), target)


# -- parts ---------------------------------------------------------------------------------------------------------


def test_gaps_fall_into_powers_of_two():
    seconds = torch.tensor([-5, 0, 1, 2, 3, 6, 7, 3600, 2**40])
    assert gap_buckets(seconds).tolist() == [0, 0, 1, 1, 2, 2, 3, 11, GAPS - 1]


def test_an_event_is_item_plus_position_plus_gap():
    layer = EventEmbedding(2, length=3)
    with torch.no_grad():
        layer.positions.weight.copy_(torch.tensor([[10.0, 0.0], [20.0, 0.0], [30.0, 0.0]]))
        layer.gaps.weight.zero_()
        layer.gaps.weight[5] = torch.tensor([0.0, 100.0])
    items = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [3.0, 4.0]]])
    out = layer(items, torch.tensor([[5, 5, 0]]), torch.tensor([[False, True, True]]))
    assert out.tolist() == [[[0.0, 0.0], [21.0, 102.0], [13.0, 4.0]]]  # the latest event is at position 0
    with pytest.raises(ValueError, match="longer than the 3"):
        layer(torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool))


def test_merging_by_hand():
    events = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    model = LongerEncoder(2, merge=2, inner=False)
    tokens, real = model.merged(events, torch.ones(1, 3, dtype=torch.bool))
    assert tokens.tolist() == [[[0.0, 0.0, 1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]]  # groups end at the latest event
    assert real.tolist() == [[True, True]]
    tokens, real = model.merged(events[:, :2] * 0, torch.zeros(1, 2, dtype=torch.bool))
    assert real.tolist() == [[False]]


@given(length=st.integers(1, 9), size=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_groups_keep_the_order_and_pad_before_the_oldest(length, size):
    x = torch.arange(1, length + 1)[None]
    groups = group_events(x, size)
    assert groups.shape == (1, -(-length // size), size)
    assert groups.flatten().tolist() == [0] * (-length % size) + list(range(1, length + 1))


def test_inner_transformer_sees_its_own_group_alone():
    model = encoder(merge=2)
    events, valid, *_ = inputs(1, 6, 8, 1)
    before, _ = model.merged(events, valid)
    events = events.clone()
    events[:, 2] += 1.0
    after, _ = model.merged(events, valid)
    moved = (before != after).view(1, 3, 2, 8).any(-1)
    assert moved.tolist() == [[[False, False], [True, True], [False, False]]]
    plain = encoder(merge=2, inner=False).merged(events, valid)[0]
    assert not torch.allclose(plain, after)


def test_the_cost_of_merging_is_derived_from_the_cost_of_a_layer():
    for width, length, merge in ((32, 2048, 4), (16, 64, 4), (16, 256, 8)):
        expected = layer_flops(merge * width, length // merge) / layer_flops(width, length)
        assert merge_cost_ratio(width, length, merge) == pytest.approx(expected)
    assert merge_cost_ratio(32, 2048, 4) == pytest.approx(0.571, abs=5e-4)


def test_flops_of_a_layer_are_those_that_run():
    block, x = TransformerBlock(8, 2, 32), torch.randn(1, 6, 8)
    with torch.no_grad(), DeviceWork() as work:
        block(x)
    assert work.counts()["cpu"]["flops"] == layer_flops(8, 6)


# -- the whole encoder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("names", [GLOBALS, ("target",), ("cls", "target"), ("user", "target")])
@pytest.mark.parametrize("merge,inner,queries", [(1, False, 3), (2, True, 2), (4, True, 99), (4, False, 1)])
def test_cached_equals_uncached(layers, names, merge, inner, queries):
    model = encoder(merge=merge, inner=inner, queries=queries, layers=layers, global_tokens=names)
    given_ = inputs(5, 10, 8, 7)
    assert torch.allclose(cached(model, *given_), model(*given_), atol=1e-5)


def test_gradients_through_the_cache_are_those_of_the_whole_sequence():
    model = encoder(merge=2).double()
    given_ = [x.double() if x.is_floating_point() else x for x in inputs(3, 6, 8, 4)]
    found = []
    for run in (cached(model, *given_), model(*given_)):
        model.zero_grad()
        run.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found):
        assert torch.allclose(one, other)


def test_the_user_side_is_computed_once_for_all_candidates():
    model = encoder(merge=2, queries=3)
    events, valid, user, target = inputs(2, 8, 8, 1682)
    rows = []
    model.inner.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    attention = model.stack.blocks[0].attention
    attention.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    scores = cached(model, events, valid, user, target)
    assert scores.shape == (2, 1682, 8)
    assert rows == [8, 2]  # four groups of two users, then two users: not once a candidate


@pytest.mark.parametrize("layers", [0, 2])
def test_without_merging_and_with_all_queries_it_is_plain_causal_attention(layers):
    model = encoder(merge=1, inner=False, queries=9, layers=layers, global_tokens=("target",))
    plain = CausalTransformer(8, 2, 16, 1 + layers).eval()
    plain.load_state_dict(model.stack.state_dict())
    events, valid, user, target = inputs(4, 9, 8, 1)
    sequence = torch.cat([events, model.target(target)], dim=1)
    states = plain(sequence, torch.cat([valid, torch.ones(4, 1, dtype=torch.bool)], dim=1))
    assert torch.allclose(cached(model, events, valid, user, target)[:, 0], model.target_out(states[:, -1]), atol=1e-5)


@given(padding=st.integers(1, 9), merge=st.sampled_from([1, 2, 3, 4]), queries=st.integers(1, 6))
@settings(deadline=None, max_examples=25)
def test_padding_changes_nothing(padding, merge, queries):
    model = encoder(merge=merge, queries=queries)
    events, valid, user, target = inputs(3, 5, 8, 2)
    longer = (
        torch.cat([torch.zeros(3, padding, 8), events], 1),
        torch.cat([torch.zeros(3, padding, dtype=torch.bool), valid], 1),
    )
    expected = cached(model, events, valid, user, target)
    assert torch.allclose(cached(model, *longer, user, target), expected, atol=1e-5)


def test_the_order_of_users_and_of_candidates_changes_nothing():
    model = encoder(merge=2)
    events, valid, user, target = inputs(4, 7, 8, 5)
    expected = cached(model, events, valid, user, target)
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 1, 0, 3, 2])
    found = cached(model, events[rows], valid[rows], user[rows], target[rows][:, columns])
    assert torch.allclose(found, expected[rows][:, columns], atol=1e-6)
    alone = cached(model, events, valid, user, target[:, 2:3])
    assert torch.allclose(alone[:, 0], expected[:, 2], atol=1e-6)


def test_events_before_the_latest_queries_still_reach_the_summary():
    model = encoder(merge=2, queries=1)
    events, valid, user, target = inputs(1, 8, 8, 1)
    before = cached(model, events, valid, user, target)
    events = events.clone()
    events[:, 0] += 1.0
    assert not torch.allclose(cached(model, events, valid, user, target), before)


@pytest.mark.parametrize("name,argument", [("user", 2), ("target", 3)])
def test_global_tokens_depend_on_their_inputs(name, argument):
    model = encoder(merge=2)
    given_ = list(inputs(2, 6, 8, 3))
    before = cached(model, *given_)
    given_[argument] = given_[argument] + 1.0
    assert not torch.allclose(cached(model, *given_), before)


def test_a_user_without_history_gets_finite_summaries():
    model = encoder(merge=2)
    events, valid, user, target = inputs(2, 6, 8, 3)
    valid = torch.zeros_like(valid)
    summary = cached(model, events * 0, valid, user, target)
    assert summary.isfinite().all()
    assert torch.allclose(summary, model(events * 0, valid, user, target), atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"merge": 0}, {"queries": 0}, {"layers": -1}, {"global_tokens": ("cls",)}, {"global_tokens": ("x",)}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        encoder(**wrong)
