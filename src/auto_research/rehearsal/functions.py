"""Functions whose CUDA rules sit above the dispatcher: recurrent layers, attention, transforms, legacy constructors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from . import autocast
from .kernels import scalar_name
from .masquerade import RealDevice, as_device, register_with_torchscript
from .memory import MUTED
from .patching import Patches
from .placement import ordinal, taint
from .rules import argument_texts
from .session import Session, running
from .tensor import put_on_card, quiet, storages, tag_of

# --- recurrent layers ------------------------------------------------------------------------------------------------

_CUDNN: Final = (torch.float32, torch.float64, torch.float16)


def _recurrent(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """cuDNN's preconditions (RNN-1, RNN-3) around ``lstm``, ``gru`` and ``rnn_*``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        packed = isinstance(args[3], list | tuple)  # (data, batch_sizes, hx, weights, ...)
        position = 2 if packed else 1
        data, hidden, weights = args[0], args[position], args[position + 1]
        states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        tensors = [data, *states, *weights]
        if all(tag_of(t) is None for t in tensors):
            return original(*args, **kwargs)
        _same_device(name, data, states, weights)
        dtype = autocast.lower_dtype() if autocast.enabled() else data.dtype
        transformed = torch._C._functorch.is_functorch_wrapped_tensor(data)
        cudnn = torch.backends.cudnn.enabled and dtype in _CUDNN and not transformed
        if torch.backends.cudnn.enabled:
            for label, state in zip(("hx", "cx"), states, strict=False):
                if not state.is_contiguous():
                    _not_contiguous(name, label, data, state)
        if not autocast.enabled() and data.dtype != weights[0].dtype:
            data = data.to(weights[0].dtype)  # reported by the module's own check
        if autocast.enabled() and tag_of(data) is not None:
            data, *rest = autocast.cast_for_rnn([data, *states, *weights])
            states, weights = rest[: len(states)], rest[len(states) :]
            hidden = type(hidden)(states) if isinstance(hidden, list | tuple) else states[0]
            middle = (args[1], hidden) if packed else (hidden,)
            with torch.autocast("cuda", enabled=False):
                out = original(data, *middle, list(weights), *args[position + 2 :], **kwargs)
        else:
            if cudnn and data.requires_grad:
                data = data.view_as(data)
                data.register_hook(partial(_refuse_second_backward, name))
            out = original(data, *args[1:], **kwargs)
        training = args[position + 5]
        if cudnn and not training and out[0].requires_grad:
            for result in out:
                result.register_hook(partial(_refuse_backward, name, _shown(args)))
        return out

    run.__name__ = name
    return run


def _shown(args: tuple[Any, ...]) -> tuple[str, ...]:
    return argument_texts(("input",), args[:1], {})


def _refuse_backward(name: str, operands: tuple[str, ...], gradient: Tensor) -> None:
    """RNN-4: cuDNN keeps what its backward needs in training mode only."""
    running().recorder.fault(
        "RNN-4", "cudnn RNN backward can only be called in training mode", op=name, arguments=operands
    )


def _refuse_second_backward(name: str, gradient: Tensor) -> None:
    """RNN-4: a gradient that went through cuDNN's backward cannot be differentiated again."""
    if gradient.requires_grad:
        gradient.register_hook(partial(_refuse_derivative, name, argument_texts(("gradient",), (gradient,), {})))


def _refuse_derivative(name: str, operands: tuple[str, ...], gradient: Tensor) -> None:
    running().recorder.fault(
        "RNN-4",
        "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not supported for CuDNN RNNs "
        "due to limitations in the CuDNN API. To run double backwards, please disable the CuDNN backend temporarily "
        "while running the forward pass of your RNN.",
        op=f"{name} backward",
        arguments=operands,
        error=NotImplementedError,
    )


def _same_device(name: str, data: Tensor, states: list[Tensor], weights: list[Tensor]) -> None:
    session = running()
    place = data.device
    for word, group in (("hidden", states), ("parameter", weights)):
        for tensor in group:
            if tensor.device != place and all(s._tainted is None for s in (*storages(tensor), *storages(data))):
                session.recorder.fault(
                    "RNN-3",
                    f"Input and {word} tensors are not at the same device, found input tensor at {place} and {word} "
                    f"tensor at {tensor.device}",
                    op=name,
                    arguments=argument_texts(("input", word), (data, tensor), {}),
                )
                taint(data if tag_of(data) is None else tensor)
                break
    for tensor in (data, *states, *weights):
        if tag_of(tensor) is None:
            taint(tensor)


def _not_contiguous(name: str, label: str, data: Tensor, state: Tensor) -> None:
    session = running()
    if state.dtype in _CUDNN:
        session.recorder.fault(
            "RNN-1",
            f"rnn: {label} is not contiguous",
            op=name,
            arguments=argument_texts(("input", label), (data, state), {}),
            fix=f"call .contiguous() on the hidden state '{label}' {tuple(state.shape)} before the layer",
        )
    else:
        session.note(
            f"{name}: {label} is not contiguous; {scalar_name(state.dtype)} may avoid cuDNN, which would refuse it"
        )


def _checked_input(check: Callable[..., Any]) -> Callable[..., Any]:
    """DTY-1 of recurrent layers, which the module itself refuses."""

    def check_input(self: Any, input: Tensor, batch_sizes: Any) -> None:
        weight = self._flat_weights[0]
        if tag_of(input) is not None and input.dtype != weight.dtype and not autocast.enabled():
            running().recorder.fault(
                "DTY-1",
                f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). Convert input: "
                f"input.to({weight.dtype}), or convert model: model.to({input.dtype})",
                op=type(self).__name__.lower(),
                arguments=argument_texts(("input", "weight"), (input, weight), {}),
                fix=f"cast the input at this boundary: .to({weight.dtype})",
                error=ValueError,
            )
            return
        check(self, input, batch_sizes)

    return check_input


# --- convolutions ----------------------------------------------------------------------------------------------------


def _convolution(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """DTY-1 of convolutions, whose dtype check sits above the dispatcher."""

    def run(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype != weight.dtype and tag_of(input) is not None and not autocast.enabled():
            running().recorder.fault(
                "DTY-1",
                f"Input type ({input.type()}) and weight type ({weight.type()}) should be the same",
                op=name,
                arguments=argument_texts(("input", "weight"), (input, weight), {}),
                fix=f"cast the input at this boundary: .to({weight.dtype})",
            )
            input = input.to(weight.dtype)
        return original(input, weight, *args, **kwargs)

    run.__name__ = name
    run.__doc__ = original.__doc__
    return run


_CONVOLUTIONS: Final = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """SDP-1, SDP-2, DEV-1 of ``scaled_dot_product_attention``, and the memory of a fused kernel."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        operands = [t for t in (query, key, value, attn_mask) if isinstance(t, Tensor)]
        if type(query) is not Tensor or all(tag_of(t) is None for t in operands):
            return original(query, key, value, attn_mask, dropout_p, **options)
        _check_attention(query, key, value, attn_mask, dropout_p)
        cuda: Any = torch.backends.cuda
        math = cuda.math_sdp_enabled()
        if not math:
            cuda.enable_math_sdp(True)  # the CPU has no mem-efficient or cuDNN back-end: its values come from math
        try:
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
            if dropout_p > 0.0 and not autocast.enabled() and _fused(query, attn_mask):
                if grad:
                    return _FusedAttention.apply(query, key, value, attn_mask, dropout_p, options, original)
                return _muted(original, query, key, value, attn_mask, dropout_p, options)
            return original(query, key, value, attn_mask, dropout_p, **options)
        finally:
            if not math:
                cuda.enable_math_sdp(False)

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


_NAMES: Final = ("query", "key", "value", "attn_mask")


def _check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> None:
    session = running()
    operands = (query, key, value, mask)
    for name, tensor in zip(_NAMES, operands, strict=True):
        if isinstance(tensor, Tensor) and tag_of(tensor) is None:
            if any(s._tainted is not None for s in storages(tensor)):
                continue
            session.recorder.fault(
                "DEV-1",
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
                op="scaled_dot_product_attention",
                arguments=argument_texts(_NAMES, operands, {}),
                fix=f"'{name}' is on the host: move it with .to({query.device})",
            )
            taint(tensor)
    half = query.dtype in (torch.float16, torch.bfloat16)
    lowered = half or autocast.enabled()
    if (
        isinstance(mask, Tensor)
        and mask.dtype == torch.float32
        and half
        and not autocast.enabled()
        and session.card.capability < (9, 0)
    ):
        session.recorder.fault(
            "SDP-2",
            "invalid dtype for bias - should match query's dtype",
            op="scaled_dot_product_attention",
            arguments=argument_texts(_NAMES, operands, {}),
            fix=f"cast the mask: attn_mask.to({query.dtype})",
        )
    if not _backend_available(session, lowered, query.size(-1), mask is not None):
        session.recorder.fault(
            "SDP-1",
            "No available kernel. Aborting execution.",
            op="scaled_dot_product_attention",
            arguments=argument_texts(_NAMES, operands, {}),
        )


def _backend_available(session: Session, half: bool, head_dim: int, masked: bool) -> bool:
    """Whether an enabled CUDA back-end serves these inputs."""
    cuda: Any = torch.backends.cuda
    modern = session.card.capability >= (8, 0)
    if cuda.math_sdp_enabled() or cuda.mem_efficient_sdp_enabled():
        return True
    if cuda.flash_sdp_enabled() and half and modern and not masked and head_dim <= 256:
        return True
    return bool(cuda.cudnn_sdp_enabled() and half and modern and head_dim <= 128)


def _fused(query: Tensor, mask: Tensor | None) -> bool:
    cuda: Any = torch.backends.cuda
    half = query.dtype in (torch.float16, torch.bfloat16)
    if cuda.flash_sdp_enabled() and half and mask is None and query.size(-1) <= 256:
        return True
    return bool(cuda.mem_efficient_sdp_enabled() and query.dtype != torch.float64)


def _charge_fused(out: Tensor, query: Tensor) -> None:
    """Charge what a fused kernel keeps: its output and one float32 log-sum-exp a query row."""
    meter = running().meter
    for storage in storages(out):
        if storage._tag is not None and storage._tag.op is MUTED:
            storage._tag.op = "scaled_dot_product_attention"
            rows = query.numel() // max(query.size(-1), 1)
            meter.resize(storage._tag, storage.nbytes() + 4 * rows)


def _muted(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    options: dict[str, Any],
) -> Tensor:
    meter = running().meter
    was, meter.muted = meter.muted, True
    try:
        out: Tensor = original(query, key, value, mask, dropout_p, **options)
    finally:
        meter.muted = was
    _charge_fused(out, query)
    return out


class _FusedAttention(torch.autograd.Function):
    """Attention with dropout as one kernel: the CPU's score matrices are not charged to the card."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, options: Any, original: Any
    ) -> Tensor:
        operands = [
            t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
            for t in (query, key, value, mask)
        ]
        with torch.enable_grad():
            out = _muted(original, operands[0], operands[1], operands[2], operands[3], dropout_p, options)
        ctx.operands, ctx.out = operands, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = [t for t in ctx.operands if isinstance(t, Tensor) and t.requires_grad]
        meter = running().meter
        was, meter.muted = meter.muted, True
        try:
            results = iter(torch.autograd.grad(ctx.out, wanted, gradients[0]))
        finally:
            meter.muted = was
        found = [next(results) if isinstance(t, Tensor) and t.requires_grad else None for t in ctx.operands]
        for gradient in found:
            if gradient is not None:
                for storage in storages(gradient):
                    if storage._tag is not None and storage._tag.op is MUTED:
                        storage._tag.op = "scaled_dot_product_attention_backward"
                        meter.resize(storage._tag, storage.nbytes())
        return (*found, None, None, None)


# --- transforms ------------------------------------------------------------------------------------------------------


def _transform(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """KRN-4 of ``torch.fft``: bfloat16 never, float16 only for powers of two (which the CPU cannot do at all)."""

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tag_of(input) is None or input.dtype not in (torch.float16, torch.bfloat16, torch.complex32):
            return original(input, *args, **kwargs)
        session = running()
        texts = argument_texts(("input",), (input,), {})
        if input.dtype == torch.bfloat16:
            session.recorder.fault("KRN-4", "Unsupported dtype BFloat16", op=f"fft.{name}", arguments=texts)
        else:
            sizes = _transform_sizes(input, name, args, kwargs)
            odd = [size for size in sizes if size & (size - 1)]
            if odd:
                session.recorder.fault(
                    "KRN-4",
                    "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, "
                    f"but got a signal size of {sizes}",
                    op=f"fft.{name}",
                    arguments=texts,
                )
            session.emulate(f"fft.{name} in half precision")
        wide = torch.complex64 if input.dtype.is_complex else torch.float32
        out = original(input.to(wide), *args, **kwargs)
        if input.dtype == torch.bfloat16:
            return out
        return out.to(torch.complex32 if out.dtype.is_complex else torch.float16)

    run.__name__ = name
    run.__doc__ = original.__doc__
    return run


def _transform_sizes(input: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Signal sizes of a transform of any arity."""
    one = not name.endswith(("2", "n"))
    size = kwargs.get("n" if one else "s", args[0] if args else None)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if one:
        length = size if size is not None else input.size(-1 if dim is None else dim)
        if size is None and name in ("irfft", "hfft"):
            length = 2 * (length - 1)
        return [int(length)]
    if size is not None:
        return [int(entry) for entry in size]
    dims = dim if dim is not None else ((-2, -1) if name.endswith("2") else tuple(range(input.dim())))
    sizes = [input.size(d) for d in ((dims,) if isinstance(dims, int) else dims)]
    if name.startswith(("irfft", "hfft")):
        sizes[-1] = 2 * (sizes[-1] - 1)
    return sizes


_TRANSFORMS: Final = tuple(
    f"{prefix}fft{suffix}" for prefix in ("", "i", "r", "ir", "h", "ih") for suffix in ("", "2", "n")
)


# --- legacy constructors ---------------------------------------------------------------------------------------------

_LEGACY: Final = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _LegacyMeta(type):
    """``torch.FloatTensor`` and ``torch.cuda.FloatTensor``: constructors, and classes for ``isinstance``."""

    real: Any
    element: torch.dtype
    on_card: bool

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, Tensor)
            and instance.dtype == cls.element
            and (tag_of(instance) is not None) == cls.on_card
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        device = as_device(kwargs.pop("device", None))
        first = args[0] if args else None
        if isinstance(first, Tensor):
            tag = tag_of(first)
            wrong_place = (tag is not None) != cls.on_card
            if wrong_place:
                place, found = ("cuda:0", "cpu") if cls.on_card else ("cpu", str(first.device))
                word = scalar_name(cls.element).lower()
                running().recorder.fault(
                    "DEV-7",
                    f"expected TensorOptions(dtype={word}, device={place}, layout=Strided) "
                    f"(got TensorOptions(dtype={scalar_name(first.dtype).lower()}, device={found}, layout=Strided))",
                    op=cls.__name__,
                    arguments=argument_texts(("data",), (first,), {}),
                    fix=f"use .{_METHODS.get(cls.element, 'to(dtype)')}() instead of torch.{cls.__name__}(...)",
                    error=TypeError,
                )
                return first.to(cls.element)
        with quiet():
            out: Tensor = cls.real(*args, **kwargs)
        on_card = cls.on_card or (device is not None and device.type == "cuda")
        if on_card:
            session = running()
            put_on_card(out, ordinal(session, RealDevice("cuda")), session.meter, cls.__name__)
        return out

    @property
    def dtype(cls) -> torch.dtype:
        return cls.element

    @property
    def is_cuda(cls) -> bool:
        return cls.on_card


_METHODS: Final = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.int64: "long",
    torch.int32: "int",
    torch.bool: "bool",
    torch.uint8: "byte",
}


def _install_legacy(patches: Patches) -> None:
    for name, element in _LEGACY.items():
        real = getattr(torch, name)
        for module, on_card in ((torch, False), (torch.cuda, True)):
            stand_in = _LegacyMeta(
                name,
                (),
                {"real": real, "element": element, "on_card": on_card, "__module__": module.__name__},
            )
            patches.set(module, name, stand_in)
    set_default = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        text = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        torch.set_default_device("cuda" if ".cuda." in text else None)
        set_default(text.replace("torch.cuda.", "torch."))

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


# --- linear algebra --------------------------------------------------------------------------------------------------


def _least_squares(original: Callable[..., Any]) -> Callable[..., Any]:
    """LIN-1: on CUDA ``lstsq`` has the driver ``gels`` only."""

    def lstsq(A: Tensor, B: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
        if tag_of(A) is not None and driver not in (None, "gels"):
            running().recorder.fault(
                "LIN-1",
                "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA",
                op="linalg_lstsq",
                arguments=argument_texts(("A", "B"), (A, B), {}),
            )
        return original(A, B, rcond, driver=driver)

    lstsq.__doc__ = original.__doc__
    return lstsq


def _scaled_mm(original: Callable[..., Any]) -> Callable[..., Any]:
    """KRN-3: float8 matrix products need compute capability 8.9."""

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        session = running()
        if tag_of(first) is not None and session.card.capability < (8, 9):
            session.recorder.fault(
                "KRN-3",
                "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm "
                "MI300+",
                op="_scaled_mm",
                arguments=argument_texts(("self",), (first,), {}),
            )
        return original(first, *args, **kwargs)

    return run


def _rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """The rank of an empty matrix is a zero that C++ makes on the host and returns as it is."""

    def matrix_rank(A: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(A, *args, **kwargs)
        tag = tag_of(A)
        return out if tag is None else put_on_card(out, tag.index, running().meter, "matrix_rank")

    matrix_rank.__doc__ = original.__doc__
    return matrix_rank


def _ctc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lengths of ``ctc_loss`` are read by the host; under a dispatch mode C++ would compute with them instead."""

    def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any) -> Tensor:
        if tag_of(log_probs) is not None:
            input_lengths, target_lengths = (
                length.tolist() if isinstance(length, Tensor) else length for length in (input_lengths, target_lengths)
            )
        loss: Tensor = original(log_probs, targets, input_lengths, target_lengths, *rest)
        return loss

    ctc_loss.__doc__ = original.__doc__
    return ctc_loss


def _one_hot(original: Callable[..., Any]) -> Callable[..., Any]:
    """OOB-1 of ``one_hot``: the CPU waits for the extremes, CUDA leaves the check to the kernel that scatters."""

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if tag_of(tensor) is None or num_classes < 1 or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            plain: Tensor = original(tensor, num_classes)
            return plain
        session = running()
        with quiet():
            outside = tensor.numel() > 0 and not bool(((tensor >= 0) & (tensor < num_classes)).all())
        if outside:
            session.recorder.fault(
                "OOB-1",
                f"CUDA error: device-side assert triggered (class values must be in [0, {num_classes}))",
                op="one_hot",
                arguments=argument_texts(("self",), (tensor,), {}),
                error=torch.AcceleratorError,
            )
        was, session.local.muted = getattr(session.local, "muted", False), True
        try:
            encoded: Tensor = original(tensor, num_classes)
            return encoded
        finally:
            session.local.muted = was

    one_hot.__doc__ = original.__doc__
    return one_hot


def _meshgrid(original: Callable[..., Any]) -> Callable[..., Any]:
    """DEV-1 of ``meshgrid``, whose device check sits above the dispatcher (it only makes views)."""

    def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
        parts = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
        if len({part.device for part in parts if isinstance(part, Tensor)}) > 1:
            _fault_meshgrid(tuple(parts))
        return original(*tensors, indexing=indexing)

    meshgrid.__doc__ = original.__doc__
    return meshgrid


def _fault_meshgrid(parts: tuple[Tensor, ...]) -> None:
    session = running()
    host = [i for i, part in enumerate(parts) if tag_of(part) is None]
    if all(any(s._tainted is not None for s in storages(parts[i])) for i in host):
        return
    session.recorder.fault(
        "DEV-1",
        "torch.meshgrid expects all tensors to have the same device",
        op="meshgrid",
        arguments=argument_texts(("tensors",), (parts,), {}),
    )
    for i in host:
        taint(parts[i])


def _tensor_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """Split positions are read by the host and must live there."""

    def tensor_split(input: Tensor, indices_or_sections: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = "tensor_indices_or_sections"
        positions = indices_or_sections if indices_or_sections is not None else kwargs.pop(key, None)
        if isinstance(positions, Tensor) and tag_of(positions) is not None:
            running().recorder.fault(
                "DEV-2",
                f"tensor_split expected tensor_indices_or_sections to be on cpu, but it's on {positions.device}",
                op="tensor_split",
                arguments=argument_texts(("self", key), (input, positions), {}),
                fix="pass the positions with .cpu()",
            )
            positions = positions.cpu()
        if positions is None:
            return original(input, *args, **kwargs)
        return original(input, positions, *args, **kwargs)

    tensor_split.__doc__ = original.__doc__
    return tensor_split


def install(patches: Patches, session: Session) -> None:
    """Wrap the functions whose rules sit above the dispatcher."""
    functional: Any = torch.nn.functional
    nn: Any = torch._C._nn  # type: ignore[attr-defined]
    vf: Any = torch._VF
    recurrent_table: Any = torch.nn.modules.rnn._rnn_impls
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        original = getattr(vf, name)
        wrapped = _recurrent(original, name)
        patches.set(vf, name, wrapped)
        patches.set(torch, name, wrapped)
        key = name.upper()
        if key in recurrent_table:
            before = recurrent_table[key]
            recurrent_table[key] = wrapped
            patches.on_undo(partial(recurrent_table.__setitem__, key, before))
    patches.set(torch.nn.RNNBase, "check_input", _checked_input(torch.nn.RNNBase.check_input))
    for name in _CONVOLUTIONS:
        original = getattr(functional, name)
        wrapped = _convolution(original, name)
        patches.set(functional, name, wrapped)
        patches.set(torch, name, wrapped)
        register_with_torchscript(patches, original, wrapped)
    attention = functional.scaled_dot_product_attention
    wrapped_attention = _attention(attention)
    patches.set(functional, "scaled_dot_product_attention", wrapped_attention)
    patches.set(nn, "scaled_dot_product_attention", wrapped_attention)
    register_with_torchscript(patches, attention, wrapped_attention)
    for name in _TRANSFORMS:
        original = getattr(torch.fft, name)
        wrapped = _transform(original, name)
        patches.set(torch.fft, name, wrapped)
        register_with_torchscript(patches, original, wrapped)
    patches.set(torch.linalg, "lstsq", _least_squares(torch.linalg.lstsq))
    patches.set(torch.linalg, "matrix_rank", _rank(torch.linalg.matrix_rank))
    patches.set(torch, "tensor_split", _tensor_split(torch.tensor_split))
    patches.set(Tensor, "tensor_split", _tensor_split(Tensor.tensor_split))
    patches.set(torch, "ctc_loss", _ctc(torch.ctc_loss))
    one_hot = functional.one_hot
    wrapped_one_hot = _one_hot(one_hot)
    patches.set(functional, "one_hot", wrapped_one_hot)
    patches.set(nn, "one_hot", wrapped_one_hot)
    register_with_torchscript(patches, one_hot, wrapped_one_hot)
    patches.set(torch, "meshgrid", _meshgrid(torch.meshgrid))
    patches.set(torch.functional, "meshgrid", torch.meshgrid)
    patches.set(torch, "_scaled_mm", _scaled_mm(torch._scaled_mm))
    _install_legacy(patches)
