"""How much a run may spend, and the documented environment variables that reduce it.

Only what an adapter's card documents may be overridden. An override must do something or be refused: a
misspelt or undocumented name, or a value that is not a positive integer, is an error that lists what the
adapter documents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from auto_research.runtime.errors import UserError, nearest

__all__ = ["BUDGETS", "Budget", "Overrides", "variable_name"]

Budget = Literal["smoke", "standard", "full"]
"""``smoke``: every stage takes at least one real step; ``standard``: the verdict; ``full``: as the paper."""

BUDGETS: tuple[Budget, ...] = get_args(Budget)


def variable_name(key: str, name: str = "") -> str:
    """Environment variable of an adapter's override: ``("sort-gen", "steps")`` to
    ``AUTO_RESEARCH_SORT_GEN_STEPS``; without a name, the prefix that ends in ``_``."""
    return f"AUTO_RESEARCH_{_shout(key)}_{_shout(name)}"


def _shout(word: str) -> str:
    return word.upper().replace("-", "_")


class Overrides:
    """The overrides of one adapter that are set in an environment.

    Args:
        key: the adapter's key, such as ``sort-gen``.
        documented: name of each override and what it means, as on the adapter's card. Names are compared
            without regard to case, ``-`` and ``_`` being equal.
        environ: where to look; the environment of this process by default.
        other_keys: keys of the other adapters, so that ``AUTO_RESEARCH_ONEREC_V2_STEPS`` is left to
            ``onerec-v2`` and not taken for an unknown override of ``onerec``.

    Raises:
        UserError: an undocumented override of this adapter is set, or a documented one is not a positive
            integer.
    """

    def __init__(
        self,
        key: str,
        documented: Mapping[str, str],
        environ: Mapping[str, str] | None = None,
        *,
        other_keys: Iterable[str] = (),
    ) -> None:
        self.key = key
        self.documented = {variable_name(key, name): meaning for name, meaning in documented.items()}
        prefix = variable_name(key)
        others = tuple(o for o in map(variable_name, other_keys) if o.startswith(prefix) and o != prefix)
        self._values: dict[str, int] = {}
        self._used: dict[str, int] = {}
        for variable, text in sorted((os.environ if environ is None else environ).items()):
            if variable in self.documented:
                self._values[variable] = self._positive(variable, text)
            elif variable.startswith(prefix) and not variable.startswith(others):
                hint = nearest(variable, self.documented)
                raise UserError(f"{variable} is not an override of {key}.{hint} {self._help()}")

    def get(self, name: str) -> int | None:
        """The value set for an override; ``None`` when it is not set or the adapter has no such override."""
        variable = variable_name(self.key, name)
        value = self._values.get(variable)
        if value is not None:
            self._used[variable] = value
        return value

    def used(self) -> dict[str, int]:
        """Full variable name and value of every override that was asked for so far and was set."""
        return dict(self._used)

    def _positive(self, variable: str, text: str) -> int:
        number = re.fullmatch(r"0*([1-9][0-9]{0,17})", text)  # fits an int64
        if number is None:
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            limit = " of at most 18 digits" if re.fullmatch(r"[0-9]{19,}", text) else ""
            raise UserError(f"{variable}={shown!r} is not a positive integer{limit}. {self._help()}")
        return int(number[1])

    def _help(self) -> str:
        if not self.documented:
            return f"{self.key} documents no overrides: unset the variable."
        listed = "; ".join(f"{variable} ({meaning})" for variable, meaning in sorted(self.documented.items()))
        return f"{self.key} documents: {listed}."
