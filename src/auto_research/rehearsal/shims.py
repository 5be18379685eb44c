"""``torch.cuda``, ``torch.accelerator`` and the other doors through which a script asks about its card."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from . import children
from .masquerade import RealDevice, as_device
from .memory import MIB
from .patching import Patches
from .placement import ordinal, taint
from .rules import argument_texts
from .session import Session, running
from .tensor import put_on_card, tag_of

_SEGMENT: Final = 2 * MIB


def _index(device: Any = None, optional: bool = True, allow_cpu: bool = False) -> int:
    """The ordinal a device argument names; the current card for ``None``."""
    session = running()
    if device is None:
        return session.current
    if hasattr(device, "idx"):
        return int(device.idx)
    place = as_device(device)
    assert place is not None
    if place.type == "cpu" and allow_cpu:
        return -1
    if place.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {place}")
    return session.current if place.index is None else int(place.index)


# --- streams and events ----------------------------------------------------------------------------------------------


class Stream:
    """A CUDA stream without queue: work is done when it is asked for."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        Stream._made += 1
        self.stream_id = Stream._made if stream_id is None else stream_id
        self.device_index = _index(device)
        self.device_type = 1
        self.priority = priority

    @property
    def device(self) -> torch.device:
        """The stream's card."""
        return running().devices[self.device_index]

    @property
    def cuda_stream(self) -> int:
        """The raw handle; the default stream's is 0."""
        return int(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority."""
        return (0, -5)

    def synchronize(self) -> None:
        """Wait for the stream."""
        running().sync("stream.synchronize")

    def wait_stream(self, stream: Any) -> None:
        """Order after another stream."""

    def wait_event(self, event: Any) -> None:
        """Order after an event."""

    def query(self) -> bool:
        """Whether all work is done."""
        running().epoch += 1
        return True

    def is_capturing(self) -> bool:
        """Never: graphs run eagerly."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("rehearsal stream", self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"

    def __enter__(self) -> Stream:
        self._previous = running().local.__dict__.get("stream")
        running().local.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        running().local.stream = self._previous


class Event:
    """A CUDA event; ``elapsed_time`` is wall-clock time of this machine's CPU, not of a card."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        if self._time is None or end._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        running().note("event timings are those of the CPU, not of a card")
        return (end._time - self._time) * 1000.0

    def synchronize(self) -> None:
        """Wait for the event."""
        running().sync("event.synchronize")

    def wait(self, stream: Any = None) -> None:
        """Order a stream after the event."""

    def query(self) -> bool:
        """Whether the event has happened."""
        running().epoch += 1
        return True


def _current_stream(device: Any = None) -> Any:
    session = running()
    stream = session.local.__dict__.get("stream")
    if stream is None:
        stream = _default_stream()
    return stream


def _default_stream(device: Any = None) -> Any:
    session = running()
    default = session.__dict__.get("default_stream")
    if default is None:
        default = Stream(stream_id=0)
        session.__dict__["default_stream"] = default
    return default


def _set_stream(stream: Any) -> None:
    if stream is not None:
        running().local.stream = stream


class _StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.previous = running().local.__dict__.get("stream")
        _set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        running().local.stream = self.previous


# --- memory ----------------------------------------------------------------------------------------------------------


def _reserved(nbytes: int) -> int:
    return (nbytes + _SEGMENT - 1) // _SEGMENT * _SEGMENT


def _memory_stats(device: Any = None) -> OrderedDict[str, int]:
    meter = running().meter
    stats: OrderedDict[str, int] = OrderedDict()
    for pool in ("all", "large_pool", "small_pool"):
        share = 1 if pool != "small_pool" else 0
        stats[f"allocated_bytes.{pool}.current"] = meter.live * share
        stats[f"allocated_bytes.{pool}.peak"] = meter.peak * share
        stats[f"active_bytes.{pool}.current"] = meter.live * share
        stats[f"active_bytes.{pool}.peak"] = meter.peak * share
        stats[f"reserved_bytes.{pool}.current"] = _reserved(meter.peak) * share
        stats[f"reserved_bytes.{pool}.peak"] = _reserved(meter.run_peak) * share
        stats[f"requested_bytes.{pool}.current"] = meter.live * share
        stats[f"requested_bytes.{pool}.peak"] = meter.peak * share
        stats[f"inactive_split_bytes.{pool}.current"] = 0
        stats[f"inactive_split_bytes.{pool}.peak"] = 0
    stats["num_alloc_retries"] = 0
    stats["num_ooms"] = int(running().overflowed)
    return stats


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    meter = running().meter
    return (
        f"| rehearsal of {running().card.title}: live {meter.live / MIB:.1f} MiB, peak {meter.peak / MIB:.1f} MiB, "
        f"reserved {_reserved(meter.peak) / MIB:.0f} MiB |"
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    session = running()
    return max(session.meter.budget - session.meter.live, 0), session.card.memory


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    session = running()
    session.meter.budget = int(session.card.memory * fraction)


# --- identity --------------------------------------------------------------------------------------------------------


def _properties(device: Any = None) -> Any:
    session = running()
    ordinal(session, RealDevice("cuda", _index(device)))
    card = session.card
    return SimpleNamespace(
        name=card.title,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory,
        multi_processor_count=card.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        regs_per_multiprocessor=65536,
        L2_cache_size=24 * MIB,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="GPU-00000000-0000-0000-0000-000000000000",
    )


def _set_device(device: Any) -> None:
    session = running()
    index = _index(device)
    if index >= 0:
        session.current = ordinal(session, RealDevice("cuda", index))


def _exchange_device(index: int) -> int:
    session = running()
    previous = session.current
    if index is not None and index >= 0:
        session.current = ordinal(session, RealDevice("cuda", index))
    return previous


def _synchronize(device: Any = None) -> None:
    running().sync("synchronize")


# --- random numbers --------------------------------------------------------------------------------------------------
# The card shares the CPU's generator, so that a seeded script gives the numbers it gives on the plain CPU.


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: Any = "cuda") -> Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(state.cpu())


# --- things that have no counterpart ---------------------------------------------------------------------------------


class CUDAGraph:
    """CUDA graphs run eagerly: capture executes, replay repeats nothing."""

    def __init__(self, keep_graph: bool = False) -> None:
        running().note("CUDA graphs are run eagerly: capture rules and replay are not rehearsed")

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start capturing (eagerly)."""

    def capture_end(self) -> None:
        """End capturing."""

    def replay(self) -> None:
        """Replay: the captured work already ran once."""

    def reset(self) -> None:
        """Forget the graph."""

    def pool(self) -> tuple[int, int]:
        """Memory pool handle."""
        return (0, 0)


@contextmanager
def _graph(*args: Any, **kwargs: Any) -> Iterator[None]:
    running().note("CUDA graphs are run eagerly: capture rules and replay are not rehearsed")
    yield


def _compile(model: Any = None, **kwargs: Any) -> Any:
    running().note("torch.compile is skipped: the eager program is rehearsed, not the compiled one")
    if model is None:
        return lambda function: function
    return model


def _module_compile(self: Any, *args: Any, **kwargs: Any) -> None:
    running().note("torch.compile is skipped: the eager program is rehearsed, not the compiled one")


def _group_tensors(
    lists: list[list[Tensor | None]], with_indices: bool = False
) -> dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]]:
    """Group by the device that Python sees; the C++ version would name the host."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for position, first in enumerate(lists[0]):
        assert first is not None
        group = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for target, source in zip(group[0], lists, strict=True):
            if source:
                target.append(source[position])
        if with_indices:
            group[1].append(position)
    return groups


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def install(patches: Patches, session: Session, push_mode: Callable[[], Any]) -> None:
    """Replace the functions of ``torch.cuda``, ``torch.accelerator``, optimisers, threads and compilation."""
    cuda: Any = torch.cuda
    available = lambda: session.visible() > 0  # noqa: E731
    count = lambda: session.visible()  # noqa: E731
    replacements: dict[str, Any] = {
        "is_available": available,
        "device_count": count,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: session.used,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_is_in_bad_fork": lambda: session.bad_fork,
        "current_device": lambda: session.current,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "_get_device_index": _index,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (_properties(device).major, _properties(device).minor),
        "get_device_properties": _properties,
        "can_device_access_peer": lambda device, peer: False,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or session.card.capability >= (8, 0),
        "is_tf32_supported": lambda: session.card.capability >= (8, 0),
        "synchronize": _synchronize,
        "ipc_collect": _nothing,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": _set_stream,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": Stream,
        "is_current_stream_capturing": lambda: False,
        "current_blas_handle": lambda: 0,
        "set_sync_debug_mode": _nothing,
        "get_sync_debug_mode": lambda: 0,
        "utilization": lambda device=None: 0,
        "memory_usage": lambda device=None: 0,
        "memory_allocated": lambda device=None: session.meter.live,
        "max_memory_allocated": lambda device=None: session.meter.peak,
        "memory_reserved": lambda device=None: _reserved(session.meter.peak),
        "max_memory_reserved": lambda device=None: _reserved(session.meter.run_peak),
        "memory_cached": lambda device=None: _reserved(session.meter.peak),
        "max_memory_cached": lambda device=None: _reserved(session.meter.run_peak),
        "reset_peak_memory_stats": lambda device=None: session.meter.reset_peak(),
        "reset_max_memory_allocated": lambda device=None: session.meter.reset_peak(),
        "reset_max_memory_cached": lambda device=None: session.meter.reset_peak(),
        "reset_accumulated_memory_stats": _nothing,
        "memory_stats": _memory_stats,
        "memory_stats_as_nested_dict": _memory_stats,
        "memory_summary": _memory_summary,
        "host_memory_stats": OrderedDict,
        "host_memory_stats_as_nested_dict": dict,
        "reset_peak_host_memory_stats": _nothing,
        "reset_accumulated_host_memory_stats": _nothing,
        "memory_snapshot": lambda *a, **k: [],
        "mem_get_info": _mem_get_info,
        "device_memory_used": lambda device=None: session.meter.live,
        "empty_cache": _nothing,
        "set_per_process_memory_fraction": _set_fraction,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": lambda: torch.default_generator.seed(),
        "seed_all": lambda: torch.default_generator.seed(),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state()] * session.device_count,
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": lambda states: _set_rng_state(states[0]),
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 0),
        "make_graphed_callables": lambda callables, *a, **k: callables,
        "default_generators": (torch.default_generator,),
    }
    for name, value in replacements.items():
        patches.set(cuda, name, value)
    for module in (cuda.memory, cuda.random, cuda.streams, cuda.graphs):
        for name, value in replacements.items():
            if name in vars(module):
                patches.set(module, name, value)
    for name in ("_record_memory_history", "_dump_snapshot"):
        patches.set(cuda.memory, name, _nothing)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.set(cuda.nvtx, name, _nothing)
    patches.set(cuda.nvtx, "range", _nvtx_range)
    patches.set(cuda._utils, "_get_device_index", _index)
    patches.set(torch.version, "cuda", "12.8")

    backends: Any = torch.backends
    patches.set(backends.cuda, "is_built", lambda: True)
    patches.set(backends.cudnn, "is_available", lambda: True)
    patches.set(backends.cudnn, "version", lambda: 91002)
    patches.set(backends.cudnn, "is_acceptable", lambda tensor: tag_of(tensor) is not None)
    patches.set(torch.nn.RNNBase, "flatten_parameters", _nothing)
    _install_accelerator(patches, session)

    core: Any = torch._C
    patches.set(core, "_cuda_getCurrentRawStream", lambda index=0: 0)
    patches.set(core, "_group_tensors_by_device_and_dtype", _group_tensors)
    patches.set(torch, "compile", _compile)
    patches.set(torch.nn.Module, "compile", _module_compile)
    _install_threads(patches, push_mode)
    _install_forks(patches, session)
    _install_autograd(patches)
    _install_gradient_checks(patches)
    _install_loading(patches, session)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: session.step())
    patches.on_undo(lambda: handle.remove())


@contextmanager
def _nvtx_range(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _install_accelerator(patches: Patches, session: Session) -> None:
    accelerator: Any = torch.accelerator
    core: Any = torch._C

    def here(check_available: bool = False) -> torch.device:
        return session.devices[session.current]

    for name, value in (
        ("_accelerator_getAccelerator", lambda: RealDevice("cuda")),
        ("_get_accelerator", lambda check=None: RealDevice("cuda")),
        ("_accelerator_getDeviceIndex", lambda: session.current),
        ("_accelerator_setDeviceIndex", _set_device),
        ("_accelerator_exchangeDevice", _exchange_device),
        ("_accelerator_maybeExchangeDevice", _exchange_device),
        ("_accelerator_getStream", _current_stream),
        ("_accelerator_setStream", _set_stream),
        ("_accelerator_synchronizeDevice", _synchronize),
        ("_accelerator_isAllocatorInitialized", lambda: True),
        ("_accelerator_emptyCache", _nothing),
        ("_accelerator_emptyHostCache", _nothing),
        ("_accelerator_resetPeakStats", lambda device=None: session.meter.reset_peak()),
        ("_accelerator_resetAccumulatedStats", _nothing),
        ("_accelerator_getDeviceStats", _memory_stats),
        ("_accelerator_getMemoryInfo", _mem_get_info),
    ):
        patches.set(core, name, value)
    patches.set(accelerator, "is_available", lambda: session.visible() > 0)
    patches.set(accelerator, "device_count", lambda: session.visible())
    patches.set(accelerator, "current_accelerator", here)
    patches.set(accelerator, "memory_stats", _memory_stats)
    patches.set(accelerator.memory, "memory_stats", _memory_stats)


def _install_threads(patches: Patches, push_mode: Callable[[], Any]) -> None:
    """New threads have no dispatch mode of their own."""
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with push_mode():
            run(self)

    patches.set(threading.Thread, "run", run_in_mode)


_fork_hook_installed = False


def _after_fork() -> None:
    from .session import active

    session = active()
    if session is None:
        return
    if session.used:
        from .modes import ForkedCuda

        session.bad_fork = True
        session.mode.__class__ = ForkedCuda
    children.report_to_parent(session.recorder)


def _install_forks(patches: Patches, session: Session) -> None:
    global _fork_hook_installed
    if not _fork_hook_installed:
        os.register_at_fork(after_in_child=_after_fork)
        _fork_hook_installed = True


def _install_loading(patches: Patches, session: Session) -> None:
    """DEV-5 of ``torch.load``: the saved (or asked for) ordinal must exist."""
    serialization: Any = torch.serialization
    validate = serialization._validate_device

    def validate_device(location: Any, backend_name: str) -> torch.device:
        try:
            return validate(location, backend_name)
        except RuntimeError as error:
            session.recorder.fault("DEV-5", str(error), arguments=(f"location: {location}",))
            return session.devices[session.current]

    patches.set(serialization, "_validate_device", validate_device)


def _install_autograd(patches: Patches) -> None:
    """Zero gradients that C++ makes from ``options()`` arrive untagged: tag what ``autograd.grad`` returns."""
    autograd: Any = torch.autograd
    grad = autograd.grad

    def tagged_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        results = grad(outputs, inputs, *args, **kwargs)
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        for source, result in zip(wanted, results, strict=False):
            if isinstance(source, Tensor) and isinstance(result, Tensor):
                tag = tag_of(source)
                if tag is not None and tag_of(result) is None:
                    put_on_card(result, tag.index, running().meter, "grad")
        return results

    patches.set(autograd, "grad", tagged_grad)
    make_grads = autograd._make_grads

    def checked_grads(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        for output, gradient in zip(outputs, grads, strict=False):
            if isinstance(output, Tensor) and isinstance(gradient, Tensor) and gradient.dim() > 0:
                _check_root_gradient(output, gradient)
        return make_grads(outputs, grads, *args, **kwargs)

    patches.set(autograd, "_make_grads", checked_grads)


def _install_gradient_checks(patches: Patches) -> None:
    """DEV-1 of gradients that user code makes: C++ compares them with the input's device, and sees one device here."""
    function: Any = torch.autograd.Function
    context: Any = torch.autograd.function.BackwardCFunction
    apply, backward = function.apply.__func__, context.apply
    register_hook = Tensor.register_hook

    def places(values: Any) -> list[torch.device | None]:
        return [value.device if isinstance(value, Tensor) else None for value in values]

    def remembering(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = apply(cls, *args, **kwargs)
        if cls.__module__.startswith(_OURS) or not torch.is_grad_enabled():
            return out
        results = out if isinstance(out, tuple) else (out,)
        for result in results:
            node = result.grad_fn if isinstance(result, Tensor) else None
            if isinstance(node, context):
                node._rehearsal_places = (places(args), places(results))
                break
        return out

    def checked(self: Any, *gradients: Any) -> Any:
        homes, sources = getattr(self, "_rehearsal_places", ([], []))
        for gradient, source in zip(gradients, sources, strict=False):
            _adopt(gradient, source)  # zeros for an output that took no part
        out = backward(self, *gradients)
        results = out if isinstance(out, tuple) else (out,)
        moved = tuple(
            _at_home(value, home, f"Function {type(self).__name__} returned an invalid gradient at index {i}")
            for i, (value, home) in enumerate(zip(results, [*homes, *[None] * len(results)], strict=False))
        )
        return moved if isinstance(out, tuple) else moved[0]

    def hooked(self: Tensor, hook: Any) -> Any:
        whose = getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""
        if tag_of(self) is None or whose.startswith(_OURS):
            return register_hook(self, hook)
        home, name = self.device, getattr(hook, "__name__", type(hook).__name__)

        @wraps(hook, updated=())
        def run(gradient: Tensor) -> Any:
            _adopt(gradient, home)
            result = hook(gradient)
            if isinstance(result, Tensor) and result.device != home:
                return _at_home(result, home, f"hook '{name}' has changed the type of value", scalars=False)
            return result

        return register_hook(self, run)

    patches.set(function, "apply", classmethod(remembering))
    patches.set(context, "apply", checked)
    patches.set(Tensor, "register_hook", hooked)


_OURS: Final = __name__.rpartition(".")[0]


def _adopt(gradient: Any, home: torch.device | None) -> None:
    if isinstance(gradient, Tensor) and home is not None and home.type == "cuda" and tag_of(gradient) is None:
        put_on_card(gradient, home.index or 0, running().meter, "grad")


def _at_home(value: Any, home: torch.device | None, who: str, *, scalars: bool = True) -> Any:
    """A gradient on the device of the tensor it belongs to; one with dimensions elsewhere is a fault."""
    if not isinstance(value, Tensor) or home is None or value.device == home or value.device.type == "meta":
        return value
    if value.dim() > 0 or not scalars:
        running().recorder.fault(
            "DEV-1",
            f"{who} - expected device {home} but got {value.device}",
            op="backward",
            arguments=argument_texts(("gradient",), (value,), {}),
            fix=f"return the gradient on the device it came from: .to({home})",
        )
    return value.to(home)


def _check_root_gradient(output: Tensor, gradient: Tensor) -> None:
    """DEV-1 of ``output.backward(gradient)``."""
    if output.device == gradient.device:
        return
    running().recorder.fault(
        "DEV-1",
        f"Function {type(output.grad_fn).__name__} returned an invalid gradient at index 0 - expected device "
        f"{output.device} but got {gradient.device}",
        op="backward",
        arguments=argument_texts(("output", "gradient"), (output, gradient), {}),
        fix=f"create the gradient with device={output.device}",
    )
    taint(gradient)
