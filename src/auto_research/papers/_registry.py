"""Which papers there are: one card each, found by folder or brought by an installed package.

Discovery reads front matter only, so that listing takes a fraction of a second: a card is validated when it is first
used, and a paper's module is imported when it is run. Another package registers adapters
through the entry-point group `auto_research.papers`, whose entries name a package that holds modules and cards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auto_research.runtime.errors import UserError, nearest
from auto_research.study.front_matter import BrokenCard, read_front_matter

if TYPE_CHECKING:
    from auto_research.study.card import Card

ENTRY_POINT_GROUP = "auto_research.papers"


@dataclass(frozen=True)
class Adapter:
    """One paper made runnable: its card, its page and where its code is.

    Attributes:
        front: fields of the card's front matter as they were read, not validated.
        module: dotted name of the module that holds the entry function.
        function: name of the entry function, called with a `Study`.
        source: the module's file.
    """

    front: dict[str, Any]
    page: str
    card_path: Path
    module: str
    function: str
    source: Path

    @cached_property
    def card(self) -> Card:
        """The validated card; raises `BrokenCard`."""
        from auto_research.study.card import validated

        return validated(self.front, self.card_path)

    @property
    def key(self) -> str:
        return str(self.front["key"])

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
    front, page = read_front_matter(path)
    entry = front.get("entry")
    if "key" not in front or (entry is not None and ":" not in str(entry)):
        from auto_research.study.card import validated

        validated(front, path)  # says what is wrong
    if entry:
        module, function = str(entry).split(":", 1)
        relative = module.removeprefix(package + ".").replace(".", "/")
        source = root / f"{relative}.py"
    else:
        source = path.with_suffix(".py")
        module = ".".join([package, *source.relative_to(root).with_suffix("").parts])
        function = "run"
    if not source.is_file():
        raise BrokenCard(f"{path}: its module {source.name} is missing; a paper is one module and one card")
    return Adapter(front, page, path, module, function, source)


def discover(root: Path, package: str) -> list[Adapter]:
    """Adapters of the cards below `root`, the folder of the importable `package`."""
    return [_adapter(path, package, root) for path in sorted(root.rglob("*.md"))]


def _named_by_packages() -> bool:
    """Whether an installed package names our entry-point group.

    Looked up before `importlib.metadata` is imported, which takes a quarter of what `list` may use.
    """
    for folder in sys.path:
        for file in Path(folder).glob("*-info/entry_points.txt"):
            with contextlib.suppress(OSError):  # unreadable metadata bring nothing
                if f"[{ENTRY_POINT_GROUP}]" in file.read_text(encoding="utf-8", errors="replace"):
                    return True
    return False


def _installed() -> Iterable[tuple[Path, str]]:
    if not _named_by_packages():
        return
    from importlib.metadata import entry_points

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
