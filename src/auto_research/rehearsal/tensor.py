"""The tag that makes a CPU tensor count as being on the virtual card.

A tensor is on the card when its ``UntypedStorage`` carries a :class:`Tag`. PyTorch keeps one Python object per C++
storage, so views, ``detach``, ``.data``, ``set_``, saved tensors and ``Parameter`` inherit the tag for free. The tag
also is the memory meter: it charges its bytes when made and returns them when the storage dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from .memory import LARGE, Meter

#: ``Tensor.untyped_storage`` of the C base class: the one read on the hot path.
storage_of: Final = torch._C.TensorBase.untyped_storage
#: Context manager under which operators skip the rehearsal's dispatch mode.
quiet: Final = torch._C._DisableTorchDispatch


class Tag:
    """Marks a storage as living on card ``index``; holds its bytes on ``meter`` until it dies."""

    __slots__ = ("__weakref__", "index", "meter", "nbytes", "op")

    def __init__(self, nbytes: int, index: int, meter: Meter, op: str = "") -> None:
        self.index = index
        self.meter = meter
        self.op = op
        self.nbytes = nbytes = (nbytes + 511) & -512  # the allocator's blocks
        meter.live = live = meter.live + nbytes
        if live > meter.peak or nbytes >= LARGE or meter.muted:
            meter.charge(self)

    def __del__(self) -> None:
        meter, nbytes = self.meter, self.nbytes
        if meter.stale or nbytes >= LARGE:
            meter.release(self)
        meter.live -= nbytes


def install_storage_slots() -> None:
    """Give every storage the three attributes the rehearsal reads, with ``None`` as the class default."""
    storage: Any = torch.UntypedStorage
    storage._tag = None  # Tag: on the card
    storage._born = None  # (frame, instruction, code) of the call that made it, for helpers of C++ composites
    storage._tainted = None  # a host storage already reported: its consequences are not reported again
    storage._pinned = False  # pinned host memory
    storage._pending = None  # epoch of a non-blocking copy to the host that nobody has waited for


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that hold ``tensor``'s data: itself, sparse values and indices, or a wrapped tensor."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    layout = tensor.layout
    if layout is torch.strided:
        yield tensor
        return
    with quiet(), torch.no_grad():
        base: Any = torch._C.TensorBase
        if layout is torch.sparse_coo:
            yield base._values(tensor)
            yield base._indices(tensor)
        elif layout in (torch.sparse_csr, torch.sparse_bsr):
            yield base.values(tensor)
            yield base.crow_indices(tensor)
            yield base.col_indices(tensor)
        elif layout in (torch.sparse_csc, torch.sparse_bsc):
            yield base.values(tensor)
            yield base.ccol_indices(tensor)
            yield base.row_indices(tensor)


def storages(tensor: Tensor) -> list[Any]:
    """Storages of ``tensor``; empty for tensors without memory (meta, opaque wrappers)."""
    found = []
    for part in parts(tensor):
        try:
            found.append(storage_of(part))
        except (NotImplementedError, RuntimeError):
            continue
    return found


def tag_of(tensor: Tensor) -> Tag | None:
    """The card tag of ``tensor``, or ``None`` when it lives on the host."""
    try:
        tag: Tag | None = storage_of(tensor)._tag  # type: ignore[attr-defined]
        return tag
    except (NotImplementedError, RuntimeError):
        for storage in storages(tensor):
            if storage._tag is not None:
                found: Tag = storage._tag
                return found
        return None


def put_on_card(tensor: Tensor, index: int, meter: Meter, op: str = "") -> Tensor:
    """Tag ``tensor``'s storages as card ``index`` (those that have no tag yet) and return it."""
    for storage in storages(tensor):
        if storage._tag is None:
            storage._tag = Tag(storage.nbytes(), index, meter, op)
            storage._born = None
    return tensor


def take_off_card(tensor: Tensor) -> Tensor:
    """Remove the tags of ``tensor``'s storages and return it."""
    for storage in storages(tensor):
        storage._tag = None
    return tensor


def describe(tensor: Tensor) -> str:
    """``float32 (3, 4) on cuda:0`` of a tensor; Python values describe themselves."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} on {tensor.device}"
