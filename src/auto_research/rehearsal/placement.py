"""Which mixtures of host and device tensors CUDA admits, operator by operator (rules DEV-1, 2, 4, 5, RNN-2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from .locate import current_site
from .rules import argument_texts
from .tables import Tables
from .tensor import put_on_card, storages, tag_of

if TYPE_CHECKING:
    from .modes import Record, VirtualCuda
    from .session import Session

HOST: Final = torch.device("cpu")
#: Policies: every mixture is legal; one 0-dim host input is legal; none is.
ANYWHERE, POINTWISE, STRICT = "anywhere", "pointwise", "strict"

#: Operators that only read metadata of the other tensor, or whose business is crossing devices.
_ANYWHERE: Final = {
    "copy_",
    "_copy_from",
    "_copy_from_and_resize",
    "_to_copy",
    "fill_",
    "fill",
    "resize_as_",
    "resize_as_sparse_",
    "is_same_size",
    "is_set_to",
    "set_data",
    "set_",
    "expand_as",
    "view_as",
    "reshape_as",
    "type_as",
    "sum_to_size",
    "_has_compatible_shallow_copy_type",
    "_foreach_copy_",
    "_foreach_copy",
    "_nested_view_from_jagged",
    "_nested_view_from_buffer",
    "_is_any_true",
    "record_stream",
    "lift_fresh",
}
#: Pointwise operators that do not admit a 0-dim host operand.
_NO_SCALARS: Final = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"}
#: Operators with a pointwise device rule although the registry does not mark them.
_ALSO_POINTWISE: Final = {"where"}
#: Arguments that may (or must) stay on the host.
_HOST_ARGUMENTS: Final[dict[str, frozenset[str]]] = {
    "_ctc_loss": frozenset({"input_lengths", "target_lengths", "targets"}),
    "_ctc_loss_backward": frozenset({"input_lengths", "target_lengths", "targets"}),
    "_cudnn_ctc_loss": frozenset({"input_lengths", "target_lengths", "targets"}),
    "_use_cudnn_ctc_loss": frozenset({"input_lengths", "target_lengths", "targets"}),
    "_pack_padded_sequence": frozenset({"lengths"}),
    "_pack_padded_sequence_backward": frozenset({"batch_sizes"}),
    "_pad_packed_sequence": frozenset({"batch_sizes"}),
    "index": frozenset({"indices"}),
    "_unsafe_index": frozenset({"indices"}),
    "_index_put_impl_": frozenset({"indices"}),
    "index_put": frozenset({"indices"}),
    "index_put_": frozenset({"indices"}),
    "_unsafe_index_put": frozenset({"indices"}),
    "tensor_split": frozenset({"tensor_indices_or_sections"}),
    "_fused_adam_": frozenset({"lr"}),
    "_fused_adamw_": frozenset({"lr"}),
    "_fused_sgd_": frozenset({"lr"}),
    "_fused_adagrad_": frozenset({"lr"}),
}
#: Arguments that may be a 0-dim host tensor although the operator is strict about the rest.
_HOST_SCALARS: Final[dict[str, frozenset[str]]] = {
    "masked_fill": frozenset({"value"}),
    "masked_fill_": frozenset({"value"}),
    "index_fill": frozenset({"value"}),
    "index_fill_": frozenset({"value"}),
    "index_put": frozenset({"values"}),
    "index_put_": frozenset({"values"}),
    "_index_put_impl_": frozenset({"values"}),
    "_unsafe_index_put": frozenset({"values"}),
    "where": frozenset({"condition", "self", "other"}),
    "linspace": frozenset({"start", "end"}),
    "logspace": frozenset({"start", "end"}),
}
#: Operators whose device check is that of another one.
_CHECKED_AS: Final = {"embedding": "_index_select"}
_INDEXING: Final = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}


def policy_of(qualified: str, name: str, tables: Tables) -> str:
    """The placement policy of an overload: :data:`ANYWHERE`, :data:`POINTWISE` or :data:`STRICT`."""
    if not qualified.startswith("aten::"):
        return STRICT if qualified.startswith(("torchvision::", "prims::")) else ANYWHERE
    packet = name.split(".")[0]
    if packet in _ANYWHERE:
        return ANYWHERE
    if packet in _NO_SCALARS or (packet in _HOST_SCALARS and packet not in _ALSO_POINTWISE):
        return STRICT
    if name in tables.pointwise or packet in _ALSO_POINTWISE or packet.startswith("_foreach_"):
        return POINTWISE
    return STRICT


def named_tensors(
    record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, int | None, Tensor]]:
    """``(argument name, position in its list or None, tensor)`` of every tensor argument."""
    for name, value in [*zip(record.names, args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor):
            yield name, None, value
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield name, i, item


def check(
    mode: VirtualCuda, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Judge an operator that met device and host tensors; returns the arguments to run it with."""
    session = mode.session
    frame = sys._getframe(2)
    here = (id(frame), frame.f_lasti, id(frame.f_code))
    tensors = list(named_tensors(record, args, kwargs))
    index = next(tag.index for _, _, t in tensors if (tag := tag_of(t)) is not None)
    host: list[tuple[str, int | None, Tensor]] = []
    for name, position, tensor in tensors:
        if tag_of(tensor) is not None or tensor.device.type == "meta":
            continue
        owners = storages(tensor)
        if any(s._born == here for s in owners):
            put_on_card(tensor, index, session.meter, "helper")
        elif any(s._tainted is not None for s in owners):
            continue
        else:
            host.append((name, position, tensor))
    if host:
        _judge(mode, record, tensors, host, args, kwargs, index)
    return args, kwargs


def _judge(
    mode: VirtualCuda,
    record: Record,
    tensors: list[tuple[str, int | None, Tensor]],
    host: list[tuple[str, int | None, Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int,
) -> None:
    session = mode.session
    packet = record.packet
    if packet in _INDEXING:
        _judge_indexing(session, record, host, args, kwargs, index)
        return
    allowed = _HOST_ARGUMENTS.get(packet, frozenset())
    scalars = _HOST_SCALARS.get(packet, frozenset())
    if packet.startswith("_foreach_"):
        host = _foreach_offenders(tensors, host)
    else:
        spared = 0
        offenders = []
        for name, position, tensor in host:
            if name in allowed:
                continue
            output = record.mutates and (name == "self" or name == "out")
            if tensor.dim() == 0 and not output:
                if name in scalars:
                    _return_gradient_to_host(tensor)
                    continue
                if record.placement == POINTWISE:
                    spared += 1
                    if spared == 1:
                        _return_gradient_to_host(tensor)
                        continue
                    text = "Trying to pass too many CPU scalars to non-CPU kernel!"
                    _fault(session, record, text, tensor, name, args, kwargs)
                    continue
            offenders.append((name, position, tensor))
        host = offenders
    for name, position, tensor in host:
        _mixed_fault(session, record, name, position, tensor, args, kwargs, index)


def _foreach_offenders(
    tensors: list[tuple[str, int | None, Tensor]], host: list[tuple[str, int | None, Tensor]]
) -> list[tuple[str, int | None, Tensor]]:
    """Foreach operators fall back to one pointwise call a position: judge each position by itself."""
    offenders = []
    for name, position, tensor in host:
        peers = [t for n, p, t in tensors if t is not tensor and (p == position or p is None or position is None)]
        on_card = any(tag_of(t) is not None for t in peers)
        if on_card and (tensor.dim() > 0 or name == "self"):
            offenders.append((name, position, tensor))
    return offenders


def _judge_indexing(
    session: Session,
    record: Record,
    host: list[tuple[str, int | None, Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int,
) -> None:
    """Rules of ``x[i]`` and ``x[i] = v``."""
    names = {name for name, _, _ in host}
    if "self" not in names:
        if "indices" in names:
            session.slow_transfers[("host index into a device tensor", str(current_site()))] += 1
        if "values" in names:
            values = next(t for name, _, t in host if name == "values")
            accumulate = bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
            if values.dim() == 0 or (not accumulate and _fills_a_mask(args[0], args[1], values)):
                return
            deterministic = torch.are_deterministic_algorithms_enabled() and values.numel() > 1
            text = (
                f"expected device cuda:{index} but got device cpu for value tensor"
                if accumulate or deterministic
                else "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{index} and cpu!"
            )
            _fault(session, record, text, values, "values", args, kwargs)
        return
    table = next(t for name, _, t in host if name == "self")
    on_card = [v for v in (args[1] if len(args) > 1 else []) if isinstance(v, Tensor) and tag_of(v) is not None]
    if on_card:
        finding = session.recorder.fault(
            "DEV-2",
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
            op=record.name,
            arguments=argument_texts(record.names, args, kwargs),
        )
        if finding is not None:
            taint(table)
        return
    _mixed_fault(session, record, "self", None, table, args, kwargs, index)


def _fills_a_mask(table: Tensor, indices: Any, values: Tensor) -> bool:
    """``x[mask] = v`` with one mask beside ``x`` and one host number becomes ``masked_fill_``, which reads it."""
    masks = [i for i in indices if isinstance(i, Tensor)]
    return (
        values.numel() == 1
        and len(masks) == 1
        and masks[0].dtype in (torch.bool, torch.uint8)
        and masks[0].device == table.device
    )


def _mixed_fault(
    session: Session,
    record: Record,
    name: str,
    position: int | None,
    tensor: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int,
) -> None:
    argument = name if position is None else f"{name}[{position}]"
    if record.placement == POINTWISE:
        text = f"Expected all tensors to be on the same device, but found at least two devices, cuda:{index} and cpu!"
    else:
        # An embedding checks its operands as the index_select it is made of.
        if record.packet == "embedding":
            argument = "index"
        method = f"wrapper_CUDA_{_CHECKED_AS.get(record.packet, record.name.replace('.', '_'))}"
        text = (
            f"Expected all tensors to be on the same device, but got {argument} is on cpu, different from other "
            f"tensors on cuda:{index} (when checking argument in method {method})"
        )
    _fault(session, record, text, tensor, argument, args, kwargs)


def _fault(
    session: Session,
    record: Record,
    text: str,
    tensor: Tensor,
    argument: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Report DEV-1 and taint the offending host tensor; false where the report was ignored."""
    finding = session.recorder.fault(
        "DEV-1",
        text,
        op=record.name,
        arguments=argument_texts(record.names, args, kwargs),
        fix=f"'{argument}' is on {_place(tensor)}: create it with device=, register it as a buffer or in a ModuleList, "
        "or move it with .to(device)",
    )
    taint(tensor)
    return finding is not None


def _place(tensor: Tensor) -> str:
    tag = tag_of(tensor)
    return "the host" if tag is None else f"cuda:{tag.index}"


def taint(tensor: Tensor) -> None:
    """Mark a reported host tensor, so that what follows from it is not reported again."""
    for storage in storages(tensor):
        storage._tainted = True


def inherit(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
    """Pass taint, and the birth mark where every input carries it, on to the result of a host operator."""
    here = (id(frame), frame.f_lasti, id(frame.f_code))
    tainted = False
    helper = True
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                owners = storages(item)
                tainted = tainted or any(s._tainted is not None for s in owners)
                helper = helper and all(s._born == here for s in owners)
    for storage in storages(out):
        if tainted:
            storage._tainted = True
        if helper and storage._born is None:
            storage._born = here


def _return_gradient_to_host(scalar: Tensor) -> None:
    """Autograd sends the gradient of a 0-dim host operand back to the host; C++ sees one device and would not."""
    if scalar.requires_grad and not getattr(scalar, "_rehearsal_hooked", False):
        scalar._rehearsal_hooked = True  # type: ignore[attr-defined]
        scalar.register_hook(_to_host)


def _to_host(gradient: Tensor) -> Tensor:
    return gradient if tag_of(gradient) is None else gradient.cpu()


def ordinal(session: Session, device: torch.device) -> int:
    """The card index of a cuda device.

    Raises:
        RuntimeError: (DEV-5) the card has no such ordinal.
    """
    index = session.current if device.index is None else device.index
    if not session.used and session.visible() == 0:
        session.recorder.fault(
            "DEV-5",
            "No CUDA GPUs are available",
            arguments=(f"device: {device}", "CUDA_VISIBLE_DEVICES hides every card"),
            fix="ask torch.cuda.is_available() first, or leave CUDA_VISIBLE_DEVICES alone",
        )
    if index >= session.device_count:
        session.recorder.fault(
            "DEV-5",
            "CUDA error: invalid device ordinal",
            arguments=(f"device: {device}", f"device_count: {session.device_count}"),
            error=torch.AcceleratorError,
        )
        return 0
    if session.bad_fork:
        session.bad_fork = False  # nothing works from here on: one report says it all
        session.recorder.fault(
            "DEV-8",
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method",
        )
    session.used = True
    return int(index)


def check_cards(session: Session, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """DEV-1 between two cards; foreach operators compare each position by itself."""
    apart = record.packet.startswith("_foreach_")
    homes: dict[int | None, int] = {}
    for name, position, tensor in named_tensors(record, args, kwargs):
        tag = tag_of(tensor)
        if tag is None:
            continue
        home = homes.setdefault(position if apart else None, tag.index)
        if home == tag.index or any(s._tainted is not None for s in storages(tensor)):
            continue
        text = (
            f"indices should be either on cpu or on the same device as the indexed tensor (cuda:{home})"
            if record.packet in _INDEXING and name == "indices"
            else "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:{home} and cuda:{tag.index}!"
        )
        _fault(session, record, text, tensor, name, args, kwargs)
        return


def check_fork(session: Session, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """DEV-8: an operator on a device tensor that a forked child inherited."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if session.bad_fork and isinstance(item, Tensor) and tag_of(item) is not None:
                session.bad_fork = False
                session.recorder.fault(
                    "DEV-8",
                    "CUDA error: initialization error",
                    op=operator.removeprefix("aten."),
                    arguments=argument_texts(("self",), (item,), {}),
                    error=torch.AcceleratorError,
                )
                return


#: ``_cdata`` addresses of generators made for the card (a subclass would lose its identity in C++).
card_generators: set[int] = set()


def check_generator(
    session: Session, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_card: bool
) -> dict[str, Any]:
    """DEV-4: the generator of a random operator lives where its result lives."""
    generator = kwargs.get("generator")
    if generator is None:
        position = record.names.index("generator")
        generator = args[position] if position < len(args) else None
    if generator is not None:
        is_card = generator._cdata in card_generators
        if is_card != on_card:
            wanted, found = ("cuda", "cpu") if on_card else ("cpu", "cuda")
            session.recorder.fault(
                "DEV-4",
                f"Expected a '{wanted}' device type for generator but found '{found}'",
                op=record.name,
                arguments=(f"generator: {found}", f"result: {wanted}", *argument_texts(record.names, args, kwargs)),
            )
    return kwargs
