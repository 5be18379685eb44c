"""A language model read through soft instructions: learned vectors in front of the titles of a user's items.

The language model may be BF16 beside an FP32 recommender; both crossings convert explicitly (`boundary`). It may be
frozen, and then gradients still pass through it to the vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from auto_research.checkpoints.adapters import lora
from auto_research.checkpoints.boundary import from_model, to_model
from auto_research.checkpoints.pooling import hidden_states

__all__ = ["HistoryText", "SoftPromptLM"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class SoftPromptLM(nn.Module):
    """Last hidden states of a language model over [soft instructions; text tokens].

    Args:
        body: a frozen Transformers model without its language head, on its device and in evaluation mode. It serves
            all models that are made from it and belongs to none: it is not in their parameters or their state.
        rank: 0 leaves it frozen; otherwise a private copy gets LoRA adapters of this rank on its attention, which
            train and are saved with the model.
    """

    def __init__(self, body: Any, *, rank: int = 0) -> None:
        super().__init__()
        # A tuple hides the shared body from registration.
        self._shared: tuple[Any, ...] = () if rank else (body,)
        self.adapted: Any = lora(copy.deepcopy(body), rank, ATTENTION, task_type=None) if rank else None

    @property
    def body(self) -> Any:
        """The model that reads."""
        return self._shared[0] if self._shared else self.adapted

    @property
    def embedding(self) -> nn.Embedding:
        """The model's own (frozen) table of token embeddings."""
        table: nn.Embedding = self.body.get_input_embeddings()
        return table

    @property
    def width(self) -> int:
        """Width of embeddings and states."""
        return self.embedding.weight.shape[1]

    @property
    def scale(self) -> float:
        """Root mean square of an entry of the token embeddings; instructions should begin at about this size."""
        return float(self.embedding.weight.detach().float().square().mean().sqrt())

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings (B, L, D) in FP32, on the device of tokens (B, L)."""
        found = self.embedding(tokens.to(self.embedding.weight.device))
        return from_model(found).to(tokens.device)

    def forward(self, instructions: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the model over instructions (B, K, D), then tokens (B, L), real where valid (B, L).

        Padding stands on the right of the text, so that positions do not depend on it. Returns the states (B, K + L, D)
        in dtype and on the device of the instructions, and which of them are real (B, K + L).
        """
        vectors = to_model(instructions, self.body)
        text = self.embedding(tokens.to(vectors.device)).to(vectors.dtype)
        real = torch.cat([valid.new_ones(instructions.shape[:2]), valid], dim=1)
        output = self.body(
            inputs_embeds=torch.cat([vectors, text], dim=1),
            attention_mask=real.to(vectors.device, torch.long),
            use_cache=False,
            return_dict=True,
        )
        return from_model(hidden_states(output), instructions), real


class HistoryText(nn.Module):
    """The titles of the latest items of a history as one row of tokens, oldest title first.

    Args:
        tokens: for each item the tokens of its title, any number; item i of the catalogue has id i + 1.
    """

    tokens: Tensor
    length: Tensor

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        super().__init__()
        rows = [torch.tensor(row, dtype=torch.long) for row in ([], *tokens)]
        table = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # Made from the catalogue and the checkpoint's tokenizer, so not part of a model's state.
        self.register_buffer("tokens", table, persistent=False)
        self.register_buffer("length", torch.tensor([len(row) for row in rows]), persistent=False)

    @classmethod
    def of_titles(cls, tokenizer: Any, titles: Sequence[str], most: int) -> HistoryText:
        """Tokenises titles, each cut to `most` tokens with the line break that ends it."""
        end = tokenizer("\n", add_special_tokens=False)["input_ids"]
        room = most - len(end)
        if room < 1:
            raise ValueError(f"{most} tokens a title leave no room beside a line break of {len(end)}")
        rows = tokenizer(list(titles), add_special_tokens=False, truncation=True, max_length=room)["input_ids"]
        return cls([[*row, *end] for row in rows])

    def forward(self, sequence: Tensor, latest: int) -> tuple[Tensor, Tensor]:
        """Text of the `latest` items of sequence (B, T), ids with 0 for padding.

        Returns tokens and valid, (B, L) each, real tokens first; L is the longest text of the batch.
        """
        items = sequence[:, -latest:]
        tokens = self.tokens[items].flatten(1)
        valid = torch.arange(self.tokens.shape[1], device=items.device) < self.length[items][..., None]
        valid = valid.flatten(1)
        order = (~valid).int().argsort(dim=1, stable=True)[:, : int(valid.sum(1).max())]
        return tokens.gather(1, order), valid.gather(1, order)
