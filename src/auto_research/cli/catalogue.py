"""`auto-research list` and `auto-research show`: what the cards say. No torch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from auto_research.papers._registry import Adapter, adapter, adapters
from auto_research.runtime.errors import UserError, nearest


def _row(a: Adapter) -> dict[str, Any]:
    card = a.card
    return {
        "key": card.key,
        "title": card.title,
        "organisation": card.organisation,
        "published": card.published.isoformat(),
        "arxiv": card.arxiv,
        "family": card.family,
        "fidelity": card.fidelity,
        "datasets": card.datasets,
        "checkpoints": dict(card.checkpoints),
        "overrides": {card.variable(name): meaning for name, meaning in card.overrides.items()},
        "claim": card.claim,
    }


def _filtered(option: str, wanted: str | None, values: dict[str, set[str]]) -> set[str]:
    """Keys whose values contain `wanted`; an unknown value is an error naming the nearest known one."""
    if wanted is None:
        return set(values)
    known = set().union(*values.values())
    if wanted not in known:
        raise UserError(f"no paper has {option} '{wanted}'.{nearest(wanted, known)} Known: {', '.join(sorted(known))}.")
    return {key for key, found in values.items() if wanted in found}


def list_papers(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Only papers that can use this checkpoint.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only papers that can run on this data set.")] = None,
    fidelity: Annotated[str | None, typer.Option(help="Only this fidelity.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the papers."""
    found = adapters()
    kept = (
        _filtered("family", family, {k: {a.card.family} for k, a in found.items()})
        & _filtered(
            "checkpoint",
            checkpoint,
            {k: {n for names in a.card.checkpoints.values() for n in names} for k, a in found.items()},
        )
        & _filtered("data set", dataset, {k: set(a.card.datasets) for k, a in found.items()})
        & _filtered("fidelity", fidelity, {k: {a.card.fidelity} for k, a in found.items()})
    )
    rows = [_row(found[key]) for key in sorted(kept)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column, width in {"key": 18, "family": 13, "year": 4, "fidelity": 14}.items():
        table.add_column(column, no_wrap=True, min_width=width)
    table.add_column("title", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(row["key"], row["family"], row["published"][:4], row["fidelity"], row["title"])
    console = Console()
    console.print(table)
    console.print(f"{len(rows)} of {len(found)} papers. `auto-research show KEY` opens one.", highlight=False)


def show(
    key: Annotated[str, typer.Argument(help="Key of the paper, as `list` prints it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Show one paper's card and page."""
    found = adapter(key)
    if as_json:
        typer.echo(json.dumps({**found.card.model_dump(mode="json"), "page": found.page}, indent=2))
        return
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console()
    facts = Table(show_header=False, box=None)
    row = _row(found)
    for name in ("key", "title", "organisation", "published", "family", "fidelity", "claim"):
        facts.add_row(name, str(row[name]))
    facts.add_row("paper", f"https://arxiv.org/abs/{row['arxiv']}" if row["arxiv"] else "-")
    facts.add_row("official code", found.card.official_code or "none known")
    facts.add_row("data sets", ", ".join(row["datasets"]))
    for role, names in row["checkpoints"].items():
        facts.add_row(role, ", ".join(names))
    for variable, meaning in row["overrides"].items():
        facts.add_row(variable, meaning)
    for option, meaning in found.card.options.items():
        facts.add_row(f"option {option}", meaning)
    for part in found.card.omitted:
        facts.add_row("left out", part)
    console.print(facts)
    console.print(Markdown(found.page))
