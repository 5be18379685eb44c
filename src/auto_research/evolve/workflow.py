"""What a workflow gives the controller: a space, operators, data without its test part, training and evaluation.

A workflow says nothing about generations, seeds, processes, promotion or files; the controller says nothing about
models. The test part can be opened by the finaliser's process alone: anywhere else `load_test` raises `SealedTest`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from auto_research.evolve.space import Genome, Space, Value
from auto_research.runtime.budget import Budget
from auto_research.runtime.records import read_jsonl

if TYPE_CHECKING:
    from auto_research.evolve.records import Trial

Level = Literal["L0 mechanism", "L1 small public", "L2 public benchmark"]


class SealedTest(RuntimeError):
    """The test part was asked for outside the finaliser."""


class NonFinite(ArithmeticError):
    """A loss or a metric is NaN or infinite; the cell ends as `non_finite`."""


@dataclass(frozen=True)
class Operator:
    """One reviewed piece of a paper that the space can install.

    Attributes:
        id: such as `gqa`.
        sets: axis -> values, any of which installs it (the axis values that it owns).
        paper: arXiv id or citation; fidelity and omitted as on a paper's card.
        keywords: words (of every language listed) by which a direction finds it.
        code: dotted names of the functions and classes that are the operator; their source is its digest.
    """

    id: str
    title: str
    sets: Mapping[str, tuple[Value, ...]]
    paper: str
    fidelity: Literal["core_mechanism", "simplified"]
    omitted: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A paper without an operator: shown, never run."""

    title: str
    citation: str
    why_not: str
    what_would: str
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """How much a cell spends: steps, widths, examples; `values` may be overridden by name on the command line."""

    budget: Budget
    values: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.values[name]


class Progress(Protocol):
    """Called by a training loop now and then: writes the heartbeat and refuses non-finite losses."""

    def __call__(self, step: int, loss: float) -> None: ...


@dataclass
class Data:
    """What a cell may see: train and validation, never test.

    Attributes:
        parts: whatever the workflow needs.
        digests: name -> SHA-256 of data, tokenizer and checkpoints.
        hygiene: findings of the split check, as numbers: distinct examples a part, overlaps (`must_be_zero`).
        stand_in: why this is not the data that the workflow is about; empty when it is.
        examples: number of distinct validation examples.
        checkpoints: label -> where the pretrained weights come from, of workflows that use some.
        subset: part -> ids of its examples in their order, where a fixed subset of a larger data set was chosen.
    """

    parts: Any
    digests: dict[str, str]
    hygiene: dict[str, int]
    examples: int
    stand_in: str = ""
    checkpoints: dict[str, str] = field(default_factory=dict)
    subset: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Scores:
    """An evaluation.

    Attributes:
        metrics: all numbers, the primary one under `Workflow.metric`.
        units: per-example values of the primary metric, in a fixed order, for paired bootstraps; may be empty.
    """

    metrics: dict[str, float]
    units: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """What a candidate needs, from its genome alone.

    Attributes:
        parameters: trainable and total are equal unless the workflow says otherwise.
        flops: of one training step, or of one example for inference workflows.
        memory_bytes: expected peak on its device.
        extra: named further figures (kv_bytes_per_token, visual_tokens ...).
    """

    parameters: int
    flops: float
    memory_bytes: int
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """What the effective fingerprint of a candidate is made of, beside data and operator digests.

    Attributes:
        configuration: resolved settings after conditions and derivations. Only what the code really reads.
        parameters: name -> shape of every parameter.
        loss: name and constants of the loss.
    """

    configuration: dict[str, Any]
    parameters: dict[str, list[int]]
    loss: dict[str, Any]


class Workflow(ABC):
    """One experiment that the controller can drive. Subclasses are cheap to make and import torch where they use it.

    Class attributes:
        key, title, model, dataset: names on the command line and on the board.
        metric, direction: the primary validation metric.
        stochastic: whether seeds change something random; without, comparisons bootstrap over examples.
        select: False for workflows that only measure fixed candidates (scaling law): no promotion.
        level: reached by a standard run with complete data.
        schedule: axis groups of generation 2, 3, ... (generation 1 is the ablation of operators).
        rounds: generations and population of a budget, where they are not the usual ones.
        cell_seconds: hard limit of a cell by budget, several times what a slow processor needs; a cell that makes no
            progress is ended long before, after `stall_seconds`.
        side_by_side: as many cells at a time as there are cores, unless a user asks otherwise; False for models that
            fill a machine: one cell at a time, with all cores.
        language_model: cells use transformers, so their fork server imports it once.
        preload: modules the cells' fork server imports instead; None for torch.
        settings: sizes that are no amounts (prices, limits, rows at a time): a smaller one is no reduction.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    model: ClassVar[str]
    dataset: ClassVar[str]
    metric: ClassVar[str]
    direction: ClassVar[Literal["max", "min"]] = "max"
    stochastic: ClassVar[bool] = True
    select: ClassVar[bool] = True
    level: ClassVar[Level] = "L1 small public"
    schedule: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("structure",),
        ("data",),
        ("post-training",),
        ("structure", "data", "post-training", "joint"),
    )
    rounds: ClassVar[Mapping[Budget, tuple[int, int]]] = {}
    space: ClassVar[Space]
    operators: ClassVar[tuple[Operator, ...]] = ()
    evidence: ClassVar[tuple[Evidence, ...]] = ()
    cell_seconds: ClassVar[Mapping[Budget, float]] = {"smoke": 900, "standard": 3600, "full": 86_400}
    stall_seconds: ClassVar[float] = 120
    side_by_side: ClassVar[bool] = True
    language_model: ClassVar[bool] = False
    preload: ClassVar[tuple[str, ...] | None] = None
    settings: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "load_test" in vars(cls):
            cls.load_test = _sealed(cls.load_test)  # type: ignore[method-assign]

    @abstractmethod
    def sizes(self, budget: Budget) -> Sizes:
        """Steps, widths and numbers of examples of a budget."""

    def start(self, budget: Budget) -> Genome:
        """The baseline of a budget: the first value of every axis, unless the workflow says otherwise."""
        return self.space.baseline()

    def smoke_plan(self) -> list[Genome] | None:
        """Genomes of the smoke run beside the baseline, when it should not follow the general plan."""
        return None

    def points(self, budget: Budget) -> list[Genome]:
        """All genomes, the baseline first, of a workflow that only measures fixed candidates (`select` False)."""
        return [self.space.baseline(), *(self.smoke_plan() or [])]

    @abstractmethod
    def load(self, sizes: Sizes, dataset_dir: Path | None) -> Data:
        """Training and validation data. Deterministic; raises `UserError` when nothing usable is on this machine."""

    @abstractmethod
    def load_test(self, sizes: Sizes, dataset_dir: Path | None) -> Any:
        """The test part. Only the finaliser gets it; elsewhere this raises `SealedTest`."""

    @abstractmethod
    def train(self, genome: Genome, data: Data, seed: int, sizes: Sizes, device: str, progress: Progress) -> Any:
        """Trains and returns the artefact. The same seed gives the same initialisation and the same data order."""

    @abstractmethod
    def save(self, artefact: Any, folder: Path) -> None:
        """Stores the artefact; the finaliser evaluates exactly this."""

    @abstractmethod
    def restore(self, genome: Genome, data: Data, folder: Path, sizes: Sizes, device: str) -> Any:
        """The artefact that `save` stored."""

    @abstractmethod
    def validate(self, artefact: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        """Validation metrics."""

    @abstractmethod
    def test(self, artefact: Any, test: Any, data: Data, sizes: Sizes, device: str) -> Scores:
        """Test metrics; `test` is what `load_test` returned."""

    @abstractmethod
    def floors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Trivial predictors by name, in the primary metric on validation; the best of them is the floor."""

    def anchors(self, data: Data, sizes: Sizes) -> dict[str, float]:
        """Reference lines that are no floor (a strong simple method, a ceiling)."""
        return {}

    @abstractmethod
    def cost(self, genome: Genome, sizes: Sizes, data: Data) -> Cost:
        """Parameters, FLOPs and memory, without training."""

    @abstractmethod
    def describe(self, genome: Genome, sizes: Sizes, data: Data) -> Described:
        """What makes this candidate what it is; may build the model."""

    @abstractmethod
    def effect_probe(self, genome: Genome, sizes: Sizes, data: Data) -> dict[str, str]:
        """Digests of what a change of any axis must move at least one of: forward, loss, data_order, generated, cost.

        Made with a fixed seed on a fixed batch, in about a second.
        """

    def match(self, genome: Genome, baseline: Cost, sizes: Sizes, data: Data) -> str:
        """How the candidate's size compares with the baseline's, in words; "" when parameters agree within 2 %."""
        parameters = self.cost(genome, sizes, data).parameters
        ratio = parameters / max(1, baseline.parameters) - 1
        return "" if abs(ratio) <= 0.02 else f"{ratio:+.1%} parameters"

    def summarise(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """Figures over all trials of a run (fits, floors in other units), JSON-like, for the record and the board."""
        return {}

    def violations(self, metrics: Mapping[str, float]) -> list[str]:
        """Hard constraints that measured metrics break and that are more than a `limits` value, in words."""
        return []

    def limits(self, sizes: Sizes) -> dict[str, float]:
        """Hard constraints on what is measured (cost, latency ...): metric -> the largest mean that is feasible.

        A candidate beyond one is never promoted, whatever its primary metric.
        """
        return {}


_finalising = _searching = False


def enter_search() -> None:
    """Called by every process that plans, trains or validates: it can never read the test part."""
    global _searching
    _searching = True


def become_finaliser(events: Path, opening: int) -> None:
    """Lets this process read the test part, once the event log says that it is opened.

    Raises `SealedTest` when the log does not say so, or in a process of the search.
    """
    global _finalising
    if _searching:
        raise SealedTest("a process of the search cannot become the finaliser")
    announced = [event["opening"] for event in read_jsonl(events) if event["event"] == "test_opened"]
    if opening not in announced:
        raise SealedTest("the event log does not say that the test part is opened; only the controller opens it")
    _finalising = True


def _sealed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def load_test(self: Workflow, *args: Any, **kwargs: Any) -> Any:
        if not _finalising:
            raise SealedTest(
                f"the test part of {self.key} was asked for during the search; it is opened once, by the finaliser"
            )
        return method(self, *args, **kwargs)

    del load_test.__wrapped__  # the way round the seal
    return load_test


def digest(*parts: Any) -> str:
    """SHA-256 (16 hex digits) of tensors, arrays, bytes and JSON-like values, in order."""
    import json

    sha = hashlib.sha256()
    for part in parts:
        if hasattr(part, "detach"):
            part = part.detach().cpu().contiguous()
            sha.update(str(part.dtype).encode() + str(tuple(part.shape)).encode())
            part = part.float().numpy() if part.is_floating_point() else part.numpy()
        if hasattr(part, "tobytes"):
            sha.update(part.tobytes())
        elif isinstance(part, bytes):
            sha.update(part)
        else:
            sha.update(json.dumps(part, sort_keys=True, default=str).encode())
    return sha.hexdigest()[:16]


def must_be_zero(finding: str) -> bool:
    """Whether a finding of the split check counts what parts have in common, by its name."""
    return re.search(r"\bshares?\b|overlap|leak", finding) is not None


def disjoint(parts: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Distinct examples a part and overlaps between parts, after normalising case and white space."""
    sets = {name: {" ".join(text.lower().split()) for text in texts} for name, texts in parts.items()}
    found = {f"distinct {name}": len(values) for name, values in sets.items()}
    names = list(sets)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            found[f"{one} and {other} share"] = len(sets[one] & sets[other])
    return found
