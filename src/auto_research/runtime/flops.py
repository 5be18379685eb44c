"""Floating-point operations of dispatched operators: one counting for the audit's evidence and for the rehearsal."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor

__all__ = ["FLOPS", "Flops", "count_flops", "flop_formula"]

Flops = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
"""(args, kwargs, result) to floating-point operations."""


def _product(a: Tensor, b: Tensor) -> int:
    """FLOPs of (..., M, K) times (..., K, N) or (K,); batch dimensions are those of ``a``."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """FLOPs of scaled dot-product attention; query, key and value are (B, H, T, D)."""
    batch, heads, length, depth = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (depth + value.shape[-1])


def _recurrent(inputs: Tensor, weights: Iterable[Tensor]) -> int:
    """FLOPs of a fused recurrent layer: every weight matrix meets every (step, sequence) row once."""
    rows = math.prod(inputs.shape[:-1])
    return sum(2 * rows * weight.numel() for weight in weights if weight.dim() == 2)


def _packed(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of (..., K) times a weight in a packed layout giving (..., N)."""
    return 2 * args[0].numel() * result.shape[-1]


# By operation name. The frequent ones are here to be quick; the others are missing from torch's registry.
FLOPS: dict[str, Flops] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_int_mm"), lambda args, kwargs, result: _product(*args[:2])),
    **dict.fromkeys(
        ("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation", "addmm_", "baddbmm_"),
        lambda args, kwargs, result: _product(*args[1:3]),
    ),
    **dict.fromkeys(("linear", "_weight_int8pack_mm", "_weight_int4pack_mm", "_grouped_mm"), _packed),
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, kwargs, result: _attention(*args[:3]),
    # Five products instead of two: the scores once more, then four gradients.
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda args, kwargs, result: _attention(*args[1:4]) * 5 // 2
    ),
    "_cudnn_rnn": lambda args, kwargs, result: _recurrent(args[0], args[1]),
    "_cudnn_rnn_backward": lambda args, kwargs, result: 2 * _recurrent(args[0], args[1]),
    "mkldnn_rnn_layer": lambda args, kwargs, result: _recurrent(args[0], args[1:3]),
    "mkldnn_rnn_layer_backward": lambda args, kwargs, result: 2 * _recurrent(args[0], args[1:3]),
}


@lru_cache(maxsize=1)
def _torch_registry() -> dict[Any, Callable[..., int]]:
    logger = logging.getLogger("torch.utils.flop_counter")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that Triton is absent, which is no news on a CPU
    try:
        from torch.utils.flop_counter import flop_registry
    finally:
        logger.setLevel(level)
    return flop_registry


def flop_formula(func: Any) -> Flops | None:
    """FLOP formula of an overload: ours for the frequent products and what torch lacks, else torch's; None for none."""
    name = func._schema.name.rpartition("::")[2]
    if name in FLOPS:
        return FLOPS[name]
    formula = _torch_registry().get(getattr(func, "overloadpacket", None))
    if formula is None:
        return None
    return lambda args, kwargs, result: int(formula(*args, **kwargs, out_val=result))


def count_flops(formula: Flops, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one call; 0 for forms of its arguments that the formula does not know."""
    try:
        return formula(args, kwargs, result)
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0
