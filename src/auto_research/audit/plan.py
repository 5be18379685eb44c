"""What an audit runs: a selection of adapters, this shard of it, and the overrides that may shorten them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from pydantic import BaseModel, ConfigDict

from auto_research.audit.scan import Scan, scan
from auto_research.papers._registry import Adapter
from auto_research.runtime.budget import Overrides
from auto_research.runtime.errors import UserError, nearest
from auto_research.study.card import Fidelity


class Selection(BaseModel):
    """Which adapters; every condition given must hold.

    Attributes:
        keys: these adapters; none given means all. An adapter named here is taken whatever its fidelity.
        only_explicit: only adapters whose own file calls `device_for` (see `auto_research.audit.scan`).
        concept_demos: include adapters whose card declares `concept_demo`.
    """

    model_config = ConfigDict(extra="forbid")

    keys: list[str] = []
    families: list[str] = []
    fidelities: list[str] = []
    only_explicit: bool = False
    concept_demos: bool = False


def _check(what: str, wanted: Iterable[str], known: set[str]) -> None:
    for word in wanted:
        if word not in known:
            raise UserError(f"no {what} is called '{word}'.{nearest(word, known)} Known: {', '.join(sorted(known))}.")


def select(adapters: Mapping[str, Adapter], selection: Selection) -> list[str]:
    """Keys of the selected adapters, in alphabetical order.

    Raises `UserError` for an unknown name, and when nothing is selected.
    """
    _check("paper", selection.keys, set(adapters))
    _check("family", selection.families, {a.card.family for a in adapters.values()})
    _check("fidelity", selection.fidelities, set(get_args(Fidelity)))
    kept = []
    for key, adapter in sorted(adapters.items()):
        fidelity = adapter.card.fidelity
        wanted_demo = selection.concept_demos or key in selection.keys or "concept_demo" in selection.fidelities
        if (
            (selection.keys and key not in selection.keys)
            or (selection.families and adapter.card.family not in selection.families)
            or (selection.fidelities and fidelity not in selection.fidelities)
            or (fidelity == "concept_demo" and not wanted_demo)
            or (selection.only_explicit and not scan(adapter).explicit)
        ):
            continue
        kept.append(key)
    if not kept:
        raise UserError("no adapter fits this selection; drop a filter, or see them all with `auto-research list`.")
    return kept


def shard(keys: Iterable[str], shards: int, index: int) -> list[str]:
    """Part `index` of `shards` of a selection: every `shards`-th key in alphabetical order.

    The parts of one selection are disjoint, their union is the selection, their sizes differ by one at most, and
    none depends on the order in which the keys are given.
    """
    if shards < 1:
        raise UserError(f"--shards must be at least 1, got {shards}.")
    if not 0 <= index < shards:
        raise UserError(f"--shard-index must lie in 0..{shards - 1} for --shards {shards}, got {index}.")
    return sorted(set(keys))[index::shards]


def check_overrides(
    adapters: Mapping[str, Adapter], keys: Sequence[str], environ: Mapping[str, str] = os.environ
) -> None:
    """Refuses, before anything runs, an override that one of the adapters does not document."""
    for key in keys:
        Overrides(key, adapters[key].card.overrides, environ, other_keys=adapters)


def scans(adapters: Mapping[str, Adapter], keys: Iterable[str]) -> dict[str, Scan]:
    """The scan of each adapter."""
    return {key: scan(adapters[key]) for key in keys}
