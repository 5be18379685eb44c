"""Zero-shot cross-domain knowledge distillation (arXiv:2603.28994, Google / YouTube). Official code: none.

Idea. A small ranker of a low-traffic surface learns from a large teacher of a sister product that is applied as it
is: it never saw the target domain's labels, tasks or inputs. Its predictions are soft labels of a *separate* logit
that hangs on the task layers of an existing task; serving reads the hard-label logit only, so the teacher's other
label definitions and base rates cannot shift what is served.

Implemented: the zero-shot label store, the auxiliary logit on the served task, direct distillation, source-data
co-training, and the shuffled, constant and fine-tuned teachers. Deviates: MovieLens stands in for both products; the
schema, task and base-rate gaps are made (tasks/cross_domain.py says how).

Letters: B examples, T history, D width, M teacher tasks, K student tasks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.data.sequences import Interactions
from auto_research.layers.towers import MLP, TargetAttention
from auto_research.runtime.device import device_for, seed_everything
from auto_research.study.compare import Comparison, Kind, Trained, Variant
from auto_research.study.context import Study
from auto_research.study.specimen import Specimen
from auto_research.study.verdict import beats, fact, not_below
from auto_research.tasks.base import Batch, Recipe, count_parameters, train_steps
from auto_research.tasks.cross_domain import (
    DEFAULT_SURFACE,
    SOURCE_SURFACE,
    SOURCE_TASKS,
    TARGET_TASKS,
    YEAR_CODES,
    CrossDomain,
    Examples,
    split_domains,
    student_view,
    teacher_view,
)

Distillation = Literal["none", "auxiliary", "direct"]
Labels = Literal["zero-shot", "shuffled", "constant", "fine-tuned"]
TWIN = {"click": "satisfied", "like": "long"}
"""Target task -> the source task with the same definition."""


class Teacher(nn.Module):
    """The source product's large ranker: attention over a long history, a three-layer network, one logit a task."""

    def __init__(self, items: int, genres: int, width: int = 128) -> None:
        super().__init__()
        self.item = nn.Embedding(items + 1, width, padding_idx=0)
        self.genres = nn.Linear(genres, width, bias=False)
        self.year = nn.Embedding(YEAR_CODES, width // 4)
        self.surface = nn.Embedding(2, width // 4)
        self.pool = TargetAttention(width, softmax=True)
        self.mlp = MLP(3 * width + width // 2, 4 * width, 2 * width, width, len(SOURCE_TASKS))
        for table in (self.item, self.year, self.surface):
            nn.init.normal_(table.weight, std=0.05)

    def scores(self, batch: Batch) -> Tensor:
        """Logits (B, M) in the order of `SOURCE_TASKS`."""
        item, history = self.item(batch["item"]), self.item(batch["history"])
        interest = self.pool(item, history, batch["history"] > 0)
        side = [self.genres(batch["genres"]), self.year(batch["year"]), self.surface(batch["surface"])]
        return self.mlp(torch.cat([item, interest, *side], dim=-1))

    def loss(self, batch: Batch) -> Tensor:
        """Sum over tasks of the mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(self.scores(batch), batch["label"], reduction="none").mean(0).sum()


@dataclass(frozen=True)
class StudentConfig:
    """The small ranker.

    Attributes:
        distillation: none; `auxiliary`, a logit of its own for the teacher; `direct`, the served logit itself.
        distilled: teacher tasks whose predictions are learned (auxiliary only).
        attach: the task on whose layers the teacher's logits hang.
        weight: lambda of the distillation loss.
        labels: which predictions: the zero-shot teacher's, those permuted within the batch, their mean over the
            batch, or those of a teacher fine-tuned on the target.
        cotrain: also train on as many source examples.
    """

    items: int
    width: int = 16
    distillation: Distillation = "none"
    distilled: tuple[str, ...] = ("satisfied", "click")
    attach: str = "click"
    weight: float = 1.0
    labels: Labels = "zero-shot"
    cotrain: bool = False


class Student(nn.Module):
    """Shared bottom, one small network a task; the teacher's logits hang beside the hard-label logit of one task."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.item = nn.Embedding(config.items + 1, width, padding_idx=0)
        self.hour = nn.Embedding(24, width // 4)
        nn.init.normal_(self.item.weight, std=0.05)
        nn.init.normal_(self.hour.weight, std=0.05)
        self.shared = nn.Sequential(MLP(2 * width + width // 4, 2 * width, width), nn.ReLU())
        self.layers = nn.ModuleDict({t: nn.Sequential(nn.Linear(width, width // 2), nn.ReLU()) for t in TARGET_TASKS})
        self.heads = nn.ModuleDict({t: nn.Linear(width // 2, 1) for t in TARGET_TASKS})
        # Serving drops this head.
        auxiliary = config.distillation == "auxiliary"
        self.teacher_head = nn.Linear(width // 2, len(config.distilled)) if auxiliary else None

    def task_states(self, batch: Batch, prefix: str = "") -> dict[str, Tensor]:
        """Output of each task's layers (B, D/2)."""
        history = batch[prefix + "history"]
        valid = (history > 0).unsqueeze(-1)
        pooled = (self.item(history) * valid).sum(1) / valid.sum(1).clamp(min=1)
        inputs = torch.cat([self.item(batch[prefix + "item"]), pooled, self.hour(batch[prefix + "hour"])], dim=-1)
        shared = self.shared(inputs)
        return {task: layer(shared) for task, layer in self.layers.items()}

    def served(self, states: dict[str, Tensor]) -> Tensor:
        """Hard-label logits z_k (B, K)."""
        return torch.cat([self.heads[task](states[task]) for task in TARGET_TASKS], dim=-1)

    def scores(self, batch: Batch) -> Tensor:
        """What is served: z_k (B, K), never the teacher's logits."""
        return self.served(self.task_states(batch))

    def teacher_labels(self, batch: Batch) -> Tensor:
        """Soft labels (B, M) of this arm; constants."""
        labels = batch["fine-tuned" if self.config.labels == "fine-tuned" else "zero-shot"]
        if self.config.labels == "shuffled":
            labels = labels[torch.randperm(len(labels), device=labels.device)]
        elif self.config.labels == "constant":
            labels = labels.mean(0, keepdim=True).expand_as(labels)
        return labels

    def loss(self, batch: Batch) -> Tensor:
        """sum_k BCE(z_k, y_k) + lambda sum_m BCE(z_m^KD, p_m^T); the direct form puts p^T on z_k instead."""
        config = self.config
        states = self.task_states(batch)
        logits = self.served(states)
        loss = _bce(logits, batch["label"])
        if config.cotrain:
            source = self.served(self.task_states(batch, "source_"))
            loss = 0.5 * (loss + _bce(source, batch["source_label"]))
        if config.distillation != "none":
            labels = self.teacher_labels(batch)
            if self.teacher_head is not None:
                chosen = labels[:, [SOURCE_TASKS.index(name) for name in config.distilled]]
                loss = loss + config.weight * _bce(self.teacher_head(states[config.attach]), chosen)
            else:
                twins = labels[:, [SOURCE_TASKS.index(TWIN[task]) for task in TARGET_TASKS]]
                loss = loss + config.weight * _bce(logits, twins)
        return loss


def _bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over examples, summed over tasks (B, K)."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(0).sum()


class ZeroShotRanker(nn.Module):
    """The frozen teacher's stored predictions read as a ranker of the target: the logits of the twin tasks."""

    def scores(self, batch: Batch) -> Tensor:
        """(B, K)."""
        twins = [SOURCE_TASKS.index(TWIN[task]) for task in TARGET_TASKS]
        return torch.logit(batch["zero-shot"][:, twins], eps=1e-6)


# -- Stages ------------------------------------------------------------------------------------------------------


def teacher_batches(
    task: CrossDomain, examples: Examples, surface: int, seed: int, size: int, device: torch.device
) -> Iterator[Batch]:
    """Endless batches of the teacher's inputs and its own labels, in an order that `seed` decides."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(examples), generator=generator).split(size):
            batch = teacher_view(examples.take(rows), task.genres, task.year, surface)
            yield {name: value.to(device) for name, value in batch.items()}


@torch.no_grad()
def teacher_predictions(teacher: Teacher, task: CrossDomain, device: torch.device) -> Tensor:
    """p^T (E, M) for every target example: the frozen teacher on what its schema accepts, surface at its default."""
    teacher.eval()
    parts = []
    for rows in torch.arange(len(task.target)).split(4096):
        batch = teacher_view(task.target.take(rows), task.genres, task.year, DEFAULT_SURFACE)
        del batch["label"]  # the teacher never sees a target label
        parts.append(teacher.scores({name: value.to(device) for name, value in batch.items()}).sigmoid().float().cpu())
    return torch.cat(parts)


def run(study: Study) -> Comparison:
    """Teacher on source, its labels on target, then all students under one recipe."""
    device = device_for(study.device)
    interactions: Interactions = study.dataset()
    if study.budget == "smoke":
        interactions = interactions.subset_users(study.size("users", smoke=250, standard=1_000_000), seed=0)
    domains = partial(
        split_domains, interactions, history=study.size("teacher history", smoke=20, standard=50, full=200)
    )
    task = domains()
    study.note(f"{task.source_events} source events and {task.target_events} target events of other users")
    genres = task.genres.shape[1]
    width = study.size("teacher width", smoke=32, standard=128)
    batch_size = study.size("teacher batch", smoke=256, standard=512)
    seed_everything(study.seeds[0])
    teacher = Teacher(task.items, genres, width).to(device)
    with study.stage("teacher on source"):
        train_steps(
            teacher,
            teacher_batches(task, task.source, SOURCE_SURFACE, study.seeds[0], batch_size, device),
            steps=study.steps("teacher", smoke=60, standard=600, full=20_000),
            recipe=Recipe(learning_rate=1e-3, weight_decay=1e-4, schedule="cosine"),
        )
    with study.stage("label the target", trains=False):
        zero_shot = teacher_predictions(teacher, task, device)
    with study.stage("fine-tune the teacher on target (upper bound)"):
        tuned = copy.deepcopy(teacher)
        train_steps(
            tuned,
            teacher_batches(task, task.target.take(task.train), DEFAULT_SURFACE, study.seeds[0], batch_size, device),
            steps=study.steps("fine tuning", smoke=10, standard=100, full=2000),
            recipe=Recipe(learning_rate=3e-4),
        )
        fine_tuned = teacher_predictions(tuned, task, device)
    student = StudentConfig(task.items, width=study.size("student width", smoke=8, standard=16))
    steps = study.steps("student", smoke=60, standard=500, full=5000)
    recipe = Recipe(learning_rate=3e-3, batch_size=256, weight_decay=1e-3, validations=10)
    _store(task, zero_shot, fine_tuned)
    weights = (1.0,) if study.budget == "smoke" else (0.1, 0.3, 1.0, 3.0)
    auxiliary = replace(student, distillation="auxiliary")
    direct = replace(student, distillation="direct")
    with study.stage("choose lambda on validation", trains=len(weights) > 1):
        choose = partial(_best_weight, study, task, weights, steps, recipe, device)
        auxiliary, direct = choose(auxiliary), choose(direct)
    study.note(f"lambda {auxiliary.weight} for the auxiliary logit, {direct.weight} for direct distillation")
    arms: dict[str, tuple[StudentConfig, Kind]] = {
        "auxiliary": (auxiliary, "method"),
        "direct": (direct, "ablation"),
        "shuffled teacher": (replace(auxiliary, labels="shuffled"), "control"),
        "constant teacher": (replace(auxiliary, labels="constant"), "control"),
        "co-training": (replace(student, cotrain=True), "baseline"),
        "twin task only": (replace(auxiliary, distilled=("satisfied",)), "ablation"),
        "unserved task only": (replace(auxiliary, distilled=("click",)), "ablation"),
        "fine-tuned teacher": (replace(auxiliary, labels="fine-tuned"), "ablation"),
        **{
            f"auxiliary, lambda {w:g}": (replace(auxiliary, weight=w), "ablation")
            for w in weights
            if w != auxiliary.weight
        },
    }
    candidates = [Variant(name, partial(Student, config), kind=kind) for name, (config, kind) in arms.items()]
    candidates.append(Variant("zero-shot teacher", ZeroShotRanker, kind="floor"))
    for share in () if study.budget == "smoke" else (0.1, 0.3):
        smaller = domains(train_share=share)
        _store(smaller, zero_shot, fine_tuned)
        for name, config in (("none", student), ("auxiliary", auxiliary)):
            train = partial(_train_on, smaller, config, steps, recipe, device)
            candidates.append(Variant(f"{name}, {share:.0%} of target", train=train))
    comparison = study.compare(
        task,
        baseline=Variant("no distillation", partial(Student, student)),
        candidates=candidates,
        steps=steps,
        device=device,
        recipe=recipe,
    )
    ratio = _network_size(teacher) / _network_size(Student(student))
    comparison.clauses = [
        beats("auxiliary", "no distillation", "auc", strict=True),
        beats("auxiliary", "shuffled teacher", "auc"),
        not_below("auxiliary", "direct", "auc", tolerance=0.002),
        beats("auxiliary", "direct", "calibration"),
        fact(
            "the teacher is at least 50 times larger than the student, embeddings aside",
            "holds" if ratio >= 50 else "undecided",
            f"{ratio:.0f} times",
        ),
        not_below("auxiliary", "co-training", "auc", tolerance=0.0, required=False),
    ]
    return comparison


def _store(task: CrossDomain, zero_shot: Tensor, fine_tuned: Tensor) -> None:
    task.store_teacher("zero-shot", zero_shot)
    task.store_teacher("fine-tuned", fine_tuned)


def _network_size(model: nn.Module) -> int:
    """Parameters that are not embedding rows."""
    tables = sum(p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
    return count_parameters(model) - tables


def _best_weight(
    study: Study,
    task: CrossDomain,
    weights: tuple[float, ...],
    steps: int,
    recipe: Recipe,
    device: torch.device,
    config: StudentConfig,
) -> StudentConfig:
    """The lambda with the best validation AUC at the first seed."""

    def auc(weight: float) -> float:
        model = _train_on(task, replace(config, weight=weight), steps, recipe, device, study.seeds[0], 0.0).model
        return task.evaluate(model.eval(), "validation", device)["auc"]

    found = {weight: auc(weight) for weight in weights} if len(weights) > 1 else {weights[0]: 0.0}
    return replace(config, weight=max(found, key=lambda weight: found[weight]))


def _train_on(
    task: CrossDomain,
    config: StudentConfig,
    steps: int,
    recipe: Recipe,
    device: torch.device,
    seed: int,
    learning_rate: float,
) -> Trained:
    """A student trained by the shared loop on a task of its own (part of the target, or a trial lambda)."""
    from auto_research.tasks.base import fit

    seed_everything(seed)
    recipe = replace(recipe, learning_rate=learning_rate or recipe.learning_rate)
    fitted = fit(Student(config), task, steps=steps, seed=seed, device=device, recipe=recipe)
    return Trained(fitted.model, fitted.steps)


def specimens() -> list[Specimen]:
    """A student with an auxiliary logit, one without, and a small teacher."""
    generator = torch.Generator().manual_seed(0)
    size, items, genres = 12, 20, 4
    rating = torch.tensor([5.0, 4.0, 0.0, 3.0, 5.0, 0.0, 2.0, 4.0, 0.0, 5.0, 1.0, 0.0])
    examples = Examples(
        item=torch.randint(1, items + 1, (size,), generator=generator),
        history=torch.randint(0, items + 1, (size, 10), generator=generator),
        hour=torch.randint(24, (size,), generator=generator),
        user=torch.arange(size),
        rating=rating,
    )
    soft = torch.rand(size, len(SOURCE_TASKS), generator=generator)
    batch = student_view(examples) | {"zero-shot": soft, "fine-tuned": soft.flip(0)}
    batch |= {f"source_{name}": value for name, value in student_view(replace(examples, rating=rating.flip(0))).items()}
    config = StudentConfig(items, width=8, distillation="auxiliary")

    def pad(batch: Batch) -> Batch:
        return {**batch, "history": F.pad(batch["history"], (3, 0))}

    def student(name: str, config: StudentConfig, switches: dict[str, StudentConfig], floor: float) -> Specimen:
        return Specimen(
            name=name,
            build=partial(Student, config),
            batch=batch,
            shape=(size, len(TARGET_TASKS)),
            pad=pad,
            why_no_order="the history holds strictly earlier events only and is pooled as a set",
            switches={label: partial(Student, other) for label, other in switches.items()},
            loss_floor=floor,
        )

    entropy = F.binary_cross_entropy(soft, soft, reduction="none").mean(0)
    floor = float(entropy[[SOURCE_TASKS.index(t) for t in config.distilled]].sum())
    table = torch.rand(items + 1, genres, generator=generator).round()
    view = teacher_view(examples, table, torch.arange(items + 1) % YEAR_CODES, SOURCE_SURFACE)
    view["surface"] = torch.arange(size) % 2
    build: Callable[[], nn.Module] = partial(Teacher, items, genres, 8)
    return [
        student(
            "auxiliary student",
            config,
            {
                "distillation=none": replace(config, distillation="none"),
                "distillation=direct": replace(config, distillation="direct"),
                "distilled=long": replace(config, distilled=("long",)),
                "attach=like": replace(config, attach="like"),
                "weight=0.1": replace(config, weight=0.1),
                "labels=shuffled": replace(config, labels="shuffled"),
                "labels=constant": replace(config, labels="constant"),
                "labels=fine-tuned": replace(config, labels="fine-tuned"),
                "cotrain=True": replace(config, cotrain=True),
                "width=16": replace(config, width=16),
            },
            floor,
        ),
        student("plain student", replace(config, distillation="none"), {}, 0.0),
        Specimen(
            name="teacher",
            build=build,
            batch=view,
            shape=(size, len(SOURCE_TASKS)),
            pad=pad,
            why_no_order="the history holds strictly earlier events only and is pooled as a set",
            frozen={"pool.score.2.bias": "a constant added to every position cancels in the softmax"},
        ),
    ]
