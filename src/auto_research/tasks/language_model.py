"""Language-model text: a byte-level tokenizer trained on the spot, windows of tokens and perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    validation = parts.get("validation") or parts.get("valid") or ""
    train, test = parts.get("train"), parts.get("test", "")
    if train is None:
        train, validation = devsplit(validation)
    if not (train and validation and test):
        raise UserError("the text has no training, validation or test part; prepare the data set again")
    tokenizer = train_tokenizer(train, vocabulary)
    return TokenisedText(
        encode(tokenizer, train), encode(tokenizer, validation), encode(tokenizer, test), tokenizer.get_vocab_size()
    )


def devsplit(validation: str) -> tuple[str, str]:
    """(training text, validation text): the first nine tenths of a validation text, cut at a line end, and the rest."""
    cut = validation.rfind("\n", 0, int(0.9 * len(validation))) + 1
    return validation[:cut], validation[cut:]


def train_tokenizer(text: str, vocabulary: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of at most `vocabulary` ids, learned from `text`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids (T,) int64 of a text, encoded line by line."""
    encoded = tokenizer.encode_batch(text.splitlines(keepends=True))
    return torch.tensor([i for line in encoded for i in line.ids], dtype=torch.long)


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows (count, length) at random places of the text (T,)."""
    first = torch.randint(len(tokens) - length + 1, (count,), generator=generator)
    return tokens[first[:, None] + torch.arange(length)]


def consecutive_windows(tokens: Tensor, length: int) -> Tensor:
    """Non-overlapping windows (W, length + 1) in which each token but the first of the text is predicted once."""
    count = (len(tokens) - 1) // length
    starts = torch.arange(count) * length
    return tokens[starts[:, None] + torch.arange(length + 1)]


def unigram(train: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities (V,) float64 of the training frequencies, one added to each count."""
    counts = torch.bincount(train, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log()


def bigram_nats(train: Tensor, text: Tensor, vocabulary: int) -> Tensor:
    """Negative log-probability (T - 1,) float64 of each token of `text` after the one before it.

    Witten and Bell's interpolation: P(b|a) = (c(ab) + t(a) P(b)) / (c(a) + t(a)), with t(a) the number of different
    tokens that followed a in training, and P(b) the unigram above.
    """
    pairs, counts = torch.unique(train[:-1] * vocabulary + train[1:], return_counts=True)
    starts = pairs // vocabulary
    total = torch.zeros(vocabulary, dtype=torch.float64).index_add(0, starts, counts.double())
    kinds = torch.bincount(starts, minlength=vocabulary).double()
    before, after = text[:-1], text[1:]
    wanted = before * vocabulary + after
    place = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    seen = torch.where(pairs[place] == wanted, counts[place].double(), 0.0)
    single = unigram(train, vocabulary).exp()[after]
    novel = total[before] == 0
    mixed = (seen + kinds[before] * single) / (total[before] + kinds[before]).clamp(min=1)
    return -torch.where(novel, single, mixed).log()
