"""LEARN's module, towers, pairs, baselines and decision rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.data.sequences import Cases, ItemTable, SequenceSplit
from auto_research.papers.text_features import learn
from auto_research.papers.text_features.learn import (
    FROZEN,
    LEARN,
    SHUFFLED,
    FrozenMean,
    Learn,
    LearnConfig,
    matched_width,
    positive_pairs,
    sasrec,
    shuffled,
    thinned,
    unit,
    used_items,
)
from auto_research.study.verdict import Difference
from auto_research.tasks.base import Recipe, count_parameters, train_steps, trainable

CONFIG = LearnConfig(width=16, layers=2, heads=2, out=8, dropout=0.0)
ITEMS = 20


def content_of(items: int = ITEMS, width: int = 12) -> torch.Tensor:
    return F.pad(unit(torch.randn(items, width, generator=torch.Generator().manual_seed(0))), (0, 0, 1, 0))


def model_of(**options: object) -> Learn:
    torch.manual_seed(0)
    model = Learn(content_of(), replace(CONFIG, **options)).eval()
    for parameter in model.parameters():  # zero biases would hide parts of the module
        torch.nn.init.normal_(parameter, std=0.2)
    return model


# -- the preference module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(5))
def test_user_vector_is_unchanged_by_later_edits_and_all_vectors_have_unit_norm(place: int) -> None:
    model = model_of()
    sequence = torch.randint(1, ITEMS + 1, (4, 6))
    edited = sequence.clone()
    edited[:, place + 1 :] = torch.randint(1, ITEMS + 1, edited[:, place + 1 :].shape)
    before, after = model.user_states(sequence), model.user_states(edited)
    torch.testing.assert_close(before[:, : place + 1], after[:, : place + 1])
    assert not torch.allclose(before[:, place + 1 :], after[:, place + 1 :])
    torch.testing.assert_close(before.norm(dim=-1), torch.ones(4, 6))
    torch.testing.assert_close(model.catalogue()[1:].norm(dim=-1), torch.ones(ITEMS))


def test_item_vector_is_the_first_output_of_any_sequence_that_starts_with_the_item() -> None:
    model = model_of()
    sequence = torch.randint(1, ITEMS + 1, (9, 5))
    torch.testing.assert_close(model.item_vectors(sequence[:, 0]), model.user_states(sequence)[:, 0])
    padded = F.pad(sequence, (3, 0))
    torch.testing.assert_close(model.item_vectors(sequence[:, 0]), model.user_states(padded)[:, 3])
    torch.testing.assert_close(model.catalogue()[sequence], model.item_vectors(sequence))


def test_order_enters_through_the_causal_mask_alone() -> None:
    """The last state of one layer is the same for any order of what came before; an earlier state is not."""
    model = model_of(layers=1)
    sequence = torch.tensor([[1, 2, 3, 4]])
    permuted = torch.tensor([[3, 1, 2, 4]])
    torch.testing.assert_close(model.user_states(sequence)[:, -1], model.user_states(permuted)[:, -1])
    assert not torch.allclose(model.user_states(sequence)[:, 1], model.user_states(permuted)[:, 1])
    deep = model_of(layers=2)
    assert not torch.allclose(deep.user_states(sequence)[:, -1], deep.user_states(permuted)[:, -1])


def test_a_layer_is_post_norm_and_equals_its_formula() -> None:
    model = model_of(layers=1)
    block = model.align.encoder.blocks[0]
    x = model.align.adaptor(model.content[torch.tensor([[5]])])
    attended = block.feed_forward_norm  # a sequence of one attends to itself: the value is what comes out
    inner = block.attention_norm(x + block.attention(x))
    expected = attended(inner + block.feed_forward.fall(F.gelu(block.feed_forward.rise(inner))))
    expected = model.align.projection(expected)
    expected = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model.user_states(torch.tensor([[5]])), expected)
    assert not any(isinstance(part, torch.nn.Embedding) for part in model.modules())


def test_only_adaptor_encoder_and_projection_are_trained() -> None:
    model = model_of()
    names = {name.split(".")[1] for name, _ in model.named_parameters()}
    assert names == {"adaptor", "encoder", "projection"}
    assert not model.content.requires_grad
    before = model.content.clone()
    batch = {"sequence": torch.randint(1, 21, (4, 3)), "target": torch.randint(1, 21, (4, 3))}
    train_steps(model, iter([batch] * 3), steps=3, recipe=Recipe())
    assert torch.equal(model.content, before)


def test_towers() -> None:
    ids = torch.tensor([[0, 3, 7, 3]])
    raw, alone, whole = (model_of(tower=tower) for tower in ("raw", "alone", "sequence"))
    expected = raw.raw(raw.content[ids])
    torch.testing.assert_close(raw.target_vectors(ids), expected / expected.norm(dim=-1, keepdim=True))
    vectors = alone.target_vectors(ids)
    torch.testing.assert_close(vectors[0, 1], vectors[0, 3])  # no item sees its neighbours
    vectors = whole.target_vectors(ids)
    assert not torch.allclose(vectors[0, 1], vectors[0, 3])
    torch.testing.assert_close(vectors[0, 1:], whole.user_states(ids[:, 1:])[0])
    torch.testing.assert_close(whole.catalogue()[3], vectors[0, 1])  # alone in serving
    assert count_parameters(whole) == count_parameters(alone) == count_parameters(raw) - (12 + 1) * 8


def test_kept_item_vectors_follow_the_weights() -> None:
    model, other = model_of(), Learn(content_of(), CONFIG).eval()
    batch = {"sequence": torch.tensor([[1, 2]]), "target": torch.tensor([[2, 3]])}
    with torch.no_grad():
        expected, stale = model.scores(batch), other.scores(batch)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.scores(batch), expected)
        assert not torch.equal(stale, expected)
    other.train()
    other.loss({name: value.repeat(2, 1) + torch.tensor([[0], [4]]) for name, value in batch.items()}).backward()
    torch.optim.SGD(trainable(other), lr=0.5).step()
    other.eval()
    with torch.no_grad():
        moved = other.scores(batch)
        assert not torch.equal(moved, expected)
        torch.testing.assert_close(
            moved, other.user_states(batch["sequence"])[:, -1] @ other.item_vectors(torch.arange(21)).T
        )


# -- which state predicts which target ------------------------------------------------------------------------------


def rows_of(lengths: list[int]) -> torch.Tensor:
    """Targets (B, T), left-padded; row b has lengths[b] of them."""
    longest = max(lengths)
    return torch.stack([F.pad(torch.arange(1, n + 1), (longest - n, 0)) for n in lengths])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 2**16))
def test_dense_pairs_are_every_history_state_with_every_item_of_the_window(lengths, window, seed) -> None:
    torch.manual_seed(seed)
    target = rows_of(lengths)
    for pairs, count in zip(positive_pairs(target, "dense", window=window), lengths, strict=True):
        states, asked = pairs.any(1).nonzero()[:, 0], pairs.any(0).nonzero()[:, 0]
        start = target.shape[1] - count
        cut = len(states)  # events 0..cut-1 are the history
        assert states.tolist() == list(range(start, start + cut))
        assert max(1, (count + 1) // 2) <= cut <= count  # the cut is an event of the second half, never the first
        assert asked.tolist() == list(range(start + cut - 1, start + min(count, cut - 1 + window)))
        assert int(pairs.sum()) == len(states) * len(asked)
        assert (states[:, None] <= asked).all()  # target k follows state k: nothing looks ahead


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 2**16))
def test_next_and_last_pairs(lengths, seed) -> None:
    torch.manual_seed(seed)
    target = rows_of(lengths)
    following = positive_pairs(target, "next")
    assert torch.equal(following, torch.diag_embed(target > 0))
    for objective in ("last", "catalogue"):
        one = positive_pairs(target, objective)
        assert one.sum((1, 2)).tolist() == [1] * len(lengths)
        assert (one <= following).all()


def test_every_allowed_cut_is_drawn_about_equally_often() -> None:
    torch.manual_seed(0)
    target = rows_of([5]).repeat(3000, 1)  # six events, numbered 0..5
    last = positive_pairs(target, "last").any(1).float().mean(0)
    torch.testing.assert_close(last, torch.tensor([0, 0, 1, 1, 1]) / 3, atol=0.04, rtol=0)
    anywhere = positive_pairs(target, "catalogue").any(1).float().mean(0)
    torch.testing.assert_close(anywhere, torch.full((5,), 0.2), atol=0.04, rtol=0)


def test_history_states_are_subsampled() -> None:
    torch.manual_seed(0)
    target = rows_of([9, 1, 6])
    pairs = positive_pairs(target, "dense", positions=2)
    assert pairs.any(2).sum(1).tolist() == [2, 1, 2]
    drawn = torch.stack([positive_pairs(target, "dense", positions=2)[0].any(1) for _ in range(200)])
    assert (drawn.sum(0)[:5] > 0).all()  # not always the same states


# -- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["dense", "next", "last"])
def test_rows_with_the_same_target_never_act_as_each_others_negatives(objective: str) -> None:
    model = model_of(objective=objective)
    batch = {"sequence": torch.tensor([[1], [2]]), "target": torch.tensor([[5], [5]])}
    assert float(model.loss(batch).detach()) == 0.0
    batch["target"][1] = 6
    assert float(model.loss(batch).detach()) > 0.0


def test_dense_loss_equals_the_papers_sum_over_pairs() -> None:
    model = model_of()
    sequence = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6], [7, 8, 9, 3]])
    target = torch.tensor([[2, 3, 4, 10], [0, 0, 6, 11], [8, 9, 3, 10]])
    torch.manual_seed(3)
    pairs = positive_pairs(target, "dense")
    torch.manual_seed(3)
    found = float(model.loss({"sequence": sequence, "target": target}).detach())
    users = model.user_states(sequence).detach().double()
    items = model.catalogue().detach().double()
    asked = [set(target[i][pairs[i].any(0)].tolist()) for i in range(3)]
    total = []
    for i, j, k in pairs.nonzero().tolist():
        score = 20 * users[i, j] @ items.T
        others = [m for z in range(3) if z != i for m in target[z][pairs[z].any(0)].tolist() if m not in asked[i]]
        total.append(-torch.log(score[target[i, k]].exp() / (score[target[i, k]].exp() + score[others].exp().sum())))
    assert found == pytest.approx(float(torch.stack(total).mean()), rel=1e-5)


def test_catalogue_loss_is_cross_entropy_over_all_items() -> None:
    model = model_of(objective="catalogue")
    sequence = torch.tensor([[0, 1, 2], [3, 4, 5]])
    target = torch.tensor([[0, 2, 7], [4, 5, 9]])
    torch.manual_seed(1)
    chosen = positive_pairs(target, "catalogue").any(1)
    torch.manual_seed(1)
    found = model.loss({"sequence": sequence, "target": target})
    logits = 20 * model.user_states(sequence)[chosen] @ model.catalogue()[1:].T
    torch.testing.assert_close(found, F.cross_entropy(logits, target[chosen] - 1))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="tower 'mlp' is none of alone, sequence, raw"):
        LearnConfig(tower="mlp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objective 'all' is none of"):
        LearnConfig(objective="all")  # type: ignore[arg-type]


# -- what the content is worth --------------------------------------------------------------------------------------


def test_unseen_items_are_ranked_by_content_and_shuffled_content_loses_it() -> None:
    """Clusters 2n and 2n + 1 are liked together, which content alone cannot know; half of the items is new."""
    draw = torch.Generator().manual_seed(0)
    clusters, items = 6, 120
    centres = torch.randn(clusters, 12, generator=draw)
    kind = torch.arange(items) % clusters
    content = F.pad(unit(centres[kind] + 0.3 * torch.randn(items, 12, generator=draw)), (0, 0, 1, 0))
    seen = items // 2

    def rows(count: int, low: int, high: int) -> torch.Tensor:
        """Sequences (count, 4) of ids: two items of a cluster, two of its partner, all from low..high - 1."""
        first = torch.randint(clusters, (count, 1), generator=draw)
        slot = torch.randint(low // clusters, high // clusters, (count, 4), generator=draw)
        return slot * clusters + first.bitwise_xor(torch.arange(4) // 2) + 1

    @torch.no_grad()
    def hits(model: torch.nn.Module) -> float:
        """How often the best new item of another cluster than the history's is one of its partner."""
        test = rows(200, seen, items)
        own = kind[test[:, 0] - 1]
        scores = model.scores({"sequence": test[:, :2]})[:, seen + 1 :]
        best = scores.masked_fill(kind[seen:] == own[:, None], -torch.inf).argmax(1) + seen
        return float((kind[best] == own.bitwise_xor(torch.tensor(1))).float().mean())

    def trained(given: torch.Tensor) -> float:
        torch.manual_seed(1)
        model = Learn(given, CONFIG)
        windows = (rows(64, 0, seen) for _ in range(60))
        batches = ({"sequence": w[:, :-1], "target": w[:, 1:]} for w in windows)
        train_steps(model, batches, steps=60, recipe=Recipe(learning_rate=3e-3))
        return hits(model.eval())

    assert trained(content) > 0.9
    assert trained(shuffled(content)) < 0.5
    assert hits(FrozenMean(content)) < 0.5


def test_shuffled_content_is_a_permutation_and_leaves_the_generator_alone() -> None:
    content = content_of()
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    first = shuffled(content)
    assert torch.equal(torch.randn(3), expected)
    assert torch.equal(first[0], content[0])
    assert not torch.equal(first, content)
    assert torch.equal(first.sort(0).values, content.sort(0).values)
    torch.manual_seed(6)
    assert not torch.equal(shuffled(content), first)


def test_frozen_mean_is_the_cosine_of_centred_content() -> None:
    content = content_of()
    centred = (content[1:] - content[1:].mean(0)).double()
    history = centred[torch.tensor([4, 9])]
    history = (history / history.norm(dim=1, keepdim=True)).mean(0)
    expected = F.cosine_similarity(history[None], centred)
    found = FrozenMean(content).scores({"sequence": torch.tensor([[0, 0, 5, 10]])})
    torch.testing.assert_close(found[0, 1:].double(), expected, atol=1e-5, rtol=1e-5)


# -- baselines and budgets ------------------------------------------------------------------------------------------


def test_sasrec_with_content_adds_a_map_to_its_table() -> None:
    torch.manual_seed(0)
    model = sasrec(ITEMS, 16, CONFIG, 8, content_of()).eval()
    part = model.items.parametrizations.weight
    expected = part.original + content_of() @ part[0].project.weight.T
    torch.testing.assert_close(model.items.weight, expected)
    assert not model.items.weight[0].any()
    assert count_parameters(model) == count_parameters(sasrec(ITEMS, 16, CONFIG, 8)) + 12 * 16


@pytest.mark.parametrize("with_content", [False, True])
def test_id_models_are_as_large_as_learn(with_content: bool) -> None:
    items, config = 3459, LearnConfig()
    content = torch.zeros(items + 1, 384)
    ours = count_parameters(Learn(content, config))
    given = content.to("meta") if with_content else None
    dim = matched_width(ours, lambda dim: sasrec(items, dim, config, 40, given))
    theirs = count_parameters(sasrec(items, dim, config, 40, content if with_content else None))
    assert abs(theirs - ours) / ours < 0.03


def split_of() -> SequenceSplit:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return SequenceSplit(
        name="tiny",
        items=ids(1, 4, 4, 7),
        offsets=ids(0, 2, 4),
        valid=Cases(ids(0, 1), ids(1, 4, 4, 7), ids(0, 2, 4), ids(9, -1)),
        test=Cases(ids(1), ids(7, 4), ids(0, 2), ids(2)),
        items_table=ItemTable.of_ids([str(i) for i in range(12)], [f"item {i}" for i in range(12)]),
    )


def test_used_items_keeps_every_event_under_its_title() -> None:
    before, after = split_of(), used_items(split_of())
    assert after.items_table.title == ["item 1", "item 2", "item 4", "item 7", "item 9"]

    def titles(split: SequenceSplit) -> list[list[str | None]]:
        parts = (split.items, split.valid.items, split.valid.target, split.test.items, split.test.target)
        return [[split.items_table.title[i] if i >= 0 else None for i in part] for part in parts]

    assert titles(before) == titles(after)


def test_thinned_cases_are_whole_users_and_repeatable() -> None:
    users = np.repeat(np.arange(500), 2)
    cases = Cases(users, np.arange(1000), np.arange(1001), np.arange(1000) + 5000)
    few = thinned(cases, 200)
    assert 120 < len(few) < 280
    assert np.array_equal(few.target, thinned(cases, 200).target)
    assert np.array_equal(np.unique(few.user, return_counts=True)[1], np.full(len(few) // 2, 2))
    assert np.array_equal(few.items + 5000, few.target)  # histories stay with their targets
    assert thinned(cases, 1000) is cases


# -- the decision rule ----------------------------------------------------------------------------------------------


def compare_of(means: dict[str, float], wins: int = 3):
    """A comparison in which every arm has a mean; intervals are narrow."""

    def compare(method: str, baseline: str, metric: str) -> Difference:
        gap = means.get(method, 0.0) - means.get(baseline, 0.0)
        won = wins if gap > 0 else 0
        return Difference(
            method=method, baseline=baseline, metric=metric, mean=gap, low=gap - 1e-6, high=gap + 1e-6,
            relative=None, baseline_mean=means.get(baseline, 0.0), wins=won, seeds=3, units=100,
        )  # fmt: skip

    return compare


def required_states(compare) -> list[str]:
    return [clause.decide(compare)[0] for clause in learn.decision((1, 2, 3)) if clause.required]


def test_decision_rule_needs_every_seed_and_the_popularity_floor() -> None:
    good = {LEARN: 0.1, FROZEN: 0.05, learn.RAW: 0.06, learn.SASREC: 0.02, learn.POPULAR: 0.01}
    assert required_states(compare_of(good)) == ["holds"] * 4
    assert required_states(compare_of(good, wins=2)) == ["undecided"] * 3 + ["holds"]
    assert required_states(compare_of(good | {learn.SASREC: 0.2}))[2] == "reversed"
    assert required_states(compare_of(good | {learn.POPULAR: 0.2}))[3] == "reversed"


@pytest.mark.parametrize(("left", "state"), [(0.051, "holds"), (0.04, "holds"), (0.09, "reversed")])
def test_collapse_of_the_gain_under_shuffled_content(left: float, state: str) -> None:
    compare = compare_of({LEARN: 0.1, FROZEN: 0.05, SHUFFLED: left})
    clause = next(c for c in learn.decision((1, 2, 3)) if c.text.startswith("shuffled content"))
    assert not clause.required
    assert clause.decide(compare)[0] == state
    assert clause.decide(compare_of({LEARN: 0.04, FROZEN: 0.05}))[0] == "undecided"


def test_full_budget_has_the_papers_shape() -> None:
    from auto_research.papers._registry import adapter
    from auto_research.study.context import Study

    config = learn.configured(Study(card=adapter("learn").card, budget="full", device="cpu", quiet=True))
    assert (config.width, config.layers, config.heads, config.scale, config.window) == (768, 12, 12, 20.0, 20)
