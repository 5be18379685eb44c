"""Beam search against exact scores of every sequence, brute force and Hugging Face."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers.decoding import beam_search, teacher_forced_scores
from auto_research.layers.encoder_decoder import GeneratorConfig, SemanticIdTransformer
from auto_research.layers.semantic_ids import SemanticIds

ITEMS = 40


def model_and_batch(seed: int = 0, items: int = ITEMS) -> tuple[SemanticIdTransformer, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    ids = SemanticIds.number(torch.randint(4, (items, 3)), 4)
    config = GeneratorConfig(dim=16, heads=2, hidden=32, encoder_layers=1, decoder_layers=2, user_tokens=5)
    model = SemanticIdTransformer(ids, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # far from uniform
    sequence = torch.randint(1, items + 1, (3, 6))
    sequence[0, :4] = 0
    return model, {"sequence": sequence, "user": torch.arange(3)}


def test_a_wide_beam_equals_exact_scoring_of_the_catalogue():
    model, batch = model_and_batch()
    exact = teacher_forced_scores(model, batch, model.item_tokens[1:])
    found = beam_search(model, batch, beams=ITEMS, trie=model.trie)
    items = model.trie.items(found.leaves, ITEMS)
    best = exact.sort(dim=1, descending=True)
    torch.testing.assert_close(found.scores, best.values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(exact.gather(1, items), found.scores, atol=1e-4, rtol=1e-4)
    assert [sorted(row) for row in items.tolist()] == [list(range(ITEMS))] * 3


def test_exact_scores_equal_the_training_log_probabilities():
    model, batch = model_and_batch()
    exact = teacher_forced_scores(model, batch, model.item_tokens[1:], chunk=7)
    for item in (1, 17, ITEMS):
        own = model.token_log_probabilities(batch, torch.full((3,), item)).sum(1)
        torch.testing.assert_close(exact[:, item - 1], own, atol=1e-4, rtol=1e-4)


def test_a_narrow_beam_equals_a_loop_over_dictionaries():
    model, batch = model_and_batch(1)
    beams = 3
    found = beam_search(model, batch, beams=beams, trie=model.trie)
    tokens = model.item_tokens[1:]
    memory = model.encode(batch)
    for row in range(3):
        own = type(memory)(memory.states[row : row + 1], memory.valid[row : row + 1])
        alive = [((), 0.0)]
        for depth in range(model.length):
            grown = []
            for prefix, score in alive:
                inputs = torch.tensor([[1, *prefix]])
                log_probability = model.transformer.decode(inputs, own)[0, -1].log_softmax(-1)
                allowed = {t[depth] for t in tokens.tolist() if tuple(t[:depth]) == prefix}
                grown += [((*prefix, token), score + log_probability[token].item()) for token in allowed]
            alive = sorted(grown, key=lambda pair: -pair[1])[:beams]
        assert [tuple(t) for t in found.tokens[row].tolist()] == [prefix for prefix, _ in alive]
        torch.testing.assert_close(found.scores[row], torch.tensor([s for _, s in alive]), atol=1e-4, rtol=1e-4)


def test_every_constrained_beam_is_an_item_and_a_free_beam_need_not_be():
    model, batch = model_and_batch()
    constrained = model.beams(batch, 20)
    assert (constrained.leaves >= 0).all()
    assert torch.equal(model.trie.find(constrained.tokens), constrained.leaves)
    free = model.beams(batch, 20, constrained=False)
    assert (model.trie.find(free.tokens) < 0).any()
    assert free.leaves is None


def test_a_free_beam_as_wide_as_the_space_is_brute_force():
    model, batch = model_and_batch()
    vocabulary = len(model.vocabulary)
    found = beam_search(model, batch, beams=vocabulary**2, length=2)
    pairs = torch.tensor(list(itertools.product(range(vocabulary), repeat=2)))
    exact = teacher_forced_scores(model, batch, pairs)
    torch.testing.assert_close(found.scores, exact.sort(dim=1, descending=True).values, atol=1e-4, rtol=1e-4)


def test_fewer_sequences_than_beams_leaves_marked_fillers():
    model, batch = model_and_batch(items=5)
    found = model.beams(batch, 9)
    assert found.tokens.shape == (3, 9, 4)
    assert found.scores[:, 5:].isneginf().all()
    assert (found.leaves[:, 5:] == -1).all()
    assert (found.leaves[:, :5] >= 0).all()
    assert model.recommend(batch, 9)[:, 5:].eq(0).all()


def test_rows_do_not_influence_each_other():
    model, batch = model_and_batch()
    together = model.beams(batch, 6)
    for row in range(3):
        alone = model.beams({name: value[row : row + 1] for name, value in batch.items()}, 6)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-5, rtol=1e-5)


def test_temperature_zero_is_the_plain_beam_and_heat_spreads_over_coarse_codes():
    model, batch = model_and_batch()
    plain = model.beams(batch, 5)
    cold = model.beams(batch, 5, temperatures=(0.0,) * 4)
    assert torch.equal(plain.tokens, cold.tokens)
    with pytest.raises(ValueError, match="temperatures"):
        model.beams(batch, 5, temperatures=(1.0,))
    generator = torch.Generator().manual_seed(0)
    narrow = model.beams(batch, 2)
    hot = model.beams(batch, 2, temperatures=(1e3, 0, 0, 0), generator=generator)
    assert (hot.scores[:, 0] >= hot.scores[:, 1]).all()
    assert hot.scores.sum() < narrow.scores.sum()
    # Great heat draws the two coarse codes of a row without replacement.
    codes = torch.cat(
        [model.beams(batch, 2, temperatures=(1e3, 1e3, 0, 0), generator=generator).tokens for _ in range(30)]
    )
    assert codes[..., 0].unique().numel() == 4


def test_sampling_at_temperature_one_follows_the_distribution():
    model, batch = model_and_batch()
    one = {name: value[:1].expand(4000, *value.shape[1:]) for name, value in batch.items()}
    sampled = beam_search(
        model, one, beams=1, length=1, temperatures=(1.0,), generator=torch.Generator().manual_seed(0)
    )
    expected = model.step(model.begin({k: v[:1] for k, v in batch.items()}), None).softmax(-1)[0].detach()
    share = torch.bincount(sampled.tokens.flatten(), minlength=len(expected)) / 4000
    assert float((share - expected).abs().max()) < 0.04


def test_scores_are_full_softmax_log_probabilities_without_renormalising():
    model, batch = model_and_batch()
    found = model.beams(batch, 1)
    logits = model.step(model.begin(batch), None)
    first = F.log_softmax(logits, -1).gather(1, found.tokens[:, 0, :1])
    assert (found.scores < first + 1e-6).all()
    total = model.beams(batch, ITEMS).scores.exp().sum(1)
    assert (total < 1).all()  # what the trie forbids keeps its probability


def benchmark_module():
    path = Path(__file__).parents[2] / "benchmarks" / "constrained_decoding_vs_hf.py"
    spec = importlib.util.spec_from_file_location("constrained_decoding_vs_hf", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [0, 1])
def test_constrained_beam_equals_hugging_face_generate(seed):
    bench = benchmark_module()
    ids, vocabulary = bench.random_ids(200, 8, seed=seed)
    tokens = vocabulary.tokens(ids.codes)
    model = bench.small_t5(len(vocabulary), dim=32, seed=seed)
    inputs = bench.random_inputs(tokens, 4, seed=seed)
    mine = bench.ours(model, bench.Trie(tokens), inputs, 6)
    theirs = bench.hugging_face(model, bench.allowed_tokens(tokens), inputs, 6, ids.length)
    wrong, gap = bench.disagreement(mine, theirs)
    assert wrong == 0
    assert gap < 1e-4
    assert mine[1].isfinite().all()
