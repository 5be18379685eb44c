"""Which papers there are: one card each, found by folder or brought by an installed package.

Discovery reads cards only; a paper's module is imported when it is run. Another package registers adapters
through the entry-point group `auto_research.papers`, whose entries name a package that holds modules and cards.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from auto_research.runtime.errors import UserError, nearest
from auto_research.study.card import BrokenCard, Card, read_card

ENTRY_POINT_GROUP = "auto_research.papers"


@dataclass(frozen=True)
class Adapter:
    """One paper made runnable: its card, its page and where its code is.

    Attributes:
        module: dotted name of the module that holds the entry function.
        function: name of the entry function, called with a `Study`.
        source: the module's file.
    """

    card: Card
    page: str
    card_path: Path
    module: str
    function: str
    source: Path

    @property
    def key(self) -> str:
        return self.card.key

    @property
    def entry(self) -> str:
        """`module:function`, as a process is told what to run."""
        return f"{self.module}:{self.function}"

    def load(self) -> Callable[[Any], Any]:
        """Imports the module and returns its entry function."""
        return getattr(importlib.import_module(self.module), self.function)

    def load_module(self) -> Any:
        """Imports and returns the module."""
        return importlib.import_module(self.module)


def _adapter(path: Path, package: str, root: Path) -> Adapter:
    card, page = read_card(path)
    if card.entry:
        module, function = card.entry.split(":")
        relative = module.removeprefix(package + ".").replace(".", "/")
        source = root / f"{relative}.py"
    else:
        source = path.with_suffix(".py")
        module = ".".join([package, *source.relative_to(root).with_suffix("").parts])
        function = "run"
    if not source.is_file():
        raise BrokenCard(f"{path}: its module {source.name} is missing; a paper is one module and one card")
    return Adapter(card, page, path, module, function, source)


def discover(root: Path, package: str) -> list[Adapter]:
    """Adapters of the cards below `root`, the folder of the importable `package`."""
    return [_adapter(path, package, root) for path in sorted(root.rglob("*.md"))]


def _installed() -> Iterable[tuple[Path, str]]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            spec = importlib.util.find_spec(entry.value)
        except Exception as error:  # a dotted name imports its parent, which is somebody else's code
            raise UserError(f"entry point '{entry.name}' names '{entry.value}', which fails: {error}") from error
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"entry point '{entry.name}' names '{entry.value}', which is not an installed package")
        yield Path(next(iter(spec.submodule_search_locations))), entry.value


@cache
def adapters() -> dict[str, Adapter]:
    """All adapters by key, in alphabetical order. Raises `BrokenCard` on a duplicate key."""
    found: dict[str, Adapter] = {}
    for root, package in [(Path(__file__).parent, "auto_research.papers"), *_installed()]:
        for adapter in discover(root, package):
            if adapter.key in found:
                raise BrokenCard(f"{adapter.card_path} and {found[adapter.key].card_path} share key '{adapter.key}'")
            found[adapter.key] = adapter
    return dict(sorted(found.items()))


def adapter(key: str) -> Adapter:
    """The adapter of `key`; raises `UserError` that names the nearest key."""
    known = adapters()
    if key not in known:
        hint = nearest(key, known)
        raise UserError(f"there is no paper '{key}'.{hint} Run `auto-research list` to see them all.")
    return known[key]
