"""Collision tokens, vocabulary, bijection and trie against dictionaries and loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.semantic_ids import (
    BOS,
    PAD,
    SemanticIds,
    Trie,
    Vocabulary,
    collision_tokens,
    expand,
)
from auto_research.runtime.errors import UserError

CODES = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 0], [1, 0], [0, 1]])

tables = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40).map(torch.tensor)


def test_collision_tokens_number_each_group_in_item_order():
    assert collision_tokens(CODES).tolist() == [0, 0, 1, 0, 2, 1]


@settings(deadline=None, max_examples=40)
@given(tables)
def test_collision_tokens_equal_a_loop_and_make_a_bijection(codes):
    seen: dict[tuple, int] = {}
    expected = []
    for row in map(tuple, codes.tolist()):
        expected.append(seen.get(row, 0))
        seen[row] = seen.get(row, 0) + 1
    ids = SemanticIds.number(codes, 4)
    assert ids.codes[:, -1].tolist() == expected
    assert ids.distinct == len(codes)
    assert ids.capacity == ids.sizes[-1] == max(seen.values())


@settings(deadline=None, max_examples=40)
@given(tables)
def test_id_to_item_and_item_to_id_are_inverse(codes):
    ids = SemanticIds.number(codes, 4)
    tokens = Vocabulary(ids.sizes).tokens(ids.codes)
    trie = Trie(tokens)
    leaves = trie.find(tokens)
    assert trie.items(leaves[:, None], 1)[:, 0].tolist() == list(range(len(codes)))


def test_levels_never_share_a_token_and_users_have_their_own_block():
    vocabulary = Vocabulary((4, 4, 3), users=5)
    ranges = [set(range(start, start + size)) for start, size in zip(vocabulary.starts, vocabulary.sizes, strict=True)]
    users = set(vocabulary.user_tokens(torch.arange(50)).tolist())
    groups = [{PAD}, {BOS}, *ranges, users]
    assert sum(map(len, groups)) == len(set().union(*groups)) == len(vocabulary) == 2 + 11 + 5
    assert vocabulary.user_tokens(torch.tensor([3, 8])).unique().numel() == 1
    assert vocabulary.tokens(torch.tensor([[3, 0, 2]])).tolist() == [[5, 6, 12]]
    assert vocabulary.tokens(torch.tensor([[3, 0]])).tolist() == [[5, 6]]


def test_shuffled_ids_are_the_same_ids_with_the_same_last_token_distribution():
    ids = SemanticIds.number(torch.randint(3, (50, 3)), 3)
    other = ids.shuffled(torch.Generator().manual_seed(0))
    assert not torch.equal(ids.codes, other.codes)
    assert sorted(ids.codes.tolist()) == sorted(other.codes.tolist())
    assert ids.report() == other.report()


def test_report_by_hand():
    report = SemanticIds.number(CODES, 2).report()
    assert report["prefix_uniqueness"] == pytest.approx(3 / 6)
    assert report["items_with_unique_prefix"] == pytest.approx(1 / 6)
    assert report["largest_collision_group"] == 3
    assert report["code_usage_level_0"] == 1.0
    assert report["code_entropy_level_0"] == pytest.approx(1.0)


def test_saving_and_loading_keeps_the_mapping(tmp_path):
    ids = SemanticIds.number(CODES, 2, capacity=5)
    ids.save(tmp_path / "ids.safetensors")
    loaded = SemanticIds.load(tmp_path / "ids.safetensors")
    assert torch.equal(loaded.codes, ids.codes)
    assert (loaded.sizes, loaded.numbered) == (ids.sizes, True) == ((2, 2, 5), True)


def test_a_damaged_or_missing_table_is_one_clear_sentence(tmp_path):
    path = tmp_path / "ids.safetensors"
    with pytest.raises(UserError, match="no table of semantic ids"):
        SemanticIds.load(path)
    path.write_bytes(b"\x00" * 12)
    with pytest.raises(UserError, match="no table of semantic ids"):
        SemanticIds.load(path)


def test_wrong_tables_are_refused():
    with pytest.raises(ValueError, match="outside its level"):
        SemanticIds(torch.tensor([[2, 0]]), (2, 1), True)
    with pytest.raises(ValueError, match="share an id"):
        SemanticIds(torch.tensor([[1, 0], [1, 0]]), (2, 1), True)
    with pytest.raises(ValueError, match="columns"):
        SemanticIds(torch.tensor([[1, 0]]), (2,), False)
    with pytest.raises(ValueError, match="capacity"):
        SemanticIds.number(CODES, 2, capacity=2)


@settings(deadline=None, max_examples=40)
@given(tables)
def test_trie_allows_exactly_the_next_tokens_of_a_dictionary(codes):
    tokens = Vocabulary((4, 4, 4)).tokens(codes)
    trie = Trie(tokens)
    following: dict[tuple, set] = {}
    for row in tokens.tolist():
        for depth in range(3):
            following.setdefault(tuple(row[:depth]), set()).add(row[depth])
    for prefix, expected in following.items():
        node = torch.tensor([0])
        if prefix:
            node = trie.find(torch.tensor([prefix]))
            assert int(node) >= 0
        _, token, real = trie.following(node, len(prefix))
        assert sorted(token[real].tolist()) == sorted(expected)
    assert len(trie) == len(set(map(tuple, tokens.tolist())))


def test_find_says_minus_one_for_what_no_item_begins_with():
    tokens = Vocabulary((2, 2)).tokens(CODES)
    trie = Trie(tokens)
    assert trie.find(torch.tensor([[2, 5], [3, 5], [9, 4]])).tolist()[1:] == [-1, -1]
    assert int(trie.find(tokens[:1])) >= 0


def test_items_that_share_an_id_come_in_order_of_priority_and_fillers_last():
    tokens = Vocabulary((2, 2)).tokens(CODES)
    trie = Trie(tokens, priority=torch.tensor([1.0, 5, 3, 0, 3, 9]))
    leaves = torch.stack([trie.find(tokens[0]), torch.tensor(-1), trie.find(tokens[1])])[None]
    assert trie.items(leaves, 7).tolist() == [[2, 4, 0, 5, 1, -1, -1]]
    assert trie.items(leaves, 2).tolist() == [[2, 4]]


def test_expand_by_hand():
    _, source, within = expand(torch.tensor([[2, 0, 3], [0, 0, 1]]), 6)
    assert source.tolist() == [[0, 0, 2, 2, 2, -1], [2, -1, -1, -1, -1, -1]]
    assert within.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0]]


def test_trie_tables_follow_the_module_and_are_not_saved():
    trie = Trie(Vocabulary((2, 2)).tokens(CODES))
    assert not trie.state_dict()
    assert len(dict(trie.named_buffers())) == 2 * trie.length + 2
