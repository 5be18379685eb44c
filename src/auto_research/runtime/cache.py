"""Where this machine keeps what can be made again: downloads, converted and micro checkpoints, vectors."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "AUTO_RESEARCH_CACHE"
"""Environment variable that moves the cache; the default is the platform's, ``~/.cache/auto-research`` on Linux."""


def cache_folder(*parts: str) -> Path:
    """Path of a folder inside the cache (not created), e.g. ``cache_folder("checkpoints", "micro-lm")``.

    The environment is read at every call, so that a test or a worker can move the cache.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return Path(configured).expanduser().joinpath(*parts)
    from platformdirs import user_cache_path

    return user_cache_path("auto-research").joinpath(*parts)
