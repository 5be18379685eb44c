"""CUDA autocast on CPU tensors: the CUDA policy table applied to tensors on the card, and only to them.

C++ sees CPU tensors, so it consults the AutocastCPU kernels. While ``autocast("cuda")`` is on, the CPU flag is on as
well and those kernels are Python functions that follow CUDA's table (generated from torch's own header).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .patching import Patches
from .rules import argument_texts
from .session import Session, running
from .tensor import tag_of

_KEY: Final = torch._C.DispatchKey.AutocastCPU
_BELOW: Final = torch._C._dispatch_keyset_full_after(_KEY)
_ONLY: Final = torch._C.DispatchKeySet(_KEY)
_is_enabled: Final = torch.is_autocast_enabled
_set_enabled: Final = torch.set_autocast_enabled
_clear_cache: Final = torch.clear_autocast_cache
_HALF: Final = (torch.float16, torch.bfloat16)

_BANNED: Final = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\nMany models use a sigmoid "
    "layer right before the binary cross entropy layer.\nIn this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss. binary_cross_entropy_with_"
    "logits and BCEWithLogits are\nsafe to autocast."
)


def enabled() -> bool:
    """Whether CUDA autocast is on in this thread."""
    on: bool = _is_enabled("cuda")
    return on


def lower_dtype() -> torch.dtype:
    """The dtype CUDA autocast lowers to."""
    return torch.get_autocast_dtype("cuda")


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and tag_of(value) is not None
    )


class Casts:
    """Casts eligible tensors, remembering those of leaf weights until autocast ends."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` with every eligible tensor in ``dtype``; lists are followed."""
        if isinstance(value, Tensor):
            if not _eligible(value) or value.dtype == dtype:
                return value
            cacheable = (
                dtype in _HALF
                and value.dtype == torch.float32
                and value.requires_grad
                and value.is_leaf
                and not value._is_view()
                and torch.is_autocast_cache_enabled()
            )
            if not cacheable:
                return value.to(dtype)
            known = self.cache.get(id(value))
            if known is None:
                known = self.cache[id(value)] = (value, value.to(dtype))
            return known[1]
        if isinstance(value, list | tuple):
            return type(value)(self.cast(item, dtype) for item in value)
        return value


_casts: Final = Casts()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def _kernel(op: Any, policy: str | None, original: Any) -> Callable[..., Any]:
    """The AutocastCPU kernel of one overload under a rehearsal."""
    names = [argument.name for argument in op._schema.arguments]
    dtype_position = names.index("dtype") if "dtype" in names else None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs)
        on_card = any(tag_of(t) is not None for t in tensors)
        if not on_card and original is not None and getattr(running().local, "cpu_autocast", False):
            return original.call_boxed(keyset, *args, **kwargs)
        if not on_card or policy is None or not enabled():
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        if policy == "banned":
            running().recorder.fault("AMP-1", _BANNED, op=str(op), arguments=argument_texts(tuple(names), args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_ONLY):
            return _apply(op, policy, dtype_position, tensors, args, kwargs)

    return kernel


def _apply(
    op: Any,
    policy: str,
    dtype_position: int | None,
    tensors: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    first: Any = args[0] if args else None
    if policy == "fp32_set_dtype":
        given = kwargs.get("dtype")
        if given is None and dtype_position is not None and dtype_position < len(args):
            given = args[dtype_position]
        if _eligible(first) and given is None:
            if dtype_position is not None and dtype_position < len(args):
                args = (*args[:dtype_position], torch.float32, *args[dtype_position + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)
    if policy == "fp32_append_dtype":
        dtype = torch.float32 if _eligible(first) and first.dtype in _HALF else first.dtype
        packet = op.overloadpacket
        if op._overloadname == "Scalar":
            return packet.ScalarOpt_dtype(first, args[1] if len(args) > 1 else 2, dtype=dtype)
        padded = [*args, *(kwargs.get(n) for n in ("p", "dim", "keepdim")[len(args) - 1 :])]
        return packet.ScalarOpt_dim_dtype(padded[0], padded[1], padded[2], bool(padded[3]), dtype=dtype)
    if policy == "lower":
        target = lower_dtype()
    elif policy == "promote":
        dtypes = {t.dtype for t in tensors if _eligible(t)}
        target = torch.float32 if torch.float32 in dtypes else lower_dtype()
    else:
        target = torch.float32
    return op(*_casts.cast(args, target), **{key: _casts.cast(value, target) for key, value in kwargs.items()})


class _Overrides:
    """The Python AutocastCPU kernels, registered the first time CUDA autocast is switched on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.library: Any = None

    def install(self) -> None:
        if self.library is not None:
            return
        library = torch.library.Library("aten", "IMPL")
        policies = self.session.tables.autocast
        registered = {
            name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
        }
        for name in sorted(registered | policies.keys()):
            packet, _, overload = name.partition(".")
            if not hasattr(torch.ops.aten, packet):
                continue
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            original = torch.library.get_kernel(f"aten::{name}", "AutocastCPU") if name in registered else None
            kernel = _kernel(op, policies.get(name), original)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # overriding is the purpose
                library.impl(name, kernel, "AutocastCPU", with_keyset=True, allow_override=True)
        self.library = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def install(patches: Patches, session: Session) -> None:
    """Route the autocast switches through the rehearsal."""
    overrides = _Overrides(session)
    patches.on_undo(overrides.remove)
    patches.on_undo(_casts.cache.clear)

    def set_enabled(*args: Any) -> None:
        device, on = args if len(args) == 2 else ("cuda", args[0])
        if device == "cuda":
            if on:
                overrides.install()
            _set_enabled("cuda", on)
        elif device == "cpu":
            if on:
                overrides.install()
            session.local.cpu_autocast = on
        else:
            _set_enabled(device, on)
            return
        _set_enabled("cpu", _is_enabled("cuda") or getattr(session.local, "cpu_autocast", False))

    def is_enabled(device: str = "cuda") -> bool:
        if device == "cpu":
            return bool(getattr(session.local, "cpu_autocast", False))
        on: bool = _is_enabled(device)
        return on

    def clear_cache() -> None:
        _casts.cache.clear()
        _clear_cache()

    module: Any = torch
    patches.set(module, "set_autocast_enabled", set_enabled)
    patches.set(module, "is_autocast_enabled", is_enabled)
    patches.set(module, "set_autocast_cpu_enabled", lambda on: set_enabled("cpu", on))
    patches.set(module, "is_autocast_cpu_enabled", lambda: is_enabled("cpu"))
    patches.set(module, "clear_autocast_cache", clear_cache)


def cast_for_rnn(values: list[Any]) -> list[Any]:
    """cuDNN recurrent layers under autocast: input, hidden state and weights all go to the lower dtype."""
    return [_casts.cast(value, lower_dtype()) for value in values]
