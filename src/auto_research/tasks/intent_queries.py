"""From behaviours to the next search query: type phrases, actions, scenes, training sources and held-out cases.

Public interaction data has no search log, so a query is made for every item: a brand-free type phrase from its title
("gel pens", "ink cartridge") or, for films, decade and genre ("90s comedy"). Actions are synthetic too: they follow
from the position by a fixed rule. Users are split; what is learned from users comes from training users alone, and of
those from their training sequences alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from auto_research.data.sequences import Ids, Interactions, ItemTable, SequenceSplit, leave_one_out
from auto_research.tasks.bm25 import words

ACTIONS = ("click", "cart", "favorite", "purchase")
CLICK, CART, FAVORITE, PURCHASE = range(4)

HEADS = {
    "pen": "writing instrument", "pencil": "drawing stick", "marker": "felt writer", "highlighter": "text marker",
    "cartridge": "printer refill", "toner": "laser powder", "refill": "replacement insert", "paper": "printing sheets",
    "notebook": "journal", "planner": "agenda", "calendar": "date chart", "binder": "ring folder",
    "folder": "document sleeve", "divider": "section tab", "label": "sticker tag", "tape": "adhesive strip",
    "envelope": "letter cover", "mailer": "shipping bag", "card": "stock slip", "stapler": "stapling tool",
    "staple": "wire fastener", "clip": "paper fastener", "organizer": "desk tidy", "holder": "stand rack",
    "tray": "letter bin", "eraser": "rubber", "sharpener": "point maker", "calculator": "adding machine",
    "shredder": "paper cutter", "printer": "printing machine", "scanner": "document reader", "phone": "telephone",
    "chair": "desk seat", "board": "wall panel", "pad": "writing block", "note": "memo slip", "book": "record volume",
    "stamp": "ink impression", "ink": "writing fluid", "nib": "pen point", "pouch": "laminating sleeve",
    "laminator": "sealing machine", "protector": "clear sleeve", "scissors": "shears", "ruler": "measuring stick",
    "punch": "hole maker", "dispenser": "feeder", "glue": "paste", "clipboard": "writing board", "box": "carton",
    "bag": "sack", "stand": "riser", "file": "record case", "mat": "floor cover", "cable": "cord", "tab": "index flag",
    "band": "elastic loop", "drawer": "pull-out case", "sticker": "decal", "battery": "power cell",
}  # fmt: skip
"""Head nouns of office products and, for the rewriting source, another way to say each."""

GENERIC = frozenset(
    words(
        "the and for with per pack set box black white blue red green pink yellow purple silver gold gray grey brown "
        "orange assorted color colors colored clear size medium fine extra large small mini standard premium new "
        "original count point inch inches sheets high low multi one two all in of up to by a an x mm amazon"
    )
)
"""Words that say nothing about an item's type."""

GENRE_WORDS = {
    "comedy": "funny film", "drama": "serious film", "action": "stunt film", "thriller": "suspense film",
    "sci-fi": "science fiction", "romance": "love story", "horror": "scary film", "adventure": "quest film",
    "animation": "cartoon", "children": "kids film", "crime": "gangster film", "documentary": "true film",
    "fantasy": "magic tale", "musical": "singing film", "mystery": "whodunit", "war": "battle film",
    "western": "cowboy film", "film-noir": "dark detective film", "imax": "giant screen film",
}  # fmt: skip


def _singular(word: str) -> str:
    if word in HEADS:
        return word
    for ending, stem in (("ies", "y"), ("es", ""), ("s", "")):
        if word.endswith(ending) and word[: -len(ending)] + stem in HEADS:
            return word[: -len(ending)] + stem
    return ""


def type_phrases(titles: Sequence[str], brands: Sequence[str], *, least: int = 4) -> list[str]:
    """A brand-free type phrase for each title, "" where none fits.

    The head is the first known head noun, or the last of a run of them ("pencil sharpener"); the word before it is
    kept as a modifier when at least `least` items share the pair, otherwise the head stands alone (if as many share
    it). Singular and plural count as one type, written as most titles write it. Reads item texts only.
    """
    found: list[tuple[str, str, str]] = []  # modifier, head, surface of the head
    for title, brand in zip(titles, brands, strict=True):
        of_brand = set(words(brand))
        text = [w for w in re.findall(r"[a-z]+", title.lower()) if w not in of_brand]
        at = next((i for i, w in enumerate(text) if _singular(w)), None)
        if at is None:
            found.append(("", "", ""))
            continue
        while at + 1 < len(text) and _singular(text[at + 1]):
            at += 1
        before = text[at - 1] if at else ""
        modifier = before if len(before) > 2 and before not in GENERIC else ""
        found.append((modifier, _singular(text[at]), text[at]))
    pairs = Counter((modifier, head) for modifier, head, _ in found)
    heads = Counter(head for _, head, _ in found)
    kept = [
        (modifier if modifier and pairs[modifier, head] >= least else "", head if heads[head] >= least else "")
        for modifier, head, _ in found
    ]
    surfaces: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for pair, (_, _, surface) in zip(kept, found, strict=True):
        surfaces[pair][surface] += 1
    written = {pair: max(sorted(count), key=lambda s: count[s]) for pair, count in surfaces.items()}
    return [" ".join(filter(None, (modifier, written[modifier, head]))) if head else "" for modifier, head in kept]


def decade(year: int) -> str:
    """1994 -> "90s", 2003 -> "2000s", 0 -> ""."""
    start = year // 10 * 10
    return "" if year <= 0 else f"{start % 100:02d}s" if start < 2000 else f"{start}s"


@dataclass(frozen=True)
class QueryCatalogue:
    """What is known of I items: the text that search sees, and their phrase ("" where there is none).

    `short`: what a prompt calls an item. `paraphrase`: phrase -> the same meaning in other words.
    """

    documents: list[str]
    short: list[str]
    brand: list[str]
    phrase: list[str]
    paraphrase: dict[str, str]

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def queries(self) -> list[str]:
        """All phrases, sorted."""
        return sorted(set(self.phrase) - {""})

    @cached_property
    def phrase_index(self) -> Ids:
        """(I,) place in `queries`, -1 for an item without a phrase."""
        place = {query: i for i, query in enumerate(self.queries)}
        return np.array([place.get(phrase, -1) for phrase in self.phrase], dtype=np.int64)

    def type_of(self, item: int) -> str:
        """The item's phrase, or the beginning of its title."""
        return self.phrase[item] or " ".join(self.short[item].split()[:2])

    @classmethod
    def of_products(cls, items: ItemTable, *, least: int = 4) -> QueryCatalogue:
        """Phrases from titles (see `type_phrases`); brand as published."""
        titles, brands = items.text("title"), items.brand or [""] * len(items)
        phrase = type_phrases(titles, brands, least=least)
        paraphrase = {}
        for query in sorted(set(phrase) - {""}):
            *modifier, head = query.split()
            paraphrase[query] = " ".join([*modifier, HEADS[_singular(head)]])
        return cls(titles, [" ".join(words(t)[:8]) for t in titles], [b.lower() for b in brands], phrase, paraphrase)

    @classmethod
    def of_films(cls, items: ItemTable) -> QueryCatalogue:
        """Decade and first genre; the decade takes the place of the brand. Search sees title, genres and decade."""
        names = [name.lower() for name in items.genre_names]
        phrase, brand, documents, paraphrase = [], [], [], {}
        for title, row, year in zip(items.text("title"), items.genres, items.year.tolist(), strict=True):
            genres = [names[g] for g in np.flatnonzero(row).tolist() if names[g] in GENRE_WORDS]
            period = decade(year)
            query = f"{period} {genres[0]}" if genres and period else ""
            if query:
                paraphrase[query] = f"{GENRE_WORDS[genres[0]]} of the {period}"
            phrase.append(query)
            brand.append(period)
            documents.append(" ".join([title, *genres, period]))
        return cls(documents, [" ".join(words(d)[:8]) for d in items.text("title")], brand, phrase, paraphrase)


def assign_actions(types: Sequence[str], brands: Sequence[str]) -> list[int]:
    """The synthetic action of each shown event: last = purchase, brand repeated = favorite, type repeated = cart,
    otherwise click. Depends on the shown history only, never on what follows it."""
    actions = []
    for at, (kind, brand) in enumerate(zip(types, brands, strict=True)):
        if at == len(types) - 1:
            actions.append(PURCHASE)
        elif brand and brand in brands[:at]:
            actions.append(FAVORITE)
        else:
            actions.append(CART if kind in types[:at] else CLICK)
    return actions


def scene_of(actions: Sequence[int]) -> int:
    """One of four scenes: the last action before the closing purchase, or purchase where nothing came before it."""
    return actions[-2] if len(actions) > 1 else PURCHASE


@dataclass(frozen=True)
class Case:
    """From a history (item indices, oldest first), the next item."""

    user: int
    history: tuple[int, ...]
    target: int


@dataclass(frozen=True)
class IntentData:
    """Training sequences of training users, and held-out cases of other users (one a user)."""

    catalogue: QueryCatalogue
    train_users: list[int]
    train: list[Ids]
    validation: list[Case]
    test: list[Case]
    history: int

    @classmethod
    def of_split(
        cls,
        split: SequenceSplit,
        catalogue: QueryCatalogue,
        *,
        test_users: int,
        validation_users: int,
        history: int = 10,
        events: int | None = None,
        seed: int = 0,
        start: float = 0.0,
    ) -> IntentData:
        """Draws test users among those with a test case, validation users among the others, and trains on the rest.

        A held-out user's case is the last of the split's; a training user gives their training sequence, so that no
        validation or test target of the published split is ever trained on. `events` bounds that sequence to its
        latest events. `start` is the share of the shuffled users after which drawing begins (it wraps around), so
        that users whose scores were seen while a design changed can be left out of a new draw.
        """
        shuffled = np.random.default_rng(seed).permutation(split.num_users)
        order = np.roll(shuffled, -int(start * split.num_users)).tolist()

        def held_out(name: str, count: int, taken: set[int]) -> list[Case]:
            cases = split.cases("valid" if name == "validation" else "test")
            last = {
                int(user): row
                for row, (user, target) in enumerate(zip(cases.user, cases.target, strict=True))
                if target >= 0 and cases.offsets[row + 1] > cases.offsets[row]
            }
            chosen = [user for user in order if user in last and user not in taken][:count]
            rows = [(user, last[user]) for user in chosen]
            return [
                Case(
                    user,
                    tuple(cases.items[cases.offsets[row] : cases.offsets[row + 1]][-history:].tolist()),
                    int(cases.target[row]),
                )
                for user, row in rows
            ]

        test = held_out("test", test_users, set())
        validation = held_out("validation", validation_users, {case.user for case in test})
        taken = {case.user for case in (*test, *validation)}
        users = [u for u in range(split.num_users) if u not in taken and split.offsets[u + 1] - split.offsets[u] > 1]
        sequences = [split.items[split.offsets[u] : split.offsets[u + 1]][-(events or 0) :] for u in users]
        return cls(catalogue, users, sequences, validation, test, history)

    def cases(self, split: str) -> list[Case]:
        """`validation` or `test`."""
        return self.test if split == "test" else self.validation

    @cached_property
    def training_cases(self) -> tuple[list[Case], list[Case]]:
        """(all but the last, the last) next-item case of each training user, where the next item has a phrase."""
        early: list[Case] = []
        last: list[Case] = []
        for user, sequence in zip(self.train_users, self.train, strict=True):
            items = sequence.tolist()
            for at in range(1, len(items)):
                if self.catalogue.phrase[items[at]]:
                    case = Case(user, tuple(items[max(0, at - self.history) : at]), items[at])
                    (last if at == len(items) - 1 else early).append(case)
        return early, last

    def transitions(self) -> Tensor:
        """(Q, Q) float: how often phrase j followed phrase i in training sequences (items without one left out)."""
        size = len(self.catalogue.queries)
        counts = torch.zeros(size, size)
        for sequence in self.train:
            phrases = self.catalogue.phrase_index[sequence]
            phrases = torch.from_numpy(phrases[phrases >= 0])
            counts.index_put_((phrases[:-1], phrases[1:]), torch.ones(max(0, len(phrases) - 1)), accumulate=True)
        return counts


def complements(data: IntentData, *, distance: int = 5) -> dict[int, str]:
    """Item -> the other type that training users most often have within `distance` events of it.

    A co-purchase matrix of items against phrases, from training users alone; an item's own phrase does not count.
    Ties go to the phrase that is first in the alphabet.
    """
    catalogue = data.catalogue
    names, phrase = catalogue.queries, catalogue.phrase_index
    item = np.concatenate([np.empty(0, dtype=np.int64), *data.train])
    user = np.repeat(np.arange(len(data.train)), [len(sequence) for sequence in data.train])
    counts = np.zeros(len(catalogue) * len(names), dtype=np.int64)
    for gap in range(1, distance + 1):
        together = user[:-gap] == user[gap:]
        one, two = item[:-gap][together], item[gap:][together]
        for known, other in ((one, phrase[two]), (two, phrase[one])):
            pair = (other >= 0) & (other != phrase[known])
            counts += np.bincount(known[pair] * len(names) + other[pair], minlength=len(counts))
    table = counts.reshape(len(catalogue), -1)
    return {item: names[table[item].argmax()] for item in np.flatnonzero(table.any(1)).tolist()}


def films(interactions: Interactions) -> tuple[SequenceSplit, QueryCatalogue]:
    """MovieLens as intent data: leave one out, decade and genre as queries."""
    return leave_one_out(interactions), QueryCatalogue.of_films(interactions.items)


def token_f1(predicted: Sequence[str], expected: Sequence[str]) -> Tensor:
    """F1 (N,) of the words of each pair, words counted as often as they occur; two empty texts give 1."""
    pairs = [(words(p), words(e)) for p, e in zip(predicted, expected, strict=True)]
    place = {w: i for i, w in enumerate(dict.fromkeys(w for pair in pairs for side in pair for w in side))}
    bags = torch.zeros(2, len(pairs), max(1, len(place)))
    for side in (0, 1):
        row = torch.tensor([n for n, pair in enumerate(pairs) for _ in pair[side]], dtype=torch.long)
        column = torch.tensor([place[w] for pair in pairs for w in pair[side]], dtype=torch.long)
        bags[side].index_put_((row, column), torch.ones(len(row)), accumulate=True)
    total = bags.sum((0, 2))
    shared = torch.minimum(bags[0], bags[1]).sum(1)
    return torch.where(total > 0, 2 * shared / total.clamp(min=1), 1.0)
