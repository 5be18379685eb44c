"""The in-batch softmax against a loop, and what it may never treat as a negative."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.layers.losses import in_batch_softmax


def looped(users, items, ids, positive, scale):
    """The definition, pair by pair, in float64."""
    total, pairs = 0.0, 0
    for i, j, k in positive.nonzero().tolist():
        own = scale * float(F.cosine_similarity(users[i, j], items[i, k], dim=0))
        below = math.exp(own)
        for z in range(len(ids)):
            for m in range(ids.shape[1]):
                if z != i and ids[z, m] > 0 and ids[z, m] not in ids[i]:
                    below += math.exp(scale * float(F.cosine_similarity(users[i, j], items[z, m], dim=0)))
        total -= own - math.log(below)
        pairs += 1
    return total / max(1, pairs)


def example(seed: int, rows: int = 4, states: int = 3, targets: int = 2, catalogue: int = 6):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, catalogue, (rows, targets), generator=draw)
    table = torch.randn(catalogue, 5, generator=draw, dtype=torch.float64)
    users = torch.randn(rows, states, 5, generator=draw, dtype=torch.float64)
    positive = (torch.rand(rows, states, targets, generator=draw) < 0.6) & (ids > 0)[:, None]
    return users, table[ids], ids, positive


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**16), st.sampled_from([1.0, 5.0, 20.0]))
def test_equals_the_definition_pair_by_pair(seed: int, scale: float) -> None:
    inputs = example(seed)
    found = in_batch_softmax(*inputs, scale=scale)
    assert float(found) == pytest.approx(looped(*inputs, scale), rel=1e-9, abs=1e-12)


def test_one_state_and_one_item_a_row_is_cross_entropy_with_collisions_masked() -> None:
    draw = torch.Generator().manual_seed(0)
    users, items = (torch.randn(5, 1, 4, generator=draw) for _ in range(2))
    ids = torch.tensor([[3], [1], [3], [2], [4]])
    logits = 20 * F.normalize(users[:, 0], dim=-1) @ F.normalize(items[:, 0], dim=-1).T
    logits[0, 2] = logits[2, 0] = -1e4
    expected = F.cross_entropy(logits, torch.arange(5))
    torch.testing.assert_close(in_batch_softmax(users, items, ids, torch.ones(5, 1, 1, dtype=torch.bool)), expected)


def test_rows_with_the_same_target_are_never_each_others_negatives() -> None:
    users, items, ids, _ = example(1)
    ids = torch.tensor([[1, 2], [2, 3], [4, 0], [5, 1]])
    positive = torch.zeros(4, 3, 2, dtype=torch.bool)
    positive[0] = True  # row 0 wants items 1 and 2
    items = items.clone().requires_grad_()
    in_batch_softmax(users, items, ids, positive).backward()
    touched = (items.grad != 0).any(-1)
    # Its own items as positives; of the others, neither 2 (row 1) nor 1 (row 3) nor padding.
    assert touched.tolist() == [[True, True], [False, True], [True, False], [True, False]]


def test_positives_of_one_row_do_not_compete() -> None:
    users, items, ids, _ = example(2)
    ids = torch.tensor([[1, 2], [3, 4], [5, 0], [0, 0]])
    positive = torch.zeros(4, 3, 2, dtype=torch.bool)
    positive[0, 1, 0] = True
    items = items.clone().requires_grad_()
    in_batch_softmax(users, items, ids, positive).backward()
    assert not items.grad[0, 1].any()


def test_a_batch_without_negatives_or_pairs_costs_nothing_and_stays_finite() -> None:
    users, items, _, _ = example(3)
    users, items = users.requires_grad_(), items.requires_grad_()
    ids = torch.full((4, 2), 7)
    for positive in (torch.ones(4, 3, 2, dtype=torch.bool), torch.zeros(4, 3, 2, dtype=torch.bool)):
        loss = in_batch_softmax(users, items, ids, positive)
        assert loss == 0.0
        for gradient in torch.autograd.grad(loss, (users, items)):
            assert gradient.isfinite().all()


def test_the_scale_lets_the_softmax_become_certain() -> None:
    table = torch.eye(6)[None].transpose(0, 1)  # six rows with orthogonal users and items
    ids, positive = torch.arange(1, 7)[:, None], torch.ones(6, 1, 1, dtype=torch.bool)
    assert in_batch_softmax(table, table, ids, positive) < 1e-6
    # Without a scale even a perfect pair keeps most of its loss: log(1 + 5 / e).
    flat = in_batch_softmax(table, table, ids, positive, scale=1.0)
    assert float(flat) == pytest.approx(math.log(1 + 5 / math.e), rel=1e-5)


def test_narrow_vectors_give_a_float32_loss() -> None:
    users, items, ids, positive = example(4)
    loss = in_batch_softmax(users.bfloat16(), items.bfloat16(), ids, positive)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(in_batch_softmax(users, items, ids, positive)), rel=0.05)
