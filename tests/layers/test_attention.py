"""Attention against written-out loops, PyTorch's own module and its own step-by-step decoding."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from auto_research.layers.attention import (
    KVCache,
    MultiHeadAttention,
    RotaryEmbedding,
    attend,
    attend_packed,
    causal_mask,
    restrict,
)


def attention_by_loops(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The definition, one query at a time in float64; a query without keys gives zeros."""
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                seen = [j for j in range(key.shape[2]) if mask[b, h, i, j]]
                own = query[b, h, i].double() / math.sqrt(query.shape[3])
                scores = [float(own @ key[b, h // group, j].double()) for j in seen]
                total = sum(math.exp(s) for s in scores)
                for j, s in zip(seen, scores):
                    out[b, h, i] += math.exp(s) / total * value[b, h // group, j].double()
    return out


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_attend_is_the_definition_for_any_mask(seed: int, heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads[0], 3, 6, generator=generator)
    key, value = torch.randn(2, 2, heads[1], 5, 6, generator=generator)
    mask = torch.rand(2, heads[0], 3, 5, generator=generator) < 0.5  # some queries see nothing
    expected = attention_by_loops(query, key, value, mask)
    torch.testing.assert_close(attend(query, key, value, mask).double(), expected, rtol=1e-4, atol=1e-5)
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attend(query, key, value, added).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_fully_masked_query_gives_zero_and_finite_gradients() -> None:
    query = torch.randn(1, 1, 2, 4, requires_grad=True)
    key = torch.randn(1, 1, 3, 4, requires_grad=True)
    mask = torch.tensor([[False, False, False], [True, False, True]])
    out = attend(query, key, key, mask)
    out.square().sum().backward()
    assert out[0, 0, 0].tolist() == [0.0] * 4
    assert query.grad is not None
    assert query.grad[0, 0, 0].tolist() == [0.0] * 4
    assert key.grad is not None
    assert key.grad.isfinite().all()
    assert key.grad[0, 0, 1].tolist() == [0.0] * 4  # nobody may look at key 1


def test_causal_mask_counts_surplus_keys_as_past() -> None:
    assert causal_mask(3, 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_a_mask_and_causal_together_are_refused() -> None:
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(ValueError, match="not both"):
        attend(x, x, x, torch.ones(2, 2, dtype=torch.bool), causal=True)


def test_module_equals_torch_multihead_attention() -> None:
    ours, theirs = MultiHeadAttention(12, 3).eval(), nn.MultiheadAttention(12, 3, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x, memory = torch.randn(2, 4, 12), torch.randn(2, 7, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])
    torch.testing.assert_close(ours(x, causal=True), theirs(x, x, x, attn_mask=~causal_mask(4, 4))[0])
    torch.testing.assert_close(ours(x, memory), theirs(x, memory, memory)[0])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_decoding_with_a_cache_equals_the_whole_sequence(kv_heads: int) -> None:
    attention = MultiHeadAttention(16, 4, kv_heads).eval()
    rotary = RotaryEmbedding(4)
    x = torch.randn(2, 6, 16)
    whole = attention(x, rotary=rotary, causal=True)
    cache = KVCache()
    parts = [attention(part, rotary=rotary, cache=cache, causal=True) for part in x.split([3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert cache.length == 6


def test_causal_joins_a_padding_mask_of_either_kind() -> None:
    attention = MultiHeadAttention(8, 2).eval()
    x = torch.randn(2, 4, 8)
    valid = torch.tensor([[False, True, True, True], [True, True, True, True]])
    mask = valid[:, None, None, :]
    expected = attention(x, mask=mask & causal_mask(4, 4))
    torch.testing.assert_close(attention(x, mask=mask, causal=True), expected)
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attention(x, mask=added, causal=True), expected)


def test_beams_share_their_rows_memory() -> None:
    attention = MultiHeadAttention(8, 2).eval()
    memory, x = torch.randn(2, 5, 8), torch.randn(6, 3, 8)  # three beams a row
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])[:, None, None, :]
    expected = attention(x, memory.repeat_interleave(3, 0), valid.repeat_interleave(3, 0))
    cache = KVCache()
    torch.testing.assert_close(attention(x, memory, valid, cache=cache), expected)
    assert cache.length == 5
    # The kept keys are used again: another memory of the same shape changes nothing.
    torch.testing.assert_close(attention(x, torch.zeros_like(memory), valid, cache=cache), expected)
    with pytest.raises(ValueError, match="no multiple"):
        attention(x[:5], memory)


def test_cache_rows_follow_the_beams() -> None:
    cache = KVCache()
    cache.select(torch.tensor([0]))  # nothing to select yet
    assert cache.length == 0
    rows = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 2, 4, 5)
    cache.append(rows, rows)
    cache.select(torch.tensor([2, 2, 0]))
    assert cache.key is not None
    assert cache.key[:, 0, 0, 0].tolist() == [2.0, 2.0, 0.0]


def test_rotary_equals_complex_rotation_and_depends_on_distance_only() -> None:
    rotary = RotaryEmbedding(6, base=100.0)
    query, key = torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 6)
    turned, turned_key = rotary(query, key)
    plane = torch.complex(query[..., :3].double(), query[..., 3:].double())
    angle = torch.arange(5.0)[:, None].double() * 100.0 ** (-torch.arange(3).double() / 3)
    expected = plane * torch.polar(torch.ones_like(angle), angle)
    written_out = torch.cat([expected.real, expected.imag], -1)
    torch.testing.assert_close(turned.double(), written_out, rtol=1e-5, atol=1e-6)
    shifted, shifted_key = rotary(query, key, 40)
    torch.testing.assert_close(
        shifted @ shifted_key.transpose(2, 3), turned @ turned_key.transpose(2, 3), rtol=1e-4, atol=1e-4
    )


def test_rotary_stays_exact_in_a_bfloat16_model() -> None:
    rotary = RotaryEmbedding(8)
    cos, _ = rotary.tables(2, offset=1001)
    low = RotaryEmbedding(8).bfloat16()
    assert torch.equal(low.tables(2, offset=1001)[0], cos)
    x = torch.ones(1, 1, 2, 8).bfloat16()
    assert low(x, x)[0].dtype == torch.bfloat16


def test_rotary_with_a_ladder_per_head_and_grouped_keys() -> None:
    ladders = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.5, 0.3], [0.5, 0.3]])
    rotary = RotaryEmbedding(4, frequencies=ladders)
    query, key = torch.randn(2, 4, 3, 4), torch.randn(2, 2, 3, 4)
    turned, turned_key = rotary(query, key)
    for head in range(4):
        alone = RotaryEmbedding(4, frequencies=ladders[head])
        expected, expected_key = alone(query[:, head : head + 1], key[:, head // 2 : head // 2 + 1])
        torch.testing.assert_close(turned[:, head : head + 1], expected)
        torch.testing.assert_close(turned_key[:, head // 2 : head // 2 + 1], expected_key)
    split = RotaryEmbedding(4, frequencies=ladders[[0, 2, 1, 3]])
    with pytest.raises(ValueError, match="share"):
        split(query, key)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: MultiHeadAttention(10, 3), "divide"),
        (lambda: MultiHeadAttention(12, 4, 3), "divide"),
        (lambda: RotaryEmbedding(5), "even"),
        (lambda: RotaryEmbedding(4, frequencies=torch.ones(3)), "frequencies"),
    ],
)
def test_impossible_sizes_are_refused(build: Callable[[], nn.Module], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build()


def test_a_memory_may_have_another_width() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, memory_dim=5)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 5)
    widened = MultiHeadAttention(8, 2)
    widened.load_state_dict(
        attention.state_dict() | {"key_value.weight": torch.nn.functional.pad(attention.key_value.weight, (0, 3))}
    )
    padded = torch.nn.functional.pad(memory, (0, 3))
    torch.testing.assert_close(attention(x, memory), widened(x, padded))


def test_a_cache_repeats_its_rows_next_to_each_other():
    cache = KVCache(torch.arange(2.0).view(2, 1, 1, 1).requires_grad_(), torch.zeros(2, 1, 1, 1))
    start = cache.key
    cache.repeat(3)
    assert cache.key.flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert cache.value.shape == (6, 1, 1, 1)
    (cache.key.flatten() * torch.arange(6)).sum().backward()
    assert start.grad.flatten().tolist() == [0 + 1 + 2, 3 + 4 + 5]
    KVCache().repeat(2)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_equals_appending_each_pack_alone(count: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, heads, packs, length, width = 3, 2, 4, 5, 6
    query, key, value = (draw(rows, heads, packs, count, width) for _ in range(3))
    shared_key, shared_value = (draw(rows, heads, length, width) for _ in range(2))
    valid = torch.tensor([[True] * 5, [False, False, True, True, True], [False] * 5])
    own = causal_mask(count, count) if causal else None
    found = attend_packed(query, key, value, shared_key, shared_value, valid, own)
    for pack in range(packs):
        keys = torch.cat([shared_key, key[:, :, pack]], 2)
        values = torch.cat([shared_value, value[:, :, pack]], 2)
        mask = torch.cat([valid, torch.ones(rows, count, dtype=torch.bool)], 1)[:, None, None, :]
        if causal:
            mask = mask & causal_mask(count, length + count)
        torch.testing.assert_close(found[:, :, pack], attend(query[:, :, pack], keys, values, mask))


def test_restricting_a_mask_of_either_kind() -> None:
    allowed = torch.tensor([[True, False], [True, True]])
    assert torch.equal(restrict(None, allowed), allowed)
    assert restrict(torch.tensor([[True, True], [False, True]]), allowed).tolist() == [[True, False], [False, True]]
    added = restrict(torch.tensor([[0.5, 0.5], [0.0, -1.0]]), allowed)
    assert added.tolist() == [[0.5, -torch.inf], [0.0, -1.0]]
