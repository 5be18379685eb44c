"""Attempts of cells on the disk: how they ended, what they returned, what the next one changes, and who still lives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from auto_research.evolve.cells import attempt_folder, measured
from auto_research.evolve.records import Attempt
from auto_research.runtime.records import Record, read_record

LOST = "the controller ended before this attempt did"
"""Reason of an attempt that was interrupted with its controller; it counts as no failure of the cell."""


class Ended(Record):
    """How one attempt of a cell ended, kept beside its log.

    Attributes:
        again: whether another attempt may end otherwise.
    """

    attempt: Attempt
    again: bool
    peaks: dict[str, int] = Field(default_factory=dict)


def read_attempts(folder: Path, cell: str) -> list[Ended]:
    """The attempts of a cell that have ended, in order."""
    found: list[Ended] = []
    while (path := attempt_folder(folder, cell, len(found) + 1) / "attempt.json").exists():
        found.append(read_record(path, Ended))
    return found


def raw_result(folder: Path) -> dict[str, Any] | None:
    """What the process of an attempt returned, if that is whole."""
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        measured(found)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return dict(found)


def next_change(before: Sequence[Ended], sizes: Mapping[str, int]) -> dict[str, int]:
    """What the next attempt changes: as the last one, and half the micro-batch when that ran out of memory.

    The effective batch stays: accumulation doubles.
    """
    if not before:
        return {}
    changed = dict(before[-1].attempt.changed)
    if before[-1].attempt.state == "out_of_memory":
        now = {**sizes, **changed}
        changed.update(micro_batch=now["micro_batch"] // 2, accumulate=2 * now.get("accumulate", 1))
    return changed


def await_end(beat: Mapping[str, Any], grace_s: float) -> None:
    """Wait until the process of an abandoned attempt is gone; its guardian ends it with the controller.

    Should its guardian be gone too, the process group is killed here.
    """
    import psutil

    if beat.get("host") != socket.gethostname():
        return
    try:
        process = psutil.Process(int(beat["pid"]))
        if abs(process.create_time() - float(beat["created"])) > 1:  # the number was given to another process
            return
        process.wait(grace_s + 5)
    except psutil.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(beat["pid"]), signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
