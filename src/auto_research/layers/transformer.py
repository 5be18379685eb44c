"""Transformer blocks and stacks shared by the papers: bidirectional, causal, and with cross-attention.

Positions are the caller's: add learned ones to the input, or pass a `rotary`. Sequences are padded on the
left and `valid` (B, T) is True at real positions; padding is never looked at, its outputs are to be ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import KVCache, MultiHeadAttention, Rotary, padding_mask, restrict

Activation = Literal["relu", "gelu", "silu", "swiglu"]
Norm = Literal["layer", "rms"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def make_norm(kind: Norm, dim: int) -> nn.Module:
    """Layer normalisation, or its root-mean-square form without centring and bias."""
    return nn.LayerNorm(dim) if kind == "layer" else nn.RMSNorm(dim, eps=1e-6)


class FeedForward(nn.Module):
    """Position-wise network dim -> hidden -> dim; `swiglu` gates the hidden layer: silu(a) * b.

    Dropout acts on the hidden layer.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation != "swiglu" and activation not in _ACTIVATIONS:
            raise ValueError(f"activation '{activation}' is none of {', '.join([*_ACTIVATIONS, 'swiglu'])}")
        self.activation = activation
        self.rise = nn.Linear(dim, 2 * hidden if activation == "swiglu" else hidden, bias=bias)
        self.fall = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        hidden = self.rise(x)
        if self.activation == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = _ACTIVATIONS[self.activation](hidden)
        return self.fall(self.dropout(hidden))


@dataclass
class BlockCache:
    """What one block keeps while decoding: its own positions, and the memory's keys and values."""

    own: KVCache = field(default_factory=KVCache)
    memory: KVCache = field(default_factory=KVCache)


class TransformerBlock(nn.Module):
    """Self-attention, optional cross-attention and a feed-forward network, each with a residual connection.

    Args:
        norm_first: normalise the input of each part (pre-norm) or its sum with the residual (post-norm).
        cross: whether the block also attends to a memory.
        kv_heads: as in `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = "gelu",
        *,
        cross: bool = False,
        kv_heads: int | None = None,
        norm: Norm = "layer",
        bias: bool = True,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(dim, heads, kv_heads, dropout, bias=bias, head_dim=head_dim)
        self.attention_norm = make_norm(norm, dim)
        self.cross_attention = (
            MultiHeadAttention(dim, heads, kv_heads, dropout, bias=bias, head_dim=head_dim) if cross else None
        )
        self.cross_norm = make_norm(norm, dim) if cross else None
        self.feed_forward = FeedForward(dim, hidden, dropout, activation, bias=bias)
        self.feed_forward_norm = make_norm(norm, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        rotary: Rotary | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: BlockCache | None = None,
        latest: int | None = None,
    ) -> Tensor:
        """(B, T, dim) -> (B, T, dim), or (B, latest, dim); masks and `latest` as in `layers.attention`."""
        before, after = self._norms(self.attention_norm)
        own = cache.own if cache is not None else None
        found = self.attention(before(x), None, mask, rotary, own, causal=causal, latest=latest)
        x = after((x if latest is None else x[:, -latest:]) + self.dropout(found))
        if self.cross_attention is not None and self.cross_norm is not None:
            if memory is None:
                raise ValueError("a block with cross-attention needs a memory")
            before, after = self._norms(self.cross_norm)
            kept = cache.memory if cache is not None else None
            x = after(x + self.dropout(self.cross_attention(before(x), memory, memory_mask, None, kept)))
        before, after = self._norms(self.feed_forward_norm)
        return after(x + self.dropout(self.feed_forward(before(x))))

    def _norms(self, norm: nn.Module) -> tuple[nn.Module, nn.Module]:
        """What is applied before a part and after its residual sum."""
        return (norm, _IDENTITY) if self.norm_first else (_IDENTITY, norm)


_IDENTITY = nn.Identity()


class CrossAttentionBlock(nn.Module):
    """Queries that read a memory and never each other: pre-norm cross-attention, then a feed-forward network.

    Stacked over one memory it is target attention in depth: a candidate that reads a history layer by layer.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        memory_dim: int | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, memory_dim=memory_dim)
        self.attention_norm = make_norm(norm, dim)
        self.memory_norm = make_norm(norm, memory_dim or dim)
        self.feed_forward = FeedForward(dim, hidden, activation=activation)
        self.feed_forward_norm = make_norm(norm, dim)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """x (B, Q, dim), memory (M, S, memory_dim) -> (B, Q, dim); B, mask and cache as in `MultiHeadAttention`."""
        x = x + self.attention(self.attention_norm(x), self.memory_norm(memory), mask, cache=cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class TransformerStack(nn.Module):
    """Blocks one after another, with a closing normalisation when they are pre-norm.

    Use `TransformerEncoder` (every position sees every other) or `CausalTransformer` (none sees a later one).
    """

    causal: bool = False

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = "gelu",
        *,
        cross: bool = False,
        kv_heads: int | None = None,
        norm: Norm = "layer",
        bias: bool = True,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            TransformerBlock(
                dim,
                heads,
                hidden,
                dropout,
                norm_first,
                activation,
                cross=cross,
                kv_heads=kv_heads,
                norm=norm,
                bias=bias,
                head_dim=head_dim,
            )
            for _ in range(layers)
        )
        self.norm = make_norm(norm, dim) if norm_first else nn.Identity()

    def new_cache(self) -> list[BlockCache]:
        """An empty cache, one entry a block, for decoding step by step."""
        return [BlockCache() for _ in self.blocks]

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        cache: list[BlockCache] | None = None,
        latest: int | None = None,
    ) -> Tensor:
        """Encodes x (B, T, dim); returns (B, T, dim).

        Args:
            valid: (B, keys) True at real positions; with a cache, keys = cached + new positions.
            mask: a further mask, boolean or added to the scores, that broadcasts to (B, heads, T, keys).
            memory, memory_valid: (M, S, dim) and (M, S), for stacks with cross-attention.
            latest: how many last positions are wanted, all by default; the last block computes no others.
        """
        if valid is not None:
            mask = restrict(mask, padding_mask(valid))
        memory_mask = None if memory_valid is None else padding_mask(memory_valid)
        final = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                mask,
                causal=self.causal,
                rotary=rotary,
                memory=memory,
                memory_mask=memory_mask,
                cache=None if cache is None else cache[i],
                latest=latest if i == final else None,
            )
        return self.norm(x)


class TransformerEncoder(TransformerStack):
    """Bidirectional stack."""

    causal = False


class CausalTransformer(TransformerStack):
    """Stack in which no position sees a later one; with `cross=True`, the decoder of an encoder-decoder."""

    causal = True


def reorder_cache(cache: list[BlockCache], rows: Tensor) -> None:
    """Keeps (or repeats) batch rows (R,) of every block's decoded positions; memories stay as they are."""
    for entry in cache:
        entry.own.select(rows)


def init_transformer(module: nn.Module, std: float = 0.02) -> None:
    """Draws all Linear and Embedding weights from N(0, std²) and zeroes biases and padding rows."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                with torch.no_grad():
                    part.weight[part.padding_idx].zero_()
