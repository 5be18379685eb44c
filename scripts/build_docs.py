"""Builds the documentation site: the pages of docs/ and one page a paper, drawn from its card and its results."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from auto_research.papers._registry import Adapter, adapters
from auto_research.runtime.records import read_record
from auto_research.study.execute import StudyRecord
from auto_research.study.report import markdown

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


def paper_page(adapter: Adapter) -> str:
    """Card, page and, where a standard run was recorded, its results."""
    parts = [f"# {adapter.card.title}", facts(adapter), adapter.page]
    result = ROOT / "docs" / "results" / f"{adapter.key}.json"
    if result.is_file():
        body = markdown(read_record(result, StudyRecord)).split("\n", 2)[2]
        parts += ["## Recorded run", body]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    papers = SOURCE / "papers"
    papers.mkdir(exist_ok=True)
    index = ["# Papers", "", "| key | title | family | fidelity |", "| --- | --- | --- | --- |"]
    for key, adapter in adapters().items():
        (papers / f"{key}.md").write_text(paper_page(adapter), encoding="utf-8")
        index.append(f"| [{key}]({key}.md) | {adapter.card.title} | {adapter.card.family} | {adapter.card.fidelity} |")
    (papers / "index.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, SOURCE / name.lower())
    sys.exit(subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
