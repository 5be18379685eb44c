"""What CUDA kernels refuse, wait for or compute in another way than the CPU's: the rules on single operators."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from .rules import argument_texts
from .tables import Tables
from .tensor import Tag, put_on_card, quiet, storage_of, storages, tag_of

if TYPE_CHECKING:
    from .modes import Record, VirtualCuda
    from .session import Session

#: A rule runs the operator itself and returns its result.
OperatorRule = Callable[["VirtualCuda", "Record", Tag, tuple[Any, ...], dict[str, Any]], Any]

#: Operators whose result (or its shape) the host must wait for.
SYNCS: Final[dict[str, str]] = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "repeat_interleave": "repeat_interleave",
    "is_nonzero": "item",
    "_assert_scalar": "item",
    "histc": "histc",
    "to_sparse": "to_sparse",
    "_to_sparse": "to_sparse",
    "multinomial": "",
}

_HALF: Final = (torch.float16, torch.bfloat16)

#: Operators that raise in deterministic mode on CUDA -> (words of CUDA's message, condition).
_ALWAYS: Final = lambda args, kwargs: True  # noqa: E731


def _is_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].is_floating_point() or args[0].is_complex())


NONDETERMINISTIC: Final[dict[str, tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]]]] = {
    "cumsum": ("cumsum_cuda_kernel", _is_float),
    "histc": ("_histc_cuda", _ALWAYS),
    "put_": ("put_", _ALWAYS),
    "bincount": ("_bincount_cuda", lambda args, kwargs: len(args) > 1 and args[1] is not None),
    "grid_sampler_2d_backward": ("grid_sampler_2d_backward_cuda", _ALWAYS),
    "grid_sampler_3d_backward": ("grid_sampler_3d_backward_cuda", _ALWAYS),
    "_grid_sampler_2d_cpu_fallback_backward": ("grid_sampler_2d_backward_cuda", _ALWAYS),
    "avg_pool3d_backward": ("avg_pool3d_backward_cuda", _ALWAYS),
    "_adaptive_avg_pool2d_backward": ("adaptive_avg_pool2d_backward_cuda", _ALWAYS),
    "_adaptive_avg_pool3d_backward": ("adaptive_avg_pool3d_backward_cuda", _ALWAYS),
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d_backward_cuda", _ALWAYS),
    "adaptive_max_pool3d_backward": ("adaptive_max_pool3d_backward_cuda", _ALWAYS),
    "fractional_max_pool2d_backward": ("fractional_max_pool2d_backward_cuda", _ALWAYS),
    "fractional_max_pool3d_backward": ("fractional_max_pool3d_backward_cuda", _ALWAYS),
    "max_unpool2d": ("max_unpooling2d_forward_out", _ALWAYS),
    "max_unpool3d": ("max_unpooling3d_forward_out", _ALWAYS),
    "upsample_linear1d_backward": ("upsample_linear1d_backward_out_cuda", _ALWAYS),
    "upsample_bilinear2d_backward": ("upsample_bilinear2d_backward_out_cuda", _ALWAYS),
    "upsample_bicubic2d_backward": ("upsample_bicubic2d_backward_out_cuda", _ALWAYS),
    "upsample_trilinear3d_backward": ("upsample_trilinear3d_backward_out_cuda", _ALWAYS),
    "reflection_pad1d_backward": ("reflection_pad1d_backward_out_cuda", _ALWAYS),
    "reflection_pad2d_backward": ("reflection_pad2d_backward_cuda", _ALWAYS),
    "reflection_pad3d_backward": ("reflection_pad3d_backward_out_cuda", _ALWAYS),
    "nll_loss2d_forward": ("nll_loss2d_forward_out_cuda_template", _ALWAYS),
    "_ctc_loss_backward": ("ctc_loss_backward_gpu", _ALWAYS),
    "scatter_reduce": ("scatter_reduce_cuda_kernel", lambda args, kwargs: args[4] == "prod"),
    "scatter_reduce_": ("scatter_reduce_cuda_kernel", lambda args, kwargs: args[4] == "prod"),
    "kthvalue": ("kthvalue CUDA", _ALWAYS),
    "median": ("median CUDA with indices output", lambda args, kwargs: len(args) > 1),
    "_embedding_bag_dense_backward": (
        "embedding_bag_backward_cuda_max",
        lambda args, kwargs: len(args) > 7 and args[7] == 2,
    ),
}
#: Operators whose CUDA kernel adds with atomics unless deterministic mode asks otherwise.
ATOMIC: Final = frozenset(
    {
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "embedding_dense_backward",
        "_embedding_bag_dense_backward",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put",
        "index_reduce",
        "index_reduce_",
        "replication_pad1d_backward",
        "replication_pad2d_backward",
        "replication_pad3d_backward",
        "max_pool3d_with_indices_backward",
    }
)
#: Operators with a half-precision hole that CUDA autocast and mixed losses fall into.
NORMS: Final = {"native_layer_norm": 2, "native_group_norm": 1}
#: CUDA's name of the kernel in its "not implemented for" message.
_CUDA_KERNEL: Final = {
    "mm": "addmm_cuda",
    "addmm": "addmm_cuda",
    "bmm": "baddbmm_cuda",
    "baddbmm": "baddbmm_cuda",
    "dot": "dot",
    "vdot": "vdot",
    "mv": "addmv_impl_cuda",
    "addmv": "addmv_impl_cuda",
    "convolution": "convolution_cuda",
    "histc": "histc",
    "angle": "angle_cuda",
    "igamma": "igamma_cuda",
    "igammac": "igammac_cuda",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "avg_pool3d": "avg_pool3d_out_cuda",
}
_SCALAR_NAMES: Final = {
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "complex32": "ComplexHalf",
}


def scalar_name(dtype: torch.dtype) -> str:
    """C++'s word for a dtype: ``Float`` for ``torch.float32``."""
    name = str(dtype).removeprefix("torch.")
    return _SCALAR_NAMES.get(name, name)


def rule_of(qualified: str, packet: str, name: str, tables: Tables) -> OperatorRule | None:
    """The rule of an overload, or ``None`` for the many that need none."""
    if not qualified.startswith("aten::"):
        return None
    if name in tables.cpu_only:
        return _no_kernel
    if packet in ("mm", "addmm", "bmm", "baddbmm") and name.endswith((".dtype", ".dtype_out")):
        return _product_with_dtype
    if packet in _SPECIAL:
        return _SPECIAL[packet]
    if packet in NORMS:
        return _norm
    watched = (
        packet in SYNCS
        or packet in NONDETERMINISTIC
        or packet in ATOMIC
        or _functional(packet) in {name.split(":")[0] for name in tables.missing_dtypes}
        or packet in tables.emulated_dtypes
    )
    return _watched if watched else None


def _run(mode: VirtualCuda, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return record.call(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        return native_error(mode, record, error, args, kwargs)


def _watched(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators that synchronise, are nondeterministic, or miss a dtype on one side."""
    session = mode.session
    packet = record.packet
    kind = SYNCS.get(packet)
    if kind and not (packet == "repeat_interleave" and kwargs.get("output_size") is not None):
        session.sync(kind)
    if _determinism(session, record, args, kwargs):
        with _nondeterministic():
            return _run(mode, record, args, kwargs)
    gaps = _gaps(session.tables, packet, args, kwargs)
    if gaps:
        _missing_dtype(session, record, gaps, args, kwargs)
    if packet in session.tables.emulated_dtypes:
        return _emulated(mode, record, args, kwargs)
    return _run(mode, record, args, kwargs)


@contextmanager
def _nondeterministic() -> Iterator[None]:
    """A reported operator goes on without deterministic mode (the CPU may refuse it as well)."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def _determinism(session: Session, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """DET-1, and the list of nondeterministic operators met; true when a fault was reported."""
    packet = record.packet
    entry = NONDETERMINISTIC.get(packet)
    if entry is not None:
        name, applies = entry
        if not applies(args, kwargs):
            return False
        session.nondeterministic[(record.name, _where())] += 1
        if torch.are_deterministic_algorithms_enabled():
            text = (
                f"{name} does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'."
            )
            if torch.is_deterministic_algorithms_warn_only_enabled():
                session.note(f"warn_only deterministic mode: {name} is nondeterministic on CUDA")
                return False
            session.recorder.fault("DET-1", text, op=record.name, arguments=argument_texts(record.names, args, kwargs))
            return True
    elif packet in ATOMIC and not torch.are_deterministic_algorithms_enabled():
        if packet in ("index_put_", "_index_put_impl_", "_unsafe_index_put"):
            accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate")
            if not accumulates:
                return False
        session.nondeterministic[(record.name, _where())] += 1
    return False


def _functional(packet: str) -> str:
    """``addmm`` of ``addmm_``: dtypes are those of the out-of-place operator."""
    return packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet


def _gaps(tables: Tables, packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[torch.dtype] | None:
    """Dtypes of an operator that CUDA lacks; those of reductions depend on the reduction."""
    base = _functional(packet)
    if base in ("scatter_reduce", "index_reduce"):
        reduction = kwargs.get("reduce", args[4] if len(args) > 4 else "")
        return tables.missing_dtypes.get(f"{base}:{reduction}")
    return tables.missing_dtypes.get(base)


def _missing_dtype(
    session: Session, record: Record, gaps: frozenset[torch.dtype], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    first = next((a for a in args if isinstance(a, Tensor)), None)
    if first is None or first.dtype not in gaps or first.numel() == 0:
        return
    kernel = _CUDA_KERNEL.get(record.packet, f"{record.packet}_cuda")
    session.recorder.fault(
        "KRN-2",
        f"\"{kernel}\" not implemented for '{scalar_name(first.dtype)}'",
        op=record.name,
        arguments=argument_texts(record.names, args, kwargs),
        error=NotImplementedError if record.packet in ("angle", "igamma", "igammac") else RuntimeError,
    )


def no_kernel(session: Session, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """KRN-1: the operator has no kernel for CUDA."""
    session.recorder.fault(
        "KRN-1",
        f"Could not run '{record.qualified}' with arguments from the 'CUDA' backend.",
        op=record.name,
        arguments=argument_texts(record.names, args, kwargs),
        error=NotImplementedError,
    )


def _no_kernel(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    no_kernel(mode.session, record, args, kwargs)
    return _run(mode, record, args, kwargs)


def _emulated(mode: VirtualCuda, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that CUDA has and the CPU may lack for this dtype: in float32, cast back."""
    first = next((a for a in args if isinstance(a, Tensor)), None)
    names = mode.session.tables.emulated_dtypes[record.packet]
    if first is None or first.dtype not in names:
        return _run(mode, record, args, kwargs)
    try:
        return record.call(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented for" not in str(error) and "nsupported" not in str(error):
            return native_error(mode, record, error, args, kwargs)
    mode.session.emulate(record.name)
    wide = torch.complex64 if first.dtype.is_complex else torch.float32

    def widen(value: Any) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.dtype == first.dtype else value

    with quiet():
        out = record.call(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})
        if not isinstance(out, Tensor):
            return out
        narrow = first.dtype
        if narrow.is_complex and not out.dtype.is_complex:
            narrow = torch.float16 if narrow == torch.complex32 else out.dtype
        if record.mutates and isinstance(args[0], Tensor):
            return args[0].copy_(out)
        return out.to(narrow)


def _norm(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTY-2: CUDA's norm kernels want input and weight of one dtype."""
    x = args[0]
    weight = args[NORMS[record.packet]] if len(args) > NORMS[record.packet] else None
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        mode.session.recorder.fault(
            "DTY-2",
            f"expected scalar type {scalar_name(x.dtype)} but found {scalar_name(weight.dtype)}",
            op=record.name,
            arguments=argument_texts(record.names, args, kwargs),
        )
    return _run(mode, record, args, kwargs)


def _unscale(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """AMP-2: the CUDA unscale kernel exists for float32 and float16 gradients only."""
    if any(g.dtype == torch.bfloat16 for g in args[0]):
        mode.session.recorder.fault(
            "AMP-2",
            "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
            op=record.name,
            arguments=argument_texts(record.names, args, kwargs)[:4],
            error=NotImplementedError,
        )
    return _run(mode, record, args, kwargs)


def _pack(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """RNN-2: lengths of packed sequences are read by the host."""
    lengths = args[1]
    if tag_of(lengths) is not None:
        mode.session.recorder.fault(
            "RNN-2",
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D cuda:0 "
            f"{scalar_name(lengths.dtype)} tensor",
            op=record.name,
            arguments=argument_texts(record.names, args, kwargs),
        )
    data, batch_sizes = _run(mode, record, args, kwargs)
    # The batch sizes are born on the host, unlike every other result of a device operator.
    storage_of(batch_sizes)._tag = None
    storage = storage_of(data)
    if storage._tag is None:
        storage._tag = Tag(storage.nbytes(), tag.index, mode.meter, record.name)
    return Placed((data, batch_sizes))


def _copy(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` crosses devices freely; count the transfer."""
    target, source = args[0], args[1]
    session = mode.session
    to_card, from_card = tag_of(target) is not None, tag_of(source) is not None
    if from_card and not to_card and _born_here(target, sys._getframe(2)):
        put_on_card(target, tag.index, mode.meter, "helper")  # a result that a C++ composite fills piece by piece
        to_card = True
    out = _run(mode, record, args, kwargs)
    if to_card != from_card:
        nbytes = target.numel() * target.element_size()
        blocking = not (len(args) > 2 and args[2])
        count_transfer(session, nbytes, to_card=to_card, blocking=blocking, pinned=_is_pinned(source))
        if not to_card and not blocking and target.layout is torch.strided:
            storage_of(target)._pending = session.epoch
        return Placed(out)
    return out


def _born_here(tensor: Tensor, frame: FrameType) -> bool:
    here = (id(frame), frame.f_lasti, id(frame.f_code))
    return any(storage._born == here for storage in storages(tensor))


class Placed:
    """Wraps a result the mode must not tag."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and bool(storage_of(tensor)._pinned)


def count_transfer(session: Session, nbytes: int, *, to_card: bool, blocking: bool, pinned: bool) -> None:
    """Account one copy between host and card, and the wait it costs."""
    transfer = session.transfer
    if to_card:
        transfer.to_device += 1
        transfer.to_device_bytes += nbytes
        if blocking and nbytes > 64 * 1024:
            session.slow_transfers[("blocking copy to the device", _where())] += 1
        elif not blocking and not pinned:
            session.slow_transfers[("non_blocking copy from pageable memory blocks", _where())] += 1
    else:
        transfer.to_host += 1
        transfer.to_host_bytes += nbytes
        if blocking:
            session.sync("copy to host")


def check_pending(session: Session, record: Record, tensor: Tensor, epoch: int) -> None:
    """ASY-1: the host reads what a non-blocking copy may not have written yet."""
    storage = storage_of(tensor)
    storage._pending = None
    if session.epoch == epoch and record.packet not in ("detach", "view", "alias", "is_pinned"):
        session.recorder.fault(
            "ASY-1",
            "the host reads the result of a non_blocking device-to-host copy before any synchronisation: on CUDA it "
            "silently sees memory that the copy has not reached yet",
            op=record.name,
        )
    elif session.epoch == epoch:
        storage._pending = epoch


_DTYPE_ERROR: Final = re.compile(
    r"must have the same dtype|expected .*(scalar type|dtype)|same dtype|found dtype|dtypes? .*(match|same)|"
    r"does not match weight dtype|expected m1 and m2|Expected.*dtype|Input type .* and (weight|bias) type",
    re.IGNORECASE,
)
#: The host checks dimensions and integer positions itself, on every device.
_HOST_CHECK: Final = re.compile(r"^(Dimension out of range|select\(\)|slice\(\)|narrow\(\)|start \()")
#: What a CPU kernel refuses with words and a CUDA kernel with a device-side assertion.
_RANGE_ERROR: Final = re.compile(
    r"out of (range|bounds|DATA bounds)|index .* is out of|not in the valid range|Expected idx >= 0|"
    r"all elements of (input|target) should be between|probability tensor contains|repeats can not be negative"
)
#: Composite functions whose CUDA path leaves the check to a kernel.
_COMPOSITE_RANGE_ERROR: Final = re.compile(r"^Class values must be (non-negative|smaller than num_classes)")
#: Errors that name their rule by themselves, wherever they are raised.
_TELLING: Final = (
    (re.compile(r"Attempting to deserialize object on CUDA device"), "DEV-5"),
    (re.compile(r"cannot be converted to type .* without overflow"), "DTY-3"),
    (re.compile(r"Attempting to unscale FP16 gradients"), "AMP-2"),
    (re.compile(r"can't optimize a non-leaf Tensor"), "DEV-9"),
    (re.compile(r"Found two parameters on different devices"), "DEV-1"),
    (re.compile(r"Low precision dtypes not supported"), "KRN-2"),
    (re.compile(r"MKL FFT doesn't support tensors of type: (BFloat16|Half)"), "KRN-4"),
)


def classify(error: BaseException, *, in_kernel: bool = False) -> str | None:
    """The rule of an exception that the CPU raises as well: DTY-1, DTY-3, OOB-1 ... or none.

    ``in_kernel`` says that an operator on device tensors raised it; Python's own ``list index out of range``, and an
    integer position that the host checks on every device, are no faults of a card.
    """
    text = str(error)
    for pattern, rule in _TELLING:
        if pattern.search(text):
            return rule
    if _COMPOSITE_RANGE_ERROR.search(text):
        return "OOB-1"
    if in_kernel and _RANGE_ERROR.search(text) and not _HOST_CHECK.search(text):
        return "OOB-1"
    if isinstance(error, RuntimeError | ValueError) and _DTYPE_ERROR.search(text):
        return "DTY-1"
    return None


def native_error(
    mode: VirtualCuda, record: Record, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A kernel refused its arguments on the CPU too: report with site and operands; in keep-going mode go on.

    A dtype boundary is crossed with both sides promoted, so that later faults are met as well.
    """
    session = mode.session
    rule = classify(error, in_kernel=True)
    if rule is None or getattr(error, "finding", None) is not None:
        raise error
    text = str(error).split("\n")[0]
    if rule == "OOB-1":
        text = f"CUDA error: device-side assert triggered ({text})"
    finding = session.recorder.fault(
        rule,
        text,
        op=record.name,
        arguments=argument_texts(record.names, args, kwargs),
        fix=_dtype_fix(record, args, kwargs) if rule == "DTY-1" else None,
        error=torch.AcceleratorError if rule == "OOB-1" else type(error),
    )
    error.finding = finding  # type: ignore[attr-defined]
    if rule == "DTY-1":
        floats = [a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dtype.is_floating_point]
        if len(set(floats)) > 1:
            wide = floats[0]
            for dtype in floats[1:]:
                wide = torch.promote_types(wide, dtype)

            def widen(value: Any) -> Any:
                return value.to(wide) if isinstance(value, Tensor) and value.dtype.is_floating_point else value

            with quiet():
                return record.call(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})
    raise error


def _dtype_fix(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = [
        (name, value)
        for name, value in [*zip(record.names, args, strict=False), *kwargs.items()]
        if isinstance(value, Tensor)
    ]
    dtypes = {value.dtype for _, value in named}
    if len(dtypes) < 2:
        return "cast at this boundary: x.to(weight.dtype)"
    reference = named[-1]
    other = next((entry for entry in named if entry[1].dtype != reference[1].dtype), named[0])
    target = str(reference[1].dtype)
    return f"cast '{other[0]}' at this boundary: .to({target}), the dtype of '{reference[0]}'"


def host_error(session: Session, error: BaseException) -> None:
    """An error of a host operator stays what it is: no fault of a card. Remember only that the run met it."""
    error.on_host = True  # type: ignore[attr-defined]
    session.note(f"the script itself raised on the host: {type(error).__name__}: {str(error).splitlines()[0]}")


def _where() -> str:
    from .locate import current_site

    return str(current_site())


def _product_with_dtype(
    mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``mm(..., out_dtype=)`` and its kin exist on CUDA only: accumulate in the wide dtype."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    position = record.names.index("out_dtype")
    dtype = kwargs.pop("out_dtype") if "out_dtype" in kwargs else args[position]
    operands = [a.to(dtype) if isinstance(a, Tensor) else a for a in (*args[:position], *args[position + 1 :])]
    mode.session.emulate(record.name)
    with quiet():
        result = getattr(torch.ops.aten, record.packet).default(*operands, **kwargs)
        return result if out is None else out.copy_(result)


def _index(mode: VirtualCuda, record: Record, tag: Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A mask on the device as index: the host waits to know how many elements it selects (unless it is filled)."""
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8) and tag_of(index) is not None:
            value = args[2] if len(args) > 2 else None
            if value is None or value.numel() != 1 or tag_of(value) is not None:
                mode.session.sync("boolean indexing")
            break
    return _watched(mode, record, tag, args, kwargs)


_SPECIAL: Final[dict[str, OperatorRule]] = {
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index
    ),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_pack_padded_sequence": _pack,
    "copy_": _copy,
}
