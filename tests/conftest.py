"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# No deadline per example: the tests share their cores with other work, and time is not what they test.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
