"""Language-model text: a byte-level tokenizer trained on the spot, windows of tokens and perplexity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from auto_research.runtime.errors import UserError


@dataclass(frozen=True)
class TokenisedText:
    """Token ids of the three parts of a text, (T,) each, and how many ids the tokenizer knows."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: int


def tokenise(parts: dict[str, str], vocabulary: int) -> TokenisedText:
    """Trains a byte-level BPE on the training part and encodes all parts.

    `parts` holds `train`, `validation` and `test`. Where `train` is missing, the first nine tenths of `validation`
    are trained on and its last tenth validates; the test part is untouched either way.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    validation = parts.get("validation") or parts.get("valid") or ""
    train, test = parts.get("train"), parts.get("test", "")
    if train is None:
        cut = validation.rfind("\n", 0, int(0.9 * len(validation))) + 1
        train, validation = validation[:cut], validation[cut:]
    if not (train and validation and test):
        raise UserError("the text has no training, validation or test part; prepare the data set again")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(train.splitlines(keepends=True), trainer)

    def encode(text: str) -> Tensor:
        encoded = tokenizer.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([i for line in encoded for i in line.ids], dtype=torch.long)

    return TokenisedText(encode(train), encode(validation), encode(test), tokenizer.get_vocab_size())


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows (count, length) at random places of the text (T,)."""
    first = torch.randint(len(tokens) - length + 1, (count,), generator=generator)
    return tokens[first[:, None] + torch.arange(length)]


def consecutive_windows(tokens: Tensor, length: int) -> Tensor:
    """Non-overlapping windows (W, length + 1) in which each token but the first of the text is predicted once."""
    count = (len(tokens) - 1) // length
    starts = torch.arange(count) * length
    return tokens[starts[:, None] + torch.arange(length + 1)]
