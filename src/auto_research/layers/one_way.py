"""Operators in which a candidate reads its request and a request never reads a candidate (generalised layer masking).

Features come in two groups, R of the request and C of the candidate. Every operator is a pair
f(x^R, x^C) = (f^R(x^R), f^C(x^R, x^C)), and here it is so by construction: `request(x)` sees no candidate and returns
its output together with what candidates will need of it; `candidate(x, kept, owner)` adds that to a candidate's own
part. A composition of such pairs is such a pair, and everything in `request` is computed once a request (ROCS,
arXiv:2607.27744). With an empty R group (tensors of no token or column) each operator is the common dense one over C.

Letters: U requests, C candidates, u(b) the request of candidate b, n_R and n_C tokens of a group, d width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import attend, padding_mask

Sizes = tuple[int, int]
"""A size of the R group and one of the C group; either may be 0."""


@dataclass(frozen=True)
class Owner:
    """Which request each candidate belongs to.

    Attributes:
        index: u(b), integers (C,), in any order.
        each: how many candidates every request has, where that is one number and they are adjacent; else None.
    """

    index: Tensor
    each: int | None = None

    @classmethod
    def adjacent(cls, requests: int, each: int, device: torch.device) -> Owner:
        """`each` candidates for every request, side by side."""
        return cls(torch.arange(requests, device=device).repeat_interleave(each), each)

    def gather(self, x: Tensor) -> Tensor:
        """What requests know, (U, ...), for each candidate: (C, ...)."""
        if self.each is None:
            return x.index_select(0, self.index)
        return x[:, None].expand(-1, self.each, *x.shape[1:]).flatten(0, 1)

    def add(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """x (C, ...) plus its request's part (U, ...), if there is one."""
        if kept is None:
            return x
        if self.each is None:
            return x + self.gather(kept)
        return (x.unflatten(0, (-1, self.each)) + kept[:, None]).flatten(0, 1)  # no copy for each candidate


class BlockLinear(nn.Module):
    """Y^R = W_RR X^R + b_R and Y^C_b = W_CC X^C_b + W_CR X^R_u(b) + b_C; no weight leads from C to R.

    W_CR X^R is computed once a request and added through the index. Weights start uniform within 1/√fan-in, and the
    fan-in of the C row is the joint one: W_CC and W_CR together are one layer.

    Args:
        inputs, outputs: columns of the groups.
        reads: whether W_CR exists; without it the groups never meet.
    """

    def __init__(self, inputs: Sizes, outputs: Sizes, *, bias: bool = True, reads: bool = True) -> None:
        super().__init__()
        (from_r, from_c), (to_r, to_c) = inputs, outputs
        reads = reads and from_r > 0 and to_c > 0
        self.rr = nn.Linear(from_r, to_r, bias=bias) if from_r and to_r else None
        self.cr = nn.Linear(from_r, to_c, bias=False) if reads else None
        self.cc = nn.Linear(from_c, to_c, bias=bias) if from_c and to_c else None
        bound = 1 / math.sqrt(max(1, from_c + (from_r if reads else 0)))
        for part in filter(None, (self.cr, self.cc)):
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)

    def request(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(U, ..., R inputs) -> (U, ..., R outputs) and W_CR x (U, ..., C outputs)."""
        y = x[..., :0] if self.rr is None else self.rr(x)
        return y, None if self.cr is None else self.cr(x)

    def candidate(self, x: Tensor, kept: Tensor | None, owner: Owner) -> Tensor:
        """(C, ..., C inputs) -> (C, ..., C outputs)."""
        return x[..., :0] if self.cc is None else owner.add(self.cc(x), kept)


class BlockMLP(nn.Module):
    """`BlockLinear` layers with a GELU between them: hidden units belong to a group, too.

    Args:
        request, candidate: widths of the groups, inputs first.
    """

    def __init__(self, request: Sequence[int], candidate: Sequence[int], *, reads: bool = True) -> None:
        super().__init__()
        steps = pairwise(zip(request, candidate, strict=True))
        self.layers = nn.ModuleList(BlockLinear(inputs, outputs, reads=reads) for inputs, outputs in steps)

    def request(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """(U, R inputs) -> (U, R outputs) and each layer's part for the candidates."""
        kept = []
        for i, layer in enumerate(self.layers):
            x, part = layer.request(F.gelu(x) if i else x)  # type: ignore[operator]
            kept.append(part)
        return x, kept

    def candidate(self, x: Tensor, kept: Sequence[Tensor | None], owner: Owner) -> Tensor:
        """(C, C inputs) -> (C, C outputs)."""
        for i, (layer, part) in enumerate(zip(self.layers, kept, strict=True)):
            x = layer.candidate(F.gelu(x) if i else x, part, owner)  # type: ignore[operator]
        return x


class TokenCompression(nn.Module):
    """Linear compression block: `BlockLinear` along the token axis, the same for every column, without a bias."""

    def __init__(self, inputs: Sizes, outputs: Sizes, *, reads: bool = True) -> None:
        super().__init__()
        self.map = BlockLinear(inputs, outputs, bias=False, reads=reads)

    def request(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(U, R tokens, d) -> (U, R outputs, d) and (U, d, C outputs)."""
        y, kept = self.map.request(x.mT)
        return y.mT, kept

    def candidate(self, x: Tensor, kept: Tensor | None, owner: Owner) -> Tensor:
        """(C, C tokens, d) -> (C, C outputs, d)."""
        return self.map.candidate(x.mT, kept, owner).mT


class OneWayFM(nn.Module):
    """Factorisation machine of Wukong, FM(X) = X Xᵀ Y with learned Y (n, k), without what would tell R about C.

    F^R = X^R X^Rᵀ Y^R holds pairs of request tokens; F^C = X^C [X^R_u; X^C]ᵀ Y^C those of a candidate token with
    either. Products are taken from the right, so that X^Rᵀ Y^C_R (d, k) is computed once a request and no n x n matrix
    arises.
    """

    def __init__(self, tokens: Sizes, factors: int, *, reads: bool = True) -> None:
        super().__init__()
        request, candidate = tokens
        reads = reads and request > 0
        self.factors = factors

        def drawn(rows: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, factors) / math.sqrt(fan_in))

        joint = candidate + (request if reads else 0)
        self.rr = drawn(request, request) if request else None
        self.cr = drawn(request, joint) if reads else None
        self.cc = drawn(candidate, joint)

    def request(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(U, n_R, d) -> (U, n_R, k) and (U, d, k)."""
        y = x.new_zeros(*x.shape[:-1], self.factors) if self.rr is None else x @ (x.mT @ self.rr)
        return y, None if self.cr is None else x.mT @ self.cr

    def candidate(self, x: Tensor, kept: Tensor | None, owner: Owner) -> Tensor:
        """(C, n_C, d) -> (C, n_C, k)."""
        return x @ owner.add(x.mT @ self.cc, kept)


class GroupNorm(nn.Module):
    """Layer normalisation of each group by itself, over the last dimension; no statistic spans both groups."""

    def __init__(self, widths: Sizes) -> None:
        super().__init__()
        self.request: nn.Module = nn.LayerNorm(widths[0]) if widths[0] else nn.Identity()
        self.candidate: nn.Module = nn.LayerNorm(widths[1])


class OneWayCross(nn.Module):
    """Cross layer of DCN-V2, x_{l+1} = x_0 ⊙ (W x_l + b) + x_l, with W = U V and U and V block lower-triangular.

    Args:
        ranks: of the groups, the rows of V; None for a full W.
    """

    def __init__(self, widths: Sizes, ranks: Sizes | None = None, *, reads: bool = True) -> None:
        super().__init__()
        self.fall = None if ranks is None else BlockLinear(widths, ranks, bias=False, reads=reads)
        self.map = BlockLinear(ranks or widths, widths, reads=reads)

    def request(self, first: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """x_0 and x_l (U, F_R) -> x_{l+1} (U, F_R), and what V and U give to candidates."""
        y, fallen = (x, None) if self.fall is None else self.fall.request(x)
        y, kept = self.map.request(y)
        return first * y + x, (fallen, kept)

    def candidate(self, first: Tensor, x: Tensor, kept: tuple[Tensor | None, Tensor | None], owner: Owner) -> Tensor:
        """x_0 and x_l (C, F_C) -> x_{l+1} (C, F_C)."""
        y = x if self.fall is None else self.fall.candidate(x, kept[0], owner)
        return first * self.map.candidate(y, kept[1], owner) + x


def attend_owned(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, owner: Owner) -> Tensor:
    """Candidates ask, their request's sequence answers: keys and values stay one set a request.

    Shapes: query (C, H, q, D), key and value (U, H, T, D), valid (U, T) -> (C, H, q, D). Where every request has as
    many candidates, their queries are laid side by side; otherwise keys and values are looked up through the index.
    """
    if owner.each is None:
        return attend(query, owner.gather(key), owner.gather(value), padding_mask(owner.gather(valid)))
    packed = query.unflatten(0, (-1, owner.each)).transpose(1, 2)  # (U, H, each, q, D)
    found = attend(packed.flatten(2, 3), key, value, padding_mask(valid))
    return found.unflatten(2, packed.shape[2:4]).transpose(1, 2).flatten(0, 1)
