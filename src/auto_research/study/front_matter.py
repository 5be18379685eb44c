"""The two parts of a card's file: YAML front matter and the page below it. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from auto_research.runtime.errors import UserError


class BrokenCard(UserError):
    """A card's front matter is missing or does not say what it must."""


def split_front_matter(text: str, where: str) -> tuple[str, str]:
    """(YAML, page) of a card's text; raises `BrokenCard`."""
    if not text.startswith("---\n"):
        raise BrokenCard(f"{where} must begin with YAML front matter between two lines of '---'")
    end = text.find("\n---\n", 3)
    if end < 0:
        raise BrokenCard(f"{where} has no closing '---' line after its front matter")
    return text[4 : end + 1], text[end + 5 :].strip()


def read_front_matter(path: Path) -> tuple[dict[str, Any], str]:
    """Fields of the front matter at `path`, not validated, and the page below. Raises `BrokenCard`."""
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
    return values, page
