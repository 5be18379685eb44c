"""Cost of scoring a request with GenRank: its history read once, cached, or read anew for every candidate.

    python benchmarks/genrank_requests.py [--device cpu] [--rounds 7] [--output docs/benchmarks] [--plot docs/images]

Weights and histories are random (costs do not depend on them). All ways must agree to 1e-5. Rounds alternate between
the ways, so that a busy machine slows all of them; times are medians after a warm-up. FLOPs are those of matrix
products. Interleaved HSTU, in one pass, stands beside them; it scores differently and is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from request_sweep import options, sweep, timed
from torch import Tensor

from auto_research.papers.ranking.genrank import GenRank, GenRankConfig
from auto_research.runtime.device import seed_everything
from auto_research.tasks.base import Batch
from auto_research.tasks.event_log import miniature


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
    with torch.no_grad():
        found = [ways[name]() for name in list(ways)[:3]]
    gap = max(float((other - found[0]).abs().max()) for other in found[1:])
    return timed(ways, history, candidates, gap, rounds=rounds, device=device)


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    args = options(__doc__, width=32).parse_args()
    sweep("genrank", args, lambda history, count, device: measure(args.width, history, count, args.rounds, device))


if __name__ == "__main__":
    main()
