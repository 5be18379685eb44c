"""The semantic-id Transformer: layout, caching, hooks, leaks and the saved mapping."""

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers.encoder_decoder import EncoderDecoder, GeneratorConfig, SemanticIdTransformer
from auto_research.layers.semantic_ids import BOS, SemanticIds

CONFIG = GeneratorConfig(dim=16, heads=2, hidden=32, encoder_layers=1, decoder_layers=2, user_tokens=5, beams=8)


def build(seed: int = 0, config: GeneratorConfig = CONFIG) -> SemanticIdTransformer:
    torch.manual_seed(seed)
    return SemanticIdTransformer(SemanticIds.number(torch.randint(4, (30, 3)), 4), config).eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sequence = torch.randint(1, 31, (4, 5), generator=generator)
    sequence[0, :3] = 0
    return {"sequence": sequence, "user": torch.arange(4), "target": sequence.flip(0)}


def test_encoder_input_is_user_then_the_ids_of_the_history():
    model = build()
    memory = model.encode(batch())
    assert memory.states.shape == (4, 1 + 4 * 5, 16)
    assert memory.valid.sum(1).tolist() == [1 + 4 * 2, 21, 21, 21]
    assert SemanticIdTransformer(model.ids, GeneratorConfig(dim=16, heads=2, user_tokens=0)).encode(
        batch()
    ).states.shape == (4, 20, 16)


def test_loss_is_the_mean_token_cross_entropy_over_the_full_vocabulary():
    model, data = build(), batch()
    target = model.item_tokens[data["target"][:, -1]]
    inputs = torch.cat([torch.full((4, 1), BOS), target[:, :-1]], 1)
    logits = model.transformer.decode(inputs, model.encode(data))
    assert logits.shape == (4, 4, len(model.vocabulary))
    expected = -torch.stack([logits[b, t].log_softmax(-1)[target[b, t]] for b in range(4) for t in range(4)]).mean()
    torch.testing.assert_close(model.loss(data), expected)


def test_decoder_sees_no_later_token_of_its_target():
    model, data = build(), batch()
    memory = model.encode(data)
    inputs = torch.randint(2, 12, (4, 4))
    changed = inputs.clone()
    changed[:, 2:] = torch.randint(2, 12, (4, 2))
    first, second = model.transformer.decode(inputs, memory), model.transformer.decode(changed, memory)
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.equal(first[:, 2:], second[:, 2:])


def test_cached_steps_equal_one_pass():
    model, data = build(), batch()
    memory = model.encode(data)
    inputs = torch.cat([torch.full((4, 1), BOS), torch.randint(2, 12, (4, 3))], 1)
    whole = model.transformer.decode(inputs, memory)
    state = model.begin(data)
    for position in range(4):
        step = model.step(state, None if position == 0 else inputs[:, position])
        torch.testing.assert_close(step, whole[:, position], atol=1e-5, rtol=1e-5)


def test_more_padding_changes_nothing_and_history_is_cut_to_the_newest_items():
    model, data = build(), batch()
    data["sequence"][0, :] = torch.tensor([0, 0, 0, 4, 7])
    plain = model.token_log_probabilities(data, torch.tensor([1, 2, 3, 4]))
    padded = data | {"sequence": F.pad(data["sequence"], (6, 0))}
    torch.testing.assert_close(model.token_log_probabilities(padded, torch.tensor([1, 2, 3, 4])), plain)
    short = build(config=GeneratorConfig(dim=16, heads=2, hidden=32, max_items=3))
    cut = data | {"sequence": data["sequence"][:, -3:]}
    item = torch.tensor([1, 2, 3, 4])
    assert torch.equal(short.token_log_probabilities(data, item), short.token_log_probabilities(cut, item))


def test_order_of_the_history_and_the_user_matter():
    model, data = build(), batch()
    item = torch.tensor([1, 2, 3, 4])
    plain = model.token_log_probabilities(data, item)
    turned = data | {"sequence": data["sequence"].flip(1)}
    assert not torch.allclose(model.token_log_probabilities(turned, item)[1:], plain[1:])
    other = data | {"user": data["user"] + 1}
    assert not torch.allclose(model.token_log_probabilities(other, item), plain)
    same_hash = data | {"user": data["user"] + 5}
    assert torch.equal(model.token_log_probabilities(same_hash, item), plain)


def test_loading_brings_the_saved_mapping_and_its_trie():
    first, data = build(), batch()
    twin = SemanticIdTransformer(first.ids.shuffled(torch.Generator().manual_seed(9)), CONFIG).eval()
    assert not torch.equal(twin.codes, first.codes)
    twin.load_state_dict(first.state_dict())
    assert torch.equal(twin.codes, first.codes)
    assert torch.equal(twin.item_tokens, first.item_tokens)
    assert torch.equal(twin.recommend(data, 8), first.recommend(data, 8))


def test_start_hook_replaces_the_first_embedding_only():
    class Guided(SemanticIdTransformer):
        def first_embedding(self, batch, memory):
            return memory.mean() * self.strength

    guided, data = build(), batch()
    plain = guided.token_log_probabilities(data, torch.tensor([1, 2, 3, 4]))
    guided.__class__ = Guided
    guided.strength = 10.0
    changed = guided.token_log_probabilities(data, torch.tensor([1, 2, 3, 4]))
    assert not torch.allclose(plain, changed)
    # The step-by-step path uses the same hook.
    exact = guided.beams(data, 30)
    item = guided.trie.items(exact.leaves[:, :1], 1)[:, 0] + 1
    own = guided.token_log_probabilities(data, item).sum(1)
    torch.testing.assert_close(own, exact.scores[:, 0], atol=1e-4, rtol=1e-4)


def test_memory_can_be_extended():
    model, data = build(), batch()
    memory = model.encode(data)
    extra = torch.randn(4, 2, 16)
    inputs = torch.full((4, 1), BOS)
    hidden = memory.extended(extra, torch.zeros(4, 2, dtype=torch.bool))
    torch.testing.assert_close(model.transformer.decode(inputs, hidden), model.transformer.decode(inputs, memory))
    assert not torch.allclose(
        model.transformer.decode(inputs, memory.extended(extra)), model.transformer.decode(inputs, memory)
    )


def test_memory_mean_leaves_padding_out():
    model, data = build(), batch()
    memory = model.encode(data)
    torch.testing.assert_close(memory.mean()[0], memory.states[0, memory.valid[0]].mean(0))


def test_free_head_width_as_in_t5():
    model = EncoderDecoder(20, 128, 6, 1024, encoder_layers=1, decoder_layers=1, target_length=4, head_dim=64)
    attention = model.encoder.blocks[0].attention
    assert attention.query.weight.shape == (384, 128)
    assert attention.output.weight.shape == (128, 384)
    assert model.encode(torch.randint(1, 20, (2, 5))).states.shape == (2, 5, 128)


def test_no_row_is_shared_by_levels_and_every_row_used_is_trained():
    model, data = build(), batch()
    model.loss(data).backward()
    gradient = model.transformer.token.weight.grad.abs().sum(1)
    target = model.item_tokens[data["target"][:, -1]]
    assert (gradient[target.flatten()] > 0).all()
    columns = [set(model.item_tokens[1:, level].tolist()) for level in range(4)]
    assert sum(map(len, columns)) == len(set().union(*columns))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_and_scores_are_float32_under_autocast(dtype):
    model, data = build(), batch()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        assert model.loss(data).dtype == torch.float32
        assert model.beams(data, 4).scores.dtype == torch.float32
