"""Card profiles and the live-memory meter behind ``torch.cuda.memory_allocated`` and the out-of-memory rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    from .tensor import Tag

MIB: Final = 1024**2
GIB: Final = 1024**3
#: The caching allocator hands out multiples of this many bytes.
BLOCK: Final = 512
#: Context, cuBLAS and cuDNN workspaces that no tensor accounts for.
RESERVE: Final = 600 * MIB
#: Operator name of tags made while the meter was muted: they cost nothing, whatever their size.
MUTED: Final = "muted"
#: Allocations at least this large keep their call site for the peak report.
LARGE: Final = 64 * 1024


@dataclass(frozen=True)
class Card:
    """What a graphics card offers: total memory in bytes and CUDA compute capability."""

    name: str
    title: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int


CARDS: Final[dict[str, Card]] = {
    card.name: card
    for card in (
        Card("t4", "Tesla T4", 16 * GIB, (7, 5), 40),
        Card("v100", "Tesla V100-SXM2-16GB", 16 * GIB, (7, 0), 80),
        Card("a30", "NVIDIA A30", 24 * GIB, (8, 0), 56),
        Card("a10", "NVIDIA A10", 24 * GIB, (8, 6), 72),
        Card("a100", "NVIDIA A100-SXM4-40GB", 40 * GIB, (8, 0), 108),
        Card("a100-80", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), 108),
        Card("l4", "NVIDIA L4", 24 * GIB, (8, 9), 58),
        Card("rtx4090", "NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9), 128),
        Card("h100", "NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), 132),
        Card("h200", "NVIDIA H200", 141 * GIB, (9, 0), 132),
    )
}


def parse_bytes(text: str) -> int:
    """``24GiB``, ``16 GB``, ``512MiB`` or a plain number of bytes.

    Raises:
        UserError: the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or float(match.group(1)) <= 0:
        raise UserError(f"'{text}' is not a memory size; write for example 24GiB or 512MiB.")
    power = " KMGT".index(match.group(2).upper() or " ")
    base = 1000 if match.group(2) and not match.group(3) else 1024
    return int(float(match.group(1)) * base**power)


def card_profile(name: str, memory: str | int | None = None) -> Card:
    """The profile called ``name`` (``a30``, ``h100`` ...), with its memory replaced where ``memory`` is given.

    Raises:
        UserError: unknown card or unreadable memory size.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise UserError(f"Unknown card '{name}'; choose one of {', '.join(CARDS)} or give --memory 24GiB.")
    if memory is None:
        return card
    size = parse_bytes(memory) if isinstance(memory, str) else int(memory)
    return Card(card.name, card.title, size, card.capability, card.multiprocessors)


def rounded(nbytes: int) -> int:
    """Bytes the caching allocator charges for a request of ``nbytes``."""
    return (nbytes + BLOCK - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class LiveTensor:
    """One large allocation alive at the peak: bytes, the operator that made it, the line that asked for it."""

    nbytes: int
    op: str
    site: str


class Meter:
    """Live and peak bytes on the card, from the tags' births and deaths."""

    def __init__(self, budget: int, on_overflow: Callable[[int], None] | None = None) -> None:
        self.budget = budget
        self.on_overflow = on_overflow
        self.site_of: Callable[[], Any] | None = None
        self.live = 0
        self.peak = 0  # since reset_peak: what torch.cuda.max_memory_allocated answers
        self.run_peak = 0  # of the whole run: what the report shows
        self.muted = False
        self._large: dict[int, tuple[int, str, Any]] = {}  # id of a tag -> bytes, operator, asking line
        self._largest_at_peak: list[tuple[int, str, Any]] = []
        self._snapshot_at = 0
        self.stale = False  # the peak is current and no snapshot of it was taken

    def charge(self, tag: Tag) -> None:
        """A new tag that is large, or made a new peak (its bytes are in ``live`` already)."""
        if self.muted:
            self.live -= tag.nbytes
            tag.nbytes = 0
            tag.op = MUTED
            return
        if tag.nbytes >= LARGE:
            self._remember(tag)
        if self.live > self.peak:
            self._raise_peak()

    def _remember(self, tag: Tag) -> None:
        site = self.site_of() if self.site_of is not None else None
        self._large[id(tag)] = (tag.nbytes, tag.op, site)

    def release(self, tag: Tag) -> None:
        """A tag dies that is large, or while the peak is current (its bytes are still in ``live``)."""
        if self.stale and self.live == self.run_peak:
            # The peak is about to end: remember what was alive, unless it barely grew since the last time.
            if self.run_peak > 1.02 * self._snapshot_at:
                self._take_snapshot()
            self.stale = False
        self._large.pop(id(tag), None)

    def _raise_peak(self) -> None:
        self.peak = self.live
        if self.live > self.run_peak:
            self.run_peak = self.live
            self.stale = True
            if self.live > self.budget and self.on_overflow is not None:
                self.on_overflow(self.live)

    def resize(self, tag: Tag, nbytes: int) -> None:
        """A tagged storage changed its size in place."""
        change = rounded(nbytes) - tag.nbytes
        self.live += change
        tag.nbytes += change
        if tag.nbytes >= LARGE:
            self._remember(tag)
        if self.live > self.peak:
            self._raise_peak()

    def _take_snapshot(self) -> None:
        self._snapshot_at = self.run_peak
        self._largest_at_peak = list(self._large.values())

    def reset_peak(self) -> None:
        """Start the peak afresh from what is alive now."""
        self.peak = self.live

    def largest_at_peak(self, count: int = 10) -> list[LiveTensor]:
        """The largest tensors that were alive at the run's peak, largest first."""
        if self.stale and self.live == self.run_peak:
            self._take_snapshot()
        top = sorted(self._largest_at_peak, key=lambda entry: -entry[0])[:count]
        return [LiveTensor(nbytes, op, str(site) if site is not None else "") for nbytes, op, site in top]


def extrapolate(batch: int, peak: int, batch2: int, peak2: int, target: int) -> int:
    """Peak bytes at ``target`` items from peaks at two batch sizes (linear in the batch).

    Raises:
        UserError: the two batch sizes are equal.
    """
    if batch == batch2:
        raise UserError("Extrapolation needs two different batch sizes.")
    slope = (peak2 - peak) / (batch2 - batch)
    return round(peak + slope * (target - batch))
