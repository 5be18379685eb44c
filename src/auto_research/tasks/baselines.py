"""Baselines that every next-item paper can be held against: counts, neighbours, a linear model, text, SASRec.

All follow the protocol of `tasks.next_item`: `scores(batch) -> (B, num_items + 1)`. Those without parameters to train
read the whole `history` of a batch where there is one, and are finished once built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.sequences import SequenceSplit
from auto_research.layers.item_loss import LossKind, item_loss
from auto_research.layers.transformer import Activation, CausalTransformer, init_transformer
from auto_research.tasks.base import Batch
from auto_research.tasks.bm25 import BM25Index

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def history_of(batch: Batch) -> Tensor:
    """The whole history (B, H) where the task gives it, otherwise the sequence; ids, 0 is padding."""
    return batch.get("history", batch["sequence"])


def history_matrix(batch: Batch, num_items: int) -> Tensor:
    """(B, num_items + 1) float: 1 for each item of the history."""
    history = history_of(batch)
    seen = torch.zeros(len(history), num_items + 1, device=history.device)
    seen.scatter_(1, history, 1.0)
    seen[:, 0] = 0.0
    return seen


def training_matrix(split: SequenceSplit) -> csr_matrix:
    """Users x (items + 1) binary matrix of the training events, in float32."""
    from scipy.sparse import csr_matrix

    user = np.repeat(np.arange(split.num_users), np.diff(split.offsets))
    shape = (split.num_users, split.num_items + 1)
    matrix = csr_matrix((np.ones(len(user), dtype=np.float32), (user, split.items + 1)), shape=shape)
    matrix.data[:] = 1.0  # a repeated event counts once
    return matrix


def training_counts(split: SequenceSplit) -> Tensor:
    """Training events of each id (num_items + 1,), float32."""
    return torch.from_numpy(np.bincount(split.items + 1, minlength=split.num_items + 1)).float()


class Random(nn.Module):
    """Inner products of random vectors: scores that are repeatable and know nothing."""

    asked: Tensor
    offered: Tensor

    def __init__(self, num_items: int, seed: int = 0, dim: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("asked", torch.randn(num_items + 1, dim, generator=generator))
        self.register_buffer("offered", torch.randn(num_items + 1, dim, generator=generator))
        self.asked[0] = 0.0

    def scores(self, batch: Batch) -> Tensor:
        return self.asked[history_of(batch)].sum(1) @ self.offered.T


class MostPopular(nn.Module):
    """The popularity floor: an item's score is its number of training events."""

    counts: Tensor

    def __init__(self, split: SequenceSplit) -> None:
        super().__init__()
        self.register_buffer("counts", training_counts(split))

    def scores(self, batch: Batch) -> Tensor:
        return self.counts.expand(len(batch["sequence"]), -1)


class Neighbours(nn.Module):
    """A sparse item-to-item matrix with K entries a row; those that a row does not need have weight 0.

    Shapes: index (I + 1, K) int64 ids, weight (I + 1, K) float32.
    """

    index: Tensor
    weight: Tensor

    def __init__(self, index: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.register_buffer("weight", weight)

    def forward(self, items: Tensor) -> Tensor:
        """Sum of the rows of items (B, H); returns (B, I + 1)."""
        total = torch.zeros(len(items), len(self.index), dtype=self.weight.dtype, device=items.device)
        return total.scatter_add_(1, self.index[items].flatten(1), self.weight[items].flatten(1))


class ItemKNN(nn.Module):
    """Item-based nearest neighbours: an item scores the cosine similarities to the items of the history.

    Similarity of items i and j is n_ij / (sqrt(n_i n_j) + shrinkage) with n_ij the users who have both; each item
    of the history speaks for its `neighbours` most similar items.
    """

    def __init__(self, split: SequenceSplit, neighbours: int = 100, shrinkage: float = 10.0, block: int = 512) -> None:
        super().__init__()
        users = training_matrix(split)
        items = users.T.tocsr()
        size = np.sqrt(np.asarray(users.sum(0)).ravel())
        index, weight = [], []
        for start in range(0, len(size), block):  # a block of rows at a time is dense
            together = (items[start : start + block] @ users).toarray()
            similarity = together / np.maximum(np.outer(size[start : start + block], size) + shrinkage, 1e-12)
            similarity[np.arange(len(similarity)), np.arange(start, start + len(similarity))] = 0.0
            best = torch.from_numpy(similarity).float().topk(min(neighbours, len(size)), dim=1)
            index.append(best.indices)
            weight.append(best.values)
        self.neighbours = Neighbours(torch.cat(index), torch.cat(weight))

    def scores(self, batch: Batch) -> Tensor:
        return self.neighbours(history_of(batch))


class MarkovCounts(nn.Module):
    """First-order Markov chain: how often an item followed the latest one, popularity among the rest.

    The score is count(latest -> item) + popularity(item) / (1 + total popularity), so that popularity only orders
    items that followed equally often.
    """

    popularity: Tensor

    def __init__(self, split: SequenceSplit) -> None:
        super().__init__()
        from scipy.sparse import csr_matrix

        follows = np.ones(max(0, len(split.items) - 1), dtype=bool)
        borders = split.offsets[1:-1]
        follows[borders[(borders > 0) & (borders < len(split.items))] - 1] = False
        before, after = split.items[:-1][follows] + 1, split.items[1:][follows] + 1
        shape = (split.num_items + 1, split.num_items + 1)
        counts = csr_matrix((np.ones(len(before), dtype=np.float32), (before, after)), shape=shape)
        # All entries of each row, side by side.
        filled = np.diff(counts.indptr)
        row = np.repeat(np.arange(len(filled)), filled)
        place = np.arange(len(row)) - counts.indptr[row]
        index = np.zeros((len(filled), max(1, filled.max())), dtype=np.int64)
        weight = np.zeros(index.shape, dtype=np.float32)
        index[row, place], weight[row, place] = counts.indices, counts.data
        self.transitions = Neighbours(torch.from_numpy(index), torch.from_numpy(weight))
        popularity = training_counts(split)
        self.register_buffer("popularity", popularity / (1.0 + popularity.sum()))

    def scores(self, batch: Batch) -> Tensor:
        return self.transitions(batch["sequence"][:, -1:]) + self.popularity


class EASE(nn.Module):
    """Embarrassingly shallow autoencoder (arXiv:1905.03375), in closed form.

    With X the binary user-item matrix and P = (X'X + l2 I)^-1, the weights are B = I - P diag(1 / diag P) and a
    history h scores h B. With fewer users than items P comes from the smaller users' system,
    P = (I - X' (X X' + l2 I)^-1 X) / l2, and the item-item matrix is never built.
    """

    weights: Tensor | None
    users: Tensor | None
    solved: Tensor | None
    inverse_diagonal: Tensor | None

    def __init__(self, split: SequenceSplit, l2: float = 250.0) -> None:
        super().__init__()
        if l2 <= 0:
            raise ValueError(f"l2 must be positive, got {l2}")
        self.l2 = l2
        matrix = training_matrix(split)[:, 1:]
        small = split.num_users < split.num_items
        system = (matrix @ matrix.T if small else matrix.T @ matrix).toarray().astype(np.float64)
        system[np.diag_indices_from(system)] += l2
        if small:
            users = matrix.toarray()
            solved = np.linalg.solve(system, users)
            diagonal = (1.0 - (users * solved).sum(0)) / l2
            tensors = {"users": users, "solved": solved, "inverse_diagonal": 1.0 / diagonal, "weights": None}
        else:
            inverse = np.linalg.inv(system)
            weights = -inverse / np.diag(inverse)
            np.fill_diagonal(weights, 0.0)
            tensors = {"users": None, "solved": None, "inverse_diagonal": None, "weights": weights}
        for name, value in tensors.items():
            self.register_buffer(name, None if value is None else torch.from_numpy(value).float())

    def scores(self, batch: Batch) -> Tensor:
        num_items = (self.weights if self.weights is not None else self.solved).shape[1]  # type: ignore[union-attr]
        seen = history_matrix(batch, num_items)[:, 1:]
        if self.weights is not None:
            out = seen @ self.weights
        else:
            assert self.users is not None
            assert self.solved is not None
            assert self.inverse_diagonal is not None
            precision = (seen - (seen @ self.users.T) @ self.solved) / self.l2  # h P
            out = seen - precision * self.inverse_diagonal
        return nn.functional.pad(out, (1, 0))


class BM25(nn.Module):
    """BM25 (see `tasks.bm25`) between the titles of the latest events (the query) and every item's title."""

    def __init__(self, titles: Sequence[str], recent: int = 10, k1: float = 1.2, b: float = 0.75) -> None:
        super().__init__()
        self.recent = recent
        self.index = BM25Index(titles, k1, b)

    def scores(self, batch: Batch) -> Tensor:
        return self.index(self.index.counts_of_items(batch["sequence"][:, -self.recent :]))


class SASRec(nn.Module):
    """Self-attentive sequential recommendation (arXiv:1808.09781): a causal transformer over item embeddings.

    Deviates from the paper: cross-entropy over the catalogue or over shared sampled negatives instead of one binary
    negative a position (`loss="bce"` gives that), and pre-norm throughout. Learned positions count back from the
    latest event, as left padding does in the original, so padding has no influence.

    Args:
        hidden: width of the feed-forward network; the width itself, as in the paper, by default.
        loss: see `layers.item_loss`; `negatives` belongs to `sampled` and `bce`.
        window: how many latest events a position may attend to, itself included; None means all. With 1 the model
            is a first-order one of the same size.
    """

    def __init__(
        self,
        num_items: int,
        dim: int = 64,
        heads: int = 2,
        layers: int = 2,
        hidden: int | None = None,
        max_length: int = 50,
        dropout: float = 0.2,
        loss: LossKind = "softmax",
        negatives: int = 1024,
        activation: Activation = "relu",
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.max_length, self.loss_kind, self.negatives, self.window = max_length, loss, negatives, window
        self.items = nn.Embedding(num_items + 1, dim, padding_idx=0)
        self.positions = nn.Embedding(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.transformer = CausalTransformer(dim, heads, hidden or dim, layers, dropout, activation=activation)
        init_transformer(self)

    def encode(self, sequence: Tensor, latest: int | None = None) -> Tensor:
        """States (B, T, dim) of ids (B, T); state t has seen events 0..t. Only the last `max_length` are read.

        With `latest=n` only the last n states are computed.
        """
        sequence = sequence[:, -self.max_length :]
        position = torch.arange(sequence.shape[1] - 1, -1, -1, device=sequence.device)
        x = self.items(sequence) * math.sqrt(self.items.embedding_dim) + self.positions(position)
        near = None if self.window is None else position[None, :] < position[:, None] + self.window
        return self.transformer(self.dropout(x), sequence > 0, mask=near, latest=latest)

    def loss(self, batch: Batch) -> Tensor:
        states, target = self.encode(batch["sequence"]), batch["target"][:, -self.max_length :]
        return item_loss(states, target, self.items.weight, kind=self.loss_kind, negatives=self.negatives)

    def scores(self, batch: Batch) -> Tensor:
        return self.encode(batch["sequence"], latest=1)[:, -1] @ self.items.weight.T
