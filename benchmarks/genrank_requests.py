"""Cost of scoring a request with GenRank: its history read once, cached, or read anew for every candidate.

    python benchmarks/genrank_requests.py [--device cpu] [--rounds 7] [--output docs/benchmarks] [--plot docs/images]

Weights and histories are random (costs do not depend on them). All ways must agree to 1e-5. Rounds alternate between
the ways, so that a busy machine slows all of them; times are medians after a warm-up. FLOPs are those of matrix
products. Interleaved HSTU, in one pass, stands beside them; it scores differently and is not compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auto_research.layers.towers import forward_flops
from auto_research.papers.ranking.genrank import GenRank, GenRankConfig
from auto_research.runtime.device import device_for, seed_everything
from auto_research.runtime.records import write_json_atomic
from auto_research.runtime.versions import environment
from auto_research.tasks.base import Batch
from auto_research.tasks.event_log import miniature

CANDIDATES = (1, 4, 16, 64, 128)
HISTORIES = (16, 32, 64, 128, 256)
FIXED = 64
"""The history of the first panel and the candidates of the second."""


def request(history: int, candidates: int, device: torch.device) -> Batch:
    """One full request with made-up events."""
    drawn = torch.Generator().manual_seed(0)
    row = {
        "item": torch.randint(1, 31, (1, history), generator=drawn),
        "action": torch.randint(1, 6, (1, history), generator=drawn),
        "back": torch.arange(history, 0, -1)[None].div(8, rounding_mode="floor").clamp(1, 32),
        "wait": torch.full((1, history), 9),
        "age": torch.arange(history, 0, -1)[None] * 60,
        "candidate": torch.randint(1, 31, (1, candidates), generator=drawn),
        "wait_now": torch.tensor([9]),
    }
    return {name: value.to(device) for name, value in row.items()}


def apart(model: GenRank, batch: Batch) -> Tensor:
    """The whole sequence again for each candidate: (1, m, 2)."""
    count = batch["candidate"].shape[1]
    rows = {name: value.expand(count, *value.shape[1:]) for name, value in batch.items() if name != "candidate"}
    return model.scores({**rows, "candidate": batch["candidate"].T}).transpose(0, 1)


def measure(width: int, history: int, candidates: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each way at one size, and the largest difference of GenRank's scores."""
    log, batch = miniature(), request(history, candidates, device)
    seed_everything(0)
    config = GenRankConfig(width=width, history=history)
    model = GenRank(log, config).to(device).eval()
    hstu = GenRank(log, GenRankConfig(width=width, history=history, tokens="interleaved", bias="relative"))
    hstu = hstu.to(device).eval()
    with torch.no_grad():
        side = model.request_side(batch)
    ways: dict[str, Callable[[], Tensor]] = {
        "history for each candidate": lambda: apart(model, batch),
        "one pass": lambda: model.scores(batch),
        "cached history": lambda: model.candidate_scores(side, batch),
        "interleaved hstu, one pass": lambda: hstu.scores(batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        found = [ways[name]() for name in list(ways)[:3]]
        gap = max(float((other - found[0]).abs().max()) for other in found[1:])
        if gap > 1e-5:
            raise AssertionError(f"the ways differ by {gap}")
        for turn in range(rounds + 1):
            for name, run in ways.items():
                started = time.perf_counter()
                run().sum().item()  # waits for the device
                if turn:
                    seconds[name].append(time.perf_counter() - started)
    return {
        "history": history,
        "candidates": candidates,
        "largest difference": gap,
        "milliseconds": {name: round(1000 * statistics.median(values), 4) for name, values in seconds.items()},
        "mflops": {name: round(forward_flops(run) / 1e6, 4) for name, run in ways.items()},
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Time and work, against candidates and against the history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for column, (swept, other) in enumerate((("candidates", "history"), ("history", "candidates"))):
        rows = record[f"by {swept}"]
        for row, (quantity, title) in enumerate((("milliseconds", "milliseconds"), ("mflops", "MFLOPs"))):
            axis = axes[row][column]
            for name in rows[0][quantity]:
                axis.plot([r[swept] for r in rows], [r[quantity][name] for r in rows], marker=".", label=name)
            axis.set(xscale="log", yscale="log", xlabel=swept, title=f"{title} a request, {other} {FIXED}")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    device = device_for(args.device)
    record = {
        "paper": "genrank",
        "width": args.width,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "environment": environment(),
        "by candidates": [measure(args.width, FIXED, m, args.rounds, device) for m in CANDIDATES],
        "by history": [measure(args.width, n, FIXED, args.rounds, device) for n in HISTORIES],
    }
    write_json_atomic(args.output / "genrank_requests.json", record)
    plot(record, args.plot / "genrank-requests.svg")


if __name__ == "__main__":
    main()
