"""Next-item recommendation: every position of a sequence trains at once, every item of the catalogue competes.

Batches hold item ids with 0 for padding (item i of the data is i + 1), padded on the left and only as long as their
longest sequence; a model must not depend on how much padding there is. Everything is gathered from flat (CSR) arrays
on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from auto_research.data.sequences import Cases, Ids, Interactions, SequenceSplit, leave_one_out
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, Mean, Ratio, Split, UnitMetric

CUTOFFS_HIT = (5, 10, 50)
CUTOFFS_NDCG = (5, 10)
POOL = 16
"""Batches that are sorted by length together; more means less padding, fewer means more varied batches."""


@dataclass(frozen=True)
class _Ragged:
    """Sequences one after another on the device: sequence r is items[start[r]:stop[r]]."""

    items: Tensor
    start: Tensor
    stop: Tensor

    def last(self, rows: Tensor, length: int) -> Tensor:
        """The last `length` items of each row, as model ids (R, length), padded on the left with 0."""
        index = self.stop[rows, None] + torch.arange(-length, 0, device=rows.device)
        return torch.where(index >= self.start[rows, None], self.items[index.clamp(min=0)] + 1, 0)


class NextItem:
    """Predict the item that follows, trained at all positions and evaluated against the whole catalogue.

    Training: one epoch visits every event but a user's first once as a target. A sequence longer than
    `max_length` + 1 is cut into windows at a place that is drawn anew each epoch. Rows of similar length share a
    batch. Batches are `{"sequence": (B, T), "target": (B, T), "user": (B,)}` with T <= max_length; `target[b, t]`
    follows `sequence[b, t]`, and 0 means nothing to predict.

    Evaluation: the model's `scores(batch) -> (B, num_items + 1)` rank all items except those of the user's history
    (the target is always a candidate, should it occur there). The batch is `{"sequence": (B, T), "history": (B, H),
    "user": (B,)}`: the last `max_length` events for sequence models, and the whole history for others. Ties are
    broken as `tasks.metrics` says. Units are users.

    Slices: `/cold` are targets with at most `cold_at_most` training events; `/tail` are targets outside the
    `head` share of most popular items; `/short` are cases whose history is in the shortest quarter.

    Attributes:
        num_items: items of the catalogue; ids run to `num_items`.
        item_counts: (num_items + 1,) int64 training events of each id.
    """

    name = "next-item"
    primary = "ndcg@10"
    lower_is_better: frozenset[str] = frozenset()

    def __init__(
        self,
        split: SequenceSplit,
        max_length: int = 50,
        *,
        cold_at_most: int = 3,
        head: float = 0.2,
        evaluation_batch: int = 128,
    ) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.split, self.max_length = split, max_length
        self.num_items = split.num_items
        self.cold_at_most, self.evaluation_batch = cold_at_most, evaluation_batch
        self.item_counts = torch.from_numpy(np.bincount(split.items + 1, minlength=self.num_items + 1))
        self.head = metrics.popularity_head(self.item_counts[1:], head)
        self.head = torch.cat([torch.zeros(1, dtype=torch.bool), self.head])
        self._on_device: dict[tuple[str, torch.device], _Ragged] = {}

    # -- training -----------------------------------------------------------------------------------------------

    def _ragged(self, name: str, items: Ids, offsets: Ids, device: torch.device) -> _Ragged:
        if (name, device) not in self._on_device:
            bounds = torch.from_numpy(offsets).to(device)
            flat = torch.from_numpy(items).to(device)
            if not len(flat):
                flat = flat.new_zeros(1)  # so that an all-padding row has something to index
            self._on_device[name, device] = _Ragged(flat, bounds[:-1], bounds[1:])
        return self._on_device[name, device]

    def windows(self, generator: np.random.Generator) -> tuple[Ids, Ids, Ids]:
        """One epoch's rows: user (W,), flat index just past the row's last target (W,), number of targets (W,)."""
        begin, end = self.split.offsets[:-1], self.split.offsets[1:]
        targets = np.maximum(end - begin - 1, 0)
        # The last window of a long sequence holds 1..max_length targets, the first one what remains.
        latest = generator.integers(1, self.max_length + 1, len(targets))
        latest = np.where(targets > self.max_length, latest, targets)
        count = (targets > 0) + -(-(targets - latest) // self.max_length)
        user = np.repeat(np.arange(len(targets)), count)
        nth = np.arange(len(user)) - np.repeat(np.cumsum(count) - count, count)
        left = np.where(nth == 0, targets[user], targets[user] - latest[user] - (nth - 1) * self.max_length)
        length = np.where(nth == 0, latest[user], np.minimum(left, self.max_length))
        return user, begin[user] + 1 + left, length

    def epoch(self, generator: np.random.Generator, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Batches that visit every training target once."""
        user, stop, length = self.windows(generator)
        order = generator.permutation(len(user))
        pool = np.arange(len(order)) // (POOL * batch_size)
        order = order[np.lexsort((length[order], pool))]
        events = self._ragged("train", self.split.items, self.split.offsets, device)
        firsts = np.arange(0, len(order), batch_size)
        # One transfer an epoch; a batch then is slices and gathers on the device.
        rows_user, rows_stop, rows_length = (
            torch.from_numpy(column[order]).to(device) for column in (user, stop, length)
        )
        rows = _Ragged(events.items, rows_stop - rows_length - 1, rows_stop)
        for first in generator.permutation(firsts).tolist():
            last = min(first + batch_size, len(order))
            longest = int(length[order[first:last]].max())
            picked = torch.arange(first, last, device=device)
            window = rows.last(picked, longest + 1)
            sequence = window[:, :-1]
            target = window[:, 1:].where(sequence > 0, 0)
            yield {"sequence": sequence.contiguous(), "target": target, "user": rows_user[first:last]}

    def steps_per_epoch(self, batch_size: int) -> int:
        """Updates that visit every training target once (a few more where long sequences are cut anew)."""
        targets = np.maximum(np.diff(self.split.offsets) - 1, 0)
        return int(-(-(-(-targets // self.max_length)).sum() // batch_size))

    @property
    def training_targets(self) -> int:
        """Number of (history, next item) pairs of one epoch."""
        return int(np.maximum(np.diff(self.split.offsets) - 1, 0).sum())

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless batches, epoch after epoch."""
        if not self.training_targets:
            raise ValueError("no training sequence has two events, so there is nothing to predict")
        generator = np.random.default_rng(seed)
        while True:
            yield from self.epoch(generator, batch_size, device)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _cases(self, split: Split) -> Cases:
        return self.split.valid if split == "validation" else self.split.test

    def cases(self, split: Split, device: torch.device) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Batches of a held-out split with their targets (B,), and the index (B,) of each case in the split.

        Cases without a target are left out; the longest histories come first.
        """
        cases = self._cases(split)
        length = np.diff(cases.offsets)
        wanted = np.flatnonzero(cases.target >= 0)
        order = wanted[np.argsort(-length[wanted], kind="stable")]
        events = self._ragged(split, cases.items, cases.offsets, device)
        target, user = (torch.from_numpy(column).to(device) for column in (cases.target + 1, cases.user))
        for first in range(0, len(order), self.evaluation_batch):
            chosen = order[first : first + self.evaluation_batch]
            rows = torch.from_numpy(chosen).to(device)
            history = events.last(rows, max(1, int(length[chosen[0]])))
            batch = {"sequence": history[:, -self.max_length :], "history": history, "user": user[rows]}
            yield batch, target[rows], rows

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Full-catalogue ranking metrics of `model` on a held-out split."""
        scorer: Any = model
        training = model.training
        model.eval()
        ranks, lists, places = [], [], []
        for batch, target, rows in self.cases(split, device):
            scores: Tensor = scorer.scores(batch).float()
            expected = (len(target), self.num_items + 1)
            if scores.shape != expected:
                raise ValueError(f"scores must be (B, num_items + 1) = {expected}, got {tuple(scores.shape)}")
            # Padding (id 0) fills the history up to a rectangle, so it is excluded along with it.
            seen = torch.cat([torch.zeros_like(target)[:, None], batch["history"]], 1)
            ranks.append(metrics.rank_of_target(scores, target, seen))
            best = metrics.exclude_items(scores, seen).topk(min(10, self.num_items), dim=1)
            lists.append(best.indices.where(best.values > -torch.inf, 0))
            places.append(rows)
        model.train(training)
        if not ranks:
            raise ValueError(f"the {split} split has no case with a target")
        case = torch.cat(places).cpu()
        order = case.argsort()
        return self._summarise(split, case[order], torch.cat(ranks).cpu()[order], torch.cat(lists).cpu()[order])

    def _summarise(self, split: Split, case: Tensor, rank: Tensor, top: Tensor) -> Evaluation:
        """Shapes: case, rank (R,); top (R, 10), the recommended ids, 0 = none."""
        cases = self._cases(split)
        chosen = case.numpy()
        target = torch.from_numpy(cases.target[chosen] + 1)
        length = torch.from_numpy(np.diff(cases.offsets)[chosen])
        users, unit = np.unique(cases.user[chosen], return_inverse=True)
        per_case = {f"hr@{k}": metrics.hit_rate(rank, k) for k in CUTOFFS_HIT}
        per_case |= {f"ndcg@{k}": metrics.ndcg(rank, k) for k in CUTOFFS_NDCG}
        per_case["mrr"] = metrics.reciprocal_rank(rank)
        slices = {
            "cold": self.item_counts[target] <= self.cold_at_most,
            "tail": ~self.head[target],
            "short": length <= length.double().quantile(0.25),
        }
        for name, inside in slices.items():
            for metric in ("hr@10", "ndcg@10", "mrr"):
                per_case[f"{metric}/{name}"] = per_case[metric].where(inside, torch.nan)
        filled = top > 0
        return Evaluation(
            units=len(users),
            metrics={name: _per_unit(value, unit, len(users)) for name, value in per_case.items()},
            diagnostics={
                "cases": float(len(case)),
                "head share@10": float(self.head[top].sum() / filled.sum()),
                "head share of targets": float(self.head[target].float().mean()),
                "coverage@10": len(top[filled].unique()) / self.num_items,
                **{f"cases/{name}": float(inside.sum()) for name, inside in slices.items()},
            },
        )


def sequence_split(data: Interactions | SequenceSplit, *, users: int | None = None, seed: int = 0) -> SequenceSplit:
    """The leave-one-out split of a data set with interactions; a published split is taken as it is.

    Users with fewer than five events are left out. `users` draws that many of them; it does nothing to a published
    split, whose cases belong together.
    """
    if isinstance(data, SequenceSplit):
        return data
    data = data.with_min_events(5)
    return leave_one_out(data if users is None else data.subset_users(users, seed))


def _per_unit(values: Tensor, unit: NDArray[np.int64], units: int) -> UnitMetric:
    """The mean over cases, resampled by user: a plain mean where each user has one case."""
    if units == len(values):
        return Mean(values[torch.from_numpy(np.argsort(unit))])
    index = torch.from_numpy(unit)
    present = ~values.isnan()
    zeros = torch.zeros(units, dtype=torch.float64)
    return Ratio(
        zeros.index_add(0, index, values.nan_to_num(0.0).double()), zeros.index_add(0, index, present.double())
    )
