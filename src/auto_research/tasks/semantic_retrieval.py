"""Generative retrieval: spell the id of the next item, judged against the whole catalogue.

The data are those of `NextItem`; two things differ. Training visits every (prefix, next item) pair as its own row,
since a bidirectional encoder must not see beyond the prefix. And a model may answer with a list of items
(`recommend(batch, top) -> (B, top)`, from a beam search) instead of scores of the whole catalogue; both kinds are
judged by the same rule, so that score models stand beside generators in one comparison.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from auto_research.data.sequences import Cases, Ids, SequenceSplit
from auto_research.layers.encoder_decoder import SemanticIdTransformer
from auto_research.tasks.base import Evaluation, Split
from auto_research.tasks.next_item import NextItem

LIST_METRICS = ("hr@5", "hr@10", "ndcg@5", "ndcg@10", "hr@10/cold", "ndcg@10/cold", "hr@10/tail", "ndcg@10/tail")


def fewer_cases(cases: Cases, count: int, seed: int = 0) -> Cases:
    """The same cases, of which only `count` (drawn at random, or all if there are no more) keep their target."""
    candidates = np.flatnonzero(cases.target >= 0)
    drawn = np.random.default_rng(seed).permutation(candidates)[:count]
    target = np.full_like(cases.target, -1)
    target[drawn] = cases.target[drawn]
    return replace(cases, target=target)


class SemanticRetrieval(NextItem):
    """Predict the item after a prefix, by generating its id or by scoring all items.

    Batches: `{"sequence": (B, T), "target": (B, T), "user": (B,)}` as in `NextItem`, one row for each training event
    but a user's first; the row's last target is that event, and the sequence its latest `max_length` predecessors.

    Evaluation: HR and NDCG at 5 and 10 over the full catalogue, with the history removed from the list (the target
    stays a candidate, as in `NextItem`). An item that a list does not hold ranks behind all others. On test the
    diagnostics hold what concerns ids: prefix uniqueness, usage of each level, and the share of invalid ids among the
    first 10 of a beam that no trie constrains.

    Args:
        validation_cases, test_cases: how many cases to judge, drawn once with a fixed seed; None: all.
        list_length: items asked of `recommend`; room for the history that is then removed.
        free_cases: cases on which the invalid-id rate is measured.
    """

    name = "semantic-retrieval"

    def __init__(
        self,
        split: SequenceSplit,
        max_length: int = 20,
        *,
        validation_cases: int | None = None,
        test_cases: int | None = None,
        list_length: int = 50,
        free_cases: int = 256,
        evaluation_batch: int = 256,
    ) -> None:
        if validation_cases is not None:
            split = replace(split, valid=fewer_cases(split.valid, validation_cases))
        if test_cases is not None:
            split = replace(split, test=fewer_cases(split.test, test_cases))
        super().__init__(split, max_length, head=0.1, evaluation_batch=evaluation_batch)
        self.list_length, self.free_cases = list_length, free_cases

    # -- training -----------------------------------------------------------------------------------------------

    def windows(self, generator: np.random.Generator) -> tuple[Ids, Ids, Ids]:
        """One row an event that has a predecessor: user (W,), flat index just past it (W,), predecessors kept (W,)."""
        begin, end = self.split.offsets[:-1], self.split.offsets[1:]
        user = np.repeat(np.arange(len(begin)), end - begin)
        place = np.arange(len(user)) - begin[user]
        event = np.flatnonzero(place > 0)
        return user[event], event + 1, np.minimum(place[event], self.max_length)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Updates that visit every (prefix, next item) pair once."""
        return -(-self.training_targets // batch_size)

    # -- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of a model with `recommend(batch, top)` or `scores(batch)` on a held-out split."""
        if hasattr(model, "recommend"):
            evaluation = self._evaluate_lists(model, split, device)
        else:
            evaluation = super().evaluate(model, split, device)
        kept = {name: evaluation.metrics[name] for name in LIST_METRICS}
        diagnostics = dict(evaluation.diagnostics)
        if split == "test" and isinstance(model, SemanticIdTransformer):
            diagnostics |= model.ids.report()
            diagnostics["invalid ids@10 without trie"] = self.invalid_rate(model, split, device)
        return replace(evaluation, metrics=kept, diagnostics=diagnostics)

    def _evaluate_lists(self, model: Any, split: Split, device: torch.device) -> Evaluation:
        ranks, lists, places = [], [], []
        for batch, target, rows in self.cases(split, device):
            recommended = model.recommend(batch, self.list_length)
            hit = without_history(recommended, batch["history"], target) == target[:, None]
            ranks.append(torch.where(hit.any(1), hit.int().argmax(1) + 1, self.num_items))
            # What is shown: the target earns no place in it that its history denies.
            lists.append(without_history(recommended, batch["history"])[:, :10])
            places.append(rows)
        if not ranks:
            raise ValueError(f"the {split} split has no case with a target")
        case = torch.cat(places).cpu()
        order = case.argsort()
        return self._summarise(split, case[order], torch.cat(ranks).cpu()[order], torch.cat(lists).cpu()[order])

    def invalid_rate(self, model: SemanticIdTransformer, split: Split, device: torch.device, top: int = 10) -> float:
        """Share of the first `top` sequences of an unconstrained beam that are the id of no item."""
        cases = self.split.valid if split == "validation" else self.split.test
        some = fewer_cases(cases, self.free_cases)
        sample = NextItem(
            replace(self.split, valid=some, test=some), self.max_length, evaluation_batch=self.evaluation_batch
        )
        invalid = total = 0
        for batch, _, _ in sample.cases(split, device):
            free = model.beams(batch, max(top, model.config.beams), constrained=False)
            leaves = model.trie.find(free.tokens[:, :top])
            invalid += int((leaves < 0).sum())
            total += leaves.numel()
        return invalid / total


def without_history(listed: Tensor, history: Tensor, target: Tensor | None = None) -> Tensor:
    """Drops the items of each history from its list and closes the gaps: listed (B, N), history (B, H), ids + 1.

    Returns (B, N) with 0 past the end. The target (B,), where given, stays though the history holds it.
    """
    drop = (listed[:, :, None] == history[:, None, :]).any(-1)
    if target is not None:
        drop &= listed != target[:, None]
    drop |= listed == 0
    order = drop.int().argsort(dim=1, stable=True)
    return listed.masked_fill(drop, 0).gather(1, order)
