"""Prompts about a user's behaviours under a token budget, put together from pieces whose lengths add up exactly.

Four templates write an event in different ways; six components each add one line about the whole history. A prompt is
frame, components, behaviours (latest last) and question. What goes in is decided elsewhere: at random for training,
by a fixed rule, or by a scorer (`layers.prompt_builder`).

Letters: B cases, K templates, C components, F features, S scene values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from auto_research.tasks.generation import Pieces, chat_frame
from auto_research.tasks.intent_queries import (
    ACTIONS,
    FAVORITE,
    PURCHASE,
    Case,
    QueryCatalogue,
    assign_actions,
    scene_of,
)

TEMPLATES = ("types", "brands", "titles", "timeline")
COMPONENTS = ("profile", "categories", "brands", "high intent", "repeats", "time gap")
FEATURES, SCENES = 9, 5

FixedPrompt = Literal["recent", "short", "long"]


@dataclass(frozen=True)
class View:
    """What a phone knows of a history: types, brands and synthetic actions of its events, and the scene."""

    types: list[str]
    brands: list[str]
    actions: list[int]

    @property
    def scene(self) -> int:
        return scene_of(self.actions)

    def features(self) -> list[float]:
        """Phi(B), 9 numbers: action shares (4), recency of the latest type and length, distinct share and entropy of
        types, share of repeated events."""
        n = len(self.types)
        share = [self.actions.count(a) / n for a in range(len(ACTIONS))]
        recency = sum(0.5 ** (n - i) for i, kind in enumerate(self.types) if kind == self.types[-1])
        counts = torch.tensor(list(Counter(self.types).values()), dtype=torch.float64) / n
        entropy = float(-(counts * counts.log()).sum())
        return [*share, recency, n / 10, len(counts) / n, entropy, 1 - len(counts) / n]


class PromptWriter:
    """Puts prompts together from pieces: frame, components, behaviours (latest last), question.

    A prompt always holds the latest behaviour; the rest of the budget is filled with earlier ones, latest first.
    """

    def __init__(self, catalogue: QueryCatalogue, tokenizer: Any) -> None:
        self.catalogue, self.tokenizer = catalogue, tokenizer
        self.pieces = Pieces(tokenizer)
        self.before, self.after = chat_frame(tokenizer)
        self.end, self.pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
        self._views: dict[tuple[int, ...], View] = {}

    def view(self, history: tuple[int, ...]) -> View:
        """Kept for each history."""
        found = self._views.get(history)
        if found is None:
            types = [self.catalogue.type_of(item) for item in history]
            brands = [self.catalogue.brand[item] for item in history]
            found = self._views[history] = View(types, brands, assign_actions(types, brands))
        return found

    def behaviours(self, case: Case, template: int) -> list[list[int]]:
        """Ids of one line an event, oldest first, as the template writes it."""
        view, name = self.view(case.history), TEMPLATES[template]
        lines = []
        for at, (item, kind, brand, action) in enumerate(zip(case.history, view.types, view.brands, view.actions)):
            what = {
                "types": kind,
                "brands": f"{brand} {kind}".strip(),
                "titles": self.catalogue.short[item],
                "timeline": f"{at - len(view.types)} {kind}",
            }[name]
            lines.append(self.pieces(f"{ACTIONS[action]} {what}\n"))
        return lines

    def component(self, case: Case, component: int) -> list[int]:
        """Ids of a component's line; empty where it has nothing to say."""
        view = self.view(case.history)
        kinds, brands = Counter(view.types), Counter(filter(None, view.brands))
        name = COMPONENTS[component]
        if name == "profile":
            text = f"user: {len(view.types)} events, {len(kinds)} types"
        elif name == "categories":
            text = "types: " + ", ".join(kind for kind, _ in kinds.most_common(3))
        elif name == "brands":
            text = "brands: " + ", ".join(brand for brand, _ in brands.most_common(2)) if brands else ""
        elif name == "high intent":
            wanted = [k for k, a in zip(view.types, view.actions, strict=True) if a in (FAVORITE, PURCHASE)]
            text = "wanted: " + ", ".join(dict.fromkeys(reversed(wanted)))
        elif name == "repeats":
            repeated = [f"{kind} x{n}" for kind, n in kinds.most_common(2) if n > 1]
            text = "repeated: " + ", ".join(repeated) if repeated else ""
        else:
            earlier = [i for i, kind in enumerate(view.types[:-1]) if kind == view.types[-1]]
            text = f"gap: {len(view.types) - 1 - earlier[-1]}" if earlier else ""
        return self.pieces(text + "\n") if text else []

    @cached_property
    def question(self) -> list[int]:
        return self.pieces("next need?")

    def base_cost(self, case: Case, template: int) -> int:
        """Tokens of a prompt without components: frame, question and the latest behaviour."""
        return len(self.before) + len(self.after) + len(self.question) + len(self.behaviours(case, template)[-1])

    def write(self, case: Case, template: int, chosen: Sequence[bool], budget: int, most: int = 1_000) -> list[int]:
        """Ids of the prompt; at most `budget` tokens unless its indispensable parts alone are longer.

        `most` bounds the number of behaviours.
        """
        middle = [token for c, taken in enumerate(chosen) if taken for token in self.component(case, c)]
        lines = self.behaviours(case, template)
        room = budget - self.base_cost(case, template) - len(middle)
        kept = [lines[-1]]
        for line in reversed(lines[:-1]):
            room -= len(line)
            if room < 0 or len(kept) >= most:
                break
            kept.append(line)
        events = [token for line in reversed(kept) for token in line]
        return [*self.before, *middle, *events, *self.question, *self.after]

    def fitting(self, case: Case, template: int, chosen: Sequence[bool], budget: int) -> list[bool]:
        """The wanted components that fit beside the latest behaviour, taken in their order; empty ones left out."""
        cost, kept = self.base_cost(case, template), []
        for c, wanted in enumerate(chosen):
            size = len(self.component(case, c)) if wanted else 0
            kept.append(size > 0 and cost + size <= budget)
            cost += size if kept[-1] else 0
        return kept

    def fixed(self, case: Case, kind: FixedPrompt, budget: int) -> list[int]:
        """Prompts that look at no score: `short` is the last three types, `recent` as many types as fit, `long`
        brands with every component that fits."""
        nothing = [False] * len(COMPONENTS)
        if kind == "long":
            template = TEMPLATES.index("brands")
            return self.write(case, template, self.fitting(case, template, [True] * len(COMPONENTS), budget), budget)
        return self.write(case, TEMPLATES.index("types"), nothing, budget, most=3 if kind == "short" else 1_000)

    def describe(self, cases: Sequence[Case], budget: int) -> dict[str, Tensor]:
        """What the builder looks at: features (B, F), scene and budget (B, S), costs (B, K) and (B, C)."""
        scene = torch.zeros(len(cases), SCENES)
        features, template_cost, component_cost = [], [], []
        for row, case in enumerate(cases):
            view = self.view(case.history)
            features.append(view.features())
            scene[row, view.scene] = 1.0
            template_cost.append([self.base_cost(case, k) for k in range(len(TEMPLATES))])
            component_cost.append([len(self.component(case, c)) for c in range(len(COMPONENTS))])
        scene[:, -1] = torch.log2(torch.tensor(budget / 96))
        return {
            "features": torch.tensor(features),
            "scene": scene,
            "template_cost": torch.tensor(template_cost),
            "component_cost": torch.tensor(component_cost),
        }


def random_make_up(generator: torch.Generator) -> tuple[int, list[bool]]:
    """A template and components at random; half of all prompts have no component."""
    template = int(torch.randint(len(TEMPLATES), (1,), generator=generator))
    draws = torch.rand(len(COMPONENTS) + 1, generator=generator).tolist()
    return template, [draws[0] < 0.5 and draw < 0.4 for draw in draws[1:]]
