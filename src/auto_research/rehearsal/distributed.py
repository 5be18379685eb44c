"""One process, or several over gloo, where the script says NCCL; DDP without its C++ reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from .patching import Patches
from .placement import taint
from .rules import argument_texts
from .session import Session, running
from .tensor import storages, tag_of

_COLLECTIVES: Final = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "send",
    "recv",
)


def _collective(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """DST-1: NCCL moves device memory only."""

    def run(*args: Any, **kwargs: Any) -> Any:
        session = running()
        if getattr(session, "nccl", False):
            for value in args:
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, Tensor) and tag_of(item) is None:
                        session.recorder.fault(
                            "DST-1",
                            "No backend type associated with device type cpu",
                            op=name,
                            arguments=argument_texts(("tensor",), (item,), {}),
                        )
        return original(*args, **kwargs)

    run.__name__ = name
    run.__doc__ = original.__doc__
    return run


class DistributedDataParallel(torch.nn.Module):
    """A pass-through with DDP's face; with more than one process gradients are averaged as they arrive."""

    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids = device_ids
        self.output_device = output_device
        self.require_backward_grad_sync = True
        self.static_graph = bool(kwargs.get("static_graph", False))
        self.find_unused_parameters = bool(kwargs.get("find_unused_parameters", False))
        places = {p.device for p in module.parameters()}
        if device_ids and any(place.type == "cpu" for place in places):
            running().recorder.fault(
                "DST-2",
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
                f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
                f"{output_device}, and module parameters {places}.",
                op="DistributedDataParallel",
                error=ValueError,
            )
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters that require a "
                "gradient."
            )
        running().note("DDP runs without its reducer: bucketing, overlap and NCCL are not rehearsed")
        self._average_gradients()

    def _average_gradients(self) -> None:
        distributed: Any = torch.distributed
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        world = distributed.get_world_size()

        def average(parameter: Tensor) -> None:
            if self.require_backward_grad_sync and parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= world

        for parameter in self.module.parameters():
            distributed.broadcast(parameter.data, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging."""
        was, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = was

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Uneven inputs: nothing to do here."""
        from contextlib import nullcontext

        return nullcontext()

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Communication hooks are not rehearsed."""
        running().note("DDP communication hooks are not rehearsed")


class DataParallel(torch.nn.Module):
    """``nn.DataParallel`` over the one card there is."""

    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids = list(range(running().device_count)) if device_ids is None else list(device_ids)
        for index in map(torch.cuda._utils._get_device_index, self.device_ids):
            if index >= running().device_count:
                running().recorder.fault(
                    "DEV-5",
                    "Invalid device id",
                    op="DataParallel",
                    arguments=(f"device_ids: {self.device_ids}", f"device_count: {running().device_count}"),
                    error=AssertionError,
                )
                break
        self.output_device = output_device
        self.dim = dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter to the card (host inputs are moved), then call."""
        place = running().devices[running().current]
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.device != place and all(s._tainted is None for s in storages(tensor)):
                running().recorder.fault(
                    "DEV-1",
                    f"module must have its parameters and buffers on device {place} (device_ids[0]) but found one of "
                    f"them on device: {tensor.device}",
                    op="DataParallel",
                    arguments=argument_texts(("parameter",), (tensor,), {}),
                    fix="move the module first: model.cuda()",
                )
                break
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tag_of(tensor) is None:
                taint(tensor)

        def scatter(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(place)
            if isinstance(value, dict):
                return {key: scatter(item) for key, item in value.items()}
            if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                return type(value)(scatter(item) for item in value)
            return value

        return self.module(*scatter(args), **scatter(kwargs))


def install(patches: Patches, session: Session) -> None:
    """Replace DDP, DataParallel, ``init_process_group`` and the collectives."""
    parallel: Any = torch.nn.parallel
    for module in (parallel, parallel.distributed):
        patches.set(module, "DistributedDataParallel", DistributedDataParallel)
    for module in (parallel, parallel.data_parallel, torch.nn):
        patches.set(module, "DataParallel", DataParallel)
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return
    core: Any = distributed.distributed_c10d
    real_init = distributed.init_process_group
    real_backend = distributed.get_backend

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        wants = str(backend) if backend is not None else "nccl"
        if "nccl" in wants:
            session.__dict__["nccl"] = wants == "nccl"
            session.note("NCCL is replaced by gloo: its races and topology are not rehearsed")
            backend = "gloo"
        return real_init(backend, *args, **kwargs)

    def get_backend(group: Any = None) -> str:
        return "nccl" if session.__dict__.get("nccl") else str(real_backend(group))

    for module in (distributed, core):
        patches.set(module, "init_process_group", init_process_group)
        patches.set(module, "get_backend", get_backend)
        patches.set(module, "is_nccl_available", lambda: True)
        for name in _COLLECTIVES:
            if hasattr(module, name):
                patches.set(module, name, _collective(patches.original(module, name), name))
