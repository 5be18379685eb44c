"""What the benchmarks of scoring a request share: its sizes, how ways are timed, the record and the plot.

Rounds alternate between the ways, so that a busy machine slows all of them; times are medians after a warm-up. FLOPs
are those of matrix products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auto_research.layers.towers import forward_flops
from auto_research.runtime.device import device_for
from auto_research.runtime.records import write_json_atomic
from auto_research.runtime.versions import environment
from auto_research.tasks.timing import median_seconds

CANDIDATES = (1, 4, 16, 64, 128)
HISTORIES = (16, 32, 64, 128, 256)
FIXED = 64
"""The history of the first panel and the candidates of the second."""

TOLERANCE = 1e-5
"""How far ways of one model may differ in a score."""


def options(description: str, *, width: int | None = None) -> argparse.ArgumentParser:
    """The options that all of these benchmarks take; `width` is the default of one."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", default="auto")
    if width is not None:
        parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images"))
    return parser


def agree(gap: float) -> float:
    """The largest difference between ways of one model. Raises AssertionError above `TOLERANCE`."""
    if gap > TOLERANCE:
        raise AssertionError(f"the ways differ by {gap}")
    return gap


def timed(
    ways: Mapping[str, Callable[[], Tensor]],
    history: int,
    candidates: int,
    gap: float,
    *,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each way at one size, beside the largest difference between ways of one model."""
    with torch.inference_mode():
        seconds = median_seconds(ways, device, rounds=rounds)
    return {
        "history": history,
        "candidates": candidates,
        "largest difference": agree(gap),
        "milliseconds": {name: round(1000 * value, 4) for name, value in seconds.items()},
        "mflops": {name: round(forward_flops(way) / 1e6, 4) for name, way in ways.items()},
    }


def sweep(
    paper: str,
    args: argparse.Namespace,
    measure: Callable[[int, int, torch.device], dict[str, Any]],
    *,
    candidates: Sequence[int] = CANDIDATES,
    histories: Sequence[int] = HISTORIES,
    facts: Callable[[torch.device], dict[str, Any]] = lambda device: {},
) -> None:
    """Runs `measure(history, candidates, device)` over both sweeps, writes one JSON file and draws one plot.

    Args:
        facts: further entries of the record.
    """
    device = device_for(args.device)
    record = {
        "paper": paper,
        **({"width": args.width} if "width" in args else {}),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "environment": environment(),
        "by candidates": [measure(FIXED, count, device) for count in candidates],
        "by history": [measure(length, FIXED, device) for length in histories],
        **facts(device),
    }
    write_json_atomic(args.output / f"{paper}_requests.json", record)
    plot(record, args.plot / f"{paper}-requests.svg")


def plot(record: dict[str, Any], path: Path) -> None:
    """Time and work, against candidates and against the history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for column, (swept, other) in enumerate((("candidates", "history"), ("history", "candidates"))):
        rows = record[f"by {swept}"]
        sizes = [r[swept] for r in rows]
        for row, (quantity, title) in enumerate((("milliseconds", "milliseconds"), ("mflops", "MFLOPs"))):
            axis = axes[row][column]
            for name in rows[0][quantity]:
                axis.plot(sizes, [r[quantity][name] for r in rows], marker=".", label=name)
            axis.set(xscale="log", yscale="log", xlabel=swept, title=f"{title} a request, {other} {FIXED}")
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.set_xticks([], minor=True)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
