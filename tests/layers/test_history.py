"""Events of a history as vectors, by hand; places that stay when events are appended."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.history import HistoryFeatures, slots
from auto_research.layers.towers import FeatureEmbedding, Field

FIELDS = (Field("item", "item", "id", 7), Field("genres", "content", "multi-hot", 3), Field("year", "content", "id", 4))


def test_an_event_is_item_genres_rating_and_gap_side_by_side():
    features = FeatureEmbedding(FIELDS, 6)
    layer = HistoryFeatures(features, ratings=11, gaps=33, width=5)
    batch = {
        "history_item": torch.tensor([[0, 4, 2]]),
        "history_rating": torch.tensor([[0, 8, 3]]),
        "history_gap": torch.tensor([[0, 12, 1]]),
        "history_genres": torch.tensor([[[0.0, 0, 0], [1, 0, 1], [0, 1, 0]]]),
    }
    out = layer(features, batch)
    assert out.shape == (1, 3, layer.width) == (1, 3, 6 + 3 + 5 + 5)
    genre = features.embeddings["genres"].weight
    expected = torch.cat(
        [features.embeddings["item"].weight[4], (genre[0] + genre[2]) / 2, layer.rating.weight[8], layer.gap.weight[12]]
    )
    torch.testing.assert_close(out[0, 1], expected)
    # The tables belong to the candidate's fields: one copy is trained and saved.
    assert {name.split(".")[0] for name in layer.state_dict()} == {"rating", "gap"}
    out.sum().backward()
    assert features.embeddings["item"].weight.grad[4].abs().sum() > 0


@given(length=st.integers(1, 9), real=st.integers(0, 9), padding=st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_slots_count_from_the_oldest_event_and_stay_when_events_are_appended(length, real, padding):
    valid = torch.arange(length)[None] >= length - min(real, length)
    kept = slots(valid)[0][valid[0]]
    assert kept.tolist() == list(range(min(real, length)))
    longer = torch.cat([torch.zeros(1, padding, dtype=torch.bool), valid, torch.ones(1, 2, dtype=torch.bool)], 1)
    assert slots(longer)[0][longer[0]].tolist()[: len(kept)] == kept.tolist()
