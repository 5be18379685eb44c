"""BF16 computation at FP32's speed on processors without BF16 units.

There PyTorch multiplies BF16 matrices about seven times slower than FP32 ones. The product of two BF16 numbers is exact
in FP32, and units for BF16 add products up in FP32 and round the sum once. So FP32 kernels on BF16 operands, with the
result rounded to BF16, compute the same as such a unit, but for the order of the additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

__all__ = ["RoundedProducts", "bf16_units", "fast_bf16"]

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""What multiplies matrices: linear layers, attention, and their gradients."""

KEPT_FP32 = {_aten._scaled_dot_product_flash_attention_for_cpu.default: 1}
"""Operator -> how many outputs stand first that have the operands' dtype; the others are FP32 in any case."""


def bf16_units() -> bool:
    """Whether this processor multiplies BF16 numbers itself."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def fast_bf16(device: str | torch.device) -> AbstractContextManager[Any]:
    """Within it, BF16 products on a CPU without BF16 units run at FP32's speed; elsewhere it does nothing.

    Covers the forward and the backward pass, as a CPU's gradients are computed in the thread that asks for them.
    """
    needed = torch.device(device).type == "cpu" and not bf16_units()
    return RoundedProducts() if needed else nullcontext()


class RoundedProducts(TorchDispatchMode):
    """Runs `PRODUCTS` of BF16 tensors on the CPU in FP32, and rounds what comes out to BF16."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or not tree_any(_narrow, (args, kwargs)):
            return func(*args, **kwargs)
        args, kwargs = tree_map(_widen, (args, kwargs))
        made = func(*args, **kwargs)
        if func in KEPT_FP32:
            first = KEPT_FP32[func]
            return (*tree_map(_round, made[:first]), *made[first:])
        return tree_map(_round, made)


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and value.device.type == "cpu"


def _widen(value: Any) -> Any:
    return value.float() if _narrow(value) else value


def _round(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
