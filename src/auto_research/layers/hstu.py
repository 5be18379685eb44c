"""HSTU: pointwise gated attention with a learned bias over distance and time (arXiv:2402.17152).

Unlike softmax attention the weights are not normalised over the keys, so that the amount of evidence is kept.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.longer import GAPS, gap_buckets


class RelativeBias(nn.Module):
    """Learned bias of every head for the distance between two tokens and for the time between them.

    Args:
        heads: of the attention it is added to.
        distance: largest distance with a bias of its own; farther ones share the last.
    """

    def __init__(self, heads: int, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.positions = nn.Embedding(distance + 1, heads)
        self.times = nn.Embedding(GAPS, heads)
        for table in (self.positions, self.times):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, position: Tensor, seconds: Tensor) -> Tensor:
        """Position (T,) and moment (B, T) of each token, int64 -> (B, H, T, T)."""
        near = (position[:, None] - position).abs().clamp(max=self.distance)
        apart = gap_buckets((seconds[:, :, None] - seconds[:, None]).abs())
        return self.positions(near).permute(2, 0, 1) + self.times(apart).permute(0, 3, 1, 2)


class HSTUBlock(nn.Module):
    """x + W (norm(A V) * U) with A = SiLU(Q Kᵀ + bias) / length where allowed; U, V, Q, K = SiLU(W' norm(x)).

    Args:
        length: by which weights are divided; a constant, so that padding changes nothing.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        self.heads, self.length = heads, length
        self.norm, self.inner_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.inputs = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, allowed: Tensor, bias: Tensor, *, latest: int | None = None) -> Tensor:
        """x (B, T, dim), allowed (broadcasts to (B, 1, T, T)) bool, bias (B, H, T, T) -> (B, T, dim).

        With `latest` only the last tokens ask, and (B, latest, dim) is returned.
        """
        gate, value, query, key = F.silu(self.inputs(self.norm(x))).chunk(4, dim=-1)
        if latest is not None:
            x, gate, query = (part[:, -latest:] for part in (x, gate, query))
            bias, allowed = bias[..., -latest:, :], allowed[..., -latest:, :]
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (query, key, value))
        weight = F.silu(query @ key.mT + bias.to(query.dtype)).masked_fill(~allowed, 0.0)
        read = weight @ (value / self.length)  # dividing the values is cheaper than dividing the weights
        return x + self.output(self.inner_norm(read.transpose(1, 2).flatten(2)) * gate)
