"""How long work takes: the clock after everything that was asked of a device is done, and fair medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock at which everything that was asked of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def median_seconds(
    ways: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each way over `rounds` rounds, after `warm_up` rounds that do not count.

    Rounds alternate between the ways, so that a busy machine slows all of them.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + rounds):
        for name, way in ways.items():
            started = now(device)
            way()
            if turn >= warm_up:
                taken[name].append(now(device) - started)
    return {name: statistics.median(values) for name, values in taken.items()}
