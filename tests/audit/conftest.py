"""Adapters planted in a temporary package, as an installed package would bring them."""

from __future__ import annotations

import importlib
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from auto_research.audit.record import (
    AdapterResult,
    AuditRecord,
    AuditSettings,
    DeviceCall,
    DeviceCounts,
    StageResult,
)
from auto_research.audit.scan import Site
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


EVIL = "<script>alert('x')</script> | `*_[link](javascript:x)` \x1b[31m\x00 ]]> & é"


def result(key: str, status: str, **changes: Any) -> AdapterResult:
    """A result as an audit writes it."""
    passed = status.endswith("_pass")
    fields: dict[str, Any] = {
        "key": key,
        "title": f"Title of {key}",
        "family": "ranking",
        "status": status,
        "reason": "cpu did 100.0% of the compute (flops)" if passed else f"it is {status}",
        "declared_fidelity": "core_mechanism",
        "fidelity": "core_mechanism" if passed else None,
        "explicit": True,
        "sites": [Site(file="papers/ranking/x.py", line=12, chain=["run", "device_for"])],
        "started": "2026-01-01T00:00:00Z",
        "seconds": 12.5,
        "attempt": 1,
        "calls": [
            DeviceCall(
                requested="cpu",
                resolved="cpu",
                file="papers/ranking/x.py",
                line=12,
                function="run",
                time=1.0,
                pid=7,
                count=2,
            )
        ]
        if passed
        else [],
        "share": 1.0 if passed else None,
        "measure": "flops" if passed else None,
        "work": {"cpu": DeviceCounts(operations=1234, elements=10**7, flops=10**10, bytes=10**8)} if passed else {},
        "peak_bytes": {},
        "peak_rss_bytes": 10**9,
        "stages": [StageResult(name="train", trains=True, seconds=1.0, optimiser_steps=20)],
        "seeds": [42],
        "settings": {"train steps": 20},
        "overrides": {},
        "data": {"ml-latest-small": "ab"},
        "checkpoints": {},
        "notes": [],
        "diagnosis": None,
        "exit_code": 0,
        "signal": None,
        "log": f"runs/audit/{key}.log",
        "evidence": f"runs/audit/{key}.evidence.jsonl",
    }
    return AdapterResult(**{**fields, **changes})


def record_of(results: list[AdapterResult], **changes: Any) -> AuditRecord:
    """A finished audit with these results."""
    settings = AuditSettings(device="auto", resolved_device="cpu", budget="smoke", seeds=[], timeout_seconds=600.0)
    keys = sorted(r.key for r in results)
    fields: dict[str, Any] = {
        "settings": settings,
        "environment": {"python": "3.11", "torch": "2.13.0"},
        "started": "2026-01-01T00:00:00+00:00",
        "updated": "2026-01-01T00:10:00+00:00",
        "selected": keys,
        "planned": keys,
    }
    return AuditRecord(**{**fields, **changes}).with_results(results, "2026-01-01T00:10:00+00:00")
