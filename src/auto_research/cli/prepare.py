"""`auto-research prepare`: fetch data sets and make checkpoints ready. Calls, then prints one table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import EXIT_CODE, UserError, nearest

if TYPE_CHECKING:
    from rich.progress import Progress


class Row(NamedTuple):
    """One line of the table; `failed` if what was asked for could not be done."""

    name: str
    found: str
    size: str
    licence: str
    status: str
    failed: bool = False


def prepare(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets and checkpoints to make ready.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All data sets and checkpoints.")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Say what is on this machine; fetch nothing.")] = False,
    dataset_dir: Annotated[Path | None, typer.Option(help="Folder of data sets to look in first.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where to keep what is fetched, instead of the cache.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="Also write the data sets as chat messages, which TRL reads, to FOLDER/<name>.")
    ] = None,
) -> None:
    """Fetch data sets and make checkpoints ready. Without names: list what is on this machine."""
    from rich.console import Console

    from auto_research.checkpoints.resolve import CATALOGUE as CHECKPOINTS
    from auto_research.data.catalogue import CATALOGUE as DATASETS

    known = [*DATASETS, *CHECKPOINTS]
    for name in names or []:
        if name not in known:
            raise UserError(
                f"unknown data set or checkpoint {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )
    if cache is not None:
        os.environ[CACHE_VARIABLE] = str(cache)
    fetching = bool(names or everything) and not only_list
    chosen = names or known
    with _progress(shown=fetching) as progress:
        rows = [
            (_dataset if name in DATASETS else _checkpoint)(name, fetching, dataset_dir, progress) for name in chosen
        ]
    console = Console()
    console.print(_table(rows))
    failed = [row for row in rows if row.failed]
    if failed:
        names_failed = ", ".join(row.name for row in failed)
        typer.echo(f"error: not ready: {names_failed}; the table says why.", err=True)
        raise typer.Exit(EXIT_CODE)
    if messages is not None:
        _export(names or [], messages, dataset_dir)
    if not fetching:
        console.print("`auto-research prepare NAME...` fetches what is missing.", highlight=False)


def _export(names: list[str], folder: Path, dataset_dir: Path | None) -> None:
    """Write each data set named as JSON lines of messages, and say where and how many."""
    from auto_research.data.export import EXPORTED, export

    if not names:
        raise UserError(f"--messages needs the names of data sets: {', '.join(EXPORTED)}")
    for name in names:
        for part, (rows, dropped) in export(name, folder / name, dataset_dir).items():
            without = f", {dropped} left out that prefer nothing" if dropped else ""
            typer.echo(f"{folder / name / part}.jsonl: {rows} rows{without}")


def _dataset(name: str, fetching: bool, dataset_dir: Path | None, progress: Progress) -> Row:
    """Find a data set, after fetching it where that was asked for and is needed."""
    from auto_research.data import catalogue
    from auto_research.data.fetch import fetch

    entry = catalogue.entry(name)
    size = "?" if entry.size is None else _bytes(entry.size)
    found = catalogue.find(name, dataset_dir)
    failure = None
    served = found is not None and (
        found.origin == "dataset-dir" or (found.origin == "embedded" and entry.embedded_whole)
    )
    if fetching and not served:
        try:
            fetch(entry, progress=progress)
        except UserError as error:
            failure = str(error)
        found = catalogue.find(name, dataset_dir)
    if found is None:
        return Row(name, "-", size, entry.licence, failure or "not here", failure is not None)
    where = "the package" if found.origin == "embedded" else str(found.path)
    if failure is not None:
        return Row(name, where, size, entry.licence, failure, True)
    if found.origin == "embedded":
        return Row(name, where, size, entry.licence, f"ready: {entry.embedded}")
    differing = entry.differing(found.path)
    status = f"not as published: {', '.join(differing)}" if differing else "ready"
    return Row(name, where, size, entry.licence, status)


def _checkpoint(name: str, fetching: bool, dataset_dir: Path | None, progress: Progress) -> Row:
    """Find a checkpoint, after making it ready where that was asked for."""
    from auto_research.checkpoints import resolve
    from auto_research.data.fetch import is_offline

    licence = resolve.CATALOGUE[name].licence
    if not fetching:
        ready = resolve.available(name)
        return Row(name, "-", "-", licence, "can be made ready here, offline" if ready else "not here")
    task = progress.add_task(name, total=None)
    try:
        resolved = resolve.prepare_checkpoint(name, offline=is_offline())
    except UserError as error:
        return Row(name, "-", "-", licence, str(error), True)
    finally:
        progress.remove_task(task)
    size = _bytes(sum(file.stat().st_size for file in resolved.path.rglob("*") if file.is_file()))
    return Row(name, str(resolved.path), size, licence, f"ready: {resolved.source}, {resolved.revision}")


def _progress(shown: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    )


def _table(rows: list[Row]) -> object:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("name", "found in", "size", "licence", "status"):
        table.add_column(column, no_wrap=column in ("name", "size"), overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row[:5]), style="red" if row.failed else None)
    return table


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
