"""DIN: Deep Interest Network for Click-Through Rate Prediction (arXiv:1706.06978, Alibaba 2018).

Official code: https://github.com/zhougr1993/DeepInterestNetwork

The idea: a user's interests are many, and an item meets only some of them. So the history is pooled with weights that
a small network reads off each pair of past item and candidate, without normalising them over the history.

Differs from the paper: history events carry their rating; AdamW; no mini-batch-aware regularisation of id vectors
(one to two passes over the data do not overfit them). This is the neural baseline that ranking papers share.

Letters: B examples, T events of the history, D width of an item vector, F width of all embedded fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from auto_research.layers.towers import FeatureEmbedding, Field, Pooling, ScoreMLP
from auto_research.runtime.device import device_for
from auto_research.study.compare import Comparison, Variant
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import beats
from auto_research.tasks.base import Recipe
from auto_research.tasks.click import ClickTask, PastMeans, Ranker, miniature, pad_history

if TYPE_CHECKING:
    from auto_research.study.context import Study


@dataclass(frozen=True)
class DINConfig:
    """Sizes and switches.

    Attributes:
        field_width: D, and the columns of each other group of fields.
        hidden: widths of the two hidden layers of the tower.
        history: `din` is target attention; `mean` pools the same vectors evenly (the paper's base model);
            `liked-mean` keeps liked items only.
        activation: of the tower.
    """

    field_width: int = 32
    hidden: tuple[int, int] = (128, 64)
    history: Pooling = "din"
    activation: Literal["relu", "prelu", "dice"] = "prelu"


class DIN(Ranker):
    """Embedding, history pooling and a tower over the fields of a ranking task."""

    def __init__(self, fields: Sequence[Field], config: DINConfig | None = None, *, liked: int = 8) -> None:
        config = config or DINConfig()
        features = FeatureEmbedding(fields, config.field_width, history=config.history, liked=liked)
        super().__init__(features, ScoreMLP(features.width, *config.hidden, activation=config.activation))


def specimens() -> list[Specimen]:
    """One tiny DIN with every option switched."""
    task = miniature()
    batch = task.rows(task.train[::6], torch.device("cpu"))
    tiny = DINConfig(field_width=8, hidden=(16, 8))

    def of(config: DINConfig) -> Callable[[], DIN]:
        return lambda: DIN(task.fields, config, liked=task.liked_code)

    return [
        Specimen(
            "din",
            of(tiny),
            batch,
            shape=(len(batch["label"]),),
            pad=pad_history,
            change_later=lambda b: {**b, "label": 1 - b["label"]},
            switches={
                "history = mean": of(replace(tiny, history="mean")),
                "history = liked-mean": of(replace(tiny, history="liked-mean")),
                "activation = dice": of(replace(tiny, activation="dice")),
                "activation = relu": of(replace(tiny, activation="relu")),
            },
        )
    ]


def run(study: Study) -> Comparison:
    """Target attention against even pooling of the same history."""
    device = device_for(study.device)
    with study.stage("features", trains=False):
        interactions = study.dataset().subset_users(study.size("users", smoke=150, standard=10_000), seed=0)
        task = ClickTask(
            interactions, history_length=32, catalogue_users=study.size("catalogue users", smoke=1, standard=40)
        )

    def arm(name: str, config: DINConfig, kind: Literal["baseline", "method", "ablation"]) -> Variant:
        return Variant(name, lambda: DIN(task.fields, config, liked=task.liked_code), kind=kind)

    return study.compare(
        task,
        baseline=arm("mean pooling", DINConfig(history="mean"), "baseline"),
        candidates=[
            arm("din", DINConfig(), "method"),
            arm("din, dice", DINConfig(activation="dice"), "ablation"),
            Variant("past means", PastMeans, kind="floor", note="user mean + item mean, no training"),
        ],
        steps=study.steps("ranker", smoke=30, standard=240),
        device=device,
        recipe=Recipe(
            batch_size=study.size("batch", smoke=128, standard=512),
            validations=study.size("validations", smoke=1, standard=4),
        ),
        learning_rates=(3e-3,) if study.budget == "smoke" else (1e-3, 3e-3),
        clauses=[beats("din", "mean pooling", "auc")],
    )
