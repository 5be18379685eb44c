"""The report of one rehearsal: findings, synchronisations, memory, shares; as table, JSON and HTML."""

from __future__ import annotations

from typing import Any

from .rules import Finding
from .session import Session


class Report:
    """What one rehearsal saw. ``findings`` grow while the body runs; the rest is final after :meth:`finish`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.summary: dict[str, Any] = {}

    @property
    def findings(self) -> list[Finding]:
        """Distinct findings in the order they were met."""
        return self._session.recorder.findings

    @property
    def faults(self) -> list[Finding]:
        """Findings that CUDA would raise for (warnings left out)."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def finish(self) -> None:
        """Freeze the counters."""
