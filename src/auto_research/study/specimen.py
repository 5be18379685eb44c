"""What the tests over the registry exercise: a tiny instance of each trainable model of a paper, and one batch.

A paper's module offers `specimens() -> list[Specimen]`. The contract that every specimen is held to: finite scores
of the declared shape; every trainable parameter receives a gradient and moves; one batch can be overfitted; saving
and loading changes no score; the same seed gives the same numbers; batch size, batch order and padding change no
score; no score depends on a later event; every switch changes parameters, loss or scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from auto_research.tasks.base import Batch


def _scores(model: nn.Module, batch: Batch) -> Tensor:
    return model.scores(batch)


@dataclass(frozen=True)
class Specimen:
    """A tiny model and a batch for it.

    Attributes:
        name: which model of the paper this is.
        build: a fresh model on the CPU, its initial values drawn from the global generator; about 0.1 s.
        batch: tensors with a common leading dimension of at least 4.
        scores: what the model predicts (B, ...); defaults to `model.scores(batch)`.
        shape: declared shape of the scores.
        pad: the same batch with more padding; its scores must not change. None when the model takes no padding;
            then `why_no_padding` says why.
        change_later: the same batch in which only events later than what the scores may see were changed. None when
            the inputs have no time order; then `why_no_order` says why.
        switches: "option=value" (option as the card documents it) or an ablation -> a model with only that changed.
        frozen: parameters that may stay still, as prefix -> reason.
        batchwise: why scores depend on the other rows of a batch, where they truly do.
        overfit_steps, overfit_rate: updates within which the loss of one batch must halve.
        loss_floor: the least loss that the objective can reach on the batch (soft labels have one above zero).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Batch
    shape: tuple[int, ...]
    scores: Callable[[nn.Module, Batch], Tensor] = _scores
    pad: Callable[[Batch], Batch] | None = None
    why_no_padding: str = ""
    change_later: Callable[[Batch], Batch] | None = None
    why_no_order: str = ""
    switches: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    batchwise: str = ""
    overfit_steps: int = 60
    overfit_rate: float = 1e-2
    loss_floor: float = 0.0

    def __post_init__(self) -> None:
        if self.pad is None and not self.why_no_padding:
            raise ValueError(f"specimen '{self.name}' must offer pad or say why it takes no padding")
        if self.change_later is None and not self.why_no_order:
            raise ValueError(f"specimen '{self.name}' must offer change_later or say why its inputs have no order")
