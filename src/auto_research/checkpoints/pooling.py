"""Text to vectors: hidden states from any Transformers output, masked pooling, cached encoding."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from auto_research.checkpoints.store import read_config
from auto_research.runtime.cache import cache_folder
from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    from auto_research.checkpoints.resolve import Resolved

__all__ = ["encode_texts", "hidden_states", "last_valid", "masked_mean", "token_states"]

Pooling = Literal["mean", "last"]
log = logging.getLogger(__name__)


def hidden_states(output: Any) -> Tensor:
    """Hidden states (B, T, D) from whatever a Transformers model or layer returned.

    Layers return a tuple in Transformers 4 and a tensor in Transformers 5; models return a ``ModelOutput``
    or, with ``return_dict=False``, a tuple. A blind ``output[0]`` would take the first *example* of a
    tensor and lose the batch dimension; here a tensor is taken whole.

    Raises:
        ValueError: there are no hidden states in the output, or they do not have three dimensions.
    """
    if isinstance(output, Tensor):
        states: Any = output
    elif getattr(output, "last_hidden_state", None) is not None:
        states = output.last_hidden_state
    elif getattr(output, "hidden_states", None):
        states = output.hidden_states[-1]
    elif isinstance(output, tuple | list) and output:
        states = output[0]
    else:
        raise ValueError(
            f"{type(output).__name__} holds no hidden states; call the model with output_hidden_states=True"
        )
    if not isinstance(states, Tensor) or states.ndim != 3:
        shape = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise ValueError(f"hidden states must have the shape (batch, tokens, width), not {shape}")
    return states


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid tokens: ``hidden`` (B, T, D), ``mask`` (B, T), non-zero where valid, to (B, D).

    A row without valid tokens gives zeros. Sums are taken in FP32 for narrower dtypes and returned in the
    dtype of ``hidden``.
    """
    if hidden.ndim != 3 or mask.shape != hidden.shape[:2]:
        raise ValueError(f"need hidden (B, T, D) and mask (B, T), not {tuple(hidden.shape)} and {tuple(mask.shape)}")
    valid = (mask != 0).unsqueeze(-1)
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    # where, not a product: what stands at padding may be infinite or NaN.
    total = torch.where(valid, wide, 0.0).sum(dim=1)
    return (total / valid.sum(dim=1).clamp(min=1)).to(hidden.dtype)


def last_valid(hidden: Tensor, mask: Tensor) -> Tensor:
    """State of the last valid token: ``hidden`` (B, T, D), ``mask`` (B, T), to (B, D).

    Right for left and for right padding; a row without valid tokens gives zeros.
    """
    if hidden.ndim != 3 or mask.shape != hidden.shape[:2]:
        raise ValueError(f"need hidden (B, T, D) and mask (B, T), not {tuple(hidden.shape)} and {tuple(mask.shape)}")
    valid = mask != 0
    position = torch.where(valid, torch.arange(hidden.shape[1], device=hidden.device), -1).amax(dim=1)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return torch.where(position.unsqueeze(-1) >= 0, hidden[rows, position.clamp(min=0)], 0.0)


def encode_texts(
    resolved: Resolved,
    texts: Sequence[str],
    device: torch.device | str,
    *,
    batch_size: int = 64,
    max_length: int = 64,
    normalise: bool = True,
    pooling: Pooling = "mean",
    dtype: torch.dtype | None = None,
    cache: bool = True,
    untrained: int | None = None,
    loaded: tuple[Any, Any] | None = None,
) -> Tensor:
    """One vector a text: (N, D), float32, on the CPU, in the order of ``texts``.

    The checkpoint runs frozen in inference mode on ``device`` over batches of similar length; equal texts
    are encoded once. Neither order nor batch size changes a vector beyond rounding.

    Args:
        resolved: an encoder or a causal model from ``resolve``.
        texts: N texts; an empty one is encoded as a single space.
        device: where the checkpoint runs.
        batch_size: texts a forward pass.
        max_length: tokens a text, special tokens included; longer ones are cut.
        normalise: scale every vector to length 1.
        pooling: ``"mean"`` over the valid tokens (encoders), or the ``"last"`` valid token (causal models).
        dtype: of the checkpoint's weights; ``None`` keeps its own. Pooling is in FP32 always.
        cache: keep the vectors on disk, keyed by the checkpoint's content, the texts and these settings. A
            cached file of another shape or dtype, or with non-finite numbers, is rejected and made again.
        untrained: a seed: the same architecture and tokenizer with newly drawn weights instead of the trained
            ones, a control for what the checkpoint knows.
        loaded: what ``load_text_encoder`` gave for this checkpoint, device and dtype, for a caller that encodes
            again and again; ``None`` loads it for this call.

    Raises:
        UserError: the checkpoint does not load, or overflows in this dtype.
    """
    if pooling not in ("mean", "last"):
        raise ValueError(f"pooling is 'mean' or 'last', not {pooling!r}")
    device = torch.device(device)
    settings = {
        "kind": "vectors",
        "max_length": max_length,
        "normalise": normalise,
        "pooling": pooling,
        "dtype": str(dtype),
        "device": device.type,
    }
    if untrained is not None:
        settings["untrained"] = untrained
    file = _cache_file(resolved, texts, settings) if cache else None
    width = _width(resolved)
    if file is not None and (stored := _read_vectors(file, (len(texts), width))) is not None:
        return stored
    pool = masked_mean if pooling == "mean" else last_valid
    distinct = list(dict.fromkeys(texts))
    row_of = {text: row for row, text in enumerate(distinct)}
    vectors = torch.zeros(len(distinct), width)
    for rows, states, mask in _forward(
        resolved, distinct, device, batch_size, max_length, dtype, layer=-1, untrained=untrained, loaded=loaded
    ):
        pooled = pool(states.float(), mask)
        vectors[rows] = (functional.normalize(pooled, dim=-1) if normalise else pooled).cpu()
    if not bool(vectors.isfinite().all()):
        raise UserError(
            f"{resolved.name} gives vectors that are not finite as {dtype or 'its own dtype'} on {device}; "
            "load it with dtype=torch.float32"
        )
    vectors = vectors[[row_of[text] for text in texts]]
    if file is not None:
        _write_vectors(file, vectors)
    return vectors


def token_states(
    resolved: Resolved,
    texts: Sequence[str],
    device: torch.device | str,
    *,
    layer: int = -1,
    batch_size: int = 64,
    max_length: int = 64,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """States of every token: (N, T, D) float32 and a mask (N, T) bool, both on the CPU, right-padded.

    T is the length of the longest text, at most ``max_length``; padding states are zero. ``layer`` counts as
    Transformers' ``hidden_states`` do: 0 is the embedding output, k the output of block k, -1 the final
    states. Needs N x T x D x 4 bytes of memory and is not cached. Other arguments as in
    :func:`encode_texts`.
    """
    parts = list(_forward(resolved, texts, torch.device(device), batch_size, max_length, dtype, layer))
    longest = max((mask.shape[1] for _, _, mask in parts), default=0)
    states = torch.zeros(len(texts), longest, _width(resolved))
    valid = torch.zeros(len(texts), longest, dtype=torch.bool)
    for rows, hidden, mask in parts:
        keep = (mask != 0).cpu()
        states[rows, : hidden.shape[1]] = torch.where(keep.unsqueeze(-1), hidden.float().cpu(), 0.0)
        valid[rows, : hidden.shape[1]] = keep
    return states, valid


def _forward(
    resolved: Resolved,
    texts: Sequence[str],
    device: torch.device,
    batch_size: int,
    max_length: int,
    dtype: torch.dtype | None,
    layer: int,
    untrained: int | None = None,
    loaded: tuple[Any, Any] | None = None,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Run the checkpoint over the texts, longest first; yield ``(rows, states (b, t, D), mask (b, t))``.

    ``rows`` says which b texts a batch holds; every text occurs in one batch. States stay on the device.
    """
    from auto_research.checkpoints.resolve import load_text_encoder

    if not texts:
        return
    model, tokenizer = loaded or load_text_encoder(resolved, device, dtype)
    if untrained is not None:
        model = _redrawn(model, untrained)
    limit = min(max_length, int(tokenizer.model_max_length))
    encoded = tokenizer([text or " " for text in texts], truncation=True, max_length=limit)["input_ids"]
    order = sorted(range(len(texts)), key=lambda row: -len(encoded[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        ids = {"input_ids": [encoded[row] for row in rows]}
        batch = tokenizer.pad(ids, padding_side="right", return_tensors="pt").to(device)
        with torch.inference_mode():
            output = model(**batch, output_hidden_states=layer != -1, return_dict=True)
            states = hidden_states(output if layer == -1 else output.hidden_states[layer])
        yield rows, states, batch["attention_mask"]


def _redrawn(model: Any, seed: int) -> Any:
    """A model of the same class and configuration with weights drawn from `seed`; the caller's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        fresh = type(model)(model.config)
    return fresh.to(device=model.device, dtype=model.dtype).eval()


def _width(resolved: Resolved) -> int:
    return int(read_config(resolved.path)["hidden_size"])


def _cache_file(resolved: Resolved, texts: Sequence[str], settings: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps([resolved.digest(), settings, list(texts)]).encode()).hexdigest()
    return cache_folder("vectors", f"{resolved.name}-{key[:24]}.safetensors")


def _read_vectors(file: Path, shape: tuple[int, int]) -> Tensor | None:
    """The cached vectors, or ``None`` where there are none or they are not what was asked for."""
    if not file.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored: Tensor = load_file(file)["vectors"]
    except (SafetensorError, KeyError, OSError) as error:
        log.warning("cached vectors %s are unreadable (%s); encoding again", file, error)
        return None
    if tuple(stored.shape) != shape or stored.dtype != torch.float32 or not bool(stored.isfinite().all()):
        log.warning(
            "cached vectors %s are rejected: %s %s, expected finite torch.float32 %s; encoding again",
            file,
            stored.dtype,
            tuple(stored.shape),
            shape,
        )
        return None
    return stored


def _write_vectors(file: Path, vectors: Tensor) -> None:
    """Write under a temporary name, then rename; a cache that cannot be written is only a slower run."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"vectors": vectors}, temporary)
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        log.warning("cannot keep vectors in %s (%s); they will be computed again next time", file.parent, error)
        with suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink(missing_ok=True)
