"""Micro language models from Transformers configurations: shapes, their costs, training and evaluation.

A `Shape` is everything that decides the parameters. All models are Transformers' own, with random initialisation:

    family       attention                        positions   feed-forward   norm
    llama        MHA, GQA, MQA (kv_heads)         RoPE        SwiGLU         RMSNorm
    mistral      MHA within a window              RoPE        SwiGLU         RMSNorm
    deepseek_v2  MLA (latent of width `latent`)   RoPE        SwiGLU         RMSNorm
    arcee        MHA, GQA, MQA                    RoPE        GELU           RMSNorm
    opt          MHA                              learned     GELU           LayerNorm
    falcon       MHA, MQA                         ALiBi       GELU           LayerNorm

Letters: B windows or rows, T tokens of a text, C tokens of a context, V ids of the vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.tasks.base import Recipe, learning_rate_at

Family = Literal["llama", "mistral", "deepseek_v2", "arcee", "opt", "falcon"]
IGNORED = -100
GELU_FAMILIES = ("arcee", "opt", "falcon")
BYTES = 4
"""Of a number: weights, activations and caches are float32."""
PROCESS_BYTES = 480 * 2**20
"""Of a process that has imported torch and Transformers and holds the texts, measured."""


@dataclass(frozen=True)
class Shape:
    """What decides the parameters of a model.

    Attributes:
        hidden: width of the SwiGLU network; a GELU network has 3/2 of it, which is the same number of parameters.
        kv_heads: key and value heads g; equal to `heads` in multi-head attention.
        window: tokens that a position sees, itself included; 0 for all before it (mistral only).
        latent, rotary: widths of MLA's cached latent and of its shared rotary key (deepseek_v2 only).
        positions: longest context.
        end: id that ends a text.
    """

    family: Family
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool
    positions: int
    end: int
    window: int = 0
    latent: int = 0
    rotary: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into {self.kv_heads} groups")
        if self.hidden % 2 or self.hidden < 2:
            raise ValueError(f"the feed-forward width must be even and positive, not {self.hidden}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward network as it is built."""
        return self.hidden * 3 // 2 if self.family in GELU_FAMILIES else self.hidden

    def configuration(self) -> Any:
        """The Transformers configuration."""
        import transformers

        common = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.end,
            "eos_token_id": self.end,
            "pad_token_id": None,
            "attn_implementation": "sdpa",  # Falcon's other implementation adds ALiBi twice
        }
        gated = {"intermediate_size": self.feed_forward, "num_key_value_heads": self.kv_heads, "rms_norm_eps": 1e-6}
        match self.family:
            case "llama":
                return transformers.LlamaConfig(**common, **gated)
            case "mistral":
                return transformers.MistralConfig(**common, **gated, sliding_window=self.window)
            case "deepseek_v2":
                return transformers.DeepseekV2Config(
                    **common,
                    **gated,
                    kv_lora_rank=self.latent,
                    q_lora_rank=None,
                    qk_rope_head_dim=self.rotary,
                    qk_nope_head_dim=self.head_width,
                    v_head_dim=self.head_width,
                    first_k_dense_replace=self.layers,  # every layer has a plain feed-forward network, no experts
                )
            case "arcee":
                return transformers.ArceeConfig(**common, **gated, hidden_act="gelu")
            case "opt":
                return transformers.OPTConfig(
                    **common, ffn_dim=self.feed_forward, activation_function="gelu", enable_bias=False, dropout=0.0
                )
            case "falcon":
                return transformers.FalconConfig(
                    **common,
                    ffn_hidden_size=self.feed_forward,
                    activation="gelu",
                    alibi=True,
                    multi_query=self.kv_heads == 1,
                    parallel_attn=False,  # attention, then feed-forward, as in all the other families
                    bias=False,
                )

    def parameters(self) -> dict[str, list[int]]:
        """Name and shape of every parameter; a tied matrix counts once."""
        return {name: list(shape) for name, shape in _parameters(self)}

    @property
    def count(self) -> int:
        """Number of parameters."""
        return _count(self)

    @property
    def non_embedding(self) -> int:
        """Parameters outside the embeddings of tokens and positions and the output matrix."""
        outside = self.vocabulary * self.width * (1 if self.tied else 2)
        if self.family == "opt":
            outside += (self.positions + 2) * self.width
        return self.count - outside

    @property
    def kv_numbers(self) -> int:
        """Numbers that the cache holds per token and layer: 2 g d_h, or d_c + d_R of MLA."""
        return self.latent + self.rotary if self.family == "deepseek_v2" else 2 * self.kv_heads * self.head_width

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the cache per token, over all layers."""
        return self.layers * self.kv_numbers * BYTES

    def kv_bytes(self, context: int) -> int:
        """Bytes of the cache after `context` tokens; a window keeps the window - 1 tokens that the next one sees."""
        return self.kv_bytes_per_token * (min(context, self.window - 1) if self.window else context)

    def flops_per_token(self, context: int) -> float:
        """Floating-point operations of a forward pass per token, at windows of `context` tokens.

        Two for each weight of a matrix product (the output matrix counts, looking a token up does not), and
        2 h span (d_qk + d_v) in attention, span being the mean number of positions that a position sees.
        """
        weights = sum(math.prod(s) for n, s in self.parameters().items() if len(s) == 2 and "embed" not in n)
        if self.tied:
            weights += self.vocabulary * self.width  # the output matrix goes by the name of the embedding
        products = 2 * weights
        reach = min(self.window, context) if self.window else context
        span = (reach * (reach + 1) / 2 + (context - reach) * reach) / context
        return products + self.layers * 2 * self.heads * span * (2 * self.head_width + self.rotary)

    def training_bytes(self, tokens: int) -> int:
        """Expected peak of a process that trains on batches of `tokens` tokens with AdamW."""
        live = tokens * (3 * self.vocabulary + self.layers * (10 * self.width + 4 * self.hidden))
        return PROCESS_BYTES + BYTES * (4 * self.count + live)

    def matched(self, target: float, measure: Callable[[Shape], float]) -> Shape | None:
        """This shape with the feed-forward width at which `measure` (linear in it) is nearest to `target`.

        None where the network would be narrower than half the model.
        """
        wider = replace(self, hidden=self.hidden + 2)
        step = measure(wider) - measure(self)
        hidden = self.hidden + 2 * round((target - measure(self)) / step)
        return replace(self, hidden=hidden) if hidden >= self.width // 2 else None


@functools.lru_cache(maxsize=512)
def _parameters(shape: Shape) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with torch.device("meta"):
        model = _model_class(shape)(shape.configuration())
    return tuple((name, tuple(p.shape)) for name, p in model.named_parameters())


@functools.lru_cache(maxsize=512)
def _count(shape: Shape) -> int:
    return sum(math.prod(s) for _, s in _parameters(shape))


def _model_class(shape: Shape) -> Any:
    import transformers

    names: dict[Family, str] = {
        "llama": "Llama",
        "mistral": "Mistral",
        "deepseek_v2": "DeepseekV2",
        "arcee": "Arcee",
        "opt": "OPT",
        "falcon": "Falcon",
    }
    return getattr(transformers, f"{names[shape.family]}ForCausalLM")


def feed_forward_width(width: int) -> int:
    """8/3 of the width in steps of 16: SwiGLU with the parameters of a GELU network four times as wide as the model."""
    return 16 * max(1, round(width / 6))


def build(shape: Shape, seed: int, device: torch.device | str = "cpu") -> Any:
    """A model with random weights that depend on `seed` alone, drawn on the CPU for every device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _model_class(shape)(shape.configuration())
    return model.to(device)


def load(shape: Shape, folder: Any, device: torch.device | str = "cpu") -> Any:
    """The model that `save_pretrained` wrote into `folder`."""
    from auto_research.checkpoints.store import quiet

    with quiet():
        return _model_class(shape).from_pretrained(folder, dtype=torch.float32).to(device)


# ---------------------------------------------------------------------------------------------------- training


def optimisers(model: Any, recipe: Recipe, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or `muon` for the matrices of the layers and AdamW for embeddings, output and norms.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.
    """
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.dim() == 2 and (".layers." in name or ".h." in name)
        (inner if kind == "muon" and hidden else outer).append(parameter)
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            outer, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
    ]
    if inner:
        found.append(
            torch.optim.Muon(
                inner, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return found


def token_loss(model: Any, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-probability of `labels` (B, C) after `ids` (B, C), in nats; labels of -100 do not count.

    With reduction `none` (B * C,), zero where a label does not count.
    """
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def warmup_share(steps: int, warmup: int = 30) -> float:
    """`Recipe.warmup` of a rise over `warmup` steps, a third of the steps at most."""
    return min(warmup, max(1, steps // 3)) / steps


def train(
    model: Any,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    recipe: Recipe,
    *,
    optimiser: str = "adamw",
    progress: Callable[[int, float], None] | None = None,
    first_step: int = 0,
    report_every: int = 10,
) -> list[float]:
    """Takes `steps` updates on batches of (ids, labels), (B, C) each, on the model's device; the loss of each step.

    The learning rate follows `recipe` to its end at the last step. `progress` gets the step, counted from
    `first_step`, and its loss.
    """
    device = next(model.parameters()).device
    updates = optimisers(model, recipe, optimiser)
    model.train()
    losses = torch.empty(steps, device=device)  # small tensors kept between large ones would fragment the heap
    for step in range(steps):
        rate = learning_rate_at(step, steps, recipe)
        ids, labels = (part.to(device, non_blocking=True) for part in next(batches))
        loss = token_loss(model, ids, labels)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for update in updates:
            for group in update.param_groups:
                group["lr"] = rate
            update.step()
        losses[step] = loss.detach()
        if progress is not None and (step % report_every == 0 or step == steps - 1):
            progress(first_step + step + 1, float(loss.detach()))
    model.eval()
    return losses.tolist()


# -------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def text_nats(model: Any, tokens: Tensor, end: int, context: int, batch: int = 32) -> Tensor:
    """Negative log-probability (T,) float64, on the CPU, of every token of a text (T,), in nats.

    The text is read in windows of `context` tokens that do not overlap; `end` stands before its first token, so that
    every token is predicted once, the last and shorter window included.
    """
    device = next(model.parameters()).device
    model.eval()
    ids = torch.cat([tokens.new_tensor([end]), tokens[:-1]])
    whole = len(tokens) // context * context
    pieces = list(zip(ids[:whole].view(-1, context).split(batch), tokens[:whole].view(-1, context).split(batch)))
    if whole < len(tokens):
        pieces.append((ids[None, whole:], tokens[None, whole:]))
    nats = [token_loss(model, i.to(device), t.to(device), "none").double().cpu() for i, t in pieces]
    return torch.cat(nats)


@torch.no_grad()
def rows_nats(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """(total nats, number) of the labels that count in batches of (ids, labels)."""
    device = next(model.parameters()).device
    model.eval()
    total = sum(float(token_loss(model, i.to(device), t.to(device), "none").double().sum()) for i, t in batches)
    return total, sum(int((labels != IGNORED).sum()) for _, labels in batches)


def response_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int
) -> tuple[Tensor, Tensor]:
    """(ids, labels), (B, C) int64 each, filled up on the right; only the responses' tokens are labels.

    No mask is needed: under causal attention nothing that counts sees the filling.
    """
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    length = max(map(len, rows)) - 1
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORED)
    for i, (row, prompt) in enumerate(zip(rows, prompts)):
        ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        labels[i, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    return ids, labels


def bits_per_byte(nats: float, size: int) -> float:
    """Total nats of a text of `size` bytes as bits per byte, which no tokenizer changes."""
    return nats / (math.log(2) * size)
