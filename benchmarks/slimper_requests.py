"""Cost of scoring a request with SlimPer: its user tokens made once, or for every candidate; HSTU + Wukong beside it.

    python benchmarks/slimper_requests.py [--device cpu] [--rounds 7] [--output docs/benchmarks] [--plot docs/images]

Weights and histories are random (costs do not depend on them). Both ways must agree to 1e-5, for SlimPer and for the
control, which has as many parameters and reads its history once for all candidates as well. Rounds alternate between
the ways, so that a busy machine slows all of them; times are medians after a warm-up. FLOPs are those of matrix
products; the control's biases for all pairs of events are look-ups and count in time alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from request_sweep import options, sweep, timed
from torch import Tensor, nn

from auto_research.papers.ranking.slimper import HSTU, SlimPer, SlimPerConfig, control
from auto_research.runtime.device import seed_everything
from auto_research.tasks.click import miniature

HISTORIES = (64, 128, 256, 512, 1024)
"""Longer than GenRank's: this is where what is carried for every event tells."""


def measure(width: int, history: int, candidates: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each way at one size, and the largest difference between ways of one model."""
    task = miniature(users=2, items=1400, events=1400, detailed=True, history_length=history)
    seed_everything(0)
    config = SlimPerConfig(width=width, history=history)
    slimper, hstu = SlimPer(task, config).to(device).eval(), control(task, config)().to(device).eval()
    event, items = task.test[-1:], torch.arange(candidates) % task.num_items
    request, pack = task.pack(event, items, device)
    plain = task.rows(event.repeat(candidates), device, candidate=items)
    if int((request["history_item"] > 0).sum()) != history:
        raise AssertionError("the request has padding")

    def once(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: model.candidate_scores(model.request_side(request), pack)

    ways: dict[str, Callable[[], Tensor]] = {
        "slimper, user tokens for each candidate": lambda: slimper.scores(plain),
        "slimper, user tokens once": once(slimper),
        f"{HSTU}, history once": once(hstu),
    }
    with torch.inference_mode():
        found = [way() for way in ways.values()]
        few = {name: value[:4] for name, value in plain.items()}
        gaps = [found[0] - found[1], hstu.scores(few) - found[2][:4]]
    gap = max(float(difference.abs().max()) for difference in gaps)
    return timed(ways, history, candidates, gap, rounds=rounds, device=device)


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    args = options(__doc__, width=16).parse_args()

    def size(history: int, candidates: int, device: torch.device) -> dict[str, Any]:
        return measure(args.width, history, candidates, args.rounds, device)

    sweep("slimper", args, size, histories=HISTORIES)


if __name__ == "__main__":
    main()
