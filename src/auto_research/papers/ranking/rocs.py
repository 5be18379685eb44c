"""ROCS: Request-Oriented Compute Sharing for Efficient Large-Scale Recommendation (arXiv:2607.27744, Meta AI).

Official code: the kernel alone, https://github.com/pytorch/FBGEMM/tree/main/fbgemm_gpu/experimental/ikbo.

The idea: a request's user and context are the same for all of its candidates, but models that mix the candidate in
early run whole for each of them. Let every operator obey one rule (candidate states read request states at any depth,
never the reverse) and the request's half, its history included, is exact to share; then spend what that saved on it.

Differs from the paper: MovieLens ratings; Wukong and DCN-v2 at a width of 16; the broadcast inside the kernel is a
gather and an addition in plain PyTorch. The rule holds by construction: every module is a pair of `request`, which is
given no candidate, and `candidate` (layers/one_way.py).

Letters: U requests, C candidates, T events, d width, n_R and n_C tokens of a group, q queries, r ratio of the request's
capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import padding_mask
from auto_research.layers.heads import binary_task_losses
from auto_research.layers.history import HistoryFeatures
from auto_research.layers.one_way import (
    BlockMLP,
    GroupNorm,
    OneWayCross,
    Owner,
    Sizes,
    TokenCompression,
    attend_owned,
)
from auto_research.layers.towers import FeatureEmbedding, embedding_table, matched_width
from auto_research.layers.transformer import TransformerBlock
from auto_research.layers.wukong import WukongKept, WukongLayer
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, fact
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.click import GAPS, RATINGS, PastMeans, pad_history
from auto_research.tasks.request_clicks import RequestClicks, miniature_requests
from auto_research.tasks.request_cost import RequestCost, SplitCost, measure_requests, split_cost

if TYPE_CHECKING:
    from auto_research.study.context import Study


Backbone = Literal["wukong", "dcnv2"]


@dataclass(frozen=True)
class RocsConfig:
    """Sizes and switches; the defaults are ROCS on Wukong before its request side is scaled.

    Attributes:
        width, layers, heads, history: d, number of interaction layers, attention heads, T.
        request_tokens, candidate_tokens: n_R (at a ratio of 1) and n_C.
        hidden: hidden units of a group in every network (at a ratio of 1 for R).
        factors: k, columns of Wukong's factorisation machine.
        rank: of a group in DCN-v2's cross layers (at a ratio of 1 for R).
        queries: q of each group in every layer that reads the history.
        field_width, event_width: columns of a group of fields, and of the rating's and gap's vector of an event.
        ratio: r; multiplies request tokens, request hidden units and the width of the history's encoder.
        backbone: what a layer is, `wukong` or `dcnv2`.
        interaction: `one-way`; `joint` is the vanilla model, in which everything belongs to C and runs for each
            candidate; `late` is two towers that meet in a dot product.
        depth: layers that read the history, `every` or the `last` alone.
        request_reads: whether the request's own queries read the history.
        encoder: `free` of candidates, or with the `candidate` as one more token of the history it reads.
    """

    width: int = 16
    layers: int = 2
    heads: int = 2
    history: int = 32
    request_tokens: int = 8
    candidate_tokens: int = 4
    hidden: int = 16
    factors: int = 8
    rank: int = 16
    queries: int = 2
    field_width: int = 16
    event_width: int = 8
    ratio: float = 1.0
    backbone: Backbone = "wukong"
    interaction: Literal["one-way", "joint", "late"] = "one-way"
    depth: Literal["every", "last"] = "every"
    request_reads: bool = True
    encoder: Literal["free", "candidate"] = "free"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")

    def scaled(self, size: int) -> int:
        """A size of the request side at the ratio."""
        return max(2, round(size * self.ratio))

    def grouped(self, request: int, candidate: int) -> Sizes:
        """Sizes of the groups; without a rule there is one group, C."""
        return (0, request + candidate) if self.interaction == "joint" else (request, candidate)

    @property
    def tokens(self) -> Sizes:
        """n_R and n_C before the first layer."""
        return self.grouped(self.scaled(self.request_tokens), self.candidate_tokens)

    @property
    def hidden_units(self) -> Sizes:
        """Hidden units of a network."""
        return self.grouped(self.scaled(self.hidden), self.hidden)

    @property
    def reading_queries(self) -> Sizes:
        """q of the groups in a layer that reads the history; a tower of candidates does not."""
        request, candidate = self.queries * self.request_reads, self.queries * (self.interaction != "late")
        return self.grouped(request, candidate)

    @property
    def reads(self) -> bool:
        """Whether candidates read request states."""
        return self.interaction == "one-way"

    @property
    def sequence_width(self) -> int:
        """Width of the history's encoder; its heads share it out, rounded."""
        return self.scaled(self.width)


def _networks(config: RocsConfig, inputs: Sizes, outputs: Sizes, *, reads: bool) -> BlockMLP:
    """A network of one hidden layer; a group that has no inputs has no hidden units."""
    request, candidate = ((i, h if i else 0, o) for i, h, o in zip(inputs, config.hidden_units, outputs, strict=True))
    return BlockMLP(request, candidate, reads=reads)


def _times(sizes: Sizes, width: int) -> Sizes:
    return sizes[0] * width, sizes[1] * width


# -- deep cross attention ------------------------------------------------------------------------------------------


@dataclass
class ReadingKept:
    """What candidates need in order to ask and to be answered: their request's part of the queries, keys and values."""

    compressed: Tensor | None
    hidden: list[Tensor | None]
    keys: tuple[Tensor, Tensor] | None
    valid: Tensor


class DeepCrossAttention(nn.Module):
    """Queries from the states before a layer, keys and values from the history: A = Attn(Q, S W_K, S W_V).

    (Q^R, Q^C) = MLP(LCB(Y^R, Y^C)), both one-way; W_K and W_V are each group's own. Keys and values of both are
    computed once a request, since no event knows a candidate.
    """

    def __init__(self, config: RocsConfig, tokens: Sizes) -> None:
        super().__init__()
        self.queries, self.heads, self.width = config.reading_queries, config.heads, config.width
        self.compress = TokenCompression(tokens, self.queries, reads=config.reads)
        flat = _times(self.queries, config.width)
        self.mlp = _networks(config, flat, flat, reads=config.reads)
        self.memory_norm = nn.LayerNorm(config.sequence_width)
        self.request_keys = nn.Linear(config.sequence_width, 2 * config.width) if self.queries[0] else None
        self.candidate_keys = nn.Linear(config.sequence_width, 2 * config.width) if self.queries[1] else None

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _keys(self, project: nn.Module, sequence: Tensor) -> tuple[Tensor, Tensor]:
        key, value = map(self._heads, project(self.memory_norm(sequence)).chunk(2, dim=-1))
        return key, value

    def _ask(self, query: Tensor, count: int, keys: tuple[Tensor, Tensor], valid: Tensor, owner: Owner) -> Tensor:
        asking = self._heads(query.reshape(len(query), count, self.width))
        return attend_owned(asking, *keys, valid, owner).transpose(1, 2).flatten(2)

    def request(self, y: Tensor, sequence: Tensor, valid: Tensor, *, share: bool) -> tuple[Tensor, ReadingKept]:
        """y (U, n_R, d), S (U, T, d_S), valid (U, T) -> A^R (U, q_R, d); with keys for candidates that `share` them."""
        query, compressed = self.compress.request(y)
        query, hidden = self.mlp.request(query.flatten(1))
        found = y[:, :0]
        if self.request_keys is not None:
            alone = Owner.adjacent(len(y), 1, y.device)
            found = self._ask(query, self.queries[0], self._keys(self.request_keys, sequence), valid, alone)
        share = share and self.candidate_keys is not None
        keys = self._keys(self.candidate_keys, sequence) if share else None  # type: ignore[arg-type]
        return found, ReadingKept(compressed, hidden, keys, valid)

    def candidate(self, y: Tensor, kept: ReadingKept, owner: Owner, own: tuple[Tensor, Tensor] | None) -> Tensor:
        """y (C, n_C, d) -> A^C (C, q_C, d); `own` is a sequence and its valid positions for each candidate instead."""
        if self.candidate_keys is None:
            return y[:, :0]
        query = self.mlp.candidate(self.compress.candidate(y, kept.compressed, owner).flatten(1), kept.hidden, owner)
        if own is None:
            assert kept.keys is not None
            return self._ask(query, self.queries[1], kept.keys, kept.valid, owner)
        alone = Owner.adjacent(len(y), 1, y.device)
        return self._ask(query, self.queries[1], self._keys(self.candidate_keys, own[0]), own[1], alone)


# -- a depth -------------------------------------------------------------------------------------------------------


@dataclass
class DepthKept:
    """What candidates need of one depth of the request."""

    reading: ReadingKept | None
    interaction: WukongKept | tuple[Tensor | None, Tensor | None]


class RocsLayer(nn.Module):
    """One depth: S_i = Enc_i(S_{i-1}); both groups read S_i and append what they found; an interaction layer.

    Args:
        tokens: n_R and n_C that come in; `after` is what goes out.
    """

    def __init__(self, config: RocsConfig, tokens: Sizes, *, reading: bool) -> None:
        super().__init__()
        self.encoder = TransformerBlock(
            config.sequence_width,
            config.heads,
            config.scaled(2 * config.width),
            head_dim=max(1, round(config.sequence_width / config.heads)),
        )
        self.reading = DeepCrossAttention(config, tokens) if reading else None
        asked = config.reading_queries if reading else (0, 0)
        joined = (tokens[0] + asked[0], tokens[1] + asked[1])
        self.wukong: WukongLayer | None = None
        self.cross: OneWayCross | None = None
        if config.backbone == "wukong":
            self.after = config.tokens
            self.wukong = WukongLayer(
                config.width, config.factors, config.hidden_units, joined, self.after, reads=config.reads
            )
        else:
            self.after = joined
            ranks = config.grouped(config.scaled(config.rank), config.rank)
            self.cross = OneWayCross(_times(joined, config.width), ranks, reads=config.reads)

    def request(
        self, first: Tensor, x: Tensor, sequence: Tensor, valid: Tensor, *, share: bool
    ) -> tuple[Tensor, Tensor, Tensor, DepthKept]:
        """x_0, x (U, n_R, d), S_{i-1} (U, T, d_S) -> the same of the next depth, and what candidates need."""
        sequence = self.encoder(sequence, padding_mask(valid))
        read = None
        if self.reading is not None:
            found, read = self.reading.request(x, sequence, valid, share=share)
            first, x = torch.cat([first, found], 1), torch.cat([x, found], 1)
        if self.wukong is not None:
            x, mixed = self.wukong.request(x)
            return first, x, sequence, DepthKept(read, mixed)
        assert self.cross is not None
        crossed, kept = self.cross.request(first.flatten(1), x.flatten(1))
        return first, crossed.view_as(x), sequence, DepthKept(read, kept)

    def candidate(
        self, first: Tensor, x: Tensor, kept: DepthKept, owner: Owner, own: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """x_0, x (C, n_C, d) -> the same of the next depth; `own` is a candidate's own sequence, where it has one."""
        if own is not None:
            own = self.encoder(own[0], padding_mask(own[1])), own[1]
        if self.reading is not None:
            assert kept.reading is not None
            found = self.reading.candidate(x, kept.reading, owner, own)
            first, x = torch.cat([first, found], 1), torch.cat([x, found], 1)
        if self.wukong is not None:
            assert isinstance(kept.interaction, WukongKept)
            return first, self.wukong.candidate(x, kept.interaction, owner), own
        assert self.cross is not None
        assert isinstance(kept.interaction, tuple)
        crossed = self.cross.candidate(first.flatten(1), x.flatten(1), kept.interaction, owner)
        return first, crossed.view_as(x), own


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class RequestSide:
    """All that candidates need of U requests.

    Attributes:
        summary: outputs of the request's half, (U, ...): final states, or the vector of its tower.
        tokens: the request's tokens before any layer (U, n_R, d), which only the vanilla model takes to candidates.
        sequence, valid: the embedded history (U, T, d_S) and its real events (U, T).
    """

    summary: Tensor
    tokens: Tensor
    sequence: Tensor
    valid: Tensor
    kept: list[DepthKept]
    head: list[Tensor | None]


class Rocs(nn.Module):
    """The whole model in all of its forms; a batch's requests may have one candidate each or (B, m) of them."""

    shares_requests = True

    def __init__(self, task: RequestClicks, config: RocsConfig) -> None:
        super().__init__()
        self.config, self.fields = config, task.candidate_fields
        width, events = config.width, config.sequence_width
        self.request_features = FeatureEmbedding(task.request_fields, config.field_width)
        self.candidate_features = FeatureEmbedding(task.candidate_fields, config.field_width)
        self.events = HistoryFeatures(self.candidate_features, ratings=RATINGS, gaps=GAPS, width=config.event_width)
        self.event = nn.Linear(self.events.width, events)
        self.places = embedding_table(config.history, events)
        self.count = config.scaled(config.request_tokens)
        self.request_tokens = nn.Linear(self.request_features.width, self.count * width)
        self.candidate_tokens = nn.Linear(self.candidate_features.width, config.candidate_tokens * width)
        self.norm = GroupNorm((width, width))
        self.placed = nn.Linear(config.candidate_tokens * width, events) if config.encoder == "candidate" else None
        self.layers = nn.ModuleList()
        tokens = config.tokens
        for depth in range(config.layers):
            reading = config.depth == "every" or depth == config.layers - 1
            self.layers.append(RocsLayer(config, tokens, reading=reading))
            tokens = self.layers[-1].after  # type: ignore[assignment]
        self.towers = config.interaction == "late"
        out = (width, width) if self.towers else (0, 1)
        self.head = _networks(config, _times(tokens, width), out, reads=config.reads)
        self.bias = nn.Parameter(torch.zeros(())) if self.towers else None
        self.logged: dict[str, float] = {}

    def _history(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """S_0 (U, T, d_S) and which events are real. Places count back from the latest event."""
        valid = batch["history_item"] > 0
        back = torch.arange(valid.shape[1] - 1, -1, -1, device=valid.device).clamp(max=self.config.history - 1)
        return self.event(self.events(self.candidate_features, batch)) + self.places(back), valid

    def request_side(self, batch: Batch) -> RequestSide:
        """The request's half, (U) requests; of `batch` it reads request fields and the history alone."""
        history, valid = self._history(batch)
        tokens = self.request_tokens(self.request_features(batch)).unflatten(-1, (self.count, -1))
        tokens = self.norm.request(tokens)
        # Without a rule no token is the request's: all of them go to the candidates, and the R group is empty.
        x = tokens[:, :0] if self.config.interaction == "joint" else tokens
        first, sequence, kept = x, history, []
        for layer in self.layers:
            first, x, sequence, depth = layer.request(  # type: ignore[operator]
                first, x, sequence, valid, share=self.placed is None
            )
            kept.append(depth)
        out, head = self.head.request(x.flatten(1))
        return RequestSide(out if self.towers else x.flatten(1), tokens, history, valid, kept, head)

    def candidate_scores(self, side: RequestSide, batch: Batch, owner: Owner | None = None) -> Tensor:
        """Logits (C,) of candidates, each of the request that `owner` says; by default adjacent and equally many."""
        count = len(batch["item"])
        if owner is None:
            owner = Owner.adjacent(len(side.valid), count // len(side.valid), side.valid.device)
        x = self.candidate_tokens(self.candidate_features(batch)).unflatten(-1, (self.config.candidate_tokens, -1))
        x = self.norm.candidate(x)
        own = None
        if self.placed is not None:  # the candidate stands behind the events, in a sequence of its own
            events = torch.cat([owner.gather(side.sequence), self.placed(x.flatten(1))[:, None]], 1)
            own = events, F.pad(owner.gather(side.valid), (0, 1), value=True)
        if self.config.interaction == "joint":
            x = torch.cat([owner.gather(side.tokens), x], 1)
        first = x
        for layer, kept in zip(self.layers, side.kept, strict=True):
            first, x, own = layer.candidate(first, x, kept, owner, own)  # type: ignore[operator]
        out = self.head.candidate(x.flatten(1), side.head, owner)
        if self.bias is not None:
            logit = (out * owner.gather(side.summary)).sum(-1) / self.config.width**0.5 + self.bias
        else:
            logit = out.squeeze(-1)
        return logit.to(torch.promote_types(logit.dtype, torch.float32))

    def scores(self, batch: Batch) -> Tensor:
        """Logits of the shape of `item`: (B, m), or (B,) where each row is a request with one candidate."""
        shape = batch["item"].shape
        flat = {field.name: batch[field.name].flatten(0, len(shape) - 1) for field in self.fields}
        return self.candidate_scores(self.request_side(batch), flat).view(shape)

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy over real candidates, a float32 scalar."""
        return binary_task_losses({"like": self.scores(batch)}, {"like": batch["label"]})["like"]


# -- what a request costs ------------------------------------------------------------------------------------------

PARTS = 16
"""A ratio is a whole number of these parts of one."""


def ratio_for(cost: Callable[[float], float], target: float, *, within: bool = False, parts: int = PARTS) -> float:
    """The ratio whose cost is nearest to the target; `within` takes the largest that does not exceed it."""
    step = matched_width(lambda k: round(cost(k / parts)), round(target))
    while within and step > 1 and cost(step / parts) > target:
        step -= 1
    return step / parts


def one_way_breaches(model: Rocs, batch: Batch) -> list[str]:
    """How a model breaks the rule on a batch of (B, m) candidates; nothing for one that obeys it.

    Request outputs must be bit-identical under other candidates, and no gradient may lead from them to what describes a
    candidate, while scores do depend on that.
    """
    names = [field.name for field in model.fields]
    batch = {n: v.clone().requires_grad_() if n in names and v.is_floating_point() else v for n, v in batch.items()}
    inputs = [batch[name] for name in names if batch[name].requires_grad]
    side = model.request_side(batch)
    others = model.request_side({**batch, **{name: batch[name].roll(1, 0) for name in names}})
    score = model.candidate_scores(side, {name: batch[name].flatten(0, 1) for name in names})
    breaches = [] if torch.equal(side.summary, others.summary) else ["request outputs change with the candidates"]
    known = torch.autograd.grad(side.summary.sum(), inputs, allow_unused=True, retain_graph=True)
    if any(gradient is not None and bool(gradient.any()) for gradient in known):
        breaches.append("request outputs have a gradient to the candidates")
    if not all(bool(gradient.any()) for gradient in torch.autograd.grad(score.sum(), inputs)):
        breaches.append("scores have no gradient to the candidates")
    return breaches


# -- the comparison ------------------------------------------------------------------------------------------------

BACKBONES: tuple[Backbone, ...] = ("wukong", "dcnv2")
VANILLA, TOWERS, BASE, SCALED = "vanilla", "two towers", "rocs base", "rocs scaled"
LAST, UNREAD, INSIDE = "read at the last depth", "no request-side reading", "candidate in the encoder"
CANDIDATES = 100
"""N at which amortised costs are compared."""


def named(arm: str, backbone: Backbone) -> str:
    """Name of an arm on a backbone."""
    return f"{arm}, {backbone}"


Price = Callable[[RocsConfig], SplitCost]


def prices(task: RequestClicks) -> Price:
    """What a model costs; each configuration is built and counted once."""
    return cache(lambda config: split_cost(lambda: Rocs(task, config), task))


def fitted(price: Price, config: RocsConfig, *, parts: int = PARTS) -> dict[str, tuple[Kind, RocsConfig]]:
    """The four models of a backbone, with the ratios that their budgets give them.

    Base and two towers cost what vanilla does for one candidate; scaled costs at most what vanilla does for each of
    `CANDIDATES`.
    """

    def cost(candidates: int, **changes: object) -> float:
        return price(replace(config, **changes)).amortised(candidates)  # type: ignore[arg-type]

    alone, many = (cost(n, interaction="joint") for n in (1, CANDIDATES))
    base = ratio_for(lambda r: cost(1, ratio=r), alone, parts=parts)
    towers = ratio_for(lambda r: cost(1, ratio=r, interaction="late"), alone, parts=parts)
    scaled = ratio_for(lambda r: cost(CANDIDATES, ratio=r), many, within=True, parts=parts)
    return {
        VANILLA: ("baseline", replace(config, interaction="joint")),
        TOWERS: ("control", replace(config, interaction="late", ratio=towers)),
        BASE: ("method", replace(config, ratio=base)),
        SCALED: ("method", replace(config, ratio=scaled)),
    }


def ablations(base: RocsConfig) -> dict[str, tuple[Kind, RocsConfig]]:
    """Base with one part changed at the same ratio."""
    return {
        LAST: ("ablation", replace(base, depth="last")),
        UNREAD: ("ablation", replace(base, request_reads=False)),
        INSIDE: ("ablation", replace(base, encoder="candidate")),
    }


def shown(name: str, cost: SplitCost) -> str:
    """Costs in words."""
    return (
        f"{name}: {cost.amortised(1) / 1e6:.3f} MFLOPs for one candidate,"
        f" {cost.amortised(CANDIDATES) / 1e6:.3f} for each of {CANDIDATES}"
    )


def obeys(breaches: Mapping[str, list[str]], serving: Mapping[str, RequestCost]) -> Clause:
    """Request outputs do not know the candidates, and sharing changes no score."""
    wrong = [f"{name}: {breach}" for name, found in breaches.items() for breach in found]
    wrong += [f"{name}: scores differ by {s.gap:.1e}" for name, s in serving.items() if s.gap >= 1e-5]
    largest = max(s.gap for s in serving.values())
    detail = (
        "; ".join(wrong) or f"request outputs are bit-identical, have no gradient; largest difference {largest:.1e}"
    )
    return fact(
        "sharing: the rule holds, and shared scores are those of a broadcast to 1e-5", _state(not wrong), detail
    )


def cheaper(backbone: Backbone, costs: Mapping[str, SplitCost]) -> Clause:
    """Base takes at least 30 % off the amortised cost, with vanilla's history counted once a request as well."""
    base, vanilla = costs[named(BASE, backbone)], costs[named(VANILLA, backbone)]
    cut = 1 - base.amortised(CANDIDATES) / vanilla.amortised(CANDIDATES)
    broadcast = 1 - base.amortised(CANDIDATES) / vanilla.amortised(1)
    return fact(
        f"sharing: {BASE} takes at least 30% off the FLOPs of each of {CANDIDATES} candidates, {backbone}",
        _state(cut >= 0.3),
        f"-{cut:.1%}, and -{broadcast:.1%} of a vanilla that broadcasts its history as well;"
        f" {shown(VANILLA, vanilla)}; {shown(BASE, base)}",
    )


def faster(backbone: Backbone, serving: Mapping[str, RequestCost]) -> Clause:
    """Base with its request shared is faster than its own and than vanilla's broadcast, both in one vectorised pass."""
    base, vanilla = serving[named(BASE, backbone)], serving[named(VANILLA, backbone)]
    return fact(
        f"sharing: {BASE} scores {CANDIDATES} candidates of a request faster than a broadcast, {backbone}",
        _state(base.packed_seconds < min(base.plain_seconds, vanilla.plain_seconds)),
        f"{1000 * base.packed_seconds:.2f} ms shared, {1000 * base.plain_seconds:.2f} ms broadcast; vanilla"
        f" {1000 * vanilla.plain_seconds:.2f} ms broadcast, {1000 * vanilla.packed_seconds:.2f} ms with history kept",
    )


def affordable(backbone: Backbone, costs: Mapping[str, SplitCost]) -> Clause:
    """Scaled costs no more than vanilla at N candidates."""
    scaled, vanilla = costs[named(SCALED, backbone)], costs[named(VANILLA, backbone)]
    return fact(
        f"quality: {SCALED} stays within the FLOPs of vanilla at {CANDIDATES} candidates, {backbone}",
        _state(scaled.amortised(CANDIDATES) <= vanilla.amortised(CANDIDATES)),
        f"{shown(SCALED, scaled)}; {shown(VANILLA, vanilla)}",
    )


def neutral(method: str, baseline: str, metric: str, *, within: float) -> Clause:
    """Reported: the whole interval lies within a share of the baseline's mean, either way."""

    def decide(compare: Compare) -> tuple[State, str]:
        d = compare(method, baseline, metric)
        room = within * abs(d.baseline_mean)
        inside, outside = -room < d.low and d.high < room, d.high < -room or d.low > room
        state: State = "holds" if inside else "reversed" if outside else "undecided"
        return state, f"{metric}: {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}]"

    return Clause(
        f"reported: {method} is neutral to {baseline} on {metric} within {within:.1%}", decide, required=False
    )


def _state(holds: bool) -> State:
    return "holds" if holds else "reversed"


def decision_rule(
    backbones: tuple[Backbone, ...],
    breaches: Mapping[str, list[str]],
    serving: Mapping[str, RequestCost],
    costs: Mapping[str, SplitCost],
) -> list[Clause]:
    """Sharing is exact and cheaper; scaled beats vanilla within its budget; two towers are worse than base."""
    clauses = [obeys(breaches, serving)]
    for backbone in backbones:
        vanilla, towers, base, scaled = (named(arm, backbone) for arm in (VANILLA, TOWERS, BASE, SCALED))
        quality = [beats(scaled, vanilla, "auc", strict=True), beats(base, towers, "auc")]
        clauses += [
            cheaper(backbone, costs),
            faster(backbone, serving),
            affordable(backbone, costs),
            *(replace(c, text=f"quality: {c.text}") for c in quality),
            neutral(scaled, vanilla, "auc", within=0.001),
            neutral(base, vanilla, "auc", within=0.001),
        ]
    base = named(BASE, BACKBONES[0])
    further = [beats(base, named(arm, BACKBONES[0]), "log_loss", required=False) for arm in (LAST, UNREAD, INSIDE)]
    return clauses + [replace(c, text=f"reported: {c.text}") for c in further]


def models_of(price: Price, config: RocsConfig, *, parts: int = PARTS) -> dict[str, tuple[Kind, RocsConfig]]:
    """All arms: the four models on each backbone, and the ablations of base on the first."""
    arms: dict[str, tuple[Kind, RocsConfig]] = {}
    for backbone in BACKBONES:
        found = fitted(price, replace(config, backbone=backbone), parts=parts)
        if backbone == BACKBONES[0]:
            found |= ablations(found[BASE][1])
        arms |= {named(arm, backbone): what for arm, what in found.items()}
    return arms


def run(study: Study) -> Comparison:
    """Fits the ratios to their budgets, measures sharing, trains all arms, and applies the decision rule."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    with study.stage("requests", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=40, standard=10_000), seed=0)
        task = RequestClicks(
            interactions,
            history_length=study.size("history", smoke=20, standard=32),
            width=study.size("candidates", smoke=8, standard=8),
        )
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: the request has one group of fields less")
    config = RocsConfig(
        width=study.size("width", smoke=16, standard=16),
        layers=study.size("layers", smoke=2, standard=2),
        history=task.history_length,
        request_tokens=study.size("request tokens", smoke=6, standard=8),
        candidate_tokens=study.size("candidate tokens", smoke=3, standard=4),
    )
    with study.stage("budgets", trains=False):
        price = prices(task)
        arms = models_of(price, config, parts=study.size("ratio parts", smoke=2, standard=PARTS))
        costs = {name: price(c) for name, (_, c) in arms.items()}
    with study.stage("sharing", trains=False):
        compared = [named(arm, backbone) for backbone in BACKBONES for arm in (VANILLA, BASE, SCALED)]
        models = {name: Rocs(task, arms[name][1]).to(device).eval() for name in compared}
        batch = task.shown(task.requests["test"][:4], device)
        breaches = {n: one_way_breaches(m, batch) for n, m in models.items() if m.config.interaction == "one-way"}
        rounds = study.size("timings", smoke=1, standard=15)
        serving = {
            n: measure_requests(task, m, device, candidates=CANDIDATES, rounds=rounds) for n, m in models.items()
        }

    def arm(name: str, kind: Kind, config: RocsConfig) -> Variant:
        def build() -> nn.Module:
            model = Rocs(task, config)
            cost = costs[name]
            model.logged |= {
                "flops at 1": cost.amortised(1),
                f"flops at {CANDIDATES}": cost.amortised(CANDIDATES),
                "ratio": config.ratio,
            }
            return model

        return Variant(name, build, kind=kind)

    built = [arm(name, *what) for name, what in arms.items()]
    batch_size = study.size("batch", smoke=16, standard=64)
    return study.compare(
        task,
        baseline=built[0],
        candidates=[
            *(replace(v, kind="control") if v.kind == "baseline" else v for v in built[1:]),
            Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"),
        ],
        steps=study.steps("ranker", smoke=3, standard=task.steps_per_pass(batch_size)),
        device=device,
        recipe=Recipe(batch_size=batch_size, validations=study.size("validations", smoke=1, standard=1)),
        learning_rates=(3e-3,) if smoke else (2e-3, 6e-3),
        clauses=decision_rule(BACKBONES, breaches, serving, costs),
    )


def specimens() -> list[Specimen]:
    """Tiny models of each interaction, with every option switched once."""
    task = miniature_requests()
    some = torch.cat([task.requests["train"][1:8:2], task.requests["validation"][:2]])  # full ones, and padded ones
    batch = task.shown(some, torch.device("cpu"))
    tiny = RocsConfig(width=8, history=6, request_tokens=4, candidate_tokens=2, hidden=8, factors=4, rank=4)
    tiny = replace(tiny, field_width=8, event_width=4)

    def of(config: RocsConfig) -> Callable[[], Rocs]:
        return lambda: Rocs(task, config)

    def specimen(name: str, config: RocsConfig, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=tuple(batch["item"].shape),
            pad=pad_history,
            # The only thing in a batch that is not earlier than the scores.
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "rocs",
            tiny,
            {
                "width = 16": {"width": 16},
                "layers = 1": {"layers": 1},
                "heads = 4": {"heads": 4},
                "history = 7": {"history": 7},
                "request_tokens = 6": {"request_tokens": 6},
                "candidate_tokens = 3": {"candidate_tokens": 3},
                "hidden = 12": {"hidden": 12},
                "factors = 3": {"factors": 3},
                "queries = 1": {"queries": 1},
                "ratio = 2": {"ratio": 2.0},
                "backbone = dcnv2": {"backbone": "dcnv2"},
                "interaction = joint": {"interaction": "joint"},
                "interaction = late": {"interaction": "late"},
                "depth = last": {"depth": "last"},
                "request_reads = false": {"request_reads": False},
                "encoder = candidate": {"encoder": "candidate"},
            },
        ),
        specimen("rocs on dcn-v2", replace(tiny, backbone="dcnv2"), {"rank = 2": {"rank": 2}}),
        specimen("vanilla", replace(tiny, interaction="joint"), {}),
        specimen("vanilla dcn-v2", replace(tiny, interaction="joint", backbone="dcnv2"), {}),
        specimen("two towers", replace(tiny, interaction="late"), {}),
        specimen("candidate in the encoder", replace(tiny, encoder="candidate"), {}),
    ]
