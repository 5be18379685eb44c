"""Cost of scoring a request with a model of the click task: the request read once, or anew for every candidate.

    python benchmarks/shared_requests.py onetrans|mixformer [--device cpu] [--rounds 7]
        [--output docs/benchmarks] [--plot docs/images]

The paper's module names the models (`request_models`). Weights and histories are random (costs do not depend on them).
Both ways of a model must agree to 1e-5. Reading the request anew is one vectorised pass over as many examples as
candidates, never a loop. Rounds alternate between the ways, so that a busy machine slows both; times are medians. FLOPs
are those of matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from request_sweep import agree, options, sweep

from auto_research.papers._registry import adapter
from auto_research.runtime.device import seed_everything
from auto_research.tasks.click import miniature
from auto_research.tasks.request_cost import RequestCost, measure_requests


def measure(key: str, history: int, candidates: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each model and way at one size, and the largest difference between the ways."""
    task = miniature(users=2, items=600, events=600, detailed=True, history_length=history)
    seed_everything(0)
    costs: dict[str, RequestCost] = {}
    for name, model in adapter(key).load_module().request_models(task).items():
        costs[name] = measure_requests(task, model.to(device).eval(), device, candidates=candidates, rounds=rounds)
    gap = max(cost.gap for cost in costs.values())
    ways = {"read for each candidate": "plain", "read once": "packed"}

    def of(quantity: str, scale: float) -> dict[str, float]:
        return {
            f"{name}, {title}": round(getattr(cost, f"{way}_{quantity}") * scale, 4)
            for name, cost in costs.items()
            for title, way in ways.items()
        }

    return {
        "history": history,
        "candidates": candidates,
        "largest difference": agree(gap),
        "milliseconds": of("seconds", 1e3),
        "mflops": of("flops", 1e-6),
    }


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    parser = options(__doc__)
    parser.add_argument("key")
    args = parser.parse_args()
    sweep(args.key, args, lambda history, count, device: measure(args.key, history, count, args.rounds, device))


if __name__ == "__main__":
    main()
