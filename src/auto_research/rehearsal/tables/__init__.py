"""Rule data generated from the installed torch, one JSON file per torch minor (see :mod:`.generate`)."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent


def minor_of(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Tables:
    """Facts about the CUDA back-end of one torch minor.

    Attributes:
        minor: the torch minor they were generated from.
        pointwise: overloads run by TensorIterator, which admit one 0-dim CPU input.
        unchecked: overloads without a generated device check, for other reasons.
        cpu_only: overloads with a CPU kernel and no CUDA or composite kernel.
        missing_dtypes: per operator, dtypes the CPU has and CUDA lacks.
        emulated_dtypes: per operator, dtypes CUDA has and the CPU lacks.
        autocast: per overload, the CUDA autocast policy.
        nondeterministic: sentences of ``use_deterministic_algorithms`` by operator.
    """

    minor: str
    pointwise: frozenset[str]
    unchecked: frozenset[str]
    cpu_only: frozenset[str]
    missing_dtypes: dict[str, frozenset[torch.dtype]]
    emulated_dtypes: dict[str, frozenset[torch.dtype]]
    autocast: dict[str, str]
    nondeterministic: dict[str, str]


@lru_cache
def load_tables(version: str = torch.__version__) -> Tables:
    """The tables of the installed torch minor; the nearest one, with a loud warning, when it has none."""
    minor = minor_of(version)
    path = _HERE / f"torch_{minor.replace('.', '_')}.json"
    if not path.exists():
        known = sorted(_HERE.glob("torch_*.json"))
        path = known[-1]
        warnings.warn(
            f"The rehearsal has no rule tables for torch {minor}; it uses {path.stem}. Findings may be wrong or "
            "missing. Generate them with `python -m auto_research.rehearsal.tables.generate`, then run the sweeps.",
            RuntimeWarning,
            stacklevel=2,
        )
    raw: dict[str, Any] = json.loads(path.read_text())
    return Tables(
        minor=raw["torch"],
        pointwise=frozenset(raw["pointwise"]),
        unchecked=frozenset(raw["unchecked"]),
        cpu_only=frozenset(raw["cpu_only"]),
        missing_dtypes=_dtypes(raw["missing_dtypes"]),
        emulated_dtypes=_dtypes(raw["emulated_dtypes"]),
        autocast=raw["autocast"],
        nondeterministic=raw["nondeterministic"],
    )


def _dtypes(names: dict[str, list[str]]) -> dict[str, frozenset[torch.dtype]]:
    return {op: frozenset(getattr(torch, dtype) for dtype in dtypes) for op, dtypes in names.items()}
