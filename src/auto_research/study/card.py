"""The card of a paper: what it claims, what it needs and what was left out, as YAML front matter over a page.

Reading cards imports no torch, so that listing every paper takes a fraction of a second.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from auto_research.runtime.errors import UserError

Fidelity = Literal["full_pipeline", "core_mechanism", "concept_demo"]
Role = Literal["causal_lm", "text_encoder", "vision_language_model"]


class BrokenCard(UserError):
    """A card's front matter is missing or does not say what it must."""


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
        return f"AUTO_RESEARCH_{self.key.upper().replace('-', '_')}_{suffix}"


def split_front_matter(text: str, where: str) -> tuple[str, str]:
    """(YAML, page) of a card's text; raises `BrokenCard`."""
    if not text.startswith("---\n"):
        raise BrokenCard(f"{where} must begin with YAML front matter between two lines of '---'")
    end = text.find("\n---\n", 3)
    if end < 0:
        raise BrokenCard(f"{where} has no closing '---' line after its front matter")
    return text[4 : end + 1], text[end + 5 :].strip()


def read_card(path: Path) -> tuple[Card, str]:
    """The card at `path` and the page below its front matter. Raises `BrokenCard` naming the file and the field."""
    try:
        header, page = split_front_matter(path.read_text(encoding="utf-8-sig"), str(path))
        values: Any = yaml.load(header, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise BrokenCard(f"{path} cannot be read ({error.strerror}); a card is a readable file") from error
    except UnicodeDecodeError as error:
        raise BrokenCard(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise BrokenCard(f"{path}: the front matter is not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise BrokenCard(f"{path}: the front matter must be a mapping of fields")
    try:
        return Card.model_validate(values), page
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BrokenCard(f"{path}: field '{field}' is wrong: {first['msg']}") from error
