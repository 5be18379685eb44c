"""Attributes replaced for the time of a rehearsal, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


class Patches:
    """A stack of replaced attributes; :meth:`undo` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._originals: dict[tuple[int, str], Any] = {}

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; an attribute the owner only inherits is deleted again on undo."""
        own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name, _ABSENT)
        self._originals.setdefault((id(owner), name), getattr(owner, name, None))
        setattr(owner, name, value)
        if own is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))

    def original(self, owner: Any, name: str) -> Any:
        """What ``owner.name`` was before this rehearsal."""
        return self._originals.get((id(owner), name), getattr(owner, name, None))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Also run ``action`` on undo."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put every attribute back."""
        while self._undo:
            self._undo.pop()()
