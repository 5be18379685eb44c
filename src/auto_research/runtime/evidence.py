"""Evidence of what a process did on which device.

An :class:`EvidenceLog` is an append-only JSON-lines file. Two kinds of record go into it:

``device_for``   time, pid, requested, resolved, and the caller's file, line and function;
``device_work``  what :class:`DeviceWork` counted: per device type the operations dispatched, the elements
                 and FLOPs computed and the bytes allocated, and the peak memory of each CUDA device.

:func:`device_work_verdict` says what the records of one run prove. The judgement needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from auto_research.runtime.records import append_jsonl, read_jsonl

if TYPE_CHECKING:
    from auto_research.runtime._device_work import Work

__all__ = ["LOG_VARIABLE", "DeviceWork", "EvidenceLog", "WorkVerdict", "current_log", "device_work_verdict", "use_log"]

LOG_VARIABLE = "AUTO_RESEARCH_EVIDENCE_FILE"
"""Environment variable that names the log where no :func:`use_log` is in force; processes inherit it."""


class EvidenceLog:
    """An append-only JSON-lines file; several processes may append to it at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, event: str, **fields: Any) -> None:
        """Append one record: the event's name, time (seconds since 1970), pid, and the given fields."""
        append_jsonl(self.path, {"event": event, "time": time.time(), "pid": os.getpid(), **fields})

    def records(self) -> list[dict[str, Any]]:
        """All complete records, oldest first; none when nothing was logged."""
        return read_jsonl(self.path)


_current: EvidenceLog | None = None


def current_log() -> EvidenceLog | None:
    """The log in force: that of :func:`use_log`, else that of the environment, else none."""
    if _current is not None:
        return _current
    path = os.environ.get(LOG_VARIABLE)
    return EvidenceLog(path) if path else None


class use_log:  # lower case: it reads as a statement, like torch.no_grad
    """Make ``path`` the log of this process, from now on or for the length of a ``with`` block.

    ``None`` puts the environment's log, if any, back in force. All threads share the log.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        global _current
        self._previous = _current
        _current = None if path is None else EvidenceLog(path)

    def __enter__(self) -> EvidenceLog | None:
        return current_log()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._previous


class DeviceWork:
    """Count the work torch dispatches to each kind of device within a ``with`` block.

    On leaving, by an exception too, one ``device_work`` record goes to the current log. Backward passes
    count; so do operations inside ``no_grad`` and ``inference_mode``. Blocks may be nested: an inner block
    reports its own share, marked with its depth, and only the outermost enters the verdict.

    What is counted, per device type of the results:

    * ``operations``: operations dispatched, views aside;
    * ``elements``: elements produced by operations that compute (not by factories, copies or views);
    * ``flops``: of matrix products, convolutions, attention and fused recurrent layers;
    * ``bytes``: of results that do not alias an input.

    Args:
        scope: what the block is, such as ``run`` or the name of a stage.
    """

    _depth = 0

    def __init__(self, scope: str = "run") -> None:
        self.scope = scope
        self._work: Work | None = None
        self._started = 0.0

    def __enter__(self) -> DeviceWork:
        from auto_research.runtime._device_work import Work, reset_peaks

        self._work = Work()
        if DeviceWork._depth == 0:
            reset_peaks()
        DeviceWork._depth += 1
        self._started = time.perf_counter()
        self._work.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from auto_research.runtime._device_work import peak_bytes

        assert self._work is not None
        self._work.__exit__(kind, error, trace)
        DeviceWork._depth -= 1
        log = current_log()
        if log is not None:
            log.append(
                "device_work",
                scope=self.scope,
                depth=DeviceWork._depth,
                seconds=time.perf_counter() - self._started,
                devices=self.counts(),
                peak_bytes=peak_bytes(),
                error=None if kind is None else kind.__name__,
            )

    def counts(self) -> dict[str, dict[str, int]]:
        """Device type to its counts so far, as plain integers."""
        counts = {} if self._work is None else self._work.counts
        return {device: asdict(count) for device, count in counts.items()}


# ------------------------------------------------------------------------------------------------ verdict


@dataclass(frozen=True)
class WorkVerdict:
    """What the evidence of a finished run proves about the requested device.

    ``status`` is ``pass``, ``resolved_without_device_work`` or ``completed_without_device_call``; the audit
    turns ``pass`` into ``gpu_pass``, ``mps_pass`` or ``cpu_pass``. ``share`` is the requested device's share
    of all compute, ``measure`` what it was measured in.
    """

    status: Literal["pass", "resolved_without_device_work", "completed_without_device_call"]
    reason: str
    share: float | None = None
    measure: Literal["flops", "elements"] | None = None


def device_work_verdict(records: Iterable[Mapping[str, Any]], requested: str) -> WorkVerdict:
    """Judge the evidence of one run that finished successfully.

    A pass needs at least one ``device_for`` call that resolved to the requested device, the majority of all
    compute on its kind of device (in FLOPs; in elements where the run has no matrix product at all), and
    bytes allocated there.

    Args:
        records: the run's evidence, in any order.
        requested: a resolved device such as ``cuda:0``, or its kind such as ``cuda``. With an index, the
            call must have resolved to that very device.

    Raises:
        ValueError: ``requested`` is ``auto``, which names no device.
    """
    kind, _, index = requested.partition(":")
    if kind == "auto":
        raise ValueError("resolve the device first: 'auto' names none")
    records = list(records)
    calls = [str(record["resolved"]) for record in records if record.get("event") == "device_for"]
    if not any(call == requested if index else call.partition(":")[0] == kind for call in calls):
        others = f" (calls resolved to {', '.join(sorted(set(calls)))})" if calls else ""
        return WorkVerdict("completed_without_device_call", f"no device_for call resolved to {requested}{others}")
    total: dict[str, int] = {"flops": 0, "elements": 0}
    here: dict[str, int] = {"flops": 0, "elements": 0, "bytes": 0}
    for record in records:
        if record.get("event") != "device_work" or record.get("depth", 0) != 0:
            continue
        for device, counts in record["devices"].items():
            for name in total:
                total[name] += counts[name]
            if device == kind:
                for name in here:
                    here[name] += counts[name]
    measure: Literal["flops", "elements"] = "flops" if total["flops"] else "elements"
    if not total[measure]:
        return WorkVerdict("resolved_without_device_work", "the run computed nothing that torch dispatched")
    share = here[measure] / total[measure]
    if share <= 0.5:
        reason = f"{kind} did {share:.1%} of the compute ({measure}); the rest ran elsewhere"
        return WorkVerdict("resolved_without_device_work", reason, share, measure)
    if here["bytes"] <= 0:
        return WorkVerdict("resolved_without_device_work", f"nothing was allocated on {kind}", share, measure)
    return WorkVerdict("pass", f"{kind} did {share:.1%} of the compute ({measure})", share, measure)
