"""Explicit device and dtype conversion where a checkpoint meets a head.

Language checkpoints are often stored in BF16 while heads, losses and recommenders compute in FP32. PyTorch
does not promote across ``Linear`` or ``GRU``: BF16 states fed straight into an FP32 head fail. Every
crossing is therefore spelled out with one of these two functions. Both are differentiable: gradients return
in the dtype and on the device of what went in.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["from_model", "to_model"]


def to_model(x: Tensor, module: nn.Module) -> Tensor:
    """Bring ``x`` (any shape) to the device and floating dtype in which ``module`` takes its input.

    The dtype is that of the module's first floating parameter (or buffer, for a module whose weights are
    buffers), i.e. of its entry: LoRA keeps FP32 adapters inside a BF16 model, which still takes BF16.
    Integer and boolean tensors only change device. A module without tensors leaves ``x`` as it is.
    """
    first: Tensor | None = None
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return _convert(x, tensor.device, tensor.dtype)
        first = tensor if first is None else first
    return x if first is None else x.to(first.device)


def from_model(x: Tensor, like: Tensor | nn.Module | torch.dtype = torch.float32) -> Tensor:
    """Bring a checkpoint's output ``x`` (any shape) to where it is used next.

    Args:
        x: hidden states, logits, a pooled vector.
        like: a tensor or a module whose device and floating dtype to take, or a dtype alone (default
            FP32, the dtype of heads and losses).
    """
    if isinstance(like, nn.Module):
        return to_model(x, like)
    if isinstance(like, torch.dtype):
        return _convert(x, x.device, like)
    return _convert(x, like.device, like.dtype if like.is_floating_point() else x.dtype)


def _convert(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.to(device=device, dtype=dtype) if x.is_floating_point() else x.to(device)
