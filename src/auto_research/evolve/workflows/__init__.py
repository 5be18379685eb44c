"""One file a workflow; `WORKFLOWS` names them without importing any."""

from __future__ import annotations

import importlib

from auto_research.evolve.workflow import Workflow
from auto_research.runtime.errors import UserError, nearest

WORKFLOWS = {
    "rankmixer-movielens": "rankmixer_movielens:RankMixerMovieLens",
    "llm-wikitext": "llm_wikitext:MicroLanguageModel",
    "vlm-shapes": "vlm_shapes:VisualShapes",
    "arithmetic": "arithmetic:Arithmetic",
    "vlm-scienceqa": "vlm_scienceqa:ScienceQA",
    "reasoning-budget": "reasoning_budget:ReasoningBudget",
    "gsm8k-sft": "gsm8k_sft:Gsm8kTuning",
    "ultrafeedback": "ultrafeedback:UltraFeedback",
    "scaling-law": "scaling_law:ScalingLaw",
}
"""Key -> module of this folder and class."""


def workflow(key: str) -> Workflow:
    """The workflow of `key`, or of `package.module:Class` for one that another package brings.

    Raises `UserError` naming the nearest key.
    """
    if key in WORKFLOWS:
        module, name = WORKFLOWS[key].split(":")
        module = f"{__name__}.{module}"
    elif ":" in key:
        module, name = key.split(":", 1)
    else:
        raise UserError(f"there is no workflow '{key}'.{nearest(key, WORKFLOWS)} Known: {', '.join(WORKFLOWS)}.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
        raise UserError(f"workflow '{key}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise UserError(f"'{key}' is no workflow: name a subclass of auto_research.evolve.workflow.Workflow")
    return found()
