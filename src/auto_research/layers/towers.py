"""From feature fields to one score: embeddings, history pooling, the classic towers, and what they cost.

Letters: B examples, F width of all embedded fields side by side, T length of a history, D width of an item vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from auto_research.runtime.flops import count_flops, flop_formula

Kind = Literal["id", "multi-hot", "dense", "history"]
Pooling = Literal["liked-mean", "mean", "din"]


@dataclass(frozen=True)
class Field:
    """One input of a ranking model.

    Attributes:
        name: key in the batch. An `id` is int64 (B,), `multi-hot` and `dense` are float (B, size). A `history` `h` is
            `h_item` and `h_rating`, int64 (B, T) padded with 0 on the left.
        group: fields of a group are adjacent and belong to one feature token.
        size: number of ids (0 is one of them and means "unknown"), or of columns; of ratings for a history.
        table: the `id` field whose vectors are used instead of own ones.
    """

    name: str
    group: str
    kind: Kind
    size: int
    table: str | None = None


def groups_of(fields: Sequence[Field]) -> dict[str, list[Field]]:
    """Fields by group, in order of first appearance."""
    groups: dict[str, list[Field]] = {}
    for field in fields:
        groups.setdefault(field.group, []).append(field)
    return groups


class FeatureEmbedding(nn.Module):
    """All fields embedded and laid side by side, each group in `width` columns that its fields share out evenly.

    An id is a row of its table, a multi-hot field the mean of its rows, and dense values pass one linear map. A
    history is pooled in the item space: `liked-mean` is the mean vector of its liked items (rating code at least
    `liked`), `mean` that of all its events (item plus rating vector), `din` target attention over the same events.

    Args:
        width: columns of a group (D).
        history: how histories are pooled.
        candidate: the id field of the item to be scored.
        liked: smallest rating code that counts as liked.
        attention: hidden width of the network behind `din`.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        width: int,
        *,
        history: Pooling = "liked-mean",
        candidate: str = "item",
        liked: int = 8,
        attention: int = 36,
    ) -> None:
        super().__init__()
        self.fields = tuple(fields)
        self.candidate, self.liked, self.pooling = candidate, liked, history
        self.embeddings = nn.ModuleDict()
        self.attention = nn.ModuleDict()
        self.ratings = nn.ModuleDict()
        for group in groups_of(fields).values():
            if width < len(group):
                raise ValueError(f"{width} columns are too few for the {len(group)} fields of '{group[0].group}'")
            for i, field in enumerate(group):
                columns = width // len(group) + (i < width % len(group))
                if (field.table is not None or field.kind == "history") and len(group) > 1:
                    raise ValueError(f"field '{field.name}' lives in the item space and needs a group of its own")
                if field.kind == "history":
                    if history == "din":
                        self.attention[field.name] = TargetAttention(width, attention)
                    if history != "liked-mean":
                        self.ratings[field.name] = embedding_table(field.size, width)
                elif field.kind == "dense":
                    self.embeddings[field.name] = nn.Linear(field.size, columns)
                elif field.table is None:
                    self.embeddings[field.name] = embedding_table(field.size, columns)
        self.width = width * len(groups_of(fields))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Batch of B examples -> (B, F)."""
        return torch.cat([self._embed(field, batch) for field in self.fields], dim=-1)

    def _embed(self, field: Field, batch: dict[str, Tensor]) -> Tensor:
        if field.kind == "history":
            return self._pool(field, batch)
        layer = self.embeddings[field.table or field.name]
        value = batch[field.name]
        if field.kind == "multi-hot":
            value = value.to(layer.weight.dtype)
            return value / value.sum(-1, keepdim=True).clamp(min=1) @ layer.weight
        return layer(value.to(layer.weight.dtype) if field.kind == "dense" else value)

    def _pool(self, field: Field, batch: dict[str, Tensor]) -> Tensor:
        items, rating = batch[f"{field.name}_item"], batch[f"{field.name}_rating"]
        table = self.embeddings[self.candidate].weight
        if self.pooling == "din":
            keys = F.embedding(items, table) + self.ratings[field.name](rating)
            return self.attention[field.name](F.embedding(batch[self.candidate], table), keys, items > 0)
        kept = (rating >= self.liked) if self.pooling == "liked-mean" else (items > 0)
        share = kept.to(table.dtype)
        share = share / share.sum(1, keepdim=True).clamp(min=1)
        pooled = F.embedding_bag(items, table, per_sample_weights=share, mode="sum")
        if self.pooling == "liked-mean":
            return pooled
        return pooled + F.embedding_bag(rating, self.ratings[field.name].weight, per_sample_weights=share, mode="sum")


def embedding_table(size: int, columns: int) -> nn.Embedding:
    """Vectors of length about one half, so that no id dominates before it is trained."""
    table = nn.Embedding(size, columns)
    nn.init.normal_(table.weight, std=0.5 / columns**0.5)
    return table


class Dice(nn.Module):
    """Data-adaptive activation of DIN: p·x + (1 - p)·α·x with p = σ(batch-normalised x), α learned per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) -> (B, C)."""
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


class TargetAttention(nn.Module):
    """Pooling of a history by its relevance to the candidate (DIN, arXiv:1706.06978).

    A small network sees key, query, their difference and their product, and gives each position a weight. As in
    DIN the weights are not normalised, so that the sum keeps the intensity of the interest; `softmax` normalises
    them. A history without a real position gives zeros.
    """

    def __init__(self, width: int, hidden: int = 36, *, softmax: bool = False) -> None:
        super().__init__()
        self.softmax = softmax
        self.score = nn.Sequential(nn.Linear(4 * width, hidden), nn.PReLU(hidden), nn.Linear(hidden, 1))
        self.scale = width**-0.5

    def weights(self, query: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
        """query (B, D), keys (B, T, D), valid (B, T) bool -> (B, T), zero at padding."""
        wide = query[:, None].expand_as(keys)
        pairs = torch.cat([keys, wide, keys - wide, keys * wide], dim=-1)
        # PReLU takes its channels in dimension 1, hence the flattening.
        score = self.score(pairs.flatten(0, 1)).view(valid.shape)
        if not self.softmax:
            return score.masked_fill(~valid, 0.0)
        score = (score * self.scale).masked_fill(~valid, torch.finfo(score.dtype).min)
        return score.softmax(-1) * valid

    def forward(self, query: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
        """query (B, D), keys (B, T, D), valid (B, T) bool -> (B, D)."""
        return torch.einsum("bt,btd->bd", self.weights(query, keys, valid), keys)

    def each(self, query: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
        """C candidates of each history: query (B, C, D), keys (B, T, D), valid (B, T) -> (B, C, D).

        Equals `forward` for every candidate. The first layer is linear in key, query, difference and product, so that
        the parts of key and of query are computed once and only the product's is for pairs.
        """
        first, activation, last = self.score
        key, asked, difference, product = first.weight.chunk(4, dim=1)  # type: ignore[operator]
        pairs = keys @ (query[:, :, None] * product).flatten(1, 2).mT  # (B, T, C·hidden)
        hidden = pairs.unflatten(-1, (query.shape[1], -1))
        hidden = hidden + F.linear(keys, key + difference)[:, :, None]
        hidden = hidden + F.linear(query, asked - difference, first.bias)[:, None]  # type: ignore[arg-type]
        score = last(activation(hidden.flatten(0, 2))).view(hidden.shape[:-1])  # (B, T, C)
        if self.softmax:
            lowest = torch.finfo(score.dtype).min
            score = (score * self.scale).masked_fill(~valid[..., None], lowest).softmax(1)
        return score.masked_fill(~valid[..., None], 0.0).mT @ keys


class MLP(nn.Sequential):
    """Linear layers with an activation after each but the last: (B, widths[0]) -> (B, widths[-1])."""

    def __init__(self, *widths: int, activation: Literal["relu", "gelu", "prelu", "dice"] = "relu") -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), _activation(activation, outputs)]
        super().__init__(*layers[:-1])


def _activation(name: str, channels: int) -> nn.Module:
    if name == "prelu":
        return nn.PReLU(channels)
    if name == "dice":
        return Dice(channels)
    return nn.GELU() if name == "gelu" else nn.ReLU()


class ScoreMLP(nn.Module):
    """DLRM-MLP: a plain network over all embedded fields, (B, F) -> logit (B,)."""

    def __init__(
        self, inputs: int, *hidden: int, activation: Literal["relu", "gelu", "prelu", "dice"] = "relu"
    ) -> None:
        super().__init__()
        self.layers = MLP(inputs, *hidden, 1, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> (B,)."""
        return self.layers(x).squeeze(-1)


class CrossLayer(nn.Module):
    """x_{l+1} = x_0 ⊙ (W x_l + b) + x_l (DCN-V2, arXiv:2008.13535); with a rank, W = U V."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        full = nn.Linear(width, width)
        self.map = full if rank is None else nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """x_0 (B, F) and x_l (B, F) -> x_{l+1} (B, F)."""
        return first * self.map(x) + x


class DCNv2(nn.Module):
    """Cross network and deep network side by side, joined by one linear map: (B, F) -> logit (B,)."""

    def __init__(self, inputs: int, *hidden: int, crosses: int = 2, rank: int | None = None) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(CrossLayer(inputs, rank) for _ in range(crosses))
        self.deep = nn.Sequential(MLP(inputs, *hidden), nn.ReLU())
        self.head = nn.Linear(inputs + hidden[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, F) -> (B,)."""
        crossed = x
        for cross in self.crosses:
            crossed = cross(x, crossed)
        return self.head(torch.cat([crossed, self.deep(x)], dim=-1)).squeeze(-1)


def parameters_of(build: Callable[[], nn.Module]) -> int:
    """Trainable scalars of what `build` makes; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in build().parameters() if p.requires_grad)


def matched_width(parameters: Callable[[int], int], target: int) -> int:
    """The width, at least 1, whose parameter count is nearest to `target`; `parameters(width)` must grow."""
    high = 1
    while parameters(high) < target:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if parameters(middle) <= target else (low, middle)
    return min((low, high), key=lambda width: abs(parameters(width) - target))


def matched_pair(cost: Callable[[int, int], tuple[int, int]], target: tuple[int, int]) -> tuple[int, int]:
    """Two widths, each at least 1, at which two costs (say parameters and FLOPs) come nearest to their targets.

    Both costs must be affine in both widths, as those of hidden layers are; they are probed at three points.
    """
    low, step = 4, 8
    base = torch.tensor(cost(low, low), dtype=torch.float64)
    slopes = [
        torch.tensor(cost(*point), dtype=torch.float64) - base for point in ((low + step, low), (low, low + step))
    ]
    rise = torch.stack(slopes, 1) / step
    first, second = (torch.linalg.solve(rise, torch.tensor(target, dtype=torch.float64) - base) + low).round().tolist()
    return max(1, int(first)), max(1, int(second))


def forward_flops(run: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products that `run()` dispatches, by their formulas (2·m·n·k each).

    Attention counts as its two products. Element-wise work and table look-ups are not counted. Divide by the batch
    size for a figure per sample.
    """
    with torch.no_grad(), _FlopCounter() as counter:
        run()
    return counter.total


class _FlopCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_formula(func)
        if formula is not None:
            self.total += count_flops(formula, args, kwargs or {}, out)
        return out
