"""The counting behind :class:`auto_research.runtime.evidence.DeviceWork`; needs torch.

Every operation torch dispatches passes through here, so the path is short: what an operation is (a view, a
copy or factory, plain compute, a matrix product) is worked out once and remembered per overload.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

Flops = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
"""(args, kwargs, result) to floating-point operations."""


@dataclass
class Counts:
    """Work on one kind of device."""

    operations: int = 0
    elements: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """What one overload does, as far as counting goes."""

    view: bool
    computes: bool
    fresh: bool
    flops: Flops | None


# Results that only repeat or create values. Random and constant fills are found by their schema: they have
# no tensor input.
MOVES = {
    "_to_copy", "alias_copy", "clone", "contiguous", "copy", "copy_", "detach_copy", "fill", "fill_", "zero_",
    "zero", "resize_", "set_", "lift", "lift_fresh", "lift_fresh_copy", "_foreach_copy_", "_foreach_zero_",
    "_pin_memory", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "normal_",
    "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "_local_scalar_dense", "record_stream", "_has_compatible_shallow_copy_type",
}  # fmt: skip


def _product(a: Any, b: Any) -> int:
    """FLOPs of (..., M, K) times (..., K, N), batch dimensions taken from the first factor."""
    return 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _recurrent(args: tuple[Any, ...], batch_first: bool) -> int:
    """FLOPs of a fused RNN: every weight matrix meets every (step, sequence) row once."""
    rows = math.prod(args[0].shape[:-1])
    return sum(2 * rows * weight.numel() for weight in args[1] if weight.dim() == 2)


def _flash_cpu(args: tuple[Any, ...], backward: bool) -> int:
    """FLOPs of scaled dot-product attention on the CPU: query, key, value are (B, H, T, D)."""
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, length, depth = query.shape
    forward = 2 * batch * heads * length * key.shape[-2] * (depth + value.shape[-1])
    return forward * 5 // 2 if backward else forward


_OWN_FLOPS: dict[str, Flops] = {
    "mm": lambda args, kwargs, result: _product(args[0], args[1]),
    "bmm": lambda args, kwargs, result: _product(args[0], args[1]),
    "mv": lambda args, kwargs, result: _product(args[0], args[1]),
    "dot": lambda args, kwargs, result: _product(args[0], args[1]),
    "addmm": lambda args, kwargs, result: _product(args[1], args[2]),
    "addmv": lambda args, kwargs, result: _product(args[1], args[2]),
    "baddbmm": lambda args, kwargs, result: _product(args[1], args[2]),
    "addbmm": lambda args, kwargs, result: _product(args[1], args[2]),
    "_int_mm": lambda args, kwargs, result: _product(args[0], args[1]),
    "_scaled_mm": lambda args, kwargs, result: _product(args[0], args[1]),
    "_addmm_activation": lambda args, kwargs, result: _product(args[1], args[2]),
    "_weight_int8pack_mm": lambda args, kwargs, result: 2 * args[0].numel() * result.shape[-1],
    "_weight_int4pack_mm": lambda args, kwargs, result: 2 * args[0].numel() * result.shape[-1],
    "linear": lambda args, kwargs, result: 2 * args[0].numel() * result.shape[-1],
    "_grouped_mm": lambda args, kwargs, result: 2 * args[0].numel() * result.shape[-1],
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, kwargs, result: _flash_cpu(args, False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, kwargs, result: _flash_cpu(args, True),
    "_cudnn_rnn": lambda args, kwargs, result: _recurrent(args, False),
}


def _registered(formula: Callable[..., int]) -> Flops:
    """One of torch's own formulas; what it cannot work out counts as no matrix product."""

    def flops(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        return int(formula(*args, **kwargs, out_val=result))

    return flops
