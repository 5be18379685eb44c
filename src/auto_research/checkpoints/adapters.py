"""LoRA on a language model, and merging it back into plain dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from auto_research.runtime.errors import UserError

__all__ = ["lora", "merge"]


def lora(
    model: nn.Module,
    r: int,
    targets: str | Sequence[str] = "all-linear",
    alpha: float | None = None,
    *,
    dropout: float = 0.0,
    task_type: str | None = "CAUSAL_LM",
) -> Any:
    """Freeze ``model`` and add trainable low-rank adapters: W + (alpha / r) B A (Hu et al., 2021).

    B starts at zero, so that the adapted model first computes what the model computed. Adapters are FP32
    even over BF16 weights.

    Args:
        model: a Transformers model; it is changed in place.
        r: rank.
        targets: ``"all-linear"``, or names of linear modules such as ``["q_proj", "v_proj"]``.
        alpha: scale; ``None`` means ``2 * r``.
        dropout: on the adapters' input while training.
        task_type: PEFT's task; ``None`` for a body without a language head.

    Raises:
        UserError: no module of the model is called as ``targets`` say.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=r,
        lora_alpha=2 * r if alpha is None else alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=dropout,
        bias="none",
        task_type=task_type,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        raise UserError(f"no module of {type(model).__name__} matches the LoRA targets {targets!r}") from error


def merge(model: Any) -> Any:
    """Fold the adapters into the weights and return the plain model, in evaluation mode.

    Raises:
        UserError: folding gave weights that are not finite (an adapter that diverged).
    """
    merged = model.merge_and_unload().eval()
    broken = [name for name, weight in merged.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise UserError(
            f"the adapters cannot be merged: {broken[0]} and {len(broken) - 1} more weights are not finite; "
            "train them again with a smaller step"
        )
    return merged
