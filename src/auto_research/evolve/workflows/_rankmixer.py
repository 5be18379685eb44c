"""What one candidate of the RankMixer workflow is: histories, model, training and evaluation.

Letters: B users, C candidates, L events of a history, d width of an item vector, T feature tokens of width D.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.data.sequences import Ids, Interactions, UserTable, offsets_of
from auto_research.evolve.space import Genome
from auto_research.evolve.workflow import Data, NonFinite, Progress, Scores, Sizes, disjoint
from auto_research.evolve.workflows.rankmixer_movielens import BUDGET, SPACE
from auto_research.layers.experts import AdaptivePenalty, RouterName, Routing
from auto_research.layers.longer import EventEmbedding, LongerEncoder, UserSide, gap_buckets
from auto_research.layers.towers import TargetAttention, matched_width
from auto_research.papers.ranking.rankmixer import RankMixerConfig, RankMixerTrunk
from auto_research.runtime.device import device_for, seed_everything
from auto_research.runtime.errors import UserError
from auto_research.runtime.evidence import DeviceWork
from auto_research.tasks import metrics
from auto_research.tasks.base import Batch, NonFiniteLoss, Recipe, train_steps

POSITIVE = 4.0
MIN_EVENTS = 7
MIN_ITEM_POSITIVES = {"ml-latest-small": 5}
"""Its catalogue has 9,724 items, most of them with a rating or two; items below this many positives are left out."""

RECENT = 8
"""Events that the mean reads."""

LAST = 4
"""Events that the slice `last-4` leaves of a history."""

NEIGHBOURHOOD = 20
"""How far apart two events of a user may be to count as a co-occurrence in the anchor."""

CROSS = 8.0
"""Scale of the products with the candidate, so that they begin as large as the vectors (of length one half)."""

EXPERTS, ACTIVE = 4, 0.5
"""Experts of a token in the sparse blocks, and the share of them that is to stay active."""

PAIRS = {"cpu": 4096}
"""(user, candidate) pairs that are scored together in an evaluation: what fits a processor's cache; 2^18 elsewhere."""


# -- data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Histories:
    """Events of users one after another: user u has `offsets[u]:offsets[u + 1]` of items (E,) and times (E,)."""

    items: Ids
    times: Ids
    offsets: Ids

    def without_last(self, count: int) -> Histories:
        """Each user's events but the last `count`."""
        length = np.diff(self.offsets)
        place = np.arange(len(self.items)) - np.repeat(self.offsets[:-1], length)
        kept = place < np.repeat(length - count, length)
        return Histories(self.items[kept], self.times[kept], offsets_of(length - count))

    def from_end(self, place: int) -> tuple[Ids, Ids]:
        """Item and time (U,) of each user's last (1), last but one (2) ... event."""
        index = self.offsets[1:] - place
        return self.items[index], self.times[index]

    def pairs(self, items: Ids | None = None) -> list[str]:
        """`user item` of every event, or of one item a user."""
        users = np.arange(len(self.offsets) - 1)
        users = np.repeat(users, np.diff(self.offsets)) if items is None else users
        return [f"{u} {i}" for u, i in zip(users.tolist(), (self.items if items is None else items).tolist())]


@dataclass(frozen=True)
class Held:
    """Held-out predictions, one a user: the item at that time, from the history before it."""

    history: Histories
    target: Ids
    time: Ids


@dataclass(frozen=True)
class Corpus:
    """What search may see. `counts (I,)` are training events; `profile (U, P)` demographics, P = 0 without any."""

    name: str
    num_items: int
    train: Histories
    valid: Held
    counts: Ids
    profile: NDArray[np.float32]

    @property
    def num_users(self) -> int:
        return len(self.train.offsets) - 1


def histories(data: Interactions, min_positives: int = 0) -> tuple[Histories, int, Ids]:
    """Positive events in time order, number of items of the catalogue, and which users (U,) of `data` are left.

    An item counts once a user, at its first positive event. With `min_positives` the catalogue is the items that
    have as many, otherwise all of `data`.
    """
    positive = data.rating >= POSITIVE
    count = np.bincount(data.item[positive], minlength=data.num_items)
    kept = np.flatnonzero(count >= min_positives)
    index = np.full(data.num_items, -1, dtype=np.int64)
    index[kept] = np.arange(len(kept))
    chosen = np.flatnonzero(positive & (index[data.item] >= 0))
    user, item, when = data.user[chosen], index[data.item[chosen]], data.time[chosen]
    order = np.lexsort((item, when, user))
    order = order[np.sort(np.unique(user[order] * len(kept) + item[order], return_index=True)[1])]
    enough = np.bincount(user[order], minlength=data.num_users) >= MIN_EVENTS
    order = order[enough[user[order]]]
    length = np.bincount(user[order], minlength=data.num_users)[enough]
    return Histories(item[order], when[order], offsets_of(length)), len(kept), np.flatnonzero(enough)


def demographics(users: UserTable | None, chosen: Ids) -> NDArray[np.float32]:
    """Gender, age group and occupation, one-hot (U, P); (U, 0) for a data set without them."""
    if users is None:
        return np.zeros((len(chosen), 0), dtype=np.float32)
    age = np.searchsorted([18, 25, 35, 45, 50, 56], users.age, side="right")
    columns = [(users.gender, len(users.gender_names)), (age, 7), (users.occupation, len(users.occupation_names))]
    return np.concatenate([np.eye(size, dtype=np.float32)[code[chosen]] for code, size in columns], axis=1)


class Window:
    """Cuts histories out of flat arrays on the device."""

    def __init__(self, source: Histories, device: torch.device) -> None:
        self.items = torch.from_numpy(source.items).to(device)
        self.times = torch.from_numpy(source.times).to(device)
        self.start = torch.from_numpy(source.offsets[:-1]).to(device)
        self.stop = torch.from_numpy(source.offsets[1:]).to(device)

    def before(self, user: Tensor, stop: Tensor, when: Tensor, length: int) -> Batch:
        """The last `length` events of users (B,) before flat index stop (B,), seen from the moments `when` (B,).

        `history` (B, L) are ids (item + 1, 0 is padding, on the left) and `gap` (B, L) buckets.
        """
        index = stop[:, None] + torch.arange(-length, 0, device=stop.device)
        real = index >= self.start[user, None]
        index = index.clamp(min=0)
        gap = gap_buckets(when[:, None] - self.times[index])
        return {"history": torch.where(real, self.items[index] + 1, 0), "gap": gap, "user": user}


# -- model ---------------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """A user's side of the model: last item (B, d), user vector (B, d), and what the encoder keeps."""

    last: Tensor
    user: Tensor
    state: Any


class RecentMean(nn.Module):
    """Mean of the latest `RECENT` items; no parameters."""

    def prepare(self, items: Tensor, gaps: Tensor, valid: Tensor, user: Tensor) -> Tensor:
        """(B, L, d) -> (B, d)."""
        share = valid[:, -RECENT:].to(items.dtype)
        return torch.einsum("bl,bld->bd", share / share.sum(1, keepdim=True).clamp(min=1), items[:, -RECENT:])

    def read(self, state: Tensor, target: Tensor) -> Tensor:
        """The same summary for each candidate (B, C, d)."""
        return state[:, None].expand_as(target)


class Longer(nn.Module):
    """Events with position and time gap, read by LONGER."""

    def __init__(self, width: int, length: int, encoder: LongerEncoder) -> None:
        super().__init__()
        self.events = EventEmbedding(width, length)
        self.encoder = encoder

    def prepare(self, items: Tensor, gaps: Tensor, valid: Tensor, user: Tensor) -> UserSide:
        return self.encoder.user_side(self.events(items, gaps, valid), valid, user)

    def read(self, state: UserSide, target: Tensor) -> Tensor:
        return self.encoder.read(state, target)


class Targeted(nn.Module):
    """Events with position and time gap, weighed by their relevance to each candidate (DIN)."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.events = EventEmbedding(width, length)
        self.attention = TargetAttention(width, softmax=True)

    def prepare(self, items: Tensor, gaps: Tensor, valid: Tensor, user: Tensor) -> tuple[Tensor, Tensor]:
        return self.events(items, gaps, valid), valid

    def read(self, state: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return self.attention.each(target, *state)


class Recommender(nn.Module):
    """Scores of candidates for users; everything that does not depend on a candidate is computed once a user."""

    profile: Tensor

    def __init__(
        self,
        num_items: int,
        num_users: int,
        profile: Tensor,
        encoder: RecentMean | Longer | Targeted,
        trunk: RankMixerTrunk,
        width: int,
        loss: str,
        sparse: bool,
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items + 1, width, padding_idx=0)
        self.users = nn.Embedding(num_users, width)
        for table in (self.items, self.users):
            nn.init.normal_(table.weight, std=0.5 / width**0.5)
        with torch.no_grad():
            self.items.weight[0].zero_()
        self.register_buffer("profile", profile, persistent=False)
        self.demographics = nn.Linear(profile.shape[1], width, bias=False) if profile.shape[1] else None
        self.encoder, self.trunk, self.kind = encoder, trunk, loss
        self.penalty = AdaptivePenalty(ACTIVE, start=1e-5, limit=3e-3) if sparse else None
        self._active: Tensor | None = None

    def prepare(self, batch: Batch) -> Prepared:
        """History (B, L), gap (B, L) and user (B,) -> the user's side."""
        history = batch["history"]
        items, valid = self.items(history), history > 0
        user = self.users(batch["user"])
        if self.demographics is not None:
            user = user + self.demographics(self.profile[batch["user"]])
        return Prepared(items[:, -1], user, self.encoder.prepare(items, batch["gap"], valid, user))

    def fields(self, side: Prepared, candidates: Tensor) -> Tensor:
        """Candidates (B, C) as ids -> (B, C, 8·d): candidate, last item, summary, user, each beside its cross.

        A field's cross is its product with the candidate, element by element. RankMixer's tokens are slices of this.
        """
        target = self.items(candidates)
        last, user = (part[:, None].expand_as(target) for part in (side.last, side.user))
        fields = torch.stack([target, last, self.encoder.read(side.state, target), user], dim=-2)
        return torch.cat([fields, CROSS * fields * target[..., None, :]], dim=-1).flatten(-2)

    def score(self, side: Prepared, candidates: Tensor) -> Tensor:
        """Candidates (B, C) as ids -> scores (B, C); of sparse blocks the inference router decides."""
        return self._mix(self.fields(side, candidates), "infer")[0]

    def _mix(self, fields: Tensor, router: RouterName) -> tuple[Tensor, Routing]:
        """Fields (B, C, F) -> scores (B, C), and what sparse blocks report."""
        routing = Routing(router)
        scores = self.trunk(fields.flatten(0, 1), None if self.penalty is None else routing)
        return scores.view(fields.shape[:2]), routing

    def loss(self, batch: Batch) -> Tensor:
        """Of the true next item (B,) against negatives (B, N).

        With sparse blocks of both routers, plus the penalty on the inference router (as `papers.ranking.rankmixer`).
        """
        target, negative = batch["target"], batch["negative"]
        clash = F.pad(negative == target[:, None], (1, 0))
        fields = self.fields(self.prepare(batch), torch.cat([target[:, None], negative], dim=1))
        scores, serving = self._mix(fields, "infer")
        loss = self._rank(scores, clash)
        if self.penalty is None:
            return loss
        self._active = serving.active_ratio()
        return loss + self._rank(self._mix(fields, "train")[0], clash) + self.penalty(serving.penalty())

    def _rank(self, scores: Tensor, clash: Tensor) -> Tensor:
        """scores (B, 1 + N), the target's first; a negative that is the target does not compete."""
        scores = scores.float()
        if self.kind == "sampled-softmax":
            scores = scores.masked_fill(clash, -torch.inf)
            return (scores.logsumexp(1) - scores[:, 0]).mean()
        wrong = F.softplus(scores[:, 1:]).masked_fill(clash[:, 1:], 0.0).sum(1) / (~clash[:, 1:]).sum(1).clamp(min=1)
        return (F.softplus(-scores[:, 0]) + wrong).mean()

    def on_step_end(self, step: int) -> None:
        """Steers the penalty by the active ratio of the batch just trained on."""
        if self.penalty is not None and self._active is not None:
            self.penalty.update(self._active)


def mixer_config(genome: Genome, sizes: Sizes) -> RankMixerConfig:
    """RankMixer's blocks as the genome wants them, before any matching of parameters."""
    shared = "shared-wide" if genome.get("mix.shared") == "parameters" else "shared"
    ffn = {"dense": "per-token", "shared-ffn": shared, "sparse-moe": "relu"}[str(genome["mix.block"])]
    return RankMixerConfig(
        tokens=sizes["tokens"],
        width=int(genome["mix.width"]),
        blocks=int(genome["mix.layers"]),
        expansion=int(genome["mix.expansion"]),
        ffn=ffn,  # type: ignore[arg-type]
        experts=EXPERTS,
        active=ACTIVE,
    )


def build(genome: Genome, sizes: Sizes, corpus: Corpus) -> Recommender:
    """A freshly initialised model, on the CPU."""
    config = mixer_config(genome, sizes)
    if genome.get("mix.match") == "longer":
        # The control: as many parameters as with LONGER, spent on the hidden layers of the blocks instead.
        with torch.random.fork_rng(devices=[]):
            wanted = parameter_count(build(SPACE.resolve({**genome, "seq.encoder": "longer"}), sizes, corpus))
            step = EXPERTS if config.sparse else 1  # experts share the hidden width out

            def parameters(width: int) -> int:
                return parameter_count(_assemble(genome, sizes, corpus, replace(config, hidden=width * step)))

            config = replace(config, hidden=matched_width(parameters, wanted) * step)
    return _assemble(genome, sizes, corpus, config)


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers of a model."""
    return sum(p.numel() for p in model.parameters())


def _assemble(genome: Genome, sizes: Sizes, corpus: Corpus, config: RankMixerConfig) -> Recommender:
    width, length = sizes["item_width"], history_length(genome, sizes)
    encoder: RecentMean | Longer | Targeted = RecentMean()
    if genome["seq.encoder"] == "longer":
        merged = -(-length // int(genome["longer.merge"]))
        if int(genome["longer.queries"]) > merged:
            raise UserError(f"{length} events merge into {merged} tokens, fewer than longer.queries asks from")
        reader = LongerEncoder(
            width,
            merge=int(genome["longer.merge"]),
            inner=genome.get("longer.inner") == "on",
            queries=int(genome["longer.queries"]),
            layers=int(genome["longer.layers"]),
            global_tokens=tuple(str(genome["longer.globals"]).split("+")),
        )
        encoder = Longer(width, length, reader)
    elif genome["seq.encoder"] == "target-attention":
        encoder = Targeted(width, length)
    return Recommender(
        corpus.num_items,
        corpus.num_users,
        torch.from_numpy(corpus.profile),
        encoder,
        RankMixerTrunk(8 * width, config),
        width,
        str(genome["train.loss"]),
        config.sparse,
    )


# -- training and evaluation ---------------------------------------------------------------------------------------


def history_length(genome: Genome, sizes: Sizes) -> int:
    """Events that the model reads."""
    value = genome.get("seq.length", RECENT)
    return sizes["length"] if value == BUDGET else int(value)


def batches(
    genome: Genome, corpus: Corpus, seed: int, sizes: Sizes, steps: int, device: torch.device
) -> Iterator[Batch]:
    """The training batches of one run: every event that has one before it is a target once an epoch.

    Targets and negatives come from generators of their own: candidates of one batch size see the same targets.
    """
    size, negatives = int(genome["train.batch"]), int(genome["train.negatives"])
    window = Window(corpus.train, device)
    first = np.zeros(len(corpus.train.items), dtype=bool)
    first[corpus.train.offsets[:-1]] = True
    users = np.repeat(np.arange(corpus.num_users), np.diff(corpus.train.offsets))
    events = np.flatnonzero(~first)
    order, drawn = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    epochs = -(-steps * size // len(events))
    visits = np.concatenate([order.permutation(events) for _ in range(epochs)])[: steps * size]
    stop = torch.from_numpy(visits).to(device).view(steps, size)
    user = torch.from_numpy(users[visits]).to(device).view(steps, size)
    negative = torch.from_numpy(drawn.integers(1, corpus.num_items + 1, (steps, size, negatives))).to(device)
    length = history_length(genome, sizes)
    for i in range(steps):
        batch = window.before(user[i], stop[i], window.times[stop[i]], length)
        yield {**batch, "target": window.items[stop[i]] + 1, "negative": negative[i]}


def recipe(genome: Genome) -> Recipe:
    """How a genome is trained."""
    return Recipe(learning_rate=float(genome["train.lr"]), batch_size=int(genome["train.batch"]))


def evaluated(corpus: Corpus, limit: int) -> Ids:
    """The users that are evaluated: `limit` of them, always the same, in their order."""
    return np.sort(np.random.default_rng(0).permutation(corpus.num_users)[:limit])


@torch.no_grad()
def rank_all(
    model: Recommender, corpus: Corpus, held: Held, users: Ids, length: int, device: torch.device, keep: int = 0
) -> tuple[Tensor, Tensor]:
    """Rank (R,) of each user's held-out item among all items but the history, and the first ten ids (R, 10).

    `keep` leaves the model only that many latest events; the whole history stays excluded.
    """
    window = Window(held.history, device)
    items = torch.arange(1, corpus.num_items + 1, device=device)
    when, target = (torch.from_numpy(column).to(device) for column in (held.time, held.target + 1))
    ranks, lists = [], []
    chunk = max(1, PAIRS.get(device.type, 2**18) // corpus.num_items)
    for chosen in torch.from_numpy(users).to(device).split(chunk):
        stop = window.stop[chosen]
        seen = window.before(chosen, stop, when[chosen], int((stop - window.start[chosen]).max()))["history"]
        batch = window.before(chosen, stop, when[chosen], min(keep or length, length))
        side = model.prepare(batch)
        scores = F.pad(model.score(side, items.expand(len(chosen), -1)).float(), (1, 0), value=-torch.inf)
        seen = F.pad(seen, (1, 0))  # padding is no candidate
        ranks.append(metrics.rank_of_target(scores, target[chosen], seen))
        lists.append(metrics.exclude_items(scores, seen).topk(min(10, corpus.num_items), dim=1).indices)
    return torch.cat(ranks).cpu(), torch.cat(lists).cpu()


def predictor_ndcg(scores: NDArray[np.floating], corpus: Corpus, held: Held, users: Ids) -> float:
    """NDCG@10 of a predictor without training, scores (R, I), with ties in its favour: a floor is never flattered
    away by the order of equals."""
    window = Window(held.history, torch.device("cpu"))
    chosen = torch.from_numpy(users)
    stop = window.stop[chosen]
    seen = window.before(chosen, stop, stop, int((stop - window.start[chosen]).max()))["history"]
    table = F.pad(torch.from_numpy(scores).double(), (1, 0), value=-torch.inf)
    target = torch.from_numpy(held.target[users] + 1)
    own = table.gather(1, target[:, None])
    table.scatter_(1, target[:, None], torch.nextafter(own, torch.full_like(own, torch.inf)))
    return float(metrics.ndcg(metrics.rank_of_target(table, target, F.pad(seen, (1, 0))), 10).double().mean())


def co_occurrence(corpus: Corpus) -> NDArray[np.float64]:
    """(I, I): row i counts the events that followed item i in training within `NEIGHBOURHOOD`, each by 1/distance."""
    train, size = corpus.train, corpus.num_items
    users = np.repeat(np.arange(corpus.num_users), np.diff(train.offsets))
    table = np.zeros(size * size)
    for distance in range(1, min(NEIGHBOURHOOD, len(users) - 1) + 1):
        same = users[distance:] == users[:-distance]
        cell = train.items[:-distance][same] * size + train.items[distance:][same]
        table += np.bincount(cell, minlength=size * size) / distance
    return table.reshape(size, size)


def split(data: Interactions) -> tuple[Corpus, Held]:
    """What search may see, and the test part."""
    events, num_items, users = histories(data, MIN_ITEM_POSITIVES.get(data.name, 0))
    train = events.without_last(2)
    valid_item, valid_time = events.from_end(2)
    test_item, test_time = events.from_end(1)
    corpus = Corpus(
        data.name,
        num_items,
        train,
        Held(train, valid_item, valid_time),
        np.bincount(train.items, minlength=num_items),
        demographics(data.users, users),
    )
    return corpus, Held(events.without_last(1), test_item, test_time)


def searchable(data: Interactions, users: int, stand_in: str = "") -> Data:
    """Training and validation of a data set, with the findings of the split check; `users` limits the evaluation."""
    corpus, test = split(data)
    train = corpus.train
    hygiene = disjoint(
        {"train": train.pairs(), "validation": train.pairs(corpus.valid.target), "test": train.pairs(test.target)}
    )
    hygiene["users trained on a later event"] = int((train.from_end(1)[1] > corpus.valid.time).sum())
    hygiene["users validated on a later event"] = int((corpus.valid.time > test.time).sum())
    return Data(corpus, {data.name: data.fingerprint}, hygiene, min(users, corpus.num_users), stand_in)


def fit(
    genome: Genome, corpus: Corpus, seed: int, sizes: Sizes, device: str, steps: int, progress: Progress
) -> tuple[Recommender, list[float]]:
    """The trained model in evaluation mode, and the losses of its steps. Raises `NonFinite`."""
    seed_everything(seed)
    place = device_for(device)
    model = build(genome, sizes, corpus).to(place)
    latest = torch.zeros((), device=place)

    def loss(batch: Batch) -> Tensor:
        nonlocal latest
        value = model.loss(batch)
        latest = value.detach()
        return value

    def after(step: int) -> None:
        if (step + 1) % 20 == 0 or step + 1 == steps:
            progress(step + 1, float(latest))

    try:
        losses = train_steps(
            model,
            batches(genome, corpus, seed, sizes, steps, place),
            steps=steps,
            recipe=recipe(genome),
            loss=loss,
            after_step=after,
        )
    except NonFiniteLoss as error:
        raise NonFinite(str(error)) from error
    return model.eval(), losses


def flops(model: Recommender, length: int) -> tuple[int, int]:
    """FLOPs of matrix products and attention: of one user's side, and of one candidate given it."""
    device = model.items.weight.device
    history = torch.ones(1, length, dtype=torch.int64, device=device)
    batch = {"history": history, "gap": history, "user": history[:, 0] * 0}
    found = []
    with torch.no_grad():
        with DeviceWork("cost of a user") as work:
            side = model.prepare(batch)
        found.append(work)
        with DeviceWork("cost of a candidate") as work:
            model.score(side, history[:, :1])
        found.append(work)
    user, candidate = (sum(count["flops"] for count in work.counts().values()) for work in found)
    return user, candidate


def assess(model: Recommender, corpus: Corpus, held: Held, sizes: Sizes, device: str) -> Scores:
    """All metrics on held-out items; see `RankMixerMovieLens` and the names in the result.

    Slices: `/long` are users in the top quarter of history lengths, `/tail` targets at or below the median popularity
    of the items that training has, `/last-4` some users with their last four events alone. `scoring_seconds` is the
    time for one user against the whole catalogue.
    """
    length = model.encoder.events.length if isinstance(model.encoder, Longer | Targeted) else RECENT
    users, place = evaluated(corpus, sizes["users"]), device_for(device)
    started = time.perf_counter()
    rank, top = rank_all(model, corpus, held, users, length, place)
    seconds = (time.perf_counter() - started) / len(users)
    short, _ = rank_all(model, corpus, held, users[: sizes["slice_users"]], length, place, keep=LAST)
    ndcg, counts = metrics.ndcg(rank, 10).double(), torch.from_numpy(corpus.counts)
    target = torch.from_numpy(held.target[users])
    lengths = torch.from_numpy(np.diff(held.history.offsets)[users])
    slices = {
        "long": ndcg[lengths >= lengths.double().quantile(0.75)],
        "tail": ndcg[counts[target] <= counts[counts > 0].double().median()],
        "last-4": metrics.ndcg(short, 10).double(),
    }
    means = {f"ndcg@10/{name}": float(values.mean()) for name, values in slices.items() if len(values)}
    user, candidate = flops(model, length)
    return Scores(
        {
            "ndcg@10": float(ndcg.mean()),
            "hit@10": float(metrics.hit_rate(rank, 10).double().mean()),
            **means,
            "ndcg@10/mean of slices": sum(means.values()) / len(means),
            "users in tail": float(len(slices["tail"])),
            "head share": float(metrics.head_share(top - 1, metrics.popularity_head(counts, 0.2)).mean()),
            "list popularity": float(counts[top - 1].double().mean()),
            "parameters": float(parameter_count(model)),
            "user flops": float(user),
            "candidate flops": float(candidate),
            "scoring_seconds": seconds,
        },
        ndcg.tolist(),
    )
