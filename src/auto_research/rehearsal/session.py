"""The running rehearsal: its card, its meters and counters, and what every part of it may ask."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from .locate import Site, current_site
from .memory import RESERVE, Card, Meter
from .rules import Recorder
from .tables import Tables, load_tables


@dataclass
class Transfers:
    """Bytes and calls that crossed between host and card."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    to_device: int = 0
    to_host: int = 0


class Session:
    """State of one rehearsal; the active one is :data:`active`."""

    def __init__(self, card: Card, *, device_count: int, recorder: Recorder, check_memory: bool) -> None:
        self.card = card
        self.device_count = device_count
        self.recorder = recorder
        self.tables: Tables = load_tables()
        self.meter = Meter(max(card.memory - RESERVE, 0), self._overflow if check_memory else None)
        self.meter.site_of = current_site
        self.current = 0
        self.pid = os.getpid()
        self.used = False
        self.bad_fork = False
        self.device_ops = 0
        self.host_ops = 0
        self.device_flops = 0
        self.host_flops = 0
        self.epoch = 0
        self.steps = 0
        self.syncs: Counter[tuple[str, str]] = Counter()  # (kind, site) -> count
        self.syncs_per_step: list[int] = [0]
        self.transfer = Transfers()
        self.slow_transfers: Counter[tuple[str, str]] = Counter()
        self.nondeterministic: Counter[tuple[str, str]] = Counter()
        self.emulated: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.batch_peaks: list[tuple[int, int]] = []
        self.local = threading.local()
        self.devices = [torch.device("cuda", i) for i in range(device_count)]
        self.undo: list[Any] = []
        self.overflowed = False
        self.mode: Any = None  # the main thread's dispatch mode

    def sync(self, kind: str) -> None:
        """Count one wait of the host for the card, at the running line."""
        self.epoch += 1
        if getattr(self.local, "muted", False):
            return
        self.syncs[(kind, str(current_site()))] += 1
        self.syncs_per_step[-1] += 1

    def visible(self) -> int:
        """How many cards ``CUDA_VISIBLE_DEVICES`` leaves to the script."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            return self.device_count
        entries = [entry for entry in listed.split(",") if entry.strip() and entry.strip() != "-1"]
        return min(len(entries), self.device_count)

    def step(self) -> None:
        """An optimiser finished a step."""
        self.steps += 1
        self.syncs_per_step.append(0)

    def note(self, text: str) -> None:
        """Remember something that could not be rehearsed."""
        self.notes.setdefault(text)

    def emulate(self, op: str) -> None:
        """Remember an operator whose CUDA kernel was stood in for."""
        self.emulated[op] += 1

    def _overflow(self, live: int) -> None:
        if self.overflowed:
            return
        self.overflowed = True
        largest = self.meter.largest_at_peak(5)
        lines = "; ".join(f"{t.nbytes / 2**20:.1f} MiB {t.op} at {t.site}" for t in largest)
        self.recorder.fault(
            "MEM-1",
            f"CUDA out of memory. {live / 2**30:.2f} GiB of tensors do not fit {self.card.title} "
            f"({self.card.memory / 2**30:.2f} GiB less {RESERVE / 2**20:.0f} MiB for context and workspaces). "
            f"Largest: {lines}",
            error=torch.OutOfMemoryError,
        )


@dataclass
class _Active:
    session: Session | None = None
    sites: dict[str, Site] = field(default_factory=dict)


_active = _Active()


def active() -> Session | None:
    """The running rehearsal, if any."""
    return _active.session


def activate(session: Session | None) -> None:
    """Make ``session`` the running rehearsal (``None`` ends it)."""
    _active.session = session


def running() -> Session:
    """The running rehearsal.

    Raises:
        RuntimeError: none is running.
    """
    if _active.session is None:
        raise RuntimeError("No rehearsal is running.")
    return _active.session
