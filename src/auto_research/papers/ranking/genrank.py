"""GenRank: Towards Large-scale Generative Ranking (arXiv:2505.04180, Xiaohongshu).

Official code: none.

The idea: generative ranking predicts a user's actions in sequence. Instead of interleaving item and action tokens, an
item is the context of its action, so that one token an exposure is enough; a candidate carries a mask in the place of
its action; and fixed linear biases with summed embeddings replace learned biases for every pair of positions.

Differs from the paper: MovieLens ratings are the actions; requests are cut from sessions; tables and sizes are tiny;
PPNet, SIM and PLE, which help every paradigm alike, are left out.

Letters: B requests, n history events, m candidates, T tokens, d width, H heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from auto_research.layers.attention import KVCache, alibi
from auto_research.layers.heads import TaskHeads
from auto_research.layers.hstu import HSTUBlock, RelativeBias
from auto_research.layers.longer import GAPS
from auto_research.layers.towers import MLP, TargetAttention, embedding_table
from auto_research.layers.transformer import BlockCache, TransformerEncoder
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.scaling import scaling_curve
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, fact
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.event_log import EventLog, Exposures, miniature
from auto_research.tasks.request_ranking import (
    OUTCOMES,
    REQUESTS_BACK,
    RequestRanking,
    change_outcomes,
    outcome_loss,
    pad_requests,
)
from auto_research.tasks.timing import now

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class GenRankConfig:
    """Sizes and switches; the defaults are GenRank.

    Attributes:
        width, layers, heads: d, L, H.
        history: longest history n.
        tokens: `action` is one token an exposure, `interleaved` an item token and an action token.
        bias: `alibi` is softmax attention with fixed linear biases and the summed embeddings of position, request and
            time; `learned` the same without the linear biases; `relative` is HSTU: pointwise attention with a learned
            bias over position and time, without those embeddings.
        request_index, content: whether the embedding of the request, and the item's genres and year, take part.
        history_loss: whether each event of the history is predicted, too, from what came before it.
        history_mask: `causal`, or `full` in which events of the history see later ones.
        candidates: `apart`, or `visible` in which a candidate sees those before it.
        activation: of the feed-forward networks, four times as wide as the model (open in the paper).
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    history: int = 32
    tokens: Literal["action", "interleaved"] = "action"
    bias: Literal["alibi", "learned", "relative"] = "alibi"
    request_index: bool = True
    content: bool = True
    history_loss: bool = False
    history_mask: Literal["causal", "full"] = "causal"
    candidates: Literal["apart", "visible"] = "apart"
    activation: Literal["gelu", "swiglu"] = "gelu"

    @property
    def parts(self) -> int:
        """Tokens of an exposure in the history."""
        return 2 if self.tokens == "interleaved" else 1


@dataclass(frozen=True)
class Layout:
    """Where tokens stand, the same for every request of a batch.

    Shapes (T,) each: exposure, 0 oldest of the history and n for every candidate; part, 0 for what asks and 1 for an
    action token; pack, -1 in the history, else which candidate (or masked copy of an event) a token belongs to.
    `parts` is how many tokens an exposure has.
    """

    exposure: Tensor
    part: Tensor
    pack: Tensor
    parts: int

    @classmethod
    def of(cls, history: int, candidates: int, config: GenRankConfig, device: torch.device, *, acting: bool) -> Layout:
        """Tokens of `history` events, then of masked copies of them if they are predicted, then of the candidates.

        `acting` gives candidates an action token of their own, which only interleaved training has.
        """
        parts = config.parts
        events = torch.arange(history, device=device)
        exposure, pack = [events.repeat_interleave(parts)], [torch.full((history * parts,), -1, device=device)]
        part = [torch.arange(parts, device=device).repeat(history)]
        copies = events if config.history_loss else events[:0]
        asked = torch.cat([copies, torch.full((candidates,), history, device=device)])
        each = parts if acting else 1
        exposure.append(asked.repeat_interleave(each))
        pack.append(torch.arange(len(asked), device=device).repeat_interleave(each))
        part.append(torch.arange(each, device=device).repeat(len(asked)))
        return cls(torch.cat(exposure), torch.cat(part), torch.cat(pack), parts)

    @property
    def position(self) -> Tensor:
        """Place in the sequence, shared by all candidates of a request, (T,)."""
        return self.exposure * self.parts + self.part

    def allowed(self, config: GenRankConfig) -> Tensor:
        """Which token (row) may see which (column), (T, T) bool.

        History sees history up to itself; what asks sees the history before its exposure, and its own pack up to
        itself; no candidate sees another.
        """
        asked = self.pack >= 0
        before = self.position[None, :] <= self.position[:, None]
        if config.history_mask == "full":
            before = before | (~asked[:, None] & ~asked)
        earlier = self.exposure[None, :] < self.exposure[:, None]
        history = ~asked & torch.where(asked[:, None], earlier, before)
        same = (self.pack[None, :] == self.pack[:, None]) & asked
        pack = same & (self.part[None, :] <= self.part[:, None])
        if config.candidates == "visible":
            shown = asked & (self.exposure == self.exposure.max())
            pack = pack | (shown & shown[:, None] & (self.pack[None, :] < self.pack[:, None]))
        return history | pack


@dataclass
class RequestSide:
    """Keys and values of a request's history in every layer, and which of its events are real (B, n)."""

    cache: list[BlockCache]
    valid: Tensor


class GenRank(nn.Module):
    """The sequence model in all of its forms, with a head for each outcome."""

    def __init__(self, log: EventLog, config: GenRankConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.exposures = Exposures(log, width, content=config.content)
        # M; where actions have tokens of their own, an item token asks as it is.
        self.mask_action = nn.Parameter(torch.randn(width) * 0.5 / width**0.5) if config.parts == 1 else None
        self.summed = config.bias != "relative"
        if self.summed:
            self.positions = embedding_table(config.parts * (config.history + 1), width)
            self.requests = embedding_table(REQUESTS_BACK + 1, width) if config.request_index else None
            self.waits = embedding_table(GAPS + 1, width)
            self.encoder = TransformerEncoder(
                width, config.heads, 4 * width, config.layers, activation=config.activation
            )
        else:
            length = config.parts * (config.history + 1)
            self.bias = RelativeBias(config.heads, length)
            self.blocks = nn.ModuleList(HSTUBlock(width, config.heads, length) for _ in range(config.layers))
            self.norm = nn.LayerNorm(width)
        self.heads = TaskHeads(width, dict.fromkeys(OUTCOMES, 1), hidden=width)
        self.logged: dict[str, float] = {}

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _context(self, layout: Layout, batch: Batch, index: Tensor) -> Tensor:
        """Sum of position, request and time embeddings of the tokens `index` of a layout: (B, tokens, d)."""
        history = batch["item"].shape[1]
        # Positions count back from the candidates, so that padding on the left changes nothing.
        back = history * layout.parts - layout.position[index]
        found = self.positions(back.clamp(0, self.positions.num_embeddings - 1))
        exposure = layout.exposure[index]
        now = torch.zeros_like(batch["wait_now"])[:, None]
        if self.requests is not None:
            found = found + self.requests(torch.cat([batch["back"], now], 1)[:, exposure])
        return found + self.waits(torch.cat([batch["wait"], batch["wait_now"][:, None]], 1)[:, exposure])

    def _history(self, batch: Batch) -> Tensor:
        """History tokens without context: (B, n, d), or (B, 2n, d) with items and actions in turn."""
        item, action = self.exposures(batch["item"]), self.exposures.action(batch["action"])
        if self.config.tokens == "action":
            return item + action
        return torch.stack([item, action], 2).flatten(1, 2)

    def _asked(self, item: Tensor, action: Tensor | None) -> Tensor:
        """What is asked about (B, q) without context: φ(x) + M; interleaved φ(x), with ψ(a) in turn where given."""
        asking = self.exposures(item)
        if self.mask_action is not None:
            return asking + self.mask_action
        return asking if action is None else torch.stack([asking, self.exposures.action(action)], 2).flatten(1, 2)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _states(self, batch: Batch, *, acting: bool) -> Tensor:
        """States of everything that is asked about, (B, q, d): copies of the history first, then the candidates."""
        config = self.config
        layout = Layout.of(
            batch["item"].shape[1], batch["candidate"].shape[1], config, batch["item"].device, acting=acting
        )
        item, action = batch["candidate"], None
        if config.history_loss:
            item = torch.cat([batch["item"], item], 1)
        if acting:
            action = batch["outcome"]  # after its own question, and nobody else sees it
            action = torch.cat([batch["action"], action], 1) if config.history_loss else action
        asked = self._asked(item, action)
        x = torch.cat([self._history(batch), asked], 1)
        valid = torch.cat([self._valid(batch), self._shown(batch, acting)], 1)
        latest = asked.shape[1]
        allowed = layout.allowed(config) & valid[:, None, None, :]
        if self.summed:
            x = x + self._context(layout, batch, torch.arange(len(layout.part), device=x.device))
            x = self.encoder(x, mask=self._biased(layout.position, layout.position, allowed), latest=latest)
        else:
            age = torch.cat([batch["age"], torch.zeros_like(batch["wait_now"])[:, None]], 1)[:, layout.exposure]
            bias = self.bias(layout.position, age)
            for i, block in enumerate(self.blocks):
                x = block(x, allowed, bias, latest=latest if i == config.layers - 1 else None)
            x = self.norm(x)
        return x[:, ::2] if acting else x

    def _biased(self, asking: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
        """The allowed pairs (B, 1, Q, K), with linear biases added under `alibi`."""
        if self.config.bias != "alibi":
            return allowed
        return torch.where(allowed, alibi(asking, keys, self.config.heads), -torch.inf)

    def _valid(self, batch: Batch) -> Tensor:
        """Real tokens of the history (B, n or 2n)."""
        return (batch["item"] > 0).repeat_interleave(self.config.parts, dim=1)

    def _shown(self, batch: Batch, acting: bool) -> Tensor:
        """Real tokens among those that are asked about."""
        shown = batch["candidate"] > 0
        if self.config.history_loss:
            shown = torch.cat([batch["item"] > 0, shown], 1)
        return shown.repeat_interleave(2, dim=1) if acting else shown

    def _logits(self, states: Tensor) -> Tensor:
        return torch.stack([*self.heads(states).values()], -1)

    def scores(self, batch: Batch) -> Tensor:
        """Logits (B, m, 2) of all candidates in one pass; labels are not read."""
        count = batch["candidate"].shape[1]
        return self._logits(self._states(batch, acting=False)[:, -count:])

    def loss(self, batch: Batch) -> Tensor:
        """Mean over outcomes of the binary cross-entropy at the candidates (and at the history, as an ablation)."""
        states = self._states(batch, acting=self.config.parts == 2)
        label = batch["label"]
        if self.config.history_loss:
            done = torch.stack([batch["action"] >= least for least in OUTCOMES.values()], -1).float()
            label = torch.cat([done.masked_fill(batch["item"][..., None] == 0, torch.nan), label], 1)
        return outcome_loss(self._logits(states), label)

    # -- serving ---------------------------------------------------------------------------------------------------

    def request_side(self, batch: Batch) -> RequestSide:
        """Encodes the history once; candidates are scored against its keys and values."""
        if not self.summed or self.config.candidates == "visible":
            raise ValueError("keys and values can be shared under softmax attention with candidates apart only")
        layout = Layout.of(
            batch["item"].shape[1], 0, replace(self.config, history_loss=False), batch["item"].device, acting=False
        )
        cache = self.encoder.new_cache()
        x = self._history(batch) + self._context(
            layout, batch, torch.arange(len(layout.part), device=batch["item"].device)
        )
        valid = self._valid(batch)
        allowed = layout.allowed(self.config) & valid[:, None, None, :]
        self.encoder(x, mask=self._biased(layout.position, layout.position, allowed), cache=cache)
        return RequestSide(cache, valid)

    def candidate_scores(self, side: RequestSide, batch: Batch) -> Tensor:
        """Logits (B, m, 2) of candidates (B, m) against an encoded history, which is left as it was."""
        item, device = batch["candidate"], batch["candidate"].device
        config = replace(self.config, history_loss=False)
        layout = Layout.of(batch["item"].shape[1], item.shape[1], config, device, acting=False)
        own = torch.arange(len(layout.part) - item.shape[1], len(layout.part), device=device)
        x = self._asked(item, None) + self._context(layout, batch, own)
        valid = torch.cat([side.valid, item > 0], 1)
        allowed = layout.allowed(config)[own] & valid[:, None, None, :]
        mask = self._biased(layout.position[own], layout.position, allowed)
        cache = [BlockCache(own=KVCache(c.own.key, c.own.value)) for c in side.cache]
        return self._logits(self.encoder(x, mask=mask, cache=cache))

    def tokens_per_request(self, history: int, candidates: int, *, training: bool) -> int:
        """Tokens of a request, whose square is the number of attention scores of a head."""
        acting = training and self.config.parts == 2
        return len(Layout.of(history, candidates, self.config, torch.device("cpu"), acting=acting).part)


class PointwiseDIN(nn.Module):
    """Baseline: each candidate attends to the same history by target attention, then a tower; same features."""

    def __init__(self, log: EventLog, config: GenRankConfig) -> None:
        super().__init__()
        width = config.width
        self.exposures = Exposures(log, width, content=config.content)
        self.requests, self.waits = embedding_table(REQUESTS_BACK + 1, width), embedding_table(GAPS + 1, width)
        self.attention, self.history = TargetAttention(width), config.history
        self.tower = MLP(4 * width, 4 * width, 2 * width, len(OUTCOMES), activation="prelu")

    def scores(self, batch: Batch) -> Tensor:
        """Logits (B, m, 2)."""
        valid = batch["item"] > 0
        keys = self.exposures(batch["item"]) + self.exposures.action(batch["action"])
        keys = keys + self.requests(batch["back"]) + self.waits(batch["wait"])
        query = self.exposures(batch["candidate"])
        pooled = self.attention.each(query, keys, valid) / self.history
        mean = (keys * valid[..., None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        shared = torch.stack([mean, self.waits(batch["wait_now"])], 1).flatten(1)
        x = torch.cat([query, pooled, shared[:, None].expand(-1, query.shape[1], -1)], -1)
        return self.tower(x.flatten(0, 1)).view(*query.shape[:2], -1).float()

    def loss(self, batch: Batch) -> Tensor:
        """Mean over outcomes of the binary cross-entropy."""
        return outcome_loss(self.scores(batch), batch["label"])


# -- the comparison ------------------------------------------------------------------------------------------------

GENRANK = "genrank"
HSTU = "interleaved hstu"
SOFTMAX = "interleaved softmax"
ACTION_ONLY = "action tokens, hstu biases"
BIASES_ONLY = "interleaved, new biases"
HISTORY_LOSS = "loss at the history"
FULL_MASK = "fully visible history"


def arms(config: GenRankConfig) -> dict[str, tuple[Kind, GenRankConfig]]:
    """The forms of the protocol, the interleaved HSTU (the baseline) first."""
    return {
        HSTU: ("baseline", replace(config, tokens="interleaved", bias="relative")),
        GENRANK: ("method", config),
        SOFTMAX: ("control", replace(config, tokens="interleaved", bias="learned")),
        ACTION_ONLY: ("ablation", replace(config, bias="relative")),
        BIASES_ONLY: ("ablation", replace(config, tokens="interleaved")),
        HISTORY_LOSS: ("ablation", replace(config, history_loss=True)),
        FULL_MASK: ("ablation", replace(config, history_mask="full")),
        "candidates visible": ("ablation", replace(config, candidates="visible")),
        "no request index": ("ablation", replace(config, request_index=False)),
        "learned positions": ("ablation", replace(config, bias="learned")),
        "no content": ("ablation", replace(config, content=False)),
    }


def curve(config: GenRankConfig) -> dict[str, GenRankConfig]:
    """GenRank at four sizes, the method's own among them, small to large."""
    widths = (config.width // 4, config.width // 2, config.width, 2 * config.width)
    return {
        GENRANK if width == config.width else f"genrank, width {width}": replace(
            config, width=width, heads=min(config.heads, width // 4)
        )
        for width in widths
    }


def sequence_parameters(model: GenRank) -> int:
    """Parameters of the blocks and heads, tables aside."""
    return sum(p.numel() for part in (model.encoder, model.heads) for p in part.parameters())


@dataclass(frozen=True)
class Speed:
    """Median seconds of a training step and of scoring a request, and the size of what is computed."""

    train: float
    serve: float
    tokens: int


def measure(models: dict[str, GenRank], batch: Batch, *, repeats: int) -> dict[str, Speed]:
    """Times the models in turn, after a warm-up: a training step on the batch, and scoring one request of it."""
    one = {name: value[:1] for name, value in batch.items()}
    n, m = batch["item"].shape[1], batch["candidate"].shape[1]
    device = batch["item"].device
    train: dict[str, list[float]] = {name: [] for name in models}
    serve: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 2):
        for name, model in models.items():
            started = now(device)
            model.loss(batch).backward()
            trained = now(device)
            with torch.no_grad():
                model.scores(one)
            served = now(device)
            if turn >= 2:
                train[name].append(trained - started)
                serve[name].append(served - trained)
    return {
        name: Speed(
            statistics.median(train[name]),
            statistics.median(serve[name]),
            model.tokens_per_request(n, m, training=True),
        )
        for name, model in models.items()
    }


def efficiency(speeds: dict[str, Speed], requests: int, *, at_least: float = 1.5) -> Clause:
    """Decided by the measured training step: holds from `at_least` times the interleaved baseline's speed."""
    ratio = speeds[HSTU].train / speeds[ACTION_ONLY].train
    full = speeds[HSTU].train / speeds[GENRANK].train
    state: State = "holds" if min(ratio, full) >= at_least else "reversed" if full < 1.0 else "undecided"
    shown = "; ".join(
        f"{name}: {requests / s.train:.0f} requests/s in training, {1000 * s.serve:.2f} ms to score one, "
        f"{s.tokens} tokens, {s.tokens**2:,} scores a head"
        for name, s in speeds.items()
    )
    text = f"efficiency: action tokens train at least {at_least} times as fast as interleaved ones"
    return fact(text, state, f"{ratio:.2f}x with HSTU's biases, {full:.2f}x with the new ones. {shown}")


def parity(method: str, baseline: str, metric: str, *, below: float, floor: float) -> Clause:
    """Holds when the mean difference is above -below and its interval above -floor, is reversed when it lies below."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        state: State = (
            "holds" if d.mean >= -below and d.low > -floor else "reversed" if d.high < -below else "undecided"
        )
        return state, f"{metric}: {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}], better on {d.wins} of {d.seeds} seeds"

    return Clause(f"{method} is level with {baseline} on {metric} (-{below}, interval above -{floor})", decide)


def decision_rule(speeds: dict[str, Speed], requests: int, sizes: dict[str, float]) -> list[Clause]:
    """Efficiency, quality and diagnosis; the scaling curve is reported."""
    quality = [
        parity(GENRANK, HSTU, "like auc", below=0.0005, floor=0.002),
        parity(GENRANK, ACTION_ONLY, "like auc", below=0.0005, floor=0.002),
    ]
    diagnosis = [beats(GENRANK, HISTORY_LOSS, "like auc"), beats(GENRANK, FULL_MASK, "like auc")]
    further = (
        [beats(GENRANK, "pointwise din", "like auc", required=False), scaling_curve(sizes, "like auc")] if sizes else []
    )
    return [
        efficiency(speeds, requests),
        *(replace(c, text=f"quality: {c.text}") for c in quality),
        *(replace(c, text=f"diagnosis: {c.text}") for c in diagnosis),
        *(replace(c, text=f"reported: {c.text}") for c in further),
    ]


def run(study: Study) -> Comparison:
    """Measures speed, then trains all forms for one pass over the requests."""
    device = device_for(study.device)
    with study.stage("requests", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=40, standard=500), seed=0)
        log = EventLog.of(interactions)
        task = RequestRanking(
            log,
            history=study.size("history", smoke=16, standard=32),
            width=study.size("candidates", smoke=4, standard=8),
        )
    config = GenRankConfig(width=study.size("width", smoke=32, standard=32), history=task.history)
    batch_size = study.size("batch", smoke=32, standard=32)
    found = arms(config)
    with study.stage("speed", trains=False):
        batch = next(task.batches(0, batch_size, device))
        timed = {name: GenRank(log, found[name][1]).to(device) for name in (HSTU, ACTION_ONLY, GENRANK)}
        speeds = measure(timed, batch, repeats=study.size("timings", smoke=3, standard=40))
    sizes = curve(config)
    points = {name: float(sequence_parameters(GenRank(log, size))) for name, size in sizes.items()}

    def arm(name: str, kind: Kind, config: GenRankConfig) -> Variant:
        return Variant(name, lambda: GenRank(log, config), kind=kind)

    candidates = [arm(name, *found[name]) for name in found if name != HSTU]
    candidates += [arm(name, "control", size) for name, size in sizes.items() if name != GENRANK]
    candidates.append(Variant("pointwise din", lambda: PointwiseDIN(log, config), kind="control", note="same features"))
    steps = study.steps("ranker", smoke=4, standard=task.steps_per_pass(batch_size))
    if study.budget == "standard":
        study.note(
            f"one pass over the training requests is {task.steps_per_pass(batch_size)} updates; {steps} were made"
        )
    return study.compare(
        task,
        baseline=arm(HSTU, *found[HSTU]),
        candidates=candidates,
        steps=steps,
        device=device,
        recipe=Recipe(
            learning_rate=2e-3, batch_size=batch_size, validations=study.size("validations", smoke=1, standard=2)
        ),
        clauses=decision_rule(speeds, batch_size, points),
    )


def specimens() -> list[Specimen]:
    """Tiny instances of GenRank, of the interleaved baseline and of the pointwise one."""
    log = miniature()
    task = RequestRanking(log, history=6, width=4)
    batch = task.rows(task.requests["train"][2:20:3], torch.device("cpu"))
    tiny = GenRankConfig(width=16, heads=2, history=10)

    def of(config: GenRankConfig) -> Callable[[], GenRank]:
        return lambda: GenRank(log, config)

    def specimen(name: str, config: GenRankConfig, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=(*batch["candidate"].shape, 2),
            pad=pad_requests,
            change_later=change_outcomes,
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "genrank",
            tiny,
            {
                "width = 32": {"width": 32},
                "layers = 1": {"layers": 1},
                "heads = 4": {"heads": 4},
                "tokens = interleaved": {"tokens": "interleaved"},
                "bias = learned": {"bias": "learned"},
                "bias = relative": {"bias": "relative"},
                "request_index = false": {"request_index": False},
                "content = false": {"content": False},
                "history_loss = true": {"history_loss": True},
                "history_mask = full": {"history_mask": "full"},
                "candidates = visible": {"candidates": "visible"},
                "activation = swiglu": {"activation": "swiglu"},
            },
        ),
        specimen(
            "interleaved hstu", replace(tiny, tokens="interleaved", bias="relative"), {"layers = 1": {"layers": 1}}
        ),
        Specimen(
            "pointwise din",
            lambda: PointwiseDIN(log, tiny),
            batch,
            shape=(*batch["candidate"].shape, 2),
            pad=pad_requests,
            change_later=change_outcomes,
        ),
    ]
