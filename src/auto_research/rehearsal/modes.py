"""The dispatch mode: every operator of the process passes here, is checked, run on the CPU, and its results tagged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from auto_research.runtime.flops import count_flops, flop_formula

from . import kernels, placement
from .kernels import Placed
from .memory import MUTED
from .session import Session
from .tensor import Tag, put_on_card, storage_of, tag_of

#: Values that are never tensors; anything else is looked at in the slow path.
PLAIN: Final = frozenset(
    {int, float, bool, type(None), str, complex, torch.dtype, torch.device, torch.memory_format, torch.layout}
)
_DISABLED: Final = torch._C._disabled_torch_dispatch_impl
_has_kernel: Final = torch._C._dispatch_has_kernel_for_dispatch_key


class Record:
    """What the mode needs to know about one overload, worked out once."""

    __slots__ = (
        "call",
        "composite",
        "custom",
        "flops",
        "generator",
        "has_device",
        "host_only",
        "lists",
        "mutates",
        "name",
        "names",
        "op",
        "packet",
        "placement",
        "qualified",
        "rule",
        "takes_tensors",
    )

    def __init__(self, func: Any, session: Session) -> None:
        schema = func._schema
        self.op = func
        self.call: Callable[..., Any] = func._op if hasattr(func, "_op") else func
        self.packet: str = schema.name.split("::")[1]
        self.qualified = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.name = f"{self.packet}.{schema.overload_name}" if schema.overload_name else self.packet
        self.names = tuple(argument.name for argument in schema.arguments)
        types = [str(argument.type) for argument in schema.arguments]
        self.lists = any("List[" in t and "Tensor" in t for t in types)
        self.takes_tensors = any("Tensor" in t for t in types)
        self.has_device = "device" in self.names
        self.generator = "generator" in self.names
        self.mutates = bool(schema.is_mutable)
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.composite = (
            torch._C._dispatch_has_kernel(name)
            and _has_kernel(name, "CompositeImplicitAutograd")
            and not _has_kernel(name, "CPU")
        )
        self.custom: Any = None
        self.host_only = False
        if not schema.name.startswith(("aten::", "prims::", "profiler::", "c10d::", "_c10d")):
            cuda = torch._C._dispatch_has_kernel(name) and _has_kernel(name, "CUDA")
            key = torch._C.DispatchKey.CUDA if cuda else torch._C.DispatchKey.CPU
            self.custom = torch._C.DispatchKeySet(key)
            # Registered from Python for the CPU alone; a library's C++ kernels may only be missing from its CPU build.
            self.host_only = not cuda and f"{self.qualified.replace('::', '/')}/CPU" in torch.library._impls
        self.placement = placement.policy_of(schema.name, self.name, session.tables)
        self.rule = kernels.rule_of(schema.name, self.packet, self.name, session.tables)
        self.flops = flop_formula(func)


class VirtualCuda(TorchDispatchMode):
    """Counts tagged and untagged inputs of every operator, applies the rules and tags fresh results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default wraps the handler in a shim that costs 2-3 µs an operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.meter = session.meter
        self.records: dict[int, Record] = {}  # by id: an overload's own hash is a Python function

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = self.records.get(id(func))
        if record is None:
            record = self.records[id(func)] = Record(func, self.session)
        if types:
            for cls in types:
                if cls is not Tensor and cls is not Parameter and cls.__torch_dispatch__ is not _DISABLED:
                    return NotImplemented  # a wrapper subclass: its inner operators come back here
        tag = host = None
        for value in args:
            cls = value.__class__
            if cls is Tensor or cls is Parameter:
                try:
                    found = storage_of(value)._tag
                except (NotImplementedError, RuntimeError):
                    found = tag_of(value)
                if found is None:
                    host = value
                else:
                    tag = found
            elif cls is list or cls is tuple:
                if record.lists:
                    for item in value:
                        if isinstance(item, Tensor):
                            found = tag_of(item)
                            if found is None:
                                host = item
                            else:
                                tag = found
            elif cls not in PLAIN and isinstance(value, Tensor):
                found = tag_of(value)
                if found is None:
                    host = value
                else:
                    tag = found
        if kwargs:
            for value in kwargs.values():
                if isinstance(value, Tensor):
                    found = tag_of(value)
                    if found is None:
                        host = value
                    else:
                        tag = found
        else:
            kwargs = {}

        if record.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if record.custom is not None and (tag is not None or host is not None):
            return self._custom(record, tag, args, kwargs)
        session = self.session
        if tag is None:
            return self._on_host(record, host, args, kwargs)

        session.device_ops += 1
        if host is not None and record.placement is not placement.ANYWHERE:
            args, kwargs = placement.check(self, record, args, kwargs)
        if record.has_device or record.generator:
            device = kwargs.get("device")
            if device is not None and (device.type == "cuda" or getattr(session.local, "to_host", False)):
                return self._explicit_device(record, device, args, kwargs)
            if device is not None and device.type == "meta":
                return record.call(*args, **kwargs)  # shapes only: zero tensors and `jvp` formulas ask for them
            if record.generator:
                kwargs = placement.check_generator(session, record, args, kwargs, on_card=True)
        if record.rule is not None:
            out = record.rule(self, record, tag, args, kwargs)
        else:
            try:
                out = record.call(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                out = kernels.native_error(self, record, error, args, kwargs)
        if record.flops is not None:
            session.device_flops += count_flops(record.flops, args, kwargs, out)

        cls = out.__class__
        if cls is Placed:
            return out.value
        if cls is Tensor:
            try:
                storage = storage_of(out)
            except (NotImplementedError, RuntimeError):
                put_on_card(out, tag.index, self.meter, record.name)
            else:
                if storage._tag is None:
                    storage._tag = Tag(storage.nbytes(), tag.index, self.meter, record.name)
                elif record.mutates and storage.nbytes() > storage._tag.nbytes and storage._tag.op is not MUTED:
                    self.meter.resize(storage._tag, storage.nbytes())
        elif cls is tuple or cls is list:
            index = tag.index
            for item in out:
                if isinstance(item, Tensor):
                    put_on_card(item, index, self.meter, record.name)
        elif isinstance(out, Tensor):
            put_on_card(out, tag.index, self.meter, record.name)
        return out

    def _on_host(self, record: Record, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with no tensor on the card; factories may still put their result there."""
        session = self.session
        if host is None:
            device = kwargs.get("device")
            if device is not None and device.type == "cuda":
                return self._explicit_device(record, device, args, kwargs)
            if record.generator:
                kwargs = placement.check_generator(session, record, args, kwargs, on_card=False)
            if record.has_device:
                if kwargs.get("pin_memory"):
                    return _pinned(record, args, kwargs)
                out = record.call(*args, **kwargs)
                if out.__class__ is Tensor and out.layout is torch.strided:
                    frame = sys._getframe(2)
                    storage_of(out)._born = (id(frame), frame.f_lasti, id(frame.f_code))  # type: ignore[attr-defined]
                return out
            return record.call(*args, **kwargs)
        if record.has_device:
            device = kwargs.get("device")
            if device is not None and device.type == "cuda":
                return self._explicit_device(record, device, args, kwargs)
            if kwargs.get("pin_memory"):
                return _pinned(record, args, kwargs)
        session.host_ops += 1
        if record.generator:
            kwargs = placement.check_generator(session, record, args, kwargs, on_card=False)
        pending = storage_of(host)._pending if host.layout is torch.strided else None  # type: ignore[attr-defined]
        if pending is not None:
            kernels.check_pending(session, record, host, pending)
        try:
            out = record.call(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            kernels.host_error(session, error)
            raise
        if record.flops is not None:
            session.host_flops += count_flops(record.flops, args, kwargs, out)
        if out.__class__ is Tensor and host.layout is torch.strided:
            source: Any = storage_of(host)
            born = source._born
            if born is not None:
                frame = sys._getframe(2)
                if born[1] == frame.f_lasti and born[0] == id(frame):
                    placement.inherit(out, args, kwargs, frame)
            if source._tainted is not None:
                placement.inherit(out, args, kwargs, sys._getframe(2))
        return out

    def _custom(self, record: Record, tag: Tag | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of another library: the CUDA kernel if it has one and the card is involved."""
        if tag is None:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        else:
            self.session.device_ops += 1
            keys = record.custom
            if record.host_only:
                kernels.no_kernel(self.session, record, args, kwargs)
        with self:
            out = record.op.redispatch(keys, *args, **kwargs)
        if tag is not None:
            for item in out if isinstance(out, tuple | list) else (out,):
                if isinstance(item, Tensor) and tag_of(item) is None:
                    put_on_card(item, tag.index, self.meter, record.name)
        return out

    def _explicit_device(
        self, record: Record, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a factory or copy whose ``device`` argument decides where the result lives."""
        session = self.session
        kwargs = dict(kwargs)
        kwargs["device"] = placement.HOST
        if device.type == "cuda":
            index = placement.ordinal(session, device)
            kwargs.pop("pin_memory", None)
            if record.generator:
                kwargs = placement.check_generator(session, record, args, kwargs, on_card=True)
            out = record.call(*args, **kwargs)
            session.device_ops += 1
            if out.__class__ is Tensor and record.packet in ("_to_copy", "to"):
                session.transfer.to_device += 1
            return put_on_card(out, index, self.meter, record.name)
        return record.call(*args, **kwargs)


class ManyCards(VirtualCuda):
    """The mode where a script sees several cards: operands on two of them are a fault as well."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = self.records.get(id(func))
        if record is None:
            record = self.records[id(func)] = Record(func, self.session)
        if record.placement is not placement.ANYWHERE and not record.composite:
            placement.check_cards(self.session, record, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class ForkedCuda(VirtualCuda):
    """The mode of a forked child whose parent used the card: CUDA cannot run there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        placement.check_fork(self.session, str(func), args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def mode_for(session: Session) -> VirtualCuda:
    """The mode that a session needs."""
    return VirtualCuda(session) if session.device_count == 1 else ManyCards(session)


def _pinned(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    kwargs["pin_memory"] = False
    out = record.call(*args, **kwargs)
    storage_of(out)._pinned = True  # type: ignore[attr-defined]
    return out
