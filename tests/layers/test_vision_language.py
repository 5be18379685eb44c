"""Connectors, 2-D code, masks, generation and losses of the small vision-language model."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from auto_research.layers import vision_language as vl
from auto_research.layers.losses import sigmoid_pairs

CONFIG = vl.VisionLanguageConfig(vocabulary=11, text=7, dim=16, heads=2, layers=2, side=16, patch=4, contrast=True)


def make(**changes):
    torch.manual_seed(0)
    return vl.VisionLanguageModel(replace(CONFIG, **changes)).eval()


def images(count=3, seed=1):
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def permuted(pictures, order):
    """The same patches of 4 x 4 in another order."""
    patches = vl.cut_patches(pictures, 4)[:, order]
    grid = patches.reshape(len(pictures), 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(pictures.shape)


def test_patches_are_cut_row_by_row():
    picture = torch.arange(2 * 3 * 8 * 12).float().reshape(2, 3, 8, 12)
    patches = vl.cut_patches(picture, 4)
    assert patches.shape == (2, 6, 48)
    torch.testing.assert_close(patches[1, 4], picture[1, :, 4:8, 4:8].reshape(-1))


def test_position_code_is_written_out():
    code = vl.position_code(2, 3, 8)
    assert code.shape == (6, 8)
    row, column = 1, 2
    expected = [
        f(place * frequency) for place in (row, column) for f in (math.sin, math.cos) for frequency in (1, 0.01)
    ]
    torch.testing.assert_close(code[row * 3 + column], torch.tensor(expected))
    assert len({tuple(place) for place in code.tolist()}) == 6
    with pytest.raises(ValueError, match="divisible by 4"):
        vl.position_code(2, 2, 6)


@pytest.mark.parametrize(("kind", "tokens"), list(zip(vl.CONNECTORS, (16, 16, 4, 4, 16))))
def test_connectors_give_their_number_of_tokens_and_learn(kind, tokens):
    connector = vl.make_connector(kind, 8, 2, 4)
    patches = torch.randn(2, 16, 8)
    seen = connector(patches, vl.position_code(4, 4, 8))
    assert seen.shape == (2, tokens, 8)
    seen.square().sum().backward()
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in connector.parameters())


def test_an_unknown_connector_is_refused():
    with pytest.raises(ValueError, match="none of linear"):
        vl.make_connector("q-former", 8, 2, 4)


def test_pixel_shuffle_folds_neighbours():
    fold = vl.PixelShuffle(1, 4).fold(torch.arange(16.0)[None, :, None])
    assert fold[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    with pytest.raises(ValueError, match="does not divide"):
        vl.PixelShuffle(1, 5)


def test_the_gate_starts_at_the_identity_and_can_open():
    gated, patches = vl.Gated(8), torch.randn(2, 16, 8)
    code = torch.zeros(16, 8)
    assert torch.equal(gated(patches, code), patches)
    gated(patches, code).sum().backward()
    assert float(gated.gate.grad.abs()) > 0
    with torch.no_grad():
        gated.gate.fill_(0.5)
    torch.testing.assert_close(gated(patches, code), patches + math.tanh(0.5) * gated.mlp(patches, code))


def test_the_resampler_reads_patches_by_their_code():
    resampler, patches = vl.Resampler(8, 2), torch.randn(1, 16, 8)
    code, order = vl.position_code(4, 4, 8), torch.randperm(16)
    together = resampler(patches[:, order], code[order])
    torch.testing.assert_close(together, resampler(patches, code), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(resampler(patches[:, order], code), resampler(patches, code), atol=1e-3)


TEXT = torch.tensor([[0, 2, 3, 4], [5, 6, 7, 8], [0, 0, 9, 10]])


@pytest.mark.parametrize("kind", ["linear", "mlp", "gated", "resampler"])
def test_without_positions_the_order_of_patches_is_invisible(kind):
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    for positions in (True, False):
        model = make(connector=kind, positions=positions)
        with torch.no_grad():
            one, other = (model(model.see(model.encoder(x)), TEXT) for x in (images(), permuted(images(), order)))
        assert torch.allclose(one, other, atol=1e-5) is not positions


def test_positions_change_no_parameter():
    on, off = make().state_dict(), make(positions=False).state_dict()
    assert on.keys() == off.keys()
    assert all(torch.equal(on[name], off[name]) for name in on)


def test_models_that_differ_in_the_connector_are_drawn_alike_elsewhere():
    one, other = make().state_dict(), make(connector="resampler", contrast=False).state_dict()
    shared = [name for name in one if not name.startswith(("connector", "contrast"))]
    assert shared
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_a_picture_read_once_equals_one_sequence_with_a_bidirectional_prefix():
    model, visual = make(), torch.randn(3, 5, 16)
    text = torch.cat([TEXT, TEXT.flip(0)])[[0, 3, 1, 4, 2, 5]]  # two texts a picture
    position = torch.arange(9)
    mask = (position <= position[:, None]) | ((position < 5) & (position[:, None] < 5))
    joint = torch.cat([visual.repeat_interleave(2, 0), model.read(text)], dim=1)
    valid = F.pad(text != 0, (5, 0), value=True)
    expected = model.decoder(joint, valid, mask=mask)[:, 5:] @ model.tokens.weight.T
    torch.testing.assert_close(model(visual, text), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(visual, text, latest=2), expected[:, 2:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("changed", [1, 2, 3])
def test_text_is_causal_and_padding_is_not_seen(changed):
    model = make()
    visual = model.see(model.encoder(images()))
    text = TEXT.clone()
    text[1, changed] = 2
    before, after = model(visual, TEXT), model(visual, text)
    torch.testing.assert_close(after[1, :changed], before[1, :changed])
    assert not torch.allclose(after[1, changed:], before[1, changed:])
    with torch.no_grad():  # what padding embeds to does not matter
        model.tokens.weight[0] += 3
    later = model(visual, TEXT)
    torch.testing.assert_close(later[0, 1:, 1:], before[0, 1:, 1:])


def test_generation_equals_repeated_full_forwards():
    for seed in range(4):
        torch.manual_seed(seed)
        model = vl.VisionLanguageModel(CONFIG).eval()
        with torch.no_grad():
            model.tokens.weight.mul_(20)  # decided answers
            visual = model.see(model.encoder(images()))
            text = TEXT
            for _ in range(3):
                text = torch.cat([text, model(visual, text)[:, -1:].argmax(-1)], dim=1)
        expected = text[:, 4:].clone()
        ended = (expected == vl.END).int().cumsum(1) - (expected == vl.END).int() > 0
        assert torch.equal(model.generate(visual, TEXT, 3), expected.masked_fill(ended, vl.PAD))


def test_nothing_follows_the_end():
    model = make()
    with torch.no_grad():
        model.decoder.norm.weight.zero_()
        model.decoder.norm.bias.copy_(model.tokens.weight[vl.END] * 100)
    visual = model.see(model.encoder(images()))
    assert model.generate(visual, TEXT, 3).tolist() == [[vl.END, vl.PAD, vl.PAD]] * 3


def test_sigmoid_pairs_is_written_out():
    scores = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    positive = torch.tensor([[True, False, False], [True, True, False]])
    total = sum(
        -math.log(1 / (1 + math.exp(-(1 if p else -1) * s)))
        for s, p in zip(scores.flatten().tolist(), positive.flatten().tolist())
    )
    assert float(sigmoid_pairs(scores, positive)) == pytest.approx(total / 2, rel=1e-6)
    assert sigmoid_pairs(scores.bfloat16(), positive).dtype == torch.float32


def test_contrast_starts_at_ten_cosine_minus_ten_and_counts_equal_captions_as_positive():
    model = make()
    visual, caption = torch.randn(3, 5, 16), torch.tensor([[2, 3], [4, 5], [2, 3]])
    summary = model.summary(caption)
    image, text = model.contrast.image(visual.mean(1)), model.contrast.text(summary)
    cosine = F.cosine_similarity(image[:, None], text[None], dim=-1)
    torch.testing.assert_close(model.contrast(visual, summary), 10 * cosine - 10)
    same = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).bool()
    expected = sigmoid_pairs(10 * cosine - 10, same)
    torch.testing.assert_close(vl.contrast_loss(model, visual, caption), expected)


def test_the_answer_loss_counts_answer_words_and_the_end_alone():
    model = make()
    visual = model.see(model.encoder(images()))
    answer = torch.tensor([[5, 1, 0], [6, 7, 1], [8, 1, 0]])
    log = model(visual, torch.cat([TEXT, answer], dim=1)).log_softmax(-1)[:, 3:-1]
    picked = -log.gather(-1, answer[..., None])[..., 0]
    torch.testing.assert_close(vl.answer_loss(model, visual, TEXT, answer), picked[answer != 0].mean())


def test_hidden_patches_are_not_seen_and_the_full_view_teaches_without_gradient():
    model = make()
    hidden = torch.zeros(3, 16, dtype=torch.bool)
    hidden[:, [2, 7]] = True
    changed = images().clone()
    changed[:, :, 0:4, 8:12] = 0.3  # patch 2
    torch.testing.assert_close(model.encoder(changed, hidden), model.encoder(images(), hidden))
    patches = model.encoder(images()).detach().requires_grad_()
    loss = vl.masked_view_loss(model, images(), patches, hidden)
    one_by_one = [
        1 - F.cosine_similarity(model.encoder(images(), hidden)[b, n], patches[b, n], dim=0)
        for b in range(3)
        for n in (2, 7)
    ]
    torch.testing.assert_close(loss, torch.stack(one_by_one).mean())
    loss.backward()
    assert patches.grad is None
    assert float(model.encoder.hidden_patch.grad.abs().sum()) > 0


def test_objectives_add_up():
    model = make()
    batch = {
        "images": images(),
        "question": TEXT[:, None].repeat(1, 2, 1),
        "answer": torch.tensor([[5, 1, 0], [6, 7, 1], [8, 1, 0], [8, 9, 1], [5, 1, 0], [6, 1, 0]]).view(3, 2, 3),
        "caption": torch.tensor([[2, 3], [4, 5], [2, 3]]),
        "hidden": torch.rand(3, 16).argsort(1) < 4,
    }
    loss = {name: vl.training_loss(model, batch, name, 0.5).item() for name in vl.OBJECTIVES}
    plain = loss["next-token"]
    both = loss["sigmoid"] - plain + loss["masked-view"] - plain
    assert loss["sigmoid"] - plain > 0.01
    assert loss["masked-view"] - plain > 0.001
    assert loss["sigmoid+masked-view"] - plain == pytest.approx(both, rel=1e-4)
