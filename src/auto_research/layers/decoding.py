"""Beam search over semantic ids, constrained by a trie or free, vectorised over the batch and its beams.

The encoder runs once a batch and every decoder step sees only the newest token (key-value cache). A beam's score is
the sum of its tokens' log-probabilities under the softmax over the *full* vocabulary, without length normalisation
since all ids have one length; the trie removes continuations but never renormalises. `teacher_forced_scores` computes
the same scores for the whole catalogue in another way, to check the beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from auto_research.layers.semantic_ids import Trie


class StepDecoder(Protocol):
    """A model that continues a sequence by one token at a time; what beam search needs of it.

    The state belongs to the model. It starts with one row an input; after `reorder` row r continues what row
    `rows[r]` had decoded. Rows of one input stay next to each other, equally many an input.
    """

    def begin(self, batch: dict[str, Tensor]) -> Any:
        """Reads the inputs (B rows) and returns the state before the first token."""
        ...

    def step(self, state: Any, tokens: Tensor | None) -> Tensor:
        """Appends tokens (R,), or the start token when None, and returns logits (R, V) of the next token."""
        ...

    def reorder(self, state: Any, rows: Tensor) -> None:
        """Replaces the state's rows by rows (R',) of it."""
        ...


@dataclass(frozen=True)
class Beams:
    """Decoded sequences, best first.

    Attributes:
        tokens: (B, N, m).
        scores: (B, N) float32 summed log-probabilities; -inf where there are fewer than N valid sequences.
        leaves: (B, N) leaf of the trie, -1 for a sequence that is no valid id (or a filler); None without trie.
    """

    tokens: Tensor
    scores: Tensor
    leaves: Tensor | None = None


@torch.no_grad()
def beam_search(
    decoder: StepDecoder,
    batch: dict[str, Tensor],
    *,
    beams: int,
    trie: Trie | None = None,
    length: int | None = None,
    temperatures: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Beams:
    """The `beams` most probable sequences of each input.

    Args:
        trie: only its sequences are decoded; exactly `min(beams, len(trie))` survive when the beam is wide enough.
        length: tokens to decode; needed without a trie.
        temperatures: per position, samples continuations without replacement instead of taking the best: Gumbel
            noise times the temperature is added to the scores that choose, which equals sampling from
            softmax(score / temperature). 0 takes the best. High values at coarse positions spread the list over
            categories. Reported scores hold no noise.
    """
    steps = trie.length if trie is not None else length
    if steps is None:
        raise ValueError("give the trie of valid ids, or the length of an unconstrained sequence")
    if temperatures is not None and len(temperatures) != steps:
        raise ValueError(f"{steps} positions need as many temperatures, got {len(temperatures)}")
    state = decoder.begin(batch)
    newest: Tensor | None = None
    tokens = scores = nodes = torch.empty(0)
    for position in range(steps):
        log_probability = F.log_softmax(decoder.step(state, newest).float(), dim=-1)  # (B * n, V)
        if position == 0:
            rows, device = len(log_probability), log_probability.device
            scores = torch.zeros(rows, 1, device=device)
            tokens = torch.empty(rows, 1, 0, dtype=torch.long, device=device)
            nodes = torch.zeros(rows, 1, dtype=torch.long, device=device)
        width = scores.shape[1]
        log_probability = log_probability.unflatten(0, (rows, width))
        if trie is not None:
            child, token, real = trie.following(nodes, position)  # (B, n, W)
            step = log_probability.gather(2, token).masked_fill(~real, -torch.inf)
        else:
            step = log_probability
        total = (scores[..., None] + step).flatten(1)
        key = total
        if temperatures is not None and temperatures[position] > 0:
            noise = torch.empty_like(total).exponential_(generator=generator)
            key = total - temperatures[position] * noise.log()
        best = key.topk(min(beams, key.shape[1]), dim=1)
        scores = total.gather(1, best.indices)
        parent = best.indices // step.shape[2]  # (B, n')
        if trie is not None:
            token = token.flatten(1).gather(1, best.indices)
            nodes = child.flatten(1).gather(1, best.indices).masked_fill(scores.isneginf(), -1)
        else:
            token = best.indices % step.shape[2]
        tokens = torch.cat([tokens.gather(1, parent[..., None].expand(-1, -1, position)), token[..., None]], dim=2)
        if position + 1 < steps:
            offset = torch.arange(rows, device=device)[:, None] * width
            decoder.reorder(state, (offset + parent).flatten())
            newest = token.flatten()
    order = scores.argsort(dim=1, descending=True, stable=True)  # sampled beams are not sorted by score
    tokens = tokens.gather(1, order[..., None].expand_as(tokens))
    scores, nodes = scores.gather(1, order), nodes.gather(1, order) if trie is not None else None
    missing = beams - scores.shape[1]
    if missing > 0:
        tokens, scores = F.pad(tokens, (0, 0, 0, missing)), F.pad(scores, (0, missing), value=-torch.inf)
        nodes = F.pad(nodes, (0, missing), value=-1) if nodes is not None else None
    return Beams(tokens, scores, nodes)


@torch.no_grad()
def teacher_forced_scores(
    decoder: StepDecoder, batch: dict[str, Tensor], tokens: Tensor, *, chunk: int = 4096
) -> Tensor:
    """Exact score of every sequence for every input, without a beam: tokens (I, m) -> (B, I) float32.

    Every sequence is fed whole, position by position; affordable below a few thousand sequences.
    """
    pieces = []
    for part in tokens.split(chunk):
        state = decoder.begin(batch)
        log_probability = F.log_softmax(decoder.step(state, None).float(), dim=-1)
        rows = len(log_probability)
        score = log_probability[:, part[:, 0]]
        decoder.reorder(state, torch.arange(rows, device=part.device).repeat_interleave(len(part)))
        for position in range(1, part.shape[1]):
            logits = decoder.step(state, part[:, position - 1].repeat(rows))
            following = part[:, position].repeat(rows)[:, None]
            score = score + F.log_softmax(logits.float(), dim=-1).gather(1, following).view(rows, -1)
        pieces.append(score)
    return torch.cat(pieces, dim=1)


class _StepCache:
    """Keys and values of the decoded positions, position first: (t, R, H, D) each.

    Ids are a few tokens long and rows are thousands, so that a position is one contiguous block: reordering copies each
    once, and attention is a handful of elementwise products over all rows instead of a small problem a row and head.
    """

    def __init__(self, length: int) -> None:
        self.room = length
        self.length = 0
        self.key = self.value = torch.empty(0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest position (R, H, D) and returns all, (t, R, H, D)."""
        if self.length == 0:
            self.key, self.value = key.new_empty(self.room, *key.shape), value.new_empty(self.room, *value.shape)
        self.key[self.length], self.value[self.length] = key, value
        self.length += 1
        return self.key[: self.length], self.value[: self.length]

    def select(self, rows: Tensor) -> None:
        """Keeps (or repeats) rows (R',)."""
        for name in ("key", "value"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(self.room, len(rows), *old.shape[2:])
            for position in range(self.length):
                torch.index_select(old[position], 0, rows, out=new[position])
            setattr(self, name, new)


@dataclass
class _T5State:
    memories: list[tuple[Tensor, Tensor]]
    """Keys and values of the encoder's states per block, (B, H, S, D): one copy an input, whatever the beams."""
    mask: Tensor
    """Added to the cross-attention's scores, (B, 1, 1, S)."""
    caches: list[_StepCache]


class T5Decoder:
    """A Hugging Face T5 as a `StepDecoder`: its own weights, but the beams of an input share its encoder states.

    `generate` copies keys and values of the encoder once a beam; here the beams of an input are further queries to one
    copy. Batches: `input_ids` (B, S) and `attention_mask` (B, S). At most `length` tokens are decoded.
    """

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.length = length
        self.blocks = [block.layer for block in model.decoder.block]
        self.heads: int = model.config.num_heads

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))  # (..., H, D)

    def begin(self, batch: dict[str, Tensor]) -> _T5State:
        """Runs the encoder and projects its states for every block's cross-attention."""
        keep = batch["attention_mask"].bool()
        hidden = self.model.encoder(input_ids=batch["input_ids"], attention_mask=keep.long()).last_hidden_state
        memories = []
        for _, cross, _ in self.blocks:
            attention = cross.EncDecAttention
            memories.append(tuple(self._split(part(hidden)).transpose(1, 2) for part in (attention.k, attention.v)))
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.zeros_like(keep, dtype=hidden.dtype).masked_fill(~keep, lowest)[:, None, None]
        return _T5State(memories, mask, [_StepCache(self.length) for _ in self.blocks])

    def step(self, state: _T5State, tokens: Tensor | None) -> Tensor:
        """Logits (R, V) after tokens (R,)."""
        config, decoder = self.model.config, self.model.decoder
        inputs = len(state.mask)
        if tokens is None:
            tokens = torch.full((inputs,), config.decoder_start_token_id, device=state.mask.device)
        x = decoder.embed_tokens(tokens)  # (R, dim)
        bias = self._position_bias(state.caches[0].length)
        for (own, cross, feed_forward), memory, cache in zip(self.blocks, state.memories, state.caches, strict=True):
            attention, normed = own.SelfAttention, own.layer_norm(x)
            key, value = cache.append(self._split(attention.k(normed)), self._split(attention.v(normed)))
            x = x + attention.o(self._attend_positions(self._split(attention.q(normed)), key, value, bias))
            attention, normed = cross.EncDecAttention, cross.layer_norm(x)
            # (R, H * D) -> the beams of an input as its queries, (B, H, n, D)
            query = self._split(attention.q(normed)).unflatten(0, (inputs, -1)).transpose(1, 2)
            # T5 does not scale its scores.
            read = F.scaled_dot_product_attention(query, *memory, attn_mask=state.mask, scale=1.0)
            x = x + attention.o(read.transpose(1, 2).reshape(len(x), -1))
            x = x + feed_forward.DenseReluDense(feed_forward.layer_norm(x))
        x = decoder.final_layer_norm(x)
        if getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
            x = x * config.d_model**-0.5
        return self.model.lm_head(x)

    @staticmethod
    def _attend_positions(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Newest queries (R, H, D) over the decoded positions (t, R, H, D): (R, H * D)."""
        weight = ((query * key).sum(-1) + bias).softmax(dim=0)  # (t, R, H)
        return (weight[..., None] * value).sum(0).flatten(1)

    def _position_bias(self, past: int) -> Tensor:
        """Bias (past + 1, 1, H) of the newest position, by T5's relative buckets."""
        attention = self.blocks[0][0].SelfAttention
        table = attention.relative_attention_bias
        relative = torch.arange(-past, 1, device=table.weight.device)
        bucket = attention._relative_position_bucket(
            relative,
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        return table(bucket)[:, None]

    def reorder(self, state: _T5State, rows: Tensor) -> None:
        """Reorders what was decoded; the encoder's states stay where they are."""
        for cache in state.caches:
            cache.select(rows)
