"""Feature tokens: layers with private weights for each token, mixing without attention, and the block of both.

A feature token stands for one group of fields of an example (the user, the candidate, the context, ...), so the token
axis is short, fixed and heterogeneous. Letters: B examples, T tokens, D width of a token, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.towers import ScoreMLP

if TYPE_CHECKING:
    from auto_research.layers.experts import Routing


_ALL = slice(None)


class GroupedLinear(nn.Module):
    """One linear map for each token, applied to all of them as a single batched product.

    Equals `[Linear_t(x[:, t]) for t in range(tokens)]` and is initialised like `nn.Linear`: uniform within 1/√inputs.
    Weight (T, inputs, outputs), bias (T, outputs).
    """

    def __init__(self, tokens: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(tokens, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights and biases anew from the global generator."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, part: slice = _ALL) -> Tensor:
        """(B, T, inputs) -> (B, T, outputs); `part` says which of the tokens x holds, if not all."""
        rows = x.transpose(0, 1)
        if self.bias is None:
            return torch.bmm(rows, self.weight[part]).transpose(0, 1)
        return torch.baddbmm(self.bias[part, None], rows, self.weight[part]).transpose(0, 1)


class SlotLinear(nn.Module):
    """A linear map along the token axis, the same for every channel: ρ X with ρ (outputs, inputs), no bias.

    It mixes tokens, never channels: a segment-wise map in SlimPer (arXiv:2607.12281), linear compression in Wukong
    (arXiv:2403.02545). ρ is drawn from N(0, 1/inputs).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs, D) -> (..., outputs, D)."""
        return torch.einsum("oi,...id->...od", self.weight, x)  # a third of the time of a batched product


class PerTokenFFN(nn.Module):
    """Two-layer network with private weights for each token.

    Token t sees only itself: v_t = W2_t GELU(W1_t s_t + b1_t) + b2_t (RankMixer, arXiv:2507.15551), or with `swiglu`
    v_t = W3_t (silu(W1_t s_t) * W2_t s_t), biases likewise (MixFormer, arXiv:2602.14110). This is not a mixture of
    experts, whose experts share their input.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        hidden: int,
        activation: Literal["gelu", "swiglu"] = "gelu",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.rise = GroupedLinear(tokens, width, 2 * hidden if activation == "swiglu" else hidden, bias=bias)
        self.fall = GroupedLinear(tokens, hidden, width, bias=bias)

    def forward(self, x: Tensor, part: slice = _ALL) -> Tensor:
        """(B, T, D) -> (B, T, D); `part` says which of the tokens x holds, if not all."""
        hidden = self.rise(x, part)
        if self.activation == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            return self.fall(F.silu(gate) * up, part)
        return self.fall(F.gelu(hidden), part)


def mix_tokens(x: Tensor, heads: int | None = None) -> Tensor:
    """Multi-head token mixing: new token h is the concatenation over tokens of their h-th head; no parameters.

    (B, T, D) -> (B, H, T·D/H). With H = T (the default) the shape is kept, so that a residual is possible, and
    applying it twice gives x back. Raises ValueError when D is not divisible by H.
    """
    batch, tokens, width = x.shape
    heads = tokens if heads is None else heads
    if width % heads:
        raise ValueError(f"width {width} cannot be cut into {heads} heads; make it a multiple of {heads}")
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2).reshape(batch, heads, -1)


class TokenMixing(nn.Module):
    """`mix_tokens` with as many heads as tokens, as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return mix_tokens(x)


class MixerBlock(nn.Module):
    """Mixing across tokens, then a network within each: S = LN(Mix(X) + X), X' = LN(FFN(S) + S).

    The residual adds mixed token h to original token h although they mean different things: that is RankMixer's
    choice. Layer normalisation stays in float32 under autocast.

    Args:
        mixing: (B, T, D) -> (B, T, D), or None for a block in which tokens never meet.
        feed_forward: (B, T, D) -> (B, T, D); one with experts also takes the `Routing` it is to report to.
        residual, norm: ablations.
    """

    def __init__(
        self,
        width: int,
        mixing: nn.Module | None,
        feed_forward: nn.Module,
        *,
        residual: bool = True,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.mixing = mixing
        self.feed_forward = feed_forward
        self.residual = residual
        self.mixing_norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.feed_forward_norm = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        mixed = x
        if self.mixing is not None:
            mixed = self.mixing(x) + x if self.residual else self.mixing(x)
        x = self.mixing_norm(mixed)
        changed = self.feed_forward(x) if routing is None else self.feed_forward(x, routing)
        return self.feed_forward_norm(changed + x if self.residual else changed)


class MixerTrunk(nn.Module):
    """RankMixer from embedded fields to a logit: T tokens, blocks, the mean over tokens, a task tower.

    Args:
        inputs: F, width of all embedded fields; padded to T equal slices, each with its own linear map to a token.
        blocks: (B, T, D) -> (B, T, D) each, taking a `Routing` as well; see `MixerBlock` and `dense_blocks`.
        tower: what follows the mean over tokens (B, D); by default a network that gives a logit (B,).
    """

    def __init__(
        self, inputs: int, tokens: int, width: int, blocks: Iterable[nn.Module], tower: nn.Module | None = None
    ) -> None:
        super().__init__()
        if width % tokens:
            raise ValueError(f"width {width} must be a multiple of the {tokens} tokens")
        self.slice = -(-inputs // tokens)
        self.padding = self.slice * tokens - inputs
        self.tokenise = GroupedLinear(tokens, self.slice, width)
        self.blocks = nn.ModuleList(blocks)
        self.tower = ScoreMLP(width, width) if tower is None else tower

    def tokens(self, e: Tensor) -> Tensor:
        """Semantic tokenisation: (B, F), padded, cut into T slices, each with its own linear map -> (B, T, D)."""
        return self.tokenise(F.pad(e, (0, self.padding)).unflatten(-1, (-1, self.slice)))

    def forward(self, e: Tensor, routing: Routing | None = None) -> Tensor:
        """(B, F) -> logit (B,), or what the tower gives."""
        x = self.tokens(e)
        for block in self.blocks:
            x = block(x, routing)
        return self.tower(x.mean(1))


def dense_blocks(tokens: int, width: int, hidden: int, count: int) -> list[MixerBlock]:
    """RankMixer's dense blocks: token mixing and per-token networks of hidden width `hidden`."""
    return [MixerBlock(width, TokenMixing(), PerTokenFFN(tokens, width, hidden)) for _ in range(count)]
