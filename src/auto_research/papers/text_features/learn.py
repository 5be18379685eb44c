"""LEARN: Knowledge Adaptation from Large Language Model to Recommendation (arXiv:2405.03988, Kuaishou, AAAI 2025).

Official code: https://github.com/adxcreative/LEARN (Amazon experiments).

A frozen text encoder turns every item into a content vector, once. A Transformer that the recommendation task trains
moves those vectors into the collaborative space; users and items pass the same module with the same weights, an item
as a sequence of one. No item has an embedding of its own, so an item without a past is encoded like any other.

Deviations: a MiniLM sentence encoder stands in for Baichuan2-7B; two layers of width 128 for 12 (4) of 768 at the
standard budget; one domain, so no pre-training over several; in-batch negatives (the official fine-tuning's catalogue
loss is an option, and an arm of the `full` budget only). The online adaptor beside a production ranker is left out.

Letters: I items, C content width, D output width, B batch, T events of a row, H history states, K target items.

- content E^c (I + 1, C), row 0 is padding: `checkpoints.pooling.encode_texts`
- user vectors (B, T, D): state j has seen events 0..j; item vectors (I + 1, D): both unit vectors of `Alignment`
- positive pairs (B, T, T): which state is to predict which target; `layers.losses.in_batch_softmax`
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from auto_research.checkpoints.pooling import encode_texts
from auto_research.data.sequences import Cases, Interactions, SequenceSplit, leave_one_out
from auto_research.layers.item_loss import full_softmax_loss
from auto_research.layers.losses import in_batch_softmax
from auto_research.layers.transformer import CausalTransformer, init_transformer
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Kind, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import Clause, Compare, State, beats, mean_above, wins_seeds
from auto_research.tasks.base import Batch, Recipe, count_parameters
from auto_research.tasks.baselines import MostPopular, SASRec
from auto_research.tasks.content import centred_unit
from auto_research.tasks.next_item import NextItem

Tower = Literal["alone", "sequence", "raw"]
Objective = Literal["dense", "next", "last", "catalogue"]

LEARN, RAW, SEQUENCE = "LEARN", "raw item tower", "item tower over the target sequence"
NEXT, LAST, CATALOGUE = "next-item loss", "last-position loss", "catalogue loss"
UNTRAINED, SHUFFLED = "untrained encoder", "shuffled content"
SASREC, SUMMED, FROZEN, POPULAR = "SASRec", "SASRec, content + ID", "frozen mean", "most popular"
METRIC, COLD = "ndcg@10", "ndcg@10/cold"


@dataclass(frozen=True)
class LearnConfig:
    """Options of the preference module, the towers and the objective.

    Attributes:
        width, layers, heads: shape of the encoder stack; its feed-forward networks are four times as wide.
        out: D, width of user and item vectors.
        tower: how a training item is encoded. `alone`: by the shared module as a sequence of one, as in serving;
            `sequence`: by the shared module over the row's target sequence; `raw`: a linear map of its content only.
        objective: `dense`: every history state predicts every item of the target window; `next`: every state predicts
            the item that follows; `last`: the last history state predicts one item, all three against the items of
            other rows; `catalogue`: as `last`, against the whole catalogue.
        scale: factor of the cosine in the softmax, 1 / temperature.
        window: K, most target items of a row and step (dense).
        positions: most history states of a row and step, drawn at random; 0 takes all (dense).
    """

    width: int = 128
    layers: int = 2
    heads: int = 4
    out: int = 64
    dropout: float = 0.1
    tower: Tower = "alone"
    objective: Objective = "dense"
    scale: float = 20.0
    window: int = 20
    positions: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("tower", self.tower, Tower), ("objective", self.objective, Objective)):
            if value not in get_args(known):
                raise ValueError(f"{name} '{value}' is none of {', '.join(get_args(known))}")


class Alignment(nn.Module):
    """The preference module (PCH, later PAL): content (B, T, C) -> unit vectors (B, T, D).

    A linear adaptor, post-norm encoder layers under a causal mask, a linear projection, L2 normalisation. There is no
    position embedding: order enters through the causal mask alone.
    """

    def __init__(self, content_width: int, config: LearnConfig) -> None:
        super().__init__()
        self.adaptor = nn.Linear(content_width, config.width)
        self.encoder = CausalTransformer(
            config.width, config.heads, 4 * config.width, config.layers, config.dropout, norm_first=False
        )
        self.projection = nn.Linear(config.width, config.out)
        init_transformer(self)

    def forward(self, content: Tensor, valid: Tensor) -> Tensor:
        """valid (B, T) is True at real positions; the others' outputs are to be ignored."""
        return unit(self.projection(self.encoder(self.adaptor(content), valid)))


def unit(vectors: Tensor) -> Tensor:
    """Each vector scaled to length 1, in float32 at least."""
    return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)


def positive_pairs(target: Tensor, objective: Objective, *, window: int = 20, positions: int = 0) -> Tensor:
    """Which state of a row is to predict which target: (B, T, T) bool, [b, j, k] for state j and `target[b, k]`.

    target (B, T) follows a left-padded sequence, 0 where there is nothing to predict; state j has seen all that comes
    before target j, so j <= k never looks ahead. Except for `next`, a row of n events is cut before a random event:
    one of its second half, or for `catalogue` any but the first. What is before the cut is the history; the targets
    are the cut's event alone, or for `dense` the `window` events from there.
    """
    wanted = target > 0
    count, length = wanted.sum(1), target.shape[1]
    place = torch.arange(length, device=target.device) - (length - count)[:, None]  # 0 at a row's first state
    if objective == "next":
        return wanted[:, :, None] & torch.eye(length, dtype=torch.bool, device=target.device)
    # Target k is event k + 1 of its row; events are numbered from 0.
    earliest = torch.ones_like(count) if objective == "catalogue" else ((count + 1) // 2).clamp(min=1)
    drawn = torch.rand(len(count), device=target.device) * (count + 1 - earliest)
    cut = (earliest + drawn.long().clamp(max=(count - earliest).clamp(min=0)))[:, None]
    if objective != "dense":
        chosen = wanted & (place + 1 == cut)
        return chosen[:, :, None] & chosen[:, None, :]
    history = wanted & (place < cut)
    if 0 < positions < length:
        lottery = torch.rand(history.shape, device=target.device).masked_fill(~history, -1.0)
        history &= torch.zeros_like(history).scatter_(1, lottery.topk(positions, dim=1).indices, True)
    future = wanted & (place + 1 >= cut) & (place + 1 < cut + window)
    return history[:, :, None] & future[:, None, :]


class Learn(nn.Module):
    """Two towers over frozen content vectors.

    Args:
        content: (I + 1, C) content vectors, row 0 zeros; a buffer that is never trained.
    """

    content: Tensor

    def __init__(self, content: Tensor, config: LearnConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("content", content)
        self.align = Alignment(content.shape[1], config)
        self.raw = nn.Linear(content.shape[1], config.out) if config.tower == "raw" else None
        self._served: Tensor | None = None
        self.register_load_state_dict_post_hook(_forget)

    def user_states(self, sequence: Tensor) -> Tensor:
        """User vectors (B, T, D) of ids (B, T); the one at j has seen events 0..j."""
        return self.align(self.content[sequence], sequence > 0)

    def item_vectors(self, ids: Tensor) -> Tensor:
        """Vectors (..., D) of items, each encoded alone, as in serving."""
        distinct, place = ids.unique(return_inverse=True)
        content = self.content[distinct]
        if self.raw is not None:
            return unit(self.raw(content))[place]
        alone = torch.ones(len(distinct), 1, dtype=torch.bool, device=ids.device)
        return self.align(content[:, None], alone)[:, 0][place]

    def target_vectors(self, ids: Tensor) -> Tensor:
        """Vectors (B, T, D) of a step's target sequences (B, T), 0 where there is no target."""
        return self.user_states(ids) if self.config.tower == "sequence" else self.item_vectors(ids)

    def catalogue(self) -> Tensor:
        """Vectors (I + 1, D) of all items; kept while the model serves."""
        if self.training or torch.is_grad_enabled():
            return self.item_vectors(torch.arange(len(self.content), device=self.content.device))
        if self._served is None or self._served.device != self.content.device:
            parts = torch.arange(len(self.content), device=self.content.device).split(1024)  # bounds memory
            self._served = torch.cat([self.item_vectors(part) for part in parts])
        return self._served

    def forget(self) -> None:
        """Drops the kept item vectors."""
        self._served = None

    def train(self, mode: bool = True) -> Learn:
        self.forget()
        return super().train(mode)

    def loss(self, batch: Batch) -> Tensor:
        config, target = self.config, batch["target"]
        positive = positive_pairs(target, config.objective, window=config.window, positions=config.positions)
        users = self.user_states(batch["sequence"])
        asked = positive.any(1)  # (B, T) targets of this step
        if config.objective == "catalogue":  # state j predicts target j
            return full_softmax_loss(config.scale * users[asked], target[asked], self.catalogue())
        ids = target.where(asked, 0)
        return in_batch_softmax(users, self.target_vectors(ids), ids, positive, scale=config.scale)

    def scores(self, batch: Batch) -> Tensor:
        """Cosines (B, I + 1) of the last user vector and every item."""
        return self.user_states(batch["sequence"])[:, -1] @ self.catalogue().T


def _forget(model: Any, _: Any) -> None:
    """Weights were loaded: what was kept belongs to the old ones."""
    model.forget()


# -- baselines over the same content --------------------------------------------------------------------------------


class FrozenMean(nn.Module):
    """Cosine between the mean content vector of the history and each item's; nothing is trained.

    What all items share is taken off first, which makes this floor higher: LEARN's adaptor can do the same.
    """

    content: Tensor

    def __init__(self, content: Tensor) -> None:
        super().__init__()
        self.register_buffer("content", F.pad(centred_unit(content[1:]), (0, 0, 1, 0)))

    def scores(self, batch: Batch) -> Tensor:
        # Padding has a zero vector, and the length of the sum does not change a cosine.
        return unit(self.content[batch["sequence"]].sum(1)) @ self.content.T


class AddContent(nn.Module):
    """Item table (I + 1, D) plus a trained linear map of the content (I + 1, C)."""

    content: Tensor

    def __init__(self, content: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("content", content)
        self.project = nn.Linear(content.shape[1], dim, bias=False)
        nn.init.normal_(self.project.weight, std=0.02)  # as the item table

    def forward(self, table: Tensor) -> Tensor:
        return table + self.project(self.content)


def sasrec(num_items: int, dim: int, config: LearnConfig, max_length: int, content: Tensor | None = None) -> SASRec:
    """SASRec of LEARN's depth; with content, an item is the sum of its own embedding and its mapped content."""
    model = SASRec(num_items, dim, heads=2, layers=config.layers, max_length=max_length, dropout=0.3)
    if content is not None:
        parametrize.register_parametrization(model.items, "weight", AddContent(content, dim))
    return model


def matched_width(parameters: int, build: Callable[[int], nn.Module]) -> int:
    """The width whose model has the number of parameters nearest to `parameters`; they grow with it."""

    def size(dim: int) -> int:
        with torch.device("meta"):
            return count_parameters(build(dim))

    widths = range(8, 513, 4)
    above = bisect_left(widths, parameters, key=size)
    return min(widths[max(0, above - 1) : above + 1], key=lambda dim: abs(size(dim) - parameters))


# -- the comparison -------------------------------------------------------------------------------------------------


def thinned(cases: Cases, n: int) -> Cases:
    """About `n` cases: those of users drawn at random (always the same ones), who are numbered anew."""
    if len(cases) <= n:
        return cases
    return cases.of_users(np.random.default_rng(0).random(int(cases.user.max()) + 1) < n / len(cases))


def used_items(split: SequenceSplit) -> SequenceSplit:
    """The split over the items that occur in it, numbered anew."""
    parts = [split.items, split.valid.items, split.valid.target, split.test.items, split.test.target]
    kept = np.unique(np.concatenate(parts))
    kept = kept[kept >= 0]
    place = np.full(split.num_items + 1, -1, dtype=np.int64)  # the last entry serves the missing target, -1
    place[kept] = np.arange(len(kept))

    def renumber(cases: Cases) -> Cases:
        return replace(cases, items=place[cases.items], target=place[cases.target])

    return replace(
        split,
        items=place[split.items],
        valid=renumber(split.valid),
        test=renumber(split.test),
        items_table=split.items_table.take(kept),
    )


def prepare(study: Study) -> SequenceSplit:
    """The data of this run; ratings count from 4 stars. A smoke run has few users and their items only."""
    data = study.dataset()
    users = study.size("users", smoke=100, standard=1_000_000)
    if isinstance(data, Interactions):
        data = data.positive(4.0).with_min_events(5)
        return leave_one_out(data.subset_users(users, seed=0) if users < data.num_users else data)
    split: SequenceSplit = data
    if users < split.num_users:
        split = used_items(split.subset_users(users, seed=0))
    cases = study.size("validation cases", smoke=100, standard=1200, full=1_000_000)
    return replace(split, valid=thinned(split.valid, cases))


def content_of(study: Study, split: SequenceSplit, device: torch.device) -> tuple[Tensor, Tensor]:
    """Content (I + 1, C) from the trained and from an untrained encoder: mean over tokens, unit length, row 0 zeros."""
    table = split.items_table
    fields = ["title"] + (["genres"] if table.genre_names else []) + (["brand"] if table.brand else [])
    texts = table.text(*fields, *(["category"] if table.category else []))
    length = study.size("text tokens", smoke=16, standard=64, full=500)
    encode = partial(encode_texts, study.checkpoint("text_encoder"), texts, device, max_length=length)
    trained, untrained = encode(), encode(untrained=0)
    return F.pad(trained, (0, 0, 1, 0)), F.pad(untrained, (0, 0, 1, 0))


def shuffled(content: Tensor) -> Tensor:
    """Content dealt to the items at random, anew for each seed; row 0 stays."""
    # Its own generator: the draw must not change the weights that a seed gives.
    order = torch.randperm(len(content) - 1, generator=torch.Generator().manual_seed(torch.initial_seed()))
    return torch.cat([content[:1], content[1:][order]])


def _gain_collapses(compare: Compare) -> tuple[State, str]:
    """How much of LEARN's gain over the frozen mean is left when content is dealt to the wrong items."""
    gain, left = compare(LEARN, FROZEN, METRIC).mean, compare(SHUFFLED, FROZEN, METRIC).mean
    if gain <= 0:
        return "undecided", f"{LEARN} has no gain over {FROZEN} to lose"
    return ("holds" if left < 0.5 * gain else "reversed"), f"gain {gain:+.5f}, with shuffled content {left:+.5f}"


def decision(seeds: Sequence[int]) -> list[Clause]:
    """LEARN wins on every seed against the frozen mean and the raw item tower, and on cold items against SASRec."""
    return [
        wins_seeds(LEARN, FROZEN, METRIC, at_least=len(seeds)),
        wins_seeds(LEARN, RAW, METRIC, at_least=len(seeds)),
        wins_seeds(LEARN, SASREC, COLD, at_least=len(seeds)),
        mean_above(LEARN, POPULAR, METRIC),
        beats(LEARN, FROZEN, METRIC, required=False),
        beats(LEARN, RAW, METRIC, required=False),
        beats(LEARN, SASREC, COLD, required=False),
        # A gain that popularity explains vanishes on cold items.
        beats(LEARN, FROZEN, COLD, required=False),
        beats(LEARN, SASREC, METRIC, required=False),
        beats(LEARN, NEXT, METRIC, required=False),
        beats(LEARN, UNTRAINED, METRIC, required=False),
        Clause("shuffled content loses more than half of the gain over the frozen mean", _gain_collapses, False),
    ]


def configured(study: Study) -> LearnConfig:
    """The sizes of a budget; `full` is the paper's."""
    return LearnConfig(
        width=study.size("width", smoke=32, standard=128, full=768),
        layers=study.size("layers", smoke=1, standard=2, full=12),
        heads=study.size("heads", smoke=2, standard=4, full=12),
    )


def run(study: Study, config: LearnConfig | None = None) -> Comparison:
    """LEARN against ID, frozen and popularity baselines, with its towers, objectives and contents exchanged."""
    device = device_for(study.device)
    config = config or configured(study)
    split = prepare(study)
    with study.stage("content", trains=False):
        content, untrained = content_of(study, split, device)
    max_length = study.size("history", smoke=20, standard=40)
    task = NextItem(split, max_length)
    parameters = count_parameters(Learn(content, config))

    def id_model(with_content: bool) -> Callable[[], SASRec]:
        given = content if with_content else None
        on_meta = None if given is None else given.to("meta")
        dim = matched_width(parameters, lambda dim: sasrec(split.num_items, dim, config, max_length, on_meta))
        return lambda: sasrec(split.num_items, dim, config, max_length, given)

    arms: dict[str, tuple[LearnConfig, Kind]] = {
        LEARN: (config, "method"),
        RAW: (replace(config, tower="raw"), "ablation"),
        SEQUENCE: (replace(config, tower="sequence"), "ablation"),
        NEXT: (replace(config, objective="next"), "ablation"),
        LAST: (replace(config, objective="last"), "ablation"),
    }
    if study.budget == "full":
        arms[CATALOGUE] = (replace(config, objective="catalogue"), "ablation")
    candidates = [Variant(name, partial(Learn, content, arm), kind=kind) for name, (arm, kind) in arms.items()]
    candidates += [
        Variant(UNTRAINED, lambda: Learn(untrained, config), kind="control", note="same encoder, weights drawn anew"),
        Variant(SHUFFLED, lambda: Learn(shuffled(content), config), kind="control", note="content of other items"),
        Variant(SUMMED, id_model(with_content=True), kind="baseline", note="equal trainable size"),
        Variant(FROZEN, lambda: FrozenMean(content), kind="floor"),
        Variant(POPULAR, lambda: MostPopular(split), kind="floor"),
    ]
    comparison = study.compare(
        task,
        baseline=Variant(SASREC, id_model(with_content=False), note="ID embeddings, equal trainable size"),
        candidates=candidates,
        steps=study.steps("train", smoke=10, standard=160, full=20_000),
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=32, standard=64, full=1024),
            warmup=0.1,
            schedule="cosine",
            validations=study.size("validations", smoke=1, standard=2),
        ),
        learning_rates=(1e-3,) if study.budget == "smoke" else (1e-3, 3e-3),
        clauses=decision(study.seeds),
    )
    shares = {name: trials[0].test.diagnostics["head share@10"] for name, trials in comparison.trials.items()}
    study.note(
        "share of the most popular fifth of the items in the first ten, first seed: "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        + f"; of the targets {comparison.trials[LEARN][0].test.diagnostics['head share of targets']:.0%}"
    )
    return comparison


# -- what the registry's contract tests receive ---------------------------------------------------------------------


def specimens() -> list[Specimen]:
    """A tiny LEARN, and SASRec with content."""
    config = LearnConfig(width=16, layers=2, heads=2, out=8, dropout=0.0)
    draw = torch.Generator().manual_seed(0)
    items, rows, length = 24, 6, 5
    content = F.pad(unit(torch.randn(items, 12, generator=draw)), (0, 0, 1, 0))
    events = torch.stack([torch.randperm(items, generator=draw)[: length + 1] + 1 for _ in range(rows)])
    sequence, target = events[:, :-1].clone(), events[:, 1:].clone()
    sequence[0, :2] = target[0, :2] = 0
    batch = {"sequence": sequence, "target": target}

    def pad(batch: Batch) -> Batch:
        return {name: F.pad(value, (3, 0)) for name, value in batch.items()}

    def later(batch: Batch) -> Batch:
        return batch | {"target": batch["target"].flip(0)}

    def of(**options: Any) -> Callable[[], Learn]:
        return lambda: Learn(content, replace(config, **options))

    switches = {
        "width=24": of(width=24),
        "layers=1": of(layers=1),
        "heads=4": of(heads=4),
        "out=12": of(out=12),
        "dropout=0.5": of(dropout=0.5),
        "tower=sequence": of(tower="sequence"),
        "tower=raw": of(tower="raw"),
        "objective=next": of(objective="next"),
        "objective=last": of(objective="last"),
        "objective=catalogue": of(objective="catalogue"),
        "scale=5": of(scale=5.0),
        "window=1": of(window=1),
        "positions=1": of(positions=1),
    }
    specimen = partial(Specimen, batch=batch, shape=(rows, items + 1), pad=pad, change_later=later)
    return [
        specimen("learn", of(), switches=switches),
        specimen("raw item tower", of(tower="raw")),
        specimen("content + id", lambda: sasrec(items, 16, config, 8, content)),
    ]
