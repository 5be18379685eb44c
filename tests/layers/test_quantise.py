"""Quantisers against hand values and plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.layers.quantise import (
    RQVAE,
    ParallelCodebooks,
    ResidualQuantiser,
    code_usage,
    kmeans,
    lsh_codes,
    nearest_code,
    residual_kmeans,
)


def two_level_quantiser() -> ResidualQuantiser:
    quantiser = ResidualQuantiser(levels=2, size=2, dim=2)
    with torch.no_grad():
        quantiser.codebooks.copy_(torch.tensor([[[0.0, 0.0], [4.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]))
    return quantiser


def test_residual_codes_and_losses_by_hand():
    z = torch.tensor([[4.5, 0.0]], requires_grad=True)
    out = two_level_quantiser()(z)
    # Level 0: nearest is (4, 0), residual (0.5, 0). Level 1: distance to (1, 0) is 0.5, to (0, 1) is sqrt(1.25).
    assert out.codes.tolist() == [[1, 0]]
    assert out.vector.tolist() == [[5.0, 0.0]]
    assert out.straight_through.tolist() == [[5.0, 0.0]]
    assert float(out.codebook_loss.detach()) == pytest.approx(0.25 + 0.25)
    assert float(out.commitment_loss.detach()) == pytest.approx(0.25 + 0.25)


def test_codebook_term_moves_codewords_only_and_commitment_term_the_latents_only():
    quantiser = two_level_quantiser()
    z = torch.tensor([[4.5, 0.0]], requires_grad=True)
    quantiser(z).codebook_loss.backward()
    assert z.grad is None
    # d/de of (r - e)^2 is -2 (r - e): level 0 -2 * 0.5, level 1 -2 * (0.5 - 1).
    assert quantiser.codebooks.grad.tolist() == [[[0, 0], [-1, 0]], [[1, 0], [0, 0]]]
    quantiser.zero_grad()
    quantiser(z).commitment_loss.backward()
    assert quantiser.codebooks.grad is None or not quantiser.codebooks.grad.any()
    # Both levels' residuals move with z: 2 * 0.5 + 2 * (0.5 - 1).
    assert z.grad.tolist() == [[0.0, 0.0]]


def test_straight_through_passes_the_gradient_to_z_unchanged():
    z = torch.tensor([[4.5, 0.3]], requires_grad=True)
    (two_level_quantiser()(z).straight_through * torch.tensor([3.0, -2.0])).sum().backward()
    assert z.grad.tolist() == [[3.0, -2.0]]


def test_residual_quantiser_equals_a_loop():
    torch.manual_seed(0)
    quantiser = ResidualQuantiser(3, 7, 5)
    z = torch.randn(20, 5)
    out = quantiser(z)
    for row in range(20):
        residual = z[row].double()
        for level in range(3):
            distance = (residual - quantiser.codebooks[level].double()).square().sum(1)
            assert int(distance.argmin()) == int(out.codes[row, level])
            residual = residual - quantiser.codebooks[level, out.codes[row, level]].double()
        torch.testing.assert_close(z[row].double() - residual, out.vector[row].double(), atol=1e-5, rtol=1e-5)


def test_levels_have_codebooks_of_their_own():
    quantiser = ResidualQuantiser(3, 7, 5)
    assert quantiser.codebooks.shape == (3, 7, 5)
    assert not torch.equal(quantiser.codebooks[0], quantiser.codebooks[1])


def test_rqvae_loss_is_the_papers_sum():
    torch.manual_seed(0)
    model = RQVAE(6, hidden=(5,), latent=4, levels=2, size=3, beta=0.25)
    x = torch.randn(9, 6)
    reconstruction, out = model(x)
    z = model.encoder(x)
    total = (x - reconstruction).square().sum(1).mean()
    residual = z
    for level in range(2):
        word = model.quantiser.codebooks[level][out.codes[:, level]]
        total = total + 1.25 * (residual - word).square().sum(1).mean()
        residual = residual - word
    torch.testing.assert_close(model.loss({"content": x}), total)
    torch.testing.assert_close(reconstruction, model.decoder(out.vector))


def test_latent_has_no_activation_and_layers_have_relu():
    model = RQVAE(6, hidden=(5, 4), latent=3, levels=1, size=2)
    kinds = [type(layer).__name__ for layer in model.encoder]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [layer.out_features for layer in model.decoder if hasattr(layer, "out_features")] == [4, 5, 6]


def test_kmeans_initialisation_uses_more_codes_than_a_random_one():
    torch.manual_seed(0)
    x = 5 + torch.randn(400, 8)
    model = RQVAE(8, hidden=(16,), latent=8, levels=2, size=32)
    before = code_usage(model.encode(x)[:, 0], 32).used
    model.initialise(x)
    after = code_usage(model.encode(x)[:, 0], 32).used
    assert before < 0.5
    assert after == 1.0


def test_unused_codes_are_revived_on_residuals():
    torch.manual_seed(0)
    model = RQVAE(4, hidden=(), latent=4, levels=1, size=4, revive_every=2)
    with torch.no_grad():
        model.quantiser.codebooks[0, 3] = 1e3
    x = torch.randn(30, 4)
    untouched = model.quantiser.codebooks[0, 3].clone()
    model.loss({"content": x})
    model.on_step_end(0)
    assert torch.equal(model.quantiser.codebooks[0, 3], untouched)
    model.loss({"content": x})
    model.on_step_end(1)
    z = model.encoder(x).detach()
    assert float((z - model.quantiser.codebooks[0, 3].detach()).norm(dim=1).min()) < 1e-6
    assert not model.counts.any()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=50))
def test_code_usage_equals_a_loop(codes):
    usage = code_usage(torch.tensor(codes), 8)
    shares = [codes.count(code) / len(codes) for code in set(codes)]
    assert usage.used == pytest.approx(len(shares) / 8)
    assert usage.entropy == pytest.approx(-sum(share * math.log2(share) for share in shares), abs=1e-9)
    assert usage.perplexity == pytest.approx(2**usage.entropy)


def test_kmeans_finds_separated_clusters_and_fills_every_centroid():
    torch.manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    x = (centres[:, None] + 0.1 * torch.randn(4, 25, 2)).flatten(0, 1)
    found = kmeans(x, 4, generator=torch.Generator().manual_seed(0))
    assert sorted(found.round(decimals=0).abs().tolist()) == sorted(centres.tolist())
    few = kmeans(x[:3], 5, iterations=3)
    assert few.shape == (5, 2)
    assert few.isfinite().all()


def test_residual_kmeans_lowers_the_error_level_by_level():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    codebooks, codes = residual_kmeans(x, 3, 16)
    assert codebooks.shape == (3, 16, 6)
    residual, errors = x, []
    for level in range(3):
        assert torch.equal(nearest_code(residual, codebooks[level]), codes[:, level])
        residual = residual - codebooks[level][codes[:, level]]
        errors.append(float(residual.square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_lsh_codes_are_signs_of_projections():
    x = torch.randn(50, 6)
    codes = lsh_codes(x, 3, 4, generator=torch.Generator().manual_seed(3))
    planes = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    for level in range(3):
        bits = ((x - x.mean(0)) @ planes[level].T > 0).long()
        assert torch.equal(codes[:, level], bits @ torch.tensor([1, 2, 4, 8]))


def test_codes_do_not_depend_on_the_batch():
    torch.manual_seed(0)
    quantiser = ResidualQuantiser(3, 64, 32)
    z = torch.randn(200, 32)
    assert torch.equal(quantiser.codes(z), torch.cat([quantiser.codes(part) for part in z.split(7)]))


def test_codes_are_looked_up_in_float32_even_under_autocast():
    torch.manual_seed(0)
    quantiser = ResidualQuantiser(2, 64, 16)
    z = torch.randn(500, 16)
    expected = quantiser.codes(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quantiser.codes(z), expected)
        assert quantiser(z).vector.dtype == torch.float32


def test_index_back_propagation_picks_one_codeword_and_trains_all():
    torch.manual_seed(0)
    books = ParallelCodebooks(groups=2, size=5, dim=3, temperature=0.7)
    u = torch.randn(4, 2, 3, requires_grad=True)
    out = books(u)
    for n in range(4):
        for g in range(2):
            distance = (u[n, g] - books.codebooks[g]).square().sum(1)
            assert int(out.codes[n, g]) == int(distance.argmin())
            torch.testing.assert_close(out.probability[n, g], (-distance / 0.7).softmax(0))
            torch.testing.assert_close(out.vector[n, g], books.codebooks[g, out.codes[n, g]], atol=1e-6, rtol=1e-6)
    out.vector.sum().backward()
    assert (books.codebooks.grad.abs().sum(-1) > 0).all()
    assert (u.grad.abs().sum(-1) > 0).all()


def test_index_gradient_is_that_of_the_soft_distribution():
    """e = hard - sg[p] + p: the gradient is hard's share of the codewords plus p's whole derivative."""
    torch.manual_seed(0)
    books = ParallelCodebooks(groups=1, size=4, dim=3)
    u = torch.randn(1, 1, 3)
    weight = torch.randn(3)
    (books(u).vector[0, 0] @ weight).backward()
    table = books.codebooks.detach()[0].clone().requires_grad_(True)
    fixed = table.detach()
    p = (-(u[0] - table).square().sum(-1)).softmax(-1)
    hard = torch.nn.functional.one_hot(p.argmax(), 4).float()
    (hard @ table @ weight + p @ fixed @ weight).backward()
    torch.testing.assert_close(books.codebooks.grad[0], table.grad)


def test_vector_estimator_trains_the_chosen_codeword_only():
    torch.manual_seed(0)
    books = ParallelCodebooks(groups=1, size=5, dim=3, estimator="vector")
    u = torch.randn(1, 1, 3, requires_grad=True)
    out = books(u)
    out.vector.sum().backward()
    touched = books.codebooks.grad[0].abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [int(out.codes[0, 0])]
    assert u.grad.tolist() == [[[1.0, 1.0, 1.0]]]
    with pytest.raises(ValueError, match="estimator"):
        ParallelCodebooks(1, 5, 3, estimator="soft")
