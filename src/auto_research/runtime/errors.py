"""Errors that a user can act on.

Every error that a user can cause is a :class:`UserError` whose text is one sentence: what was wrong and
what to do. The command line prints that sentence, without a traceback, and exits with :data:`EXIT_CODE`.
Everything else is a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["EXIT_CODE", "DeviceAbsent", "MissingCheckpoint", "MissingData", "UserError", "nearest"]

EXIT_CODE = 2
"""Exit code of the command line for a :class:`UserError`."""


class UserError(Exception):
    """Something the user can put right; ``str(error)`` is the sentence to show."""


class _Missing(UserError):
    """Something that has to be fetched first; ``str(error)`` is the message alone."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)  # both in ``args``, so that the error survives pickling
        self.name = name
        self.message = message

    def __str__(self) -> str:
        return self.message


class MissingData(_Missing):
    """A data set is not on this machine; the message names the command that fetches it."""

    @property
    def dataset(self) -> str:
        """Name of the data set in the catalogue."""
        return self.name


class MissingCheckpoint(_Missing):
    """A checkpoint is not on this machine; the message names the command that prepares it."""

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint, as in ``checkpoints.resolve``."""
        return self.name


class DeviceAbsent(UserError):
    """A device was requested explicitly and this machine or this torch build does not have it."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Suggest the choice closest to a misspelt word.

    Returns ``" Did you mean 'x'?"`` with its leading space, ready to append to a message, or ``""`` when
    nothing is close. Case is ignored in the comparison.
    """
    by_folded: dict[str, str] = {}
    for choice in choices:
        by_folded.setdefault(choice.casefold(), choice)
    close = difflib.get_close_matches(word.casefold(), list(by_folded), n=1, cutoff=0.6)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""
