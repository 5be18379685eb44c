"""ARGUS: Scaling Recommender Transformers to One Billion Parameters (arXiv:2507.15994, Yandex).

Official code: none.

The idea: a log of (context, item, feedback) triples modelled from left to right falls into two tasks: which item
comes next, and how the user reacts to it. A causal transformer that is pre-trained on both is fine-tuned into two
towers whose user vector an offline job computes, late by design.

Differs from the paper: MovieLens ratings are the feedback (five classes, and liked or not); context is time alone; an
encoder of tens of thousands of parameters instead of up to a billion.

Letters: B windows, T events, G impressions of S events, I items, d width; c context, i item, f feedback, h state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from auto_research.layers.heads import TaskHeads, binary_task_losses
from auto_research.layers.hstu import HSTUBlock, RelativeBias
from auto_research.layers.item_loss import corrected_softmax_loss, full_softmax_loss, mixture_log_q
from auto_research.layers.longer import GAPS
from auto_research.layers.pairwise import logistic_win, order_loss, pairs
from auto_research.layers.towers import MLP, TargetAttention, embedding_table, forward_flops
from auto_research.layers.transformer import CausalTransformer
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Trained, Variant
from auto_research.study.scaling import scaling_curve
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, not_below
from auto_research.tasks.base import Batch, Recipe, fit, train_steps
from auto_research.tasks.baselines import SASRec
from auto_research.tasks.event_log import ACTIONS, LIKED, EventLog, miniature
from auto_research.tasks.user_log import PLACES, Answers, UserLog, delayed, feedback_loss

if TYPE_CHECKING:
    from auto_research.study.context import Study

COLDEST, HOTTEST = math.log(0.01), math.log(100.0)


@dataclass(frozen=True)
class ArgusConfig:
    """Sizes and switches; the defaults are ARGUS.

    Attributes:
        width, layers, heads: of the encoder.
        impressions, size: G and S; a window holds G·S events.
        tokens: `three` an event (c, i, f), or `one` fused from all, with the context and item of the next event joined
            to the state by small networks.
        order: `item-first` predicts the item from c and the feedback from i; `feedback-first` is the reverse, with
            tokens in the order c, f, i.
        objectives: of pre-training.
        feedback_weight: weight of feedback prediction beside next-item prediction (open in the paper).
        item_loss: `softmax` over all items, or `sampled` with logQ correction and mixed negatives.
        uniform: negatives drawn evenly under `sampled`, beside the targets of the batch.
        encoder: `transformer`, or `hstu`.
        delay: impressions between the user's state and what it ranks.
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    impressions: int = 6
    size: int = 8
    tokens: Literal["three", "one"] = "three"
    order: Literal["item-first", "feedback-first"] = "item-first"
    objectives: Literal["both", "item", "feedback"] = "both"
    feedback_weight: float = 1.0
    item_loss: Literal["softmax", "sampled"] = "softmax"
    uniform: int = 256
    encoder: Literal["transformer", "hstu"] = "transformer"
    delay: int = 1

    @property
    def length(self) -> int:
        """Events of a window."""
        return self.impressions * self.size


class Towers(nn.Module):
    """One tower for the context, one for the item, one for the feedback: embeddings, then a small network."""

    genres: Tensor
    year: Tensor

    def __init__(self, log: EventLog, width: int) -> None:
        super().__init__()
        self.gap, self.place = embedding_table(GAPS + 1, width), embedding_table(PLACES, width)
        self.hour, self.weekday = embedding_table(24, width), embedding_table(7, width)
        self.id, self.years = embedding_table(log.num_items + 1, width), embedding_table(log.years, width)
        self.genre = nn.Linear(log.genres.shape[1], width, bias=False)
        self.stars, self.liked = embedding_table(ACTIONS, width), embedding_table(2, width)
        shares = log.genres / log.genres.sum(1, keepdim=True).clamp(min=1)
        self.register_buffer("genres", shares, persistent=False)
        self.register_buffer("year", log.year, persistent=False)
        self.context_net, self.item_net, self.feedback_net = (
            MLP(width, 2 * width, width, activation="gelu") for _ in range(3)
        )

    def context(self, batch: Batch) -> Tensor:
        """What is known before an event, (B, T, d)."""
        found = self.gap(batch["gap"]) + self.place(batch["place"]) + self.hour(batch["hour"])
        return self.context_net(found + self.weekday(batch["weekday"]))

    def item(self, item: Tensor) -> Tensor:
        """Shifted items (...) -> (..., d)."""
        return self.item_net(self.id(item) + self.genre(self.genres[item]) + self.years(self.year[item]))

    def catalogue(self) -> Tensor:
        """All items (I + 1, d), row 0 for padding."""
        return self.item(torch.arange(self.id.num_embeddings, device=self.year.device))

    def feedback(self, action: Tensor) -> Tensor:
        """Actions (B, T) -> (B, T, d)."""
        return self.feedback_net(self.stars(action) + self.liked((action >= LIKED).long()))


class Encoder(nn.Module):
    """Towers and a causal transformer over the log."""

    def __init__(self, log: EventLog, config: ArgusConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.towers = Towers(log, width)
        self.per_event = 3 if config.tokens == "three" else 1
        self.positions, self.kinds = embedding_table(config.length, width), embedding_table(self.per_event, width)
        length = self.per_event * config.length
        if config.encoder == "transformer":
            self.stack = CausalTransformer(width, config.heads, 4 * width, config.layers)
        else:
            self.blocks = nn.ModuleList(HSTUBlock(width, config.heads, length) for _ in range(config.layers))
            self.bias, self.norm = RelativeBias(config.heads, length), nn.LayerNorm(width)
        self.fuse = MLP(3 * width, 2 * width, width, activation="gelu") if config.tokens == "one" else None
        if config.tokens == "one":
            self.start = nn.Parameter(torch.randn(width) * 0.5 / width**0.5)
            self.before_first = MLP(2 * width, 2 * width, width, activation="gelu")
            self.before_second = MLP(3 * width, 2 * width, width, activation="gelu")

    def _encode(self, x: Tensor) -> Tensor:
        """Tokens (B, L, d), causal."""
        if self.config.encoder == "transformer":
            return self.stack(x)
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(place, torch.zeros(1, len(place), dtype=torch.int64, device=x.device))
        allowed = place <= place[:, None]
        for block in self.blocks:
            x = block(x, allowed, bias)
        return self.norm(x)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """States (B, T, d) that predict the item, that predict the feedback, and after each event.

        Item first: the item is predicted by the context's token and the feedback by the item's. Feedback first: the
        feedback by the context's token and the item by the feedback's.
        """
        c, i = self.towers.context(batch), self.towers.item(batch["item"])
        f = self.towers.feedback(batch["action"])
        where = self.positions(torch.arange(c.shape[1], device=c.device))
        if self.fuse is not None:
            after = self._encode(self.fuse(torch.cat([c, i, f], -1)) + where + self.kinds.weight[0])
            before = torch.cat([self.start.expand(len(c), 1, -1), after[:, :-1]], 1)
            known = i if self.config.order == "item-first" else f
            states = (
                self.before_first(torch.cat([before, c], -1)),
                self.before_second(torch.cat([before, c, known], -1)),
            )
        else:
            inner = (i, f) if self.config.order == "item-first" else (f, i)
            tokens = torch.stack([c, *inner], 2) + self.kinds.weight + where[:, None]
            h = self._encode(tokens.flatten(1, 2)).unflatten(1, (-1, 3))
            states, after = (h[:, :, 0], h[:, :, 1]), h[:, :, 2]
        on_item, on_feedback = states if self.config.order == "item-first" else states[::-1]
        return on_item, on_feedback, after


class Pretraining(nn.Module):
    """Stage 1: next-item and feedback prediction at every event of a window."""

    counts: Tensor

    def __init__(self, log: EventLog, config: ArgusConfig, counts: Tensor) -> None:
        """`counts` (I + 1,): training events of each item, for the logQ correction."""
        super().__init__()
        self.config = config
        self.encoder = Encoder(log, config)
        self.project = nn.Linear(config.width, config.width)
        self.log_temperature = nn.Parameter(torch.tensor(0.5 * math.log(config.width)))
        self.heads = TaskHeads(config.width, {"rating": ACTIONS - 1, "like": 1}, hidden=config.width)
        self.register_buffer("counts", counts, persistent=False)

    def scaled(self, state: Tensor) -> Tensor:
        """h / e^τ, whose products with item vectors are logits; e^τ lies in [0.01, 100]."""
        return self.project(state) * torch.exp(-self.log_temperature.clamp(COLDEST, HOTTEST))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """L_NIP and L_FP, means over real events."""
        on_item, on_feedback, _ = self.encoder(batch)
        real = batch["item"] > 0
        found = {}
        if self.config.objectives != "feedback":
            found["item"] = self._item_loss(self.scaled(on_item)[real], batch["item"], real)
        if self.config.objectives != "item":
            logits = self.heads(on_feedback[real])
            found["feedback"] = feedback_loss(logits["rating"], logits["like"], batch["action"][real]).mean()
        return found

    def _item_loss(self, state: Tensor, item: Tensor, real: Tensor) -> Tensor:
        target, items = item[real], self.encoder.towers.catalogue()
        if self.config.item_loss == "softmax":
            return full_softmax_loss(state, target, items)
        uniform = torch.randint(1, len(items), (self.config.uniform,), device=item.device)
        drawn = torch.cat([target, uniform])
        member = torch.zeros(len(item), len(items), dtype=torch.bool, device=item.device).scatter_(1, item, True)
        row = torch.arange(len(item), device=item.device)[:, None].expand_as(item)[real]
        log_q = mixture_log_q(self.counts, len(target), self.config.uniform).to(state.device)
        return corrected_softmax_loss(state, target, items, drawn, log_q, member[:, drawn][row])

    def loss(self, batch: Batch) -> Tensor:
        """L_NIP + weight · L_FP."""
        found = self.losses(batch)
        zero = batch["item"].new_zeros((), dtype=torch.float32)
        return found.get("item", zero) + self.config.feedback_weight * found.get("feedback", zero)

    def answers(self, batch: Batch) -> Answers:
        """Both predictions, as far as they were trained."""
        on_item, on_feedback, _ = self.encoder(batch)
        trained = self.config.objectives
        logits = self.heads(on_feedback) if trained != "item" else {}
        asked = trained != "feedback"
        return Answers(
            state=self.scaled(on_item) if asked else None,
            items=self.encoder.towers.catalogue() if asked else None,
            rating=logits.get("rating"),
            like=logits.get("like"),
        )

    def scores(self, batch: Batch) -> Tensor:
        """Logits of the reactions (B, T, 6): five ratings, then like."""
        logits = self.heads(self.encoder(batch)[1])
        return torch.cat([logits["rating"], logits["like"][..., None]], -1)


class TwoTower(nn.Module):
    """Stage 2: a delayed user vector against item vectors, trained on pairs of an impression."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.config = encoder, encoder.config
        self.user = nn.Linear(self.config.width, self.config.width)
        self.item = nn.Linear(self.config.width, self.config.width, bias=False)  # one would move all items alike

    def scores(self, batch: Batch) -> Tensor:
        """Affinity (B, T) of each event's item to the state that its impression may use; 0 where there is none."""
        user, usable = delayed(self.encoder(batch)[2], self.config.size, self.config.delay)
        item = self.item(self.encoder.towers.item(batch["item"])).unflatten(1, (-1, self.config.size))
        product = torch.einsum("bgd,bgsd->bgs", self.user(user), item) * self.config.width**-0.5
        return (product * usable[:, None]).flatten(1).float()

    def loss(self, batch: Batch) -> Tensor:
        """-log σ(s(u, i⁺) - s(u, i⁻)) over the pairs of each impression with different ratings, in one pass."""
        size = self.config.size

        def shaped(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, size))[:, 1 + self.config.delay :].flatten(0, 1)

        score, action = pairs(shaped(self.scores(batch))), pairs(shaped(batch["action"]))
        return order_loss(logistic_win(score[0] - score[1]), *action, kept=(action[0] > 0) & (action[1] > 0))

    def answers(self, batch: Batch) -> Answers:
        """Affinities."""
        return Answers(affinity=self.scores(batch))


class Argus(nn.Module):
    """A fine-tuned pair of towers beside the pre-trained model that it came from, which answers for its own tasks."""

    def __init__(self, towers: TwoTower, pretrained: Pretraining | None) -> None:
        super().__init__()
        self.towers, self.pretrained = towers, pretrained

    def answers(self, batch: Batch) -> Answers:
        """Affinity of the fine-tuned towers, predictions of the pre-trained model."""
        affinity = self.towers.answers(batch).affinity
        if self.pretrained is None:
            return Answers(affinity=affinity)
        return replace(self.pretrained.answers(batch), affinity=affinity)


# -- baselines -----------------------------------------------------------------------------------------------------


def past_of_impressions(values: Tensor, size: int, delay: int) -> Tensor:
    """What each impression may know of (B, T): (B, G, T), zero from (1 + delay) impressions before its end on."""
    place = torch.arange(values.shape[1], device=values.device)
    end = (torch.arange(values.shape[1] // size, device=values.device) - delay) * size
    return values[:, None] * (place < end[:, None])


class LikedSASRec(nn.Module):
    """SASRec over liked items alone: next liked item, then the product of its delayed state with an item's vector."""

    def __init__(self, log: EventLog, config: ArgusConfig) -> None:
        super().__init__()
        self.config = config
        self.model = SASRec(
            log.num_items, config.width, config.heads, config.layers, 4 * config.width, config.length, activation="gelu"
        )

    @staticmethod
    def liked(item: Tensor, action: Tensor) -> Tensor:
        """Liked items (R, T) in their order, moved to the right; zeros stand first."""
        kept = (action >= LIKED) & (item > 0)
        order = kept.int().argsort(dim=1, stable=True)
        return torch.where(kept, item, 0).gather(1, order)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the next liked item over all items."""
        sequence = self.liked(batch["item"], batch["action"])
        before = sequence[:, :-1]
        return self.model.loss({"sequence": before, "target": sequence[:, 1:].where(before > 0, 0)})

    def answers(self, batch: Batch) -> Answers:
        """Affinities only: its next-item task is over liked items."""
        size, delay = self.config.size, self.config.delay
        item, action = (past_of_impressions(batch[name], size, delay) for name in ("item", "action"))
        groups = item.shape[1]
        sequence = self.liked(item.flatten(0, 1), action.flatten(0, 1))
        state = self.model.encode(sequence, latest=1)[:, -1].unflatten(0, (-1, groups))
        vectors = self.model.items(batch["item"]).unflatten(1, (-1, size))
        affinity = torch.einsum("bgd,bgsd->bgs", state, vectors).flatten(1)
        known = (sequence > 0).any(1).unflatten(0, (-1, groups)).repeat_interleave(size, dim=1)
        return Answers(affinity=affinity.where(known, 0.0))  # ties where nothing was liked so far


class DelayedDIN(nn.Module):
    """DIN over the same delayed history: each candidate attends to it; likes are the labels."""

    def __init__(self, log: EventLog, config: ArgusConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.towers = Towers(log, width)
        for unused in (
            self.towers.gap,
            self.towers.place,
            self.towers.hour,
            self.towers.weekday,
            self.towers.context_net,
        ):
            unused.requires_grad_(False)
        self.attention = TargetAttention(width)
        self.tower = MLP(3 * width, 2 * width, width, 1, activation="prelu")

    def scores(self, batch: Batch) -> Tensor:
        """Logits of a like (B, T), from what each impression may know."""
        size = self.config.size
        item, action = (past_of_impressions(batch[name], size, self.config.delay) for name in ("item", "action"))
        item, action = item.flatten(0, 1), action.flatten(0, 1)
        valid = item > 0
        keys = self.towers.item(item) + self.towers.feedback(action)
        query = self.towers.item(batch["item"]).unflatten(1, (-1, size)).flatten(0, 1)
        pooled = self.attention.each(query, keys, valid) / self.config.length
        mean = (keys * valid[..., None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        x = torch.cat([query, pooled, mean[:, None].expand_as(query)], -1)
        return self.tower(x.flatten(0, 1)).view(batch["item"].shape).float()

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy over events whose impression has a history."""
        old = (
            torch.arange(batch["item"].shape[1], device=batch["item"].device)
            < (1 + self.config.delay) * self.config.size
        )
        label = (batch["action"] >= LIKED).float().masked_fill((batch["item"] == 0) | old, torch.nan)
        return binary_task_losses({"like": self.scores(batch)}, {"like": label})["like"]

    def answers(self, batch: Batch) -> Answers:
        """The logit as affinity."""
        return Answers(affinity=self.scores(batch))


class ItemMean(nn.Module):
    """Floor without parameters: an item's mean rating in training, drawn to the overall mean by five events."""

    mean: Tensor

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        train = log.part == 0
        item, action = log.item[train] + 1, log.action[train].double()
        total = torch.zeros(log.num_items + 1, dtype=torch.float64).index_add(0, item, action)
        count = torch.bincount(item, minlength=log.num_items + 1)
        self.register_buffer("mean", ((total + 5 * action.mean()) / (count + 5)).float())

    def answers(self, batch: Batch) -> Answers:
        """Affinity of every event's item, whoever asks."""
        return Answers(affinity=self.mean[batch["item"]])


# -- the comparison ------------------------------------------------------------------------------------------------

SCRATCH = "fine-tuned from scratch"
ITEM_ONLY = "next item, then fine-tuned"
FEEDBACK_ONLY = "feedback, then fine-tuned"
ARGUS = "argus"
REVERSED = "feedback before item"
ONE_TOKEN = "one token an event"


def arms(config: ArgusConfig) -> dict[str, tuple[Kind, ArgusConfig]]:
    """Arms a to f of the protocol, and the sweep of the weight between both tasks."""
    return {
        SCRATCH: ("baseline", config),
        ITEM_ONLY: ("ablation", replace(config, objectives="item")),
        FEEDBACK_ONLY: ("ablation", replace(config, objectives="feedback")),
        ARGUS: ("method", config),
        REVERSED: ("ablation", replace(config, order="feedback-first")),
        ONE_TOKEN: ("ablation", replace(config, tokens="one")),
        "feedback weight 0.3": ("ablation", replace(config, feedback_weight=0.3 * config.feedback_weight)),
        "feedback weight 3": ("ablation", replace(config, feedback_weight=3.0 * config.feedback_weight)),
    }


def widths(config: ArgusConfig) -> tuple[int, ...]:
    """Four widths of the scaling curve, the method's own third."""
    return tuple(config.width * factor // 4 for factor in (1, 2, 4, 6))


def sized(name: str, width: int, config: ArgusConfig) -> str:
    """Name of an arm at another width."""
    return name if width == config.width else f"{name}, width {width}"


def train_argus(
    task: UserLog,
    config: ArgusConfig,
    *,
    pretrain: int,
    finetune: int,
    seed: int,
    recipe: Recipe,
    device: torch.device,
) -> Trained:
    """Both stages; without pre-training steps the towers are trained from scratch, at the full learning rate."""
    pretrained = None
    encoder = Encoder(task.log, config)
    if pretrain:
        pretrained = Pretraining(task.log, config, task.counts).to(device)
        train_steps(pretrained, task.batches(seed, recipe.batch_size, device), steps=pretrain, recipe=recipe)
        encoder = copy.deepcopy(pretrained.encoder)
        recipe = replace(recipe, learning_rate=0.3 * recipe.learning_rate)
    towers = TwoTower(encoder)
    fit(towers, task, steps=finetune, seed=seed + 1, device=device, recipe=recipe)
    serving = sum(p.numel() for p in towers.parameters())
    return Trained(Argus(towers, pretrained), pretrain + finetune, parameters=serving)


def encoder_parameters(log: EventLog, config: ArgusConfig) -> float:
    """Parameters of the causal stack, tables and towers aside."""
    return float(sum(p.numel() for p in Encoder(log, config).stack.parameters()))


def monotone(names: list[str], metric: str) -> Clause:
    """Holds when a metric (more is better) rises with every size, is reversed when the last lies below the first."""

    def decide(compare: Compare) -> tuple[State, str]:
        steps = [compare(larger, smaller, metric) for smaller, larger in pairwise(names)]
        ends = compare(names[-1], names[0], metric)
        state: State = "holds" if min(d.mean for d in steps) > 0 else "reversed" if ends.high < 0 else "undecided"
        return state, f"{metric}: steps " + ", ".join(f"{d.mean:+.5f}" for d in steps)

    return Clause(f"{metric} rises with every width", decide, required=False)


def steady_gain(pairs_of_arms: list[tuple[str, str]], metric: str) -> Clause:
    """Holds when ARGUS gains no less over training from scratch at the largest width than at the smallest."""

    def decide(compare: Compare) -> tuple[State, str]:
        gains = [compare(method, scratch, metric).mean for method, scratch in pairs_of_arms]
        state: State = "holds" if gains[-1] >= gains[0] else "undecided"
        return state, f"{metric}: gains " + ", ".join(f"{gain:+.5f}" for gain in gains)

    return Clause("the gain over training from scratch does not shrink with width", decide, required=False)


def decision_rule(config: ArgusConfig, costs: dict[str, float]) -> list[Clause]:
    """Both stages and both tasks decide; scaling is reported."""
    metric = "pairwise accuracy"
    rule = [
        beats(ARGUS, SCRATCH, metric),
        beats(ARGUS, ITEM_ONLY, metric),
        not_below(ARGUS, FEEDBACK_ONLY, metric, tolerance=0.01),
        beats(ARGUS, REVERSED, metric, required=False),
        beats(ARGUS, ONE_TOKEN, metric, required=False),
        beats(ARGUS, "sasrec", metric, required=False),
        beats(ARGUS, "din", metric, required=False),
    ]
    if costs:
        names = [sized(ARGUS, width, config) for width in widths(config)]
        scratch = [sized(SCRATCH, width, config) for width in widths(config)]
        further = [
            scaling_curve(costs, "item gain"),
            scaling_curve(costs, metric),
            monotone(names, "item gain"),
            monotone(names, metric),
            steady_gain(list(zip(names, scratch, strict=True)), metric),
        ]
        rule += [replace(c, text=f"scaling: {c.text.removeprefix('scaling: ')}") for c in further]
    return rule


def run(study: Study) -> Comparison:
    """Trains all arms on equal windows and steps, then applies the decision rule."""
    device = device_for(study.device)
    with study.stage("windows", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=40, standard=300), seed=0)
        log = EventLog.of(interactions)
        config = ArgusConfig(
            width=study.size("width", smoke=32, standard=32),
            impressions=study.size("impressions", smoke=3, standard=5),
        )
        task = UserLog(log, impressions=config.impressions, size=config.size)
    pretrain = study.steps("pretrain", smoke=2, standard=160)
    finetune = study.steps("finetune", smoke=1, standard=80)
    recipe = Recipe(
        batch_size=study.size("batch", smoke=8, standard=8),
        schedule="cosine",
        validations=study.size("validations", smoke=1, standard=1),
    )
    total = pretrain + finetune
    sample = {name: value[:1] for name, value in next(task.batches(0, 1, torch.device("cpu"))).items()}
    fused = replace(config, tokens="one")
    cheaper = forward_flops(lambda: Encoder(log, config)(sample)) / forward_flops(lambda: Encoder(log, fused)(sample))

    def arm(name: str, kind: Kind, changed: ArgusConfig, *, stages: bool) -> Variant:
        factor = cheaper if changed.tokens == "one" else 1.0

        def train(seed: int, rate: float) -> Trained:
            steps = (round(factor * pretrain), round(factor * finetune)) if stages else (0, total)
            chosen = replace(recipe, learning_rate=rate)
            return train_argus(
                task, changed, pretrain=steps[0], finetune=steps[1], seed=seed, recipe=chosen, device=device
            )

        note = f"equal compute, so {factor:.2f} times the updates" if factor != 1.0 else ""
        return Variant(name, train=train, kind=kind, note=note)

    found = arms(config)
    candidates = [arm(name, *found[name], stages=True) for name in found if name != SCRATCH]
    costs: dict[str, float] = {}
    for width in widths(config):
        other = replace(config, width=width, heads=min(config.heads, max(1, width // 4)))
        costs[sized(ARGUS, width, config)] = encoder_parameters(log, other)
        if width != config.width:
            candidates.append(arm(sized(ARGUS, width, config), "control", other, stages=True))
            candidates.append(arm(sized(SCRATCH, width, config), "control", other, stages=False))
    candidates += [
        Variant("sasrec", lambda: LikedSASRec(log, config), kind="control", note="liked items only"),
        Variant("din", lambda: DelayedDIN(log, config), kind="control"),
        Variant("item mean", lambda: ItemMean(log), kind="floor"),
    ]
    return study.compare(
        task,
        baseline=arm(SCRATCH, *found[SCRATCH], stages=False),
        candidates=candidates,
        steps=total,
        device=device,
        recipe=recipe,
        learning_rates=(4e-3,) if study.budget == "smoke" else (1e-3, 4e-3),
        clauses=decision_rule(config, costs),
    )


def specimens() -> list[Specimen]:
    """Tiny instances of both stages and of the two baselines."""
    log = miniature()
    tiny = ArgusConfig(width=16, layers=1, heads=2, impressions=4, size=4)
    task = UserLog(log, impressions=5, size=4)
    batch = next(task.batches(0, 6, torch.device("cpu")))
    batch = {name: value[:, :16] for name, value in batch.items()}

    def pretraining(config: ArgusConfig) -> Callable[[], Pretraining]:
        return lambda: Pretraining(log, config, task.counts)

    def towers(config: ArgusConfig) -> Callable[[], TwoTower]:
        return lambda: TwoTower(Encoder(log, config))

    def later(b: Batch) -> Batch:
        """Another item and reaction at the last event; no earlier score may move."""
        changed = {name: value.clone() for name, value in b.items()}
        changed["item"][:, -1] = changed["item"][:, -1] % log.num_items + 1
        changed["action"][:, -1] = changed["action"][:, -1] % (ACTIONS - 1) + 1
        return changed

    no_padding = "windows are padded on the right, where a causal model does not look; tested by itself"
    bigger = {"width = 32": {"width": 32}, "layers = 2": {"layers": 2}, "heads = 4": {"heads": 4}}
    forms = {"tokens = one": {"tokens": "one"}, "encoder = hstu": {"encoder": "hstu"}}
    objectives = {
        "order = feedback-first": {"order": "feedback-first"},
        "objectives = item": {"objectives": "item"},
        "objectives = feedback": {"objectives": "feedback"},
        "feedback_weight = 3": {"feedback_weight": 3.0},
        "item_loss = sampled": {"item_loss": "sampled"},
    }
    ranking = {"delay = 0": {"delay": 0}, "size = 8": {"size": 8, "impressions": 2}}
    return [
        Specimen(
            "pre-training",
            pretraining(tiny),
            batch,
            scores=lambda model, b: model.scores(b)[:, :-1],
            shape=(len(batch["item"]), 15, ACTIONS),
            why_no_padding=no_padding,
            change_later=later,
            overfit_steps=150,
            switches={
                name: pretraining(replace(tiny, **changes))  # type: ignore[arg-type]
                for name, changes in {**bigger, **forms, **objectives}.items()
            },
        ),
        Specimen(
            "sampled softmax",
            pretraining(replace(tiny, item_loss="sampled", uniform=8)),
            batch,
            scores=lambda model, b: model.scores(b)[:, :-1],
            shape=(len(batch["item"]), 15, ACTIONS),
            why_no_padding=no_padding,
            change_later=later,
            overfit_steps=150,
            switches={"uniform = 32": pretraining(replace(tiny, item_loss="sampled", uniform=32))},
        ),
        Specimen(
            "two towers",
            towers(tiny),
            batch,
            scores=lambda model, b: model.scores(b)[:, :-1],
            shape=(len(batch["item"]), 15),
            why_no_padding=no_padding,
            change_later=later,
            switches={name: towers(replace(tiny, **changes)) for name, changes in ranking.items()},  # type: ignore[arg-type]
        ),
        Specimen(
            "din",
            lambda: DelayedDIN(log, tiny),
            batch,
            scores=lambda model, b: model.scores(b)[:, :-1],
            shape=(len(batch["item"]), 15),
            why_no_padding=no_padding,
            change_later=later,
        ),
    ]
