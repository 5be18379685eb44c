"""Multi-head attention over PyTorch's fused kernel: grouped keys, rotary positions and a key-value cache.

Masks follow one convention everywhere in this project: boolean, **True where a query may look at a key**, of
any shape that broadcasts to (batch, heads, queries, keys); a floating-point mask is added to the scores
instead. A query that may look at nothing gets a zero vector, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rotary = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Turns queries (B, H, T, D) and keys (B, G, T, D) whose first position is the given offset."""


def causal_mask(queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
    """True where the key is not later than the query, (queries, keys); the last query sees every key.

    With more keys than queries the surplus keys lie in the past (a cache), so query i stands at position
    `keys - queries + i`.
    """
    position = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) <= position[:, None]


def padding_mask(valid: Tensor) -> Tensor:
    """Key mask (B, 1, 1, T) of `valid` (B, T), True at real positions."""
    return valid[:, None, None, :]


def restrict(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """A mask of either kind, narrowed to where `allowed` (boolean) is True; None allows everything."""
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.where(allowed, -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention in which a query without any visible key gives zeros.

    Shapes: query (B, H, Q, D), key (B, G, K, D), value (B, G, K, Dv) with H a multiple of G; mask as in the
    module's docstring. Returns (B, H, Q, Dv). `causal` (which cannot be combined with a mask) needs Q = K and
    lets the kernel skip the upper triangle. `dropout` acts on the attention weights: pass 0 outside training.
    """
    empty = None
    if mask is not None:
        if causal:
            raise ValueError("give a mask or causal=True, not both; join them as causal_mask(...) & mask")
        if mask.dtype == torch.bool:
            empty = ~mask.any(-1, keepdim=True)
            mask = mask | empty  # such a row attends somewhere harmless and is blanked below
        else:
            empty = mask.isneginf().all(-1, keepdim=True)
            mask = mask.masked_fill(empty, 0.0).to(query.dtype)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out if empty is None else out.masked_fill(empty, 0.0)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared_key: Tensor,
    shared_value: Tensor,
    shared_mask: Tensor,
    own_mask: Tensor | None = None,
) -> Tensor:
    """Packs of tokens that attend to what their row shares and, within a pack, to each other; never to other packs.

    The candidates of a request are such packs and its history is shared. Equals appending each pack alone to the
    shared sequence, which is neither repeated nor encoded again.

    Shapes: query, key, value (B, H, C, n, D) for C packs of n tokens; shared_key, shared_value (B, H, S, D);
    shared_mask boolean (B, S), True at real positions; own_mask boolean (n, n), True where a token (row) may see
    another of its pack, each at least itself; everything when None. Returns (B, H, C, n, D). Softmax in float32.
    """
    packs, count = query.shape[2:4]
    asking = query.flatten(2, 3)
    to_shared = (asking @ shared_key.mT).masked_fill(~padding_mask(shared_mask), -torch.inf)
    # A product of one row by one column is a sum: a batched matrix product would start a kernel for each.
    alone = count == 1
    to_own = (query * key).sum(-1, keepdim=True) if alone else query @ key.mT
    if own_mask is not None:
        to_own = to_own.masked_fill(~own_mask, -torch.inf)
    exact = torch.promote_types(query.dtype, torch.float32)
    score = torch.cat([to_shared, to_own.flatten(2, 3)], dim=-1) * query.shape[-1] ** -0.5
    weight = score.to(exact).softmax(-1).to(value.dtype)
    on_shared, on_own = weight.split([shared_key.shape[2], count], dim=-1)
    shape = (packs, count)
    own = on_own.unflatten(2, shape)
    return (on_shared @ shared_value).unflatten(2, shape) + (own * value if alone else own @ value)


@dataclass
class KVCache:
    """Keys and values of the positions seen so far, (B, G, T, D) each; empty at first."""

    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of positions kept."""
        return 0 if self.key is None else self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new positions at the end and returns all of them."""
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            self.key = torch.cat([self.key, key], dim=2)
            self.value = torch.cat([self.value, value], dim=2)
        return self.key, self.value

    def repeat(self, times: int) -> None:
        """Repeats every batch row, copies adjacent; gradients of the copies add up."""
        if self.key is not None and self.value is not None and times > 1:
            self.key = self.key[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1)
            self.value = self.value[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1)

    def select(self, rows: Tensor) -> None:
        """Keeps (or repeats) batch rows (R,), as a beam search does when it reorders its beams."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key.index_select(0, rows), self.value.index_select(0, rows)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (arXiv:2104.09864): plane i of a head turns by `position * frequency[i]`.

    Coordinates i and i + D/2 form plane i (the layout of Llama checkpoints). Angles are computed in float32
    whatever the dtype of model and activations, because bfloat16 cannot hold positions above 256.

    Args:
        head_dim: width D of a head; even.
        base: frequencies are `base ** (-2 i / D)`.
        frequencies: replaces that ladder; (D/2,) for all heads, or (heads, D/2) for one ladder a query head.
            With grouped keys the heads of one group must share a ladder.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0, frequencies: Tensor | None = None) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head width, got {head_dim}")
        if frequencies is None:
            frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if frequencies.shape[-1] != head_dim // 2:
            raise ValueError(f"{head_dim // 2} planes need as many frequencies, got {frequencies.shape[-1]}")
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        exact = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = exact.to(self.frequencies.device)  # follows the device, never a lower precision
        return self

    def tables(self, length: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (length, D/2) or (heads, length, D/2), float32."""
        position = torch.arange(offset, offset + length, device=self.frequencies.device, dtype=torch.float32)
        angle = position[:, None] * self.frequencies[..., None, :]
        return angle.cos(), angle.sin()

    def forward(self, query: Tensor, key: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Turned queries (B, H, T, D) and keys (B, G, T, D), in their own dtype."""
        cos, sin = self.tables(query.shape[2], offset)
        if cos.dim() == 2 or query.shape[1] == key.shape[1]:
            return rotate(query, cos, sin), rotate(key, cos, sin)
        group = query.shape[1] // key.shape[1]
        ladders = self.frequencies.unflatten(0, (-1, group))
        if not torch.equal(ladders, ladders[:, :1].expand_as(ladders)):
            raise ValueError("query heads that share a key head must share their rotary frequencies")
        return rotate(query, cos, sin), rotate(key, cos[::group], sin[::group])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each plane of x (..., T, D) by the angles of the tables (..., T, D/2)."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with optional grouped keys (arXiv:2305.13245).

    Args:
        dim: width of the input and output.
        heads: query heads; must divide `dim` unless `head_dim` is given.
        kv_heads: key/value heads, a divisor of `heads`; None means as many as `heads`.
        dropout: on the attention weights.
        bias: whether the four projections have one.
        head_dim: width of one head, dim / heads by default (T5 chooses it freely).
        memory_dim: width of the memory in cross-attention, `dim` by default.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = True,
        head_dim: int | None = None,
        memory_dim: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if head_dim is None and dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if heads % kv_heads:
            raise ValueError(f"{kv_heads} key heads do not divide {heads} query heads")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or dim // heads
        self.dropout = dropout
        self.query = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.key_value = nn.Linear(memory_dim or dim, 2 * kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, dim, bias=bias)

    def _project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.key_value(memory).chunk(2, dim=-1)
        shape = (self.kv_heads, self.head_dim)
        return key.unflatten(-1, shape).transpose(1, 2), value.unflatten(-1, shape).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
        cache: KVCache | None = None,
        *,
        causal: bool = False,
        latest: int | None = None,
    ) -> Tensor:
        """Attends from x (B, T, dim) to itself, or to memory (M, S, dim); returns (B, T, dim).

        Self-attention: `cache` holds the earlier positions and receives the new ones; masks then span cached
        and new keys. `causal=True` stands for `causal_mask` and joins a given mask. With `latest=n` only the last
        n positions ask, of all as ever, and the result is (B, n, dim).

        Cross-attention: keys and values of the memory are computed once and kept in `cache`. B may be a
        multiple n of M (n beams a row, adjacent): the beams share their row's memory without copying it, and
        the mask must be the same for all queries. `rotary`, `causal` and `latest` concern self-attention only.
        """
        # Rotary positions are given to queries and keys together, so there the queries are cut afterwards.
        asking = x if latest is None or rotary is not None or memory is not None else x[:, -latest:]
        query = self.query(asking).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        if memory is None:
            key, value = self._project_memory(x)
            offset = cache.length if cache is not None else 0
            if rotary is not None:
                query, key = rotary(query, key, offset)
            if cache is not None:
                key, value = cache.append(key, value)
            if latest is not None:
                query = query[:, :, -latest:]
                if mask is not None and mask.shape[-2] > 1:
                    mask = mask[..., -latest:, :]
            length = query.shape[2]
            if causal and length == 1:
                causal = False  # the only query is the latest position: it sees every key
            elif causal and (mask is not None or length < key.shape[2]):
                mask = restrict(mask, causal_mask(length, key.shape[2], x.device))
                causal = False
            beams = 1
        else:
            if cache is not None and cache.key is not None and cache.value is not None:
                key, value = cache.key, cache.value
            else:
                key, value = self._project_memory(memory)
                if cache is not None:
                    cache.append(key, value)
            rows, (batch, length) = key.shape[0], x.shape[:2]
            if batch % rows:
                raise ValueError(f"{batch} query rows are no multiple of {rows} memory rows")
            beams = batch // rows
            # Beams of one row become more queries of that row.
            query = query.unflatten(0, (rows, beams)).transpose(1, 2).flatten(2, 3)  # (M, H, n*T, D)
        causal = causal and memory is None
        dropout = self.dropout if self.training else 0.0
        out = attend(query, key, value, mask, causal=causal, dropout=dropout)
        if beams > 1:
            out = out.unflatten(2, (beams, length)).transpose(1, 2).flatten(0, 1)
        return self.output(out.transpose(1, 2).flatten(2))


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Slopes (H,) of attention with linear biases (arXiv:2108.12409): 2^(-8h/H) for h = 1..H."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)


def alibi(query_position: Tensor, key_position: Tensor, heads: int) -> Tensor:
    """-slope · |distance| of positions (Q,) and (K,), float32 (H, Q, K), to be added to attention scores."""
    distance = (query_position[:, None] - key_position).abs().float()
    return -alibi_slopes(heads, distance.device)[:, None, None] * distance
