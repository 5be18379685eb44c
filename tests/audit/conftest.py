"""Adapters planted in a temporary package, as an installed package would bring them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from auto_research.papers._registry import Adapter, discover

CARD = """---
key: {key}
title: "{title}"
organisation: Test
published: 2026-01-01
family: {family}
fidelity: {fidelity}
datasets: [ml-latest-small]
overrides: {{{overrides}}}
claim: It runs.
---
A planted adapter.
"""

COMMON = '''
import time
import torch
from auto_research.runtime.device import device_for
from auto_research.study.compare import ComparisonRecord


class Done:
    """The least that a comparison can say."""

    def record(self):
        return ComparisonRecord(
            task="planted", primary="none", lower_is_better=[], baseline="none", steps=1, recipe={}, seeds=[42],
            variants=[], differences=[], clauses=[], verdict="no claim",
        )


def work(device, steps=1):
    """Real optimiser steps on `device`."""
    layer = torch.nn.Linear(64, 64, device=device)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.ones(32, 64, device=device)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
'''

Plant = Callable[..., dict[str, Adapter]]


class Package:
    """A package of planted adapters in `root`, found through its entry point when `root` is on the path."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.folder = root / name
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text("")
        info = root / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[auto_research.papers]\n{name} = {name}\n")

    def add(
        self,
        key: str,
        body: str,
        *,
        title: str = "Planted",
        family: str = "ranking",
        fidelity: str = "core_mechanism",
        overrides: str = "",
        common: str = COMMON,
    ) -> None:
        """One more adapter; `body` defines `run(study)`."""
        module = key.replace("-", "_")
        (self.folder / f"{module}.py").write_text(common + "\n\n" + dedent(body), encoding="utf-8")
        card = CARD.format(key=key, title=title, family=family, fidelity=fidelity, overrides=overrides)
        (self.folder / f"{module}.md").write_text(card, encoding="utf-8")

    def adapters(self) -> dict[str, Adapter]:
        """What the registry finds in it."""
        return {adapter.key: adapter for adapter in discover(self.folder, self.name)}


_count = iter(range(10_000))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """An empty package on the import path; the current folder is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return Package(tmp_path, f"planted{next(_count)}")


PASSING = """
    def run(study):
        device = device_for(study.device)
        with study.stage("train"):
            work(device, steps=study.steps("train", smoke=2, standard=5))
        return Done()
    """
