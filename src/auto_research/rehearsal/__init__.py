"""A virtual CUDA device for PyTorch on a CPU-only build.

Run code written for CUDA on a machine without a card and list the faults a card would show::

    from auto_research.rehearsal import rehearse

    with rehearse(card="a30", keep_going=True) as report:
        train(device="cuda")
    for finding in report.findings:
        print(finding.text())

or, for a script that knows nothing of us: ``python -m auto_research.rehearsal train.py ARGS...``.
"""

from .api import rehearse
from .memory import CARDS, Card
from .report import Report
from .rules import RULES, Finding, Rule

__all__ = ["CARDS", "RULES", "Card", "Finding", "Report", "Rule", "rehearse"]
