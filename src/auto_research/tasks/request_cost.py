"""What scoring costs: one example, and many candidates of one request, read once or read for each of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auto_research.layers.towers import forward_flops, parameters_of
from auto_research.tasks.base import Batch
from auto_research.tasks.click import ClickTask


def scoring_cost(build: Callable[[], nn.Module], sample: Batch) -> tuple[int, int]:
    """Trainable scalars of what `build` makes and FLOPs of an example of `sample`; the random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        model = build().eval()
    return parameters_of(build), forward_flops(lambda: model.scores(sample)) // len(sample["label"])


def priced(build: Callable[[], nn.Module], sample: Batch) -> Callable[[], nn.Module]:
    """`build`, whose model also tells the FLOPs of an example of `sample` in `logged`."""

    def with_price() -> nn.Module:
        model = build()
        model.logged["flops"] = forward_flops(lambda: model.eval().scores(sample)) / len(sample["label"])
        return model.train()

    return with_price


def one_request(task: ClickTask, candidates: int) -> tuple[Tensor, Tensor]:
    """The test event with the longest history (1,) and `candidates` items (C,); items repeat where they run out."""
    begin, end = (task._tables["flat"][name][task.test] for name in ("begin", "end"))
    return task.test[(end - begin).argmax()][None], torch.arange(candidates) % task.num_items


@dataclass(frozen=True)
class SplitCost:
    """FLOPs of a request once, and of each of its candidates."""

    request: int
    candidate: float

    def amortised(self, candidates: int) -> float:
        """FLOPs of a candidate when its request has `candidates` of them."""
        return self.candidate + self.request / candidates


def split_cost(build: Callable[[], nn.Module], task: ClickTask, candidates: int = 8) -> SplitCost:
    """Of a `RequestScorer`, counted where the work is done: in `request_side`, or in `candidate_scores`.

    The random state stays as it was.
    """
    requests, packed = task.pack(*one_request(task, candidates), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        model = build().eval()
    sides: list[Any] = []
    shared = forward_flops(lambda: sides.append(model.request_side(requests)))
    return SplitCost(shared, forward_flops(lambda: model.candidate_scores(sides[0], packed)) / candidates)


@dataclass(frozen=True)
class RequestCost:
    """Both ways to score C candidates of one request.

    Attributes:
        gap: largest difference of their logits.
        packed_seconds, plain_seconds: median of interleaved rounds; plain is one vectorised pass over C examples.
        packed_flops, plain_flops: of the whole request.
    """

    candidates: int
    gap: float
    packed_seconds: float
    plain_seconds: float
    packed_flops: int
    plain_flops: int

    def __str__(self) -> str:
        return (
            f"{self.candidates} candidates: largest difference {self.gap:.1e}, {1000 * self.packed_seconds:.1f} ms with"
            f" the request read once and {1000 * self.plain_seconds:.1f} ms without,"
            f" FLOPs {self.packed_flops / self.plain_flops - 1:+.0%}"
        )


def measure_requests(
    task: ClickTask, model: nn.Module, device: torch.device, *, candidates: int, rounds: int = 9
) -> RequestCost:
    """Scores the candidates of `one_request` both ways.

    `model` is a `RequestScorer` in eval mode. Batches are made before the clock starts; rounds alternate, so that a
    busy machine slows both; the first round warms up.
    """
    event, items = one_request(task, candidates)
    requests, packed = task.pack(event, items, device)
    plain = task.rows(event.repeat(candidates), device, candidate=items)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "packed": lambda: model.candidate_scores(model.request_side(requests), packed),
        "plain": lambda: model.scores(plain),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        found = {name: way().float() for name, way in ways.items()}
        for _ in range(rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                way().sum().item()  # waits for the device
                times[name].append(time.perf_counter() - started)
    return RequestCost(
        candidates=candidates,
        gap=float((found["packed"] - found["plain"]).abs().max()),
        packed_seconds=statistics.median(times["packed"]),
        plain_seconds=statistics.median(times["plain"]),
        packed_flops=forward_flops(ways["packed"]),
        plain_flops=forward_flops(ways["plain"]),
    )
