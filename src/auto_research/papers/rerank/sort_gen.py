"""SORT-Gen: a generative re-ranking model for list-level multi-objective optimisation (arXiv:2505.07197, Taobao).

Official code: none.

Idea. A causal Transformer reads a list and tells, for each prefix, how many clicks and pays it collects (ordered
regression: one binary answer to "at least i?" for every i). The gain of appending an item to what was already chosen
then builds the list, greedily, from the heads of one queue an objective, with MMR inside each pick; the heads of a
round do not see each other, so that one pass over q tokens values them all, and a round costs q tokens, not the list.

Implemented in full: input blocks, ordered regression, incremental values, queues, masked rounds over a key-value cache
inside one call. Deviates: exposure pages are made of MovieLens ratings and prices are drawn (`tasks.rerank` says how);
open points of the paper are options of `SortConfig`.

Letters: B lists, C candidates, l list length, d width, q heads a round, S the selected prefix, j a prefix length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.transformer import BlockCache, CausalTransformer
from auto_research.runtime.device import device_for, seed_everything
from auto_research.runtime.errors import UserError
from auto_research.study.compare import Comparison, Kind, Trained, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, not_below
from auto_research.tasks.base import Batch, Fitted, Recipe, fit, train_steps
from auto_research.tasks.rerank import (
    OBJECTIVES,
    FormulaReranker,
    PriorScorer,
    Reranker,
    RerankTask,
    Weights,
    build_slates,
    formula,
    make_task,
    mmr_select,
    objective_priors,
    prior_batches,
    request_scale,
    similarities,
    take_rows,
    trade,
)

TRADE_OFFS = (0.7, 0.85, 0.95, 1.0)
WEIGHTS: Weights = (1.0, 1.0, 1.0)


# -- Ordered regression (section "SORT") -------------------------------------------------------------------------


def ordered_targets(action: Tensor) -> Tensor:
    """y[j, i] = 1 when the first j actions (B, l) in {0, 1} hold at least i ones, (B, l, l), j and i from 1."""
    least = torch.arange(1, action.shape[1] + 1, device=action.device, dtype=action.dtype)
    return (action.cumsum(1)[..., None] >= least).to(action.dtype)


def possible(length: int, device: torch.device | None = None) -> Tensor:
    """True (l, l) where a prefix of length j can hold i actions at all: i <= j."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def ordered_loss(logits: Tensor, action: Tensor, *, keep_impossible: bool = True) -> Tensor:
    """Sum over j and i of the binary cross-entropy of logits (B, l, l), averaged over lists.

    The equation sums over all i and j; the terms with i > j, whose target is always 0, may be left out.
    """
    terms = F.binary_cross_entropy_with_logits(logits, ordered_targets(action), reduction="none")
    if not keep_impossible:
        terms = terms.masked_fill(~possible(terms.shape[-1], terms.device), 0.0)
    return terms.sum((1, 2)).mean()


def monotone_logits(raw: Tensor) -> Tensor:
    """Logits (..., l) that never rise with i: the first as it is, each further one a softplus lower."""
    return raw[..., :1] - F.pad(F.softplus(raw[..., 1:]), (1, 0)).cumsum(-1)


# -- Queues and masks --------------------------------------------------------------------------------------------


def queue_heads(queues: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """First candidate of each queue that is not taken yet, (B, q), and its depth in that queue (B, q).

    Shapes: queues (B, q, C) candidates in order, taken (B, C). Several queues may have the same head.
    """
    count = queues.shape[1]
    gone = taken[:, None].expand(-1, count, -1).gather(2, queues)
    depth = (~gone).to(torch.uint8).argmax(2, keepdim=True)  # the first of the largest
    return queues.gather(2, depth)[..., 0], depth[..., 0]


def head_mask(chosen: int, heads: int, device: torch.device | None = None, *, causal: bool = True) -> Tensor:
    """True (q, chosen + q) where a head may look: at all of S and at itself, never at another head.

    `causal=False` hides S as well (the control without context). Every row keeps its own key.
    """
    prefix = torch.full((heads, chosen), causal, dtype=torch.bool, device=device)
    return torch.cat([prefix, torch.eye(heads, dtype=torch.bool, device=device)], dim=1)


def commit(cache: list[BlockCache], chosen: int, pick: Tensor) -> None:
    """Keeps S and the picked head (B, 1) of each list and drops the other heads of the round.

    A head saw S and itself, which is what it sees as the next member of S: its keys and values are already right.
    """
    for entry in cache:
        own = entry.own
        if own.key is None or own.value is None:
            raise ValueError("nothing was read into the cache yet")
        row = (chosen + pick)[:, None, :, None].expand(-1, own.key.shape[1], -1, own.key.shape[3])
        own.key = torch.cat([own.key[:, :, :chosen], own.key.gather(2, row)], dim=2)
        own.value = torch.cat([own.value[:, :, :chosen], own.value.gather(2, row)], dim=2)


# -- Model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortConfig:
    """One model and how it builds lists.

    Attributes:
        fuse: how the item, position, user and score blocks meet: `concatenate` and a linear map, or `add`.
        context: `causal`, or `diagonal`: no item sees another.
        values: `ordered` (the method) or `pointwise`: one logit a position, for the action at that position.
        impossible: whether terms with i > j stay in the loss and in the counts (`keep`, as written) or not (`mask`).
        monotone: force the logits of a prefix to fall with i.
        search: heads of all `queues`, of the click queue alone (`one queue`), or every candidate in each round (`all`).
        gain: `incremental` value after S, or `queue prefix`: the cumulative value of the queue up to the head, read
            once, whatever was selected.
        feedback: labels to learn from: `logged`, or the simulator's answers to the same pages.
        weights: alpha, beta, gamma of clicks, pays and GMV.
    """

    items: int
    content: int
    profile: int
    length: int = 8
    dim: int = 64
    layers: int = 2
    heads: int = 4
    dropout: float = 0.2
    fuse: Literal["concatenate", "add"] = "concatenate"
    context: Literal["causal", "diagonal"] = "causal"
    values: Literal["ordered", "pointwise"] = "ordered"
    impossible: Literal["keep", "mask"] = "keep"
    monotone: bool = False
    search: Literal["queues", "one queue", "all"] = "queues"
    gain: Literal["incremental", "queue prefix"] = "incremental"
    feedback: Literal["logged", "simulated"] = "logged"
    weights: Weights = WEIGHTS
    trade_offs: tuple[float, ...] = TRADE_OFFS


@dataclass
class Generated:
    """A list and what the model expects of it.

    Shapes: chosen (B, l) candidate indices; clicks, pays (B, l) expected counts in each prefix; value (B,) expected
    value of the whole list; tokens: item tokens read a list.
    """

    chosen: Tensor
    clicks: Tensor
    pays: Tensor
    value: Tensor
    tokens: int


class SortGen(Reranker):
    """Causal list Transformer with two ordered-regression heads, and the generation that its values drive."""

    def __init__(self, config: SortConfig) -> None:
        super().__init__(config.trade_offs)
        self.config = config
        dim, length = config.dim, config.length
        self.item = nn.Embedding(config.items + 1, dim)
        nn.init.normal_(self.item.weight, std=0.05)
        self.content = nn.Linear(config.content, dim)
        self.position = nn.Parameter(torch.randn(length, dim) * 0.05)
        self.user = nn.Linear(config.profile, dim)
        self.score = nn.Linear(3, dim)
        self.join = nn.Linear(4 * dim, dim) if config.fuse == "concatenate" else nn.Identity()
        # On the input too: users are few, and their profiles would otherwise be learned by heart.
        self.input_dropout = nn.Dropout(config.dropout)
        self.stack = CausalTransformer(dim, config.heads, 2 * dim, config.layers, config.dropout)
        # Both kinds of value have l outputs, so that ordered and pointwise models have the same parameters.
        self.click_head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, length))
        self.pay_head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, length))

    # -- reading --

    def blocks(self, batch: Batch) -> Tensor:
        """Item, user and score blocks of each candidate (B, C, 3 d); the position comes when it is placed."""
        dtype = self.item.weight.dtype  # the body may be bfloat16; inputs are not
        item = self.item(batch["item"]) + self.content(batch["content"].to(dtype))
        user = self.user(batch["profile"].to(dtype))[:, None].expand_as(item)
        logit = torch.logit(batch["prior"].float(), eps=1e-6)
        scores = torch.cat([logit, batch["price"].float().clamp_min(1e-6).log()[..., None]], dim=-1)
        return self.input_dropout(torch.cat([item, user, self.score(scores.to(dtype))], dim=-1))

    def place(self, blocks: Tensor, position: Tensor) -> Tensor:
        """Tokens (B, T, d) of blocks (B, T, 3 d) at positions (T,) from 0."""
        where = self.position[position].expand(len(blocks), -1, -1)
        if self.config.fuse == "concatenate":
            return self.join(torch.cat([blocks, where], dim=-1))
        return torch.stack([*blocks.chunk(3, dim=-1), where]).sum(0)

    def read(self, blocks: Tensor) -> Tensor:
        """Hidden states (B, T, d) of lists of T <= l items in order; position j sees 1..j."""
        positions = torch.arange(blocks.shape[1], device=blocks.device)
        mask = None
        if self.config.context == "diagonal":
            mask = torch.eye(len(positions), dtype=torch.bool, device=blocks.device)
        return self.stack(self.place(blocks, positions), mask=mask)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Click and pay logits (..., l) of hidden states (..., d), float32 or wider."""
        click, pay = self.click_head(hidden).float(), self.pay_head(hidden).float()
        return (monotone_logits(click), monotone_logits(pay)) if self.config.monotone else (click, pay)

    def scores(self, batch: Batch) -> Tensor:
        """Click and pay logits (B, T, 2, l) of lists in shown order."""
        return torch.stack(self.logits(self.read(self.blocks(batch))), dim=2)

    def loss(self, batch: Batch) -> Tensor:
        """Sum over the grid (or, pointwise, over positions) of click and pay cross-entropy, averaged over lists."""
        prefix = "" if self.config.feedback == "logged" else "simulated "
        total = batch["profile"].new_zeros(())
        for logits, name in zip(self.scores(batch).unbind(2), ("click", "pay"), strict=True):
            action = batch[prefix + name].to(logits.dtype)
            if self.config.values == "ordered":
                total = total + ordered_loss(logits, action, keep_impossible=self.config.impossible == "keep")
            else:
                own = logits.diagonal(dim1=1, dim2=2)
                terms = F.binary_cross_entropy_with_logits(own, action, reduction="none")
                total = total + terms.sum(1).mean()
        return total

    # -- values --

    def counts(self, logits: Tensor, position: Tensor, before: Tensor) -> Tensor:
        """Expected actions (B, T) in prefixes that end at positions (T,), from 0, of logits (B, T, l).

        Ordered: the sum of P(at least i) over i, which is the mean of an integer count. Pointwise: what was expected
        `before`, and the chance of an action here.
        """
        chance = logits.sigmoid()
        if self.config.values == "pointwise":
            return before + chance.gather(-1, position[:, None].expand(len(logits), -1, -1))[..., 0]
        if self.config.impossible == "mask":
            least = torch.arange(logits.shape[-1], device=logits.device)
            chance = chance * (least <= position[:, None])
        return chance.sum(-1)

    def prefix_counts(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Expected clicks and pays (B, T) in each prefix of lists (B, T, 3 d)."""
        logits = self.logits(self.read(blocks))
        positions = torch.arange(blocks.shape[1], device=blocks.device)
        zero = logits[0].new_zeros(())
        click, pay = (self.counts(z, positions, zero) for z in logits)
        return (click.cumsum(1), pay.cumsum(1)) if self.config.values == "pointwise" else (click, pay)

    def expected_counts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.prefix_counts(self.blocks(batch))

    def worth(self, clicks: Tensor, pays: Tensor, price: Tensor) -> Tensor:
        """alpha clicks + (beta + gamma price) pays: GMV grows by the price of an item times the pays it adds."""
        alpha, beta, gamma = self.config.weights
        return alpha * clicks + (beta + gamma * price) * pays

    # -- generation --

    def queues(self, batch: Batch) -> Tensor:
        """Candidates by prior click, pay and GMV, best first (B, q, C); for `all`, one queue for each candidate."""
        if self.config.search == "all":
            count = batch["item"].shape[1]
            first = torch.arange(count, device=batch["item"].device)
            return first[None, :, None].expand(len(batch["item"]), -1, 1)
        priors = objective_priors(batch).transpose(1, 2)
        if self.config.search == "one queue":
            priors = priors[:, :1]
        return priors.argsort(dim=2, descending=True, stable=True)

    def generate(self, batch: Batch, trade_off: float | Tensor) -> Generated:
        """Builds lists in one call: l rounds over q heads each, all as tensor operations without a host round trip.

        `trade_off` is lambda, one for all lists or (B, 1).
        """
        config = self.config
        blocks, queues, price = self.blocks(batch), self.queues(batch), batch["price"].float()
        scale, similarity = request_scale(batch, config.weights), similarities(batch).float()
        lists, candidates = batch["item"].shape
        heads = queues.shape[1]
        cache = self.stack.new_cache()
        taken = torch.zeros(lists, candidates, dtype=torch.bool, device=blocks.device)
        nearest = similarity.new_zeros(lists, candidates)
        clicks, pays, value = (scale.new_zeros(lists, 1) for _ in range(3))
        table = self._queue_prefix_values(blocks, queues, price) if config.gain == "queue prefix" else None
        chosen: list[Tensor] = []
        click_path: list[Tensor] = []
        pay_path: list[Tensor] = []
        for position in range(config.length):
            head, depth = queue_heads(queues, taken)  # (B, q)
            where = torch.full((heads,), position, device=blocks.device)
            tokens = self.place(take_rows(blocks, head), where)
            mask = head_mask(position, heads, blocks.device, causal=config.context == "causal")
            click_logits, pay_logits = self.logits(self.stack(tokens, mask=mask, cache=cache))
            new_clicks = self.counts(click_logits, where, clicks)  # (B, q): counts of [S, head]
            new_pays = self.counts(pay_logits, where, pays)
            gain = self.worth(new_clicks - clicks, new_pays - pays, price.gather(1, head))
            judged = gain if table is None else table.gather(2, depth[..., None])[..., 0]
            score = trade(judged / scale, nearest.gather(1, head), trade_off)
            pick = score.masked_fill(taken.gather(1, head), -torch.inf).argmax(1, keepdim=True)
            commit(cache, position, pick)
            clicks, pays = new_clicks.gather(1, pick), new_pays.gather(1, pick)
            value = value + gain.gather(1, pick)
            item = head.gather(1, pick)
            taken = taken.scatter(1, item, True)
            to_item = take_rows(similarity, item)[:, 0]
            nearest = torch.maximum(nearest, to_item) if chosen else to_item
            chosen.append(item)
            click_path.append(clicks)
            pay_path.append(pays)
        return Generated(
            torch.cat(chosen, 1),
            torch.cat(click_path, 1),
            torch.cat(pay_path, 1),
            value[:, 0],
            self.token_evaluations(candidates),
        )

    def _queue_prefix_values(self, blocks: Tensor, queues: Tensor, price: Tensor) -> Tensor:
        """Cumulative value (B, q, l) of the first l candidates of each queue, read as a list of their own.

        A head is never deeper than the number of items taken, so l entries are enough.
        """
        lists, heads, _ = queues.shape
        front = queues[:, :, : self.config.length].flatten(1)  # (B, q l)
        own = take_rows(blocks, front).unflatten(1, (heads, -1)).flatten(0, 1)  # (B q, l, 3 d)
        clicks, pays = (counts.unflatten(0, (lists, heads)) for counts in self.prefix_counts(own))
        clicks, pays = (F.pad(counts, (1, 0)).diff(dim=2) for counts in (clicks, pays))
        return self.worth(clicks, pays, price.gather(1, front).unflatten(1, (heads, -1))).cumsum(2)

    def rerank(self, batch: Batch, trade_off: float | Tensor) -> Tensor:
        return self.generate(batch, trade_off).chosen

    def token_evaluations(self, candidates: int) -> int:
        width = {"queues": 3, "one queue": 1, "all": candidates}[self.config.search]
        again = 2 if self.config.gain == "queue prefix" else 1
        return width * self.config.length * again


class ContextReranker(SortGen):
    """The fair baseline: the same Transformer with one logit a position scores the initial list once, then MMR.

    The candidates, sorted by the formula, are dealt in turn to C / l lists, so that each is read in a context of the
    length that training pages have; a candidate sees those ranked before it in its list. Greedy generation after S
    is what this arm lacks.
    """

    def rerank(self, batch: Batch, trade_off: float | Tensor) -> Tensor:
        config = self.config
        pages = batch["item"].shape[1] // config.length
        ranked = formula(batch, config.weights).argsort(dim=1, descending=True, stable=True)
        order = ranked.unflatten(1, (config.length, pages)).transpose(1, 2).flatten(1)  # (B, C), page after page
        dealt = take_rows(self.blocks(batch), order).unflatten(1, (pages, -1)).flatten(0, 1)  # (B pages, l, 3 d)
        clicks, pays = (F.pad(counts, (1, 0)).diff(dim=1) for counts in self.prefix_counts(dealt))
        worth = self.worth(clicks, pays, batch["price"].float().gather(1, order).view_as(clicks))
        value = torch.zeros_like(worth.view_as(order)).scatter(1, order, worth.view_as(order))
        scaled = value / request_scale(batch, config.weights)
        return mmr_select(scaled, similarities(batch).float(), trade_off, config.length)

    def token_evaluations(self, candidates: int) -> int:
        return candidates


# -- Decision ----------------------------------------------------------------------------------------------------

METHOD, POINTWISE, FORMULA, FORMULA_MMR = "sort-gen", "pointwise context + MMR", "formula", "formula + MMR"
ALL, NON_ORDERED, NO_CONTEXT = "all candidates", "non-ordered values", "no context"
METHOD_SIMULATED, POINTWISE_SIMULATED = "sort-gen, simulated feedback", "pointwise, simulated feedback"


def beats_on_two(baseline: str) -> Clause:
    """Holds when two of the three objectives rise beyond the interval and none falls; reversed when one falls."""

    def decide(compare: Compare) -> tuple[State, str]:
        found = [compare(METHOD, baseline, name) for name in OBJECTIVES]
        better, worse = sum(d.low > 0 for d in found), sum(d.high < 0 for d in found)
        state: State = "reversed" if worse else "holds" if better >= 2 else "undecided"
        return state, "; ".join(f"{d.metric} {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" for d in found)

    return Clause(f"{METHOD} beats {baseline} on two of clicks, pays and GMV, and is worse on none", decide)


def gains_remain() -> Clause:
    """Against the formula with MMR: holds when two objectives rise, reversed when none does (the gains vanish)."""

    def decide(compare: Compare) -> tuple[State, str]:
        found = [compare(METHOD, FORMULA_MMR, name) for name in OBJECTIVES]
        better = sum(d.low > 0 for d in found)
        state: State = "holds" if better >= 2 else "undecided" if better else "reversed"
        return state, "; ".join(f"{d.metric} {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" for d in found)

    return Clause(f"the gains do not vanish against {FORMULA_MMR}", decide)


def not_only_without_diversity() -> Clause:
    """Holds when the list value is higher than that of formula + MMR at the same lambda, for some lambda below 1."""

    def decide(compare: Compare) -> tuple[State, str]:
        found = {t: compare(METHOD, FORMULA_MMR, f"value at {t:g}") for t in TRADE_OFFS}
        text = "; ".join(f"lambda {t:g}: {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" for t, d in found.items())
        if any(d.low > 0 for t, d in found.items() if t < 1):
            return "holds", text
        return ("reversed" if found[1.0].low > 0 else "undecided"), text

    return Clause("the gain does not exist at lambda = 1 only", decide)


def decision_rule() -> list[Clause]:
    """The sheet's rule over logged labels; what ablations and the simulator say is reported beside it."""
    return [
        beats_on_two(FORMULA),
        beats_on_two(POINTWISE),
        gains_remain(),
        not_only_without_diversity(),
        not_below(METHOD, FORMULA_MMR, "ILAD", tolerance=0.01),
        not_below(METHOD, ALL, "value", tolerance=0.05),
        beats(METHOD, NON_ORDERED, "value", required=False),
        beats(METHOD, NO_CONTEXT, "value", required=False),
        beats(METHOD_SIMULATED, POINTWISE_SIMULATED, "simulated value", required=False),
        beats(METHOD_SIMULATED, METHOD, "simulated value", required=False),
    ]


# -- Run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A trained arm, or one that searches differently with the weights that arm `reuses` trained."""

    config: SortConfig
    kind: Kind = "ablation"
    model: type[SortGen] = SortGen
    reuses: str = ""
    note: str = ""


def arms_of(config: SortConfig) -> dict[str, Arm]:
    """All arms with a Transformer, the baseline first."""
    pointwise = replace(config, values="pointwise")
    return {
        POINTWISE: Arm(pointwise, "baseline", ContextReranker),
        METHOD: Arm(config, "method"),
        # The weights of the baseline would do, but the learning rate and the step are to be chosen for this search.
        NON_ORDERED: Arm(pointwise, note="generation by pointwise gains after S"),
        "cumulative value": Arm(
            replace(config, gain="queue prefix"),
            reuses=METHOD,
            note="value of the queue's own prefix, not the gain after S",
        ),
        "one queue": Arm(replace(config, search="one queue"), reuses=METHOD, note="heads of the click queue alone"),
        ALL: Arm(replace(config, search="all"), "control", reuses=METHOD, note="upper bound of the queue search"),
        NO_CONTEXT: Arm(replace(config, context="diagonal"), note="diagonal mask"),
        METHOD_SIMULATED: Arm(replace(config, feedback="simulated"), "control", note="learns from simulated answers"),
        POINTWISE_SIMULATED: Arm(
            replace(pointwise, feedback="simulated"), "control", ContextReranker, note="learns from simulated answers"
        ),
    }


@dataclass
class Trainer:
    """Trains each arm once a seed and learning rate; arms that reuse weights receive exactly those."""

    task: RerankTask
    arms: dict[str, Arm]
    steps: int
    recipe: Recipe
    device: torch.device
    fits: dict[tuple[str, int, float], Fitted] = field(default_factory=dict)

    def train(self, name: str, seed: int, learning_rate: float) -> Trained:
        arm = self.arms[name]
        source = arm.reuses or name
        key = (source, seed, learning_rate)
        if key not in self.fits:
            seed_everything(seed)
            model = self.arms[source].model(self.arms[source].config)
            recipe = replace(self.recipe, learning_rate=learning_rate)
            self.fits[key] = fit(model, self.task, steps=self.steps, seed=seed, device=self.device, recipe=recipe)
        fitted = self.fits[key]
        served = arm.model(arm.config)
        served.load_state_dict(fitted.model.state_dict())
        return Trained(served, fitted.steps, logged={"best step": fitted.best_step})


def run(study: Study) -> Comparison:
    """Trains the prior scorer on earlier events, then every arm on the same pages; compares the lists they build."""
    device = device_for(study.device)
    smoke = study.budget == "smoke"
    width = study.size("width", smoke=32, standard=64)
    if width % SortConfig.heads:
        raise UserError(f"WIDTH {width} is no multiple of the {SortConfig.heads} attention heads; choose one that is")
    interactions = study.dataset()
    if interactions.name != "ml-1m":
        study.note(f"pages are made of {interactions.name}, since MovieLens 1M is not on this machine")
    study.note("the simulated metrics come from a simulator with fatigue and cascade, not from people")
    interactions = interactions.subset_users(study.size("users", smoke=500, standard=6040), seed=0)
    data = build_slates(interactions, length=study.size("length", smoke=6, standard=8), candidates=24)
    with study.stage("prior scorer"):
        seed_everything(study.seeds[0])
        scorer = PriorScorer(interactions.num_items, data.content.shape[1], data.prior.profile.shape[1]).to(device)
        train_steps(
            scorer,
            prior_batches(data, study.seeds[0], 64, device),
            steps=study.steps("prior", smoke=60, standard=300),
            recipe=Recipe(learning_rate=3e-3, weight_decay=0.05, schedule="cosine"),
        )
    task = make_task(data, scorer, WEIGHTS, device)
    config = SortConfig(
        items=interactions.num_items,
        content=data.content.shape[1],
        profile=data.train.profile.shape[1],
        length=data.length,
        dim=width,
        layers=study.size("layers", smoke=1, standard=2),
    )
    arms = arms_of(config)
    trainer = Trainer(
        task,
        arms,
        steps=study.steps("train", smoke=40, standard=240, full=8000),
        recipe=Recipe(
            batch_size=64 if smoke else 128, weight_decay=0.05, schedule="cosine", validations=1 if smoke else 4
        ),
        device=device,
    )
    variants = [
        Variant(name, train=partial(trainer.train, name), kind=arm.kind, note=arm.note, trains=not arm.reuses)
        for name, arm in arms.items()
    ]
    variants += [
        Variant(FORMULA, lambda: FormulaReranker(WEIGHTS, data.length), kind="floor"),
        Variant(FORMULA_MMR, lambda: FormulaReranker(WEIGHTS, data.length, TRADE_OFFS), kind="floor"),
    ]
    return study.compare(
        task,
        baseline=variants[0],
        candidates=variants[1:],
        steps=trainer.steps,
        device=device,
        recipe=trainer.recipe,
        learning_rates=(1e-3,) if smoke else (1e-3, 3e-3),
        clauses=decision_rule(),
    )


def specimens() -> list[Specimen]:
    """A tiny SORT read along pages, the same model building lists, and the prior scorer."""
    generator = torch.Generator().manual_seed(0)
    tiny = SortConfig(items=20, content=5, profile=4, length=4, dim=16, layers=2, heads=2, dropout=0.0)
    content = F.normalize(torch.rand(tiny.items + 1, tiny.content, generator=generator), dim=-1)

    def draw(width: int, lists: int = 6) -> Batch:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)

        item = torch.randint(1, tiny.items + 1, (lists, width), generator=generator)
        click = (uniform(lists, width) < 0.5).float()
        pay = click * (uniform(lists, width) < 0.5)
        return {
            "item": item,
            "content": content[item],
            "price": uniform(lists, width) + 0.5,
            "profile": torch.randn(lists, tiny.profile, generator=generator),
            "prior": 0.8 * uniform(lists, width, 2) + 0.1,
            "click": click,
            "pay": pay,
            "simulated click": click * (uniform(lists, width) < 0.7),
            "simulated pay": pay * (uniform(lists, width) < 0.7),
        }

    page, request = draw(tiny.length), draw(12)
    known = ("item", "content", "price", "profile", "prior")
    both = {**page, **{f"request {name}": request[name] for name in known}}

    def change_last(batch: Batch) -> Batch:
        changed = {name: value.clone() for name, value in batch.items()}
        changed["item"][:, -1] = changed["item"][:, -1] % tiny.items + 1
        changed["prior"][:, -1] *= 0.5
        return changed

    def flip_labels(batch: Batch) -> Batch:
        return {name: 1 - value if name.endswith(("click", "pay")) else value for name, value in batch.items()}

    def build_lists(model: nn.Module, batch: Batch) -> Tensor:
        """Chosen candidates and the expected value of the list (B, l + 1)."""
        assert isinstance(model, SortGen)
        made = model.generate({name: batch[f"request {name}"] for name in known}, model.trade_offs[0])
        return torch.cat([made.chosen.float(), made.value[:, None]], dim=1)

    def of(**changes: object) -> Callable[[], SortGen]:
        return lambda: SortGen(replace(tiny, **changes))  # type: ignore[arg-type]

    fixed = "lists have one length"
    return [
        Specimen(
            "ordered regression",
            of(),
            page,
            shape=(6, 3, 2, 4),
            scores=lambda model, batch: model.scores(batch)[:, :-1],
            why_no_padding=fixed,
            change_later=change_last,
            switches={
                "fuse=add": of(fuse="add"),
                "context=diagonal": of(context="diagonal"),
                "values=pointwise": of(values="pointwise"),
                "impossible=mask": of(impossible="mask"),
                "monotone=True": of(monotone=True),
                "feedback=simulated": of(feedback="simulated"),
            },
        ),
        Specimen(
            "generation",
            of(),
            both,
            shape=(6, 5),
            scores=build_lists,
            why_no_padding=fixed,
            change_later=flip_labels,
            switches={
                "search=one queue": of(search="one queue"),
                "search=all": of(search="all"),
                "gain=queue prefix": of(gain="queue prefix"),
                "weights=5,1,1": of(weights=(5.0, 1.0, 1.0)),
                "trade_offs=1": of(trade_offs=(1.0,)),
            },
        ),
        Specimen(
            "prior scorer",
            lambda: PriorScorer(tiny.items, tiny.content, tiny.profile, dim=16, dropout=0.0),
            page,
            shape=(6, 4, 2),
            why_no_padding=fixed,
            change_later=flip_labels,
        ),
    ]
