"""Transformer stacks: causality, padding, caches, and agreement with PyTorch's own layer."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from auto_research.layers.attention import RotaryEmbedding, padding_mask
from auto_research.layers.transformer import (
    CausalTransformer,
    CrossAttentionBlock,
    FeedForward,
    TransformerBlock,
    TransformerEncoder,
    TransformerStack,
    init_transformer,
    reorder_cache,
)


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_equals_torch_encoder_layer(norm_first: bool) -> None:
    ours = TransformerBlock(8, 2, 20, norm_first=norm_first, activation="relu").eval()
    theirs = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True, norm_first=norm_first).eval()
    attention = ours.attention
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([attention.query.weight, attention.key_value.weight]),
            "self_attn.in_proj_bias": torch.cat([attention.query.bias, attention.key_value.bias]),
            "self_attn.out_proj.weight": attention.output.weight,
            "self_attn.out_proj.bias": attention.output.bias,
            "linear1.weight": ours.feed_forward.rise.weight,
            "linear1.bias": ours.feed_forward.rise.bias,
            "linear2.weight": ours.feed_forward.fall.weight,
            "linear2.bias": ours.feed_forward.fall.bias,
            "norm1.weight": ours.attention_norm.weight,
            "norm1.bias": ours.attention_norm.bias,
            "norm2.weight": ours.feed_forward_norm.weight,
            "norm2.bias": ours.feed_forward_norm.bias,
        }
    )
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_swiglu_is_written_out() -> None:
    network = FeedForward(3, 4, activation="swiglu", bias=False)
    x = torch.randn(5, 3)
    gate, up = network.rise.weight[:4], network.rise.weight[4:]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ network.fall.weight.T
    torch.testing.assert_close(network(x), expected)
    with pytest.raises(ValueError, match="swish"):
        FeedForward(3, 4, activation="swish")  # type: ignore[arg-type]


LLAMA = {"norm": "rms", "activation": "swiglu", "kv_heads": 1, "bias": False}


@pytest.mark.parametrize("options", [{}, LLAMA])
def test_no_position_sees_a_later_one(options: dict[str, Any]) -> None:
    stack = CausalTransformer(8, 2, 16, layers=2, **options).eval()
    x = torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 8)
    before, after = stack(x), stack(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:])
    encoder = TransformerEncoder(8, 2, 16, layers=2, **options).eval()
    assert not torch.allclose(encoder(changed)[:, :4], encoder(x)[:, :4])


@pytest.mark.parametrize("kind", [CausalTransformer, TransformerEncoder])
@pytest.mark.parametrize("norm_first", [True, False])
def test_left_padding_changes_nothing(kind: type[TransformerStack], norm_first: bool) -> None:
    stack = kind(8, 2, 16, layers=2, norm_first=norm_first).eval()
    x = torch.randn(2, 4, 8)
    padded = torch.cat([torch.randn(2, 3, 8), x], dim=1)
    valid = torch.tensor([[False] * 3 + [True] * 4] * 2)
    out = stack(padded, valid)
    torch.testing.assert_close(out[:, 3:], stack(x))
    assert out.isfinite().all()


def test_a_row_of_padding_alone_stays_finite_in_both_directions() -> None:
    stack = CausalTransformer(8, 2, 16, layers=2)
    x = torch.randn(2, 3, 8, requires_grad=True)
    valid = torch.tensor([[False, False, False], [False, True, True]])
    out = stack(x, valid)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.parameters())


def test_decoding_step_by_step_equals_one_pass_with_memory_and_beams() -> None:
    stack = CausalTransformer(8, 2, 16, layers=2, cross=True).eval()
    rotary = RotaryEmbedding(4)
    x, memory = torch.randn(4, 5, 8), torch.randn(2, 3, 8)  # two beams for each of two rows
    memory_valid = torch.tensor([[True, True, True], [False, True, True]])
    whole = stack(
        x,
        rotary=rotary,
        memory=memory.repeat_interleave(2, 0),
        memory_valid=memory_valid.repeat_interleave(2, 0),
    )
    cache = stack.new_cache()
    steps = [
        stack(x[:, i : i + 1], rotary=rotary, memory=memory, memory_valid=memory_valid, cache=cache) for i in range(5)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    # Swapping the beams of each row swaps what they decode next.
    rows = torch.tensor([1, 0, 3, 2])
    step = torch.randn(4, 1, 8)
    arguments = {"rotary": rotary, "memory": memory, "memory_valid": memory_valid}
    longer = stack(
        torch.cat([x, step], 1)[rows],
        rotary=rotary,
        memory=memory.repeat_interleave(2, 0),
        memory_valid=memory_valid.repeat_interleave(2, 0),
    )
    reorder_cache(cache, rows)
    torch.testing.assert_close(stack(step[rows], cache=cache, **arguments), longer[:, -1:])


@pytest.mark.parametrize("kind", [CausalTransformer, TransformerEncoder])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("rotary", [None, RotaryEmbedding(4)])
@pytest.mark.parametrize("latest", [1, 2, 9])
def test_latest_states_equal_the_end_of_all_states(
    kind: type[TransformerStack], norm_first: bool, rotary: RotaryEmbedding | None, latest: int
) -> None:
    stack = kind(8, 2, 16, layers=2, norm_first=norm_first).eval()
    x = torch.randn(3, 5, 8)
    valid = torch.tensor([[False, False, True, True, True], [True] * 5, [False] * 5])
    near = torch.arange(5)[:, None] - torch.arange(5) < 2
    torch.testing.assert_close(stack(x, rotary=rotary, latest=latest), stack(x, rotary=rotary)[:, -latest:])
    whole = stack(x, valid, mask=near, rotary=rotary)
    torch.testing.assert_close(stack(x, valid, mask=near, rotary=rotary, latest=latest), whole[:, -latest:])


def test_cross_attention_without_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="memory"):
        CausalTransformer(8, 2, 16, layers=1, cross=True)(torch.randn(1, 2, 8))


def test_initialisation_leaves_padding_rows_at_zero() -> None:
    model = nn.ModuleList([nn.Embedding(50, 40, padding_idx=0), FeedForward(40, 60)])
    init_transformer(model, std=0.05)
    assert model[0].weight[0].abs().sum() == 0
    assert 0.045 < model[0].weight[1:].std().item() < 0.055
    assert 0.045 < model[1].rise.weight.std().item() < 0.055
    assert model[1].rise.bias.abs().sum() == 0


def test_a_mask_that_is_added_to_the_scores_joins_padding_and_causality() -> None:
    stack = CausalTransformer(8, 2, 16, layers=2).eval()
    x = torch.randn(2, 4, 8)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).float()
    bias = -distance * torch.tensor([1.0, 0.25])[:, None, None]  # (heads, queries, keys)
    valid = torch.tensor([[False, True, True, True]] * 2)
    out = stack(x, valid, mask=bias)
    torch.testing.assert_close(out[:, 1:], stack(x[:, 1:], mask=bias[:, 1:, 1:]))
    torch.testing.assert_close(out[:, 1:3], stack(x[:, :3], valid[:, :3], mask=bias[:, :3, :3])[:, 1:])
    assert not torch.allclose(out[:, 1:], stack(x, valid)[:, 1:])


def test_queries_read_a_memory_and_never_each_other() -> None:
    block = CrossAttentionBlock(8, 2, 16, memory_dim=5, norm="rms").eval()
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 5)
    valid = torch.tensor([[True] * 4, [False, True, True, True]])
    out = block(x, memory, padding_mask(valid))
    for query in range(3):
        alone = block(x[:, query : query + 1], memory, padding_mask(valid))
        torch.testing.assert_close(out[:, query : query + 1], alone)
    read = x + block.attention(block.attention_norm(x), block.memory_norm(memory), padding_mask(valid))
    torch.testing.assert_close(out, read + block.feed_forward(block.feed_forward_norm(read)))
    torch.testing.assert_close(block(x[1:], memory[1:, 1:]), out[1:])
