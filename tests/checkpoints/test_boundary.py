"""The dtype and device boundary between a checkpoint and a head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auto_research.checkpoints.boundary import from_model, to_model
from auto_research.checkpoints.pooling import hidden_states, masked_mean
from auto_research.checkpoints.resolve import Resolved, load_causal_lm


def test_bf16_states_fed_straight_into_an_fp32_head_fail() -> None:
    """The fault that the boundary exists for; if PyTorch ever promotes here, this file can go."""
    with pytest.raises(RuntimeError, match="dtype"):
        nn.Linear(4, 2)(torch.ones(1, 4, dtype=torch.bfloat16))


def test_bf16_checkpoint_to_fp32_head_and_back_with_gradients(micro_lm: Resolved) -> None:
    torch.manual_seed(0)
    model, tokenizer = load_causal_lm(micro_lm, "cpu", torch.bfloat16, frozen=True)
    head = nn.GRU(model.config.hidden_size, 8, batch_first=True)
    soft_prompt = nn.Linear(8, model.config.hidden_size)
    batch = tokenizer(["to be or not", "a horse"], padding=True, return_tensors="pt")

    embedded = model.get_input_embeddings()(batch["input_ids"])
    user = torch.randn(2, 8, requires_grad=True)
    instruction = to_model(soft_prompt(user).unsqueeze(1), model)
    assert instruction.dtype == torch.bfloat16
    mask = torch.cat([torch.ones(2, 1, dtype=torch.long), batch["attention_mask"]], dim=1)
    output = model.model(inputs_embeds=torch.cat([instruction, embedded], dim=1), attention_mask=mask)
    states = from_model(hidden_states(output), head)
    assert states.dtype == torch.float32
    out, _ = head(states)
    masked_mean(out, mask).sum().backward()

    for tensor in (user.grad, soft_prompt.weight.grad, head.weight_ih_l0.grad):
        assert tensor is not None
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
        assert tensor.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


def test_conversion_keeps_values_and_gradients() -> None:
    x = torch.tensor([1.0, 2.5, -3.0], requires_grad=True)
    narrow = nn.Linear(3, 1).to(torch.bfloat16)
    converted = to_model(x, narrow)
    assert converted.dtype == torch.bfloat16
    assert from_model(converted).tolist() == [1.0, 2.5, -3.0]
    (from_model(converted) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_integers_keep_their_dtype() -> None:
    ids = torch.tensor([[1, 2]])
    assert to_model(ids, nn.Linear(2, 2).to(torch.bfloat16)).dtype == torch.int64
    assert from_model(ids, torch.zeros(1)).dtype == torch.int64


def test_like_a_tensor_a_module_or_a_dtype() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert from_model(x).dtype == torch.float32
    assert from_model(x, torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert from_model(x, torch.float16).dtype == torch.float16
    assert from_model(x, nn.Linear(2, 2)).dtype == torch.float32
    assert from_model(x, torch.zeros(1, dtype=torch.int64)).dtype == torch.bfloat16


def test_module_whose_weights_are_integer_buffers_takes_the_dtype_of_its_scale() -> None:
    class Quantised(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int8))
            self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))

    assert to_model(torch.ones(2), Quantised()).dtype == torch.bfloat16


def test_a_lora_model_over_bf16_still_takes_bf16(micro_lm: Resolved) -> None:
    from auto_research.checkpoints.adapters import lora

    model, _ = load_causal_lm(micro_lm, "cpu", torch.bfloat16)
    adapted = lora(model, 2, ["q_proj"])
    assert any(p.dtype == torch.float32 for p in adapted.parameters() if p.requires_grad)
    assert to_model(torch.ones(1), adapted).dtype == torch.bfloat16


def test_module_without_tensors_changes_nothing() -> None:
    x = torch.ones(2, dtype=torch.float16)
    assert to_model(x, nn.ReLU()) is x
