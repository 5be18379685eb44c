"""OneTrans: Unified Feature Interaction and Sequence Modeling with One Transformer (arXiv:2510.26104, ByteDance).

Official code: none.

The idea: behaviour events (S tokens) and all other features (NS tokens) form one list for one causal Transformer. All
S tokens share their weights, each NS token has its own. NS tokens read the history in every layer and the history
never reads them, so that keys and values of the history serve all candidates of a request; and because only the last
tokens of each layer ask, the list shrinks like a pyramid down to the NS tokens.

Differs from the paper: MovieLens ratings instead of an e-commerce log, so one tower (like) instead of CTR and CVR, and
liked and disliked events as the two behaviour streams; AdamW for all parameters; caching within a request only.

Letters: B examples, T events, L_S and n S and NS tokens, d width, H heads, L layers, R requests, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import KVCache, attend, attend_packed, causal_mask, padding_mask
from auto_research.layers.history import HistoryFeatures, slots
from auto_research.layers.token_mixing import GroupedLinear, MixerTrunk, PerTokenFFN, dense_blocks
from auto_research.layers.towers import (
    MLP,
    DCNv2,
    FeatureEmbedding,
    Field,
    ScoreMLP,
    groups_of,
    matched_pair,
    parameters_of,
)
from auto_research.layers.transformer import CausalTransformer, CrossAttentionBlock, FeedForward, make_norm
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.scaling import scaling_curve
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, any_of, beats, fact, not_below
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.click import GAPS, RATINGS, ClickTask, PastMeans, Ranker, click_loss, miniature, pad_history
from auto_research.tasks.request_cost import RequestCost, measure_requests, priced, scoring_cost

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class OneTransConfig:
    """Sizes and switches; the defaults are the standard run's model.

    Attributes:
        width, heads, expansion: d, H, and the hidden width of feed-forward networks over d.
        hidden: that hidden width itself; 0 is expansion · d.
        queries: of each layer, how many of the last S tokens ask and are kept; NS tokens always do.
        history: T, the latest events that are read.
        ns_tokens: n of auto-split tokens; 0 is as many as there are groups of fields.
        field_width, event_width: columns of a group of fields, and of the rating's and gap's vector of an event.
        tokens: `auto-split` is one network for all NS tokens, `group-wise` one for each group of fields.
        merge: `time` interleaves the streams by time with a type embedding; `intent` puts the liked events first.
        separator: whether the `intent` order has a learned [SEP] between the streams.
        parameters: `mixed` is one set for S and one for each NS token; `shared` one set for all.
        mask: `causal`, or `full` attention over the whole list.
    """

    width: int = 16
    heads: int = 2
    expansion: int = 4
    hidden: int = 0
    queries: tuple[int, ...] = (32, 16, 0)
    history: int = 32
    ns_tokens: int = 0
    field_width: int = 16
    event_width: int = 8
    tokens: Literal["auto-split", "group-wise"] = "auto-split"
    merge: Literal["time", "intent"] = "time"
    separator: bool = True
    parameters: Literal["mixed", "shared"] = "mixed"
    mask: Literal["causal", "full"] = "causal"

    @property
    def hidden_width(self) -> int:
        """Hidden width of the feed-forward networks."""
        return self.hidden or self.expansion * self.width

    @property
    def slots(self) -> int:
        """Longest list of S tokens."""
        return self.history + (self.merge == "intent" and self.separator)


# -- tokens --------------------------------------------------------------------------------------------------------


class SequenceTokens(nn.Module):
    """S tokens: each stream's events pass a network of their own, and the streams become one list.

    Streams are the liked and the disliked events; `liked` is the smallest rating code of the first.
    """

    def __init__(self, features: FeatureEmbedding, config: OneTransConfig, *, liked: int) -> None:
        super().__init__()
        self.events = HistoryFeatures(features, ratings=RATINGS, gaps=GAPS, width=config.event_width)
        width = config.width
        self.streams = nn.ModuleList(MLP(self.events.width, width, width, activation="gelu") for _ in range(2))
        self.types = nn.Embedding(2, width) if config.merge == "time" else None
        separated = config.merge == "intent" and config.separator
        self.separator = nn.Parameter(torch.randn(width) / width**0.5) if separated else None
        self.slots = nn.Embedding(config.slots, width)
        for table in filter(None, (self.types, self.slots)):
            nn.init.normal_(table.weight, std=0.5 / width**0.5)
        self.liked = liked

    def forward(self, features: FeatureEmbedding, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> tokens (B, L_S, d), oldest first and padded on the left, and which are real (B, L_S)."""
        valid, stream = batch["history_item"] > 0, (batch["history_rating"] < self.liked).long()
        events = self.events(features, batch)
        liked, disliked = (network(events) for network in self.streams)
        x = torch.where(stream[..., None] == 0, liked, disliked)
        if self.types is not None:
            x = x + self.types(stream)
        else:
            x, valid = self._by_intent(x, valid, stream)
        if valid.shape[1] > self.slots.num_embeddings:  # what is beyond the longest list is padding
            x, valid = x[:, -self.slots.num_embeddings :], valid[:, -self.slots.num_embeddings :]
        return x + self.slots(slots(valid)), valid

    def _by_intent(self, x: Tensor, valid: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Padding, liked events, [SEP], disliked events; each stream by time."""
        rank = torch.where(valid, 1 + 2 * stream, 0)
        if self.separator is not None:
            x = torch.cat([x, self.separator.to(x.dtype).expand(len(x), 1, -1)], dim=1)
            valid = F.pad(valid, (0, 1), value=True)
            rank = F.pad(rank, (0, 1), value=2)
        order = rank.argsort(dim=1, stable=True)
        return x.gather(1, order[..., None].expand_as(x)), valid.gather(1, order)


class FeatureTokens(nn.Module):
    """NS tokens (B, n, d) of all fields that are no sequence."""

    def __init__(self, fields: Sequence[Field], config: OneTransConfig) -> None:
        super().__init__()
        self.features = FeatureEmbedding(fields, config.field_width)
        self.count = len(groups_of(fields))
        if config.tokens == "auto-split":
            self.count = config.ns_tokens or self.count
            self.split = MLP(self.features.width, 2 * config.width, self.count * config.width, activation="gelu")
        else:
            self.rise = GroupedLinear(self.count, config.field_width, 2 * config.width)
            self.fall = GroupedLinear(self.count, 2 * config.width, config.width)
        self.auto = config.tokens == "auto-split"

    def forward(self, batch: Batch) -> Tensor:
        e = self.features(batch)
        if self.auto:
            return self.split(e).unflatten(-1, (self.count, -1))
        return self.fall(F.gelu(self.rise(e.unflatten(-1, (self.count, -1)))))


# -- the block -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One network for all S tokens and, unless parameters are shared, others for the NS tokens at the end.

    Args:
        shared: (..., d) -> (..., d'), or None where no S token passes.
        private: (B, n, d) -> (B, n, d') with weights of its own for each token; None lets NS tokens use `shared`.
    """

    def __init__(self, shared: nn.Module | None, private: nn.Module | None) -> None:
        super().__init__()
        self.shared, self.private = shared, private

    def forward(self, x: Tensor, count: int) -> Tensor:
        """x (B, m, d) whose last `count` tokens are NS -> (B, m, d')."""
        if self.private is None or count == 0:
            assert self.shared is not None
            return self.shared(x)
        if self.shared is None:
            return self.private(x)
        sequence, other = x.split([x.shape[1] - count, count], dim=1)
        return torch.cat([self.shared(sequence), self.private(other)], dim=1)


class OneTransBlock(nn.Module):
    """Z = MixedMHA(Norm(X)) + X at the asking tokens, X' = MixedFFN(Norm(Z)) + Z.

    Args:
        count: n, NS tokens.
        queries: S tokens that ask and are kept, the last ones; keys and values come from all.
    """

    def __init__(self, config: OneTransConfig, count: int, queries: int) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden_width
        if width % config.heads:
            raise ValueError(f"{config.heads} heads do not divide a width of {width}")
        self.count, self.queries, self.heads, self.causal = count, queries, config.heads, config.mask == "causal"
        mixed = config.parameters == "mixed"
        # Where no S token asks, the weights that would ask for it do not exist.
        asks = queries > 0 or not mixed
        self.query = Mixed(
            nn.Linear(width, width) if asks else None, GroupedLinear(count, width, width) if mixed else None
        )
        self.key_value = Mixed(nn.Linear(width, 2 * width), GroupedLinear(count, width, 2 * width) if mixed else None)
        self.feed_forward = Mixed(
            FeedForward(width, hidden) if asks else None, PerTokenFFN(count, width, hidden) if mixed else None
        )
        self.output = nn.Linear(width, width)
        self.attention_norm, self.feed_forward_norm = make_norm("rms", width), make_norm("rms", width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, m, D)

    def _finish(self, x: Tensor, found: Tensor, count: int) -> Tensor:
        z = x + self.output(found.transpose(1, 2).flatten(2))
        return z + self.feed_forward(self.feed_forward_norm(z), count)

    def forward(self, x: Tensor, valid: Tensor, count: int, cache: KVCache | None = None) -> Tensor:
        """x (B, m, d) whose last `count` tokens are NS, valid (B, m) -> (B, kept + count, d).

        With `count` 0 and a cache it is the part of a request that no candidate touches.
        """
        length = x.shape[1]
        tail = min(self.queries, length - count) + count
        y = self.attention_norm(x)
        key, value = map(self._heads, self.key_value(y, count).chunk(2, dim=-1))
        if cache is not None:
            cache.append(key, value)
        if tail == 0:
            return x[:, :0]
        mask = padding_mask(valid)
        if self.causal:
            mask = mask & causal_mask(tail, length, x.device)  # the tail's first token may see length - tail + 1 keys
        found = attend(self._heads(self.query(y[:, length - tail :], count)), key, value, mask)
        return self._finish(x[:, length - tail :], found, count)

    def read(self, x: Tensor, cache: KVCache, valid: Tensor) -> Tensor:
        """NS tokens x (R·C, n, d) of C candidates a request, the request's keys and values -> (R·C, n, d)."""
        assert cache.key is not None
        assert cache.value is not None
        y, rows = self.attention_norm(x), cache.key.shape[0]

        def packs(tokens: Tensor) -> Tensor:
            return self._heads(tokens).unflatten(0, (rows, -1)).transpose(1, 2)  # (R, H, C, n, D)

        key, value = self.key_value(y, self.count).chunk(2, dim=-1)
        own = causal_mask(self.count, self.count, x.device)
        found = attend_packed(
            packs(self.query(y, self.count)), packs(key), packs(value), cache.key, cache.value, valid, own
        )
        return self._finish(x, found.transpose(1, 2).flatten(0, 1), self.count)


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class RequestSide:
    """Keys and values of the history in every layer, and which of them are real (R, keys)."""

    caches: list[KVCache]
    valid: list[Tensor]


class OneTrans(nn.Module):
    """The whole model: tokens, the pyramid, and a tower over the final NS states laid side by side.

    Args:
        fields: those of the NS tokens; `item` and `genres` also describe the events.
        liked: smallest rating code of a liked event.
    """

    def __init__(self, fields: Sequence[Field], config: OneTransConfig, *, liked: int = 8) -> None:
        super().__init__()
        self.config = config
        self.other = FeatureTokens(fields, config)
        self.sequence = SequenceTokens(self.other.features, config, liked=liked)
        self.count = self.other.count
        self.blocks = nn.ModuleList(OneTransBlock(config, self.count, queries) for queries in config.queries)
        self.norm = make_norm("rms", config.width)
        self.tower = ScoreMLP(self.count * config.width, config.width)
        self.logged: dict[str, float] = {"attention scores": self.score_elements}

    @property
    def shares_requests(self) -> bool:
        """Full attention lets the history see the candidate: nothing can be kept."""
        return self.config.mask == "causal"

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like (B,), the whole list at once."""
        s, valid = self.sequence(self.other.features, batch)
        x, valid = torch.cat([s, self.other(batch)], dim=1), F.pad(valid, (0, self.count), value=True)
        for block in self.blocks:
            x = block(x, valid, self.count)
            valid = valid[:, valid.shape[1] - x.shape[1] :]
        return self._read_out(x)

    def request_side(self, batch: Batch) -> RequestSide:
        """Stage I, once a request: S tokens through all layers, keeping keys and values."""
        x, valid = self.sequence(self.other.features, batch)
        side = RequestSide([], [])
        for block in self.blocks:
            side.caches.append(KVCache())
            side.valid.append(valid)
            x = block(x, valid, 0, side.caches[-1])
            valid = valid[:, valid.shape[1] - x.shape[1] :]
        return side

    def candidate_scores(self, side: RequestSide, batch: Batch) -> Tensor:
        """Stage II, (R·C,): NS tokens read what was kept, and each candidate's own."""
        x = self.other(batch)
        for block, cache, valid in zip(self.blocks, side.caches, side.valid, strict=True):
            x = block.read(x, cache, valid)
        return self._read_out(x)

    def _read_out(self, x: Tensor) -> Tensor:
        return self.tower(self.norm(x[:, -self.count :]).flatten(1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return click_loss(self.scores(batch), batch["label"])

    @property
    def score_elements(self) -> int:
        """Attention scores of one example a head: in each layer asking tokens times tokens."""
        kept, total = self.config.slots, 0
        for queries in self.config.queries:
            asking = min(queries, kept)
            total += (asking + self.count) * (kept + self.count)
            kept = asking
        return total


class TransformerRankMixer(nn.Module):
    """The paper's own control, encode then interact: a Transformer over the S tokens, read by the candidate, feeds
    a RankMixer over the same fields.

    Args:
        sequence_hidden, mixer_hidden: widths by which parameters and FLOPs are matched.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        config: OneTransConfig,
        sequence_hidden: int,
        mixer_hidden: int,
        *,
        liked: int = 8,
        layers: int = 2,
        mixer_tokens: int = 8,
    ) -> None:
        super().__init__()
        width = config.width
        self.features = FeatureEmbedding(fields, config.field_width)
        self.sequence = SequenceTokens(self.features, config, liked=liked)
        self.encoder = CausalTransformer(width, config.heads, sequence_hidden, layers, norm="rms")
        self.target = nn.Linear(self.features.width, width)
        self.reader = CrossAttentionBlock(width, config.heads, 2 * width, norm="rms")
        inputs = self.features.width + width
        self.mixer = MixerTrunk(inputs, mixer_tokens, width, dense_blocks(mixer_tokens, width, mixer_hidden, 2))
        self.logged: dict[str, float] = {}

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like (B,)."""
        e = self.features(batch)
        s, valid = self.sequence(self.features, batch)
        read = self.reader(self.target(e)[:, None], self.encoder(s, valid), padding_mask(valid))
        return self.mixer(torch.cat([e, read[:, 0]], dim=-1))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return click_loss(self.scores(batch), batch["label"])


# -- the comparison ------------------------------------------------------------------------------------------------

METHOD = "onetrans"
STRONG = "transformer -> rankmixer"
WEAK = "din + dcn-v2"
SHARED = "shared parameters"
FULL = "full attention"
NO_PYRAMID = "no pyramid"
GROUP_WISE = "group-wise tokens"
SEP = "intent order with [SEP]"
SCALES = (8, 12, 24)
"""Widths of the scaling curve beside the method's own."""


def decision_rule(scales: dict[str, float], cost: RequestCost | None = None) -> list[Clause]:
    """The accuracy claim decides; the systems claim and the scaling curve (variant -> FLOPs) are reported."""
    clauses = [
        any_of(beats(METHOD, STRONG, "auc"), beats(METHOD, STRONG, "user_auc")),
        beats(METHOD, SHARED, "auc"),
        not_below(METHOD, NO_PYRAMID, "auc", tolerance=0.001),
    ]
    if cost is not None:
        good = cost.gap < 1e-5 and cost.packed_seconds < cost.plain_seconds
        clauses.append(
            fact(
                "systems: cached scores agree to 1e-5 and are faster",
                "holds" if good else "reversed",
                str(cost),
                required=False,
            )
        )
    if len(scales) > 1:
        clauses.append(scaling_curve(scales, "auc"))
    return clauses


def fields_of(task: ClickTask) -> tuple[Field, ...]:
    """Fields of the NS tokens: all but the history and its last item, which are S tokens."""
    return tuple(f for f in task.fields if f.group not in ("history", "last item"))


def variants(
    task: ClickTask, config: OneTransConfig, *, scales: Sequence[int] = SCALES
) -> tuple[list[Variant], dict[str, float]]:
    """All arms, the strong baseline first, and the FLOPs of the arms of the scaling curve."""
    sample = task.rows(task.train[:8], torch.device("cpu"))
    fields, liked = fields_of(task), task.liked_code

    def one(**changes: object) -> Callable[[], OneTrans]:
        changed = replace(config, **changes)  # type: ignore[arg-type]
        return lambda: OneTrans(fields, changed, liked=liked)

    def arm(name: str, build: Callable[[], nn.Module], kind: Kind, note: str) -> Variant:
        return Variant(name, priced(build, sample), kind=kind, note=note)

    target = scoring_cost(one(), sample)

    def strong(sequence: int, mixer: int) -> Callable[[], nn.Module]:
        return lambda: TransformerRankMixer(fields, config, sequence, mixer, liked=liked)

    def weak(attention: int, deep: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            with_history = tuple(f for f in task.fields if f.group != "last item")
            features = FeatureEmbedding(
                with_history, config.field_width, history="din", liked=liked, attention=attention
            )
            return Ranker(features, DCNv2(features.width, deep, rank=config.field_width))

        return build

    def matched(family: Callable[[int, int], Callable[[], nn.Module]]) -> Callable[[], nn.Module]:
        return family(*matched_pair(lambda a, b: scoring_cost(family(a, b), sample), target))

    shared = _widened(one, config, target[0], sample)
    everything = (config.history,) * len(config.queries)
    names = {f"onetrans, d {width}": width for width in scales}
    arms = [
        arm(STRONG, matched(strong), "baseline", "matched in parameters and FLOPs"),
        arm(WEAK, matched(weak), "baseline", "matched in parameters and FLOPs"),
        arm(SHARED, shared, "ablation", "one set of weights for all tokens, widened to equal parameters"),
        arm(FULL, one(mask="full"), "control", "every token sees every token: nothing can be cached"),
        arm(NO_PYRAMID, one(queries=everything), "ablation", "every S token asks in every layer"),
        arm(GROUP_WISE, one(tokens="group-wise"), "ablation", "one network for each group of fields"),
        arm(SEP, one(merge="intent"), "ablation", "liked events, [SEP], disliked events"),
        arm(METHOD, one(), "method", "mixed parameters, causal, pyramid, auto-split, by time"),
        *(arm(name, one(width=width), "control", "size of the scaling curve") for name, width in names.items()),
        Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"),
    ]
    costs = {name: float(scoring_cost(one(width=width), sample)[1]) for name, width in names.items()}
    return arms, {**costs, METHOD: float(target[1])} if costs else {}


def _widened(
    one: Callable[..., Callable[[], OneTrans]], config: OneTransConfig, target: int, sample: Batch
) -> Callable[[], OneTrans]:
    """All tokens share one set of weights, as wide as `target` parameters allow; the hidden width takes the rest."""
    width = config.width
    while parameters_of(one(parameters="shared", width=width + config.heads)) <= target:
        width += config.heads

    def parameters(hidden: int) -> int:
        return parameters_of(one(parameters="shared", width=width, hidden=hidden))

    low, high = parameters(8), parameters(16)
    return one(parameters="shared", width=width, hidden=8 + round(8 * (target - low) / (high - low)))


def specimens() -> list[Specimen]:
    """Tiny models with every option switched once."""
    task = miniature(detailed=True, history_length=6)
    batch = task.rows(task.train[::6], torch.device("cpu"))
    tiny = OneTransConfig(width=8, heads=2, queries=(6, 3, 0), history=6, field_width=8, event_width=4)
    fields = fields_of(task)

    def of(config: OneTransConfig) -> Callable[[], OneTrans]:
        return lambda: OneTrans(fields, config, liked=task.liked_code)

    def specimen(name: str, config: OneTransConfig, switches: dict[str, dict[str, object]]) -> Specimen:
        return Specimen(
            name,
            of(config),
            batch,
            shape=(len(batch["label"]),),
            pad=pad_history,
            # The only thing in a batch that is not earlier than the score.
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches={title: of(replace(config, **changes)) for title, changes in switches.items()},  # type: ignore[arg-type]
        )

    return [
        specimen(
            "onetrans",
            tiny,
            {
                "width = 16": {"width": 16},
                "heads = 4": {"heads": 4},
                "expansion = 2": {"expansion": 2},
                "queries = all": {"queries": (6, 6, 6)},
                "history = 7": {"history": 7},
                "ns_tokens = 3": {"ns_tokens": 3},
                "tokens = group-wise": {"tokens": "group-wise"},
                "merge = intent": {"merge": "intent"},
                "parameters = shared": {"parameters": "shared"},
                "mask = full": {"mask": "full"},
            },
        ),
        specimen("intent", replace(tiny, merge="intent"), {"separator = false": {"separator": False}}),
    ]


def request_models(task: ClickTask) -> dict[str, OneTrans]:
    """Models of the standard width for the benchmark of a request's cost, at the history length of `task`."""
    length = task.history_length
    config = OneTransConfig(history=length, queries=(length, length // 2, 0))
    return {"onetrans": OneTrans(fields_of(task), config, liked=task.liked_code)}


def run(study: Study) -> Comparison:
    """Trains all arms on explicit feedback, measures shared requests, and applies the decision rule."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    width = study.size("width", smoke=16, standard=16)
    length = study.size("history", smoke=20, standard=32)
    with study.stage("features", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=60, standard=10_000), seed=0)
        task = ClickTask(
            interactions,
            history_length=length,
            catalogue_users=study.size("catalogue users", smoke=1, standard=40),
            detailed=True,
        )
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: there is one group of fields and one NS token less")
    config = OneTransConfig(width=width, history=length, queries=(length, length // 2, 0))
    arms, costs = variants(task, config, scales=() if smoke else SCALES)
    with study.stage("serving", trains=False):
        model = OneTrans(fields_of(task), config, liked=task.liked_code).to(device).eval()
        cost = measure_requests(task, model, device, candidates=100, rounds=3 if smoke else 9)
    return study.compare(
        task,
        baseline=arms[0],
        candidates=arms[1:],
        steps=study.steps("ranker", smoke=4, standard=120),
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=64, standard=512),
            validations=study.size("validations", smoke=1, standard=2),
        ),
        learning_rates=(3e-3,) if smoke else (1e-3, 3e-3),
        clauses=decision_rule(costs, cost),
    )
