"""What Python sees: tensors, storages, devices and generators answer as if they were on a CUDA card."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import TensorBase

from .kernels import count_transfer
from .patching import Patches
from .placement import HOST, card_generators, ordinal
from .rules import argument_texts
from .session import Session, active, running
from .tensor import Tag, put_on_card, quiet, storage_of, storages, tag_of, take_off_card

RealDevice: Final = type(torch.device("cpu"))
_base: Final[Any] = TensorBase
_device_get: Final = _base.device.__get__
_to: Final = _base.to
_grad_get: Final = _base.grad.__get__
_grad_set: Final = _base.grad.__set__

_NUMPY_ERROR: Final = (
    "can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)


# --- devices ---------------------------------------------------------------------------------------------------------


class _DeviceMeta(type):
    """Makes the stand-in for ``torch.device`` answer like the C type, and accept bare ordinals."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, RealDevice)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return subclass is cls or issubclass(subclass, RealDevice)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is RealDevice

    def __hash__(cls) -> int:
        return hash(RealDevice)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and not kwargs and isinstance(args[0], int) and not isinstance(args[0], bool):
            return RealDevice("cuda", args[0])
        if set(kwargs) == {"index"} and not args:
            return RealDevice("cuda", kwargs["index"])
        return RealDevice(*args, **kwargs)


_Device: Any = _DeviceMeta(
    "device", (), {"__module__": "torch", "__doc__": RealDevice.__doc__, "__qualname__": "device"}
)


def as_device(value: Any) -> torch.device | None:
    """A device argument in any of its forms (``None``, ``"cuda"``, ``0``, ``torch.device``)."""
    if value is None or isinstance(value, RealDevice):
        return value
    if isinstance(value, int):
        return RealDevice("cuda", value)
    return RealDevice(value)


def same_place(tensor: Tensor, device: torch.device, session: Session) -> bool:
    """Whether ``tensor`` is on ``device`` already (``cuda`` without ordinal means the current card)."""
    tag = tag_of(tensor)
    if device.type == "cuda":
        index = session.current if device.index is None else device.index
        return tag is not None and tag.index == index
    return tag is None and _device_get(tensor).type == device.type


# --- moving between host and card ------------------------------------------------------------------------------------


def move(
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Copy ``tensor`` to the other side; differentiable, and its gradient travels back."""
    if tensor.requires_grad and torch.is_grad_enabled() and not tensor.is_inference():
        moved: Tensor = _Move.apply(tensor, device, dtype, non_blocking, memory_format)
        return moved
    return _copy_across(tensor, device, dtype, non_blocking, memory_format)


def _copy_across(
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
) -> Tensor:
    session = running()
    if device.type not in ("cuda", "cpu"):
        with quiet():
            return _to(tensor, device, dtype or tensor.dtype)
    index = ordinal(session, device) if device.type == "cuda" else None
    was = tag_of(tensor)
    source_dtype = tensor.dtype
    if _device_get(tensor).type == "meta":
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of "
            "torch.nn.Module.to() when moving module from meta to a different device."
        )
    if type(tensor) not in _DENSE and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        session.local.to_host = index is None
        try:
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, non_blocking=non_blocking)
        finally:
            session.local.to_host = False
    with quiet(), torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is torch.strided:
            out = _to(tensor, dtype=dtype or source_dtype, copy=True, memory_format=memory_format)
        else:
            out = _to(tensor, dtype=dtype or source_dtype, copy=True)
    nbytes = sum(s.nbytes() for s in storages(out))
    pinned = any(s._pinned for s in storages(tensor))
    if (index is None) != (was is None):
        count_transfer(session, nbytes, to_card=index is not None, blocking=not non_blocking, pinned=pinned)
    if index is not None:
        put_on_card(out, index, session.meter, "to")
    elif non_blocking and was is not None:
        for storage in storages(out):
            storage._pending = session.epoch
    if any(s._tainted is not None for s in storages(tensor)) and index is None:
        for storage in storages(out):
            storage._tainted = True
    return out


class _Move(torch.autograd.Function):
    """A copy between devices. C++ sees one device and would not send the gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: Any, dtype: Any, non_blocking: bool, memory_format: Any) -> Tensor:
        ctx.home, ctx.dtype = tensor.device, tensor.dtype
        return _copy_across(tensor, device, dtype, non_blocking, memory_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return gradient.to(ctx.home, ctx.dtype), None, None, None, None

    generate_vmap_rule = False


_DENSE: Final = {torch.Tensor, torch.nn.Parameter}


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool, bool, Any]:
    """``(device, dtype, non_blocking, copy, memory_format)`` of the three signatures of ``Tensor.to``."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    rest = list(args)
    if rest:
        first = rest.pop(0)
        if isinstance(first, Tensor):
            device, dtype = first.device, first.dtype
        elif isinstance(first, torch.dtype):
            dtype = first
        elif first is not None:
            device = first
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                dtype = rest.pop(0)
        elif rest:
            dtype = rest.pop(0)
    other = kwargs.get("other")
    if other is not None:
        device, dtype = other.device, other.dtype
    non_blocking = bool(rest.pop(0)) if rest else bool(kwargs.get("non_blocking", False))
    copy = bool(rest.pop(0)) if rest else bool(kwargs.get("copy", False))
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    return as_device(device), dtype, non_blocking, copy, memory_format


def _tensor_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, dtype, non_blocking, copy, memory_format = _parse_to(args, kwargs)
    if device is None or same_place(self, device, running()):
        kwargs = {} if memory_format is torch.preserve_format else {"memory_format": memory_format}
        if dtype is None:
            dtype = self.dtype
        return _to(self, dtype, non_blocking=non_blocking, copy=copy, **kwargs)
    return move(self, device, dtype, non_blocking=non_blocking, memory_format=memory_format)


def _tensor_cuda(
    self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    target = as_device(device) or RealDevice("cuda", running().current)
    if target.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, but got {target}")
    if same_place(self, target, running()):
        return self
    return move(self, target, non_blocking=non_blocking, memory_format=memory_format)


def _tensor_cpu(self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    if same_place(self, HOST, running()):
        return self
    return move(self, HOST, memory_format=memory_format)


# --- attributes ------------------------------------------------------------------------------------------------------


def _tensor_device(self: Tensor) -> torch.device:
    try:
        tag = storage_of(self)._tag  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):
        tag = tag_of(self)
    if tag is None:
        device: torch.device = _device_get(self)
        return device
    return running().devices[tag.index]


def _tensor_is_cuda(self: Tensor) -> bool:
    return tag_of(self) is not None


def _tensor_is_cpu(self: Tensor) -> bool:
    return tag_of(self) is None and _device_get(self).type == "cpu"


def _tensor_get_device(self: Tensor) -> int:
    tag = tag_of(self)
    return -1 if tag is None else tag.index


def _no_numpy(tensor: Tensor) -> None:
    """DEV-3, and ASY-1 for host tensors."""
    session = running()
    tag = tag_of(tensor)
    if tag is not None:
        session.recorder.fault(
            "DEV-3",
            _NUMPY_ERROR.format(index=tag.index),
            op="numpy",
            arguments=argument_texts(("self",), (tensor,), {}),
            error=TypeError,
        )
        session.sync("numpy")
        return
    check_host_read(tensor, "numpy")


def check_host_read(tensor: Tensor, what: str) -> None:
    """ASY-1 for reads that bypass the dispatcher (``numpy``, ``tolist``)."""
    session = running()
    for storage in storages(tensor):
        if storage._pending is not None:
            if storage._pending == session.epoch:
                session.recorder.fault(
                    "ASY-1",
                    "the host reads the result of a non_blocking device-to-host copy before any synchronisation: on "
                    "CUDA it silently sees memory that the copy has not reached yet",
                    op=what,
                )
            storage._pending = None


def _tensor_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("force"):
        return _base.numpy(self.detach().cpu().resolve_conj().resolve_neg())
    _no_numpy(self)
    with quiet():
        return _base.numpy(self, *args, **kwargs)


def _tensor_tolist(self: Tensor) -> Any:
    if tag_of(self) is not None:
        running().sync("tolist")
    else:
        check_host_read(self, "tolist")
    with quiet():
        return _base.tolist(self)


_repr: Final = Tensor.__repr__


def _tensor_repr(self: Tensor, **kwargs: Any) -> str:
    session = running()
    if tag_of(self) is not None:
        session.sync("print")
    local = session.local
    was = getattr(local, "muted", False)
    local.muted = True  # printing reads the tensor dozens of times: it counts once
    try:
        if type(self) not in _DENSE:
            return _repr(self, **kwargs)
        with quiet():
            return _repr(self, **kwargs)
    finally:
        local.muted = was


def _tensor_type(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    tag = tag_of(self)
    if dtype is None:
        name: str = _base.type(self)
        return name.replace("torch.", "torch.cuda.", 1) if tag is not None else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    text = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    with quiet():
        target = _base.type(torch.empty(0), text.replace("torch.cuda.", "torch.")).dtype
    place = running().devices[running().current] if ".cuda." in text else HOST
    return self.to(place, target, non_blocking=non_blocking)


def _tensor_type_as(self: Tensor, other: Tensor) -> Tensor:
    return self.to(other.device, other.dtype)


def _tensor_pin_memory(self: Tensor, device: Any = None) -> Tensor:
    session = running()
    if tag_of(self) is not None:
        session.recorder.fault(
            "DEV-6",
            f"cannot pin '{self.type()}' only dense CPU tensors can be pinned",
            op="pin_memory",
            arguments=argument_texts(("self",), (self,), {}),
        )
        return self
    if tensor_is_pinned(self):
        return self
    out = self.detach().clone()
    for storage in storages(out):
        storage._pinned = True
    return out


def tensor_is_pinned(self: Tensor, device: Any = None) -> bool:
    """Whether the tensor's host memory counts as pinned."""
    return any(storage._pinned for storage in storages(self))


def _tensor_grad(self: Tensor) -> Tensor | None:
    gradient: Tensor | None = _grad_get(self)
    if gradient is not None:
        tag, found = tag_of(self), tag_of(gradient)
        if tag is not None and found is None:
            # C++ backward formulas make zero gradients from options(): the host's, to them.
            put_on_card(gradient, tag.index, running().meter, "grad")
        elif tag is None and found is not None and self.dim() == 0:
            gradient = gradient.detach().cpu()
            _grad_set(self, gradient)
    return gradient


def _tensor_set_grad(self: Tensor, gradient: Tensor | None) -> None:
    if isinstance(gradient, Tensor):
        home, place = self.device, gradient.device
        tainted = any(s._tainted is not None for s in (*storages(self), *storages(gradient)))
        if home != place and not tainted:
            running().recorder.fault(
                "DEV-1",
                f"attempting to assign a gradient with device type '{place.type}' to a tensor with device type "
                f"'{home.type}'. Please ensure that the gradient and the tensor are on the same device",
                op="grad",
                arguments=argument_texts(("self", "grad"), (self, gradient), {}),
            )
    _grad_set(self, gradient)


def _tensor_del_grad(self: Tensor) -> None:
    _grad_set(self, None)


_copy: Final = _base.copy_


def _tensor_copy_(self: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    if isinstance(src, Tensor) and src.requires_grad and torch.is_grad_enabled() and src.device != self.device:
        src = src.to(self.device, non_blocking=non_blocking)  # so that the gradient finds its way home
    return _copy(self, src, non_blocking)


def _tensor_record_stream(self: Tensor, stream: Any) -> None:
    if tag_of(self) is None:
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend.")


def _with_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """``new_*`` and ``*_like``: ordinals as devices, and an explicit ``device='cpu'`` that means it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            device = kwargs["device"] = as_device(device)
            if device is not None and device.type == "cpu":
                local = running().local
                local.to_host = True
                try:
                    return take_off_fresh(original(*args, **kwargs), args)
                finally:
                    local.to_host = False
        return original(*args, **kwargs)

    wrapped.__name__ = getattr(original, "__name__", "wrapped")
    wrapped.__doc__ = original.__doc__
    return wrapped


def take_off_fresh(out: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Make sure a freshly made tensor is on the host."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and any(a is b for a in storages(out) for b in storages(first)):
        return out
    return take_off_card(out)


def _tensor_new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device = as_device(kwargs.pop("device", None)) or self.device
    with quiet():
        out: Tensor = _base.new(self, *args, **kwargs)
        if args and isinstance(args[0], Tensor):
            out = out.clone()
    if device.type == "cuda":
        put_on_card(out, ordinal(running(), device), running().meter, "new")
    return out


def _tensor_new_tensor(
    self: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any
) -> Tensor:
    place = as_device(device) or self.device
    return torch.tensor(data, dtype=dtype or self.dtype, device=place, requires_grad=requires_grad)


# --- storages --------------------------------------------------------------------------------------------------------

_storage_base: Final[Any] = torch._C.StorageBase
_storage_device: Final = torch.UntypedStorage.device


def _storage_get_device(self: Any) -> torch.device:
    tag = self._tag
    if tag is not None:
        return running().devices[tag.index]
    device: torch.device = _storage_base.device.__get__(self)
    return device


def _copy_storage(storage: Any, index: int | None) -> Any:
    new: Any = torch.UntypedStorage(storage.nbytes())
    with quiet():
        _storage_base.copy_(new, storage, False)
    if index is not None:
        new._tag = Tag(new.nbytes(), index, running().meter, "storage")
    return new


def _storage_clone(self: Any) -> Any:
    return _copy_storage(self, None if self._tag is None else self._tag.index)


def _storage_cpu(self: Any) -> Any:
    return self if self._tag is None else _copy_storage(self, None)


def _storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    place = as_device(device)
    assert place is not None
    if place.type == "cuda":
        index = ordinal(running(), place)
        if self._tag is not None and self._tag.index == index:
            return self
        return _copy_storage(self, index)
    return _storage_cpu(self)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return _storage_to(self, device=as_device(device) or RealDevice("cuda", running().current))


def _storage_pin_memory(self: Any, device: Any = None) -> Any:
    new = _copy_storage(self, None)
    new._pinned = True
    return new


def _storage_new_shared(original: Callable[..., Any]) -> Any:
    """Loader workers collate into shared storages; one on the card needs no sharing."""

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        place = as_device(device)
        if place is None or place.type != "cuda":
            return original(size, device=device)
        new: Any = torch.UntypedStorage(size)
        new._tag = Tag(size, ordinal(running(), place), running().meter, "storage")
        return new

    return classmethod(new_shared)


def _reduce_to_process(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """MP-1: a device tensor that goes to another process travels through host memory."""

    def reduce_tensor(tensor: Tensor) -> Any:
        tag = tag_of(tensor)
        if tag is None or tensor.layout is not torch.strided:
            return reduce(tensor)
        running().recorder.fault(
            "MP-1",
            "a device tensor is sent to another process (CUDA IPC); the lifetime rules of shared device memory are not "
            "rehearsed",
            op="send",
            arguments=argument_texts(("tensor",), (tensor,), {}),
        )
        with quiet():
            content = _base.numpy(tensor.detach().contiguous().reshape(-1).view(torch.uint8)).tobytes()
        described = (tensor.dtype, tuple(tensor.shape), isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
        return _received, (content, tag.index, *described)

    return reduce_tensor


def _received(
    content: bytes, index: int, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, requires_grad: bool
) -> Tensor:
    """A device tensor as it arrives; on the host where no rehearsal runs."""
    with quiet():
        tensor = torch.empty(shape, dtype=dtype, device=HOST)
        if content:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    session = active()
    if session is not None:
        put_on_card(tensor, index, session.meter, "receive")
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _install_reductions(patches: Patches) -> None:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # registers the reducers that are wrapped here

    table: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind in (Tensor, torch.nn.Parameter):
        before = table[kind]
        table[kind] = _reduce_to_process(before)
        patches.on_undo(partial(table.__setitem__, kind, before))


# --- generators ------------------------------------------------------------------------------------------------------

_RealGenerator: Final[Any] = torch._C.Generator
_generator_device: Final = _RealGenerator.device.__get__


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _RealGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        place = as_device(device)
        assert place is not None
        if place.type != "cuda":
            return _RealGenerator(place)
        ordinal(running(), place)
        generator = _CardGenerator()
        card_generators.add(generator._cdata)
        return generator


class _CardGenerator(torch._C.Generator):  # type: ignore[misc]
    """A CPU generator that says it is the card's."""

    @property
    def device(self) -> torch.device:
        return running().devices[running().current]

    def __del__(self) -> None:
        card_generators.discard(self._cdata)


_Generator: Any = _GeneratorMeta("Generator", (), {"__module__": "torch", "__doc__": _RealGenerator.__doc__})


# --- functions that build tensors behind the dispatcher --------------------------------------------------------------


def _builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` and its kin: build on the host, then move."""

    def build(*args: Any, **kwargs: Any) -> Any:
        device = as_device(kwargs.get("device"))
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if device is None:
            device = _default_device()
            if isinstance(data, Tensor) and original is not _tensor_function:
                device = data.device
        requires_grad = kwargs.get("requires_grad", False)
        if device is not None and device.type == "cuda":
            pass
        elif isinstance(data, Tensor):
            if tag_of(data) is None:
                return original(*args, **kwargs)
            if kwargs.get("device") is None:
                device = data.device
        else:
            if isinstance(data, list | tuple) and _count_card_scalars(data):
                running().sync("torch.tensor of device values")
                with quiet():
                    return original(*args, **kwargs)
            return original(*args, **kwargs)
        assert device is not None
        options = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad", "pin_memory")}
        if isinstance(data, Tensor) and original is not _tensor_function:
            dtype = options.get("dtype")
            out = data.to(device, dtype) if dtype is not None else data.to(device)
            return out.clone() if options.get("copy") and out is data else out
        with quiet():
            host = original(*args, **options, device=HOST)
        take_off_fresh(host, args)
        out = host if device.type == "cpu" else _copy_fresh(host, device)
        return out.requires_grad_() if requires_grad else out

    build.__name__ = original.__name__
    build.__doc__ = original.__doc__
    return build


def _copy_fresh(host: Tensor, device: torch.device) -> Tensor:
    session = running()
    index = ordinal(session, device)
    if any(s._tag is not None for s in storages(host)):
        return host
    session.transfer.to_device += 1
    session.transfer.to_device_bytes += sum(s.nbytes() for s in storages(host))
    with quiet():
        fresh = host if not _shares_foreign_memory(host) else host.clone()
    return put_on_card(fresh, index, session.meter, "tensor")


def _shares_foreign_memory(tensor: Tensor) -> bool:
    """``as_tensor`` and ``asarray`` may alias a NumPy array; a device copy must not."""
    return tensor.layout is torch.strided and not storage_of(tensor).resizable()


def _from_dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    """``from_dlpack`` of a device tensor is an alias of it; C++ would hand out a host tensor."""

    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> Tensor:
        if isinstance(ext_tensor, Tensor) and tag_of(ext_tensor) is not None:
            place = as_device(device) or ext_tensor.device
            return ext_tensor.detach().to(place, copy=bool(copy))
        out: Tensor = original(ext_tensor, device=device, copy=copy)
        return out

    from_dlpack.__doc__ = original.__doc__
    return from_dlpack


def _tensor_dlpack(self: Tensor, **kwargs: Any) -> Any:
    """DEV-3 of ``np.from_dlpack``: the only reader of a capsule that a machine without a card can have."""
    tag = tag_of(self)
    if tag is not None:
        running().recorder.fault(
            "DEV-3",
            "Unsupported device in DLTensor.",
            op="__dlpack__",
            arguments=argument_texts(("self",), (self,), {}),
            error=BufferError,
        )
        running().sync("__dlpack__")
    return _dlpack(self, **kwargs)


def _tensor_dlpack_device(self: Tensor) -> Any:
    tag = tag_of(self)
    return _dlpack_device(self) if tag is None else (_CUDA_IN_DLPACK, tag.index)


_CUDA_IN_DLPACK: Final = 2
_dlpack: Final = Tensor.__dlpack__
_dlpack_device: Final = Tensor.__dlpack_device__


def _count_card_scalars(values: Any, depth: int = 0) -> int:
    return sum(
        (isinstance(v, Tensor) and tag_of(v) is not None)
        or (depth < 3 and isinstance(v, list | tuple) and _count_card_scalars(v, depth + 1) > 0)
        for v in values
    )


def _default_device() -> torch.device | None:
    from torch.utils import _device

    current: torch.device | None = _device.CURRENT_DEVICE
    return current


_tensor_function: Final = torch.tensor

_BUILDERS: Final = ("tensor", "as_tensor", "asarray")
_INDICES: Final = {
    "coo": ("indices",),
    "csr": ("crow_indices", "col_indices"),
    "bsr": ("crow_indices", "col_indices"),
    "csc": ("ccol_indices", "row_indices"),
    "bsc": ("ccol_indices", "row_indices"),
    "compressed": ("compressed_indices", "plain_indices"),
}
#: Sparse constructors -> names of their tensors, values last.
_SPARSE_BUILDERS: Final = {f"sparse_{kind}_tensor": (*names, "values") for kind, names in _INDICES.items()}
_FACTORIES: Final = (
    "arange",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)
_LIKES: Final = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEWS: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def _sparse_builder(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """``torch.sparse_*_tensor``: tensors stay where they are unless ``device`` is given; lists go to the values."""

    def build(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((*names, "size"), args, strict=False))
        given.update((name, kwargs.pop(name)) for name in (*names, "size") if name in kwargs)
        place = as_device(kwargs.pop("device", None))
        if names[-1] not in given:  # only a size
            out = original(*given.values(), **kwargs)
            where = place or _default_device()
            return out if where is None or where.type != "cuda" else _copy_fresh(out, where)
        values = given[names[-1]]
        home = place or (values.device if isinstance(values, Tensor) else _default_device()) or HOST
        parts = []
        for name in names:
            part = given.pop(name)
            if not isinstance(part, Tensor):
                part = torch.tensor(part, dtype=kwargs.get("dtype") if name == names[-1] else torch.int64, device=home)
            elif place is not None:
                part = part.to(place)
            parts.append(part)
        _same_home(original.__name__, names, parts)
        return original(*parts, *given.values(), **kwargs)

    build.__name__ = original.__name__
    build.__doc__ = original.__doc__
    return build


def _same_home(what: str, names: tuple[str, ...], parts: list[Tensor]) -> None:
    """DEV-1 of sparse constructors: indices and values that are given as tensors are not moved."""
    values = parts[-1]
    for i, part in enumerate(parts[:-1]):
        if part.device != values.device:
            running().recorder.fault(
                "DEV-1",
                f"device of {names[i]} ({part.device}) must match device of values ({values.device})",
                op=what,
                arguments=argument_texts(names, tuple(parts), {}),
                fix=f"give device= as well, or move '{names[i]}' to the values' device",
            )
            parts[i] = part.to(values.device)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Factories whose only trouble is an ordinal as device (C++ would ask for an accelerator)."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device").__class__ is int:
            kwargs["device"] = RealDevice("cuda", kwargs["device"])
        return original(*args, **kwargs)

    make.__name__ = original.__name__
    make.__doc__ = original.__doc__
    return make


def _parse_module_to(*args: Any, **kwargs: Any) -> Any:
    args = (
        tuple(RealDevice("cuda", a) if isinstance(a, int) and not isinstance(a, bool) else a for a in args[:1])
        + args[1:]
    )
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = RealDevice("cuda", kwargs["device"])
    return _real_parse_to(*args, **kwargs)


_nn: Final[Any] = torch._C._nn  # type: ignore[attr-defined]
_real_parse_to: Final = _nn._parse_to


def register_with_torchscript(patches: Patches, original: Any, wrapped: Any) -> None:
    """``torch.jit.script`` looks builtins up by identity: let the wrapper stand for the original."""
    from torch.jit import _builtins

    name = _builtins._find_builtin(original)
    if name is not None:
        table = _builtins._get_builtin_table()
        table[id(wrapped)] = name
        patches.on_undo(lambda: table.pop(id(wrapped), None))


def install(patches: Patches) -> None:
    """Replace the Python faces of tensors, storages, devices, generators and factories."""
    tensor: Any = Tensor
    for name, getter in (("device", _tensor_device), ("is_cuda", _tensor_is_cuda), ("is_cpu", _tensor_is_cpu)):
        patches.set(tensor, name, property(getter))
    patches.set(tensor, "grad", property(_tensor_grad, _tensor_set_grad, _tensor_del_grad))
    methods: tuple[tuple[str, Any], ...] = (
        ("to", _tensor_to),
        ("cuda", _tensor_cuda),
        ("cpu", _tensor_cpu),
        ("get_device", _tensor_get_device),
        ("numpy", _tensor_numpy),
        ("tolist", _tensor_tolist),
        ("__repr__", _tensor_repr),
        ("type", _tensor_type),
        ("type_as", _tensor_type_as),
        ("pin_memory", _tensor_pin_memory),
        ("is_pinned", tensor_is_pinned),
        ("copy_", _tensor_copy_),
        ("record_stream", _tensor_record_stream),
        ("new", _tensor_new),
        ("new_tensor", _tensor_new_tensor),
        ("__dlpack__", _tensor_dlpack),
        ("__dlpack_device__", _tensor_dlpack_device),
    )
    for name, method in methods:
        patches.set(tensor, name, method)
    for name in _NEWS:
        patches.set(tensor, name, _with_device(getattr(_base, name)))
    _install_storage(patches)
    _install_reductions(patches)
    functions: Any = torch
    for names, wrap in ((_BUILDERS, _builder), (_FACTORIES, _factory), (_LIKES, _with_device)):
        for name in names:
            original = getattr(functions, name)
            wrapped = wrap(original)
            patches.set(functions, name, wrapped)
            register_with_torchscript(patches, original, wrapped)
    for name, parts in _SPARSE_BUILDERS.items():
        original = getattr(functions, name)
        wrapped = _sparse_builder(original, parts)
        patches.set(functions, name, wrapped)
        register_with_torchscript(patches, original, wrapped)
    for module in (functions, functions.utils.dlpack):
        patches.set(module, "from_dlpack", _from_dlpack(module.from_dlpack))
    patches.set(functions, "device", _Device)
    patches.set(functions, "get_device", _tensor_get_device)
    patches.set(functions, "Generator", _Generator)
    patches.set(_nn, "_parse_to", _parse_module_to)
    _install_device_context(patches)
    copyreg.pickle(RealDevice, _reduce_device)
    patches.on_undo(lambda: copyreg.dispatch_table.pop(RealDevice, None))


def _install_storage(patches: Patches) -> None:
    storage: Any = torch.UntypedStorage
    patches.set(storage, "device", property(_storage_get_device))
    patches.set(storage, "is_cuda", property(lambda self: self._tag is not None))
    for name, method in (
        ("clone", _storage_clone),
        ("cpu", _storage_cpu),
        ("to", _storage_to),
        ("cuda", _storage_cuda),
        ("pin_memory", _storage_pin_memory),
        ("is_pinned", lambda self, device=None: self._pinned),
        ("_new_shared", _storage_new_shared(storage._new_shared)),
    ):
        patches.set(storage, name, method)


def _reduce_device(device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    return torch.device, (device.type,) if device.index is None else (device.type, device.index)


def _install_device_context(patches: Patches) -> None:
    """``with torch.device("cuda")`` and ``set_default_device``: builders do not pass through the dispatcher."""
    from torch.utils import _device

    # Unwrapped: its cache would keep the replaced functions, and `with torch.device(...)` would miss the real ones.
    constructors = _device._device_constructors.__wrapped__()
    behind = (*_BUILDERS, *_SPARSE_BUILDERS)
    originals = set(constructors) | {patches.original(torch, name) for name in behind + _FACTORIES}
    builders = {patches.original(torch, name): getattr(torch, name) for name in behind}

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in originals and kwargs.get("device") is None:
            if func in builders:
                return builders[func](*args, **{**kwargs, "device": self.device})
            kwargs["device"] = self.device
        return func(*args, **kwargs)

    patches.set(_device.DeviceContext, "__torch_function__", torch_function)
