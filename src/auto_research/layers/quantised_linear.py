"""Weight-only quantisation of linear layers after training: INT8 per output channel, INT4 in groups.

Weights are stored as integers with a float scale and rebuilt in every forward, *in the dtype and on the device of the
activations*; the bias follows. Rebuilding costs time: this saves memory and bytes, never latency.

Letters: O outputs, I inputs, G groups a row.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Bits = Literal[4, 8]

STORED = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""

GROUP = 64
"""Inputs that share one scale at 4 bits."""


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """s_o = max_j |W_oj| / 127 and Q = round(W / s), clipped to +-127: (O, I) -> int8 (O, I), float32 (O, 1).

    A row of zeros gets the scale 1 and stays zero.
    """
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def quantise_int4(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Symmetric 4-bit codes -7..7 with one scale for each `group` inputs: uint8 (O, ceil(I / 2)), float32 (O, G).

    Two codes share a byte, the even column in its low half, each stored plus 8. The last group may be shorter.
    """
    weight = weight.float()
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    blocks = F.pad(weight, (0, groups * group - inputs)).view(outputs, groups, group)
    scale = blocks.abs().amax(2) / 7
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (blocks / scale[..., None]).round().clamp(-7, 7).view(outputs, -1)[:, :inputs].long() + 8
    codes = F.pad(codes, (0, inputs % 2), value=8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), scale


def unpack_int4(packed: Tensor, inputs: int) -> Tensor:
    """Codes -7..7 as int8 (O, I) of packed bytes (O, ceil(I / 2))."""
    low, high = packed & 15, packed >> 4
    return torch.stack([low, high], dim=2).flatten(1)[:, :inputs].to(torch.int8) - 8


class QuantisedLinear(nn.Module):
    """y = x W' + b with W rebuilt from integers; nothing in it trains.

    Buffers: `codes`, int8 (O, I) or packed uint8 (O, ceil(I / 2)); `scale`, float32 (O, 1) or (O, G); `bias` (O,) or
    None. Quantisation is done in float32 on the CPU, whatever the layer's own dtype and device are.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bits: Bits = 8, group: int = GROUP) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits}")
        self.bits, self.group = bits, group
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float().cpu()
        codes, scale = quantise_int8(weight) if bits == 8 else quantise_int4(weight, group)
        device = linear.weight.device
        self.register_buffer("codes", codes.to(device))
        self.register_buffer("scale", scale.to(device))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        """Moves with its model, but the scale stays float32: `.bfloat16()` must not round it."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.codes.device)
        return self

    def rebuilt(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """The weight (O, I) that the forward uses: the product of codes and scale, rounded once to `dtype`."""
        device = device or self.codes.device
        codes, scale = self.codes.to(device), self.scale.to(device)
        if self.bits == 4:
            codes = unpack_int4(codes, self.in_features)
            scale = scale.repeat_interleave(self.group, dim=1)[:, : self.in_features]
        return (codes.float() * scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O), in the dtype and on the device of x."""
        bias = None if self.bias is None else self.bias.to(x)
        return F.linear(x, self.rebuilt(x.dtype, x.device), bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def quantise_linears(
    model: nn.Module, bits: Bits = 8, *, group: int = GROUP, skip: tuple[str, ...] = ("lm_head",)
) -> nn.Module:
    """A copy of `model` whose linear layers are quantised, except those whose name ends with one of `skip`.

    Embeddings and norms stay as they are. Raises ValueError when no layer was replaced (adapters not merged yet, or
    everything skipped).
    """
    model = copy.deepcopy(model)
    found = [name for name, m in model.named_modules() if type(m) is nn.Linear and not name.endswith(skip)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no plain linear layer to quantise; merge adapters first")
    for name in found:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(parent)
        setattr(module, child, QuantisedLinear(getattr(module, child), bits, group))
    return model


def bytes_on_disk(model: nn.Module) -> int:
    """Size of the model's state as a safetensors file; a tied tensor is stored once.

    The file is not written: it is 8 bytes, a JSON header filled up to a multiple of 8, and the tensors, which lie in
    the order of falling element size, then of their names.
    """
    distinct: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        distinct.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor))
    end, header = 0, {}
    for name, tensor in sorted(distinct.values(), key=lambda pair: (-pair[1].element_size(), pair[0])):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + end
