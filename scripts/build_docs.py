"""Builds the documentation site: the pages of docs/ and one page a paper, drawn from its card and its results."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from auto_research.papers._registry import Adapter, adapters
from auto_research.runtime.records import read_record
from auto_research.study.execute import StudyRecord
from auto_research.study.report import facts as run_facts

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "docs"


def facts(adapter: Adapter) -> str:
    """The card's front matter as a table."""
    card = adapter.card
    rows = [
        ("key", f"`{card.key}`"),
        ("paper", f"[arXiv {card.arxiv}](https://arxiv.org/abs/{card.arxiv})" if card.arxiv else "–"),
        ("organisation", card.organisation),
        ("published", card.published.isoformat()),
        ("fidelity", card.fidelity),
        ("data sets", ", ".join(card.datasets)),
        *((role, ", ".join(names)) for role, names in card.checkpoints.items()),
        *((f"`{card.variable(name)}`", meaning) for name, meaning in card.overrides.items()),
        *((f"option `{name}`", meaning) for name, meaning in card.options.items()),
        ("claim under test", card.claim),
        *(("left out", part) for part in card.omitted),
        *(("chosen here", choice) for choice in card.choices),
    ]
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def recorded(adapter: Adapter) -> StudyRecord | None:
    """The record of the adapter's standard run."""
    result = ROOT / "docs" / "results" / f"{adapter.key}.json"
    return read_record(result, StudyRecord) if result.is_file() else None


def paper_page(adapter: Adapter) -> str:
    """Card, page with its results and, where a standard run was recorded, how it was measured."""
    parts = [f"# {adapter.card.title}", facts(adapter), adapter.page]
    record = recorded(adapter)
    if record is not None:
        parts += ["## How it was measured", run_facts(record)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    papers = SOURCE / "papers"
    papers.mkdir(exist_ok=True)
    index = ["# Papers", "", "| key | title | family | fidelity | standard run |", "| --- | --- | --- | --- | --- |"]
    for key, adapter in adapters().items():
        (papers / f"{key}.md").write_text(paper_page(adapter), encoding="utf-8")
        record = recorded(adapter)
        verdict = record.comparison.verdict if record else "not run yet"
        card = adapter.card
        index.append(f"| [{key}]({key}.md) | {card.title} | {card.family} | {card.fidelity} | {verdict} |")
    (papers / "index.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, SOURCE / name.lower())
    sys.exit(subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
