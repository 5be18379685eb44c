"""Places for cells: a slot is a device and a share of it. A cell never chooses; what does not fit waits."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from auto_research.evolve.records import RunConfig
from auto_research.runtime.errors import DeviceAbsent, UserError
from auto_research.runtime.versions import cores

MARGIN = 1.15
"""A declared or measured peak is multiplied by this before it must fit."""

CARD_BYTES = 24 * 10**9
"""Memory of the card that boards compare with: A30, A10, L4, RTX 4090."""

MIB = 2**20


@dataclass(frozen=True)
class Slot:
    """A place for one cell at a time.

    Attributes:
        device: `cpu`, `mps`, or the UUID of a GPU.
        share: of that device.
        threads: of the cell.
        visible: value of CUDA_VISIBLE_DEVICES; None leaves it to whoever places the cell.
    """

    index: int
    device: str
    share: float
    threads: int
    visible: str | None

    @property
    def environment(self) -> dict[str, str]:
        """What the cell's process sees of the machine."""
        visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}
        return {"OMP_NUM_THREADS": str(self.threads), **visible}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    total: int
    free: int


class Slots:
    """Hands out slots by memory.

    Args:
        slots: in order of preference.
        memory: device -> its memory now; None for a device that others look after.
    """

    def __init__(self, slots: Sequence[Slot], memory: Callable[[str], Memory | None]) -> None:
        self.slots = tuple(slots)
        self._memory = memory
        self._taken: dict[Slot, int] = {}
        self._idle_free: dict[str, int] = {}  # free memory when none of our cells was on the device

    def take(self, need: int) -> Slot | None:
        """A free slot on a device where `need` bytes with the margin fit beside what was promised; None if none is.

        What a running cell was promised counts in full although it may not have allocated it yet.
        """
        wanted = int(need * MARGIN)
        for slot in self.slots:
            if slot in self._taken:
                continue
            memory = self._memory(slot.device)
            if memory is not None:
                promised = sum(size for taken, size in self._taken.items() if taken.device == slot.device)
                if not any(taken.device == slot.device for taken in self._taken):
                    self._idle_free[slot.device] = memory.free
                if wanted > memory.free or promised + wanted > self._idle_free[slot.device]:
                    continue
            self._taken[slot] = wanted
            return slot
        return None

    def give(self, slot: Slot) -> None:
        """Return a slot."""
        del self._taken[slot]

    @property
    def all_threads(self) -> int:
        """Threads of a cell that runs alone: those of every slot, unless Ray placed it and gave it one slot's."""
        first = self.slots[0]
        return first.threads if first.visible is None else sum(slot.threads for slot in self.slots)

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        return len(self._taken)

    def too_large(self, need: int) -> str:
        """Why `need` bytes could never fit on any device; "" when they could."""
        wanted, known = int(need * MARGIN), [self._memory(slot.device) for slot in self.slots]
        if any(memory is None or wanted <= memory.total for memory in known):
            return ""
        most = max(memory.total for memory in known if memory is not None)
        return f"needs {wanted / MIB:,.0f} MB with margin and the largest device has {most / MIB:,.0f} MB"


def slots_for(config: RunConfig) -> Slots:
    """The slots of this machine that a configuration asks for.

    `where` holds `workers` (slots in all), `cpu_threads` (of a cell; cores / slots by default), `gpu_slots` (a GPU)
    and `executor` (with `ray`, Ray places the cells and only their number is ours).

    Raises `UserError`, `DeviceAbsent` among them.
    """
    where = config.where
    workers = _positive(where, "workers")
    if where.get("executor") == "ray":
        count, threads = workers or 1, _positive(where, "cpu_threads") or 1
        return Slots([Slot(i, config.device, 1.0, threads, None) for i in range(count)], lambda device: None)
    if config.device.startswith("cuda"):
        gpus = _chosen_gpus(config.device)
        per_gpu = _positive(where, "gpu_slots") or -(-(workers or 1) // len(gpus))
        places = [(gpu, 1 / per_gpu, gpu) for _ in range(per_gpu) for gpu in gpus][: workers or None]
    else:
        count = 1 if config.device == "mps" else workers or 1
        places = [(config.device, 1 / count, "")] * count
    threads = _positive(where, "cpu_threads") or max(1, cores() // len(places))
    return Slots([Slot(i, d, share, threads, visible) for i, (d, share, visible) in enumerate(places)], memory_of)


def _positive(where: Mapping[str, object], name: str) -> int | None:
    value = where.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} is {value!r}; give a whole number of at least 1")
    return value


def memory_of(device: str) -> Memory | None:
    """Memory of the host (`cpu`, `mps`), within its container's limit, or of a GPU by UUID."""
    if device in ("cpu", "mps"):
        return _host_memory()
    return gpus().get(device)


def _host_memory() -> Memory:
    import psutil

    host = psutil.virtual_memory()
    total, free = int(host.total), int(host.available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no control group, or none with a limit ("max")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        total, free = min(total, limit), min(free, limit - used + (int(cached[1]) if cached else 0))
    return Memory(total, free)


def gpus() -> dict[str, Memory]:
    """UUID -> memory of every GPU, asked from the driver's tool so that no context is made here; {} without one."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpus(said)


def parse_gpus(said: str) -> dict[str, Memory]:
    """The tool's lines `uuid, total MiB, free MiB`."""
    found = {}
    for line in said.splitlines():
        uuid, total, free = (part.strip() for part in line.split(","))
        found[uuid] = Memory(int(total) * MIB, int(free) * MIB)
    return found


def _chosen_gpus(device: str) -> list[str]:
    """UUIDs that `cuda` or `cuda:<i>` means, among those CUDA_VISIBLE_DEVICES leaves to this process."""
    there = list(gpus())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        by_index = [there[int(n)] if n.isdecimal() and int(n) < len(there) else n for n in names]
        there = [uuid for name in by_index for uuid in there if uuid.startswith(name)]
    index = device.partition(":")[2]
    chosen = [there[int(index)]] if index.isdecimal() and int(index) < len(there) else [] if index else there
    if not chosen:
        raise DeviceAbsent(f"Device {device} is absent: the driver shows {len(there)} GPUs; choose another --device.")
    return chosen
