"""The next-item task against per-user loops: batches, windows, ranks, slices; and the shared baselines."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from auto_research.data.sequences import Cases, Interactions, ItemTable, SequenceSplit, leave_one_out
from auto_research.tasks import baselines
from auto_research.tasks.base import Batch, Ratio, Recipe, fit
from auto_research.tasks.next_item import NextItem

CPU = torch.device("cpu")


def make_split(sequences: list[list[int]], num_items: int) -> SequenceSplit:
    """Leave-one-out split of hand-made sequences; every item is kept, seen or not."""
    user = np.repeat(np.arange(len(sequences)), [len(s) for s in sequences])
    item = np.array([i for s in sequences for i in s], dtype=np.int64)
    time = np.concatenate([np.arange(len(s)) for s in sequences]).astype(np.int64)
    table = ItemTable.of_ids([str(i) for i in range(num_items)])
    rating = np.ones(len(item), dtype=np.float32)
    return leave_one_out(Interactions("hand-made", user.astype(np.int64), item, rating, time, table))


def random_split(seed: int = 0, users: int = 40, num_items: int = 25, longest: int = 17) -> SequenceSplit:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, users)
    lengths[0] = longest
    return make_split([generator.permutation(num_items)[:n].tolist() for n in lengths], num_items)


def training_pairs(split: SequenceSplit) -> list[tuple[int, int, int]]:
    """(user, previous id, next id) of every training target, by a loop."""
    pairs = []
    for u in range(split.num_users):
        own = split.items[split.offsets[u] : split.offsets[u + 1]].tolist()
        pairs += [(u, a + 1, b + 1) for a, b in itertools.pairwise(own)]
    return pairs


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 9))
def test_an_epoch_visits_every_target_once_in_its_context(seed: int, max_length: int, batch_size: int) -> None:
    split = random_split(seed)
    task = NextItem(split, max_length)
    seen = []
    for batch in task.epoch(np.random.default_rng(seed), batch_size, CPU):
        assert batch["sequence"].shape == batch["target"].shape
        assert batch["sequence"].shape[1] <= max_length
        assert bool((batch["sequence"][:, -1] > 0).all())
        for user, sequence, target in zip(batch["user"].tolist(), batch["sequence"], batch["target"]):
            real = sequence > 0
            assert torch.equal(real, target > 0)
            assert torch.equal(real, real.cummax(0).values)  # padding on the left only
            ids, nexts = sequence[real].tolist(), target[real].tolist()
            assert ids[1:] == nexts[:-1]
            own = (split.items[split.offsets[user] : split.offsets[user + 1]] + 1).tolist()
            row = [*ids, nexts[-1]]
            assert any(own[i : i + len(row)] == row for i in range(len(own)))  # a stretch of the user's events
            seen += [(user, a, b) for a, b in zip(ids, nexts)]
    assert Counter(seen) == Counter(training_pairs(split))
    assert task.training_targets == len(seen)


def test_batches_depend_on_the_seed_alone_and_cuts_change_between_epochs() -> None:
    split = random_split(longest=24)
    task = NextItem(split, 5)

    def first(seed: int, count: int) -> list[Tensor]:
        stream = NextItem(split, 5).batches(seed, 8, CPU)
        return [next(stream)["sequence"] for _ in range(count)]

    for ours, again in zip(first(3, 20), first(3, 20)):
        assert torch.equal(ours, again)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first(3, 5), first(4, 5)))
    generator = np.random.default_rng(0)
    cuts = [tuple(task.windows(generator)[2].tolist()) for _ in range(4)]
    assert len(set(cuts)) > 1


def test_no_training_row_holds_a_held_out_event() -> None:
    split = random_split(5)
    held_out = {(u, int(split.test.target[u]) + 1) for u in range(split.num_users)}
    held_out |= {(u, int(split.valid.target[u]) + 1) for u in range(split.num_users)}
    for batch in NextItem(split, 6).epoch(np.random.default_rng(0), 8, CPU):
        for user, sequence, target in zip(batch["user"].tolist(), batch["sequence"], batch["target"]):
            assert not {(user, i) for i in [*sequence.tolist(), *target.tolist()] if i} & held_out


class Fixed(nn.Module):
    """Scores looked up by user, to test the evaluation alone."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def scores(self, batch: Batch) -> Tensor:
        return self.table[batch["user"]]


@pytest.mark.parametrize("split_name", ["validation", "test"])
@pytest.mark.parametrize("evaluation_batch", [1, 7, 1000])
def test_evaluation_equals_a_loop_over_users(split_name: str, evaluation_batch: int) -> None:
    split = random_split(1)
    task = NextItem(split, 4, evaluation_batch=evaluation_batch, cold_at_most=2)
    table = torch.randint(6, (split.num_users, split.num_items + 1)).float()  # many ties
    result = task.evaluate(Fixed(table), split_name, CPU)  # type: ignore[arg-type]
    cases = split.valid if split_name == "validation" else split.test
    values = defaultdict(list)
    for u in range(split.num_users):
        target = int(cases.target[u])
        if target < 0:
            continue
        history = set(cases.items[cases.offsets[u] : cases.offsets[u + 1]].tolist())
        others = [float(table[u, i + 1]) for i in range(split.num_items) if i not in history and i != target]
        own = float(table[u, target + 1])
        rank = 1 + sum(s > own for s in others) + math.ceil(sum(s == own for s in others) / 2)
        values["hr@5"].append(float(rank <= 5))
        values["ndcg@10"].append(1 / math.log2(1 + rank) if rank <= 10 else 0.0)
        values["mrr"].append(1 / rank)
        if int((split.items == target).sum()) <= 2:
            values["mrr/cold"].append(1 / rank)
    assert result.units == len(values["mrr"])
    for name, expected in values.items():
        assert result[name] == pytest.approx(np.mean(expected), abs=1e-6), name
    assert result.diagnostics["cases/cold"] == len(values["mrr/cold"])


def test_evaluation_sees_the_whole_history_and_the_model_its_last_events() -> None:
    split = make_split([[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]], 10)
    task = NextItem(split, 3)
    ((batch, target, rows),) = list(task.cases("test", CPU))
    assert batch["history"].tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 8, 9]]
    assert batch["sequence"].tolist() == [[4, 5, 6], [0, 8, 9]]
    assert (target.tolist(), rows.tolist(), batch["user"].tolist()) == ([7, 10], [0, 1], [0, 1])


def test_a_repeated_target_stays_a_candidate() -> None:
    split = make_split([[0, 1, 2, 0]], 5)
    scores = torch.tensor([[9.0, 5.0, 9.0, 9.0, 7.0, 6.0]])  # ids 2 and 3 are history, 4 and 5 are ahead
    result = NextItem(split, 4).evaluate(Fixed(scores), "test", CPU)
    assert result["mrr"] == pytest.approx(1 / 3)


def test_users_with_several_cases_are_resampled_together() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    cases = Cases(
        user=np.array([4, 2, 4]),
        items=np.array([0, 1, 2]),
        offsets=np.array([0, 1, 2, 3]),
        target=np.array([1, 2, 3]),
    )
    table = ItemTable.of_ids(list("abcde"))
    without = Cases(nothing, nothing, np.zeros(1, dtype=np.int64), nothing)
    split = SequenceSplit("several", np.array([0, 1]), np.array([0, 2]), without, cases, table)
    scores = torch.zeros(5, 6)
    scores[4, 2] = 1.0  # user 4's first case is right, the second is not
    scores[2, 3] = 1.0
    result = NextItem(split, 3).evaluate(Fixed(scores), "test", CPU)
    assert result.units == 2
    hits = result.metrics["ndcg@5"]
    assert isinstance(hits, Ratio)
    values = hits.resample(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    # User 2 is right. User 4 is right once; then id 2 is ahead of id 4, which ties with ids 1 and 5: rank 3.
    assert values.tolist() == pytest.approx([1.0, (1.0 + 0.5) / 2])
    with pytest.raises(ValueError, match="no case"):
        NextItem(split, 3).evaluate(Fixed(scores), "validation", CPU)


def test_wrong_scores_and_empty_training_are_refused() -> None:
    split = make_split([[0, 1, 2], [2, 1, 0]], 3)
    task = NextItem(split, 3)
    with pytest.raises(ValueError, match="num_items"):
        task.evaluate(Fixed(torch.zeros(2, 3)), "test", CPU)
    with pytest.raises(ValueError, match="nothing to predict"):
        next(task.batches(0, 4, CPU))
    with pytest.raises(ValueError, match="max_length"):
        NextItem(split, 0)


def test_evaluation_restores_the_mode_of_the_model() -> None:
    split = random_split()
    model = baselines.SASRec(split.num_items, dim=8, heads=2, max_length=6)
    model.train()
    first = NextItem(split, 6).evaluate(model, "test", CPU).values()
    assert model.training
    assert NextItem(split, 6).evaluate(model.eval(), "test", CPU).values() == pytest.approx(first, nan_ok=True)


def test_head_share_and_coverage_count_recommended_items_only() -> None:
    split = make_split([[0, 1, 2, 3], [0, 1, 3, 2], [0, 1, 4, 5]], 6)
    result = NextItem(split, 4, head=0.3).evaluate(baselines.MostPopular(split), "test", CPU)
    # Items 0 and 1 are the head and in every history, so nobody is recommended one.
    assert result.diagnostics["head share@10"] == 0.0
    assert result.diagnostics["coverage@10"] == pytest.approx(4 / 6)


# -- baselines ------------------------------------------------------------------------------------------------


def history_batch(split: SequenceSplit, max_length: int = 50) -> Batch:
    return next(iter(NextItem(split, max_length, evaluation_batch=1000).cases("test", CPU)))[0]


def binary(split: SequenceSplit) -> np.ndarray:
    matrix = np.zeros((split.num_users, split.num_items))
    for u in range(split.num_users):
        matrix[u, split.items[split.offsets[u] : split.offsets[u + 1]]] = 1.0
    return matrix


@pytest.mark.parametrize(("users", "items"), [(60, 12), (8, 30)])
def test_ease_solves_its_least_squares_problem_column_by_column(users: int, items: int) -> None:
    split = random_split(2, users=users, num_items=items, longest=10)
    matrix, l2 = binary(split), 3.0
    weights = np.zeros((items, items))
    for j in range(items):  # ridge regression of item j on all the others, one solve each
        others = [i for i in range(items) if i != j]
        design = matrix[:, others]
        gram = design.T @ design + l2 * np.eye(items - 1)
        weights[others, j] = np.linalg.solve(gram, design.T @ matrix[:, j])
    batch = history_batch(split)
    seen = np.zeros((len(batch["history"]), items + 1))
    for row, history in enumerate(batch["history"].tolist()):
        seen[row, history] = 1.0
    scores = baselines.EASE(split, l2).scores(batch)
    assert scores.shape == (len(seen), items + 1)
    np.testing.assert_allclose(scores[:, 1:].numpy(), seen[:, 1:] @ weights, atol=2e-5)
    with pytest.raises(ValueError, match="l2"):
        baselines.EASE(split, 0.0)


def test_item_knn_is_shrunk_cosine() -> None:
    split = random_split(3)
    matrix = binary(split)
    together = matrix.T @ matrix
    count = np.diag(together)
    similarity = together / (np.sqrt(np.outer(count, count)) + 2.0)
    np.fill_diagonal(similarity, 0.0)
    batch = history_batch(split)
    scores = baselines.ItemKNN(split, neighbours=1000, shrinkage=2.0).scores(batch)
    for row, history in enumerate(batch["history"].tolist()):
        expected = sum((similarity[i - 1] for i in history if i), np.zeros(split.num_items))
        np.testing.assert_allclose(scores[row, 1:].numpy(), expected, rtol=1e-5, atol=1e-6)
    # With few neighbours, each item speaks for its most similar ones only.
    few = baselines.ItemKNN(split, neighbours=2, shrinkage=2.0, block=7).neighbours
    best = -np.sort(-similarity, axis=1)[:, :2]
    np.testing.assert_allclose(few.weight[1:].numpy(), best, rtol=1e-6)
    found = similarity[np.arange(split.num_items)[:, None], (few.index[1:] - 1).clamp(min=0).numpy()]
    np.testing.assert_allclose(np.where(few.weight[1:] > 0, found, 0.0), best, rtol=1e-6)


def test_markov_counts_transitions_then_popularity() -> None:
    split = make_split([[0, 1, 2, 3, 4], [0, 1, 3, 2, 4], [1, 0, 1, 3, 2]], 6)  # training: 012, 013, 101
    model = baselines.MarkovCounts(split)
    scores = model.scores({"sequence": torch.tensor([[0, 0, 1], [3, 1, 2]])})
    # After item 0 (id 1) item 1 (id 2) came three times; the rest is ordered by popularity.
    popularity = torch.tensor([0.0, 3.0, 4.0, 1.0, 1.0, 0.0, 0.0]) / 10.0
    expected = torch.stack([popularity, popularity])
    expected[0, 2] += 3
    expected[1, [1, 3, 4]] += 1  # after item 1: items 0, 2 and 3, once each
    torch.testing.assert_close(scores, expected)


def test_bm25_by_hand() -> None:
    titles = ["The Red Shoes", "Red River", "the river", ""]
    model = baselines.BM25(titles, recent=2, k1=1.2, b=0.75)
    batch = {"sequence": torch.tensor([[0, 0, 2], [3, 1, 0]])}
    scores = model.scores(batch)
    assert scores.shape == (2, 5)
    mean = (3 + 2 + 2 + 0) / 4
    idf = {"the": math.log(1 + 2.5 / 2.5), "red": math.log(1 + 2.5 / 2.5), "river": math.log(1 + 2.5 / 2.5)}
    idf["shoes"] = math.log(1 + 3.5 / 1.5)

    def weight(word: str, length: int) -> float:
        return idf[word] * 2.2 / (1 + 1.2 * (0.25 + 0.75 * length / mean))

    # Query "red river".
    expected = [0.0, weight("red", 3), weight("red", 2) + weight("river", 2), weight("river", 2), 0.0]
    np.testing.assert_allclose(scores[0].numpy(), expected, rtol=1e-5)
    # Only the last two places are read: item 1 is the query, item 3 is too old.
    assert float(scores[1, 1]) == pytest.approx(weight("the", 3) + weight("red", 3) + weight("shoes", 3))


def test_a_baselines_scores_do_not_depend_on_the_other_rows() -> None:
    split = random_split(4)
    batch = history_batch(split)
    models = [
        baselines.MostPopular(split),
        baselines.Random(split.num_items),
        baselines.ItemKNN(split),
        baselines.MarkovCounts(split),
        baselines.EASE(split),
        baselines.BM25([f"title {i % 7} of {i % 3}" for i in range(split.num_items)]),
        baselines.SASRec(split.num_items, dim=8, heads=2).eval(),
    ]
    for model in models:
        whole = model.scores(batch)
        half = model.scores({name: value[3:5] for name, value in batch.items()})
        torch.testing.assert_close(half, whole[3:5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sampled", "bce"])
def test_sasrec_sees_neither_padding_nor_the_future(loss: str) -> None:
    torch.manual_seed(0)
    model = baselines.SASRec(30, dim=16, heads=2, max_length=9, loss=loss).eval()  # type: ignore[arg-type]
    sequence = torch.randint(1, 31, (4, 6))
    padded = torch.cat([torch.zeros(4, 3, dtype=torch.int64), sequence], 1)
    torch.testing.assert_close(model.encode(padded)[:, 3:], model.encode(sequence))
    changed = sequence.clone()
    changed[:, 4:] = torch.randint(1, 31, (4, 2))
    torch.testing.assert_close(model.encode(changed)[:, :4], model.encode(sequence)[:, :4])
    # A longer history than the model has positions for loses its oldest events.
    longer = torch.cat([torch.randint(1, 31, (4, 5)), padded], 1)
    torch.testing.assert_close(model.scores({"sequence": longer}), model.scores({"sequence": padded}))


def test_sasrec_learns_a_deterministic_successor() -> None:
    generator = np.random.default_rng(0)
    sequences = [[(int(start) + i) % 20 for i in range(8)] for start in generator.integers(0, 20, 60)]
    task = NextItem(make_split(sequences, 20), 8)
    torch.manual_seed(0)
    model = baselines.SASRec(20, dim=16, heads=2, max_length=8, dropout=0.0)
    fitted = fit(
        model,
        task,
        steps=60,
        seed=0,
        device=CPU,
        recipe=Recipe(learning_rate=1e-2, batch_size=32, validations=2),
    )
    assert fitted.losses[0] == pytest.approx(math.log(20), rel=0.2)
    assert task.evaluate(model, "test", CPU)["hr@5"] > 0.9
    assert task.evaluate(baselines.Random(20), "test", CPU)["hr@5"] < 0.7
