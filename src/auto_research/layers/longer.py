"""LONGER: a long behaviour sequence read by a candidate at a cost that does not grow with the candidates.

LONGER (arXiv:2505.04421): K adjacent events become one token, a small Transformer looks inside each group first, a
few global tokens read out, the first layer asks from the latest tokens alone, and because no event ever looks at the
candidate, the user's side is computed once and serves every candidate.

The paper's text leaves two things open, and this is how they are read here. The causal order is [merged events, oldest
first; CLS; user; target]: a token sees itself and what stands before it, so the events never see a global token, each
global token sees all events, and the target sees everything. A causal Transformer over exactly that order is the same
model when merging is off and every token asks.

Letters: B users, C candidates of each, T events, d width of an event, K events in a token, w = K·d width of a token,
n = ⌈T/K⌉ tokens, m latest tokens that ask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import KVCache, MultiHeadAttention, attend_packed, padding_mask
from auto_research.layers.transformer import BlockCache, CausalTransformer, TransformerBlock

GAPS = 32
"""Buckets of a time gap; the last one begins at 2^31 - 1 seconds, 68 years."""

GLOBALS = ("cls", "user", "target")
"""Global tokens in their causal order; the target is always one."""


def gap_buckets(seconds: Tensor) -> Tensor:
    """⌊log2(1 + seconds)⌋, at most `GAPS` - 1, int64 of any shape; a negative gap counts as none."""
    begins = 2 ** torch.arange(1, GAPS, device=seconds.device) - 1
    return torch.bucketize(seconds, begins, right=True)


class EventEmbedding(nn.Module):
    """Vectors of a history: item + how many events ago it was + how long before the moment of asking.

    Positions count back from the latest event, so padding on the left changes nothing.

    Args:
        length: longest history.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.positions = nn.Embedding(length, width)
        self.gaps = nn.Embedding(GAPS, width)
        for table in (self.positions, self.gaps):
            nn.init.normal_(table.weight, std=0.5 / width**0.5)

    def forward(self, items: Tensor, gaps: Tensor, valid: Tensor) -> Tensor:
        """Item vectors (B, T, d), `gap_buckets` (B, T), valid (B, T) -> (B, T, d), zero at padding."""
        if items.shape[1] > self.length:
            raise ValueError(f"a history of {items.shape[1]} events is longer than the {self.length} it was made for")
        back = torch.arange(items.shape[1] - 1, -1, -1, device=items.device)
        return (items + self.positions(back) + self.gaps(gaps)) * valid[..., None]


def group_events(x: Tensor, size: int) -> Tensor:
    """(B, T, ...) -> (B, ⌈T/size⌉, size, ...): neighbours together, counted from the latest; zeros stand first."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], dim=1)
    return x.unflatten(1, (-1, size))


def layer_flops(width: int, length: int) -> int:
    """FLOPs of one Transformer layer with a feed-forward network of four times its width: 24·n·w² + 4·n²·w."""
    return 24 * length * width**2 + 4 * length**2 * width


def merge_cost_ratio(width: int, length: int, merge: int) -> float:
    """Cost of a layer over T/K tokens of width K·d in units of one over T events: (6·d·K + T/K) / (6·d + T)."""
    return (6 * width * merge + length / merge) / (6 * width + length)


@dataclass
class UserSide:
    """What candidates need of a user: keys and values of every layer, and what the user's own global tokens say.

    Shapes: cache, one a layer, (B, heads, tokens, head width); valid, one a layer, (B, tokens); said (B, d).
    """

    cache: list[KVCache]
    valid: list[Tensor]
    said: Tensor


class LongerEncoder(nn.Module):
    """Embedded events and candidates to one summary vector for each (user, candidate) pair.

    Args:
        width: d, of events, candidates, user vector and summary.
        merge: K; 1 keeps every event a token.
        inner: whether a one-layer Transformer looks inside each group before its events are concatenated. It
            sees the positions in the events' own vectors.
        queries: m; n or more lets every token ask.
        layers: self-attention layers after the first, cross-attention one.
        global_tokens: those of `GLOBALS` that are used.
        head_width: of every attention head; at most d.
        expansion: hidden width of the feed-forward networks over their width.
    """

    def __init__(
        self,
        width: int,
        *,
        merge: int = 4,
        inner: bool = True,
        queries: int = 8,
        layers: int = 1,
        global_tokens: tuple[str, ...] = GLOBALS,
        head_width: int = 16,
        expansion: int = 2,
    ) -> None:
        super().__init__()
        if merge < 1 or queries < 1 or layers < 0:
            raise ValueError(f"merge {merge} and queries {queries} must be at least 1, layers {layers} at least 0")
        if "target" not in global_tokens or not set(global_tokens) <= set(GLOBALS):
            raise ValueError(f"global tokens {global_tokens} must contain target and come from {', '.join(GLOBALS)}")
        wide = merge * width
        head_width = min(head_width, width)
        if width % head_width:
            raise ValueError(f"heads of width {head_width} do not divide a width of {width}")
        self.merge, self.queries = merge, queries
        self.inner = TransformerBlock(width, width // head_width, expansion * width) if inner else None
        self.stack = CausalTransformer(wide, wide // head_width, expansion * wide, 1 + layers)
        self.target = nn.Linear(width, wide)
        self.cls = nn.Parameter(torch.randn(wide) / wide**0.5) if "cls" in global_tokens else None
        self.user = nn.Linear(width, wide) if "user" in global_tokens else None
        own = len(set(global_tokens)) - 1
        # One linear map of all global tokens side by side, cut into the user's part and the target's.
        self.user_out = nn.Linear(own * wide, width, bias=False) if own else None
        self.target_out = nn.Linear(wide, width)

    def merged(self, events: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Events (B, T, d), valid (B, T) -> tokens (B, n, K·d) and whether each holds a real event (B, n)."""
        groups, real = group_events(events, self.merge), group_events(valid, self.merge)
        if self.inner is not None:
            rows = self.inner(groups.flatten(0, 1), padding_mask(real.flatten(0, 1)))
            groups = rows.view_as(groups) * real[..., None]
        return groups.flatten(2), real.any(2)

    def _user_tokens(self, events: Tensor, valid: Tensor, user: Tensor) -> tuple[Tensor, Tensor, int]:
        """R without the target: tokens (B, n + g, w), which are real (B, n + g), and how many of them ask."""
        tokens, real = self.merged(events, valid)
        own = []
        if self.cls is not None:
            own.append(self.cls.expand(len(user), -1))
        if self.user is not None:
            own.append(self.user(user))
        asking = min(self.queries, tokens.shape[1]) + len(own)
        if own:
            tokens = torch.cat([tokens, torch.stack(own, 1)], dim=1)
            real = F.pad(real, (0, len(own)), value=True)
        return tokens, real, asking

    def user_side(self, events: Tensor, valid: Tensor, user: Tensor) -> UserSide:
        """Everything that does not depend on a candidate, from events (B, T, d), valid (B, T) and user (B, d)."""
        x, real, asking = self._user_tokens(events, valid, user)
        caches, seen = [], []
        for layer, block in enumerate(self.stack.blocks):
            cache = BlockCache()
            seen.append(real)
            x = block(x, padding_mask(real), causal=True, cache=cache, latest=asking if layer == 0 else None)
            real = real[:, -asking:]
            caches.append(cache.own)
        said = user.new_zeros(len(user), self.target_out.out_features)
        if self.user_out is not None:
            count = self.user_out.in_features // x.shape[2]
            said = self.user_out(self.stack.norm(x[:, -count:]).flatten(1))
        return UserSide(caches, seen, said)

    def read(self, side: UserSide, target: Tensor) -> Tensor:
        """Candidates (B, C, d) -> summaries (B, C, d); candidates of a user do not see each other."""
        x = self.target(target)
        for block, cache, real in zip(self.stack.blocks, side.cache, side.valid, strict=True):
            x = x + attend_apart(block.attention, block.attention_norm(x), cache, real)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        return self.target_out(self.stack.norm(x)) + side.said[:, None]

    def forward(self, events: Tensor, valid: Tensor, user: Tensor, target: Tensor) -> Tensor:
        """The same summaries (B, C, d) without a cache: the whole sequence again for each candidate.

        It is what the cache is tested against, and far slower.
        """
        count = target.shape[1]
        x, real, asking = self._user_tokens(*(part.repeat_interleave(count, dim=0) for part in (events, valid, user)))
        x = torch.cat([x, self.target(target).flatten(0, 1)[:, None]], dim=1)
        real, asking = F.pad(real, (0, 1), value=True), asking + 1
        for layer, block in enumerate(self.stack.blocks):
            x = block(x, padding_mask(real), causal=True, latest=asking if layer == 0 else None)
            real = real[:, -asking:]
        x = self.stack.norm(x)
        out = self.target_out(x[:, -1])
        if self.user_out is not None:
            own = self.user_out.in_features // x.shape[2]
            out = out + self.user_out(x[:, -1 - own : -1].flatten(1))
        return out.unflatten(0, (-1, count))


def attend_apart(attention: MultiHeadAttention, x: Tensor, cache: KVCache, valid: Tensor) -> Tensor:
    """Each token of x (B, C, w) attends to the cached keys of its user and to itself, not to its neighbours.

    Equals appending every token alone to the cached sequence, at the cost of C queries instead of C sequences.
    Cached keys (B, H, S, D) count where valid (B, S) is True. Returns (B, C, w).
    """
    if cache.key is None or cache.value is None:
        raise ValueError("the user's side is empty: compute it first")
    shape = (attention.heads, attention.head_dim)

    def packs(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, shape).transpose(1, 2)[..., None, :]  # (B, H, C, 1, D)

    key, value = attention.key_value(x).chunk(2, dim=-1)
    out = attend_packed(packs(attention.query(x)), packs(key), packs(value), cache.key, cache.value, valid)
    return attention.output(out.squeeze(3).transpose(1, 2).flatten(2))
