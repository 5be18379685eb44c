"""Tiny random Hugging Face models of many architectures, with a batch and a loss each."""

from __future__ import annotations

from typing import Any

import torch

#: Sizes that most configurations call the same.
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "Phi": {},
    "Phi3": {},
    "GPTNeoX": {},
    "StableLm": {},
    "Olmo": {},
    "Olmo2": {},
    "Granite": {},
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "SmolLM3": {},
    "Cohere": {},
    "Starcoder2": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
}
ENCODERS = {
    "Bert": {},
    "Roberta": {"max_position_embeddings": 70},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Electra": {"embedding_size": 32},
    "Albert": {"embedding_size": 16},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "MPNet": {},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
}
SEQ2SEQ = {
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "Bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
}


def build(name: str) -> torch.nn.Module:
    """A tiny model of architecture ``name``, seeded."""
    import transformers

    kind, extra = _kind(name)
    config_class = getattr(transformers, f"{name}Config")
    known = config_class().to_dict()
    wanted = {key: value for key, value in SMALL.items() if key in known} | extra
    if kind == "encoder":
        wanted["num_labels"] = 3
    config = config_class(**wanted)
    torch.manual_seed(0)
    heads = {"causal": "ForCausalLM", "encoder": "ForSequenceClassification", "seq2seq": "ForConditionalGeneration"}
    cls = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else heads[kind]))
    return cls(config).eval()


def _kind(name: str) -> tuple[str, dict[str, Any]]:
    if name in CAUSAL:
        return "causal", CAUSAL[name]
    if name in ENCODERS:
        return "encoder", ENCODERS[name]
    return "seq2seq", SEQ2SEQ[name]


def batch(name: str, device: str) -> dict[str, torch.Tensor]:
    """Two padded sequences with labels."""
    kind, _ = _kind(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = torch.tensor([0, 2]) if kind == "encoder" else ids.clone()
    return {k: v.to(device) for k, v in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def train(name: str, device: str, steps: int = 2, autocast: torch.dtype | None = None) -> list[float]:
    """Losses of a few optimiser steps."""
    model = build(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = batch(name, device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


NAMES = [*CAUSAL, *ENCODERS, *SEQ2SEQ]
