"""In-context recall: sequences that hide key-value pairs in text and ask for the value of one key at the end.

A sequence of length L is `haystack with pairs`, then the query `KEY k`; the model is to say `v`. Key and value
are drawn independently for each example, so the answer is only in the context; distractor pairs with other keys lie
around the needle, so that copying any value is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4
"""Tokens of a pair: KEY k VAL v."""
QUERY = 2
"""Tokens of the query: KEY k."""


@dataclass(frozen=True)
class RecallVocabulary:
    """Token ids of the recall task, placed behind the `text_tokens` ids of the text.

    Layout: KEY, VAL, then `symbols` keys, then `symbols` values.
    """

    text_tokens: int
    symbols: int = 32

    @property
    def key_mark(self) -> int:
        return self.text_tokens

    @property
    def value_mark(self) -> int:
        return self.text_tokens + 1

    def key(self, index: Tensor) -> Tensor:
        """Token of key symbol `index`."""
        return self.text_tokens + 2 + index

    def value(self, index: Tensor) -> Tensor:
        """Token of value symbol `index`."""
        return self.text_tokens + 2 + self.symbols + index

    @property
    def size(self) -> int:
        """Number of token ids, the text's included."""
        return self.text_tokens + 2 + 2 * self.symbols


def most_distractors(length: int) -> int:
    """How many distractor pairs fit into a sequence beside the needle and the query."""
    return (length - QUERY) // BLOCK - 1


def recall_sequences(
    depth: Tensor,
    length: int,
    distractors: int,
    text: Tensor,
    vocabulary: RecallVocabulary,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one sequence for each wanted depth.

    Args:
        depth: (n,) in [0, 1]; 0 puts the needle first, 1 right before the query.
        length: tokens of a sequence, the query included and the answer not.
        distractors: other pairs in the haystack.
        text: token ids (T,) from which the haystack is cut.

    Returns tokens (n, length), answers (n,) and the needle's first position (n,).
    """
    n, blocks = len(depth), distractors + 1
    filler = length - QUERY - BLOCK * blocks
    if filler < 0:
        raise ValueError(f"{distractors} distractors need more than {length} tokens")
    if blocks > vocabulary.symbols:
        raise ValueError(f"{blocks} pairs need as many key symbols, there are {vocabulary.symbols}")
    items = filler + blocks
    # Items are filler tokens and blocks; the needle's rank is given, the others are shuffled around it.
    kind = torch.zeros(n, items - 1, dtype=torch.long)
    kind[:, :distractors] = torch.arange(2, 2 + distractors)  # 0 filler, 1 needle, 2.. distractors
    kind = kind.gather(1, torch.rand(n, items - 1, generator=generator).argsort(1))
    rank = (depth * (items - 1)).round().long()
    slot = torch.arange(items).expand(n, -1)
    source = (slot - (slot > rank[:, None]).long()).clamp(max=max(items - 2, 0))
    kind = torch.where(slot == rank[:, None], 1, kind.gather(1, source)) if items > 1 else torch.ones(n, 1).long()
    start = torch.where(kind > 0, BLOCK, 1).cumsum(1) - torch.where(kind > 0, BLOCK, 1)
    first = torch.randint(len(text) - length + 1, (n,), generator=generator)
    tokens = text[first[:, None] + torch.arange(length)].clone()
    keys = torch.rand(n, vocabulary.symbols, generator=generator).argsort(1)[:, :blocks]  # distinct in a sequence
    values = torch.randint(vocabulary.symbols, (n, blocks), generator=generator)
    where = torch.zeros(n, blocks, dtype=torch.long).scatter_(1, (kind - 1).clamp(min=0), start * (kind > 0))
    # scatter_ wrote filler items over the needle's slot; take the needle's start from its rank.
    where[:, 0] = start.gather(1, rank[:, None]).squeeze(1)
    pair = torch.stack(
        [
            torch.full_like(keys, vocabulary.key_mark),
            vocabulary.key(keys),
            torch.full_like(keys, vocabulary.value_mark),
            vocabulary.value(values),
        ],
        dim=-1,
    )  # (n, blocks, 4)
    at = where[:, :, None] + torch.arange(BLOCK)
    tokens.scatter_(1, at.flatten(1), pair.flatten(1))
    tokens[:, length - QUERY :] = pair[:, 0, :QUERY]
    return tokens, pair[:, 0, 3], where[:, 0]
