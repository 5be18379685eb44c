"""Soft instructions before a text: against Transformers' own forward over token ids, in both dtypes."""

from __future__ import annotations

import pytest
import torch

from auto_research.checkpoints.resolve import load_text_encoder
from auto_research.checkpoints.soft_prompt import HistoryText, SoftPromptLM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bodies(micro_lm):
    return {dtype: load_text_encoder(micro_lm, CPU, dtype)[0] for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(scope="module")
def tokenizer(micro_lm):
    return load_text_encoder(micro_lm, CPU)[1]


def text(batch: int = 2, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 500, (batch, length), generator=draw)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def test_instructions_that_are_token_embeddings_read_as_those_tokens(bodies):
    body = bodies[torch.float32]
    language = SoftPromptLM(body)
    prompt, (tokens, valid) = torch.tensor([[7, 99, 23], [4, 5, 6]]), text()
    states, real = language(language.embed(prompt), tokens, valid)
    expected = body(input_ids=torch.cat([prompt, tokens], 1)).last_hidden_state
    torch.testing.assert_close(states, expected)
    assert states.shape == (2, 8, language.width)
    assert real.all()


def test_padding_on_the_right_changes_no_real_state(bodies):
    language = SoftPromptLM(bodies[torch.float32])
    prompt, (tokens, valid) = language.embed(torch.tensor([[7, 99], [4, 5]])), text()
    states, _ = language(prompt, tokens, valid)
    padded = [torch.nn.functional.pad(x, (0, 3)) for x in (tokens, valid)]
    wider, real = language(prompt, *padded)
    torch.testing.assert_close(wider[:, :7], states)
    assert real.sum(1).tolist() == [7, 7]


def test_instructions_do_not_see_the_text_and_the_text_sees_them(bodies):
    language = SoftPromptLM(bodies[torch.float32])
    prompt, (tokens, valid) = language.embed(torch.tensor([[7, 99], [4, 5]])), text()
    states, _ = language(prompt, tokens, valid)
    other_text, _ = language(prompt, tokens + 1, valid)
    torch.testing.assert_close(other_text[:, :2], states[:, :2])
    other_prompt, _ = language(prompt + 0.1, tokens, valid)
    assert (other_prompt[:, 2:] - states[:, 2:]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_crossings_convert_and_gradients_return_in_float32(bodies, dtype):
    body = bodies[dtype]
    language = SoftPromptLM(body)
    assert body.dtype == dtype
    seen = []
    handle = body.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    prompt, (tokens, valid) = torch.randn(2, 3, language.width).mul_(language.scale).requires_grad_(), text()
    states, _ = language(prompt, tokens, valid)
    handle.remove()
    assert seen == [dtype]
    assert states.dtype == torch.float32
    torch.nn.Linear(language.width, 4)(states).square().sum().backward()
    assert prompt.grad.dtype == torch.float32
    assert prompt.grad.isfinite().all()
    assert (prompt.grad.abs().amax(-1) > 0).all()
    assert all(p.grad is None for p in body.parameters())


def test_bfloat16_reads_nearly_as_float32(bodies):
    prompt, (tokens, valid) = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)) * 0.02, text()
    states = [SoftPromptLM(body)(prompt, tokens, valid)[0] for body in bodies.values()]
    assert torch.cosine_similarity(*states, dim=-1).min() > 0.99


def test_a_shared_body_belongs_to_no_state(bodies):
    language = SoftPromptLM(bodies[torch.float32])
    assert not list(language.parameters())
    assert not language.state_dict()
    assert language.to("cpu").body is bodies[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_start_at_the_frozen_model_and_train_without_touching_it(bodies, dtype):
    body = bodies[dtype]
    frozen, tuned = SoftPromptLM(body), SoftPromptLM(body, rank=2)
    prompt, (tokens, valid) = torch.randn(2, 3, 128) * 0.02, text()
    torch.testing.assert_close(tuned(prompt, tokens, valid)[0], frozen(prompt, tokens, valid)[0])
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    tuned(prompt, tokens, valid)[0].square().sum().backward()
    assert all(p.grad is not None for p in trained.values())
    assert not any("lora" in name for name, _ in body.named_parameters())


def test_history_text_equals_a_loop():
    titles = [[11, 12], [21], [31, 32, 33], [41, 42]]
    sequence = torch.tensor([[0, 1, 3], [2, 4, 1], [0, 0, 2]])
    tokens, valid = HistoryText(titles)(sequence, 2)
    for row, items in enumerate(sequence.tolist()):
        expected = [token for item in items[-2:] if item for token in titles[item - 1]]
        assert tokens[row][valid[row]].tolist() == expected
        assert valid[row].tolist() == [i < len(expected) for i in range(tokens.shape[1])]
    assert tokens.shape == (3, 5)


def test_titles_are_cut_and_end_in_a_line_break(tokenizer):
    made = HistoryText.of_titles(tokenizer, ["to be, or not to be, that is the question", "thou"], 4)
    rows = [made.tokens[i, : made.length[i]].tolist() for i in (1, 2)]
    assert len(rows[0]) == 4
    assert len(rows[1]) <= 4
    assert all(tokenizer.decode(row).endswith("\n") for row in rows)
    assert int(made.length[0]) == 0
    with pytest.raises(ValueError, match="leave no room"):
        HistoryText.of_titles(tokenizer, ["thou"], 1)
