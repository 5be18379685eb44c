"""Re-ranking of short lists: exposure pages, candidate sets, prior scores, formula, MMR, a list simulator, metrics.

There is no public log of exposed pages with clicks and payments, so one is made from ratings, as openly as possible:
a *page* is `length` consecutive rated events of a user in time order, *click* is a rating of at least 4, *pay* a rating
of 5 (hence pay implies click), and the *price* of an item is drawn once from a seeded log-normal, so that GMV = pay *
price is an objective of its own. A *candidate set* is the next `candidates` events of a user, to be chosen from.

**Who and when.** Users are divided into four disjoint groups: training, validation, test and simulator. The events of
each of the first three are divided in time: the *history* comes first, then what is learned from or evaluated. The
prior scorer learns from the histories of training users only. A training page carries the profile of its user before
the page; an evaluated list the profile at the end of the history, so that no rating of an evaluated event reaches any
prior, queue or input, not even as the past of a later list.

Letters: N lists of C items, l list length, I items, G content features, F profile features, B batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.data.sequences import Ids, Interactions, offsets_of
from auto_research.runtime.errors import UserError
from auto_research.tasks.base import Batch, Evaluation, Mean, Split, UnitMetric
from auto_research.tasks.metrics import intra_list_diversity

CLICK_RATING = 4.0
PAY_RATING = 5.0
OBJECTIVES = ("clicks", "pays", "GMV")
LABELS = ("click", "pay", "simulated click", "simulated pay")

Weights = tuple[float, float, float]
"""Business weights of clicks, pays and GMV in the value of a list."""


# -- Slates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slates:
    """N lists of C items in shown (time) order.

    Shapes: item (N, C) shifted ids; click, pay (N, C) float32 in {0, 1}; profile (N, F) float32, what was known of
    the user before the list; user (N,) index in the source; event (N, C) index of each rating in the source.
    """

    item: Tensor
    click: Tensor
    pay: Tensor
    profile: Tensor
    user: Tensor
    event: Tensor

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True)
class SlateData:
    """All lists of one source.

    Attributes:
        prior: pages in the histories of training users; only the prior scorer learns from them.
        train: pages of training users after their histories.
        validation, test: candidate sets of validation and test users.
        shown: pages of the same users as these, for the calibration of predicted counts.
        content: (I + 1, G) unit content vectors of the items (genres), row 0 for padding.
        price: (I + 1,) pseudo-prices with mean 1 over the items.
        taste: (I + 1, R) item vectors from the ratings of the simulator's users.
    """

    prior: Slates
    train: Slates
    validation: Slates
    test: Slates
    shown: dict[Split, Slates]
    content: Tensor
    price: Tensor
    taste: Tensor
    length: int


def pseudo_prices(items: int, seed: int, spread: float = 0.6) -> Tensor:
    """Log-normal prices (I + 1,), mean 1 over the items, independent of everything else; row 0 is padding."""
    drawn = np.random.default_rng(seed).lognormal(0.0, spread, items)
    return torch.from_numpy(np.concatenate([[0.0], drawn / drawn.mean()])).float()


def _blocks(
    user: Ids, begin: Ids, end: Ids, width: int, *, most: int | None = None, stride: int | None = None
) -> tuple[Ids, Ids]:
    """User (N,) and first event (N,) of the blocks of `width` events in [begin, end) of each user.

    A block begins every `stride` events (every `width` by default: no overlap); at most `most` a user.
    """
    stride = stride or width
    count = np.maximum(end - begin - width + stride, 0) // stride
    if most is not None:
        count = np.minimum(count, most)
    row = np.repeat(np.arange(len(user)), count)
    ordinal = np.arange(len(row)) - np.repeat(offsets_of(count)[:-1], count)
    return user[row], begin[row] + ordinal * stride


@dataclass(frozen=True)
class _Profiles:
    """Sums over the events of each user up to any moment, to read a profile at that moment."""

    totals: NDArray[np.float64]  # (E + 1, 2 + 2 G): clicks, pays, shown per genre, clicks per genre
    offsets: Ids
    click_rate: float
    pay_rate: float

    def at(self, user: Ids, moment: Ids, strength: float = 5.0) -> Tensor:
        """Profiles (N, 3 + 2 G) of users from their events before event index `moment` (N,).

        log(1 + number of events); smoothed click and pay rates less the overall ones; per genre its share of the
        events and the smoothed excess of clicks over the user's own rate.
        """
        begin = self.offsets[user]
        seen = (moment - begin).astype(np.float64)[:, None]
        sums = self.totals[moment] - self.totals[begin]
        genres = (sums.shape[1] - 2) // 2
        shown, liked = sums[:, 2 : 2 + genres], sums[:, 2 + genres :]
        click = (sums[:, :1] + strength * self.click_rate) / (seen + strength)
        pay = (sums[:, 1:2] + strength * self.pay_rate) / (seen + strength)
        parts = [
            np.log1p(seen) / 4,
            click - self.click_rate,
            pay - self.pay_rate,
            shown / np.maximum(seen, 1.0),
            (liked - shown * click) / (shown + strength),
        ]
        return torch.from_numpy(np.concatenate(parts, axis=1)).float()


def taste_vectors(interactions: Interactions, users: NDArray[np.bool_], rank: int = 8) -> Tensor:
    """Item vectors (I + 1, rank): right singular vectors, times singular values, of the ratings of some users.

    Ratings are centred on each user's mean; an item that none of them rated gets a zero vector.
    """
    chosen = users[interactions.user]
    row = np.cumsum(users)[interactions.user[chosen]] - 1
    rating = interactions.rating[chosen].astype(np.float64)
    count = np.bincount(row, minlength=int(users.sum()))
    mean = np.bincount(row, rating, minlength=len(count)) / np.maximum(count, 1)
    matrix = np.zeros((len(count), interactions.num_items))
    matrix[row, interactions.item[chosen]] = rating - mean[row]
    # numpy brings its own LAPACK; a build of torch may have none
    _, value, right = np.linalg.svd(matrix, full_matrices=False)
    vectors = (value[:rank, None] * right[:rank]).T
    return torch.from_numpy(np.concatenate([np.zeros((1, vectors.shape[1])), vectors])).float()


def build_slates(
    interactions: Interactions,
    *,
    length: int = 8,
    candidates: int = 24,
    seed: int = 0,
    history: float = 0.4,
    sets_per_user: int = 6,
    stride: int = 2,
    shares: tuple[float, float, float] = (0.10, 0.20, 0.15),
) -> SlateData:
    """Divides users and time as in the module's docstring; all draws depend on `seed` alone.

    Args:
        history: share of each user's events, and at least `length`, that comes before any list.
        sets_per_user: most candidate sets that one user contributes.
        stride: events between the beginnings of successive training pages. The borders of pages are not in the data,
            so pages overlap; those that are evaluated never do.
        shares: of validation, test and simulator users.

    Raises `UserError` when the data are too few to fill every part.
    """
    if candidates % length:
        raise ValueError(f"{candidates} candidates are no multiple of the list length {length}")
    users, offsets = interactions.num_users, interactions.offsets
    cuts = np.round(np.cumsum(shares) * users).astype(int)
    shuffled = np.random.default_rng(seed).permutation(users)
    validation, test, simulator, train = (np.sort(part) for part in np.split(shuffled, cuts))
    begin, end = offsets[:-1], offsets[1:]
    middle = begin + np.maximum(length, np.floor(history * (end - begin)).astype(np.int64))

    click = (interactions.rating >= CLICK_RATING).astype(np.float64)
    pay = (interactions.rating >= PAY_RATING).astype(np.float64)
    genres = interactions.items.genres.astype(np.float64)
    shown = genres[interactions.item]
    prior_user, prior_start = _blocks(train, begin[train], np.minimum(middle, end)[train], length)
    if len(prior_start) == 0:
        raise UserError(f"no training user has {length} events; choose more users or shorter lists")
    known = (prior_start[:, None] + np.arange(length)).ravel()
    totals = np.concatenate([click[:, None], pay[:, None], shown, shown * click[:, None]], axis=1)
    profiles = _Profiles(
        np.concatenate([np.zeros((1, totals.shape[1])), totals.cumsum(0)]),
        offsets,
        float(click[known].mean()),
        float(pay[known].mean()),
    )

    def slates(user: Ids, start: Ids, moment: Ids, width: int, what: str) -> Slates:
        if len(start) == 0:
            raise UserError(f"the data hold no {what}; choose more users, or fewer candidates than {candidates}")
        event = start[:, None] + np.arange(width)
        return Slates(
            item=torch.from_numpy(interactions.item[event] + 1),
            click=torch.from_numpy(click[event]).float(),
            pay=torch.from_numpy(pay[event]).float(),
            profile=profiles.at(user, moment),
            user=torch.from_numpy(user),
            event=torch.from_numpy(event),
        )

    def evaluated(group: Ids, width: int, what: str, most: int) -> Slates:
        user, start = _blocks(group, middle[group], end[group], width, most=most)
        return slates(user, start, middle[user], width, what)

    page_user, page_start = _blocks(train, middle[train], end[train], length, stride=stride)
    pages = sets_per_user * candidates // length
    unit = genres / np.maximum(np.linalg.norm(genres, axis=1, keepdims=True), 1e-12)
    chosen = np.zeros(users, dtype=bool)
    chosen[simulator] = True
    return SlateData(
        prior=slates(prior_user, prior_start, prior_start, length, "pages for the prior scorer"),
        train=slates(page_user, page_start, page_start, length, "training pages"),
        validation=evaluated(validation, candidates, "validation candidates", sets_per_user),
        test=evaluated(test, candidates, "test candidates", sets_per_user),
        shown={
            "validation": evaluated(validation, length, "validation pages", pages),
            "test": evaluated(test, length, "test pages", pages),
        },
        content=torch.from_numpy(np.concatenate([np.zeros((1, genres.shape[1])), unit])).float(),
        price=pseudo_prices(interactions.num_items, seed),
        taste=taste_vectors(interactions, chosen),
        length=length,
    )


# -- Prior scores, formula, MMR ----------------------------------------------------------------------------------


class PriorScorer(nn.Module):
    """Pointwise multi-task model: item, content and profile -> click probability, and pay probability given a click.

    Both are learned over all shown items, pay through the product of the two (ESMM, arXiv:1804.07931). It plays
    the upstream ranker whose scores a re-ranker receives; it never sees a list.
    """

    def __init__(self, items: int, content: int, profile: int, dim: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.item = nn.Embedding(items + 1, dim)
        nn.init.normal_(self.item.weight, std=0.05)
        self.content = nn.Linear(content, dim)
        self.profile = nn.Linear(profile, dim)
        self.tower = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(4 * dim, dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(dim, 2)
        )

    def logits(self, batch: Batch) -> Tensor:
        """(B, C, 2) float32: click, and pay given click."""
        content = self.content(batch["content"])
        profile = self.profile(batch["profile"])[:, None].expand_as(content)
        parts = [self.item(batch["item"]), content, profile, content * profile]
        return self.tower(torch.cat(parts, dim=-1)).float()

    def scores(self, batch: Batch) -> Tensor:
        """(B, C, 2): pCTR and pCVR."""
        return self.logits(batch).sigmoid()

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of clicks and of pays, in nats an item."""
        log_click, log_buy = F.logsigmoid(self.logits(batch)).unbind(-1)
        return _log_loss(log_click, batch["click"]) + _log_loss(log_click + log_buy, batch["pay"])


def _log_loss(log_probability: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy from log-probabilities below zero."""
    missed = torch.log(-torch.expm1(log_probability.clamp(max=-1e-6)))
    return -(label * log_probability + (1 - label) * missed).mean()


def inputs(data: SlateData, slates: Slates, index: Tensor, device: torch.device) -> Batch:
    """What is known of lists `index` (B,) before they are shown: no label is in it.

    item (B, C), content (B, C, G), price (B, C), profile (B, F).
    """
    item = slates.item[index]
    batch = {
        "item": item,
        "content": data.content[item],
        "price": data.price[item],
        "profile": slates.profile[index],
    }
    return {name: value.to(device) for name, value in batch.items()}


def prior_batches(data: SlateData, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Endless pages for the prior scorer, with their labels; histories of training users only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        index = torch.randint(len(data.prior), (batch_size,), generator=generator)
        yield {
            **inputs(data, data.prior, index, device),
            "click": data.prior.click[index].to(device),
            "pay": data.prior.pay[index].to(device),
        }


@torch.no_grad()
def prior_scores(scorer: PriorScorer, data: SlateData, slates: Slates, device: torch.device) -> Tensor:
    """pCTR and pCVR (N, C, 2) of all lists, float32 on the CPU."""
    scorer.eval()
    parts = torch.arange(len(slates)).split(512)
    return torch.cat([scorer.scores(inputs(data, slates, part, device)).cpu() for part in parts])


def objective_priors(batch: Batch) -> Tensor:
    """Expected click, pay and GMV of each candidate (B, C, 3): pCTR, pCTR pCVR, pCTR pCVR price."""
    click, buy = batch["prior"].unbind(-1)
    return torch.stack([click, click * buy, click * buy * batch["price"]], dim=-1)


def formula(batch: Batch, weights: Weights) -> Tensor:
    """The item-level fusion that re-ranking replaces: alpha pCTR + beta pCTR pCVR + gamma pCTR pCVR price (B, C)."""
    priors = objective_priors(batch)
    return priors @ priors.new_tensor(weights)


def similarities(batch: Batch) -> Tensor:
    """Cosine of the content vectors of all pairs of candidates (B, C, C)."""
    return batch["content"] @ batch["content"].transpose(1, 2)


def trade(value: Tensor, nearest: Tensor, trade_off: float | Tensor) -> Tensor:
    """lambda * value - (1 - lambda) * similarity to the most similar item chosen so far; lambda is one or (B, 1)."""
    return trade_off * value - (1.0 - trade_off) * nearest


def mmr_select(value: Tensor, similarity: Tensor, trade_off: float | Tensor, length: int) -> Tensor:
    """Maximal marginal relevance: picks `length` candidates greedily, in order (B, length).

    Shapes: value (B, C) fixed in advance, similarity (B, C, C), trade_off one or (B, 1). Ties go to the earlier
    candidate; with `trade_off` 1 this sorts by value.
    """
    nearest = torch.zeros_like(value)
    taken = torch.zeros_like(value, dtype=torch.bool)
    chosen: list[Tensor] = []
    for _ in range(length):
        pick = trade(value, nearest, trade_off).masked_fill(taken, -torch.inf).argmax(1, keepdim=True)
        taken = taken.scatter(1, pick, True)
        to_pick = take_rows(similarity, pick)[:, 0]
        nearest = to_pick if not chosen else torch.maximum(nearest, to_pick)
        chosen.append(pick)
    return torch.cat(chosen, dim=1)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (B, C, D) at candidates index (B, q) -> (B, q, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


# -- Simulator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListSimulator:
    """A simulator, not data: how a user might answer a list, given what the log says of each item by itself.

    *Fatigue*: an item that would be clicked is clicked with probability 1 - fatigue * m, where m is its cosine, at
    least 0, with the most similar item shown before it. *Cascade*: the user looks at the next item with probability
    `after_click` or `after_skip`. Similarity comes from the ratings of the simulator's own users, who are in no other
    part, and so differs from the content similarity that re-rankers see.
    """

    taste: Tensor
    fatigue: float = 0.7
    after_click: float = 0.98
    after_skip: float = 0.90

    def freshness(self, item: Tensor) -> Tensor:
        """1 - fatigue * m of each position (B, l) of lists of shifted ids (B, l)."""
        vectors = F.normalize(self.taste.to(item.device)[item], dim=-1)
        cosine = (vectors @ vectors.transpose(1, 2)).clamp_min(0.0)
        earlier = torch.ones_like(cosine, dtype=torch.bool).tril(-1)
        return 1.0 - self.fatigue * cosine.masked_fill(~earlier, 0.0).amax(-1)

    def expected(self, item: Tensor, click: Tensor, pay: Tensor) -> tuple[Tensor, Tensor]:
        """Expected clicks and pays at each position (B, l), from labels (B, l) in shown order."""
        fresh = self.freshness(item)
        looks = torch.ones_like(click[:, 0])
        at_position = []
        for answer in (click * fresh).unbind(1):
            at_position.append(looks)
            looks = looks * (answer * self.after_click + (1 - answer) * self.after_skip)
        seen = torch.stack(at_position, dim=1) * fresh
        return click * seen, pay * seen

    def draw(self, item: Tensor, click: Tensor, pay: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One answer (B, l) to each list: clicks and pays in {0, 1}."""
        chance = torch.rand((2, *click.shape), generator=generator).to(click.device)
        answer = click * (chance[0] < self.freshness(item))
        stays = chance[1] < torch.where(answer > 0, self.after_click, self.after_skip)
        seen = F.pad(stays.long().cumprod(1)[:, :-1], (1, 0), value=1)
        return answer * seen, pay * answer * seen


# -- Task --------------------------------------------------------------------------------------------------------


def position_discount(length: int, device: torch.device | None = None) -> Tensor:
    """1 / log2(1 + k) for k = 1..l, (l,): what an action at each position counts."""
    return 1.0 / torch.log2(torch.arange(2, length + 2, dtype=torch.float32, device=device))


def objectives(click: Tensor, pay: Tensor, price: Tensor, weights: Weights) -> dict[str, Tensor]:
    """Position-discounted clicks, pays, GMV and their weighted sum ("value") of lists (B, l), each (B,)."""
    discount = position_discount(click.shape[1], click.device)
    found = {"clicks": click @ discount, "pays": pay @ discount, "GMV": (pay * price) @ discount}
    found["value"] = sum((w * v for w, v in zip(weights, found.values(), strict=True)), torch.zeros_like(click[:, 0]))
    return found


class Reranker(nn.Module):
    """Chooses and orders `length` of C candidates.

    Attributes:
        trade_offs: values of lambda that validation chooses among; one value where there is nothing to choose.
        choice: index of the chosen one; a buffer, so that a saved state carries it.
    """

    choice: Tensor

    def __init__(self, trade_offs: Sequence[float]) -> None:
        super().__init__()
        self.trade_offs = tuple(trade_offs)
        self.register_buffer("choice", torch.tensor(len(self.trade_offs) - 1))

    @property
    def trade_off(self) -> float:
        """The lambda that is served."""
        return self.trade_offs[int(self.choice)]

    def rerank(self, batch: Batch, trade_off: float | Tensor) -> Tensor:
        """Chosen candidates in order (B, length), as indices into the candidates; lambda is one or (B, 1)."""
        raise TypeError(f"{type(self).__name__} does not say how it chooses")

    def rerank_at_each(self, batch: Batch) -> Tensor:
        """The lists at each of the model's lambdas (lambdas, B, length), in one call."""
        count, lists = len(self.trade_offs), len(batch["item"])
        every = torch.tensor(self.trade_offs, device=batch["item"].device).repeat_interleave(lists)[:, None]
        repeated = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in batch.items()}
        return self.rerank(repeated, every).unflatten(0, (count, lists))

    def token_evaluations(self, candidates: int) -> int:
        """How many item tokens the model reads to build one list."""
        return 0

    def expected_counts(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Expected clicks and pays in each prefix (B, l) of pages in shown order, if the model gives any."""
        return None


class FormulaReranker(Reranker):
    """Greedy by the weighted formula of prior scores, with MMR where lambda is below 1; nothing is trained."""

    def __init__(self, weights: Weights, length: int, trade_offs: Sequence[float] = (1.0,)) -> None:
        super().__init__(trade_offs)
        self.weights, self.length = weights, length

    def rerank(self, batch: Batch, trade_off: float | Tensor) -> Tensor:
        value = formula(batch, self.weights)
        return mmr_select(value / request_scale(batch, self.weights), similarities(batch), trade_off, self.length)


def request_scale(batch: Batch, weights: Weights) -> Tensor:
    """Mean formula score of the candidates (B, 1): the unit in which values are traded against cosines.

    Known at serving time, the same for every arm, and free of what the arm under test predicts.
    """
    return formula(batch, weights).mean(1, keepdim=True).clamp_min(1e-6)


@dataclass
class RerankTask:
    """Training pages, candidate sets with prior scores, and the two views of a list.

    *Logged*: the labels of the chosen items. *Simulated*: the expected answer of `simulator`. Both discount
    positions. Lambda is chosen on validation by the simulated value, the only view in which diversity is worth
    anything, by the same rule for every arm; test uses that choice. Units are lists.

    Attributes:
        priors: pCTR and pCVR (N, C, 2) of the lists of each part: "train", "validation", "test", "shown validation",
            "shown test".
        simulated: clicks and pays (N, l) that the simulator answered, once, to the training pages.
    """

    data: SlateData
    priors: dict[str, Tensor]
    weights: Weights
    simulator: ListSimulator
    seed: int = 0
    name: str = "rerank"
    primary: str = "simulated value"
    lower_is_better: frozenset[str] = frozenset()
    simulated: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        pages = self.data.train
        generator = torch.Generator().manual_seed(self.seed)
        self.simulated = self.simulator.draw(pages.item, pages.click, pages.pay, generator)

    def batches(self, seed: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Training pages in shown order, with logged and simulated labels."""
        generator = torch.Generator().manual_seed(seed)
        pages = self.data.train
        labels = dict(zip(LABELS, (pages.click, pages.pay, *self.simulated), strict=True))
        while True:
            for index in torch.randperm(len(pages), generator=generator).split(batch_size):
                batch = self._inputs("train", pages, index, device)
                yield {**batch, **{name: label[index].to(device) for name, label in labels.items()}}

    def _inputs(self, part: str, slates: Slates, index: Tensor, device: torch.device) -> Batch:
        return {**inputs(self.data, slates, index, device), "prior": self.priors[part][index].to(device)}

    @torch.no_grad()
    def evaluate(self, model: Reranker, split: Split, device: torch.device) -> Evaluation:  # type: ignore[override]
        """Metrics at the model's lambda; on validation that lambda is chosen first and stored in the model."""
        slates = self.data.validation if split == "validation" else self.data.test
        index = torch.arange(len(slates))
        started = time.perf_counter()
        lists = torch.cat(
            [model.rerank_at_each(self._inputs(split, slates, part, device)).cpu() for part in index.split(256)], dim=1
        )
        milliseconds = 1000 * (time.perf_counter() - started) / (len(lists) * len(slates))
        views = {t: self.views(slates, chosen) for t, chosen in zip(model.trade_offs, lists, strict=True)}
        if split == "validation":
            # the first of equals is the most diverse one
            best = max(sorted(views), key=lambda t: float(views[t][self.primary].mean()))
            model.choice.fill_(model.trade_offs.index(best))
        served = model.trade_off
        metrics: dict[str, UnitMetric] = {name: Mean(value) for name, value in views[served].items()}
        for trade_off, view in views.items():
            for name in ("value", "simulated value", "ILAD"):
                metrics[f"{name} at {trade_off:g}"] = Mean(view[name])
        diagnostics = {
            "lambda": served,
            "token evaluations per list": float(model.token_evaluations(slates.item.shape[1])),
            "ms per list": milliseconds,
            **self._calibration(model, split, device),
        }
        return Evaluation(len(slates), metrics, diagnostics)

    def views(self, slates: Slates, chosen: Tensor) -> dict[str, Tensor]:
        """Every metric of chosen lists (N, l) of candidate indices, one value a list (N,)."""
        item = slates.item.gather(1, chosen)
        click, pay = slates.click.gather(1, chosen), slates.pay.gather(1, chosen)
        price = self.data.price[item]
        found = objectives(click, pay, price, self.weights)
        simulated = objectives(*self.simulator.expected(item, click, pay), price, self.weights)
        found |= {f"simulated {name}": value for name, value in simulated.items()}
        found["ILAD"] = intra_list_diversity(item, self.data.content)
        return found

    def _calibration(self, model: Reranker, split: Split, device: torch.device) -> dict[str, float]:
        """Expected over observed clicks and pays in prefixes of shown pages, by prefix length."""
        slates = self.data.shown[split]
        parts = torch.arange(len(slates)).split(512)
        counts = [model.expected_counts(self._inputs(f"shown {split}", slates, part, device)) for part in parts]
        given = [pair for pair in counts if pair is not None]
        if len(given) < len(counts):
            return {}
        report = {}
        for name, label, expected in zip(
            ("clicks", "pays"), (slates.click, slates.pay), zip(*given, strict=True), strict=True
        ):
            total, observed = torch.cat(expected).cpu().double().sum(0), label.double().cumsum(1).sum(0)
            for j, ratio in enumerate((total / observed).tolist(), start=1):
                report[f"expected over observed {name} in the first {j}"] = ratio
        return report


def make_task(
    data: SlateData, scorer: PriorScorer, weights: Weights, device: torch.device, *, seed: int = 0
) -> RerankTask:
    """The task whose prior scores come from a trained `scorer`."""
    parts: dict[str, Slates] = {"train": data.train, "validation": data.validation, "test": data.test}
    parts |= {f"shown {split}": slates for split, slates in data.shown.items()}
    priors = {name: prior_scores(scorer, data, slates, device) for name, slates in parts.items()}
    return RerankTask(data, priors, weights, ListSimulator(data.taste), seed=seed)
