"""The checkpoint that a workflow runs on: which one, what it is called in the record, its shape, and what it needs.

The first of a workflow's checkpoints that is on this machine serves, as in `reproduce`; the size `micro` 1 takes the
last one, which is built here in seconds, even where a real one is at hand. Nothing here needs torch before `load`.

Letters: N parameters, T trainable ones, B rows of a batch, S tokens of a row, L layers, d width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.checkpoints.resolve import CATALOGUE, Resolved

if TYPE_CHECKING:
    import torch

MICRO = "micro"
"""Name of the size that decides: 0 the real checkpoint where it is on this machine, 1 the micro one in any case."""

RUNTIME_BYTES = 700 * 2**20
"""CUDA's context and libraries, and the allocator's slack, on a card; a process with the libraries, on a CPU."""

LANGUAGE_MODELS = ("smollm2-135m", "micro-lm")
"""What the language workflows run on, in order of preference."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that serves, and the name of the one that the workflow is about."""

    resolved: Resolved
    wanted: str

    @property
    def label(self) -> str:
        """Its name, and whether it was dequantised: `smollm2-135m (Q4_1 dequantised)`."""
        name, note = self.resolved.name, self.resolved.note
        prefix = "dequantised from "
        return f"{name} ({note.removeprefix(prefix).split()[0]} dequantised)" if note.startswith(prefix) else name

    @property
    def stand_in(self) -> str:
        """For `Data.stand_in`: empty when this is a copy of the checkpoint that the workflow is about."""
        if self.resolved.name == self.wanted:
            return ""
        wanted = CATALOGUE[self.wanted]
        about, source = (
            wanted.about.split(",")[0],
            "public text" if wanted.kind == "causal_lm" else "generated pictures",
        )
        how = f"auto-research prepare {self.wanted}" if wanted.package is None else "make checkpoints"
        return f"{self.label}, built here from {source}, stands in for {about}: `{how}` brings it"

    @property
    def served(self) -> dict[str, str]:
        """For `Data.checkpoints`: label -> where it came from."""
        return {self.label: self.resolved.describe().removeprefix(f"{self.resolved.name} ")}

    @property
    def digests(self) -> dict[str, str]:
        """For `Data.digests`: SHA-256 of configuration, tokenizer and weights."""
        return {f"checkpoint {self.label}": self.resolved.digest()}

    @property
    def shape(self) -> LanguageShape:
        """Sizes of a causal language model, from its configuration alone."""
        return _shape(self.resolved.path)

    def load(self, device: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        """(model, tokenizer) of a causal language model; FP32 weights unless `dtype` says otherwise.

        Adam's steps are far below half a BF16 unit of most weights, so weights that are trained are FP32.
        """
        import torch

        from auto_research.checkpoints.resolve import load_causal_lm

        return load_causal_lm(self.resolved, device, torch.float32 if dtype is None else dtype)

    def tokenizer(self) -> Any:
        """The tokenizer as `load` gives it, without the weights."""
        from auto_research.checkpoints.resolve import load_tokenizer

        return load_tokenizer(self.resolved, _skeleton(self.resolved.path))


def choose(names: Sequence[str], values: Mapping[str, int]) -> Checkpoint:
    """The checkpoint of a run: the first of `names` on this machine, or the last when `values` has `micro` 1.

    `values` are the workflow's sizes. A package's weights are converted here, once. Raises `UserError` for a
    damaged one.
    """
    from auto_research.checkpoints.resolve import available, resolve

    micro = bool(values.get(MICRO, 0))
    name = names[-1] if micro else next((name for name in names if available(name)), names[-1])
    return Checkpoint(resolve(name), names[0])


# ------------------------------------------------------------------------------------------------- shape and memory


@dataclass(frozen=True)
class LanguageShape:
    """Sizes of a causal Transformer.

    Attributes:
        weights: name -> shape of every parameter; a tied head is in it once.
        linear: name -> (outputs, inputs) of the layers that an adapter can join: all linear ones but the head.
        hidden: width of the feed-forward network.
        kv_width: numbers that one token adds to the keys of one layer, and to its values.
    """

    weights: Mapping[str, tuple[int, ...]]
    linear: Mapping[str, tuple[int, int]]
    layers: int
    width: int
    hidden: int
    heads: int
    kv_width: int
    vocabulary: int
    positions: int

    @property
    def parameters(self) -> int:
        """N."""
        return sum(math.prod(shape) for shape in self.weights.values())

    def adapter(self, r: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the matrices of rank `r` that LoRA adds to every linear layer; empty for 0."""
        if not r:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in self.linear.items():
            found |= {f"{name}.lora_A": (r, inputs), f"{name}.lora_B": (outputs, r)}
        return found

    def trainable(self, r: int) -> int:
        """T: all parameters, or those of adapters of rank `r`."""
        return sum(math.prod(shape) for shape in self.adapter(r).values()) if r else self.parameters

    def forward_flops(self, rows: int, tokens: float) -> float:
        """Multiply-adds count two: 2 N per token, and 4 S d for its causal attention in each layer, halved."""
        head = self.vocabulary * self.width
        matrices = sum(out * inputs for out, inputs in self.linear.values()) + head
        return rows * tokens * (2 * matrices + 2 * self.layers * tokens * self.width)

    def training_flops(self, rows: int, tokens: float, *, frozen: bool = False) -> float:
        """Of one update: the backward pass costs twice the forward pass, once where the weights are `frozen`."""
        return (2 if frozen else 3) * self.forward_flops(rows, tokens)

    def training_bytes(
        self, rows: int, tokens: int, *, r: int = 0, weight_bytes: int = 4, references: int = 0, logits: bool = True
    ) -> int:
        """Peak memory of a training step with AdamW and BF16 compute, without activation checkpointing.

        Weights 4 N (2 N when held in BF16), the BF16 copies that autocast keeps 2 N, gradients 4 T, AdamW's moments
        8 T; a reference model 4 N each. Activations are (34 d + 8 hidden) bytes a token and layer: what Korthikanti et
        al. (2205.05198) count for 16-bit training, less the attention map, which fused attention does not store, more
        the gated feed-forward network. Logits of B S V in FP32 with their gradient, unless the loss never builds them.
        The layer norms' FP32 and the allocator's slack are in `RUNTIME_BYTES`.
        """
        n, t = self.parameters, self.trainable(r)
        t_weights = t if r else 0
        held = weight_bytes * n + 4 * t_weights + (2 * n if weight_bytes == 4 else 0)
        moments = (4 if r or weight_bytes == 4 else 2) * 3 * t
        positions = rows * tokens
        activations = positions * self.layers * (34 * self.width + 8 * self.hidden)
        heads = positions * self.vocabulary * 8 if logits else positions * 4 * self.width
        return held + moments + 4 * n * references + activations + heads + RUNTIME_BYTES

    def inference_bytes(self, rows: int, tokens: int, *, weight_bytes: int = 4) -> int:
        """Peak memory of generation: weights, keys and values of every token, the last logits in FP32."""
        cache = rows * tokens * 2 * self.layers * self.kv_width * weight_bytes
        return weight_bytes * self.parameters + cache + rows * self.vocabulary * 8 + RUNTIME_BYTES


@functools.lru_cache(maxsize=8)
def _skeleton(path: Path) -> Any:
    """The model of a configuration, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from auto_research.checkpoints.store import quiet

    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@functools.lru_cache(maxsize=8)
def _shape(path: Path) -> LanguageShape:
    import torch

    model = _skeleton(path)
    head, config = model.get_output_embeddings(), model.config
    heads = config.num_attention_heads
    return LanguageShape(
        weights={name: tuple(weight.shape) for name, weight in model.named_parameters()},
        linear={
            name: (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        },
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        hidden=config.intermediate_size,
        heads=heads,
        kv_width=(getattr(config, "num_key_value_heads", None) or heads)
        * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
    )
