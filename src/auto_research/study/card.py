"""The card of a paper: what it claims, what it needs and what was left out, as YAML front matter over a page.

Reading cards imports no torch, so that listing every paper takes a fraction of a second.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from auto_research.runtime.budget import variable_name
from auto_research.study.front_matter import BrokenCard, read_front_matter

Fidelity = Literal["full_pipeline", "core_mechanism", "concept_demo"]
Role = Literal["causal_lm", "text_encoder", "vision_language_model"]


class Headline(BaseModel):
    """One number that the paper itself reports, never one of ours."""

    model_config = ConfigDict(extra="forbid")

    dataset: str
    metric: str
    baseline: str
    method: str


class Card(BaseModel):
    """Front matter of `papers/<family>/<module>.md`.

    Attributes:
        key: name of the adapter on the command line.
        fidelity: as declared by the author; a run can only lower it.
        omitted: parts of the paper that are not implemented.
        choices: what the paper leaves open, and what was chosen here.
        datasets: names of the catalogue in order of preference; the last is embedded in the package.
        checkpoints: role -> names in order of preference; the last is a micro checkpoint built locally.
        overrides: `STEPS`-like suffix -> meaning; the variable is `AUTO_RESEARCH_<KEY>_<suffix>`.
        options: named choices and ablation switches of the module, with their meaning.
        claim: the sentence under test.
        smoke_seeds, standard_seeds: how many seeds a run takes unless told otherwise.
        entry: `module:function` when it is not `<the card's module>:run`.
    """

    model_config = ConfigDict(extra="forbid")

    key: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    title: str
    arxiv: str | None = Field(default=None, pattern=r"^\d{4}\.\d{4,5}$")
    organisation: str
    published: datetime.date
    family: str
    fidelity: Fidelity
    official_code: str | None = None
    omitted: list[str] = []
    choices: list[str] = []
    datasets: list[str] = Field(min_length=1)
    checkpoints: dict[Role, list[str]] = {}
    overrides: dict[str, str] = {}
    options: dict[str, str] = {}
    claim: str
    headline: list[Headline] = []
    smoke_seeds: int = Field(default=1, ge=1)
    standard_seeds: int = Field(default=3, ge=3)
    entry: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")

    @field_validator("overrides")
    @classmethod
    def _suffixes_are_variable_names(cls, overrides: dict[str, str]) -> dict[str, str]:
        for suffix in overrides:
            if not suffix.replace("_", "").isalnum() or suffix != suffix.upper():
                raise ValueError(f"override {suffix!r} must be upper case letters, digits and underscores")
        return overrides

    def variable(self, suffix: str) -> str:
        """Environment variable of a documented override."""
        return variable_name(self.key, suffix)


def validated(values: Mapping[str, Any], path: Path) -> Card:
    """The card of front-matter fields `values` read at `path`. Raises `BrokenCard` naming the file and the field."""
    try:
        return Card.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BrokenCard(f"{path}: field '{field}' is wrong: {first['msg']}") from error


def read_card(path: Path) -> tuple[Card, str]:
    """The card at `path` and the page below its front matter. Raises `BrokenCard` naming the file and the field."""
    values, page = read_front_matter(path)
    return validated(values, path), page
