"""The counting behind :class:`auto_research.runtime.evidence.DeviceWork`; needs torch.

Every operation torch dispatches passes through here, so the path is short: what an operation is (a view, a
copy or factory, plain compute, a matrix product) is worked out once and remembered per overload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from auto_research.runtime.flops import Flops, count_flops, flop_formula


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

    composite: bool
    view: bool
    computes: bool
    fresh: bool
    flops: Flops | None


# Views that their schema does not mark as such.
VIEWS = {"_unsafe_view", "lift", "lift_fresh"}

# Operations with a tensor input whose results only repeat or create values. Factories proper need no entry:
# they have no tensor input.
MOVES = {
    "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "_foreach_zero_", "_local_scalar_dense",
    "_pin_memory", "_to_copy", "alias_copy", "bernoulli_", "cauchy_", "clone", "copy", "copy_", "detach_copy",
    "empty_like", "exponential_", "fill", "fill_", "full_like", "geometric_", "log_normal_", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal_", "ones_like", "rand_like",
    "randint_like", "randn_like", "random_", "record_stream", "resize_", "set_", "uniform_", "zero", "zero_",
    "zeros_like",
}  # fmt: skip


def classify(func: Any) -> Kind:
    """Work out from its name and schema what an overload does."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: what it calls is counted where it is dispatched
        return Kind(composite=False, view=True, computes=False, fresh=False, flops=None)
    name = schema.name.rpartition("::")[2]
    aliases = [result.alias_info for result in schema.returns]
    view = name in VIEWS or any(alias is not None and not alias.is_write for alias in aliases)
    takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return Kind(
        composite=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        view=view,
        computes=takes_tensor and name not in MOVES,
        fresh=bool(aliases) and all(alias is None for alias in aliases),
        flops=flop_formula(func),
    )


class Work(TorchDispatchMode):
    """Counts per device type what is dispatched while it is active; autograd's threads inherit it."""

    # Higher-order operators come here too and pass through; without this they would raise.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counts] = {}  # by kind of device: all GPUs count together
        self._by_device: dict[torch.device, Counts] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the method below unwrapped: the wrapper imports the compiler (seconds) and slows each call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = classify(func)
        if kind.composite:  # autograd takes these apart; in inference mode they arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if kind.view:
            return result
        if isinstance(result, Tensor):
            count = self._by_device.get(result.device) or self._on(result)
            count.operations += 1
            size = result.numel()
            if kind.computes:
                count.elements += size
                if kind.flops is not None:
                    count.flops += count_flops(kind.flops, args, kwargs, result)
            if kind.fresh:
                count.bytes += size * result.itemsize
        else:
            self._several(kind, args, kwargs, result)
        return result

    def _several(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Operations that return several tensors, or change a list of them in place and return nothing."""
        tensors = _tensors(result) or _tensors(args[:1])
        if not tensors:
            return
        first = self._on(tensors[0])
        first.operations += 1
        if kind.computes and kind.flops is not None:
            first.flops += count_flops(kind.flops, args, kwargs, result)
        for tensor in tensors:
            count = self._on(tensor)
            if kind.computes:
                count.elements += tensor.numel()
            if kind.fresh and result is not None:
                count.bytes += tensor.numel() * tensor.element_size()

    def _on(self, tensor: Tensor) -> Counts:
        device = tensor.device
        count = self._by_device[device] = self.counts.setdefault(device.type, Counts())
        return count


_kinds: dict[Any, Kind] = {}


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value or in lists and tuples of values, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def reset_peaks() -> None:
    """Start the peak-memory statistics of every CUDA device in use anew."""
    for index in _cuda_devices():
        torch.cuda.reset_peak_memory_stats(index)


def peak_bytes() -> dict[str, int]:
    """Peak bytes of tensors per CUDA device since :func:`reset_peaks`; empty while CUDA is unused."""
    return {f"cuda:{index}": int(torch.cuda.max_memory_allocated(index)) for index in _cuda_devices()}


def _cuda_devices() -> range:
    in_use = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    return range(torch.cuda.device_count() if in_use else 0)
