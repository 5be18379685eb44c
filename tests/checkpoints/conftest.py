"""Shared fixtures: the micro checkpoints of this machine, and copies of them that a test may damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from auto_research.checkpoints.resolve import Resolved, resolve


@pytest.fixture(scope="session")
def micro_lm() -> Resolved:
    return resolve("micro-lm")


@pytest.fixture(scope="session")
def micro_encoder() -> Resolved:
    return resolve("micro-encoder")


@pytest.fixture(scope="session")
def micro_vlm() -> Resolved:
    return resolve("micro-vlm")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Resolved], Path]:
    """Copies a checkpoint's folder into the test's own folder."""

    def copy(resolved: Resolved) -> Path:
        return Path(shutil.copytree(resolved.path, tmp_path / resolved.name))

    return copy


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Makes every attempt to connect or to look up a host fail; returns the attempts."""
    import socket

    attempts: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(arguments)
        raise OSError("the network is cut in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts
