"""`auto-research list` and `auto-research show`: what the cards say. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from auto_research.papers._registry import Adapter, adapter, adapters
from auto_research.runtime.budget import variable_name
from auto_research.runtime.errors import UserError, nearest


def _row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is listed of a paper, from the fields of its front matter."""
    key = fields["key"]
    return {
        "key": key,
        "title": fields["title"],
        "organisation": fields["organisation"],
        "published": str(fields["published"]),
        "arxiv": fields.get("arxiv"),
        "family": fields["family"],
        "fidelity": fields["fidelity"],
        "datasets": list(fields["datasets"]),
        "checkpoints": dict(fields.get("checkpoints") or {}),
        "overrides": {variable_name(key, name): meaning for name, meaning in (fields.get("overrides") or {}).items()},
        "claim": fields["claim"],
    }


def _listed(a: Adapter) -> dict[str, Any]:
    """The row of a card that may never have been validated: loading pydantic would take most of `list`'s time."""
    try:
        return _row(a.front)
    except (KeyError, TypeError, ValueError, AttributeError):
        return _row(a.card.model_dump())  # raises what is wrong with the card


def _filtered(option: str, wanted: str | None, values: dict[str, set[str]]) -> set[str]:
    """Keys whose values contain `wanted`; an unknown value is an error naming the nearest known one."""
    if wanted is None:
        return set(values)
    used = set().union(*values.values())
    known = used if wanted in used else used | _possible(option)
    if wanted not in known:
        raise UserError(f"no paper has {option} '{wanted}'.{nearest(wanted, known)} Known: {', '.join(sorted(known))}.")
    return {key for key, found in values.items() if wanted in found}


def _possible(option: str) -> set[str]:
    """Values that a card may have, whether or not one has it; imported only when no card has the one asked for."""
    from typing import get_args

    from auto_research.checkpoints import resolve
    from auto_research.data import catalogue
    from auto_research.study.card import Fidelity

    possible = {
        "fidelity": get_args(Fidelity),
        "data set": tuple(catalogue.CATALOGUE),
        "checkpoint": tuple(resolve.CATALOGUE),
    }
    return set(possible.get(option, ()))


def list_papers(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Only papers that can use this checkpoint.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only papers that can run on this data set.")] = None,
    fidelity: Annotated[str | None, typer.Option(help="Only this fidelity.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the papers."""
    rows = {a.key: _listed(a) for a in adapters().values()}
    kept = (
        _filtered("family", family, {key: {row["family"]} for key, row in rows.items()})
        & _filtered(
            "checkpoint",
            checkpoint,
            {key: {name for names in row["checkpoints"].values() for name in names} for key, row in rows.items()},
        )
        & _filtered("data set", dataset, {key: set(row["datasets"]) for key, row in rows.items()})
        & _filtered("fidelity", fidelity, {key: {row["fidelity"]} for key, row in rows.items()})
    )
    shown = [rows[key] for key in sorted(kept)]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    columns = ("key", "family", "year", "fidelity", "title")
    cells = [columns, *((r["key"], r["family"], r["published"][:4], r["fidelity"], r["title"]) for r in shown)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns) - 1)]
    room = max(shutil.get_terminal_size().columns - sum(widths) - 2 * len(widths), 20)
    for *fixed, title in cells:
        short = title if len(title) <= room else title[: room - 1] + "…"
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(fixed, widths, strict=True)), short]))
    typer.echo(f"\n{len(shown)} of {len(rows)} papers. `auto-research show KEY` opens one.")


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
    row = _row(found.card.model_dump())
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
