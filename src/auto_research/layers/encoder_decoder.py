"""Encoder-decoder Transformer that spells an item's semantic id from a user's history (TIGER, arXiv:2305.05065).

`EncoderDecoder` is T5-shaped (arXiv:1910.10683: pre-norm RMS normalisation, no biases, ReLU feed-forward networks,
token embeddings tied with the output) and knows tokens only. `SemanticIdTransformer` adds what generative retrieval
needs: the id table, the vocabulary, the history's layout and beam search. Two hooks serve models built on it: `start`
replaces the embedding of the decoder's first token, and `Memory.extended` adds states for the decoder to look at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.decoding import Beams, beam_search
from auto_research.layers.semantic_ids import BOS, PAD, SemanticIds, Trie, Vocabulary
from auto_research.layers.transformer import (
    BlockCache,
    CausalTransformer,
    TransformerEncoder,
    init_transformer,
    reorder_cache,
)


@dataclass(frozen=True)
class Memory:
    """What the decoder looks at: states (B, S, dim), True in valid (B, S) at real positions."""

    states: Tensor
    valid: Tensor

    def extended(self, states: Tensor, valid: Tensor | None = None) -> Memory:
        """With further states (B, E, dim), valid (B, E) or all real."""
        if valid is None:
            valid = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return Memory(
            torch.cat([self.states, states.to(self.states.dtype)], dim=1), torch.cat([self.valid, valid], dim=1)
        )

    def mean(self) -> Tensor:
        """Mean over real positions, (B, dim)."""
        weight = self.valid[..., None].to(self.states.dtype)
        return (self.states * weight).sum(1) / weight.sum(1).clamp_min(1.0)


@dataclass
class DecodeState:
    """A decoding in progress: the memory, the cached keys and values, and the first embedding if it was replaced."""

    memory: Memory
    cache: list[BlockCache]
    start: Tensor | None = None
    length: int = field(default=0)


class EncoderDecoder(nn.Module):
    """Bidirectional encoder and causal decoder over one vocabulary.

    Args:
        vocabulary: number of tokens; 0 is padding.
        hidden: width of the feed-forward networks.
        target_length: longest decoder input, start token included.
        head_dim: width of one attention head; None means dim / heads.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        hidden: int,
        *,
        encoder_layers: int,
        decoder_layers: int,
        target_length: int,
        dropout: float = 0.0,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        shape: dict[str, Any] = {
            "dropout": dropout,
            "activation": "relu",
            "norm": "rms",
            "bias": False,
            "head_dim": head_dim,
        }
        self.token = nn.Embedding(vocabulary, dim, padding_idx=PAD)
        self.target_position = nn.Embedding(target_length, dim)
        self.encoder = TransformerEncoder(dim, heads, hidden, encoder_layers, **shape)
        self.decoder = CausalTransformer(dim, heads, hidden, decoder_layers, cross=True, **shape)
        self.dropout = nn.Dropout(dropout)
        init_transformer(self)
        nn.init.normal_(self.token.weight, std=dim**-0.5)
        with torch.no_grad():
            self.token.weight[PAD].zero_()

    def encode(self, tokens: Tensor, position: Tensor | None = None) -> Memory:
        """Encodes tokens (B, S), PAD is padding; `position` (S, dim) is added to their embeddings."""
        valid = tokens != PAD
        x = self.token(tokens)
        if position is not None:
            x = x + position
        return Memory(self.encoder(self.dropout(x), valid), valid)

    def decode(
        self, tokens: Tensor, memory: Memory, *, start: Tensor | None = None, state: DecodeState | None = None
    ) -> Tensor:
        """Logits (R, T, V) after each of tokens (R, T); R is a multiple of the memory's rows.

        `start` (R, dim) or (1, dim) stands in for the embedding of the first position of a sequence. With a `state`
        the tokens continue what it holds.
        """
        offset = state.length if state is not None else 0
        x = self.token(tokens)
        if start is not None and offset == 0:
            x = torch.cat([start.to(x.dtype).expand(len(x), -1)[:, None], x[:, 1:]], dim=1)
        x = x + self.target_position.weight[offset : offset + tokens.shape[1]]
        cache = state.cache if state is not None else None
        x = self.decoder(self.dropout(x), memory=memory.states, memory_valid=memory.valid, cache=cache)
        if state is not None:
            state.length += tokens.shape[1]
        return F.linear(x, self.token.weight)

    def begin(self, memory: Memory, start: Tensor | None = None) -> DecodeState:
        """State before the first token of each row of the memory."""
        return DecodeState(memory, self.decoder.new_cache(), start)

    def step(self, state: DecodeState, tokens: Tensor | None) -> Tensor:
        """Appends tokens (R,), or BOS to every row of the memory when None; logits (R, V) of what follows."""
        if tokens is None:
            tokens = torch.full((len(state.memory.states),), BOS, device=state.memory.states.device)
        return self.decode(tokens[:, None], state.memory, start=state.start, state=state)[:, -1]

    def reorder(self, state: DecodeState, rows: Tensor) -> None:
        """Keeps (or repeats) rows (R,) of what was decoded; the memory is shared by the beams of a row."""
        reorder_cache(state.cache, rows)


@dataclass(frozen=True)
class GeneratorConfig:
    """Shape of a `SemanticIdTransformer`.

    Attributes:
        max_items: longest history, in items; older ones are not looked at.
        head_dim: width of one attention head; None means dim / heads.
        user_tokens: hashed user tokens in front of the history; 0 leaves them out.
        spare_tokens: rows of the vocabulary that nothing uses, so that arms with fewer tokens stay equally large.
        beams: beam width of `recommend`.
    """

    dim: int = 64
    heads: int = 4
    hidden: int = 256
    encoder_layers: int = 2
    decoder_layers: int = 2
    dropout: float = 0.1
    max_items: int = 20
    user_tokens: int = 2000
    beams: int = 50
    head_dim: int | None = None
    spare_tokens: int = 0


class SemanticIdTransformer(nn.Module):
    """Generates the semantic id of the next item from the ids of the items before it.

    Encoder input: [user, id(item_1), ..., id(item_T)], each code in its position's own token range, with learned
    positions: the item's place counted from the latest, and the code's place in the id. Decoder: [BOS, c_0, ...,
    c_{m-2}] -> [c_0, ..., c_{m-1}], cross-entropy over the full vocabulary, mean over tokens.

    The id table is part of the state: loading a saved model loads the mapping that it was trained with, and the trie
    is made again from it.

    Batches: `sequence` (B, T) item ids + 1, 0 = padding on the left; `user` (B,); `target` (B, T), of which the last
    column is the item that follows the sequence.

    Args:
        priority: (I,) order of items that share an id, highest first; only for ids without a collision token.
    """

    codes: Tensor
    priority: Tensor
    item_tokens: Tensor

    def __init__(self, ids: SemanticIds, config: GeneratorConfig, priority: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = Vocabulary(ids.sizes, config.user_tokens)
        self.length = ids.length
        self.numbered = ids.numbered
        self.transformer = EncoderDecoder(
            len(self.vocabulary) + config.spare_tokens,
            config.dim,
            config.heads,
            config.hidden,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            target_length=ids.length,
            dropout=config.dropout,
            head_dim=config.head_dim,
        )
        self.item_position = nn.Embedding(config.max_items, config.dim)
        self.code_position = nn.Embedding(ids.length, config.dim)
        for table in (self.item_position, self.code_position):
            nn.init.normal_(table.weight, std=0.02)
        self.register_buffer("codes", ids.codes.clone())
        order = torch.zeros(len(ids)) if priority is None else priority.float().clone()
        self.register_buffer("priority", order.to(ids.codes.device))  # it may come from a model on another device
        self._index()
        self.register_load_state_dict_post_hook(lambda module, _: module._index())

    def _index(self) -> None:
        """Makes the derived tables from the codes."""
        tokens = self.vocabulary.tokens(self.codes)
        padding = torch.full_like(tokens[:1], PAD)
        self.register_buffer("item_tokens", torch.cat([padding, tokens]), persistent=False)
        self.trie = Trie(tokens, self.priority)

    @property
    def ids(self) -> SemanticIds:
        """The id table in use."""
        return SemanticIds(self.codes.cpu(), self.vocabulary.sizes, self.numbered)

    # -- histories in, states out -------------------------------------------------------------------------------

    def encode(self, batch: dict[str, Tensor]) -> Memory:
        """Encodes the histories: states (B, 1 + m T, dim), or (B, m T, dim) without user tokens."""
        sequence = batch["sequence"][:, -self.config.max_items :]
        tokens = self.item_tokens[sequence].flatten(1)
        age = torch.arange(sequence.shape[1] - 1, -1, -1, device=tokens.device)
        position = self.item_position(age)[:, None] + self.code_position.weight
        position = position.flatten(0, 1)
        if self.config.user_tokens:
            user = self.vocabulary.user_tokens(batch["user"])
            tokens = torch.cat([user[:, None], tokens], dim=1)
            position = F.pad(position, (0, 0, 1, 0))
        return self.transformer.encode(tokens, position)

    def first_embedding(self, batch: dict[str, Tensor], memory: Memory) -> Tensor | None:
        """Replacement (B, dim) of the start token's embedding; None keeps it. For models built on this one."""
        return None

    def token_log_probabilities(self, batch: dict[str, Tensor], item: Tensor) -> Tensor:
        """log p of each token of item ids + 1 (B,) given the history, (B, m) float32."""
        target = self.item_tokens[item]
        memory = self.encode(batch)
        begin = torch.full_like(target[:, :1], BOS)
        logits = self.transformer.decode(
            torch.cat([begin, target[:, :-1]], dim=1), memory, start=self.first_embedding(batch, memory)
        )
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
        return -loss.view(target.shape)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean negative log-probability of the tokens of the item that follows each sequence."""
        return -self.token_log_probabilities(batch, batch["target"][:, -1]).mean()

    # -- decoding -----------------------------------------------------------------------------------------------

    def begin(self, batch: dict[str, Tensor]) -> DecodeState:
        """Encodes the histories; see `layers.decoding.StepDecoder`."""
        memory = self.encode(batch)
        return self.transformer.begin(memory, self.first_embedding(batch, memory))

    def step(self, state: DecodeState, tokens: Tensor | None) -> Tensor:
        """Logits (R, V) of the next token."""
        return self.transformer.step(state, tokens)

    def reorder(self, state: DecodeState, rows: Tensor) -> None:
        """Reorders beams."""
        self.transformer.reorder(state, rows)

    @torch.no_grad()
    def recommend(self, batch: dict[str, Tensor], top: int) -> Tensor:
        """Items (B, top), ids + 1, best first, 0 past the end: a constrained beam, its ids expanded to items.

        The beam is at least `top` wide unless every id names several items.
        """
        beams = max(self.config.beams, top) if self.numbered else self.config.beams
        found = self.beams(batch, beams)
        assert found.leaves is not None
        return self.trie.items(found.leaves, top) + 1

    def beams(self, batch: dict[str, Tensor], beams: int, *, constrained: bool = True, **options: Any) -> Beams:
        """Beam search over the ids; `options` as in `layers.decoding.beam_search`."""
        return beam_search(
            self, batch, beams=beams, trie=self.trie if constrained else None, length=self.length, **options
        )
