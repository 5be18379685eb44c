"""SlimPer: Make Personalization Model Slim and Smart (arXiv:2607.12281, Meta).

Official code: none.

The idea: a ranker needs a few scores a pair of user and item, so it carries a small knowledge base of K slots a pair
instead of a state for every event, and lets each layer read all raw user tokens anew. What a layer reads is not passed
on itself: how well it matches templates made by the knowledge base is what refines the knowledge base.

Differs from the paper: MovieLens ratings instead of impressions, so one task (like); AdamW instead of Shampoo; hundreds
of events at most; an event is embedded from the tables of the candidate's fields.

Letters: R requests, C candidates of each, M = R·C pairs, N events, n sparse tokens, d width, K slots of the knowledge
base, q queries, t templates, L layers. L(·) of the paper is `SlotLinear`: it mixes slots, never channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import padding_mask
from auto_research.layers.history import content_width, event_content
from auto_research.layers.hstu import HSTUBlock, RelativeBias
from auto_research.layers.one_way import BlockLinear, Owner, attend_owned
from auto_research.layers.token_mixing import SlotLinear
from auto_research.layers.towers import (
    MLP,
    FeatureEmbedding,
    Field,
    ScoreMLP,
    embedding_table,
    matched_width,
    parameters_of,
)
from auto_research.layers.transformer import TransformerEncoder
from auto_research.layers.wukong import WukongKept, WukongLayer
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.scaling import scaling_curve
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, any_of, beats, fact, not_below
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.click import GAPS, RATINGS, ClickTask, PastMeans, Ranker, click_loss, miniature, pad_history
from auto_research.tasks.metrics import list_spearman
from auto_research.tasks.request_cost import RequestCost, measure_requests, priced, scoring_cost
from auto_research.tasks.timing import median_seconds

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class SlimPerConfig:
    """Sizes and switches; the defaults are the standard run's model.

    Attributes:
        width, slots, queries, templates, layers: d, K, q, t, L.
        history: N, the latest events that are read.
        hidden: hidden width of the network that refines, MLP_μ.
        kept: slots that L(·) leaves of whatever is laid flat for a network; few, or that network is all there is.
        window, event_width: events that the context of an event spans (itself the last), and columns of its type there.
        context: what the context sees of them, `types`, whole `events`, or `none` without one.
        sparse: kernel over sparse tokens, `parametric` (a network), `softmax` like the events', or `none` of them read.
        match: pass on `scores` against templates, or the `evidence` itself.
        reading: of the user tokens in `each layer`, or `once` in the first, whose evidence all layers then match.
        readout: `sum` over layers, or the `last` alone.
    """

    width: int = 16
    slots: int = 8
    queries: int = 4
    templates: int = 8
    layers: int = 3
    history: int = 50
    hidden: int = 32
    kept: int = 2
    window: int = 4
    event_width: int = 8
    context: Literal["types", "events", "none"] = "types"
    sparse: Literal["parametric", "softmax", "none"] = "parametric"
    match: Literal["scores", "evidence"] = "scores"
    reading: Literal["each layer", "once"] = "each layer"
    readout: Literal["sum", "last"] = "sum"


# -- tokens --------------------------------------------------------------------------------------------------------


@dataclass
class UserSide:
    """What R requests need no candidate for; made once, read by every layer, changed by none.

    Attributes:
        events, valid, age: E (R, N, d), which of them are real, and their age in seconds (R, N).
        sparse, dense: S (R, n, d) and D (R, d).
    """

    events: Tensor
    valid: Tensor
    age: Tensor
    sparse: Tensor
    dense: Tensor


def latest(batch: Batch, count: int) -> Batch:
    """The batch with the last `count` events of its histories."""
    return {name: value[:, -count:] if name.startswith("history_") else value for name, value in batch.items()}


class EventTokens(nn.Module):
    """E_t = MLP_s(e_sparse) + e_temporal + MLP_e(e_type) + e_context, with items and genres by the candidate's tables.

    Temporal is the place, counted back from the latest event, and the time since the event before; type is the rating;
    the context is a network over the last few events up to this one.
    """

    def __init__(self, features: FeatureEmbedding, config: SlimPerConfig) -> None:
        super().__init__()
        width, self.config = config.width, config
        self.content_network = MLP(content_width(features), width, width, activation="gelu")
        self.places, self.gaps = embedding_table(config.history, width), embedding_table(GAPS, width)
        self.types = embedding_table(RATINGS, config.event_width)
        self.type_network = MLP(config.event_width, width, width, activation="gelu")
        each = {"types": config.event_width, "events": width, "none": 0}[config.context]
        self.context_network = MLP(config.window * each, width, width, activation="gelu") if each else None

    def forward(self, features: FeatureEmbedding, batch: Batch) -> Tensor:
        """-> (R, N, d); what stands at padding means nothing."""
        code, valid = batch["history_rating"], batch["history_item"] > 0
        content = self.content_network(event_content(features, batch))
        kind = F.embedding(code, self.type_network(self.types.weight))  # there are fewer types than events
        back = torch.arange(code.shape[1] - 1, -1, -1, device=code.device)
        x = content + kind + self.places(back) + self.gaps(batch["history_gap"])
        if self.context_network is None:
            return x
        seen = F.embedding(code, self.types.weight) if self.config.context == "types" else content + kind
        seen = F.pad(seen * valid[..., None], (0, 0, self.config.window - 1, 0))
        return x + self.context_network(seen.unfold(1, self.config.window, 1).flatten(2))


def alone(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The fields, each in a group of its own: one token a field."""
    return tuple(replace(field, group=field.name) for field in fields)


class Tokens(nn.Module):
    """The inputs of all arms: user tokens of three kinds, and item and cross tokens.

    Sparse tokens are ids (user, demographics, last rating); the dense vector is a network over the user's statistics,
    the time of the request and the gap before it; item and cross tokens are item, genres, year and both statistics of
    the item, its own and those of the user with its genres.
    """

    def __init__(self, task: ClickTask, config: SlimPerConfig) -> None:
        super().__init__()
        width, self.history = config.width, config.history
        ids = [f for f in task.request_fields if f.group in ("user", "profile") or f.name == "last_rating"]
        others = [f for f in task.request_fields if f not in ids]
        self.sparse = FeatureEmbedding(alone(ids), width)
        self.numbers = FeatureEmbedding(alone(others), width)
        self.dense = MLP(self.numbers.width, width, width, activation="gelu")
        self.items = FeatureEmbedding(alone(task.candidate_fields), width)
        self.events = EventTokens(self.items, config)
        self.width, self.sparse_count, self.item_count = width, len(ids), len(task.candidate_fields)

    def user(self, batch: Batch) -> UserSide:
        """User tokens of R requests."""
        batch = latest(batch, self.history)
        return UserSide(
            events=self.events(self.items, batch),
            valid=batch["history_item"] > 0,
            age=batch["history_age"],
            sparse=self.sparse(batch).unflatten(-1, (-1, self.width)),
            dense=self.dense(self.numbers(batch)),
        )

    def item(self, batch: Batch) -> Tensor:
        """Item and cross tokens (M, n_item, d)."""
        return self.items(batch).unflatten(-1, (-1, self.width))


# -- the layer -----------------------------------------------------------------------------------------------------


def mix_owned(weights: Tensor, tokens: Tensor, owner: Owner) -> Tensor:
    """Each pair's weights (M, q, n) over the tokens of its request (R, n, d), which are not copied: (M, q, d)."""
    packed = weights.unflatten(0, (len(tokens), -1))
    return (packed.flatten(1, 2) @ tokens).unflatten(1, packed.shape[1:3]).flatten(0, 1)


class SparseKernel(nn.Module):
    """Φ_s = MLP([L(Q); L(S)]), laid flat: weights of the sparse tokens for each query, whose number is fixed.

    Weights may be of either sign and need not add up to one. What S brings to the network is computed once a request.
    """

    def __init__(self, config: SlimPerConfig, tokens: int) -> None:
        super().__init__()
        flat = config.kept * config.width
        self.queries, self.tokens = SlotLinear(config.queries, config.kept), SlotLinear(tokens, config.kept)
        self.rise = BlockLinear((flat, flat), (0, config.width))
        self.fall = nn.Linear(config.width, config.queries * tokens)

    def forward(self, query: Tensor, sparse: Tensor, owner: Owner) -> Tensor:
        """Q (M, q, d), S (R, n, d) -> (M, q, n)."""
        _, kept = self.rise.request(self.tokens(sparse).flatten(1))
        hidden = F.gelu(self.rise.candidate(self.queries(query).flatten(1), kept, owner))
        return self.fall(hidden).unflatten(-1, (-1, sparse.shape[1]))


class FlatNorm(nn.RMSNorm):
    """RMSNorm of a matrix laid flat, in float32 at least: (M, a, b) -> (M, a·b)."""

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(exact)
        return F.rms_norm(x.flatten(1).to(exact), self.normalized_shape, weight, 1e-6).to(x.dtype)


@dataclass
class Evidence:
    """What was read of the events and of the sparse tokens, R_e and R_s (M, q, d); no R_s where none are read."""

    events: Tensor
    sparse: Tensor | None


class SlimPerLayer(nn.Module):
    """Select evidence, match it, refine the knowledge base.

    Args:
        sparse_tokens: n.
        selects: whether the layer reads user tokens; else it is given evidence.
    """

    def __init__(self, config: SlimPerConfig, sparse_tokens: int, *, selects: bool = True) -> None:
        super().__init__()
        width, slots, self.config = config.width, config.slots, config
        self.query = SlotLinear(slots, config.queries) if selects else None
        parametric = selects and config.sparse == "parametric"
        self.kernel = SparseKernel(config, sparse_tokens) if parametric else None
        matches = config.match == "scores"
        self.templates = SlotLinear(slots, config.templates) if matches else None
        found = config.queries * (config.templates if matches else width)
        self.event_norm = FlatNorm(found)
        self.sparse_norm = FlatNorm(found) if config.sparse != "none" else None
        self.summary = SlotLinear(slots, config.kept)
        kinds = 2 if config.sparse != "none" else 1
        self.rise = BlockLinear((width, kinds * found + config.kept * width), (0, config.hidden))
        self.fall = nn.Linear(config.hidden, slots * width)
        nn.init.normal_(self.fall.weight, std=0.02)  # a layer begins near the identity
        nn.init.zeros_(self.fall.bias)

    def select(self, x: Tensor, user: UserSide, owner: Owner) -> Evidence:
        """Q = L(X); R_e = softmax(Q Eᵀ / √d) E over real events, R_s = Φ_s S."""
        assert self.query is not None
        query = self.query(x)
        keys = user.events[:, None]
        events = attend_owned(query[:, None], keys, keys, user.valid, owner)[:, 0]
        if self.kernel is not None:
            return Evidence(events, mix_owned(self.kernel(query, user.sparse, owner), user.sparse, owner))
        if self.config.sparse == "none":
            return Evidence(events, None)
        keys = user.sparse[:, None]
        everything = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        return Evidence(events, attend_owned(query[:, None], keys, keys, everything, owner)[:, 0])

    def match(self, x: Tensor, evidence: Evidence) -> list[Tensor]:
        """T = L(X); λ = R Tᵀ of each kind of evidence, normalised and flat: [(M, q·t), ...], sparse tokens first."""
        kinds = [(self.event_norm, evidence.events)]
        if self.sparse_norm is not None and evidence.sparse is not None:
            kinds.insert(0, (self.sparse_norm, evidence.sparse))
        if self.templates is None:
            return [norm(found) for norm, found in kinds]
        templates = self.templates(x).mT
        return [norm(found @ templates) for norm, found in kinds]

    def forward(
        self, x: Tensor, user: UserSide, owner: Owner, evidence: Evidence | None = None
    ) -> tuple[Tensor, Evidence]:
        """X (M, K, d) -> X + MLP_μ([λ_s; λ_e; L(X); D]) and the evidence that was matched."""
        evidence = evidence or self.select(x, user, owner)
        _, shared = self.rise.request(user.dense)
        own = torch.cat([*self.match(x, evidence), self.summary(x).flatten(1)], dim=-1)
        change = self.fall(F.gelu(self.rise.candidate(own, shared, owner)))
        return x + change.unflatten(-1, (self.config.slots, -1)), evidence


# -- the models ----------------------------------------------------------------------------------------------------


class TokenRanker(nn.Module, ABC):
    """A model over `Tokens` that scores candidates against the user side of their request."""

    shares_requests = True

    def __init__(self, task: ClickTask, config: SlimPerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Tokens(task, config)
        self.logged: dict[str, float] = {}

    @abstractmethod
    def pair_scores(self, user: UserSide, items: Tensor, owner: Owner) -> Tensor:
        """User side of R requests, item tokens (M, n_item, d) of M = R·C pairs, a request's adjacent -> logits (M,)."""

    def request_side(self, batch: Batch) -> UserSide:
        """User tokens, once a request."""
        return self.tokens.user(batch)

    def candidate_scores(self, side: UserSide, batch: Batch) -> Tensor:
        """Logits (R·C,) of the candidates of R requests, adjacent; nothing of a candidate is kept."""
        items, requests = self.tokens.item(batch), len(side.events)
        return self.pair_scores(side, items, Owner.adjacent(requests, len(items) // requests, items.device))

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like (B,): each example a request with one candidate."""
        return self.candidate_scores(self.request_side(batch), batch)

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy, a float32 scalar."""
        return click_loss(self.scores(batch), batch["label"])


class SlimPer(TokenRanker):
    """K slots a pair that read all user tokens in every layer, and a logit from what each layer left in them."""

    def __init__(self, task: ClickTask, config: SlimPerConfig) -> None:
        super().__init__(task, config)
        tokens, width = self.tokens, config.width
        self.start = SlotLinear(tokens.item_count, config.slots)
        self.layers = nn.ModuleList(
            SlimPerLayer(config, tokens.sparse_count, selects=config.reading == "each layer" or i == 0)
            for i in range(config.layers)
        )
        reads = config.layers if config.readout == "sum" else 1
        self.reads = nn.ModuleList(SlotLinear(config.slots, config.kept) for _ in range(reads))
        self.task = MLP(config.kept * width, width, width, activation="gelu")
        self.head = nn.Linear(width, 1)
        readings = config.layers if config.reading == "each layer" else 1
        seen = config.history + (tokens.sparse_count if config.sparse != "none" else 0)
        self.logged |= {
            "attention scores": float(readings * config.queries * seen),
            "carried state": float(config.slots * width),
        }

    def pair_scores(self, user: UserSide, items: Tensor, owner: Owner) -> Tensor:
        """X⁰ = L(item and cross tokens); L layers; the sum over layers of MLP(L(Xᵏ)), and a linear map to the logit."""
        x, evidence, states = self.start(items), None, []
        for layer in self.layers:
            x, found = layer(x, user, owner, evidence)
            evidence = found if self.config.reading == "once" else None
            states.append(x)
        read = [self.task(part(x).flatten(1)) for part, x in zip(self.reads, states[-len(self.reads) :], strict=True)]
        return self.head(torch.stack(read).sum(0)).squeeze(-1).float()


class HSTUWukong(TokenRanker):
    """The paper's control: HSTU over [events; candidate], Wukong over all other tokens, joined at the end.

    Events never see a candidate, so that all candidates of a request stand behind one history.

    Args:
        hidden: of the networks in Wukong, by which parameters are matched.
    """

    def __init__(self, task: ClickTask, config: SlimPerConfig, hidden: int, *, heads: int = 1, rank: int = 8) -> None:
        super().__init__(task, config)
        tokens, width, length = self.tokens, config.width, config.history + 1
        self.target = nn.Linear(tokens.item_count * width, width)
        self.bias = RelativeBias(heads, length)
        self.blocks = nn.ModuleList(HSTUBlock(width, heads, length) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        features = tokens.sparse_count + 1 + tokens.item_count
        group = (0, features)
        self.interaction = nn.ModuleList(WukongLayer(width, rank, (0, hidden), group, group) for _ in range(2))
        self.tower = ScoreMLP((1 + features) * width, 2 * width)
        self.logged |= {
            "attention scores": float(heads * ((config.layers - 1) * length**2 + length)),  # the last asks once
            "carried state": float((length + features) * width),
        }

    def sequence(self, user: UserSide, items: Tensor) -> Tensor:
        """The candidate's state behind the history, (M, d)."""
        target = self.target(items.flatten(1)).unflatten(0, (len(user.events), -1))  # (R, C, d)
        past, count = user.events.shape[1], target.shape[1]
        place = torch.arange(past + count, device=target.device).clamp(max=past)
        valid = F.pad(user.valid, (0, count), value=True)
        same = torch.eye(past + count, dtype=torch.bool, device=target.device)
        allowed = ((place[None, :] < place[:, None]) | same) & padding_mask(valid)
        bias = self.bias(place, F.pad(user.age, (0, count)))
        x = torch.cat([user.events, target], dim=1)
        for i, block in enumerate(self.blocks):
            x = block(x, allowed, bias, latest=count if i == len(self.blocks) - 1 else None)
        return self.norm(x).flatten(0, 1)

    def pair_scores(self, user: UserSide, items: Tensor, owner: Owner) -> Tensor:
        """Late fusion: one network over the candidate's state and Wukong's tokens."""
        known = torch.cat([user.sparse, user.dense[:, None]], dim=1)
        met = torch.cat([owner.gather(known), items], dim=1)
        for layer in self.interaction:
            met = layer.candidate(met, WukongKept(), owner)
        return self.tower(torch.cat([self.sequence(user, items), met.flatten(1)], dim=-1)).float()


class FullTransformer(TokenRanker):
    """Every token carried through every layer: a softmax Transformer over [S; D; E; item], in which all see all.

    Args:
        hidden: of the feed-forward networks, by which parameters are matched.
    """

    shares_requests = False

    def __init__(self, task: ClickTask, config: SlimPerConfig, hidden: int, *, heads: int = 2) -> None:
        super().__init__(task, config)
        tokens, width = self.tokens, config.width
        self.target = nn.Linear(tokens.item_count * width, width)
        self.encoder = TransformerEncoder(width, heads, hidden, config.layers)
        self.tower = ScoreMLP(width, width)
        length = tokens.sparse_count + 1 + config.history + 1
        self.logged |= {
            "attention scores": float(heads * ((config.layers - 1) * length**2 + length)),
            "carried state": float(length * width),
        }

    def pair_scores(self, user: UserSide, items: Tensor, owner: Owner) -> Tensor:
        """The user side is repeated for every candidate, as events see the candidate."""
        fixed = torch.cat([user.sparse, user.dense[:, None], user.events], dim=1)
        x = torch.cat([owner.gather(fixed), self.target(items.flatten(1))[:, None]], dim=1)
        valid = F.pad(F.pad(owner.gather(user.valid), (user.sparse.shape[1] + 1, 0), value=True), (0, 1), value=True)
        return self.tower(self.encoder(x, valid, latest=1)[:, 0]).float()


class ShortDIN(Ranker):
    """DIN over the fields of the task and the same events as the other arms.

    Args:
        hidden: of the tower's first layer, by which parameters are matched.
    """

    def __init__(self, task: ClickTask, config: SlimPerConfig, hidden: int) -> None:
        features = FeatureEmbedding(alone(task.fields), config.width, history="din", liked=task.liked_code)
        super().__init__(features, ScoreMLP(features.width, hidden, config.width, activation="prelu"))
        self.history = config.history

    def scores(self, batch: Batch) -> Tensor:
        """Logit of a like (B,)."""
        return super().scores(latest(batch, self.history))


# -- the comparison ------------------------------------------------------------------------------------------------

METHOD = "slimper"
HSTU = "hstu + wukong"
TRANSFORMER = "full transformer"
DIN = "din"
NO_MATCH = "evidence instead of scores"
ONCE = "evidence read once"
NO_SPARSE = "no sparse branch"
SOFT_SPARSE = "softmax over sparse tokens"
LAST = "last-layer read-out"
NO_CONTEXT = "no event context"
ABLATIONS: dict[str, dict[str, str]] = {
    NO_MATCH: {"match": "evidence"},
    ONCE: {"reading": "once"},
    NO_SPARSE: {"sparse": "none"},
    SOFT_SPARSE: {"sparse": "softmax"},
    LAST: {"readout": "last"},
    NO_CONTEXT: {"context": "none"},
}
BUDGETED = (HSTU, TRANSFORMER, DIN, *ABLATIONS)
"""Arms whose parameters equal the method's."""


@dataclass(frozen=True)
class Sweep:
    """Sizes beside the method's own: K (with q = K/4 and t = K/2), L, and N; and N at which the control stands, too."""

    slots: tuple[int, ...] = (2, 4, 8, 16)
    layers: tuple[int, ...] = (1, 2, 5)
    lengths: tuple[int, ...] = (20, 100, 200)
    long: int = 100

    def slots_of(self) -> dict[str, int]:
        """Arm -> K."""
        return {f"{METHOD}, K {k}": k for k in self.slots}


def at_length(name: str, length: int) -> str:
    """Name of an arm at another N."""
    return f"{name}, N {length}"


def slots_config(config: SlimPerConfig, slots: int) -> SlimPerConfig:
    """K slots with a quarter as many queries and half as many templates, as in the paper's sweep."""
    return replace(config, slots=slots, queries=max(1, slots // 4), templates=max(1, slots // 2))


def slim(task: ClickTask, config: SlimPerConfig, **changes: object) -> Callable[[], SlimPer]:
    """Builds SlimPer with some options changed."""
    changed = replace(config, **changes)  # type: ignore[arg-type]
    return lambda: SlimPer(task, changed)


def equal(build: Callable[[int], nn.Module], target: int) -> Callable[[], nn.Module]:
    """Builds the model whose hidden width brings its parameters nearest to `target`."""
    width = matched_width(lambda hidden: parameters_of(lambda: build(hidden)), target)
    return lambda: build(width)


def control(task: ClickTask, config: SlimPerConfig) -> Callable[[], nn.Module]:
    """HSTU + Wukong with as many parameters as SlimPer has at this config."""
    return equal(lambda hidden: HSTUWukong(task, config, hidden), parameters_of(slim(task, config)))


def variants(task: ClickTask, config: SlimPerConfig, sweep: Sweep) -> tuple[list[Variant], dict[str, float]]:
    """All arms, the paper's control first, and the FLOPs of an example of each."""
    sample = task.rows(task.train[:8], torch.device("cpu"))
    target = parameters_of(slim(task, config))
    costs: dict[str, float] = {}

    def arm(name: str, build: Callable[[], nn.Module], kind: Kind, note: str = "") -> Variant:
        costs[name] = float(scoring_cost(build, sample)[1])
        return Variant(name, priced(build, sample), kind=kind, note=note)

    def ablated(changes: dict[str, str]) -> Callable[[], nn.Module]:
        return equal(lambda hidden: slim(task, config, hidden=hidden, **changes)(), target)

    matched = "matched in parameters"
    long = replace(config, history=sweep.long)
    arms = [
        arm(HSTU, control(task, config), "baseline", matched),
        arm(METHOD, slim(task, config), "method"),
        arm(
            TRANSFORMER,
            equal(lambda hidden: FullTransformer(task, config, hidden), target),
            "control",
            f"{matched}; all see all",
        ),
        arm(DIN, equal(lambda hidden: ShortDIN(task, config, hidden), target), "control", matched),
        *(arm(name, ablated(changes), "ablation", matched) for name, changes in ABLATIONS.items()),
        *(
            arm(name, slim(task, slots_config(config, k)), "control", "q = K/4, t = K/2")
            for name, k in sweep.slots_of().items()
        ),
        *(arm(f"{METHOD}, L {n}", slim(task, config, layers=n), "control", "depth") for n in sweep.layers),
        *(arm(at_length(METHOD, n), slim(task, config, history=n), "control", "length") for n in sweep.lengths),
        arm(at_length(HSTU, sweep.long), control(task, long), "control", "matched to slimper at this length"),
        Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"),
    ]
    return arms, costs


def throughput(
    task: ClickTask, config: SlimPerConfig, lengths: Sequence[int], device: torch.device, *, examples: int, rounds: int
) -> dict[str, dict[int, float]]:
    """Examples scored a second by SlimPer and by its control at each N; ways alternate, medians after a warm-up."""
    batch = task.rows(task.test[:examples], device)
    models: dict[tuple[str, int], nn.Module] = {}
    for length in lengths:
        sized = replace(config, history=length)
        models[METHOD, length] = slim(task, sized)().to(device).eval()
        models[HSTU, length] = control(task, sized)().to(device).eval()

    def way(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: model.scores(batch)

    ways = {f"{name} {length}": way(model) for (name, length), model in models.items()}
    with torch.no_grad():
        seconds = median_seconds(ways, device, rounds=rounds)
    count = len(batch["label"])
    return {name: {n: count / seconds[f"{name} {n}"] for n in lengths} for name in (METHOD, HSTU)}


def keeps_pace(speeds: dict[str, dict[int, float]]) -> Clause:
    """Holds when the share of throughput that the longest history costs is smaller than the control's."""
    lengths = list(speeds[METHOD])
    short, long = min(lengths), max(lengths)
    loss = {name: 1 - speed[long] / speed[short] for name, speed in speeds.items()}
    shown = "; ".join(
        f"{name}: " + ", ".join(f"{rate:.0f}/s at N {n}" for n, rate in speed.items()) + f", {-loss[name]:+.0%}"
        for name, speed in speeds.items()
    )
    state: State = "holds" if loss[METHOD] < loss[HSTU] else "reversed"
    return fact(f"scaling: from N {short} to {long} {METHOD} loses less throughput than {HSTU}", state, shown)


def level_at_less_cost(method: str, baseline: str, ratio: float, *, times: float = 4.0) -> Clause:
    """Holds when a loss of more than 0.1 % is ruled out and the baseline takes at least `times` the FLOPs."""
    level = not_below(method, baseline, "ne", tolerance=0.001)

    def decide(compare: Compare) -> tuple[State, str]:
        state, detail = level.decide(compare)
        return ("reversed" if ratio < times else state), f"{detail}, at {ratio:.1f} times fewer FLOPs"

    return Clause(f"{level.text} at {times:g} times fewer FLOPs", decide)


def falls_with_slots(slots: dict[str, int]) -> Clause:
    """Holds when NE falls with K (Spearman below -0.8), is reversed when it rises with K or the most slots do worst."""
    names = sorted(slots, key=lambda name: slots[name])

    def decide(compare: Compare) -> tuple[State, str]:
        ends = compare(names[-1], names[0], "ne")
        values = [ends.baseline_mean, *(ends.baseline_mean - compare(name, names[0], "ne").mean for name in names[1:])]
        counts = torch.tensor([[float(slots[name]) for name in names]])
        rank = float(list_spearman(counts, torch.tensor([values]), torch.ones_like(counts, dtype=torch.bool)))
        state: State = "holds" if rank < -0.8 else "reversed" if rank > 0 or ends.high < 0 else "undecided"
        shown = ", ".join(f"{slots[name]}: {value:.4f}" for name, value in zip(names, values, strict=True))
        return state, f"ne by K {shown}; Spearman {rank:+.2f}"

    return Clause("ne falls with K", decide)


def decision_rule(
    costs: dict[str, float], sweep: Sweep, speeds: dict[str, dict[int, float]], cost: RequestCost
) -> list[Clause]:
    """Quality, mechanism and scaling decide; the rest is reported."""
    method, baseline = at_length(METHOD, sweep.long), at_length(HSTU, sweep.long)
    longest = at_length(METHOD, max(sweep.lengths))
    cheaper = level_at_less_cost(method, baseline, costs[baseline] / costs[method])
    lengths = {name: costs[name] for name in (METHOD, *(at_length(METHOD, n) for n in sweep.lengths))}
    depths = {name: costs[name] for name in (METHOD, *(f"{METHOD}, L {n}" for n in sweep.layers))}
    parts = {
        "quality": [any_of(beats(METHOD, HSTU, "ne"), cheaper)],
        "mechanism": [beats(METHOD, ONCE, "ne"), falls_with_slots(sweep.slots_of())],
        "scaling": [beats(longest, METHOD, "ne")],
        "reported": [
            *(beats(METHOD, name, "ne", required=False) for name in (TRANSFORMER, DIN, *ABLATIONS) if name != ONCE),
            replace(scaling_curve(lengths, "auc"), text="scaling: auc grows with N at equal data"),
            replace(scaling_curve(depths, "auc"), text="scaling: auc grows with L at equal data"),
            fact(
                "packed scores agree to 1e-5 and are faster",
                "holds" if cost.gap < 1e-5 and cost.packed_seconds < cost.plain_seconds else "reversed",
                str(cost),
                required=False,
            ),
        ],
    }
    named = [replace(clause, text=f"{part}: {clause.text}") for part, clauses in parts.items() for clause in clauses]
    return [*named, keeps_pace(speeds)]


def run(study: Study) -> Comparison:
    """Trains all arms on explicit feedback, measures throughput and packed requests, and applies the decision rule."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    config = SlimPerConfig(
        width=study.size("width", smoke=16, standard=16),
        slots=study.size("slots", smoke=4, standard=8),
        queries=study.size("queries", smoke=2, standard=4),
        templates=study.size("templates", smoke=4, standard=8),
        layers=study.size("layers", smoke=2, standard=3),
        history=study.size("history", smoke=10, standard=50),
        hidden=study.size("hidden", smoke=32, standard=32),
    )
    sweep = Sweep(slots=(2, 4), layers=(1,), lengths=(20,), long=20) if smoke else Sweep()
    with study.stage("features", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=40, standard=10_000), seed=0)
        task = ClickTask(interactions, history_length=max(sweep.lengths), detailed=True, primary="ne")
    if interactions.users is None:
        study.note(f"{interactions.name} has no demographics: the user's id and last rating are the sparse tokens")
    arms, costs = variants(task, config, sweep)
    with study.stage("serving", trains=False):
        model = slim(task, config)().to(device).eval()
        cost = measure_requests(task, model, device, candidates=100, rounds=1 if smoke else 9)
        lengths = (config.history, max(sweep.lengths))
        speeds = throughput(
            task,
            config,
            lengths,
            device,
            examples=study.size("timed examples", smoke=16, standard=64),
            rounds=1 if smoke else 9,
        )
    return study.compare(
        task,
        baseline=arms[0],
        candidates=arms[1:],
        steps=study.steps("ranker", smoke=2, standard=40),
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=32, standard=256),
            schedule="cosine",
            validations=study.size("validations", smoke=1, standard=1),
        ),
        learning_rates=(1e-2,) if smoke else (4e-3, 1e-2),
        clauses=decision_rule(costs, sweep, speeds, cost),
    )


def specimens() -> list[Specimen]:
    """Tiny models with every option switched once."""
    task = miniature(detailed=True, history_length=6)
    batch = task.rows(task.train[::6], torch.device("cpu"))
    tiny = SlimPerConfig(width=8, slots=4, queries=2, templates=3, layers=2, history=6, hidden=16, event_width=4)

    def specimen(
        name: str, build: Callable[[], nn.Module], switches: dict[str, Callable[[], nn.Module]] | None = None
    ) -> Specimen:
        return Specimen(
            name,
            build,
            batch,
            shape=(len(batch["label"]),),
            pad=pad_history,
            # The only thing in a batch that is not earlier than the score.
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches=switches or {},
        )

    switches: dict[str, dict[str, object]] = {
        "width = 16": {"width": 16},
        "slots = 8": {"slots": 8},
        "queries = 4": {"queries": 4},
        "templates = 6": {"templates": 6},
        "layers = 1": {"layers": 1},
        "history = 3": {"history": 3},
        "hidden = 32": {"hidden": 32},
        "kept = 1": {"kept": 1},
        "window = 2": {"window": 2},
        "event_width = 8": {"event_width": 8},
        "context = events": {"context": "events"},
        "context = none": {"context": "none"},
        "sparse = softmax": {"sparse": "softmax"},
        "sparse = none": {"sparse": "none"},
        "match = evidence": {"match": "evidence"},
        "reading = once": {"reading": "once"},
        "readout = last": {"readout": "last"},
    }
    return [
        specimen(METHOD, slim(task, tiny), {title: slim(task, tiny, **changes) for title, changes in switches.items()}),
        specimen(HSTU, lambda: HSTUWukong(task, tiny, 16, rank=4)),
        specimen(TRANSFORMER, lambda: FullTransformer(task, tiny, 16)),
        specimen(DIN, lambda: ShortDIN(task, tiny, 16)),
    ]
