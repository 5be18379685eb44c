"""Hidden states from every kind of output, masked pooling, and the vectors' cache."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auto_research.checkpoints import pooling
from auto_research.checkpoints.pooling import encode_texts, hidden_states, last_valid, masked_mean, token_states
from auto_research.checkpoints.resolve import Resolved, load_causal_lm, load_text_encoder
from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import UserError

TEXTS = ["Toy Story (1995)", "Jumanji", "a much longer text about a horse and a kingdom", "", "Jumanji"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vector cache of the test's own (the micro checkpoints are resolved before it is moved)."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "vectors"


@pytest.mark.parametrize("batch", [1, 3])
def test_hidden_states_keep_the_batch_dimension_of_every_output(micro_encoder: Resolved, batch: int) -> None:
    model, tokenizer = load_text_encoder(micro_encoder, "cpu")
    inputs = tokenizer(["good night"] * batch, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs)
        as_tuple = model(**inputs, return_dict=False)
        embedded = model.embeddings(inputs["input_ids"])
        layer = model.encoder.layer[0](embedded)  # a tuple in Transformers 4, a tensor in Transformers 5
    expected = output.last_hidden_state
    assert expected.shape[0] == batch
    for case in (output, as_tuple, expected, (expected,), [expected, None]):
        torch.testing.assert_close(hidden_states(case), expected)
    assert hidden_states(layer).shape == expected.shape
    assert hidden_states((layer,) if isinstance(layer, Tensor) else layer).shape == expected.shape


def test_hidden_states_of_a_language_head_are_not_its_logits(micro_lm: Resolved) -> None:
    model, tokenizer = load_causal_lm(micro_lm, "cpu")
    inputs = tokenizer("good night", return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs, output_hidden_states=True)
        plain = model(**inputs)
    assert hidden_states(output).shape[-1] == model.config.hidden_size
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        hidden_states(plain)


def test_a_lost_batch_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(batch, tokens, width\), not \(5, 8\)"):
        hidden_states(torch.zeros(5, 8))
    with pytest.raises(ValueError, match=r"\(5, 8\)"):
        hidden_states(SimpleNamespace(last_hidden_state=torch.zeros(5, 8)))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**16))
def test_pooling_equals_a_loop(rows: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, 3, generator=generator)
    mask = torch.randint(0, 2, (rows, length), generator=generator)
    mean, last = masked_mean(hidden, mask), last_valid(hidden, mask)
    for row in range(rows):
        valid = [hidden[row, t] for t in range(length) if mask[row, t]]
        expected = torch.stack(valid).double().mean(0).float() if valid else torch.zeros(3)
        torch.testing.assert_close(mean[row], expected)
        torch.testing.assert_close(last[row], valid[-1] if valid else torch.zeros(3))


def test_padding_may_hold_anything() -> None:
    hidden = torch.tensor([[[1.0], [3.0], [float("nan")], [float("inf")]]])
    assert masked_mean(hidden, torch.tensor([[1, 1, 0, 0]])).item() == 2.0
    assert last_valid(hidden, torch.tensor([[True, True, False, False]])).item() == 3.0


def test_masked_mean_of_bf16_sums_in_fp32() -> None:
    hidden = torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    pooled = masked_mean(hidden, torch.ones(1, 1000))
    assert pooled.dtype == torch.bfloat16
    assert pooled.item() == 1.0  # a BF16 running sum stops growing at 256


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    for pool in (masked_mean, last_valid):
        with pytest.raises(ValueError, match=r"need hidden \(B, T, D\)"):
            pool(torch.zeros(2, 3, 4), torch.ones(2, 4))


@pytest.mark.parametrize("name", ["micro_encoder", "micro_lm"])
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_batching_sorting_and_repeats_change_nothing(
    name: str, kind: pooling.Pooling, request: pytest.FixtureRequest
) -> None:
    """Against one text at a time through the model directly, without padding."""
    resolved: Resolved = request.getfixturevalue(name)
    vectors = encode_texts(resolved, TEXTS, "cpu", batch_size=2, pooling=kind, normalise=False, cache=False)
    model, tokenizer = load_text_encoder(resolved, "cpu")
    assert vectors.dtype == torch.float32
    for text, vector in zip(TEXTS, vectors):
        with torch.inference_mode():
            states = model(**tokenizer(text or " ", return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(0) if kind == "mean" else states[-1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(vectors[1], vectors[4])


def test_normalised_vectors_have_length_one_and_no_texts_give_no_rows(micro_encoder: Resolved) -> None:
    vectors = encode_texts(micro_encoder, TEXTS, "cpu", cache=False)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(TEXTS)))
    assert not vectors.requires_grad
    assert encode_texts(micro_encoder, [], "cpu", cache=False).shape == (0, vectors.shape[1])


def test_texts_are_cut_at_max_length(micro_lm: Resolved) -> None:
    same_start = ["to be or not to be", "to be or a horse"]
    short = encode_texts(micro_lm, same_start, "cpu", max_length=2, cache=False)
    torch.testing.assert_close(short[0], short[1])
    assert not torch.allclose(*encode_texts(micro_lm, same_start, "cpu", cache=False))


def test_bf16_checkpoint_gives_float32_vectors_close_to_fp32(micro_encoder: Resolved) -> None:
    narrow = encode_texts(micro_encoder, TEXTS, "cpu", dtype=torch.bfloat16, cache=False)
    assert narrow.dtype == torch.float32
    cosine = (narrow * encode_texts(micro_encoder, TEXTS, "cpu", cache=False)).sum(-1)
    assert cosine.min() > 0.99


def test_token_states_are_padded_with_zeros_and_pool_to_the_vectors(micro_encoder: Resolved) -> None:
    states, mask = token_states(micro_encoder, TEXTS, "cpu", batch_size=2)
    assert states.shape[:2] == mask.shape == (len(TEXTS), int(mask.sum(1).max()))
    assert states[~mask].abs().sum() == 0
    vectors = encode_texts(micro_encoder, TEXTS, "cpu", normalise=False, cache=False)
    torch.testing.assert_close(masked_mean(states, mask), vectors, atol=1e-5, rtol=1e-4)


def test_token_states_of_a_layer(micro_encoder: Resolved) -> None:
    model, tokenizer = load_text_encoder(micro_encoder, "cpu")
    states, mask = token_states(micro_encoder, ["good night"], "cpu", layer=2)
    with torch.inference_mode():
        output = model(**tokenizer("good night", return_tensors="pt"), output_hidden_states=True)
    torch.testing.assert_close(states, output.hidden_states[2].clone())
    assert mask.all()


def test_a_checkpoint_that_overflows_is_one_sentence_and_is_not_cached(
    micro_encoder: Resolved, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, states, mask = [0], torch.full((1, 2, 128), float("inf")), torch.ones(1, 2)
    monkeypatch.setattr(pooling, "_forward", lambda *_, **__: iter([(rows, states, mask)]))
    with pytest.raises(UserError, match=r"micro-encoder gives vectors that are not finite.*dtype=torch.float32"):
        encode_texts(micro_encoder, ["a"], "cpu")
    assert not own_cache.exists()


# The cache


def _count_forward(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    forward = pooling._forward

    def counting(*arguments: object, **named: object) -> object:
        calls.append(1)
        return forward(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(pooling, "_forward", counting)
    return calls


def test_vectors_are_computed_once_per_texts_and_settings(
    micro_encoder: Resolved, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count_forward(monkeypatch)
    first = encode_texts(micro_encoder, TEXTS, "cpu")
    assert torch.equal(encode_texts(micro_encoder, TEXTS, "cpu", batch_size=3), first)
    assert len(calls) == 1
    for changed in ({"normalise": False}, {"pooling": "last"}, {"max_length": 8}, {"dtype": torch.bfloat16}):
        encode_texts(micro_encoder, TEXTS, "cpu", **changed)  # type: ignore[arg-type]
    encode_texts(micro_encoder, TEXTS[::-1], "cpu")
    assert len(calls) == 6
    assert len(list(own_cache.iterdir())) == 6


@pytest.mark.parametrize(
    "planted",
    [
        torch.zeros(len(TEXTS), 7),
        torch.zeros(len(TEXTS) - 1, 128),
        torch.zeros(128),
        torch.zeros(len(TEXTS), 128, dtype=torch.bfloat16),
        torch.full((len(TEXTS), 128), float("nan")),
        None,
    ],
    ids=["width", "rows", "lost dimension", "dtype", "non-finite", "truncated"],
)
def test_a_wrong_cache_is_rejected_and_made_again(
    planted: Tensor | None, micro_encoder: Resolved, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    right = encode_texts(micro_encoder, TEXTS, "cpu")
    (file,) = own_cache.iterdir()
    if planted is None:
        file.write_bytes(file.read_bytes()[:-10])
    else:
        save_file({"vectors": planted}, file)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(encode_texts(micro_encoder, TEXTS, "cpu"), right)
    assert "encoding again" in caplog.text
    assert list(own_cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_only_slower(
    micro_encoder: Resolved, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert encode_texts(micro_encoder, TEXTS, "cpu").shape == (len(TEXTS), 128)
    assert "cannot keep vectors" in caplog.text


def test_an_untrained_encoder_is_repeatable_and_knows_nothing_of_the_checkpoint(micro_encoder: Resolved) -> None:
    trained = encode_texts(micro_encoder, TEXTS, "cpu", cache=False)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = encode_texts(micro_encoder, TEXTS, "cpu", cache=False, untrained=0)
    assert torch.equal(torch.rand(2), expected)  # the caller's generator is left alone
    assert first.shape == trained.shape
    assert torch.equal(first, encode_texts(micro_encoder, TEXTS, "cpu", cache=False, untrained=0))
    assert not torch.allclose(first, encode_texts(micro_encoder, TEXTS, "cpu", cache=False, untrained=1), atol=1e-3)
    assert not torch.allclose(first, trained, atol=1e-3)
    # The two kinds of vectors never share a cached file.
    kept = encode_texts(micro_encoder, TEXTS, "cpu", untrained=0)
    torch.testing.assert_close(encode_texts(micro_encoder, TEXTS, "cpu"), trained)
    torch.testing.assert_close(kept, first)
