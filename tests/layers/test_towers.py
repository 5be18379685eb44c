"""Field embeddings, history pooling and the classic towers against their formulas; the cost counters by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auto_research.layers.towers import (
    MLP,
    CrossLayer,
    DCNv2,
    Dice,
    FeatureEmbedding,
    Field,
    ScoreMLP,
    TargetAttention,
    forward_flops,
    matched_pair,
    matched_width,
    parameters_of,
)

FIELDS = (
    Field("user", "user", "id", 5),
    Field("item", "item", "id", 7),
    Field("genres", "content", "multi-hot", 3),
    Field("year", "content", "id", 4),
    Field("last_item", "last", "id", 7, table="item"),
    Field("history", "history", "history", 11),
    Field("statistics", "statistics", "dense", 2),
)


@pytest.fixture
def batch():
    return {
        "user": torch.tensor([1, 2, 3]),
        "item": torch.tensor([3, 1, 6]),
        "genres": torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]]),
        "year": torch.tensor([0, 3, 1]),
        "last_item": torch.tensor([0, 2, 5]),
        "history_item": torch.tensor([[0, 0, 0], [0, 4, 2], [1, 2, 5]]),
        "history_rating": torch.tensor([[0, 0, 0], [0, 8, 6], [10, 2, 8]]),
        "statistics": torch.randn(3, 2),
    }


def columns(name: str, width: int) -> slice:
    groups = ["user", "item", "content", "last", "history", "statistics"]
    return slice(groups.index(name) * width, (groups.index(name) + 1) * width)


def test_each_group_has_its_columns_in_order(batch):
    features = FeatureEmbedding(FIELDS, 5)
    out = features(batch)
    assert out.shape == (3, features.width) == (3, 30)
    tables = features.embeddings
    assert torch.equal(out[:, columns("user", 5)], tables["user"].weight[batch["user"]])
    assert torch.equal(out[:, columns("last", 5)], tables["item"].weight[batch["last_item"]])
    content = out[:, columns("content", 5)]
    genre = tables["genres"].weight  # three of the group's five columns
    torch.testing.assert_close(content[0, :3], (genre[0] + genre[2]) / 2)
    assert content[1, :3].abs().sum() == 0  # no genre
    assert torch.equal(content[:, 3:], tables["year"].weight[batch["year"]])
    expected = batch["statistics"] @ tables["statistics"].weight.T + tables["statistics"].bias
    torch.testing.assert_close(out[:, columns("statistics", 5)], expected)


def test_histories_pool_liked_items_or_all_events(batch):
    features = FeatureEmbedding(FIELDS, 5)
    item = features.embeddings["item"].weight
    pooled = features(batch)[:, columns("history", 5)]
    torch.testing.assert_close(pooled, torch.stack([torch.zeros(5), item[4], (item[1] + item[5]) / 2]))
    features = FeatureEmbedding(FIELDS, 5, history="mean")
    item, rating = features.embeddings["item"].weight, features.ratings["history"].weight
    pooled = features(batch)[:, columns("history", 5)]
    second = (item[4] + rating[8] + item[2] + rating[6]) / 2
    third = (item[1] + rating[10] + item[2] + rating[2] + item[5] + rating[8]) / 3
    torch.testing.assert_close(pooled, torch.stack([torch.zeros(5), second, third]))


def test_din_pooling_weighs_all_events_by_the_candidate(batch):
    features = FeatureEmbedding(FIELDS, 5, history="din")
    item, rating = features.embeddings["item"].weight, features.ratings["history"].weight
    pooled = features(batch)[:, columns("history", 5)]
    attention = features.attention["history"]
    for row in range(3):
        expected = torch.zeros(5)
        for i, r in zip(batch["history_item"][row], batch["history_rating"][row], strict=True):
            if i > 0:
                key, query = item[i] + rating[r], item[batch["item"][row]]
                pair = torch.cat([key, query, key - query, key * query])
                expected = expected + attention.score(pair[None])[0, 0] * key
        torch.testing.assert_close(pooled[row], expected)


def test_a_group_that_is_too_narrow_or_shares_the_item_space_is_refused():
    with pytest.raises(ValueError, match="too few"):
        FeatureEmbedding(FIELDS, 1)
    with pytest.raises(ValueError, match="group of its own"):
        FeatureEmbedding([*FIELDS, Field("other", "last", "id", 3)], 5)


def test_target_attention_does_not_normalise_unless_asked():
    attention, query, keys = TargetAttention(4), torch.randn(6, 4), torch.randn(6, 5, 4)
    valid = torch.rand(6, 5) < 0.6
    valid[0] = False
    weights = attention.weights(query, keys, valid)
    assert (weights[~valid] == 0).all()
    assert (weights.sum(1)[1:] - 1).abs().min() > 1e-3
    assert attention(query, keys, valid)[0].abs().sum() == 0
    attention.softmax = True
    total = attention.weights(query, keys, valid).sum(1)
    torch.testing.assert_close(total, valid.any(1).float())


@pytest.mark.parametrize("softmax", [False, True])
def test_attention_of_many_candidates_is_that_of_each(softmax):
    attention = TargetAttention(4, hidden=5, softmax=softmax).double()
    query, keys = torch.randn(3, 7, 4).double(), torch.randn(3, 5, 4).double()
    valid = torch.rand(3, 5) < 0.6
    valid[0] = False
    expected = torch.stack([attention(query[:, c], keys, valid) for c in range(7)], dim=1)
    torch.testing.assert_close(attention.each(query, keys, valid), expected)


def test_dice_by_formula():
    dice, x = Dice(3), torch.randn(50, 3) * 2 + 1
    with torch.no_grad():
        dice.alpha.copy_(torch.tensor([0.1, 0.2, -0.3]))
    p = torch.sigmoid((x - x.mean(0)) / x.var(0, unbiased=False).sqrt())
    torch.testing.assert_close(dice(x), p * x + (1 - p) * dice.alpha * x)


def test_cross_layer_by_formula_and_with_a_rank():
    first, x = torch.randn(3, 4), torch.randn(3, 4)
    layer = CrossLayer(4)
    torch.testing.assert_close(layer(first, x), first * (x @ layer.map.weight.T + layer.map.bias) + x)
    low = CrossLayer(4, rank=2)
    expected = first * (x @ low.map[0].weight.T @ low.map[1].weight.T + low.map[1].bias) + x
    torch.testing.assert_close(low(first, x), expected)


def test_dcn_joins_cross_and_deep():
    model, x = DCNv2(4, 6, 5), torch.randn(3, 4)
    crossed = model.crosses[1](x, model.crosses[0](x, x))
    deep = torch.relu(model.deep[0](x))
    expected = torch.cat([crossed, deep], 1) @ model.head.weight[0] + model.head.bias
    torch.testing.assert_close(model(x), expected)


def test_mlp_has_an_activation_after_each_layer_but_the_last():
    assert [type(m) for m in MLP(4, 3, 2, 1)] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(m) for m in MLP(4, 3, 1, activation="dice")] == [nn.Linear, Dice, nn.Linear]
    assert ScoreMLP(4, 3)(torch.randn(5, 4)).shape == (5,)


def test_flops_count_two_for_each_weight_of_a_product():
    model, x = ScoreMLP(4, 3, 2), torch.randn(10, 4)
    assert forward_flops(lambda: model(x)) == 10 * 2 * (4 * 3 + 3 * 2 + 2 * 1)


def test_matched_width_is_the_nearest_one():
    def parameters(width: int) -> int:
        return parameters_of(lambda: nn.Linear(10, width))

    assert parameters(3) == 33
    assert matched_width(parameters, 33) == 3
    assert matched_width(parameters, 40) == 4
    assert matched_width(parameters, 1) == 1
    assert matched_width(parameters, 11 * 1000 + 4) == 1000


def test_counting_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    assert parameters_of(lambda: FeatureEmbedding(FIELDS, 5)) == sum(
        p.numel() for p in FeatureEmbedding(FIELDS, 5).parameters()
    )
    torch.set_rng_state(state)
    parameters_of(lambda: FeatureEmbedding(FIELDS, 5, history="din"))
    assert torch.equal(state, torch.get_rng_state())


def test_two_widths_are_matched_to_two_costs():
    def cost(first: int, second: int) -> tuple[int, int]:
        return 100 + 7 * first + 11 * second, 50 + 300 * first + 11 * second

    assert matched_pair(cost, cost(37, 90)) == (37, 90)
    assert matched_pair(cost, (cost(5, 2)[0] + 3, cost(5, 2)[1])) == (5, 2)
    assert matched_pair(cost, (0, 10_000)) == (34, 1)  # not (34, -31)


@pytest.mark.parametrize("masked", [True, False])
def test_flops_of_attention_are_its_two_products(masked):
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    mask = torch.ones(4, 6, dtype=torch.bool) if masked else None
    flops = forward_flops(lambda: nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask))
    assert flops == 2 * (2 * 3) * 4 * 6 * (8 + 8)


def test_the_network_of_din_has_the_hidden_width_that_is_asked_for():
    features = FeatureEmbedding(FIELDS, 5, history="din", attention=7)
    assert features.attention["history"].score[0].weight.shape == (7, 20)
