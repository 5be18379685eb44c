"""Several objectives read off one state: a small network and one output for each of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.towers import MLP


class TaskHeads(nn.Module):
    """One head an objective over a shared state; nothing is shared behind the state.

    Args:
        width: of the state.
        outputs: objective -> number of logits: 1 for a yes or no, K for one of K classes.
        hidden: width of each head's hidden layer; 0 makes the heads linear.
    """

    def __init__(self, width: int, outputs: Mapping[str, int], hidden: int = 0) -> None:
        super().__init__()
        if not outputs or min(outputs.values()) < 1:
            raise ValueError(f"each objective needs at least one logit, got {dict(outputs)}")
        self.heads = nn.ModuleDict(
            {
                name: MLP(width, *([hidden] if hidden else []), count, activation="gelu")
                for name, count in outputs.items()
            }
        )

    def forward(self, state: Tensor) -> dict[str, Tensor]:
        """State (..., width) -> logits of each objective, (...) for a yes or no and (..., K) for classes; float32."""
        found = {name: head(state) for name, head in self.heads.items()}
        return {
            name: (logit.squeeze(-1) if logit.shape[-1] == 1 else logit).to(
                torch.promote_types(logit.dtype, torch.float32)
            )
            for name, logit in found.items()
        }


def binary_task_losses(logits: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mean binary cross-entropy of each objective over the places where its label is 0 or 1 (NaN: not observed).

    Shapes: logits and labels (...) each. An objective without any observed label costs zero.
    """
    losses = {}
    for name, logit in logits.items():
        label = labels[name].to(logit.dtype)
        seen = ~label.isnan()
        each = F.binary_cross_entropy_with_logits(logit, label.nan_to_num(0.0), reduction="none")
        losses[name] = (each * seen).sum() / seen.sum().clamp(min=1)
    return losses
