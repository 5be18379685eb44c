"""SASRec: self-attentive sequential recommendation (arXiv:1808.09781).

A causal transformer reads a user's events; its state after each event is compared with every item's embedding. The
model is `tasks.baselines.SASRec`, because every next-item paper of this house is held against it; this file asks what
attention over the history adds to the latest event alone, at equal size and training.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import beats
from auto_research.tasks.base import Batch, Recipe
from auto_research.tasks.baselines import MarkovCounts, MostPopular, SASRec
from auto_research.tasks.next_item import NextItem, sequence_split

__all__ = ["SASRec", "run", "specimens"]

MAX_LENGTH = 50


def run(study: Study) -> Comparison:
    """SASRec against the same model that sees the latest event only, and against counts."""
    started, cpu = time.perf_counter(), time.process_time()
    device = device_for(study.device)
    with study.stage("read", trains=False):
        split = sequence_split(study.dataset(), users=study.size("users", smoke=200, standard=100_000))
        task = NextItem(split, MAX_LENGTH)
    dim = study.size("width", smoke=32, standard=64)
    negatives = study.size("negatives", smoke=256, standard=1024)

    def model(window: int | None = None) -> SASRec:
        return SASRec(
            split.num_items, dim, max_length=MAX_LENGTH, dropout=0.4, loss="sampled", negatives=negatives, window=window
        )

    recipe = Recipe(
        learning_rate=2e-3,
        batch_size=study.size("batch", smoke=32, standard=256),
        validations=study.size("validations", smoke=1, standard=6),
    )
    comparison = study.compare(
        task,
        baseline=Variant("last event only", lambda: model(window=1), note="attention sees one event; equal size"),
        candidates=[
            Variant("SASRec", model, kind="method"),
            Variant("transitions", lambda: MarkovCounts(split), kind="floor", note="Markov chain of counts"),
            Variant("most popular", lambda: MostPopular(split), kind="floor"),
        ],
        steps=study.steps("train", smoke=20, standard=1056),  # 12 epochs of Amazon Beauty
        device=device,
        recipe=recipe,
        clauses=[
            beats("SASRec", "most popular", "ndcg@10"),
            beats("SASRec", "last event only", "ndcg@10"),
            beats("SASRec", "transitions", "ndcg@10", required=False),
        ],
    )
    seconds = [trial.seconds for trial in comparison.trials["SASRec"]]
    study.note(
        f"SASRec: {max(seconds):.0f} s for the slowest seed, training and validation; the whole run: "
        f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of processor time, "
        f"{torch.get_num_threads()} threads on {device.type}"
    )
    return comparison


def specimens() -> list[Specimen]:
    """A tiny SASRec."""
    generator = torch.Generator().manual_seed(0)
    events = torch.randint(1, 14, (4, 7), generator=generator)
    batch = {"sequence": events[:, :-1].clone(), "target": events[:, 1:].clone()}
    for name in batch:
        batch[name][0, :2] = 0

    def of(**options: object) -> Callable[[], SASRec]:
        tiny = {"dim": 16, "heads": 2, "layers": 2, "max_length": 12, "dropout": 0.0, **options}
        return lambda: SASRec(13, **tiny)  # type: ignore[arg-type]

    def pad(b: Batch) -> Batch:
        return {name: F.pad(value, (3, 0)) for name, value in b.items()}

    return [
        Specimen(
            "sasrec",
            of(),
            batch,
            shape=(4, 14),
            pad=pad,
            # Scores may see the whole sequence; the targets are the only later events of a batch.
            change_later=lambda b: {**b, "target": b["target"].flip(0)},
            switches={
                "loss = sampled": of(loss="sampled", negatives=4),
                "loss = bce": of(loss="bce", negatives=2),
                "negatives = 3": of(loss="bce", negatives=3),
                "window = 1": of(window=1),
                "layers = 1": of(layers=1),
                "hidden = 32": of(hidden=32),
                "heads = 4": of(heads=4),
                "dim = 8": of(dim=8),
                "activation = gelu": of(activation="gelu"),
                "max_length = 3": of(max_length=3),
                "dropout = 0.5": of(dropout=0.5),
            },
        )
    ]
