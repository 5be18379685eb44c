"""What the workflows that learn from preference pairs share: the losses' constants as axes, and their operators."""

from __future__ import annotations

from typing import Literal

from auto_research.evolve.space import Axis
from auto_research.evolve.workflow import Operator

PAPERS = {
    "dpo": ("Direct preference optimisation", "arXiv:2305.18290", ("direct",)),
    "ipo": ("Identity preference optimisation", "arXiv:2310.12036", ("identity",)),
    "orpo": ("Odds ratio preference optimisation", "arXiv:2403.07691", ("odds", "reference-free")),
    "simpo": ("Simple preference optimisation", "arXiv:2405.14734", ("simple", "reference-free")),
}
"""Loss -> title, paper, and keywords beside those that all of them have."""


def _constant(
    name: str, kind: Literal["float", "log-float"], low: float, high: float, default: float, remark: str = ""
) -> Axis:
    """The axis `<loss>.<constant>`, which exists for that loss alone."""
    loss = name.partition(".")[0]
    return Axis(
        name,
        kind,
        low=low,
        high=high,
        default=default,
        condition={"post.loss": (loss,)},
        stage="post",
        changes="loss",
        source=f"{PAPERS[loss][1]}{remark}",
        group="post-training",
    )


def dpo_beta(low: float) -> Axis:
    """Weight of DPO's implied penalty on leaving the reference."""
    return _constant("dpo.beta", "log-float", low, 1.0, 0.1)


def ipo_tau(low: float) -> Axis:
    """IPO's regularisation: its target margin falls with it."""
    return _constant("ipo.tau", "log-float", low, 1.0, 0.1, ": target margin 1 / (2 tau)")


ORPO_LAMBDA = _constant("orpo.lambda", "log-float", 0.02, 1.0, 0.1)
SIMPO_BETA = _constant("simpo.beta", "float", 1.0, 10.0, 2.0, ": 2.0 to 2.5, up to 10")
SIMPO_GAMMA_RATIO = _constant("simpo.gamma_ratio", "float", 0.0, 1.0, 0.5, ": gamma / beta of 0.25 to 0.5")


def pair_operator(loss: str, *code: str) -> Operator:
    """The operator of a loss, implemented by `code` (dotted names)."""
    title, paper, words = PAPERS[loss]
    keywords = (loss, *words, "preference", "pairs", "偏好")
    return Operator(loss, title, {"post.loss": (loss,)}, paper, "core_mechanism", keywords=keywords, code=code)
