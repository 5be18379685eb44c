"""Ranking by request: one history, several candidates, and for each candidate several reactions to predict.

A *request* is up to `width` consecutive events of a user within one session (and one part of the split): the exposures
that were shown together. Its history is the `history` events before it. All candidates of a request are scored from the
same history, and what the user did at one of them is unknown at the others.

Letters: B requests, n history events, m candidates, E events.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.heads import binary_task_losses
from auto_research.layers.longer import gap_buckets
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, Evaluation, Mean, PooledAUC, Ratio, Split, UnitMetric
from auto_research.tasks.event_log import ACTIONS, LIKED, LOVED, EventLog, since

OUTCOMES = {"like": LIKED, "love": LOVED}
REQUESTS_BACK = 32
"""Requests of the past that are told apart; older ones share the last code."""


HISTORY_COLUMNS = ("item", "action", "back", "wait", "age")


class RequestRanking:
    """Predict whether each candidate of a request will be liked and loved.

    Batches: `item`, `action` (B, n) shifted items and actions of the history, padded with 0 on the left; `back` (B, n)
    how many requests ago each was shown, `wait` (B, n) code of the time that passed before its request (0 for none),
    `age` (B, n) seconds before the request; `candidate` (B, m) shifted items, padded with 0 on the right, `wait_now`
    (B,). What happened at the candidates is `label` (B, m, 2), like and love, NaN at padding, and `outcome` (B, m), the
    actions themselves. A model's `scores(batch)`, logits (B, m, 2) of like and love, must not read these two.

    Metrics: areas under the ROC curve over all candidates and within users, and log-loss, of each outcome.
    """

    name = "request ranking"
    primary = "like auc"
    lower_is_better = frozenset(f"{name} log_loss" for name in OUTCOMES)

    def __init__(self, log: EventLog, *, history: int = 32, width: int = 8) -> None:
        self.log, self.history, self.width = log, history, width
        fresh = (log.place == 0) | torch.cat([torch.tensor([True]), log.part[1:] != log.part[:-1]])
        self.begins = since(fresh) % width == 0
        self.first = torch.nonzero(self.begins).squeeze(1)
        self.count = torch.diff(self.first, append=torch.tensor([len(self.begins)]))
        number = self.begins.long().cumsum(0) - 1  # request of each event
        seconds = log.time[self.first] - log.time[(self.first - 1).clamp(min=0)]
        own_first = self.first == log.begin[self.first]
        wait = torch.where(own_first, 0, gap_buckets(seconds) + 1)
        self._columns = {
            "user": log.user,
            "item": log.item + 1,
            "action": log.action,
            "request": number,
            "wait": wait[number],
            "time": log.time,
            "begin": log.begin,
        }
        self._on_device: dict[torch.device, Batch] = {}
        part = log.part[self.first]
        self.requests = {
            name: torch.nonzero(part == p).squeeze(1) for p, name in enumerate(("train", "validation", "test"))
        }

    def _on(self, device: torch.device) -> Batch:
        if device not in self._on_device:
            flat = self._columns | {"first": self.first, "count": self.count}
            self._on_device[device] = {name: value.to(device) for name, value in flat.items()}
        return self._on_device[device]

    def rows(self, request: Tensor, device: torch.device) -> Batch:
        """Requests (B,) as a batch; see the class."""
        flat = self._on(device)
        request = request.to(device)
        first = flat["first"][request]
        event = first[:, None] + torch.arange(-self.history, 0, device=device)
        real = event >= flat["begin"][first, None]
        event = event.clamp(min=0)
        column = torch.arange(self.width, device=device)
        shown = column < flat["count"][request, None]
        candidate = (first[:, None] + column).clamp(max=len(flat["item"]) - 1)
        action = flat["action"][candidate]
        label = torch.stack([action >= least for least in OUTCOMES.values()], -1).float()
        return {
            "item": torch.where(real, flat["item"][event], 0),
            "action": torch.where(real, flat["action"][event], 0),
            "back": torch.where(real, (request[:, None] - flat["request"][event]).clamp(max=REQUESTS_BACK), 0),
            "wait": torch.where(real, flat["wait"][event], 0),
            "age": torch.where(real, flat["time"][first, None] - flat["time"][event], 0),
            "candidate": torch.where(shown, flat["item"][candidate], 0),
            "wait_now": flat["wait"][first],
            "outcome": torch.where(shown, action, 0),
            "label": label.masked_fill(~shown[..., None], torch.nan),
        }

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Endless batches of training requests; every pass has its own order."""
        generator = torch.Generator().manual_seed(seed)
        requests = self.requests["train"]
        while True:
            for chosen in requests[torch.randperm(len(requests), generator=generator)].split(batch_size):
                yield self.rows(chosen, device)

    def steps_per_pass(self, batch_size: int) -> int:
        """Updates that visit every training request once."""
        return -(-len(self.requests["train"]) // batch_size)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        """Metrics of `model.scores` on every candidate of a split's requests. Units are users."""
        training = model.training
        model.eval()
        scores, labels, users = [], [], []
        for chosen in self.requests[split].split(512):
            batch = self.rows(chosen, device)
            shown = batch["candidate"] > 0
            scores.append(model.scores(batch)[shown].float().cpu())
            labels.append(batch["label"][shown].cpu())
            owner = self.log.user[self.first[chosen]]
            users.append(owner[:, None].expand(-1, self.width)[shown.cpu()])
        model.train(training)
        score, label, user = torch.cat(scores), torch.cat(labels), torch.cat(users)
        found: dict[str, UnitMetric] = {}
        for k, name in enumerate(OUTCOMES):
            found |= self._judge(name, score[:, k], label[:, k], user)
        return Evaluation(self.log.num_users, found, {"requests": float(len(self.requests[split]))})

    def _judge(self, name: str, score: Tensor, label: Tensor, user: Tensor) -> dict[str, UnitMetric]:
        zeros = torch.zeros(self.log.num_users, dtype=torch.float64)
        areas = torch.full_like(zeros, torch.nan)
        values = metrics.user_auc(score, label, user)
        areas[: len(values)] = values
        loss = zeros.index_add(0, user, metrics.log_loss(score, label).double())
        count = zeros.index_add(0, user, torch.ones_like(score, dtype=torch.float64))
        return {
            f"{name} auc": PooledAUC(score, label, user),
            f"{name} user_auc": Mean(areas),
            f"{name} log_loss": Ratio(loss, count),
        }


def outcome_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Mean over outcomes of the binary cross-entropy of logits (B, m, 2) against labels (B, m, 2), NaN at padding."""
    by_outcome = (dict(zip(OUTCOMES, part.unbind(-1), strict=True)) for part in (logits, label))
    return torch.stack([*binary_task_losses(*by_outcome).values()]).mean()


def candidates_apart(batch: Batch) -> Batch:
    """Every candidate as a request of its own: (B, m) candidates become (B·m, 1), those of a request adjacent."""
    count = batch["candidate"].shape[1]
    own = ("candidate", "outcome", "label")
    return {
        name: value.flatten(0, 1)[:, None] if name in own else value.repeat_interleave(count, dim=0)
        for name, value in batch.items()
    }


def pad_requests(batch: Batch, by: int = 2) -> Batch:
    """The batch with `by` more columns of padding before its histories (B, n)."""
    return {name: F.pad(value, (by, 0)) if name in HISTORY_COLUMNS else value for name, value in batch.items()}


def change_outcomes(batch: Batch) -> Batch:
    """The batch with other reactions at the candidates: all that is in it and later than the scores."""
    outcome = batch["outcome"]
    return {**batch, "label": 1 - batch["label"], "outcome": (ACTIONS - outcome).where(outcome > 0, 0)}
