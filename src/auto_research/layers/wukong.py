"""Wukong (arXiv:2403.02545): feature tokens that meet by a factorisation machine, layer upon layer.

Each layer doubles the order of the interactions that its tokens hold. Tokens come in the two groups of
`layers.one_way`; with an empty group of the request it is the common dense layer.

Letters: U requests, C candidates, n_R and n_C tokens of a group, d width, k rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from auto_research.layers.one_way import BlockMLP, GroupNorm, OneWayFM, Owner, Sizes, TokenCompression


@dataclass
class WukongKept:
    """What the candidates need of their request's group, by part of the layer; nothing where that group is empty."""

    machine: Tensor | None = None
    network: list[Tensor | None] = field(default_factory=lambda: [None, None])
    compress: Tensor | None = None
    residual: Tensor | None = None


class WukongLayer(nn.Module):
    """X' = LN([FMB(X); LCB(X)] + L X): interactions of pairs beside linear combinations, which keep the low orders.

    FMB(X) = MLP(LN(flatten(X Xᵀ Y))) cut into tokens; LCB(X) and L X are linear maps along the token axis.

    Args:
        width, rank: d, and k columns of Y.
        hidden: hidden widths of the network behind the products, by group; one without inputs has no hidden units.
        tokens, outputs: n_R and n_C before and after; half of those after (rounded up) come from LCB.
        reads: whether candidates read their request's tokens.
    """

    def __init__(
        self, width: int, rank: int, hidden: Sizes, tokens: Sizes, outputs: Sizes, *, reads: bool = True
    ) -> None:
        super().__init__()
        crossed = (outputs[0] // 2, outputs[1] // 2)
        rest = (outputs[0] - crossed[0], outputs[1] - crossed[1])
        flat = (tokens[0] * rank, tokens[1] * rank)
        self.width = width
        self.machine = OneWayFM(tokens, rank, reads=reads)
        self.machine_norm = GroupNorm(flat)
        request, candidate = ((i, h if i else 0, n * width) for i, h, n in zip(flat, hidden, crossed, strict=True))
        self.network = BlockMLP(request, candidate, reads=reads)
        self.compress = TokenCompression(tokens, rest, reads=reads)
        self.residual = TokenCompression(tokens, outputs, reads=reads)
        self.norm = GroupNorm((width if outputs[0] else 0, width))

    def _join(self, crossed: Tensor, mixed: Tensor, residual: Tensor) -> Tensor:
        return torch.cat([crossed.unflatten(-1, (-1, self.width)), mixed], dim=1) + residual

    def request(self, x: Tensor) -> tuple[Tensor, WukongKept]:
        """(U, n_R, d) -> (U, n_R', d) and what candidates need."""
        products, machine = self.machine.request(x)
        crossed, network = self.network.request(self.machine_norm.request(products.flatten(1)))
        mixed, compress = self.compress.request(x)
        rest, residual = self.residual.request(x)
        kept = WukongKept(machine, network, compress, residual)
        return self.norm.request(self._join(crossed, mixed, rest)), kept

    def candidate(self, x: Tensor, kept: WukongKept, owner: Owner) -> Tensor:
        """(C, n_C, d) -> (C, n_C', d)."""
        products = self.machine_norm.candidate(self.machine.candidate(x, kept.machine, owner).flatten(1))
        crossed = self.network.candidate(products, kept.network, owner)
        mixed = self.compress.candidate(x, kept.compress, owner)
        return self.norm.candidate(self._join(crossed, mixed, self.residual.candidate(x, kept.residual, owner)))
