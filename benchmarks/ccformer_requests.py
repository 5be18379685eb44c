"""Cost of scoring a request with CCFormer, and speed of training, beside HSTU of equal parameters.

    python benchmarks/ccformer_requests.py [--device cpu] [--rounds 7] [--train-histories 48 96 192 384]
        [--output docs/benchmarks] [--plot docs/images]

A request's user and history are read anew for every candidate, once for all of them in one pass, or were kept from
before. The three must agree to 1e-5. Weights are random and requests made up (costs do not depend on them). Rounds
alternate between the ways, so that a busy machine slows all of them; times are medians after a warm-up. FLOPs are those
of matrix products. HSTU scores differently; its one pass is shown, not compared. Training is a forward and a backward
pass over one batch of requests with eight candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from request_sweep import options, sweep, timed
from torch import Tensor

from auto_research.papers.ranking.ccformer import (
    HSTU,
    METHOD,
    PLAIN,
    CCFormer,
    CCFormerConfig,
    baseline,
    measure_training,
)
from auto_research.runtime.device import seed_everything
from auto_research.tasks.base import Batch
from auto_research.tasks.personal_requests import PersonalRequests, miniature
from auto_research.tasks.request_ranking import candidates_apart


def full_request(task: PersonalRequests, device: torch.device) -> Batch:
    """The first request with a whole history and as many candidates as there may be."""
    whole = (task.first - task.log.begin[task.first] >= task.history) & (task.count == task.width)
    return task.rows(whole.nonzero()[0], device)


def measure(config: CCFormerConfig, history: int, candidates: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds and MFLOPs of each way at one size, and the largest difference of CCFormer's scores."""
    task = miniature(users=1, events=2 * (history + 2 * candidates), history=history, width=candidates)
    batch = full_request(task, device)
    seed_everything(0)
    model = CCFormer(task, config).to(device).eval()
    hstu = baseline(task, config, "hstu")().to(device).eval()
    apart = candidates_apart(batch)
    with torch.no_grad():
        side = model.request_side(batch)
    ways: dict[str, Callable[[], Tensor]] = {
        "history for each candidate": lambda: model.scores(apart).transpose(0, 1),
        "one pass": lambda: model.scores(batch),
        "cached history": lambda: model.candidate_scores(side, batch),
        "hstu, one pass": lambda: hstu.scores(batch),
    }
    with torch.no_grad():
        found = [ways[name]() for name in list(ways)[:3]]
    gap = max(float((other - found[0]).abs().max()) for other in found[1:])
    return timed(ways, history, candidates, gap, rounds=rounds, device=device)


def training(
    config: CCFormerConfig, history: int, batch_size: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Requests a second in training at one history length."""
    task = miniature(users=4, events=2 * history, history=history, width=8)
    speed = measure_training(task, config, device, batch_size=batch_size, rounds=rounds, extra=(PLAIN,))
    return {
        "history": history,
        "requests a second": {name: round(value, 1) for name, value in speed.requests.items()},
        "against hstu": round(speed.ratio, 2),
        "against narrow hstu": round(speed.requests[METHOD] / speed.requests[PLAIN], 2),
        "baseline": HSTU,
    }


def main() -> None:
    """Measures, writes one JSON file and draws one plot."""
    parser = options(__doc__, width=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--train-histories", type=int, nargs="*", default=[48, 96, 192, 384])
    args = parser.parse_args()
    config = CCFormerConfig(width=args.width, layers=args.layers)

    def speed(device: torch.device) -> dict[str, Any]:
        rows = [training(config, n, args.batch, args.rounds, device) for n in args.train_histories]
        return {"layers": args.layers, "batch": args.batch, "training": rows}

    sweep(
        "ccformer",
        args,
        lambda history, count, device: measure(config, history, count, args.rounds, device),
        facts=speed,
    )


if __name__ == "__main__":
    main()
