"""Cost of scoring a request with ROCS: its half computed once, or broadcast to every candidate; vanilla beside it.

    python benchmarks/rocs_requests.py [--device cpu] [--rounds 7] [--output docs/benchmarks] [--plot docs/images]

The models of the standard run on Wukong, with the ratios that their budgets give at a history of 64. Weights and events
are random (costs do not depend on them). Both ways of a model must agree to 1e-5. A broadcast is one vectorised pass
over as many requests as candidates, never a loop. Vanilla also stands with the keys and values of its history kept, the
most that sharing can do for it. Rounds alternate between the ways, so that a busy machine slows all of them; times are
medians after a warm-up. FLOPs are those of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from request_sweep import FIXED, options, sweep, timed
from torch import Tensor

from auto_research.papers.ranking.rocs import BASE, SCALED, VANILLA, Rocs, RocsConfig, fitted, prices
from auto_research.runtime.device import seed_everything
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests

CANDIDATES = (1, 10, 100, 1000)


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
    return timed(ways, history, candidates, gap, rounds=rounds, device=device)


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    args = options(__doc__, width=16).parse_args()
    found = fitted(prices(task_of(FIXED)), RocsConfig(width=args.width, history=FIXED))
    arms = {name: found[name][1] for name in (VANILLA, BASE, SCALED)}

    def size(history: int, candidates: int, device: torch.device) -> dict[str, Any]:
        return measure(arms, history, candidates, args.rounds, device)

    ratios = {name: config.ratio for name, config in arms.items()}
    sweep("rocs", args, size, candidates=CANDIDATES, facts=lambda device: {"ratios": ratios})


if __name__ == "__main__":
    main()
