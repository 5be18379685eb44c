"""Content vectors of items: from a frozen text encoder, or from word counts where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from auto_research.checkpoints.resolve import Resolved


def text_vectors(resolved: Resolved, texts: Sequence[str], device: torch.device, max_length: int = 64) -> Tensor:
    """Centred unit vectors, mean-pooled, (N, D) of a frozen text encoder, float32 on the CPU."""
    from auto_research.checkpoints.pooling import encode_texts

    return centred_unit(encode_texts(resolved, texts, device, max_length=max_length, normalise=True))


def tfidf_vectors(texts: Sequence[str], dim: int = 256) -> Tensor:
    """Centred unit vectors of latent semantics (N, min(dim, N - 1, W - 1)) of texts with W different words.

    Term frequencies (1 + log count) times smoothed inverse document frequencies, rows of length 1, then a truncated
    singular value decomposition. Words are runs of letters and digits, in lower case.
    """
    import re

    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import svds

    words = [re.findall(r"[^\W_]+", text.lower()) for text in texts]
    index = {word: i for i, word in enumerate(sorted({word for text in words for word in text}))}
    row = np.repeat(np.arange(len(texts)), [len(text) for text in words])
    column = np.fromiter((index[word] for text in words for word in text), dtype=np.int64, count=len(row))
    counts = csr_matrix((np.ones(len(row)), (row, column)), shape=(len(texts), len(index)))
    counts.sum_duplicates()
    counts.data = 1.0 + np.log(counts.data)
    appears = np.bincount(counts.indices, minlength=len(index))
    weighted = counts.multiply(np.log((1 + len(texts)) / (1 + appears)) + 1.0).tocsr()
    length = np.sqrt(np.asarray(weighted.multiply(weighted).sum(1)).ravel())
    weighted = weighted.multiply(1.0 / np.maximum(length, 1e-12)[:, None]).tocsr()
    rank = min(dim, min(weighted.shape) - 1)
    left, value, _ = svds(weighted, k=rank, v0=np.ones(min(weighted.shape)))
    # A singular vector's sign is arbitrary: its first entry of (nearly) the largest magnitude is made positive.
    size = np.abs(left)
    left = left * np.sign(left[(size > 0.99 * size.max(0)).argmax(0), np.arange(rank)])
    return centred_unit(torch.from_numpy(np.ascontiguousarray((left * value)[:, ::-1])).float())


def centred_unit(vectors: Tensor) -> Tensor:
    """Vectors less their mean, each scaled to length 1: (N, D) -> (N, D).

    What all items share (often most of a sentence encoder's vector) is gone, and a reconstruction error of 1 means
    that nothing was explained, whatever the width.
    """
    centred = vectors - vectors.mean(0)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-12)
