"""The facts that go with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

import auto_research
from auto_research.runtime import versions


def test_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    facts = versions.environment()
    assert facts["auto_research"] == auto_research.__version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["HF_HUB_OFFLINE"] == "1"
    assert int(facts["cores"]) == len(os.sched_getaffinity(0))
    assert facts["cpu"]
    assert all(isinstance(value, str) for value in facts.values())


def test_the_commit_is_that_of_the_checkout() -> None:
    here = Path(versions.__file__)
    git = subprocess.run(["git", "-C", str(here.parent), "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode == 0:
        assert versions.environment()["commit"].removesuffix("-modified") == git.stdout.strip()
    else:  # an unpacked copy of the sources
        assert "commit" not in versions.environment()
