"""LoRA on a micro model and merging it back."""

from __future__ import annotations

import pytest
import torch

from auto_research.checkpoints.adapters import lora, merge
from auto_research.checkpoints.resolve import Resolved, load_causal_lm
from auto_research.runtime.errors import UserError


def test_lora_starts_as_the_model_trains_only_itself_and_merges_exactly(micro_lm: Resolved) -> None:
    torch.manual_seed(0)
    model, tokenizer = load_causal_lm(micro_lm, "cpu")
    batch = tokenizer(["to be or not to be"], return_tensors="pt")
    with torch.no_grad():
        before = model(**batch).logits
    names = {name for name, _ in model.named_parameters()}
    base = {name: tensor.clone() for name, tensor in model.named_parameters()}

    adapted = lora(model, 4, ["q_proj", "v_proj"], 8)
    trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    width, kv = model.config.hidden_size, model.config.hidden_size // 2
    assert sum(p.numel() for p in trainable.values()) == model.config.num_hidden_layers * 4 * (2 * width + width + kv)
    with torch.no_grad():
        torch.testing.assert_close(adapted(**batch).logits, before)

    optimizer = torch.optim.SGD(trainable.values(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    adapted.eval()
    with torch.no_grad():
        after = adapted(**batch).logits
    assert not torch.allclose(after, before)

    # W + (alpha / r) B A, by hand, for one matrix.
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    expected = base["model.layers.0.self_attn.q_proj.weight"] + 8 / 4 * (
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    merged = merge(adapted)
    assert {name for name, _ in merged.named_parameters()} == names
    torch.testing.assert_close(merged.model.layers[0].self_attn.q_proj.weight, expected.detach())
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(dict(merged.named_parameters())[untouched], base[untouched])
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, after, atol=1e-4, rtol=1e-4)


def test_all_linear_leaves_the_language_head_alone(micro_lm: Resolved) -> None:
    model, _ = load_causal_lm(micro_lm, "cpu")
    adapted = lora(model, 2)
    touched = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in adapted.named_parameters() if p.requires_grad}
    assert touched == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_unknown_targets_are_one_sentence(micro_lm: Resolved) -> None:
    model, _ = load_causal_lm(micro_lm, "cpu")
    with pytest.raises(UserError, match="no module of LlamaForCausalLM matches the LoRA targets"):
        lora(model, 2, ["query"])


def test_adapters_that_are_not_finite_are_not_merged(micro_lm: Resolved) -> None:
    model, _ = load_causal_lm(micro_lm, "cpu")
    adapted = lora(model, 2, ["q_proj"])
    with torch.no_grad():
        next(p for p in adapted.parameters() if p.requires_grad).fill_(float("nan"))
    with pytest.raises(UserError, match="cannot be merged"):
        merge(adapted)
