"""Small files in the official formats."""

from pathlib import Path
from typing import Protocol

import pytest


class Write(Protocol):
    def __call__(self, name: str, content: str | bytes) -> Path: ...


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file into `tmp_path` exactly as given, text as UTF-8."""

    def writer(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return writer
