"""Rows, lists and metrics of generative retrieval; content vectors."""

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.data.sequences import Interactions, ItemTable, leave_one_out
from auto_research.layers.encoder_decoder import GeneratorConfig, SemanticIdTransformer
from auto_research.layers.semantic_ids import SemanticIds
from auto_research.tasks.baselines import MostPopular
from auto_research.tasks.content import centred_unit, tfidf_vectors
from auto_research.tasks.semantic_retrieval import SemanticRetrieval, fewer_cases, without_history

DEVICE = torch.device("cpu")


def split(users: int = 25, items: int = 30, seed: int = 0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 12, users)
    user = np.repeat(np.arange(users), lengths)
    item = draw.integers(0, items, len(user))
    item[:items] = np.arange(items)
    return leave_one_out(
        Interactions.from_events(
            "toy",
            user,
            item,
            np.full(len(user), 5.0),
            np.arange(len(user)),
            ItemTable.of_ids([str(i) for i in range(items)]),
        )
    )


class Fixed(nn.Module):
    """The same list or the same scores for everybody."""

    def __init__(self, scores: torch.Tensor, as_list: bool) -> None:
        super().__init__()
        self.fixed = scores
        if as_list:
            self.recommend = self._recommend
        else:
            self.scores = self._scores

    def _scores(self, batch):
        return self.fixed.expand(len(batch["sequence"]), -1)

    def _recommend(self, batch, top):
        order = self.fixed[1:].argsort(descending=True, stable=True) + 1
        return order[:top].expand(len(batch["sequence"]), -1)


def test_every_event_but_a_users_first_is_a_target_once_with_its_own_prefix():
    data = split()
    task = SemanticRetrieval(data, max_length=4)
    wanted = sorted(
        (u, tuple(row[max(0, j - 4) : j] + 1), row[j] + 1)
        for u in range(data.num_users)
        for row in [data.items[data.offsets[u] : data.offsets[u + 1]]]
        for j in range(1, len(row))
    )
    found = []
    for batch in task.epoch(np.random.default_rng(0), 7, DEVICE):
        for user, sequence, target in zip(batch["user"], batch["sequence"], batch["target"], strict=True):
            found.append((int(user), tuple(sequence[sequence > 0].numpy()), int(target[-1])))
    assert sorted(found) == wanted
    assert len(found) == task.training_targets
    assert task.steps_per_epoch(7) == -(-len(found) // 7)


def test_no_held_out_event_is_in_a_training_row():
    data = split()
    task = SemanticRetrieval(data, max_length=20)
    for batch in task.epoch(np.random.default_rng(0), 8, DEVICE):
        for user, sequence, target in zip(batch["user"], batch["sequence"], batch["target"], strict=True):
            own = data.items[data.offsets[user] : data.offsets[user + 1]] + 1
            row = [*sequence[sequence > 0].tolist(), int(target[-1])]
            assert row == own[: len(row)].tolist()


def test_batches_depend_on_the_seed_alone():
    task = SemanticRetrieval(split(), max_length=5)
    first, second, other = (task.batches(seed, 6, DEVICE) for seed in (1, 1, 2))
    same = [torch.equal(next(first)["target"], next(second)["target"]) for _ in range(5)]
    assert all(same)
    rows = [next(other)["target"] for _ in range(5)]
    again = (batch["target"] for batch in task.batches(1, 6, DEVICE))
    assert any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(rows, again, strict=False))


def test_lists_and_scores_are_judged_alike():
    data = split()
    task = SemanticRetrieval(data, list_length=30)
    scores = torch.rand(31, generator=torch.Generator().manual_seed(0))
    for part in ("validation", "test"):
        by_list = task.evaluate(Fixed(scores, True), part, DEVICE)
        by_score = task.evaluate(Fixed(scores, False), part, DEVICE)
        for name, value in by_score.values().items():
            assert by_list[name] == pytest.approx(value, nan_ok=True), name
        for name, value in by_score.diagnostics.items():
            assert by_list.diagnostics[name] == pytest.approx(value), name


def test_without_history_by_hand():
    listed = torch.tensor([[4, 2, 9, 3, 0], [1, 2, 3, 4, 5]])
    history = torch.tensor([[0, 2, 3], [5, 1, 2]])
    assert without_history(listed, history).tolist() == [[4, 9, 0, 0, 0], [3, 4, 0, 0, 0]]
    kept = without_history(listed, history, target=torch.tensor([3, 7]))
    assert kept.tolist() == [[4, 9, 3, 0, 0], [3, 4, 0, 0, 0]]


def test_fewer_cases_keeps_that_many_targets_and_always_the_same():
    cases = split().test
    some = fewer_cases(cases, 7)
    assert (some.target >= 0).sum() == 7
    assert np.array_equal(some.target, fewer_cases(cases, 7).target)
    kept = some.target >= 0
    assert np.array_equal(some.target[kept], cases.target[kept])
    assert np.array_equal(fewer_cases(cases, 10_000).target, cases.target)


def generator(items: int = 30) -> SemanticIdTransformer:
    torch.manual_seed(0)
    ids = SemanticIds.number(torch.randint(3, (items, 3)), 3)
    return SemanticIdTransformer(ids, GeneratorConfig(dim=16, heads=2, hidden=32, beams=30, user_tokens=5)).eval()


def test_a_beam_as_wide_as_the_catalogue_ranks_like_exact_scores():
    from auto_research.layers.decoding import teacher_forced_scores

    model = generator()

    class Exact(nn.Module):
        def scores(self, batch):
            return nn.functional.pad(teacher_forced_scores(model, batch, model.item_tokens[1:]), (1, 0), value=-1e9)

    task = SemanticRetrieval(split(), list_length=30)
    beam, exact = task.evaluate(model, "test", DEVICE), task.evaluate(Exact(), "test", DEVICE)
    for name, value in exact.values().items():
        assert beam[name] == pytest.approx(value, nan_ok=True), name


def test_test_diagnostics_hold_ids_and_invalid_rate():
    task = SemanticRetrieval(split(), free_cases=6)
    model = generator()
    evaluation = task.evaluate(model, "test", DEVICE)
    assert evaluation.diagnostics["prefix_uniqueness"] == model.ids.report()["prefix_uniqueness"]
    assert 0 < evaluation.diagnostics["invalid ids@10 without trie"] <= 1
    assert "invalid ids@10 without trie" not in task.evaluate(model, "validation", DEVICE).diagnostics
    assert 0 <= evaluation.diagnostics["head share@10"] <= 1


def test_popularity_floor_is_a_score_model_of_the_task():
    data = split()
    evaluation = SemanticRetrieval(data).evaluate(MostPopular(data), "test", DEVICE)
    assert 0 <= evaluation["ndcg@10"] <= evaluation["hr@10"] <= 1


def test_tfidf_vectors_are_unit_centred_and_group_similar_texts():
    texts = ["red ink pen", "blue ink pen", "red ink cartridge", "office chair black", "office chair white", "desk"]
    vectors = tfidf_vectors(texts, dim=4)
    assert vectors.shape == (6, 4)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(6))
    similarity = vectors @ vectors.T
    assert similarity[0, 1] > similarity[0, 3]
    assert similarity[3, 4] > similarity[3, 1]
    torch.testing.assert_close(tfidf_vectors(texts, dim=4), vectors)


def test_centred_unit_by_hand():
    out = centred_unit(torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 3.0], [2.0, -3.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
