"""Writes the "Results" section of every card whose standard run is recorded under docs/results.

A test holds cards and records together; run this after `auto-research reproduce ... --results-dir docs/results`.
"""

from __future__ import annotations

import re
from pathlib import Path

from auto_research.papers._registry import adapters
from auto_research.runtime.records import read_record, write_text_atomic
from auto_research.study.execute import StudyRecord
from auto_research.study.report import results_section

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def with_results(card: str, section: str) -> str:
    """The card's text with its results section replaced, or put before "What is simplified", or at the end."""
    card = re.sub(r"\n## Results\n.*?(?=\n## |\Z)", "\n", card, flags=re.DOTALL).rstrip() + "\n"
    head, mark, tail = card.partition("\n## What is simplified\n")
    return f"{head.rstrip()}\n\n{section}\n" + (f"\n{mark.lstrip()}{tail}" if mark else "")


def main() -> None:
    for key, found in adapters().items():
        result = RESULTS / f"{key}.json"
        if result.is_file():
            text = found.card_path.read_text(encoding="utf-8")
            write_text_atomic(found.card_path, with_results(text, results_section(read_record(result, StudyRecord))))


if __name__ == "__main__":
    main()
