"""Cost of scoring a request with ROCS: its half computed once, or broadcast to every candidate; vanilla beside it.

    python benchmarks/rocs_requests.py [--device cpu] [--rounds 7] [--output docs/benchmarks] [--plot docs/images]

The models of the standard run on Wukong, with the ratios that their budgets give at a history of 64. Weights and events
are random (costs do not depend on them). Both ways of a model must agree to 1e-5. A broadcast is one vectorised pass
over as many requests as candidates, never a loop. Vanilla also stands with the keys and values of its history kept, the
most that sharing can do for it. Rounds alternate between the ways, so that a busy machine slows all of them; times are
medians after a warm-up. FLOPs are those of matrix products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from genrank_requests import FIXED, plot
from torch import Tensor

from auto_research.layers.towers import forward_flops
from auto_research.papers.ranking.rocs import BASE, SCALED, VANILLA, Rocs, RocsConfig, fitted, prices
from auto_research.runtime.device import device_for, seed_everything
from auto_research.runtime.records import write_json_atomic
from auto_research.runtime.versions import environment
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests
from auto_research.tasks.timing import median_seconds

CANDIDATES = (1, 10, 100, 1000)
HISTORIES = (16, 32, 64, 128, 256)


def task_of(history: int) -> RequestClicks:
    """Made-up requests of users with a history that long."""
    return miniature_requests(users=2, items=1000, events=400, history_length=history)


def measure(
    arms: dict[str, RocsConfig], history: int, candidates: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each way at one size, and the largest difference between the ways of one model."""
    task = task_of(history)
    seed_everything(0)
    models = {name: Rocs(task, replace(config, history=history)).to(device).eval() for name, config in arms.items()}
    event, items = task.test[-1:], torch.arange(candidates) % task.num_items
    request, pack = task.pack(event, items, device)
    plain = task.rows(event.repeat(candidates), device, candidate=items)
    if int((request["history_item"] > 0).sum()) != history:
        raise AssertionError("the request has padding")

    def once(model: Rocs) -> Callable[[], Tensor]:
        return lambda: model.candidate_scores(model.request_side(request), pack)

    def broadcast(model: Rocs) -> Callable[[], Tensor]:
        return lambda: model.scores(plain)

    ways = {
        "vanilla, broadcast": broadcast(models[VANILLA]),
        "vanilla, history kept": once(models[VANILLA]),
        "rocs base, broadcast": broadcast(models[BASE]),
        "rocs base, shared": once(models[BASE]),
        "rocs scaled, shared": once(models[SCALED]),
    }
    few = {name: value[:8] for name, value in plain.items()}
    with torch.inference_mode():
        gap = max(float((once(m)()[:8] - m.scores(few)).abs().max()) for m in models.values())
        if gap > 1e-5:
            raise AssertionError(f"the ways differ by {gap}")
        seconds = median_seconds(ways, device, rounds=rounds)
    return {
        "history": history,
        "candidates": candidates,
        "largest difference": gap,
        "milliseconds": {name: round(1000 * value, 4) for name, value in seconds.items()},
        "mflops": {name: round(forward_flops(way) / 1e6, 4) for name, way in ways.items()},
    }


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    device = device_for(args.device)
    found = fitted(prices(task_of(FIXED)), RocsConfig(width=args.width, history=FIXED))
    arms = {name: found[name][1] for name in (VANILLA, BASE, SCALED)}
    record = {
        "paper": "rocs",
        "width": args.width,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "ratios": {name: config.ratio for name, config in arms.items()},
        "environment": environment(),
        "by candidates": [measure(arms, FIXED, count, args.rounds, device) for count in CANDIDATES],
        "by history": [measure(arms, length, FIXED, args.rounds, device) for length in HISTORIES],
    }
    write_json_atomic(args.output / "rocs_requests.json", record)
    plot(record, args.plot / "rocs-requests.svg")


if __name__ == "__main__":
    main()
