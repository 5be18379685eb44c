"""Four classics that need no gradient: popularity, item neighbours, EASE and BM25 over titles.

They are what a neural recommender has to beat, and each is an adapter of its own. All run on the CPU by nature:
counting, one linear solve, matching words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from auto_research.data.sequences import SequenceSplit
from auto_research.study.compare import Comparison, Variant
from auto_research.study.context import Study
from auto_research.study.verdict import beats
from auto_research.tasks.baselines import BM25, EASE, ItemKNN, MarkovCounts, MostPopular, Random
from auto_research.tasks.next_item import NextItem, sequence_split

CPU = torch.device("cpu")


def prepare(study: Study) -> tuple[SequenceSplit, NextItem]:
    """The leave-one-out split of the study's data and the task over it."""
    with study.stage("read", trains=False):
        split = sequence_split(study.dataset(), users=study.size("users", smoke=200, standard=100_000))
        return split, NextItem(split)


def floor(name: str, build: Callable[[], nn.Module], note: str = "") -> Variant:
    """A variant that is finished once built."""
    return Variant(name, build, kind="floor", note=note)


def tuned(study: Study, task: NextItem, name: str, builds: Iterable[tuple[str, Callable[[], nn.Module]]]) -> nn.Module:
    """The model that is best on validation; what was chosen goes into the record."""
    with study.stage(f"tune {name}", trains=False):
        tried = []
        for setting, build in builds:
            model = build()
            tried.append((task.evaluate(model, "validation", CPU)[task.primary], setting, model))
        value, setting, model = max(tried, key=lambda t: t[0])
    study.note(f"{name}, chosen on validation: {setting} ({task.primary} {value:.4f})")
    return model


def tuned_neighbours(study: Study, split: SequenceSplit, task: NextItem) -> nn.Module:
    """Item neighbours, their number and shrinkage chosen on validation."""
    grid = [(k, shrinkage) for k in (50, 200) for shrinkage in (0.0, 10.0, 50.0)]
    if study.budget == "smoke":
        grid = grid[:2]
    return tuned(
        study,
        task,
        "item kNN",
        ((f"{k} neighbours, shrinkage {s:g}", lambda k=k, s=s: ItemKNN(split, k, s)) for k, s in grid),  # type: ignore[misc]
    )


def run_most_popular(study: Study) -> Comparison:
    """Popularity against chance."""
    split, task = prepare(study)
    return study.compare(
        task,
        baseline=floor("random", lambda: Random(split.num_items)),
        candidates=[floor("most popular", lambda: MostPopular(split))],
        steps=1,
        device=CPU,
        clauses=[beats("most popular", "random", "ndcg@10")],
    )


def run_item_knn(study: Study) -> Comparison:
    """Item neighbours, tuned on validation, against popularity."""
    split, task = prepare(study)
    model = tuned_neighbours(study, split, task)
    return study.compare(
        task,
        baseline=floor("most popular", lambda: MostPopular(split)),
        candidates=[
            floor("item kNN", lambda: model),
            floor("transitions", lambda: MarkovCounts(split), "the latest event alone, in order"),
        ],
        steps=1,
        device=CPU,
        clauses=[beats("item kNN", "most popular", "ndcg@10")],
    )


def run_ease(study: Study) -> Comparison:
    """EASE against popularity and item neighbours; ridge and neighbourhood are chosen on validation."""
    split, task = prepare(study)
    neighbours = tuned_neighbours(study, split, task)
    grid = (50.0, 500.0) if study.budget == "smoke" else (20.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
    model = tuned(study, task, "EASE", ((f"l2 {l2:g}", lambda l2=l2: EASE(split, l2)) for l2 in grid))  # type: ignore[misc]
    return study.compare(
        task,
        baseline=floor("item kNN", lambda: neighbours),
        candidates=[
            floor("EASE", lambda: model),
            floor("most popular", lambda: MostPopular(split)),
        ],
        steps=1,
        device=CPU,
        clauses=[beats("EASE", "most popular", "ndcg@10"), beats("EASE", "item kNN", "ndcg@10")],
    )


def run_bm25_title(study: Study) -> Comparison:
    """BM25 between the titles of the latest events and those of all items, against popularity and chance."""
    split, task = prepare(study)
    titles = split.items_table.text("title")
    recents = (1, 10) if study.budget == "smoke" else (1, 3, 10, 30)
    model = tuned(
        study,
        task,
        "BM25",
        ((f"titles of the last {n}", lambda n=n: BM25(titles, n)) for n in recents),  # type: ignore[misc]
    )
    return study.compare(
        task,
        baseline=floor("random", lambda: Random(split.num_items)),
        candidates=[
            floor("BM25", lambda: model),
            floor("most popular", lambda: MostPopular(split)),
        ],
        steps=1,
        device=CPU,
        clauses=[
            beats("BM25", "random", "ndcg@10"),
            beats("BM25", "most popular", "ndcg@10/cold"),
        ],
    )
