"""When to run an expensive model on a stream of events: intent drift against an anchor, and the cache it fills.

A sliding window over an event stream is a distribution P and a set Z over discrete labels. It is compared with the
window stored when the model last ran (the anchor), not with the previous event:

    drift = l1 |H(P_t) - H(P_a)| + l2 (1 - Jaccard(Z_t, Z_a)) + l3 JS(P_t, P_a),   run if drift > threshold.

All logarithms are natural, so JS <= ln 2 and the entropy gap is unbounded. Streams run side by side: only time is a
loop, because the anchor depends on earlier decisions.

Letters: U streams, T events, L labels. `valid` (U, T) marks real events, which stand first in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRIFT_WEIGHTS = (0.4, 0.3, 0.3)
DRIFT_THRESHOLD = 0.8


def window_counts(labels: Tensor, window: int) -> Tensor:
    """Label counts of the last `window` events up to and including each event: (U, T, L) 0/1 -> (U, T, L) float32."""
    if window < 1:
        raise ValueError(f"a window holds at least one event, got {window}")
    total = labels.float().cumsum(1)
    total[:, window:] -= total[:, :-window].clone()
    return total


def distribution(counts: Tensor) -> Tensor:
    """Counts (..., L) as probabilities; no label at all stays all zeros."""
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def entropy(p: Tensor) -> Tensor:
    """Natural entropy (...) of distributions (..., L), with 0 log 0 = 0."""
    return -torch.xlogy(p, p).sum(-1)


def jaccard(one: Tensor, two: Tensor) -> Tensor:
    """|A and B| / |A or B| (...) of the supports of (..., L); two empty sets are equal."""
    a, b = one > 0, two > 0
    union = (a | b).sum(-1)
    return torch.where(union > 0, (a & b).sum(-1) / union.clamp(min=1), 1.0)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence (...) in nats, between 0 and ln 2."""
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)


def intent_drift(now: Tensor, anchor: Tensor, weights: tuple[float, float, float] = DRIFT_WEIGHTS) -> Tensor:
    """Drift score (...) of window distributions (..., L) against their anchors (..., L)."""
    gap = (entropy(now) - entropy(anchor)).abs()
    return weights[0] * gap + weights[1] * (1 - jaccard(now, anchor)) + weights[2] * jensen_shannon(now, anchor)


def drift_calls(
    windows: Tensor,
    valid: Tensor,
    *,
    threshold: float = DRIFT_THRESHOLD,
    weights: tuple[float, float, float] = DRIFT_WEIGHTS,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Where the model runs (U, T) bool, and the drift that each event saw (U, T) before the decision.

    Args:
        windows: (U, T, L) label distributions.
        allowed: (U, T) bool, the resource gate: a closed gate means that the cached answer is reused and the anchor
            stays. An empty cache runs in any case.
    """
    ran = torch.zeros_like(valid)
    drift = torch.zeros(valid.shape, device=windows.device)
    anchor = torch.zeros_like(windows[:, 0])
    empty = torch.ones(len(windows), dtype=torch.bool, device=windows.device)
    for t in range(windows.shape[1]):
        now = windows[:, t]
        score = torch.where(empty, 0.0, intent_drift(now, anchor, weights))
        wants = score > threshold
        if allowed is not None:
            wants = wants & allowed[:, t]
        run = valid[:, t] & (empty | wants)
        anchor = torch.where(run[:, None], now, anchor)
        empty = empty & ~run
        ran[:, t], drift[:, t] = run, torch.where(valid[:, t], score, 0.0)
    return ran, drift


def random_calls(valid: Tensor, calls: int, generator: torch.Generator) -> Tensor:
    """(U, T) bool: exactly `calls` events, the first of each stream among them, the others drawn uniformly.

    Raises ValueError when there are more streams than calls or fewer events.
    """
    first = _first(valid)
    _check_calls(valid, first, calls)
    rest = (valid & ~first).flatten().nonzero().flatten()
    order = torch.randperm(len(rest), generator=generator).to(rest.device)
    chosen = first.flatten().clone()
    chosen[rest[order[: calls - int(first.sum())]]] = True
    return chosen.view_as(valid)


def periodic_calls(valid: Tensor, calls: int) -> Tensor:
    """(U, T) bool: every k-th event, with exactly `calls` calls that lie as evenly as that number allows.

    A stream of length T with n calls runs at the events ceil(j T / n), j = 0..n-1, its first among them. Each further
    call goes to the stream whose calls lie furthest apart, so that k = T / n is as equal as can be over streams. One k
    for all streams would not do: few calls would all fall on the ends of the longest streams, where they serve nothing.

    Raises ValueError when there are more streams than calls or fewer events.
    """
    first = _first(valid)
    _check_calls(valid, first, calls)
    length, longest = valid.sum(1), valid.shape[1]
    taken = torch.arange(1, longest, device=valid.device)
    apart = torch.where(taken < length[:, None], length[:, None].double() / taken, 0.0)  # (U, T - 1)
    widest = apart.flatten().argsort(descending=True, stable=True)[: calls - int(first.sum())]
    count = 1 + torch.bincount(widest // max(1, longest - 1), minlength=len(valid))
    turn = torch.arange(longest, device=valid.device) * count[:, None] // length.clamp(min=1)[:, None]
    ran = valid.clone()
    ran[:, 1:] &= turn[:, 1:] > turn[:, :-1]
    return ran


def _first(valid: Tensor) -> Tensor:
    return valid & (valid.cumsum(1) == 1)


def _check_calls(valid: Tensor, first: Tensor, calls: int) -> None:
    if not int(first.sum()) <= calls <= int(valid.sum()):
        raise ValueError(f"{calls} calls do not fit {int(first.sum())} streams with {int(valid.sum())} events")


def cached_source(ran: Tensor) -> Tensor:
    """(U, T) int64: at each event, the event whose answer the cache serves (the latest that ran, itself included)."""
    position = torch.arange(ran.shape[1], device=ran.device).expand_as(ran)
    return torch.where(ran, position, -1).cummax(1).values
