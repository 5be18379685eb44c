"""Completion batches, scores and greedy decoding, against Hugging Face's own loss and `generate`."""

import pytest
import torch
from torch.nn import functional as F

from auto_research.tasks import generation as g

CPU = torch.device("cpu")
END = PAD = 1


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.4, pad_token_id=PAD, eos_token_id=END, bos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["gel pens\n", "ink cartridge\n", "click gel pens\n", "purchase ink cartridge\n"] * 3
    torch.manual_seed(0)
    return g.scratch_causal_lm(texts, vocabulary=300, width=16, layers=1, heads=2)[1]


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [3, 4]]
COMPLETIONS = [[13, 14, END], [15, END], [16, 17, 18, END]]


def test_labels_hold_the_completion_and_its_end_even_where_pad_is_the_end_token():
    batch = g.completion_batch(PROMPTS, COMPLETIONS, PAD)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        real = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][real].tolist() == prompt + completion
        assert batch["labels"][row][batch["labels"][row] != g.IGNORED].tolist() == completion
        assert batch["labels"][row, -1] == END
        assert not real[: batch["input_ids"].shape[1] - len(prompt) - len(completion)].any()
    with pytest.raises(ValueError, match="completion"):
        g.completion_batch([[3]], [[]], PAD)


def test_loss_and_log_probabilities_against_hugging_face_row_by_row(model):
    losses, sums = [], []
    with torch.no_grad():
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            ids = torch.tensor([prompt + completion])
            labels = torch.tensor([[g.IGNORED] * len(prompt) + completion])
            losses.append(float(model(input_ids=ids, labels=labels).loss) * len(completion))
            logits = F.log_softmax(model(input_ids=ids).logits.double(), -1)[0]
            sums.append(sum(float(logits[len(prompt) + i - 1, t]) for i, t in enumerate(completion)))
        wrapped = g.CompletionModel(model)
        loss = float(wrapped.loss(g.completion_batch(PROMPTS, COMPLETIONS, PAD)))
    assert loss == pytest.approx(sum(losses) / sum(map(len, COMPLETIONS)), rel=1e-5)
    found = g.sequence_log_probability(model, PROMPTS, COMPLETIONS, PAD, CPU, batch_size=2)
    assert found.tolist() == pytest.approx(sums, rel=1e-4)


def test_prompt_loss_is_the_loss_of_the_whole_row(model):
    batch = g.completion_batch(PROMPTS[:1], COMPLETIONS[:1], PAD)
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        found = g.CompletionModel(model, prompt_loss=True).loss(batch)
    torch.testing.assert_close(found, expected)


def test_log_softmax_is_float32_in_a_bfloat16_model(model):
    import copy

    half = copy.deepcopy(model).bfloat16()
    assert g.sequence_log_probability(half, PROMPTS, COMPLETIONS, PAD, CPU).dtype == torch.float32
    assert g.CompletionModel(half).loss(g.completion_batch(PROMPTS, COMPLETIONS, PAD)).dtype == torch.float32


@pytest.mark.filterwarnings("error::FutureWarning")
def test_batched_greedy_decoding_equals_generate(model):
    found = g.greedy_decode(model, PROMPTS, max_new_tokens=6, end=END, pad=PAD, device=CPU, batch_size=2)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=END
        )
        expected = out[0, len(prompt) :].tolist()
        assert answer == (expected[: expected.index(END)] if END in expected else expected)


def test_trie_decoding_writes_only_known_queries_and_the_likeliest_step_by_step(model):
    queries = [[13, 14], [13], [15, 16, 17], [20, 14]]
    trie = g.query_trie(queries, END)
    found = g.greedy_decode(model, PROMPTS, max_new_tokens=2, end=END, pad=PAD, device=CPU, trie=trie)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer in queries
        written: list[int] = []
        while True:  # greedy by hand
            allowed = {(q + [END])[len(written)] for q in queries if q[: len(written)] == written}
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + written])).logits[0, -1]
            best = max(sorted(allowed), key=lambda t: float(logits[t]))
            if best == END:
                break
            written.append(best)
        assert answer == written


def test_pieces_add_up_and_the_frame_is_chatml(tokenizer):
    pieces = g.Pieces(tokenizer)
    before, after = g.chat_frame(tokenizer)
    text = tokenizer.decode([*before, *pieces("click gel pens\n"), *after])
    assert text == "<|im_start|>user\nclick gel pens\n<|im_end|>\n<|im_start|>assistant\n"
    assert not text.endswith(" ")
    assert pieces("gel pens") is pieces("gel pens")


def test_served_model_decodes_equal_prompts_once_and_counts_bytes(tokenizer):
    torch.manual_seed(1)
    model, _ = g.scratch_causal_lm(["gel pens"], vocabulary=300, width=16, layers=1, heads=2)
    model.resize_token_embeddings(len(tokenizer))
    lm = g.ServedLM(model, tokenizer, CPU, longest=4)
    calls = []
    hook = lm.model.register_forward_hook(lambda *_: calls.append(1))
    pieces = g.Pieces(tokenizer)
    prompt = pieces("click gel pens\n")
    first = lm.write([prompt, pieces("ink cartridge"), prompt])
    count = len(calls)
    assert first[0] == first[2]
    assert lm.write([prompt]) == first[:1]
    assert len(calls) == count > 0
    hook.remove()
    closed = g.ServedLM(model, tokenizer, CPU, only=["gel pens", "ink cartridge"])
    assert set(closed.write([prompt, pieces("x")])) <= {"gel pens", "ink cartridge"}
    assert lm.bytes > sum(p.numel() for p in model.parameters()) * 4
