"""A behaviour history as vectors: every event's item, content, rating and time gap side by side.

Letters: B examples, T events, G genres, F width of an event.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.towers import FeatureEmbedding, embedding_table


class HistoryFeatures(nn.Module):
    """Each event of a history as [item; genres; rating; gap], item and genres by the tables of the candidate's fields.

    The tables stay owned by `features`: they are passed in when the events are embedded, so that they are trained and
    saved once.

    Args:
        features: has the id field `item` and the multi-hot field `genres`.
        ratings, gaps: number of rating and gap codes (0 is padding).
        width: columns of the rating's and of the gap's vector.
    """

    def __init__(self, features: FeatureEmbedding, *, ratings: int, gaps: int, width: int) -> None:
        super().__init__()
        self.rating = embedding_table(ratings, width)
        self.gap = embedding_table(gaps, width)
        self.width = content_width(features) + 2 * width

    def forward(self, features: FeatureEmbedding, batch: dict[str, Tensor]) -> Tensor:
        """`history_item`, `history_rating`, `history_gap` (B, T) and `history_genres` (B, T, G) -> (B, T, F).

        Padding (item 0) gives whatever its codes give: mask it where events are read.
        """
        rating, gap = self.rating(batch["history_rating"]), self.gap(batch["history_gap"])
        return torch.cat([event_content(features, batch), rating, gap], dim=-1)


def event_content(features: FeatureEmbedding, batch: dict[str, Tensor]) -> Tensor:
    """What each event was about, [item; genres], by the tables of the candidate's fields: (B, T, `content_width`)."""
    genres = _weight(features, "genres")
    shares = batch["history_genres"].to(genres.dtype)
    mixed = shares / shares.sum(-1, keepdim=True).clamp(min=1) @ genres
    return torch.cat([F.embedding(batch["history_item"], _weight(features, "item")), mixed], dim=-1)


def content_width(features: FeatureEmbedding) -> int:
    """Columns of `event_content`."""
    return sum(_weight(features, name).shape[1] for name in ("item", "genres"))


def _weight(features: FeatureEmbedding, name: str) -> Tensor:
    table = features.embeddings[name]
    assert isinstance(table, nn.Embedding)
    return table.weight


def slots(valid: Tensor) -> Tensor:
    """Place of each event counted from the oldest real one, (B, T) bool -> int64; 0 at padding before it.

    Unlike a place counted from the latest event it stays when later events are appended, and so do cached keys.
    """
    return (valid.long().cumsum(1) - 1).clamp(min=0)
